"""Settings of a link for each parameter: its own groups, then the optimizer's groups, then its defaults; who shares them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from .._torch import is_fake
from ._arguments import Schedule, as_schedule

if TYPE_CHECKING:
    from .module import Module


_MISSING = object()


def check_number(where: str, key: str, value: Any) -> None:
    """Refuse a NaN, the one number that no setting can mean."""
    numbers: Iterable[Any] = value if isinstance(value, tuple | list) else (value,)
    for number in numbers:
        bad = isinstance(number, float) and math.isnan(number)
        if isinstance(number, Tensor) and number.is_floating_point() and number.numel() and not is_fake(number):
            bad = bool(number.detach().isnan().any())
        if bad:
            raise ValueError(f"{where}: {key} is NaN; give a number")


def check_members(where: str, settings: Mapping[str, Any], members: int | None) -> None:
    """Refuse a tensor that is not one number for each member."""
    for key, value in settings.items():
        if members is None or not is_per_member(value):
            continue
        if value.dtype is torch.bool:
            raise ValueError(f"{where}: {key} is a choice, not a number; make it once for all {members} members")
        if value.shape != (members,):
            found = f"{len(value)} numbers" if value.dim() == 1 else f"the shape {tuple(value.shape)}"
            raise ValueError(
                f"{where}: {key} has {found} for {members} members; give one for each member, or one number"
            )


def current(resolved: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """Settings with schedules evaluated at this step and 0-d tensors on the host read; the same object where there are none."""
    changed: dict[str, Any] | None = None
    for key, value in resolved.items():
        kind = type(value)
        if kind is float or kind is int or kind is bool or kind is str or value is None:
            continue
        new = value(step) if isinstance(value, Schedule) else value
        # In a step that is differentiated it stays a tensor, and so does one on a device: to read it is to wait.
        if isinstance(new, Tensor) and not (
            new.dim() or torch.is_grad_enabled() or new.device.type != "cpu" or is_fake(new)
        ):
            new = new.item()
        if new is not value:
            changed = dict(resolved) if changed is None else changed
            changed[key] = new
    return resolved if changed is None else changed


class Binding:
    """Shared by an optimizer and all of its links."""

    def __init__(self) -> None:
        self.group_of: dict[Tensor, int] = {}
        self.names: dict[Tensor, str] = {}
        self.sources: dict[Tensor, Tensor] = {}
        self.step = 0
        self.members: int | None = None
        self.member: int | None = None
        self.fuse = True
        self.draws_alike = False
        self.in_pieces = False

    def source(self, param: Tensor) -> Tensor:
        """The parameter that a stand-in (a concatenation, a projection) was made from; itself otherwise."""
        if not self.sources:
            return param
        seen = param
        while (found := self.sources.get(seen)) is not None:
            seen = found
        return seen


@dataclass(eq=False, slots=True)
class _Resolved:
    """The settings in force for the parameters of one group (and one local group of the link)."""

    group: int
    local: dict[str, Any] | None
    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


class Settings:
    """`link.settings`: maps a parameter to the settings in force for it.

    Three layers, the first that has the key wins: groups given to the link (`set_param_groups`), groups of the
    optimizer (where schedulers write), and the link's defaults.

    Example:
        >>> import torch
        >>> from moduli import m
        >>> link, p = m.LR(0.1), torch.zeros(2)
        >>> link.set_param_groups([{"params": [p], "lr": 0.5}]).settings[p]["lr"], link.settings[torch.ones(1)]["lr"]
        (0.5, 0.1)
    """

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.local: dict[Tensor, dict[str, Any]] = {}
        self.overrides: list[dict[str, Any]] = []
        self.binding: Binding | None = None
        self.shown: dict[Tensor, Mapping[str, Any]] = {}
        self._resolved: dict[tuple[int, int], _Resolved] = {}

    def __getitem__(self, param: Tensor) -> Mapping[str, Any]:
        if self.shown and param in self.shown:
            return self.shown[param]
        found = current(self._resolve_for(param).values, 0 if self.binding is None else self.binding.step)
        i = None if self.binding is None else self.binding.member
        if i is not None and any(is_per_member(value) for value in found.values()):
            return {key: value[i].item() if is_per_member(value) else value for key, value in found.items()}
        return found

    def raw(self, param: Tensor) -> dict[str, Any]:
        """The same, with schedules not yet evaluated; parameters with equal settings share one dictionary."""
        return self._resolve_for(param).values

    def _resolve_for(self, param: Tensor) -> _Resolved:
        group, local = -1, self.local.get(param) if self.local else None
        if self.binding is not None:
            source = self.binding.source(param) if self.binding.sources else param
            group = self.binding.group_of.get(source, -1)
            if local is None and self.local and source is not param:
                local = self.local.get(source)
        key = (group, id(local))
        known = self._resolved.get(key)
        if known is None:
            known = self._resolved[key] = _Resolved(group, local)
            self._fill(known)
        # They are public, and may be changed by hand. Every step asks, so this is written to run in C.
        elif known.defaults.keys() != self.defaults.keys() or not all(
            map(operator.is_, known.defaults.values(), self.defaults.values())
        ):
            self._fill(known)
        return known

    def are_per_member(self) -> bool:
        """Whether any of them is one number for each member of a population."""
        layers: list[dict[str, Any]] = [self.defaults, *self.overrides, *self.local.values()]
        return any(is_per_member(value) for layer in layers for value in layer.values())

    def _fill(self, known: _Resolved) -> None:
        # In place: a fused run holds the dictionary and sees the new numbers.
        layer = self.overrides[known.group] if 0 <= known.group < len(self.overrides) else {}
        known.defaults = dict(self.defaults)
        fresh = {**self.defaults, **layer, **(known.local or {})}
        for key in [key for key in known.values if key not in fresh]:
            del known.values[key]
        known.values.update(fresh)

    def refresh(self) -> None:
        """Take over new values of the optimizer's groups; dictionaries stay the same objects."""
        for known in self._resolved.values():
            self._fill(known)

    def forget(self) -> None:
        """Resolve anew at the next use: who shares settings with whom may have changed."""
        self._resolved.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resolved": {}}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether options are unchanged; tensors by identity."""
    if len(a) != len(b):
        return False
    for key, value in a.items():
        other = b.get(key, _MISSING)
        if value is other:
            continue
        if isinstance(value, Tensor) or isinstance(other, Tensor) or value != other:
            return False
    return True


def is_per_member(value: Any) -> bool:
    """Whether a setting is a tensor with one number per member of a population."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


class LinkSettings:
    """Settings of a link; the attributes are described in `Module`."""

    vector_state: bool = False
    shared_settings: ClassVar[bool | tuple[str, ...]] = ()
    fixed_settings: ClassVar[tuple[str, ...]] = ()
    divides_params: ClassVar[bool] = False
    aliases: ClassVar[dict[str, tuple[str, ...]]] = {}
    defaults: dict[str, Any]
    settings: Settings
    children: dict[str, Module]
    _owner: Callable[[], Any] | None

    def set_param_groups(self, param_groups: Iterable[Mapping[str, Any]]) -> Self:
        """Settings of this link for some parameters; they come before the optimizer's groups.

        Args:
            param_groups: Dictionaries with "params" (a tensor, or tensors) and settings.

        Returns:
            This link.
        """
        name, binding = type(self).__name__, self.settings.binding
        groups = [dict(param_groups)] if isinstance(param_groups, Mapping) else [dict(group) for group in param_groups]
        for group in groups:
            if "params" not in group:
                raise ValueError(f"{name}: a group needs 'params', the parameters it is for")
            for key, value in group.items():
                if key != "params" and key not in self.defaults and key not in self.aliases:
                    raise ValueError(f"{name} has no setting {key!r}; it has {', '.join(self.defaults) or 'none'}")
                check_number(name, key, value if key != "params" else 0)
            check_members(name, group, None if binding is None else binding.members)
        for group in groups:
            tensors = group.pop("params")
            for param in [tensors] if isinstance(tensors, Tensor) else list(tensors):
                found = param[1] if isinstance(param, tuple) else param
                self.settings.local[found] = {**self.settings.local.get(found, {}), **self.resolve_aliases(group)}
        self.settings.forget()
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.relink()
        return self

    def check_shared(self, params: Sequence[Tensor], every: bool = False) -> None:
        """Refuse groups that give this link or one inside it two values of a setting that has one for all parameters.

        Args:
            params: The parameters that it sees.
            every: Whether it sees them as one tensor, so that there is one value of every setting.
        """
        if not self.divides_params:
            for child in self.children.values():
                child.check_shared(params, every)
        if not (every or self.shared_settings or self.vector_state or self.fixed_settings) or not params:
            return
        name = type(self).__name__
        first, *others = {id(raw): raw for raw in map(self.settings.raw, params)}.values()
        for key in self.fixed_settings:
            changed = next(
                (raw[key] for raw in (first, *others) if not same({key: raw[key]}, {key: self.defaults[key]})), _MISSING
            )
            if changed is not _MISSING:
                raise ValueError(
                    f"a group sets {key}={changed!r}, but {name} was made with {self.defaults[key]!r}, which can't be changed; "
                    f"say {name}({key}={changed!r})"
                )
        whole = every or self.vector_state or self.shared_settings is True
        for key in tuple(self.defaults) if whole else self.shared_settings or ():  # type: ignore[union-attr]
            for other in others:
                if key in first and not same({key: first[key]}, {key: other[key]}):
                    raise ValueError(
                        f"{name} has one value of {key} for all parameters that it sees, but groups give it "
                        f"{first[key]!r} and {other[key]!r}; give one, or use m.Split to let it see some of them"
                    )

    def resolve_aliases(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under their own names (`betas=(0.9, 0.99)` is beta1 and beta2)."""
        out: dict[str, Any] = {}
        for key, value in group.items():
            if key in self.aliases:
                names = self.aliases[key]
                out.update(zip(names, value if len(names) > 1 else (value,), strict=True))
            else:
                out[key] = as_schedule(value, self.defaults.get(key))
        return out

    def get_settings(self, params: Sequence[Tensor], key: Any, *more: str, cls: type = list) -> Any:
        """Values of one setting for each parameter; for several keys, one list for each."""
        rows = [self.settings[param] for param in params]
        if isinstance(key, str) and not more:
            return cls(row[key] for row in rows)
        keys = ([key] if isinstance(key, str) else list(key)) + list(more)
        return [cls(row[name] for row in rows) for name in keys]
