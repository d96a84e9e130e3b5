"""Settings of a link for each parameter: the link's own groups, then the optimizer's groups, then its defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .._torch import in_forward_ad, is_batched, is_fake, is_wrapped
from ._vectors import can_compare
from ._writes import CountedSettings, Writes
from .slots import Slots

if TYPE_CHECKING:
    from ..axes import ModelAxes
    from ._device_numbers import DeviceSteps
    from .watch import Watch


_MISSING = object()


def check_values(where: str, settings: Mapping[str, Any], members: int | None) -> None:
    """Raise ValueError for a NaN, which is no valid setting, and for a tensor that is not one number for each member.

    Args:
        where: The link or group, for errors.
        settings: The settings.
        members: The number of members of a population; None for one model.
    """
    for key, value in settings.items():
        for number in value if isinstance(value, tuple | list) else (value,):
            bad = isinstance(number, float) and math.isnan(number)
            if (
                isinstance(number, Tensor)
                and number.is_floating_point()
                and not (is_fake(number) or is_batched(number))
            ):
                bad = bool(number.detach().isnan().any())
            if bad:
                raise ValueError(f"{where}: {key} is NaN; give a number")
        if members is None or not is_per_member(value):
            continue
        if value.dtype is torch.bool:
            raise ValueError(f"{where}: {key} is a choice, not a number; make it once for all {members} members")
        if value.shape != (members,):
            got = f"{len(value)} numbers" if value.dim() == 1 else f"the shape {tuple(value.shape)}"
            raise ValueError(f"{where}: {key} has {got} for {members} members; give one for each, or one")


def refuse_string(where: str, key: str, value: Any) -> None:
    """Raise TypeError if a string is given for a number; the message has the number that it reads as.

    Args:
        where: The link, for the error.
        key: The name of the setting.
        value: The value.
    """
    if isinstance(value, str):
        try:
            remedy = f"the number {float(value):g}, without quotes"
        except ValueError:
            remedy = "a number"
        raise TypeError(f"{where}: {key} is {value!r}, a string; give {remedy}")


def current(resolved: Mapping[str, Any], step: int | Tensor) -> Mapping[str, Any]:
    """Return settings with schedules evaluated at this step and 0-d host tensors as numbers; the same object if there are none."""
    changed: dict[str, Any] | None = None
    for key, value in resolved.items():
        kind = type(value)
        if kind is float or kind is int or kind is bool or kind is str or value is None:
            continue
        new: Any = value(step) if isinstance(value, Schedule) else value  # type: ignore[arg-type]
        if isinstance(new, Tensor) and new.dim() == 0 and _can_read(new):
            new = new.item()
        if new is not value:
            changed = dict(resolved) if changed is None else changed
            changed[key] = new
    return resolved if changed is None else changed


def _can_read(number: Tensor) -> bool:
    """Return whether a 0-d tensor may become a Python number: it is on the host, and neither differentiated nor batched."""
    if torch.is_grad_enabled() or in_forward_ad():
        return False
    return can_compare(number) and not is_wrapped(number)


class Binding:
    """The data shared by an optimizer and all of its links; a link without an optimizer has its own.

    Attributes:
        slots: The numbers of the parameters.
        writes: Counts changes of groups, defaults and links.
        step: The number of the current step.
        members: The number of members of a population; None for one model.
        member: Returns the number of the member that links are run for, from one number for each member; None for all at once.
        fuse: Whether runs of pointwise links are one pass.
        draws_alike: Whether several processes have to draw the same random numbers.
        sharded: Whether parameters are sharded over processes.
        read_row: Returns the state of a parameter whose state is in a row of a matrix of members, read-only.
        axes: The axes of the model, if the optimizer was given them.
        offload: The place where the state of a group's parameters is stored between steps, by the position of the group.
        watch: The watch that records the numbers of each step, if there is one.
        device_steps: The number of the step on each device, if steps can be captured in a graph.
    """

    def __init__(self, fuse: bool = True) -> None:
        self.slots = Slots()
        self.writes = Writes()
        self.step = 0
        self.members: int | None = None
        self.member: Callable[[Tensor], Any] | None = None
        self.fuse = fuse
        self.draws_alike = False
        self.sharded = False
        self.read_row: Callable[[dict[int, Any], int], Any] | None = None
        self.axes: ModelAxes | None = None
        self.device_steps: DeviceSteps | None = None
        self.watch: Watch | None = None
        self.offload: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the optimizer makes its own matrices, and has no watch.
        return {**self.__dict__, "read_row": None, "watch": None}


class Settings:
    """`link.settings`: maps a parameter to the settings in force for it.

    A setting is looked up in three layers, in this order: groups passed to the link (`set_param_groups`), groups of the
    optimizer (where schedulers write), and the link's defaults.

    Example:
        >>> import torch
        >>> from moduli import m
        >>> link, p = m.LR(0.1), torch.zeros(2)
        >>> link.set_param_groups([{"params": [p], "lr": 0.5}]).settings[p]["lr"], link.settings[torch.ones(1)]["lr"]
        (0.5, 0.1)
    """

    def __init__(self, defaults: CountedSettings) -> None:
        self.defaults = defaults
        self.local: dict[Tensor, dict[str, Any]] = {}
        self.overrides: list[dict[str, Any]] = []
        self.binding = Binding()
        #: The settings in force, by the position of the optimizer's group and the identity of the link's own group. The own
        #: group is stored too, so that its identity stays unique.
        self._resolved: dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any] | None]] = {}
        #: The state and settings of tensors that are passed to hooks in place of parameters (`LinkState.shown`).
        self.temporary: dict[Tensor, tuple[Any, Mapping[str, Any]]] = {}
        self._version = -1

    @property
    def binding(self) -> Binding:
        """The data that the link shares with its optimizer."""
        return self._binding

    @binding.setter
    def binding(self, binding: Binding) -> None:
        self._binding, self.defaults.writes, self._version = binding, binding.writes, -1

    def __getitem__(self, param: Tensor) -> Mapping[str, Any]:
        if param in self.temporary:
            return self.temporary[param][1]
        binding = self._binding
        resolved = current(self.raw(param), binding.step)
        take = binding.member
        if take is not None and any(is_per_member(value) for value in resolved.values()):
            return {key: take(value) if is_per_member(value) else value for key, value in resolved.items()}
        return resolved

    def raw(self, param: Tensor) -> dict[str, Any]:
        """Return the settings with schedules not yet evaluated; parameters with equal settings share one dictionary."""
        if self._version != self._binding.writes.numbers:  # a default or a group was written to
            self.refresh()
        group, local, slots = -1, self.local.get(param) if self.local else None, self._binding.slots
        slot = slots.find(param)
        if slot is not None:
            source = slots.find_source(slot)
            group = slots.groups[source]
            if local is None and self.local:
                local = self.local.get(slots.params[source])
        key = (group, id(local))
        if key not in self._resolved:
            self._resolved[key] = ({}, local)
            self._fill(key)
        return self._resolved[key][0]

    def find_per_member(self) -> list[tuple[str, Tensor]]:
        """Return the names and values of settings that are one number for each member of a population."""
        layers: list[dict[str, Any]] = [self.defaults, *self.overrides, *self.local.values()]
        return [(key, value) for layer in layers for key, value in layer.items() if is_per_member(value)]

    def _fill(self, key: tuple[int, int]) -> None:
        # The dictionary is changed in place, since fused runs hold a reference to it.
        values, local = self._resolved[key]
        layer = self.overrides[key[0]] if 0 <= key[0] < len(self.overrides) else {}
        values.clear()
        values.update({**self.defaults, **layer, **(local or {})})

    def refresh(self) -> None:
        """Read new values of the optimizer's groups; the dictionaries stay the same objects."""
        self._version = self._binding.writes.numbers
        for key in self._resolved:
            self._fill(key)

    def forget(self) -> None:
        """Clear the resolved settings after a change of the link's own groups; the next use resolves them again."""
        self._resolved.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resolved": {}}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether settings are equal; tensors are compared by identity."""
    if a is b:
        return True
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
    """Return whether a setting is a tensor with one number per member of a population."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


# ---------------------------------------------------------------------- the arguments of a link's constructor


Setting: TypeAlias = float | Tensor | Callable[[int], float]
"""A number of a link: a number, a tensor (with one number for each member of a population), or a function of the step."""


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """A number that is a function of the step, counted from zero.

    A function given for an argument that is a number (it has one as its default, or is annotated as one) becomes a schedule
    automatically; any other function stays unmodified. Write `Schedule(fn)` where a link does not declare a number.

    Example:
        >>> from moduli import m, optim
        >>> optim.Schedule(lambda step: 0.1 / (step + 1))(1)
        0.05
        >>> isinstance(m.LR(lambda step: 0.1).defaults["lr"], optim.Schedule)
        True
    """

    fn: Callable[[int], Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"a schedule is a function of the step, got {self.fn!r}")

    def __call__(self, step: int) -> Any:
        return self.fn(step)

    def __repr__(self) -> str:
        return repr(self.fn)
