"""Writing into a labelled tensor, and operations that place entries by label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._axes import Axes, DimLike, as_pair, cache_by_axes, intern_pairs
from ._elementwise import as_number
from ._gather import Gather, gather
from ._index import get
from ._matrix import order_of
from ._pairing import align_to_fixed, current_plan, refuse_transpose
from ._space import Space, freeze
from ._tensor import RULES, Tensor, _in_transform, as_tensor, finish, method, wrap


def _setitem(self: Tensor, key: Any, value: Any) -> None:
    """``t[key] = value``: the value's axes and labels are aligned to those of ``t[key]`` first."""
    write_into(self, lambda numbers: get(numbers, key), value)


def write_into(t: Tensor, choose: Callable[[Tensor], Tensor], value: Any) -> None:
    """Write a value, aligned by axis and label, into the selected entries of a tensor; gradients flow to both.

    Args:
        t: The tensor.
        choose: The selection; it is called with a tensor of the same axes.
        value: A number, a tensor or an array.
    """
    shape = t._data.shape
    # Selecting from the numbers 0, 1, 2, ... in place of the data gives the offset of every selected entry.
    numbers = torch.arange(t._data.numel(), device=t._data.device).reshape(shape)
    target = as_tensor(choose(wrap(numbers, t._axes)))  # inside a function transform, one without axes is plain
    aligned = _fit_value(value, target)
    if isinstance(aligned, torch.Tensor):
        aligned = _convert_value(aligned, t._data.dtype)
    t._data[torch.unravel_index(target._data, tuple(shape))] = aligned


def _fit_value(value: Any, target: Tensor) -> Any:
    if not isinstance(value, (Tensor, list, tuple)) and not hasattr(value, "__array__"):
        return as_number(value)
    value = as_tensor(value)
    return align_to_fixed(target._axes, value._axes, value._data, "a value", target._data)


def _convert_value(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a value in the dtype of its target; raise TypeError if the conversion would truncate.

    It is a copy because a value may share memory with the target.
    """
    if _order_dtype(data.dtype) > _order_dtype(dtype):
        raise TypeError(
            f"a value of {data.dtype} does not fit a tensor of {dtype}; convert one of them with .to(dtype)"
        )
    return data.to(dtype, copy=True)


def _order_dtype(dtype: torch.dtype) -> int:
    """Return 3 for complex numbers, 2 for floating ones, 1 for integers, 0 for booleans."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)


Tensor.__getitem__ = get  # type: ignore[method-assign,assignment]
Tensor.__setitem__ = _setitem  # type: ignore[method-assign,assignment]


def _in_place(name: str) -> Callable[..., Tensor]:
    function = getattr(torch.Tensor, name)

    def write(self: Tensor, other: Any, **options: Any) -> Tensor:
        if isinstance(other, Tensor) and (plan := current_plan(self._axes, (other._axes,))).transposes:
            refuse_transpose(plan)
        function(self._data, _fit_value(other, self), **options)
        return self

    return write


_add, _sub, _mul, _div, _pow, _copy = map(_in_place, ("add_", "sub_", "mul_", "div_", "pow_", "copy_"))


@method
def add_(t: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """Add to the tensor in place, as ``t += alpha * other``: the axes and labels of the other are aligned to those of ``t``.

    Args:
        t: The tensor, whose axes, labels and dtype stay.
        other: A number, or a tensor whose axes ``t`` has.
        alpha: A factor for the other.

    Returns:
        The tensor itself.

    Raises:
        ValueError: If axes or labels do not fit.
        RuntimeError: If it is a leaf that requires gradients, as in torch; write ``with torch.no_grad()`` around it.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0], x=["a", "b"])
        >>> t.add_(mo.tensor([10.0, 20.0], x=["b", "a"]))
        Tensor(x: a=21., b=12.)
    """
    return _add(t, other, alpha=alpha)


@method
def sub_(t: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """Subtract from the tensor in place; see `add_`.

    Args:
        t: The tensor, whose axes, labels and dtype stay.
        other: A number, or a tensor whose axes ``t`` has.
        alpha: A factor for the other.

    Returns:
        The tensor itself.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], "x").sub_(1.0)
        Tensor(x: [0., 1.])
    """
    return _sub(t, other, alpha=alpha)


@method
def mul_(t: Tensor, other: Any) -> Tensor:
    """Multiply the tensor in place; see `add_`.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], "x").mul_(0.5)
        Tensor(x: [0.5000, 1.0000])
    """
    return _mul(t, other)


@method
def div_(t: Tensor, other: Any) -> Tensor:
    """Divide the tensor in place; see `add_`.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], "x").div_(2.0)
        Tensor(x: [0.5000, 1.0000])
    """
    return _div(t, other)


@method
def copy_(t: Tensor, other: Any) -> Tensor:
    """Write other values into the tensor, which keeps its axes, labels and dtype; see `add_`.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(x=["a", "b"]).copy_(mo.tensor([1.0, 2.0], x=["b", "a"]))
        Tensor(x: a=2., b=1.)
    """
    return _copy(t, torch.as_tensor(other) if not isinstance(other, Tensor) else other)


@method
def fill_(t: Tensor, value: Any) -> Tensor:
    """Write one number to all entries.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(x=["a", "b"]).fill_(3.0)
        Tensor(x: a=3., b=3.)
    """
    t._data.fill_(value._data if isinstance(value, Tensor) else value)
    return t


@method
def zero_(t: Tensor) -> Tensor:
    """Write zeros to all entries.

    Example:
        >>> import moduli as mo
        >>> mo.ones(x=["a", "b"]).zero_()
        Tensor(x: a=0., b=0.)
    """
    t._data.zero_()
    return t


def _augment(write: Callable[..., Tensor], name: str) -> Callable[[Tensor, Any], Tensor]:
    def apply(self: Tensor, other: Any) -> Tensor:
        return write(self, other)

    apply.__name__ = apply.__qualname__ = name
    return apply


for _name, _write in {"iadd": _add, "isub": _sub, "imul": _mul, "itruediv": _div, "ipow": _pow}.items():
    setattr(Tensor, f"__{_name}__", _augment(_write, f"__{_name}__"))


@method
def index_add(t: Tensor, dim: DimLike, index: Any, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Add a source to selected entries along an axis; repeated entries add up.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        index: For each entry of the source its position in ``t`` (a vector), or None to go by the source's labels.
        source: What is added. Its other axes are paired with those of ``t``.
        alpha: A factor for the source.

    Raises:
        ValueError: If the source's axes do not fit.
        UnknownLabelError: If the index is None and the source has a label that ``t`` has not.

    Example:
        >>> import moduli as mo
        >>> t = mo.zeros(x=["a", "b", "c"])
        >>> t.index_add("x", None, mo.tensor([1.0, 2.0], x=["c", "a"]))
        Tensor(x: a=2., b=0., c=1.)
        >>> t.index_add("x", [0, 0], mo.tensor([1.0, 2.0], "x"))
        Tensor(x: a=3., b=0., c=0.)
    """
    source = as_tensor(source)
    at, own, its, positions = _plan_assignment(t._axes, source._axes, dim, index is None)
    data = align_to_fixed(own, its, source._data, "a source", None)
    if positions is not None:
        index = torch.tensor(positions, device=data.device, dtype=torch.int64)
    elif isinstance(index, Tensor):
        index = index._data
    index = torch.as_tensor(index, device=data.device)
    if not index.numel():  # an empty list has no integer dtype
        index = index.to(torch.int64)
    if index.ndim != 1 or index.shape[0] != data.shape[at] or index.is_floating_point():
        raise ValueError(
            f"the index of {t._axes.describe(at)} is a vector of {data.shape[at]} positions, got shape {tuple(index.shape)}"
        )
    for axis, size in enumerate(t._data.shape):
        if axis != at and data.shape[axis] != size:
            raise ValueError(f"{t._axes.describe(axis)} has size {size}, but the source has {data.shape[axis]} there")
    dtype = torch.promote_types(t._data.dtype, data.dtype)
    return wrap(torch.index_add(t._data.to(dtype), at, index, data.to(dtype), alpha=alpha), t._axes)


@cache_by_axes
def _plan_assignment(
    axes: Axes, source: Axes, dim: DimLike, by_label: bool
) -> tuple[int, Axes, Axes, tuple[int, ...] | None]:
    """Return the axis, the axes of both tensors without its labels, and the positions of the source's labels."""
    at = axes.axis(dim)
    by_name = axes.named and source.named
    if source.ndim != axes.ndim or (by_name and set(axes.names) != set(source.names)):
        raise ValueError(f"the source has the axes {list(source.names)}, the tensor {list(axes.names)}")
    place = source.names.index(axes.names[at]) if by_name else at
    own, other = axes.spaces[at], source.spaces[place]
    positions = None
    if by_label:
        if own is None or other is None or not (own.labelled and other.labelled):
            raise ValueError(f"without an index, {axes.describe(at)} must have labels in both tensors")
        positions = tuple(own.index(label) for label in other)
    return at, axes.put(at, (axes.names[at], None)), source.put(place, (source.names[place], None)), positions


@method
def one_hot(t: Tensor, space: Any, name: str | None = None) -> Tensor:
    """Return a new last axis with 1 at the position that each integer gives, and 0 elsewhere.

    Args:
        t: Integers from 0 to the size of the space.
        space: The classes: a Space, labels, or their number.
        name: The name of the new axis.

    Raises:
        TypeError: If the tensor does not hold integers.
        ValueError: If a number is out of range.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1, 0], "item").one_hot(["cat", "dog"], name="class").sel({"class": "dog"})
        Tensor(item: [1, 0])
    """
    t = as_tensor(t)
    axes, size = _classes(t._axes, freeze(space), name)
    if t._data.is_floating_point() or t._data.is_complex() or t._data.dtype is torch.bool:
        raise TypeError(f"one_hot takes integers, not {t._data.dtype}")
    if not torch.compiler.is_compiling() and t._data.numel() and not _in_transform():
        low, high = int(t._data.min()), int(t._data.max())
        if low < 0 or high >= size:
            raise ValueError(f"one_hot has {size} classes, but the numbers run from {low} to {high}")
    return wrap((t._data.unsqueeze(-1) == torch.arange(size, device=t._data.device)).to(torch.int64), axes)


@cache_by_axes
def _classes(axes: Axes, labels: Any, name: str | None) -> tuple[Axes, int]:
    space = Space(labels) if name is None else Space(labels).rename(name)
    return intern_pairs([*axes.pairs(), as_pair(space)]), len(space)


@method
def diagonal(t: Tensor, dim0: DimLike = -2, dim1: DimLike = -1) -> Tensor:
    """Return the entries whose two labels are equal, as a new last axis.

    Args:
        t: The tensor.
        dim0: One axis, by name or position; its labels and name are those of the result.
        dim1: The other; it has the same labels in any order.

    Raises:
        ValueError: If the labels differ, or sizes do.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["b", "a"])
        >>> t.diagonal()
        Tensor(row: a=2., b=3.)
    """
    at0, at1, plan, axes = _diagonal_axes(t._axes, dim0, dim1)
    data = t._data
    if data.shape[at0] != data.shape[at1]:
        raise ValueError(
            f"{t._axes.describe(at0)} has size {data.shape[at0]} and {t._axes.describe(at1)} size {data.shape[at1]}: "
            "a diagonal needs them equal"
        )
    if plan is not None:
        data = gather(data, at1, plan, 0.0)
    return finish(data.diagonal(0, at0, at1), axes)


@cache_by_axes
def _diagonal_axes(axes: Axes, dim0: DimLike, dim1: DimLike) -> tuple[int, int, Gather | None, Axes]:
    at0, at1 = axes.axis(dim0), axes.axis(dim1)
    if at0 == at1:
        raise ValueError(f"a diagonal needs two axes, got {axes.describe(at0)} twice")
    axes.refuse_broadcast((at0, at1), "", " and has no diagonal")
    plan = order_of(axes, at0, at1, "a diagonal needs")
    space = axes.spaces[at0] or axes.spaces[at1]
    return at0, at1, plan, intern_pairs([*axes.drop(at0, at1).pairs(), (axes.names[at0], space)])


@method
def diag_embed(t: Tensor, name: str | None = None) -> Tensor:
    """Return matrices on the last axis and a new one with the same labels, with the entries where the labels are equal.

    Args:
        t: The tensor.
        name: The name of the new, last axis.

    Raises:
        ValueError: If there is no axis, or the last one is BROADCAST.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], x=["a", "b"]).diag_embed("y").sel(y="b")
        Tensor(x: a=0., b=2.)
    """
    return wrap(torch.diag_embed(t._data), _embed_axes(t._axes, name))


@cache_by_axes
def _embed_axes(axes: Axes, name: str | None) -> Axes:
    if not axes.ndim:
        raise ValueError("a tensor without axes has nothing to put on a diagonal")
    axes.refuse_broadcast([axes.ndim - 1], "", " and can't become a diagonal")
    return intern_pairs([*axes.pairs(), (name, axes.spaces[-1])])


def _diagonal_rule(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    if offset:
        raise TypeError("an offset diagonal pairs entries with different labels; take it from t.data")
    return diagonal(input, dim1, dim2)


RULES.update({torch.diagonal: _diagonal_rule, torch.diag_embed: diag_embed})
RULES[torch.nn.functional.one_hot] = lambda tensor, num_classes=-1: one_hot(
    tensor, int(tensor._data.max()) + 1 if num_classes < 0 else num_classes
)
