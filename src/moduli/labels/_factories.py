"""Factories of labelled tensors: from data, filled with a number, or random.

`tensor` labels data that exists. The others take *dims*, one per axis, each a size (a positional axis), a Space, or a
list of labels; named axes may be given as keywords instead, ``zeros(batch=2, channel=["r", "g"])``. The names of the
options (``dtype``, ``device``, ``requires_grad``, ``generator``) can't be keywords for axes; write a Space then.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from .._torch import mark_constant
from ..device import Device, DeviceLike
from ._axes import SCALAR, Axes, axes_of, cache_by_axes, make_unnamed, split_names
from ._space import Space, freeze
from ._tensor import Tensor, finish

Dim: TypeAlias = int | Space | Iterable[Hashable]
Dims: TypeAlias = Dim | Sequence[Dim]
Dtype: TypeAlias = torch.dtype | None
Place: TypeAlias = DeviceLike | None
Like: TypeAlias = Tensor | torch.Tensor
Randomness: TypeAlias = torch.Generator | None


def tensor(
    data: Any,
    names: str | Space | Sequence[str | Space | None] | None = None,
    /,
    *,
    requires_grad: bool = False,
    dtype: Dtype = None,
    device: Place = None,
    **spaces: Dim | None,
) -> Tensor:
    """Label data: give its axes names, and their positions labels.

    ``tensor(data, "batch channel")`` names the axes. ``tensor(data, channel=["r", "g", "b"])`` names and labels them,
    in the order of the keywords. Both together: the names give the order, the keywords the labels of some.

    A torch tensor is kept with its memory and its gradient history, unless dtype or device ask for a conversion.
    Numbers, lists and NumPy arrays are copied, as by `torch.tensor`.

    Args:
        data: A torch tensor, a NumPy array, a number, or nested lists of numbers.
        names: The names of all axes, in one string (``"batch channel"``) or a sequence, where None is no name; or Spaces,
            such as the ``dims`` of another tensor.
        requires_grad: Make the data a leaf whose gradient is recorded. A torch tensor that is such a leaf already is
            kept; another one is copied, so that the caller's own does not change.
        dtype: The dtype of the result, by default that of the data.
        device: Where the result lives, by default where the data does.
        spaces: For each axis its labels, a Space, a size to check, or None for a positional axis.

    Returns:
        The labelled tensor.

    Raises:
        ValueError: If names, labels or sizes do not fit the data, or ``requires_grad=True`` is asked of a tensor that
            is part of a gradient graph (a leaf would cut it).
        TypeError: If the data is labelled already, or an axis is given by something else.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], channel=["r", "g", "b"])
        Tensor(channel: r=1., g=2., b=3.)
        >>> mo.tensor([[1.0, 2.0]], "batch channel", channel=["r", "g"]).dims
        (Space(1, name='batch'), Space(['r', 'g'], name='channel'))
        >>> mo.tensor([3.0, 4.0], mo.zeros(channel=["r", "g"]).dims)
        Tensor(channel: r=3., g=4.)
    """
    values = _values(data, dtype, _place(device))
    if requires_grad:
        values = _as_leaf(values, values is data)
    if names is None and not spaces:
        return finish(values, make_unnamed(values.ndim))
    named: Any = (
        names if names is None or isinstance(names, str) else (names,) if isinstance(names, Space) else tuple(names)
    )
    axes, sizes = _label_axes(SCALAR, named, values.ndim, tuple(spaces), *[_freeze(dim) for dim in spaces.values()])
    for axis, size in enumerate(sizes):
        if size >= 0 and values.shape[axis] != size:
            space = axes.dims([max(s, 0) for s in sizes])[axis]
            raise ValueError(
                f"{axes.describe(axis)} of the data has size {values.shape[axis]} (the shape is "
                f"{tuple(values.shape)}), but its space has {size}: {space!r}"
            )
    return finish(values, axes)


def _as_leaf(values: torch.Tensor, shared: bool) -> torch.Tensor:
    """Return data that records gradients: itself if it is such a leaf, a copy if it is the caller's tensor."""
    if values.requires_grad and values.is_leaf:
        return values
    if values.requires_grad:
        raise ValueError(
            "requires_grad=True asks for a leaf, but the data is part of a gradient graph, which a leaf would cut; "
            "leave the argument away to keep the graph, or pass data.detach() to start a new one"
        )
    return (values.clone() if shared else values).requires_grad_()


def _values(data: Any, dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
    if isinstance(data, Tensor):
        raise TypeError(
            "the data is labelled already, with axes "
            f"{data._axes!r}; use t.rename(...) or t.relabel(...) to change them, or label t.data anew"
        )
    if isinstance(data, torch.Tensor):
        return data if dtype is None and device is None else data.to(device=device, dtype=dtype)
    if isinstance(data, np.ndarray):
        return torch.from_numpy(np.array(data, order="C")).to(device=device, dtype=dtype)
    return torch.tensor(data, dtype=dtype, device=device)


@cache_by_axes
def _label_axes(
    anchor: Axes, names: str | tuple[str | Space | None, ...] | None, ndim: int, keys: tuple[str, ...], *dims: Any
) -> tuple[Axes, tuple[int, ...]]:
    """Return the axes, and for each its size, -1 where any size fits."""
    order: list[str | None]
    if names is None:
        order = list(keys)
    else:
        listed = split_names(names) if isinstance(names, str) else names
        order = [each.name if isinstance(each, Space) else each for each in listed]
        strange = [key for key in keys if key not in order]
        if strange:
            raise ValueError(f"labels are given for {strange}, but the names of the axes are {order}")
    if len(order) != ndim:
        hint = "" if names is not None else "; name the positional ones too, as in batch=None"
        raise ValueError(f"the data has {ndim} axes, but {len(order)} are named: {order}{hint}")
    dims_by_name: dict[str | None, Any] = dict(zip(keys, dims, strict=True))
    layout = [dims_by_name.get(name) for name in order]
    for axis, each in enumerate(listed if names is not None else ()):
        if isinstance(each, Space):
            if each.name in dims_by_name:
                raise ValueError(f"axis {each.name!r} is given twice, by a Space and by a keyword")
            layout[axis] = each
    return _layout(anchor, tuple(order), *layout)


def _place(device: Place) -> torch.device | None:
    return None if device is None else Device.new(device).torch_device()


def _freeze(dim: Any) -> Any:
    """Return one axis in a hashable form that can be a constant under torch.compile."""
    frozen = freeze(dim)
    # 1, 1.0 and True are equal keys of the cache, so values other than sizes raise before any look-up.
    if isinstance(frozen, (bool, float, complex)):
        raise TypeError(f"an axis is given by a size, a Space or a list of labels, not by {dim!r}")
    return frozen


@cache_by_axes
def _layout(anchor: Axes, names: tuple[str | None, ...], *dims: Any) -> tuple[Axes, tuple[int, ...]]:
    """Return the axes, and for each its size, -1 for `None`, whose size the caller knows."""
    spaces = [Space(0, name) if dim is None else Space(dim, name) for name, dim in zip(names, dims, strict=True)]
    sizes = tuple(-1 if dim is None else len(space) for dim, space in zip(dims, spaces, strict=True))
    return axes_of(spaces), sizes


# Devices are known at trace time.
mark_constant(_place)


# -- filled ------------------------------------------------------------------------------------------------------------


def _dims(dims: tuple[Any, ...], spaces: dict[str, Any]) -> tuple[list[int], Axes]:
    """Return the shape and the axes of a new tensor."""
    if len(dims) == 1 and _are_dims(dims[0]):
        dims = tuple(dims[0])
    entries = [*dims, *spaces.values()]
    if any(dim is None for dim in entries):
        raise TypeError("an axis is given by a size, a Space or a list of labels, not by None")
    # Sizes are not arguments of the cached function, so that a new size does not recompile.
    kinds = [None if _is_size(dim) else _freeze(dim) for dim in entries]
    axes, sizes = _layout(SCALAR, (None,) * len(dims) + tuple(spaces), *kinds)
    return [_size(dim) if size < 0 else size for dim, size in zip(entries, sizes, strict=True)], axes


def _are_dims(dims: Any) -> bool:
    """Whether one argument is all dims: a tuple is, and a list unless an entry can only be a label."""
    if isinstance(dims, list):
        return all(isinstance(dim, Space | list | range) or _is_size(dim) for dim in dims)
    return isinstance(dims, tuple)


def _is_size(dim: Any) -> bool:
    return isinstance(dim, (int, torch.SymInt, np.integer)) and not isinstance(dim, (bool, np.timedelta64))


def _size(dim: Any) -> int:
    if dim < 0:
        raise ValueError(f"the size of an axis can't be negative, got {dim}")
    return operator.index(dim) if isinstance(dim, np.integer) else dim


def zeros(*dims: Dims, dtype: Dtype = None, device: Place = None, requires_grad: bool = False, **spaces: Dim) -> Tensor:
    """Return a tensor of zeros.

    Args:
        dims: One per axis: a size, a Space, or a list of labels; or one tuple or list of those. A lone list whose
            entries can't be dims, such as ``["a", "b"]``, is the labels of one axis.
        dtype: The dtype, torch's default one if None.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.
        spaces: Further axes by name.

    Returns:
        The tensor.

    Raises:
        TypeError: If a dim is a boolean, a string or anything else that is no axis.
        ValueError: If a size is negative, a label occurs twice, or two axes have the same name.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(channel=["r", "g"])
        Tensor(channel: r=0., g=0.)
        >>> mo.zeros(2, mo.Space(["a", "b"], name="x")).dims
        (Space(2), Space(['a', 'b'], name='x'))
    """
    shape, axes = _dims(dims, spaces)
    return finish(torch.zeros(shape, dtype=dtype, device=_place(device), requires_grad=requires_grad), axes)


def ones(*dims: Dims, dtype: Dtype = None, device: Place = None, requires_grad: bool = False, **spaces: Dim) -> Tensor:
    """Return a tensor of ones.

    Args:
        dims: One per axis: a size, a Space, or a list of labels; or one tuple or list of those (see `zeros`).
        dtype: The dtype, torch's default one if None.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.
        spaces: Further axes by name.

    Returns:
        The tensor.

    Raises:
        TypeError: If a dim is no axis.
        ValueError: If a size is negative, a label occurs twice, or two axes have the same name.

    Example:
        >>> import moduli as mo
        >>> mo.ones(["a", "b"])
        Tensor(a=1., b=1.)
    """
    shape, axes = _dims(dims, spaces)
    return finish(torch.ones(shape, dtype=dtype, device=_place(device), requires_grad=requires_grad), axes)


def full(
    dims: Dims,
    fill_value: complex,
    /,
    *,
    dtype: Dtype = None,
    device: Place = None,
    requires_grad: bool = False,
    **spaces: Dim,
) -> Tensor:
    """Return a tensor of one number.

    Args:
        dims: One axis, or a tuple or list of axes, each a size, a Space, or a list of labels; ``()`` to give all by
            name.
        fill_value: The number.
        dtype: The dtype, that which torch has for the number if None.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.
        spaces: Further axes by name.

    Returns:
        The tensor.

    Raises:
        TypeError: If a dim is no axis.
        ValueError: If a size is negative, a label occurs twice, or two axes have the same name.

    Example:
        >>> import moduli as mo
        >>> mo.full((), 7.0, channel=["r", "g"])
        Tensor(channel: r=7., g=7.)
    """
    shape, axes = _dims((dims,), spaces)
    data = torch.full(shape, fill_value, dtype=dtype, device=_place(device), requires_grad=requires_grad)
    return finish(data, axes)


def empty(*dims: Dims, dtype: Dtype = None, device: Place = None, requires_grad: bool = False, **spaces: Dim) -> Tensor:
    """Return a tensor with uninitialised values.

    Args:
        dims: One per axis: a size, a Space, or a list of labels; or one tuple or list of those (see `zeros`).
        dtype: The dtype, torch's default one if None.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.
        spaces: Further axes by name.

    Returns:
        The tensor.

    Raises:
        TypeError: If a dim is no axis.
        ValueError: If a size is negative, a label occurs twice, or two axes have the same name.

    Example:
        >>> import moduli as mo
        >>> mo.empty(row=2, column=["a", "b"]).shape
        torch.Size([2, 2])
    """
    shape, axes = _dims(dims, spaces)
    return finish(torch.empty(shape, dtype=dtype, device=_place(device), requires_grad=requires_grad), axes)


def rand(
    *dims: Dims,
    generator: Randomness = None,
    dtype: Dtype = None,
    device: Place = None,
    requires_grad: bool = False,
    **spaces: Dim,
) -> Tensor:
    """Return a tensor of numbers drawn uniformly from [0, 1).

    Args:
        dims: One per axis: a size, a Space, or a list of labels; or one tuple or list of those (see `zeros`).
        generator: Where the randomness comes from, torch's global one if None.
        dtype: The dtype, torch's default one if None.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.
        spaces: Further axes by name.

    Returns:
        The tensor.

    Raises:
        TypeError: If a dim is no axis.
        ValueError: If a size is negative, a label occurs twice, or two axes have the same name.

    Example:
        >>> import moduli as mo
        >>> mo.rand(3, channel=["r", "g"]).shape
        torch.Size([3, 2])
    """
    shape, axes = _dims(dims, spaces)
    data = torch.rand(shape, generator=generator, dtype=dtype, device=_place(device), requires_grad=requires_grad)
    return finish(data, axes)


def randn(
    *dims: Dims,
    generator: Randomness = None,
    dtype: Dtype = None,
    device: Place = None,
    requires_grad: bool = False,
    **spaces: Dim,
) -> Tensor:
    """Return a tensor of numbers drawn from the normal distribution of mean 0 and variance 1.

    Args:
        dims: One per axis: a size, a Space, or a list of labels; or one tuple or list of those (see `zeros`).
        generator: Where the randomness comes from, torch's global one if None.
        dtype: The dtype, torch's default one if None.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.
        spaces: Further axes by name.

    Returns:
        The tensor.

    Raises:
        TypeError: If a dim is no axis.
        ValueError: If a size is negative, a label occurs twice, or two axes have the same name.

    Example:
        >>> import moduli as mo
        >>> mo.randn(3, channel=["r", "g"]).names
        (None, 'channel')
    """
    shape, axes = _dims(dims, spaces)
    data = torch.randn(shape, generator=generator, dtype=dtype, device=_place(device), requires_grad=requires_grad)
    return finish(data, axes)
