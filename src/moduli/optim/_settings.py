"""Settings of a link for each parameter: the link's own groups, then the optimizer's groups, then its defaults."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .._torch import in_forward_ad, is_batched, is_fake, is_wrapped
from ._checks import check_made, explain_unmade
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


def check_defaults(name: str, settings: Mapping[str, Any]) -> None:
    """Raise an error if constructor arguments can't be settings: links, and NaN.

    Args:
        name: The name of the link.
        settings: The settings.
    """
    for key, value in settings.items():
        if isinstance(type(value), LinkType):
            raise TypeError(f"{name}: {key} is a link; pass links to set_child, not as a setting")
    check_values(name, settings, None)


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
        member: The member that links are run for; None for all at once.
        fuse: Whether runs of pointwise links are one pass.
        draws_alike: Whether several processes have to draw the same random numbers.
        in_pieces: Whether parameters are sharded over processes.
        read_row: Returns the state of a parameter that is part of a matrix of members, read-only.
        axes: The axes of the model, if the optimizer was given them.
        offload: Where the state of the parameters of some groups is stored between steps, by the position of the group.
        watch: The watch that records the numbers of each step, if there is one.
        device_steps: The number of the step on each device, where steps can be captured in a graph.
    """

    def __init__(self, fuse: bool = True) -> None:
        self.slots = Slots()
        self.writes = Writes()
        self.step = 0
        self.members: int | None = None
        self.member: int | None = None
        self.fuse = fuse
        self.draws_alike = False
        self.in_pieces = False
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

    Three layers, the first that has the key wins: groups given to the link (`set_param_groups`), groups of the
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
        #: The settings in force by group of the optimizer and local group, with that local group.
        self._resolved: dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any] | None]] = {}
        #: State and settings of tensors that are passed to hooks in place of parameters (`LinkState.shown`).
        self.shown: dict[Tensor, tuple[Any, Mapping[str, Any]]] = {}
        self._version = -1

    @property
    def binding(self) -> Binding:
        """The data that the link shares with its optimizer."""
        return self._binding

    @binding.setter
    def binding(self, binding: Binding) -> None:
        self._binding, self.defaults.writes, self._version = binding, binding.writes, -1

    def __getitem__(self, param: Tensor) -> Mapping[str, Any]:
        if param in self.shown:
            return self.shown[param][1]
        binding = self._binding
        resolved = current(self.raw(param), binding.step)
        i = binding.member
        if i is not None and any(is_per_member(value) for value in resolved.values()):
            return {key: value[i].item() if is_per_member(value) else value for key, value in resolved.items()}
        return resolved

    def raw(self, param: Tensor) -> dict[str, Any]:
        """Return the settings with schedules not yet evaluated; parameters with equal settings share one dictionary."""
        if self._version != self._binding.writes.numbers:  # defaults are public, and may be changed by hand
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

    def are_per_member(self) -> bool:
        """Return whether any of them is one number for each member of a population."""
        layers: list[dict[str, Any]] = [self.defaults, *self.overrides, *self.local.values()]
        return any(is_per_member(value) for layer in layers for value in layer.values())

    def _fill(self, key: tuple[int, int]) -> None:
        # In place: a fused run refers to the dictionary and reads the new values.
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
        """Clear the resolved settings, since the sharing of dictionaries may have changed; the next use resolves them again."""
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


def as_schedule(value: Any, default: Any) -> Any:
    """Return a schedule for a function given for a setting that is a number; any other value unmodified."""
    number = isinstance(default, float | int | Tensor | Schedule) and not isinstance(default, bool)
    return Schedule(value) if number and _is_function(value) else value


class LinkType(ABCMeta):
    """The metaclass of links: explains wrong constructor arguments, and turns functions given for numbers into schedules."""

    @property
    def __signature__(cls) -> inspect.Signature:
        # Tools look at the type's own call first, which takes anything.
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def _make_link(cls, *args: Any, **kwargs: Any) -> Any:
        schedules: dict[str, Schedule] = {}
        if any(map(_is_function, args)) or any(map(_is_function, kwargs.values())):
            args, kwargs, schedules = _make_schedules(cls, args, kwargs)
        if str in map(type, args) or str in map(type, kwargs.values()):
            _refuse_strings(cls, args, kwargs)
        try:
            link = super().__call__(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            message = _explain(cls, args, kwargs, schedules, error) or explain_unmade(cls.__name__, error)
            if message is None:
                raise
            raise TypeError(message) from None
        check_made(link, Settings)
        stored = {id(value) for _, part in link.links() for value in part.defaults.values()} if schedules else ()
        unused = [key for key, schedule in schedules.items() if id(schedule) not in stored]
        if unused:
            raise TypeError(_refuse_schedules(cls, unused))
        return link

    if not TYPE_CHECKING:  # checkers take a metaclass' call for the signature; that of the constructor says more
        __call__ = _make_link


@cache
def find_accepted(cls: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class by name, including those that it forwards to its base classes."""
    out: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in base.__dict__:
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        for parameter in parameters:
            first = not out and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if (first or parameter.kind is parameter.KEYWORD_ONLY) and not parameter.name.startswith("_"):
                out.setdefault(parameter.name, parameter)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return out


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | Tensor | Schedule) and not isinstance(type(value), LinkType)


def _is_number(parameter: inspect.Parameter) -> bool:
    """Return whether an argument is declared as a number, or at least not as a function."""
    if isinstance(parameter.default, int | float):
        return True
    written = str(parameter.annotation)
    if str(Setting) in written or "Setting" in written:
        return True
    return any(word in written for word in ("float", "int", "Any", "Operand")) and "Callable" not in written


def _refuse_strings(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for a string where the default is a number and the annotation does not allow strings."""
    places = inspect.signature(cls).parameters
    accepted = {**find_accepted(cls), **places}
    for key, value in (*zip(places, args, strict=False), *kwargs.items()):
        parameter = accepted.get(key)
        if parameter is None or isinstance(parameter.default, bool) or not isinstance(parameter.default, int | float):
            continue
        if not any(word in str(parameter.annotation) for word in ("str", "Literal", "Metric")):
            refuse_string(cls.__name__, key, value)


def _make_schedules(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Schedule]]:
    accepted, schedules = find_accepted(cls), {}

    def convert(value: Any, parameter: inspect.Parameter | None) -> Any:
        if parameter is not None and _is_function(value) and _is_number(parameter):
            value = schedules[parameter.name] = Schedule(value)
        return value

    places = list(inspect.signature(cls).parameters.values())[: len(args)]
    converted = tuple(itertools.starmap(convert, itertools.zip_longest(args, places)))
    return converted, {key: convert(value, accepted.get(key)) for key, value in kwargs.items()}, schedules


def _explain(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], schedules: Mapping[str, Any], error: Exception
) -> str | None:
    """Return a message for a link that can't be constructed with these arguments; None if the error is clear by itself."""
    name, names, text = cls.__name__, list(find_accepted(cls)), str(error)
    refused = [key for key in schedules if f" {key} is " in text]
    if not refused and not isinstance(error, ValueError):
        unknown = [key for key in kwargs if key not in names]
        if unknown and ("unexpected keyword argument" in text or "missing" in text):
            return f"{name} has no setting {unknown[0]!r}{suggest(unknown[0], names)} (it takes {', '.join(names) or 'nothing'})"
        if "positional argument" in text and ("given" in text or "too many" in text):
            hint = f"its settings are keywords: {', '.join(names) or 'none'}"
            if len(args) == 1 and type(args[0]) in (float, int) and "lr" not in names:
                hint = f"a step size is a link of its own: {name}(), LR({args[0]!r}); {hint}"
            return f"{name}({', '.join(map(repr, args))}): {hint}"
        refused = list(schedules)
    return _refuse_schedules(cls, refused) if refused else None


def _refuse_schedules(cls: type, keys: Sequence[str]) -> str:
    return f"{cls.__name__}: {' and '.join(keys)} can't be a function of the step; give a number"


def suggest(name: str, known: Sequence[str]) -> str:
    """Return the known name nearest to an unknown one as a question; an empty string if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
