"""Random labelled tensors, and two reference implementations that share no code with the library.

Values are small integers that every dtype represents exactly, from a seed that is part of the example. `as_mapping` returns
the value of each choice of labels. `align_by_hand` aligns raw data with plain indexing.
"""

import itertools

import torch
from hypothesis import strategies as st

import moduli as mo

FLOATS = (torch.float32, torch.float64)
LOW = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *LOW, *COMPLEX, torch.int64, torch.int32, torch.bool)
NAMES = ("row", "col", "time", "k")

# Labels of several types. A pool is at least as long as the largest axis, and its labels are distinct.
POOLS = (
    ("r", "g", "b", "a", "z", "y"),
    (0, 1, 2, 3, 4, 5),
    (7, -1, 30, 2, 5, 11),
    (("p", 0), ("p", 1), ("q", 0), ("q", 1), ("s", 0), ("s", 1)),
    ("x", 1, None, 2.5, (0,), frozenset({3})),
)

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)
upto3, upto4 = st.integers(0, 3), st.integers(0, 4)


def numbers(shape, dtype, seed, low=-3, high=4):
    """Return small integers as a plain tensor.

    Args:
        shape: The shape.
        dtype: The dtype.
        seed: The seed of the values.
        low: The smallest value.
        high: One more than the largest value.
    """
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(low, high, tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(data.double(), torch.randint(low, high, tuple(shape), generator=generator).double()).to(
            dtype
        )
    return data.to(dtype)


@st.composite
def spaces(draw, name=None, sizes=upto4, kinds=("positional", "labelled")):
    """Draw a Space.

    Args:
        draw: Given by hypothesis.
        name: The name of the axis; none by default.
        sizes: A strategy for the size.
        kinds: The kinds to choose from: positional, labelled or broadcast.
    """
    kind = draw(st.sampled_from(kinds))
    if kind == "broadcast":
        return mo.BROADCAST if name is None else mo.BROADCAST.rename(name)
    size = draw(sizes)
    if kind == "positional":
        return mo.Space(size, name)
    pool = draw(st.sampled_from(POOLS))
    return mo.Space(draw(st.permutations(pool))[:size], name)


@st.composite
def labelled(draw, ranks=upto4, sizes=upto4, dtypes=dtypes, kinds=("positional", "labelled"), named=True):
    """Draw a labelled tensor.

    Args:
        draw: Given by hypothesis.
        ranks: A strategy for the number of axes.
        sizes: A strategy for the size of an axis.
        dtypes: A strategy for the dtype.
        kinds: The kinds of spaces.
        named: Whether all axes have names; otherwise each may have one.
    """
    rank = draw(ranks)
    names = draw(st.permutations(NAMES))[:rank]
    if not named:
        names = [draw(st.sampled_from([name, None])) for name in names]
    dims = [draw(spaces(name, sizes, kinds)) for name in names]
    return mo.Tensor(numbers(map(len, dims), draw(dtypes), draw(seeds)), dims)


@st.composite
def reordered(draw, t, labels=True):
    """Draw an equal tensor in another order.

    Args:
        draw: Given by hypothesis.
        t: The tensor, whose axes have names.
        labels: Whether labels are shuffled too, not only axes permuted.
    """
    order = draw(st.permutations(range(t.ndim)))
    data, dims = t.data.permute(order) if t.ndim else t.data, [t.dims[i] for i in order]
    for axis, space in enumerate(dims):
        if labels and space.labelled:
            permutation = draw(st.permutations(range(len(space))))
            data = data[(slice(None),) * axis + (torch.tensor(permutation, dtype=torch.int64),)]
            dims[axis] = mo.Space([space.labels[i] for i in permutation], space.name)
    return mo.Tensor(data, dims)


@st.composite
def operands(draw, count=2, dtypes=dtypes, sizes=upto3, same_dtype=False, most=4):
    """Draw tensors that share named axes: each has some of the axes, in its own order, with its own order of labels.

    Args:
        draw: Given by hypothesis.
        count: The number of tensors.
        dtypes: A strategy for dtypes.
        sizes: A strategy for the size of an axis.
        same_dtype: Whether all have one dtype.
        most: The largest number of axes in all.
    """
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, most))]
    spaces_by_name = {name: draw(spaces(name, sizes)) for name in names}
    dtype = draw(dtypes)
    tensors = []
    for _ in range(count):
        own = [name for name in draw(st.permutations(names)) if draw(st.integers(0, 3))]
        dims = [
            mo.BROADCAST.rename(name) if draw(st.integers(0, 7)) == 0 else spaces_by_name[name]
            for name in own
        ]  # fmt: skip
        t = mo.Tensor(numbers(map(len, dims), dtype, draw(seeds)), dims)
        tensors.append(draw(reordered(t)))
        dtype = dtype if same_dtype else draw(dtypes)
    return tuple(tensors)


def key_of(dims, places):
    """Return the key of an entry: (axis name, or position from the right, and label) of every axis."""
    rank = len(dims)
    return frozenset(
        (space.name if space.name is not None else axis - rank, list(space)[place])
        for axis, (space, place) in enumerate(zip(dims, places, strict=True))
    )


def as_mapping(t):
    """Return the value of each choice of labels, independent of the order of axes and entries."""
    places = itertools.product(*map(range, t.data.shape))
    return {key_of(t.dims, place): t.data[place].item() for place in places}


def align_by_hand(t, names, labels):
    """Return raw data with axes and labels in a given order; absent axes have size one.

    Args:
        t: The tensor.
        names: The order of axes.
        labels: The order of labels of each axis, by name.
    """
    own = list(t.names)
    if not own:  # a tensor without axes counts as a number, as in torch
        return t.data
    data = t.data.permute([own.index(name) for name in names if name in own])
    for axis, name in enumerate(names):
        if name not in own:
            data = data.unsqueeze(axis)
        elif t.dims[own.index(name)].labelled:
            own_labels = list(t.dims[own.index(name)])
            index = torch.tensor([own_labels.index(label) for label in labels[name]], dtype=torch.int64)
            data = data[(slice(None),) * axis + (index,)]
    return data


def result_axes(*tensors):
    """Return the names of the axes of a result in order of occurrence, and the Space of each."""
    names = list(dict.fromkeys(name for t in tensors for name in t.names))
    spaces_by_name = {}
    for name in names:
        candidates = [t.dims[t.names.index(name)] for t in tensors if name in t.names]
        sized = [space for space in candidates if not space.broadcast]
        spaces_by_name[name] = next((space for space in sized if space.labelled), sized[0] if sized else candidates[0])
    return names, spaces_by_name


def align_all_by_hand(*tensors):
    """Return the aligned raw data of each tensor, and the Spaces that the result must have."""
    names, spaces_by_name = result_axes(*tensors)
    return [align_by_hand(t, names, spaces_by_name) for t in tensors], tuple(spaces_by_name[name] for name in names)


def check(t, data, dims):
    """Check that a labelled tensor has this data and these Spaces.

    Args:
        t: The tensor.
        data: The expected data.
        dims: The expected Spaces.
    """
    assert type(t) is mo.Tensor, type(t)
    assert t.dims == tuple(dims)
    assert tuple(t.data.shape) == tuple(map(len, t.dims))
    torch.testing.assert_close(t.data, data, equal_nan=True)


def attempt(function, *args, **options):
    """Return the result and None, or None and the error."""
    try:
        return function(*args, **options), None
    except (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        return None, error
