"""A fused call whose lists are given: it keeps its own plans, and repeats a call that was made before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _call
from ._plan import Plans
from ._warm import DIFFERENT, WarmCall, is_transformed, make_warm

if TYPE_CHECKING:
    from ._fuse import Fused


class Bound:
    """A fused call whose lists are given. Made by `Fused.bind`.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> halve = kernels.fuse(lambda x, by: x / by, inplace="x").bind([torch.ones(2)])
        >>> halve(2.0)
        [tensor([0.5000, 0.5000])]
    """

    def __init__(
        self, fused: Fused, given: dict[str, Any], out: Any, flat: bool, offsets: Sequence[int] | None
    ) -> None:
        self.fused = fused
        self._given = given
        self._values = [given.get(name) for name in fused.names]
        self._rest = [name for name in fused.names if name not in given]
        self._open = [i for i, name in enumerate(fused.names) if name not in given]
        self._options = (out, flat, offsets)
        self._plans = Plans()
        # Lists of private roles that are given once stay where they are; others are looked at in every call.
        self._stays = given.keys() <= fused.private
        self._warm: WarmCall | None = None

    def explain(self) -> Any:
        """Which form the last call ran, and why: an `Explanation` of its plan, or None before the first call.

        Example:
            >>> import torch
            >>> from moduli import kernels
            >>> count = kernels.fuse(lambda x, by: x + by).bind([torch.ones(3, dtype=torch.int64)])
            >>> count.explain(), count(1)
            (None, [tensor([2, 2, 2])])
            >>> count.explain().form
            'plain'
        """
        from ._explain import explain_plan

        return explain_plan(self._plans.kept[0], self._plans.kept[0].state) if self._plans.kept else None

    def __repr__(self) -> str:
        return f"{self.fused!r}.bind({', '.join(self._given)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run with the arguments that were left open, in the order of the function's parameters."""
        warm = self._warm
        if warm is not None and not kwargs:
            result = warm.run(args)
            if result is not DIFFERENT:
                return result
        if len(args) > len(self._rest):
            names = ", ".join(self._rest)
            raise TypeError(f"{self!r} takes {len(self._rest)} more arguments ({names}), got {len(args)}")
        if len(args) == len(self._rest) and not kwargs:
            values: Sequence[Any] = list(self._values)
            for i, value in zip(self._open, args, strict=True):
                values[i] = value  # type: ignore[index]
        else:
            given = {**self._given, **dict(zip(self._rest, args, strict=False)), **kwargs}
            values = self.fused._arguments((), given)
        if is_transformed():
            return _call.call(self.fused, values, *self._options, self._plans)
        request = _call.Request(self.fused, values, *self._options)
        plan, state = _call.find_plan(request, self._plans)
        result = _call.run_plan(request, plan, state)
        if self._stays:
            self._warm = make_warm(request, plan, state, self._rest)
        return result
