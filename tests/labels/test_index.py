"""Indexing: the values of torch for every kind of key, and the labels of the selected entries.

To check labels, a tensor that holds the position of every entry along one axis is indexed with the same key: its values are
the original positions of the selected entries.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import moduli as mo
from labels.strategies import as_mapping, attempt, check, labelled, numbers, reordered, seeds

tensors = labelled(st.integers(0, 4), st.integers(1, 4), st.just(torch.int64))


@st.composite
def positions(draw, size, count=None):
    count = draw(st.integers(0, 3)) if count is None else count
    return [draw(st.integers(-size, size - 1)) for _ in range(count)]


@st.composite
def single_keys(draw, size):
    """Draw one part of a key for one axis, in the form of moduli and in that of torch."""
    kind = draw(st.sampled_from(["int", "np.int", "0-d", "slice", "backwards", "all"]))
    if kind in ("int", "np.int", "0-d"):
        at = draw(st.integers(-size, size - 1))
        return {"int": at, "np.int": np.int64(at), "0-d": torch.tensor(at)}[kind], at
    edges = st.one_of(st.none(), st.integers(-size - 1, size + 1))
    start, stop = draw(edges), draw(edges)
    if kind == "backwards":
        key = slice(start, stop, -draw(st.integers(1, 3)))
        return key, list(range(size))[key]
    key = slice(None) if kind == "all" else slice(start, stop, draw(st.sampled_from([None, 1, 2])))
    return key, key


@st.composite
def keys(draw, t, index_tensors=True):
    """Draw a whole key of moduli, and for torch a list of (kind, value) for each axis and new axis.

    Args:
        draw: Given by hypothesis.
        t: The tensor to index.
        index_tensors: Whether lists, index tensors and masks may occur.
    """
    ours, theirs, axis = [], [], 0
    length = draw(st.integers(1, 3))
    while axis < t.ndim:
        kind = draw(st.sampled_from(["single", "single", "new", "index", "mask", "stop"]))
        size = t.shape[axis]
        if kind == "stop":
            break
        if kind == "new":
            ours.append(None)
            theirs.append(("new", None))
            continue
        if kind == "index" and index_tensors:
            index = draw(positions(size, length))
            form = draw(st.sampled_from(["list", "torch", "numpy"]))
            ours.append({"list": index, "torch": torch.tensor(index), "numpy": np.array(index)}[form])
            theirs.append(("index", torch.tensor(index)))
        elif kind == "mask" and index_tensors and draw(st.booleans()):
            rank = draw(st.integers(1, min(2, t.ndim - axis)))
            mask = torch.zeros(tuple(t.shape[axis : axis + rank]), dtype=torch.bool)
            assume(mask.numel() >= length)
            mask.view(-1)[draw(st.permutations(range(mask.numel())))[:length]] = True
            ours.append(draw(st.sampled_from([mask, mask.numpy()])))
            theirs.append(("mask", mask))
            axis += rank - 1
        else:
            key, raw = draw(single_keys(size))
            ours.append(key)
            theirs.append(("flip", raw) if isinstance(raw, list) else ("as is", raw))
        axis += 1
    if axis < t.ndim and draw(st.booleans()):
        place = draw(st.integers(0, len(ours)))
        skipped = t.ndim - axis
        before = sum(part[1].ndim if part[0] == "mask" else part[0] != "new" for part in theirs[:place])
        sizes = tuple(t.shape)
        assume(sizes[before:axis] == sizes[before + skipped :])  # the keys after "..." were drawn for these sizes
        ours.insert(place, ...)
        theirs.insert(place, ("as is", ...))
    return tuple(ours), theirs


def raw_index(data, theirs):
    """Index with torch; backward slices, which it lacks, become an index_select."""
    axis, key = 0, []
    consumed = sum(
        part[1].ndim if part[0] == "mask" else 0 if part[0] == "new" or part[1] is ... else 1 for part in theirs
    )
    for kind, value in theirs:
        if value is ...:
            key.append(value)
            axis += data.ndim - consumed
            continue
        if kind == "flip":
            data = data.index_select(axis, torch.tensor(value, dtype=torch.int64))
            value = slice(None)
        key.append(value)
        axis += 0 if kind == "new" else value.ndim if kind == "mask" else 1
    return data[tuple(key)]


def assert_labels_follow(t, result, index):
    """Check that axes of the result have the labels of the entries that were selected.

    Args:
        t: The indexed tensor.
        result: The result.
        index: The same indexing of raw data.
    """
    for axis, space in enumerate(t.dims):
        if space.name not in result.names:
            continue
        at = result.names.index(space.name)
        shape = [1] * t.ndim
        shape[axis] = len(space)
        came_from = index(torch.arange(len(space)).reshape(shape).expand(t.shape)).movedim(at, 0)
        space_of_result = result.dims[at]
        assert space_of_result.labelled == space.labelled
        for place in range(len(space_of_result)):
            source = set(came_from[place].flatten().tolist())
            assert len(source) <= 1
            if source and space.labelled:
                assert space_of_result[place] == space[source.pop()]


@settings(max_examples=200)
@given(data=st.data(), t=tensors)
def test_every_kind_of_key_selects_values_and_labels(data, t):
    key, theirs = data.draw(keys(t))
    expected = raw_index(t.data, theirs)
    vectors = [part for part in theirs if part[0] == "index"]
    masks = [part for part in theirs if part[0] == "mask"]
    result, error = attempt(t.__getitem__, key if len(key) != 1 or data.draw(st.booleans()) else key[0])
    if error is not None:
        assert "more than once" in str(error)  # labels are distinct, so an entry cannot be selected twice
        assert len(vectors) == 1
        assert not masks
        return
    check(result, expected, result.dims)
    assert_labels_follow(t, result, lambda raw: raw_index(raw, theirs))
    # New axes have no name: None makes a BROADCAST axis, several index tensors a positional one.
    several = len(vectors) + len(masks) > 1 or any(part[1].ndim > 1 for part in masks)
    new_axes = [space for space in result.dims if space.name is None]
    assert sum(space.broadcast for space in new_axes) == sum(part[0] == "new" for part in theirs)
    assert len(new_axes) == sum(part[0] == "new" for part in theirs) + several
    lost = sum(kind == "as is" and isinstance(value, int) for kind, value in theirs)
    if several:
        lost += sum(value.ndim for kind, value in theirs if kind in ("index", "mask"))
    assert len([name for name in t.names if name not in result.names]) == lost


@settings(max_examples=120)
@given(data=st.data(), t=tensors)
def test_writing_with_a_key_changes_exactly_the_entries_that_it_reads(data, t):
    key, _ = data.draw(keys(t))
    written = t.clone()
    try:
        part = t[key]
    except ValueError:
        assume(False)
    written[key] = part
    assert torch.equal(written.data, t.data)
    marked = t.clone()
    marked[key] = 1000
    numbered = mo.Tensor(torch.arange(t.numel()).reshape(t.shape), t.dims)
    touched = set(numbered[key].data.flatten().tolist()) if part.numel() else set()
    assert {i for i, v in enumerate(marked.data.flatten().tolist()) if v == 1000} == touched


@given(data=st.data(), t=labelled(st.integers(1, 3), st.integers(0, 4), st.just(torch.int64)))
def test_sel_selects_by_label_and_isel_by_position(data, t):
    axis = data.draw(st.integers(0, t.ndim - 1))
    space = t.dims[axis]
    some = data.draw(st.permutations(list(space)))[: data.draw(st.integers(0, len(space)))]
    index = torch.tensor([list(space).index(label) for label in some], dtype=torch.int64)
    dims = list(t.dims)
    dims[axis] = mo.Space(some, space.name)
    expected = t.data.index_select(axis, index)
    key = (slice(None),) * axis
    if space.labelled:
        check(t[(*key, mo.Space(some))], expected, dims)
        check(t[(..., mo.Space(some, space.name), *(slice(None),) * (t.ndim - axis - 1))], expected, dims)
        check(t.sel({space.name: some}), expected, dims)
        check(t.sel({axis: mo.Space(some)}), expected, dims)
    else:
        check(t.sel({space.name: some}), expected, dims)
    for place, label in enumerate(space):
        check(t.sel({space.name: label}), t.data.select(axis, place), t.dims[:axis] + t.dims[axis + 1 :])
        check(t.isel({axis - t.ndim: place}), t.data.select(axis, place), t.dims[:axis] + t.dims[axis + 1 :])


@given(data=st.data(), t=labelled(st.integers(2, 3), st.integers(0, 3), st.just(torch.int64)))
def test_masks_are_aligned_by_label(data, t):
    mask = t > 0
    check(t[mask], t.data[t.data > 0], [mo.Space(int((t.data > 0).sum()))])
    shuffled = data.draw(reordered(mask))
    if not any(space.positional for space in t.dims):
        check(t[shuffled], t.data[t.data > 0], [mo.Space(int((t.data > 0).sum()))])
    first = t.data.select(1, 0) > 0 if t.shape[1] and t.ndim == 2 else None
    if first is not None:
        line = data.draw(reordered(mo.Tensor(first, t.dims[:1])))
        result = t[line]
        check(result, t.data[first], [t.dims[0][first.nonzero().flatten().tolist()], t.dims[1]])


@settings(max_examples=120)
@given(data=st.data(), t=labelled(st.integers(2, 4), st.integers(1, 3), st.just(torch.int64)), seed=seeds)
def test_labelled_index_tensors_replace_the_indexed_axes(data, t, seed):
    """The axes of the index tensors replace the indexed axes, and pair by name and label."""
    dims = [mo.Space(["s", "t"], "n"), mo.Space(3, "m")][: data.draw(st.integers(1, 2))]
    count = data.draw(st.integers(1, 2))
    axes = sorted(data.draw(st.permutations(range(t.ndim)))[:count])
    raw = [numbers(map(len, dims), torch.int64, seed + i, 0, t.shape[axis]) for i, axis in enumerate(axes)]
    plain, ours = [slice(None)] * t.ndim, [slice(None)] * t.ndim
    for axis, index in zip(axes, raw, strict=True):
        plain[axis] = index
        ours[axis] = mo.Tensor(index, dims)
    # The first index decides the order of the result, so only the second is reordered.
    if count == 2:
        ours[axes[1]] = data.draw(reordered(ours[axes[1]]))
    between = [axis for axis in range(axes[0] + 1, axes[-1]) if data.draw(st.booleans())]
    for axis in between:
        plain[axis] = ours[axis] = 0
    result = t[tuple(ours)]
    check(result, t.data[tuple(plain)], result.dims)
    assert_labels_follow(t, result, lambda data: data[tuple(plain)])
    at = result.names.index("n")
    assert result.dims[at : at + len(dims)] == tuple(dims)
    one = t.isel({axes[0]: mo.tensor(0), **dict.fromkeys(axes[1:], 0)})
    assert one.ndim == t.ndim - count


def test_views_share_memory_as_in_torch():
    t = mo.zeros(y=3, x=["a", "b"])
    t[0].data.fill_(1.0)
    t[:, 1].data.fill_(2.0)
    assert t.tolist() == [[1.0, 2.0], [0.0, 2.0], [0.0, 2.0]]
    assert t[mo.Space(3)].data.data_ptr() == t.data.data_ptr()


@pytest.mark.parametrize(("flag", "size"), [(True, 1), (False, 0)])
def test_a_truth_value_makes_a_positional_axis(flag, size):
    t = mo.tensor([[1.0, 2.0]], y=["a"], x=["p", "q"])
    check(t[flag], t.data[flag], [mo.Space(size), *t.dims])
    check(t[:, flag], t.data[:, flag], [t.dims[0], mo.Space(size), t.dims[1]])
    check(t[np.bool_(flag)], t.data[flag], [mo.Space(size), *t.dims])
    check(t[torch.tensor(flag)], t.data[flag], [mo.Space(size), *t.dims])


def test_slices_of_positional_axes_are_renumbered_and_labels_are_kept():
    x = mo.tensor([1.0, 4.0, 9.0, 16.0], "x")
    assert (x[1:] - x[:-1]).tolist() == [3.0, 5.0, 7.0]
    y = x.relabel(x=range(4))
    assert y[1:].dims == (mo.Space(range(1, 4), "x"),)
    with pytest.raises(ValueError, match="differ"):
        y[1:] - y[:-1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_of_every_width_are_positions(dtype):
    t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], y=["a", "b"], x=["p", "q"])
    index = torch.tensor([1, 0], dtype=dtype)
    for key in (index, index.numpy()):
        check(t[key], t.data[[1, 0]], [mo.Space(["b", "a"], "y"), t.dims[1]])
    check(t[mo.tensor(index, n=["u", "v"])], t.data[[1, 0]], [mo.Space(["u", "v"], "n"), t.dims[1]])
    check(t[index[0]], t.data[1], t.dims[1:])


def test_iteration_and_length_are_of_the_first_axis_and_membership_of_values():
    t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], y=["a", "b"], x=["p", "q"])
    assert [as_mapping(row) for row in t] == [as_mapping(t[0]), as_mapping(t[1])]
    assert len(t) == 2
    assert 4.0 in t
    assert 5.0 not in t
