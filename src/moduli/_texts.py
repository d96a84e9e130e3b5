"""Texts of bounded length, for error messages.

A value from a file may be of any size: a YAML document of 300 bytes can describe more than fits into memory, once its aliases are
written out. Error messages use `shorten` instead of `repr` for all values of users and of files.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any, Final

_MOST: Final = 200
_MORE: Final = "..."
# Integers of more bits are described by their size: writing decimals is slow, and Python raises from 4,300 digits on.
_MOST_BITS: Final = 512
_BRACKETS: Final = {list: "[]", tuple: "()", set: "{}", frozenset: "{}"}


def shorten(value: Any, most: int = _MOST) -> str:
    """Return `repr(value)`, cut after `most` characters with "..."; the rest of it is never computed.

    Containers of Python are written entry by entry until the limit is reached, so one that contains itself, or another one a
    thousand times, is cut as well. A very large integer is described by its number of bits.

    Args:
        value: Anything.
        most: How many characters the text has at most, without "...".

    >>> shorten([1, "two", {"three": (4,)}])
    "[1, 'two', {'three': (4,)}]"
    >>> shorten("x" * 1000, 10)
    "'xxxxxxxxx..."
    """
    parts: list[str] = []
    left = _write(value, parts, most)
    return "".join(parts)[:most] + _MORE if left < 0 else "".join(parts)


def cut(text: str, most: int = 2000) -> str:
    """Return a text, or its beginning and "..." if it has more characters than `most`.

    >>> cut("a long story", 6)
    'a long...'
    """
    return text if len(text) <= most else text[:most] + _MORE


def _write(value: Any, parts: list[str], left: int) -> int:
    """Append the text of a value to `parts` and return how many characters are left, below zero if the limit is exceeded."""
    if isinstance(value, str | bytes | bytearray):
        return _append(repr(value[: left + 1]) if len(value) > left else repr(value), parts, left)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _MOST_BITS:
        return _append(f"an integer of {value.bit_length()} bits", parts, left)
    if isinstance(value, Mapping):
        return _write_items(value, "{}", parts, left)
    if isinstance(value, list | tuple | Set):
        kind = next((kind for kind in _BRACKETS if isinstance(value, kind)), set)
        if isinstance(value, Set) and not value:
            return _append("set()", parts, left)
        return _write_items(value, _BRACKETS[kind], parts, left)
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's `__repr__` may raise anything, and an error is being reported already
        text = f"<{type(value).__name__} object>"
    return _append(text, parts, left)


def _write_items(value: Any, brackets: str, parts: list[str], left: int) -> int:
    """Append the entries of a container between two brackets, as `_write` does."""
    left = _append(brackets[0], parts, left)
    # Every entry takes at least one character, so `left + 1` entries are enough to exceed the limit.
    for number, each in enumerate(islice(value, left + 1 if left > 0 else 0)):
        left = _append(", ", parts, left) if number else left
        left = _write(each, parts, left) if left >= 0 else left
        if left >= 0 and isinstance(value, Mapping):
            left = _append(": ", parts, left)
            left = _write(value[each], parts, left) if left >= 0 else left
        if left < 0:
            return left
    is_single = isinstance(value, tuple) and len(value) == 1
    return _append(",)" if is_single else brackets[1], parts, left)


def _append(text: str, parts: list[str], left: int) -> int:
    """Append a text, and return how many characters are left."""
    parts.append(text)
    return left - len(text)


def write_columns(rows: Sequence[Sequence[str]], right: Set[int] = frozenset()) -> str:
    """Return rows of texts as a table with aligned columns.

    Args:
        rows: The cells, the headings first.
        right: The columns that are aligned to the right.

    >>> print(write_columns([["name", "size"], ["weight", "6"]], {1}))
    name    size
    weight     6
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in cells))
    return "\n".join(line.rstrip() for line in lines)
