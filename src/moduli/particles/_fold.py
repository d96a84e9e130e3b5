"""The one shortcut: an operand that exists only inside an expression may be written over, as NumPy elides temporaries.

In `a + 0.5 * (b - c)` nothing refers to `b - c` but the expression, so the factor waits for the sum, and the sum is written
over the difference. Whether that is so is read off the count of references. How many of them a call adds depends on the
interpreter, and on whether tools such as torch.compile watch its frames at this moment, so the count is compared each
time with that of a value made on the spot; where the interpreter does not count a named value more often than a nameless
one, the answer is no.
"""

from __future__ import annotations

from typing import Any

from moduli._torch import count_references

from ._operators import Operators


class _ReferenceProbe(Operators):
    """Counts the references to operands as the method of a particle does."""

    __slots__ = ()

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> tuple[int, int]:
        return count_operand(self), count_operand(other)


def count_operand(operand: Any) -> int:
    """How many references there are to an operand; to be called by `_binary` itself.

    Example:
        >>> from moduli.particles import count_operand
        >>> count_operand(object()) < count_operand(count_operand)
        True
    """
    return count_references(operand)


def is_temporary(count: int, which: int, reflected: bool = False) -> bool:
    """Whether an operand exists only inside the expression that is being computed.

    Args:
        count: The references to it that `_binary` counted.
        which: 0 for the operand whose method is called, 1 for the other one.
        reflected: Whether the method is a reflected one, such as `__rmul__`.

    Example:
        >>> from moduli.particles import count_operand, is_temporary
        >>> named = object()
        >>> is_temporary(count_operand(named) + 8, 0)
        False
    """
    named = _ReferenceProbe()
    if reflected:
        alone, with_name = 1 * _ReferenceProbe(), 1 * named
    elif which == 0:
        alone, with_name = _ReferenceProbe() * 1, named * 1
    else:
        alone, with_name = _ReferenceProbe() * _ReferenceProbe(), _ReferenceProbe() * named
    return bool(count <= alone[which] < with_name[which])
