"""What every file of this room uses: paths, errors, and JSON that others wrote, read strictly and compared with its form."""

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

    The file that was there is still there, and no module, optimizer, population or random state was touched. There is one
    exception, which the text tells: where an error came after the new file had taken the place of the old one, such as from
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
    """A block in which every `DamagedFileError` that does not name the file says which it is."""
    try:
        yield
    except DamagedFileError as error:
        if path in str(error):
            raise
        raise DamagedFileError(f"{path!r} is not a checkpoint, or was damaged: {cut(str(error))}") from None


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
        raise ValueError(f"{shorten(find_twice(name for name, _ in pairs))} is there twice")
    return found


def find_twice(names: Iterable[str]) -> str | None:
    """The first name that comes more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


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
