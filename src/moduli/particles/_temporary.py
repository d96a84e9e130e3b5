"""Whether an operand exists only inside an expression, so that a result may be written over it.

It is read off the count of references to it. How many of them a call adds depends on the interpreter, and on whether
tools such as torch.compile watch its frames at this moment, so each time the count is compared with that of a value made
here and now.
"""

from __future__ import annotations

import sys
from typing import Any

from ._operators import Operators

__all__ = ["beyond", "is_temporary"]


class _Probe(Operators):
    """Finds out what the count of references to a right operand is when nothing else refers to it."""

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> int:
        return _probed(fn, self, other, reflected)


def _probed(fn: Any, module: Any, other: Any, reflected: bool = False) -> int:
    return sys.getrefcount(other)


def _temporary(probe: type[Operators]) -> int:
    """The count for a value that exists only inside an expression; 0 if it cannot be told from one with a name."""
    named = probe()
    alone: int = probe() + probe()
    with_name: int = probe() + named
    return alone if with_name > alone else 0


class _Near(Operators):
    """The same where the method of the left operand itself counts."""

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> int:
        return sys.getrefcount(other)


def is_temporary(count: int) -> bool:
    """Whether a right operand exists only inside the expression that is being computed.

    Args:
        count: How many references to it the method of the left operand counts.
    """
    return count <= _temporary(_Near)


def beyond() -> int:
    """How many references a function that this method calls counts to such an operand; 0 if that tells nothing."""
    return _temporary(_Probe)
