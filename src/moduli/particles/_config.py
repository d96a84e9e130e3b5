"""Configurations of parameters: choosing them by name, and keeping them in state dicts."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ._record import Unborn, record_of
from ._species import current, kernel_of, version_of
from .base import NytoModuleBase
from .mtype import ParamConfig, ParamID

__all__ = ["KEY", "configure", "restore", "saved", "selected"]

KEY = "param_config"
"""Where the metadata of a state dict holds configurations."""


def configure(module: NytoModuleBase, fn: Callable[[ParamID, ParamConfig], None], name: str | None) -> None:
    """Call a function on the configurations of the parameters of a module that have a name, or of all.

    Raises:
        ValueError: If no parameter has the name.
    """
    root = module._particle_root
    current(root)
    version = version_of(root)
    own = {id(param): pid for pid, param in kernel_of(root).data.params.items()}
    chosen: dict[ParamID, None] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        if id(param) in own and selected(path, name):
            chosen[own[id(param)]] = None
    if not chosen and name is not None:
        raise ValueError(
            f"{type(module).__name__} has no parameters called {name!r} to configure; it has "
            f"{', '.join(n for n, _ in module.named_parameters()) or 'none'}"
        )
    version.data.species.configured = True
    for pid in sorted(chosen):
        fn(pid, version.data.config[pid])


def selected(path: str, name: str | None) -> bool:
    """Whether a dotted name is that of an attribute, is below it, or matches it as a pattern."""
    return name is None or path == name or path.startswith(f"{name}.") or fnmatchcase(path, name)


def saved(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The configurations of a particle that are not the default, by name, as plain values."""
    version = record_of(module).version
    if version is None or (isinstance(version, Unborn) and version.version is None and not version.config):
        return {}
    data = version_of(module).data
    if not data.species.configured:
        return {}
    return {data.names[pid]: dict(config.__dict__) for pid, config in data.config.items() if config != ParamConfig()}


def restore(module: nn.Module, found: dict[str, dict[str, Any]]) -> None:
    """Give parameters without a configuration of their own the one that a state dict holds for their names."""
    data = version_of(module).data
    names = {name: pid for pid, name in data.names.items()}
    for name, values in found.items():
        pid = names.get(name)
        if pid is not None and data.config[pid] == ParamConfig():
            data.config[pid].__dict__.update(values)
            data.species.configured = True
