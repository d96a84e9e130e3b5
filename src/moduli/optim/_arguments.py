"""What a link does with the arguments it is made with: unknown ones are refused by name, functions of the step understood."""

from __future__ import annotations

import difflib
import inspect
import itertools
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """A number that is a function of the step, counted from zero.

    A function given for an argument that is a number (it has one as its default, or is annotated as one) becomes a schedule
    by itself; any other function stays what it is. Say `Schedule(fn)` where a link does not tell.

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
    """A function given for a setting that is a number, as a schedule; anything else as it is."""
    number = isinstance(default, float | int | Tensor | Schedule) and not isinstance(default, bool)
    return Schedule(value) if number and _is_function(value) else value


class LinkType(ABCMeta):
    """Explains arguments that a link does not take, and makes schedules of functions where it takes numbers."""

    @property
    def __signature__(cls) -> inspect.Signature:
        # Tools look at the type's own call first, which takes anything.
        known = inspect.signature(cls.__init__)  # type: ignore[misc]
        return known.replace(parameters=list(known.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        schedules: dict[str, Schedule] = {}
        if any(map(_is_function, args)) or any(map(_is_function, kwargs.values())):
            args, kwargs, schedules = _make_schedules(cls, args, kwargs)
        try:
            link = super().__call__(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError) as error:
            said = _explain(cls, args, kwargs, schedules, error)
            if said is None:
                raise
            raise TypeError(said) from None
        held = {id(value) for _, part in link.links() for value in part.defaults.values()} if schedules else ()
        for key, schedule in schedules.items():
            if id(schedule) not in held:
                raise TypeError(_refuse_schedule(cls, key))
        return link


@cache
def find_accepted(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class by name, with those that it hands on to the classes it is made from."""
    out: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in base.__dict__:
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        for parameter in parameters:
            named = parameter.kind is parameter.KEYWORD_ONLY or (
                not out and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            )
            if named and not parameter.name.startswith("_"):
                out.setdefault(parameter.name, parameter)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return out


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | Tensor | Schedule) and not isinstance(type(value), LinkType)


def _is_number(parameter: inspect.Parameter) -> bool:
    """Whether an argument is declared a number, or at least no function."""
    if isinstance(parameter.default, int | float):
        return True
    written = parameter.annotation if isinstance(parameter.annotation, str) else str(parameter.annotation)
    told = parameter.annotation is not parameter.empty
    return told and any(word in written for word in ("float", "int", "Any", "Operand")) and "Callable" not in written


def _make_schedules(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Schedule]]:
    known, made = find_accepted(cls), {}

    def make(value: Any, parameter: inspect.Parameter | None) -> Any:
        if parameter is not None and _is_function(value) and _is_number(parameter):
            value = made[parameter.name] = Schedule(value)
        return value

    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind in kinds][1:]  # type: ignore[misc]
    given = tuple(itertools.starmap(make, itertools.zip_longest(args, places[: len(args)])))
    return given, {key: make(value, known.get(key)) for key, value in kwargs.items()}, made


def _refuse_schedule(cls: type, key: str) -> str:
    return f"{cls.__name__}: {key} can't be a function of the step; give a number"


def _explain(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], schedules: Mapping[str, Any], error: Exception
) -> str | None:
    named = [key for key in schedules if f" {key} is " in str(error)]
    if named or isinstance(error, ValueError):
        return _refuse_schedule(cls, named[0]) if named else None
    name, known = cls.__name__, list(find_accepted(cls))
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    kinds = inspect.Parameter
    unknown = [key for key in kwargs if key not in known]
    if unknown and any(words in str(error) for words in ("unexpected keyword argument", "missing")):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}? It" if near else "it"
        return f"{name} has no setting {unknown[0]!r}; {hint} takes {', '.join(known) or 'no arguments'}"
    parameters = list(signature.parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    if len(args) > len(positional) and not open_ended:
        text = ", ".join(map(repr, args))
        hint = f"its settings are keywords: {', '.join(known) or 'none'}"
        if len(args) == 1 and type(args[0]) in (float, int) and "lr" not in known:
            hint = f"a step size is a link of its own: {name}(), LR({args[0]!r}); {hint}"
        return f"{name}({text}): {hint}"
    if schedules:
        return " and ".join(_refuse_schedule(cls, key) for key in schedules)
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError:
        return f"{name}: {error}"
    return None
