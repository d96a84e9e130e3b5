"""JSON that others wrote: read strictly, and compared with the form that it must have."""

import json
from collections.abc import Iterable
from typing import Any

from ._errors import DamagedFileError


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object; a key that comes twice and numbers that JSON does not have are refused.

    Raises:
        DamagedFileError: If it is none.
    """
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise DamagedFileError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise DamagedFileError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamagedFileError(f"{what} is not a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"{find_twice(name for name, _ in pairs)!r} is there twice")
    return found


def find_twice(names: Iterable[str]) -> str | None:
    """The first name that comes a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def has_form(value: Any, form: Any) -> bool:
    """Whether a tree has a form.

    Args:
        value: The tree.
        form: A type; a list with the form of all entries; a tuple with the forms of a list of so many entries; a dict with the
            forms of some keys, if they are there, or under `str` that of all values; or a function that says it.
    """
    if isinstance(form, type):
        return type(value) is form
    if isinstance(form, list):
        return type(value) is list and all(has_form(each, form[0]) for each in value)
    if isinstance(form, tuple):
        return type(value) is list and len(value) == len(form) and all(map(has_form, value, form))
    if isinstance(form, dict):
        others = form.get(str, lambda _: True)
        return type(value) is dict and all(has_form(each, form.get(key, others)) for key, each in value.items())
    return bool(form(value))
