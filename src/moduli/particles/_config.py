"""Configurations of parameters: choosing them by name, and keeping them in state dicts.

A parameter or buffer is chosen by a registered name, the public name of a labelled tensor, or a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from moduli.nn import TENSOR_BUFFER_PREFIX, TENSOR_PARAM_PREFIX

from ._record import record_of
from .mtype import ParamConfig, ParamID

if TYPE_CHECKING:
    from .base import NytoModuleBase


CONFIG_KEY = "param_config"
"""Where the metadata of a state dict holds configurations."""


def configure(module: NytoModuleBase, fn: Callable[[ParamID, ParamConfig], None], name: str | None) -> None:
    """Call a function on the configurations of the parameters of a module that have a name, or of all.

    Raises:
        ValueError: If no parameter has the name.
    """
    from ._species import bring_up, kernel_of

    root = module._particle_root
    bring_up(root)
    kernel = kernel_of(root)
    own = {id(param): pid for pid, param in kernel.data.params.items()}
    chosen: dict[ParamID, None] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        if id(param) in own and is_selected(path, name):
            chosen[own[id(param)]] = None
    if not chosen and name is not None:
        refuse(type(module).__name__, "parameters", name, [n for n, _ in module.named_parameters()])
    kernel.version.data.species.configured = True
    for pid in sorted(chosen):
        fn(pid, kernel.version.data.config[pid])


def add_rule(module: NytoModuleBase, changes: dict[str, bool], name: str | None) -> None:
    """Note a configuration by name, for what will have the name after an edit."""
    from ._species import version_of

    root = module._particle_root
    prefix = next(path for path, each in root.named_modules() if each is module)
    pattern = ".".join(part for part in (prefix, name) if part) or "*"
    version_of(root).data.species.rules.append((pattern, changes))


def collect_configs(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The configurations of a particle that are not the default, by name, as plain values."""
    from ._species import version_of

    version = record_of(module).version
    if version is None or not version.data.species.configured:
        return {}
    data = version_of(module).data
    return {data.names[pid]: dict(config.__dict__) for pid, config in data.config.items() if config != ParamConfig()}


def restore_configs(module: nn.Module, found: dict[str, dict[str, Any]]) -> None:
    """Give parameters without a configuration of their own the one that a state dict holds for their names."""
    from ._species import version_of

    data = version_of(module).data
    names = {name: pid for pid, name in data.names.items()}
    for name, values in found.items():
        pid = names.get(name)
        if pid is not None and data.config[pid] == ParamConfig():
            data.config[pid].__dict__.update(values)
            data.species.configured = True


# -- names -----------------------------------------------------------------------------------------------------------


def public_name(name: str) -> str:
    """The name under which a labelled tensor is assigned and read; other names are their own."""
    path, dot, last = name.rpartition(".")
    return path + dot + last.removeprefix(TENSOR_PARAM_PREFIX).removeprefix(TENSOR_BUFFER_PREFIX)


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name, or its public form, matches one of the patterns."""
    public = public_name(name)
    return any(fnmatchcase(name, pattern) or fnmatchcase(public, pattern) for pattern in patterns)


def is_selected(path: str, name: str | None) -> bool:
    """Whether a dotted name is that of an attribute, is below it, or matches it as a pattern."""
    return name is None or path.startswith(f"{name}.") or fits(path, [name])


def refuse(kind: str, what: str, pattern: str, names: Iterable[str]) -> NoReturn:
    """Say that nothing has a name.

    Raises:
        ValueError: Always.
    """
    listed = ", ".join(map(public_name, names)) or "none"
    raise ValueError(f"{kind} has no {what} called {pattern!r}; it has {listed}")
