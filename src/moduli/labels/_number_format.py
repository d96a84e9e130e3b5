"""Numbers as text, the way torch prints them: four digits, one form for all elements that are shown together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def format_numbers(values: Sequence[Any]) -> list[str]:
    """Each value as text; floats share one notation, chosen from all of them."""
    if any(isinstance(value, complex) for value in values):
        real = _floats([complex(value).real for value in values])
        imaginary = _floats([complex(value).imag for value in values])
        return [r + (i if i.startswith("-") else "+" + i) + "j" for r, i in zip(real, imaginary, strict=True)]
    if any(isinstance(value, float) for value in values):
        return _floats([float(value) for value in values])
    return [str(value) for value in values]


def format_number(value: Any) -> str:
    """One value on its own, without the zeros that only align it with others."""
    text = format_numbers([value])[0]
    if isinstance(value, float) and "." in text and "e" not in text:
        return text.rstrip("0")
    return text


def _floats(values: list[float]) -> list[str]:
    finite = [abs(value) for value in values if math.isfinite(value) and value != 0]
    largest, smallest = max(finite, default=1.0), min(finite, default=1.0)
    integers = all(value == math.floor(value) for value in finite)
    # largest > 1000 * smallest would overflow to the wrong side for the smallest numbers of all.
    if largest / 1000.0 > smallest or largest > 1.0e8 or (not integers and smallest < 1.0e-4):
        return [f"{value:.4e}" if math.isfinite(value) else str(value) for value in values]
    if integers:
        return [f"{value:.0f}." if math.isfinite(value) else str(value) for value in values]
    return [f"{value:.4f}" if math.isfinite(value) else str(value) for value in values]
