"""The metaclass of links: schedules for numbers, and errors that explain wrong constructor arguments."""

from __future__ import annotations

import difflib
import inspect
import itertools
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._checks import check_constructed, explain_constructor_error
from ._settings import Schedule, Setting, Settings, check_values, refuse_string


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


def as_schedule(value: Any, default: Any) -> Any:
    """Return a schedule for a function given for a setting that is a number; any other value unmodified."""
    number = isinstance(default, float | int | Tensor | Schedule) and not isinstance(default, bool)
    return Schedule(value) if number and _is_function(value) else value


class LinkType(ABCMeta):
    """The metaclass of links: explains wrong constructor arguments, and turns functions given for numbers into schedules."""

    @property
    def __signature__(cls) -> inspect.Signature:
        # `inspect.signature` would otherwise return that of the metaclass' call, which takes any arguments.
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def _make_link(cls, *args: Any, **kwargs: Any) -> Any:
        schedules: dict[str, Schedule] = {}
        if any(map(_is_function, args)) or any(map(_is_function, kwargs.values())):
            args, kwargs, schedules = _make_schedules(cls, args, kwargs)
        if str in (*map(type, args), *map(type, kwargs.values())):
            _refuse_strings(cls, args, kwargs)
        try:
            link = super().__call__(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            message = _explain(cls, args, kwargs, schedules, error) or explain_constructor_error(cls.__name__, error)
            if message is None:
                raise
            raise TypeError(message) from None
        check_constructed(link, Settings)
        # A schedule that did not become a setting would be read as a number somewhere.
        settings = {id(value) for _, part in link.links() for value in part.defaults.values()} if schedules else ()
        unused = [key for key, schedule in schedules.items() if id(schedule) not in settings]
        if unused:
            raise TypeError(_refuse_schedules(cls, unused))
        return link

    if not TYPE_CHECKING:  # type checkers would take its signature for that of every link
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
    """Return whether an argument may be a number: by its default, or by an annotation that does not allow functions."""
    if isinstance(parameter.default, int | float):
        return True
    annotation = str(parameter.annotation)
    if str(Setting) in annotation or "Setting" in annotation:
        return True
    return any(word in annotation for word in ("float", "int", "Any", "Operand")) and "Callable" not in annotation


def _refuse_strings(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for a string where the default is a number and the annotation does not allow strings."""
    own = inspect.signature(cls).parameters
    accepted = {**find_accepted(cls), **own}
    for key, value in (*zip(own, args, strict=False), *kwargs.items()):
        parameter = accepted.get(key)
        if parameter is None or isinstance(parameter.default, bool) or not isinstance(parameter.default, int | float):
            continue
        if not any(word in str(parameter.annotation) for word in ("str", "Literal", "Metric")):
            refuse_string(cls.__name__, key, value)


def _make_schedules(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Schedule]]:
    """Return the arguments with schedules in place of functions given for numbers, and these schedules by name."""
    accepted, schedules = find_accepted(cls), {}

    def convert(value: Any, parameter: inspect.Parameter | None) -> Any:
        if parameter is not None and _is_function(value) and _is_number(parameter):
            value = schedules[parameter.name] = Schedule(value)
        return value

    positional = list(inspect.signature(cls).parameters.values())[: len(args)]
    converted = tuple(itertools.starmap(convert, itertools.zip_longest(args, positional)))
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
            return _explain_positional(name, args, names)
        refused = list(schedules)
    return _refuse_schedules(cls, refused) if refused else None


def _explain_positional(name: str, args: tuple[Any, ...], names: Sequence[str]) -> str:
    """Return a message for a link that is constructed with positional arguments.

    Args:
        name: The name of its class.
        args: The arguments.
        names: The names of its settings.
    """
    hint = f"its settings are keywords: {', '.join(names) or 'none'}"
    if len(args) == 1 and type(args[0]) in (float, int) and "lr" not in names:
        hint = f"a step size is a link of its own: {name}(), LR({args[0]!r}); {hint}"
    return f"{name}({', '.join(map(repr, args))}): {hint}"


def _refuse_schedules(cls: type, keys: Sequence[str]) -> str:
    return f"{cls.__name__}: {' and '.join(keys)} can't be a function of the step; give a number"


def suggest(name: str, known: Sequence[str]) -> str:
    """Return the known name nearest to an unknown one as a question; an empty string if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
