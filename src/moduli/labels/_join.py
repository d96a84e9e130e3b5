"""What to do when the labels of two axes differ: the join policy, per scope."""

from __future__ import annotations

import threading
from typing import Final

POLICIES: Final = ("exact", "outer", "inner", "left")


class _Policy(threading.local):
    """The policy in force, one per thread."""

    def __init__(self) -> None:
        self.how: str = "exact"
        self.fill: complex = 0.0
        self.before: list[tuple[str, complex]] = []


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
        fill: The number that stands for a missing entry.

    Raises:
        ValueError: If the policy is not one of the four.

    Example:
        >>> import moduli as mo
        >>> a = mo.tensor([1.0, 2.0], x=["a", "b"])
        >>> b = mo.tensor([10.0, 20.0], x=["b", "c"])
        >>> with mo.join("outer", fill=0.0):
        ...     c = a + b
        >>> c.dims[0].labels, c.data.tolist()
        (('a', 'b', 'c'), [1.0, 12.0, 20.0])
        >>> with mo.join("inner"):
        ...     print((a + b).data.tolist())
        [12.0]
    """

    def __init__(self, how: str, fill: complex = 0.0) -> None:
        if how not in POLICIES:
            raise ValueError(f"a join policy is one of {', '.join(map(repr, POLICIES))}, not {how!r}")
        if isinstance(fill, bool) or not isinstance(fill, (int, float, complex)):
            raise TypeError(f"fill is a number, not {fill!r}")
        self.how = how
        self.fill = fill

    def __enter__(self) -> join:
        policy.before.append((policy.how, policy.fill))
        policy.how, policy.fill = self.how, self.fill
        return self

    def __exit__(self, *exception: object) -> None:
        policy.how, policy.fill = policy.before.pop()
