"""Operations on axes: rename, relabel, permute, insert, remove."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._axes import Axes, DimLike, DimsLike, as_key, as_pair, axes_of, cache_by_axes, intern, intern_pairs, split_names
from ._pairing import PairingPlan, apply_step, pair
from ._space import BROADCAST, Space, freeze
from ._tensor import Tensor, finish, method, wrap


@method
def rename(
    t: Tensor, names: str | Mapping[Any, str | None] | Sequence[str | None] | None = None, /, **new: str | None
) -> Tensor:
    """Return the same tensor with other axis names.

    Args:
        t: The tensor.
        names: All names in order (``"row column"`` or a sequence, None for no name), or a mapping from old names or
            positions to new names. Further coordinates can be renamed, too.
        new: Old name to new name, as keywords.

    Raises:
        UnknownLabelError: If an old name does not exist.
        ValueError: If two axes would have the same name, or the number of names is wrong.

    Example:
        >>> import moduli as mo
        >>> t = mo.zeros(2, 3).rename("row column")
        >>> t.rename(row="line").names
        ('line', 'column')
        >>> t.rename({0: None}).names
        (None, 'column')
    """
    if isinstance(names, str):
        names = split_names(names)
    if isinstance(names, Mapping):
        changes = tuple(names.items())
    elif names is not None:
        names = tuple(names)
        if len(names) != t._axes.ndim:
            raise ValueError(f"{len(names)} names for {t._axes.ndim} axes: {list(names)}; {t._axes.listing()}")
        changes = tuple(enumerate(names))
    else:
        changes = ()
    return wrap(t._data, _rename_axes(t._axes, (*changes, *new.items())))


@cache_by_axes
def _rename_axes(axes: Axes, changes: tuple[tuple[DimLike, str | None], ...]) -> Axes:
    names, further = list(axes.names), {}
    for old, name in changes:
        if (
            isinstance(old, str)
            and old not in axes.names
            and axes.coordinates is not None
            and old in axes.coordinates.entries
        ):
            further[old] = name
        else:
            names[axes.axis(old)] = name
    coordinates = axes.coordinates
    if coordinates is not None:
        further |= {old: name for old, name in zip(axes.names, names, strict=True) if old is not None}
        coordinates = coordinates.rename(further)
    return intern(names, axes.spaces, coordinates)


@method
def relabel(t: Tensor, dim: DimLike | None = None, labels: Any = None, /, **new: Any) -> Tensor:
    """Return the same numbers with other labels on some axes.

    Args:
        t: The tensor.
        dim: One axis, by name or position, whose labels follow as the next argument.
        labels: Its labels: a Space, a list of labels, or None to make the axis positional.
        new: Axis name to labels, as keywords.

    Raises:
        ValueError: If the number of labels is not the size of the axis.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0], "x")
        >>> t.relabel(x=["a", "b"])
        Tensor(x: a=1., b=2.)
        >>> t.relabel(x=["a", "b"]).relabel("x", None).dims
        (Space(2, name='x'),)
    """
    changes: list[tuple[DimLike, Any]] = [(name, freeze(entries)) for name, entries in new.items()]
    if dim is not None:
        changes.append((dim, freeze(labels)))
    axes, sizes = _relabel_axes(t._axes, tuple(changes))
    for at, size in sizes:
        if t._data.shape[at] != size:
            raise ValueError(f"{t._axes.describe(at)} has size {t._data.shape[at]}, but {size} labels were given")
    return wrap(t._data, axes)


@cache_by_axes
def _relabel_axes(axes: Axes, changes: tuple[tuple[DimLike, Any], ...]) -> tuple[Axes, tuple[tuple[int, int], ...]]:
    pairs = axes.pairs()
    sizes = []
    for which, labels in changes:
        at = axes.axis(which)
        name, space = axes.names[at], None
        if labels is not None:
            sizes.append((at, len(Space(labels))))
            own, space = as_pair(Space(labels))
            name = name if own is None else own
        pairs[at] = (name, space)
    result = intern_pairs(pairs)
    if axes.coordinates is None:
        return result, tuple(sizes)
    coordinates = axes.coordinates.rename(
        {old: new for old, new in zip(axes.names, result.names, strict=True) if old is not None}
    )
    if coordinates is not None:  # drop the attributes of labels that are replaced
        relabelled = {result.names[axes.axis(which)] for which, _ in changes}
        entries = coordinates.entries.items()
        coordinates = coordinates.replace(
            {k: entry for k, entry in entries if entry.values is not None or k not in relabelled}
        )
    return result.mark(coordinates), tuple(sizes)


@method
def align_to(t: Tensor, dims: Iterable[Space]) -> Tensor:
    """Return the tensor with its axes and labels in the order of the given Spaces.

    If all axes on both sides have names, axes are matched by name, otherwise by position. Labels must be the same, in any
    order; a positional axis takes the labels of a Space of its size, and BROADCAST stretches.

    Args:
        t: The tensor.
        dims: One Space per axis of the result.

    Raises:
        ValueError: If axes or labels differ; the message lists what is missing on each side.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0], x=["a", "b"])
        >>> t.align_to([mo.Space(["b", "a"], name="x")])
        Tensor(x: b=2., a=1.)
    """
    dims = tuple(dims)
    plan, sizes = _alignment(t._axes, dims, tuple(t._data.shape))
    step = plan.steps[1]
    data = t._data if step is None else apply_step(t._data, step, plan.fill)
    return wrap(data if sizes is None else data.expand(sizes), plan.axes)


@cache_by_axes
def _alignment(
    axes: Axes, dims: tuple[Space, ...], shape: tuple[int, ...]
) -> tuple[PairingPlan, tuple[int, ...] | None]:
    """Return the plan that aligns an operand to Spaces, and the sizes to expand it to, or None."""
    target = axes_of(dims)
    if target.ndim != axes.ndim:
        raise ValueError(f"can't align {axes.ndim} axes to {target.ndim} spaces; {axes.listing()}, to be {dims}")
    by_name = axes.named and target.named
    if by_name and set(axes.names) != set(target.names):
        raise ValueError(f"can't align axes {list(axes.names)} to axes {list(target.names)}: the names differ")
    order = [axes.names.index(name) for name in target.names] if by_name else range(axes.ndim)
    for source, wanted in zip(order, dims, strict=True):
        if not axes.stretches(source):
            _check_target(axes, source, shape[source], wanted)
    sizes = tuple(len(space) for space in dims)
    stretches = sizes != tuple(shape[source] for source in order)
    return pair(target, (axes,), "exact", 0.0), sizes if stretches else None


def _check_target(axes: Axes, source: int, size: int, wanted: Space) -> None:
    """Raise ValueError if an axis that is not BROADCAST can't get the labels of a Space."""
    called = axes.describe(source)
    if wanted.broadcast:
        raise ValueError(f"{called} can't be aligned to {wanted!r}: it is not BROADCAST, and must not start to stretch")
    if size != len(wanted) and not (axes.spaces[source] is not None and wanted.labelled):
        raise ValueError(f"{called} has size {size}, but it is to have the {len(wanted)} labels of {wanted!r}")


# -- order -------------------------------------------------------------------------------------------------------------


@method
def permute(t: Tensor, *dims: DimsLike) -> Tensor:
    """Permute the axes.

    Args:
        t: The tensor.
        dims: All axes in the new order: names, positions, or one string of names.

    Raises:
        ValueError: If an axis is missing or given twice.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(2, 3, 4).rename("a b c").permute("c a b").shape
        torch.Size([4, 2, 3])
    """
    order = _order(t._axes, dims[0] if len(dims) == 1 else dims)
    return wrap(t._data.permute(order[0]), order[1])


@cache_by_axes
def _order(axes: Axes, dims: Any) -> tuple[tuple[int, ...], Axes]:
    order = axes.axes(dims)
    if len(order) != axes.ndim:
        raise ValueError(f"a permutation names every axis once, got {dims!r}; {axes.listing()}")
    return order, axes.take(order)


@method
def transpose(t: Tensor, dim0: DimLike, dim1: DimLike) -> Tensor:
    """Exchange two axes.

    Args:
        t: The tensor.
        dim0: One axis, by name or position.
        dim1: The other.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(2, 3).rename("a b").transpose("a", "b").names
        ('b', 'a')
    """
    order = list(range(t._axes.ndim))
    a, b = t._axes.axis(dim0), t._axes.axis(dim1)
    order[a], order[b] = b, a
    return permute(t, tuple(order))


@method
def h(t: Tensor, dim0: DimLike = -2, dim1: DimLike = -1) -> Tensor:
    """Return the conjugate transpose: two axes exchanged, and every element conjugated.

    Args:
        t: The tensor.
        dim0: One axis; the second-last by default.
        dim1: The other; the last by default.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1 + 2j]], "row column").h().item()
        (1-2j)
    """
    exchanged = transpose(t, dim0, dim1)
    return wrap(exchanged._data.conj(), exchanged._axes)


@method
def movedim(t: Tensor, source: DimLike, destination: int) -> Tensor:
    """Move one axis to another position; the others keep their order.

    Args:
        t: The tensor.
        source: The axis, by name or position.
        destination: Its position in the result.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(2, 3, 4).rename("a b c").movedim("c", 0).names
        ('c', 'a', 'b')
    """
    at, to = t._axes.axis(source), t._axes.axis(destination)
    order = [i for i in range(t._axes.ndim) if i != at]
    order.insert(to, at)
    return permute(t, tuple(order))


# -- axes of size one --------------------------------------------------------------------------------------------------


@method
def unsqueeze(t: Tensor, dim: int, name: str | None = None) -> Tensor:
    """Insert a BROADCAST axis.

    Args:
        t: The tensor.
        dim: The position of the new axis in the result (negative from the end).
        name: Its name.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(3).unsqueeze(0).dims
        (BROADCAST, Space(3))
    """
    at, axes = t._axes.run(Axes.insert, dim, (name, BROADCAST))
    return wrap(t._data.unsqueeze(at), axes)


@method
def squeeze(t: Tensor, dim: DimsLike = None) -> Tensor:
    """Remove axes of size one.

    Without an argument the BROADCAST axes are removed, and only those: a batch that happens to hold one element stays a
    batch. An axis that is given must have size one.

    Args:
        t: The tensor.
        dim: The axes to remove, by name or position.

    Raises:
        ValueError: If a given axis has another size.

    Example:
        >>> import moduli as mo
        >>> t = mo.zeros(1, 3).unsqueeze(0)
        >>> t.squeeze().shape, t.squeeze(1).shape
        (torch.Size([1, 3]), torch.Size([1, 3]))
    """
    gone, axes = _squeeze_axes(t._axes, as_key(dim))
    for at in gone:
        if t._data.shape[at] != 1:
            raise ValueError(
                f"{t._axes.describe(at)} has size {t._data.shape[at]}; only an axis of size 1 can be removed"
            )
    return finish(t._data.squeeze(gone), axes)


@cache_by_axes
def _squeeze_axes(axes: Axes, dim: DimsLike) -> tuple[tuple[int, ...], Axes]:
    if dim is None:
        gone = tuple(filter(axes.stretches, range(axes.ndim)))
    else:
        gone = axes.axes(dim)
    return gone, axes.drop(*gone)
