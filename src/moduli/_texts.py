"""Texts of bounded length for errors, whatever they tell about.

What a file holds may be of any size, and a YAML document of 300 bytes stands for more than any memory where its aliases are
written out. `shorten` takes the place of `repr` wherever a value of the user or of a file gets into an error.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any, Final

_MOST: Final = 200
_MORE: Final = "..."
# A number of more bits is not written in decimals, which takes time, and is refused by Python from 4,300 digits on.
_MOST_BITS: Final = 512
_BRACKETS: Final = {list: "[]", tuple: "()", set: "{}", frozenset: "{}"}


def shorten(value: Any, most: int = _MOST) -> str:
    """Return `repr(value)` as far as it has at most some letters, and "..." in place of the rest, which is never made.

    Containers of Python are written entry by entry until the letters are used up, so one that holds itself, or another one a
    thousand times, ends as well. An integer of very many digits is told by its number of bits.

    Args:
        value: Anything.
        most: How many letters the text has at most, without "...".

    >>> shorten([1, "two", {"three": (4,)}])
    "[1, 'two', {'three': (4,)}]"
    >>> shorten("x" * 1000, 10)
    "'xxxxxxxxx..."
    """
    parts: list[str] = []
    left = _write(value, parts, most)
    return "".join(parts)[:most] + _MORE if left < 0 else "".join(parts)


def cut(text: str, most: int = 2000) -> str:
    """Return a text, or its beginning and "..." if it has more letters than `most`.

    >>> cut("a long story", 6)
    'a long...'
    """
    return text if len(text) <= most else text[:most] + _MORE


def _write(value: Any, parts: list[str], left: int) -> int:
    """Append the text of a value; returns how many letters are left, less than zero if they did not suffice."""
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
    except Exception:  # noqa: BLE001 - of a class of the user, in the middle of another error
        text = f"<{type(value).__name__} object>"
    return _append(text, parts, left)


def _write_items(value: Any, brackets: str, parts: list[str], left: int) -> int:
    left = _append(brackets[0], parts, left)
    # Every entry takes a letter at least, so those that there is no room for are not even counted.
    for number, each in enumerate(islice(value, left + 1 if left > 0 else 0)):
        left = _append(", ", parts, left) if number else left
        left = _write(each, parts, left) if left >= 0 else left
        if left >= 0 and isinstance(value, Mapping):
            left = _append(": ", parts, left)
            left = _write(value[each], parts, left) if left >= 0 else left
        if left < 0:
            return left
    alone = isinstance(value, tuple) and len(value) == 1
    return _append(",)" if alone else brackets[1], parts, left)


def _append(text: str, parts: list[str], left: int) -> int:
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
