"""Random labelled tensors, and two oracles that know nothing of the code under test.

Values are small integers that every dtype represents exactly, from a seed that is part of the example. `as_mapping` says what a
labelled tensor means: a number for every choice of one label per axis. `by_hand` aligns raw data with plain indexing.
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

# Labels of every kind a user may think of; a pool is never shorter than the largest axis and all its members differ.
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
    """Small integers as a plain tensor."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(low, high, tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(data.double(), torch.randint(low, high, tuple(shape), generator=generator).double()).to(
            dtype
        )
    return data.to(dtype)


@st.composite
def spaces(draw, name=None, sizes=upto4, kinds=("positional", "labelled")):
    """A Space of one of the kinds."""
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
    """A labelled tensor, with all axes named, or each named or not."""
    rank = draw(ranks)
    names = draw(st.permutations(NAMES))[:rank]
    if not named:
        names = [draw(st.sampled_from([name, None])) for name in names]
    dims = [draw(spaces(name, sizes, kinds)) for name in names]
    return mo.Tensor(numbers(map(len, dims), draw(dtypes), draw(seeds)), dims)


@st.composite
def reordered(draw, t, labels=True):
    """The same meaning in another order: axes permuted (they have names), labels shuffled."""
    order = draw(st.permutations(range(t.ndim)))
    data, dims = t.data.permute(order) if t.ndim else t.data, [t.dims[i] for i in order]
    for axis, space in enumerate(dims):
        if labels and space.labelled:
            way = draw(st.permutations(range(len(space))))
            data = data[(slice(None),) * axis + (torch.tensor(way, dtype=torch.int64),)]
            dims[axis] = mo.Space([space.labels[i] for i in way], space.name)
    return mo.Tensor(data, dims)


@st.composite
def operands(draw, count=2, dtypes=dtypes, sizes=upto3, same_dtype=False, most=4):
    """Tensors whose named axes pair: each has some of the axes, in its own order, with its own order of labels."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, most))]
    known = {name: draw(spaces(name, sizes)) for name in names}
    dtype = draw(dtypes)
    made = []
    for _ in range(count):
        own = [name for name in draw(st.permutations(names)) if draw(st.integers(0, 3))]
        dims = [
            mo.BROADCAST.rename(name) if draw(st.integers(0, 7)) == 0 else known[name]
            for name in own
        ]  # fmt: skip
        t = mo.Tensor(numbers(map(len, dims), dtype, draw(seeds)), dims)
        made.append(draw(reordered(t)))
        dtype = dtype if same_dtype else draw(dtypes)
    return tuple(made)


def key_of(dims, places):
    """Return the key of an entry: (axis name, or position from the right, and label) of every axis."""
    rank = len(dims)
    return frozenset(
        (space.name if space.name is not None else axis - rank, list(space)[place])
        for axis, (space, place) in enumerate(zip(dims, places, strict=True))
    )


def as_mapping(t):
    """Return the number of each choice of labels, whatever the order of axes and entries."""
    places = itertools.product(*map(range, t.data.shape))
    return {key_of(t.dims, place): t.data[place].item() for place in places}


def by_hand(t, names, labels):
    """Raw data with axes in the given order of names and labels in the given order; absent axes have size one."""
    own = list(t.names)
    if not own:  # it counts as a number, as in torch
        return t.data
    data = t.data.permute([own.index(name) for name in names if name in own])
    for axis, name in enumerate(names):
        if name not in own:
            data = data.unsqueeze(axis)
        elif t.dims[own.index(name)].labelled:
            known = list(t.dims[own.index(name)])
            index = torch.tensor([known.index(label) for label in labels[name]], dtype=torch.int64)
            data = data[(slice(None),) * axis + (index,)]
    return data


def result_axes(*tensors):
    """The names of the axes of a result, and the labels of each: the left's order, then the right's new ones."""
    names = list(dict.fromkeys(name for t in tensors for name in t.names))
    found = {}
    for name in names:
        met = [t.dims[t.names.index(name)] for t in tensors if name in t.names]
        firm = [space for space in met if not space.broadcast]
        found[name] = next((space for space in firm if space.labelled), firm[0] if firm else met[0])
    return names, found


def hand_aligned(*tensors):
    """Every tensor's raw data, aligned by hand, and the Spaces the result must have."""
    names, found = result_axes(*tensors)
    return [by_hand(t, names, found) for t in tensors], tuple(found[name] for name in names)


def check(t, data, dims):
    """A labelled tensor has this data and these Spaces."""
    assert type(t) is mo.Tensor, type(t)
    assert t.dims == tuple(dims)
    assert tuple(t.data.shape) == tuple(map(len, t.dims))
    torch.testing.assert_close(t.data, data, equal_nan=True)


def attempt(function, *args, **options):
    """The result, or the error: where torch refuses, so must we."""
    try:
        return function(*args, **options), None
    except (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        return None, error
