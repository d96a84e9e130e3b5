"""What to do when the labels of two axes differ: the join policy, per scope."""

from __future__ import annotations

import math
import threading
from typing import Final

POLICIES: Final = ("exact", "outer", "inner", "left")


class _Policy(threading.local):
    """The policy in force, one per thread."""

    def __init__(self) -> None:
        self.how: str = "exact"
        self.fill: complex | None = None
        self.before: list[tuple[str, complex | None]] = []


policy: Final = _Policy()


class join:
    """Choose how labels that occur on one side only are treated, within a scope.

    By default (``"exact"``) two labelled axes pair only if they have the same labels, in any order. Inside the scope

    * ``"outer"`` keeps the labels of both sides, the left's first, and takes ``fill`` where an operand has none;
    * ``"inner"`` keeps the common labels, in the left's order;
    * ``"left"`` keeps the left's labels, takes ``fill`` where the right has none, and drops the right's others;
    * ``"exact"`` restores the default inside another scope.

    Positional axes have no labels to join by: their sizes must agree under every policy. The choice belongs to the
    thread, and scopes nest.

    Args:
        how: The policy.
        fill: The number that stands for a missing entry. By default it is NaN in floating and complex tensors; integers and
            booleans have none, and a missing entry of theirs is refused.

    Raises:
        ValueError: If the policy is not one of the four.
        TypeError: If fill is not a number; within the scope, if an entry of integers is missing and there is no fill.

    Example:
        >>> import moduli as mo
        >>> a = mo.tensor([1.0, 2.0], x=["a", "b"])
        >>> b = mo.tensor([10.0, 20.0], x=["b", "c"])
        >>> with mo.join("outer", fill=0.0):
        ...     c = a + b
        >>> c.dims[0].labels, c.data.tolist()
        (('a', 'b', 'c'), [1.0, 12.0, 20.0])
        >>> with mo.join("outer"):
        ...     print((a * b).data.tolist())
        [nan, 20.0, nan]
        >>> with mo.join("inner"):
        ...     print((a + b).data.tolist())
        [12.0]
    """

    def __init__(self, how: str, fill: complex | None = None) -> None:
        if how not in POLICIES:
            raise ValueError(f"a join policy is one of {', '.join(map(repr, POLICIES))}, not {how!r}")
        if fill is not None and (isinstance(fill, bool) or not isinstance(fill, (int, float, complex))):
            raise TypeError(f"fill is a number, not {fill!r}")
        self.how = how
        # Plans are remembered by their fill, and of all NaNs only one object is found again.
        self.fill = math.nan if fill != fill else fill

    def __enter__(self) -> join:
        policy.before.append((policy.how, policy.fill))
        policy.how, policy.fill = self.how, self.fill
        return self

    def __exit__(self, *exception: object) -> None:
        policy.how, policy.fill = policy.before.pop()
