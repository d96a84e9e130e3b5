"""Settings of a link for each parameter: its own groups, then the optimizer's groups, then its defaults."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_fake
from ._arguments import Schedule

if TYPE_CHECKING:
    from ._binding import Binding


_PLAIN = frozenset({float, int, bool, str, type(None)})


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
        if isinstance(value, Tensor):
            # In a step that is differentiated it stays a tensor, and so does one on a device: to read it is to wait.
            if value.dim() != 0 or torch.is_grad_enabled() or value.device.type != "cpu" or is_fake(value):
                continue
            value = value.item()
        elif isinstance(value, Schedule):
            value = value(step)
            here = isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu" and not is_fake(value)
            if here and not torch.is_grad_enabled():
                value = value.item()
        else:
            continue
        changed = dict(resolved) if changed is None else changed
        changed[key] = value
    return resolved if changed is None else changed


class _Resolved:
    """The settings in force for the parameters of one group (and one local group of the link)."""

    __slots__ = ("defaults", "fixed", "group", "local", "values")

    def __init__(self, group: int, local: dict[str, Any] | None) -> None:
        self.group = group
        self.local = local
        self.values: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.fixed = False


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
        known = self._resolve_for(param)
        found: Mapping[str, Any] = known.values
        if known.fixed:
            return found
        if self.binding is None:
            return current(found, 0)
        found = current(found, self.binding.step)
        if self.binding.member is not None and any(is_per_member(value) for value in found.values()):
            i = self.binding.member
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
        elif not _is_unchanged(known.defaults, self.defaults):  # they are public, and may be changed by hand
            self._fill(known)
        return known

    def raw_of_all(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The same for many parameters, with one look at each group."""
        binding = self.binding
        if self.local or binding is None:
            return [self.raw(param) for param in params]
        group_of, source = binding.group_of, binding.source
        found: dict[int, dict[str, Any]] = {}
        out = []
        for param in params:
            group = group_of.get(source(param), -1)
            values = found.get(group)
            if values is None:
                values = found[group] = self.raw(param)
            out.append(values)
        return out

    def _fill(self, known: _Resolved) -> None:
        # In place: a fused run holds the dictionary and sees the new numbers.
        layer = self.overrides[known.group] if 0 <= known.group < len(self.overrides) else {}
        known.defaults = dict(self.defaults)
        fresh = {**self.defaults, **layer, **(known.local or {})}
        for key in [key for key in known.values if key not in fresh]:
            del known.values[key]
        known.values.update(fresh)
        known.fixed = all(type(value) in _PLAIN for value in fresh.values())

    def refresh(self) -> None:
        """Take over new values of the optimizer's groups; dictionaries stay the same objects."""
        for known in self._resolved.values():
            self._fill(known)

    def forget(self) -> None:
        """Resolve anew at the next use: who shares settings with whom may have changed."""
        self._resolved.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resolved": {}}


def _is_unchanged(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    # Every step asks, so this is written to run in C. An equal value that is another object only costs a refill.
    return old.keys() == new.keys() and all(map(operator.is_, old.values(), new.values()))


def is_per_member(value: Any) -> bool:
    """Whether a setting is a tensor with one number per member of a population."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
