"""Binding the arguments of a function after the point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BoundFunction:
    """A user's function with bound arguments after the point.

    Args:
        fun: The function.
        args: The arguments, which are temporarily replaced while derivatives by them are computed.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fun, self.args = fun, args

    def __call__(self, x: Any) -> Any:
        """Return the function at a point."""
        return self.fun(x, *self.args)


def bind_args(fun: Callable[..., Any], args: Any) -> Callable[[Any], Any]:
    """Return the function of the point alone; as in SciPy, one argument need not be in a tuple."""
    several = args if isinstance(args, tuple) else (args,)
    return BoundFunction(fun, several) if several else fun
