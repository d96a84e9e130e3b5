"""Optimizer classes from chains, for trainers that need a class and its arguments."""

from __future__ import annotations

import copy
import copyreg
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ._groups import is_known, named_parameters
from .chain import flatten
from .module import Chainable, Module
from .optimizer import Optimizer

__all__ = ["bind"]

_OPTIONS = frozenset(inspect.signature(Optimizer.__init__).parameters) - {"self", "params", "modules"}


def bind(*chain: Chainable | Callable[..., Any], **settings: Any) -> type[Optimizer]:
    """Return a class of optimizers with this chain: `cls(params, **settings)`, as trainers construct their optimizers.

    Trainers split parameters into those that decay and those that do not, with "weight_decay" in each group: a preset that takes
    a weight decay gets one if a group has it, and a decay of 0 is ignored by a chain without one. If the argument `model=net` is
    passed to the class, parameters are named as in this module, and links know their layers (Muon treats embeddings and heads
    differently). The class, and its optimizers, can be pickled if the chain can.

    Args:
        *chain: A function that returns links, such as a preset, which is called with the settings; or links, of which each
            optimizer gets copies, and whose settings of these names are changed.
        **settings: Default settings; arguments of the class have priority. Arguments of `Optimizer` (`axes`, `master`, `fuse`)
            are passed to it, all others to the chain.

    Raises:
        TypeError: There is no chain.

    Example:
        >>> import torch
        >>> from moduli import m, optim, presets
        >>> net = torch.nn.Linear(2, 1)
        >>> optim.bind(presets.adamw, weight_decay=0.1)(net.parameters(), lr=1e-3)
        Optimizer(Adam(beta1=0.9, beta2=0.999, eps=1e-08, alpha=1.0, amsgrad=False, debias=True), \
WeightDecay(weight_decay=0.1, ord=2), LR(lr=0.001))
        >>> optim.bind(m.ClipNorm(1.0), m.Lion(), m.LR(1e-4))(net.parameters(), lr=0.01).param_groups[0]["lr"]
        0.01
    """
    if not chain:
        raise TypeError(
            "bind takes a preset or links: bind(presets.adamw), bind(m.ClipNorm(1.0), m.Adam(), m.LR(1e-3))"
        )
    is_function = _is_function(chain[0])
    if is_function and len(chain) > 1:
        raise TypeError("bind takes one function that returns links, or links; call the function for its links")

    class BoundOptimizer(Optimizer, metaclass=_BoundType):
        __doc__ = f"An optimizer with the chain that `bind` was given: {_describe(chain)}."
        bound = (chain, settings)

        def __init__(self, params: Any, *, model: torch.nn.Module | None = None, **given: Any) -> None:
            every = {**settings, **given}
            options = {key: every.pop(key) for key in _OPTIONS & every.keys()}
            if is_function:
                make: Any = chain[0]
                links, params = _make_links(make, every, params)
            else:
                links = list(flatten(copy.deepcopy(chain)))
                _change_settings(links, every)
            params = _drop_zero_decay(params, links)
            super().__init__(params if model is None else _name_params(params, model), *links, **options)
            self.model = self.model or model

    BoundOptimizer.__name__ = BoundOptimizer.__qualname__ = f"{_describe(chain)}Optimizer"
    return BoundOptimizer


class _BoundType(type):
    """The type of the classes that `bind` returns. No module has these under a name, so they are pickled as their chain."""

    bound: tuple[tuple[Any, ...], dict[str, Any]]


def _rebuild_class(chain: tuple[Any, ...], settings: Mapping[str, Any]) -> type[Optimizer]:
    return bind(*chain, **settings)


def _reduce_class(cls: _BoundType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _rebuild_class, cls.bound


copyreg.pickle(_BoundType, _reduce_class)


def _list_groups(params: Any) -> list[dict[str, Any]]:
    """Return the groups in an optimizer's argument; none for parameters or a model."""
    return [each for each in params if isinstance(each, dict)] if isinstance(params, list | tuple) else []


def _make_links(make: Callable[..., Any], settings: Mapping[str, Any], params: Any) -> tuple[list[Module], Any]:
    """Return the links of a function, and the groups; arguments that only groups set, such as a weight decay, add links."""
    links = list(flatten([make(**settings)]))
    groups = _list_groups(params)
    taken = inspect.signature(make).parameters
    missing = {
        key: value
        for group in reversed(groups)
        for key, value in group.items()
        if key in taken and key not in settings and not is_known(key, _list_every(links)) and value
    }
    if not missing:
        return links, params
    defaults = {key: taken[key].default for key in missing}
    return list(flatten([make(**settings, **missing)])), [{**defaults, **group} for group in groups]


def _drop_zero_decay(params: Any, links: Sequence[Module]) -> Any:
    """Return groups without weight decays of 0 if no link has any: trainers write them into every group."""
    groups = _list_groups(params)
    if is_known("weight_decay", _list_every(links)) or not any("weight_decay" in group for group in groups):
        return params
    return [{key: value for key, value in group.items() if key != "weight_decay" or value} for group in groups]


def _name_params(params: Any, model: torch.nn.Module) -> Any:
    """Return parameters, or groups of them, as pairs with their names in a module."""
    if isinstance(params, torch.nn.Module):
        return params
    names = {id(param): name for name, param in named_parameters(model)}

    def name(items: Any) -> list[Any]:
        items = [items] if isinstance(items, torch.Tensor) else list(items)
        if any(not isinstance(item, tuple) and id(item) not in names for item in items):
            raise ValueError("a parameter of the optimizer is none of the module given as model=")
        return [item if isinstance(item, tuple) else (names[id(item)], item) for item in items]

    items: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    if items and isinstance(items[0], dict):
        return [{**group, "params": name(group["params"])} for group in items]
    return name(items)


def _list_every(links: Sequence[Module]) -> list[Module]:
    """Return links and the links inside them."""
    return [link for top in links for _, link in top.links()]


def _is_function(chain: Any) -> bool:
    """Return whether an argument of `bind` is a function that returns links, such as a preset."""
    return callable(chain) and not isinstance(chain, Module) and not isinstance(chain, type)


def _describe(chain: tuple[Any, ...]) -> str:
    """Return the first part of a class name for a chain, such as "ClipNormAdamLR"."""
    names = [each.__name__ if _is_function(each) else type(each).__name__ for each in chain]
    return "".join(name[:1].upper() + name[1:] for name in names)


def _change_settings(links: Sequence[Module], settings: Mapping[str, Any]) -> None:
    """Change settings of copied links; raise TypeError for a name that none of them has."""
    every = _list_every(links)
    accepted = {key for link in every for key in (*link.defaults, *link.aliases)}
    unknown = [key for key in settings if key not in accepted]
    if unknown:
        raise TypeError(f"no link has a setting {unknown[0]!r}; the chain has {', '.join(sorted(accepted))}")
    for link in every:
        own = {key: value for key, value in settings.items() if key in link.defaults}
        for key in link.aliases.keys() & settings.keys():
            own |= link.resolve_aliases({key: settings[key]})
        for key, value in own.items():
            link.check_setting(key, value)
            link.defaults[key] = value
