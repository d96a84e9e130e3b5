"""Shared by the files of this room: paths, errors, and strict reading of untrusted JSON."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .._texts import cut, shorten

PathLike = str | os.PathLike[str]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or loaded; nothing has changed.

    The old file is still there, and no module, optimizer, population or random state was changed. There is one
    exception, which the text states: if an error came after the new file had replaced the old one, such as from
    a disk that could not sync the directory, the file is the new one, and may not survive a loss of power.

    Example:
        >>> import os, tempfile
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> with open(path, "wb") as file:
        ...     _ = file.write(b"not a checkpoint")
        >>> try:
        ...     io.read(path)
        ... except io.CheckpointError as error:
        ...     print(str(error).rpartition(": ")[2])
        its header would be 7521891404167278446 bytes long, and the file has 8 more
    """


class DamagedFileError(CheckpointError):
    """A file is truncated, corrupted, or no checkpoint at all, whatever it was to be loaded into.

    Example:
        >>> import moduli.io as io
        >>> issubclass(io.DamagedFileError, io.CheckpointError)
        True
    """


@contextmanager
def name_file(path: str) -> Iterator[None]:
    """Add the path to every `DamagedFileError` that is raised inside a block without it."""
    try:
        yield
    except DamagedFileError as error:
        if path in str(error):
            raise
        raise DamagedFileError(f"{path!r} is not a checkpoint, or was damaged: {cut(str(error))}") from None


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly: repeated keys, NaN and infinity raise.

    Raises:
        DamagedFileError: If the text is not such an object.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise DamagedFileError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise DamagedFileError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"{shorten(find_twice(name for name, _ in pairs))} is there twice")
    return table


def find_twice(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once; None if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def has_form(value: Any, form: Any) -> bool:
    """Whether a tree has a form.

    Args:
        value: The tree.
        form: A type; a list with the form of all entries; a tuple with the forms of the entries of a list of that length; a dict
            with the forms of optional keys, or under `str` that of all values; or a predicate.
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
