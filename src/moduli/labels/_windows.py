"""Operations on neighbours along an axis: differences, shifts, rolling windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F

from . import _fold as fold
from ._axes import Axes, DimLike, cache_by_axes
from ._tensor import RULES, Tensor, finish, method


@method
def diff(t: Tensor, dim: DimLike, n: int = 1, *, label: str = "upper") -> Tensor:
    """Return the differences of neighbours along an axis, as torch's ``diff``.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        n: How often differences are taken; the axis is shorter by as many entries.
        label: The labels that are left: those of the later of two neighbours (``"upper"``), or of the earlier (``"lower"``).

    Returns:
        The differences.

    Raises:
        ValueError: If n is negative, the axis is BROADCAST, or label is something else.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 4.0, 9.0], x=["a", "b", "c"]).diff("x")
        Tensor(x: b=3., c=5.)
    """
    if n < 0 or label not in ("upper", "lower"):
        raise ValueError(f"diff takes n >= 0 and label='upper' or 'lower', not n={n} and label={label!r}")
    axis, axes = _cut_axis(t._axes, dim, n, label)
    return finish(torch.diff(t._data, n, dim=axis), axes) if n else t


@cache_by_axes
def _cut_axis(axes: Axes, dim: DimLike, n: int, label: str) -> tuple[int, Axes]:
    axis = axes.axis(dim)
    axes.refuse_broadcast([axis], "diff along ", ", which has no neighbours")
    name, space = axes.names[axis], axes.spaces[axis]
    if space is None:
        return axis, axes
    part = slice(n, None) if label == "upper" else slice(0, max(len(space) - n, 0))
    shorter = axes.put(axis, (name, space[part]))
    return axis, axes.carry(shorter, {} if name is None else {name: part})


@method
def shift(t: Tensor, shifts: Mapping[Any, int] | None = None, /, fill: complex | None = None, **named: int) -> Tensor:
    """Shift the entries along axes by a number of positions; labels stay.

    Args:
        t: The tensor.
        shifts: Axis (name or position) to number of places, as a mapping.
        fill: The value of places that nothing moves to; NaN by default, which integers and booleans do not have.
        named: Axis name to number of places; negative ones move towards the start.

    Returns:
        The tensor with the same axes.

    Raises:
        TypeError: If there is no fill for integers or booleans.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 4.0, 9.0], x=["a", "b", "c"])
        >>> t.shift(x=1), t - t.shift(x=-1, fill=0.0)
        (Tensor(x: a=nan, b=1., c=4.), Tensor(x: a=-3., b=-5., c=9.))
    """
    data, fill = choose_fill(t._data, fill, "t.shift(..., fill=0)")
    for which, places in {**(shifts or {}), **named}.items():
        axis = t._axes.axis(which)
        size = data.shape[axis]
        places = max(-size, min(size, places))
        data = F.pad(data, [0, 0] * (data.ndim - 1 - axis) + [places, -places], value=fill)  # type: ignore[arg-type]
    return finish(data, t._axes)


def choose_fill(data: torch.Tensor, fill: complex | None, how: str) -> tuple[torch.Tensor, complex]:
    """Return the data in a dtype that holds the fill of missing entries, and the fill: NaN by default.

    Args:
        data: The data.
        fill: The number, or None.
        how: How to say it, for the error.

    Raises:
        TypeError: If none is given for data that has no NaN.
    """
    floating = data.is_floating_point() or data.is_complex()
    if fill is None and not floating:
        raise TypeError(
            f"entries are missing in a tensor of {data.dtype}, which has no NaN to put there: say what to take, as in {how}, "
            "or convert it first with t.float()"
        )
    if fill is None:
        return data, math.nan
    if isinstance(fill, complex) and not data.is_complex():
        return data.to((data.dtype if floating else torch.get_default_dtype()).to_complex()), fill
    if not floating and not (isinstance(fill, (int, bool)) or float(fill.real).is_integer()):
        return data.to(torch.get_default_dtype()), fill
    return data, fill


# -- rolling windows -----------------------------------------------------------------------------------------------------


@method
def rolling(
    t: Tensor,
    windows: Mapping[Any, int] | None = None,
    /,
    *,
    center: bool = False,
    min_periods: int | None = None,
    **named: int,
) -> Rolling:
    """Return windows that roll over axes, of which means and other statistics can be taken.

    Args:
        t: The tensor. Integers become the default dtype.
        windows: Axis (name or position) to the size of the window, as a mapping.
        center: Whether a label is in the middle of its window; otherwise it is its last one.
        min_periods: How many entries of a window must be there and not NaN for a result; otherwise it is NaN. By default all.
        named: Axis name to the size of the window.

    Returns:
        The windows, whose methods are `Rolling.mean`, `Rolling.sum` and so on.

    Raises:
        ValueError: If a window is smaller than 1, or no axis is given.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0, 6.0, 7.0], time=[1990, 1991, 1992, 1993])
        >>> t.rolling(time=2).mean(), t.rolling(time=3, center=True, min_periods=2).sum()
        (Tensor(time: 1990=nan, 1991=1.5000, 1992=4.0000, 1993=6.5000), Tensor(time: 1990=3., 1991=9., 1992=15., 1993=13.))
    """
    sizes = {t._axes.axis(which): size for which, size in {**(windows or {}), **named}.items()}
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        raise ValueError(f"rolling takes the size of a window for some axes, as in t.rolling(time=3), not {sizes}")
    t._axes.refuse_broadcast(sizes, "rolling over ", ", which has no neighbours")
    needed = math.prod(list(sizes.values())) if min_periods is None else min_periods
    return Rolling(t, sizes, center, needed)


class Rolling:
    """Windows that roll over axes of a tensor; made by `rolling`.

    Entries that are NaN are left out, as are those beyond the ends; windows of which too few are left give NaN.

    Example:
        >>> import moduli as mo
        >>> windows = mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2)
        >>> windows.max(), windows.count()
        (Tensor(time: [nan, 3., 3.]), Tensor(time: [1, 2, 2]))
    """

    def __init__(self, t: Tensor, sizes: Mapping[int, int], center: bool, needed: int) -> None:
        self._axes: Final = t._axes
        self._sizes: Final = dict(sizes)
        self._center: Final = center
        self._needed: Final = needed
        data = t._data
        self._data: Final = data if fold.has_nan(data) else data.to(torch.get_default_dtype())

    def construct(self, *names: str | None, fill: complex | None = None) -> Tensor:
        """Return the windows along new last axes, with NaN, or ``fill``, beyond the ends.

        Args:
            names: The names of the new axes, one per axis that the windows roll over; none by default.
            fill: The value beyond the ends.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2).construct("lag", fill=0.0).data.tolist()
            [[0.0, 1.0], [1.0, 3.0], [3.0, 2.0]]
        """
        if names and len(names) != len(self._sizes):
            raise ValueError(f"{len(names)} names for the {len(self._sizes)} axes of windows: {list(names)}")
        axes = _append_axes(self._axes, names or (None,) * len(self._sizes))
        return finish(self._unfold(math.nan if fill is None else fill), axes)

    def sum(self) -> Tensor:
        """Return the sum of each window.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2, min_periods=1).sum()
            Tensor(time: [1., 4., 5.])
        """
        return self._reduce(lambda over, data: fold.add(over, data, True))

    def mean(self) -> Tensor:
        """Return the mean of each window.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2, min_periods=1).mean()
            Tensor(time: [1.0000, 2.0000, 2.5000])
        """
        return self._reduce(lambda over, data: fold.mean(over, data, True))

    def min(self) -> Tensor:
        """Return the smallest entry of each window.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2, min_periods=1).min()
            Tensor(time: [1., 1., 2.])
        """
        return self._reduce(lambda over, data: fold.extreme(over, data, "amin", True))

    def max(self) -> Tensor:
        """Return the largest entry of each window.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2, min_periods=1).max()
            Tensor(time: [1., 3., 3.])
        """
        return self._reduce(lambda over, data: fold.extreme(over, data, "amax", True))

    def var(self, *, correction: float = 1) -> Tensor:
        """Return the variance of each window.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2, min_periods=1).var(correction=0)
            Tensor(time: [0.0000, 1.0000, 0.2500])
        """
        return self._reduce(lambda over, data: fold.var(over, data, True, correction))

    def std(self, *, correction: float = 1) -> Tensor:
        """Return the standard deviation of each window.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 2.0], "time").rolling(time=2, min_periods=1).std(correction=0)
            Tensor(time: [0.0000, 1.0000, 0.5000])
        """
        return self._reduce(lambda over, data: fold.std(over, data, True, correction))

    def count(self) -> Tensor:
        """Return the number of entries of each window that exist and are not NaN.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, float("nan"), 2.0], "time").rolling(time=2).count()
            Tensor(time: [1, 1, 1])
        """
        over, data = self._fold(), self._unfold(math.nan)
        return finish(fold.count(over, data, True).squeeze(over.axes), self._axes)

    def _fold(self) -> fold.AxesFold:
        first = self._data.ndim
        return fold.AxesFold(tuple(range(first, first + len(self._sizes))))

    def _reduce(self, function: Any) -> Tensor:
        over, data = self._fold(), self._unfold(math.nan)
        result, number = function(over, data), fold.count(over, data, True)
        return finish(torch.where(number >= self._needed, result, math.nan).squeeze(over.axes), self._axes)

    def _unfold(self, fill: complex) -> torch.Tensor:
        data = self._data
        for axis, size in self._sizes.items():
            before = size // 2 if self._center else size - 1
            pad = [0, 0] * (data.ndim - 1 - axis) + [before, size - 1 - before]
            empty = not data.shape[axis]
            # A window does not fit into an axis without entries, so one is added and dropped again.
            data = F.pad(data, [*pad[:-1], pad[-1] + empty], value=fill).unfold(axis, size, 1)  # type: ignore[arg-type]
            data = data.narrow(axis, 0, 0) if empty else data
        return data


@cache_by_axes
def _append_axes(axes: Axes, names: tuple[str | None, ...]) -> Axes:
    result = axes
    for name in names:
        result = result.insert(result.ndim, (name, None))[1]
    return axes.carry(result)


def _diff_rule(input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    if prepend is not None or append is not None:
        raise TypeError("diff of labelled tensors takes no prepend or append; join them first with mo.cat")
    return diff(input, dim, n)


RULES[torch.diff] = _diff_rule
