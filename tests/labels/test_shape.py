"""Rearrangement: the values and labels of each operation, and pairs of operations that are inverse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moduli as mo
from labels.strategies import as_mapping, check, labelled, numbers, reordered, seeds

ints = st.just(torch.int64)
tensors = labelled(dtypes=ints)
any_kind = labelled(dtypes=ints, kinds=("positional", "labelled", "broadcast"), named=False)
some_axes = labelled(st.integers(1, 4), dtypes=ints, kinds=("positional", "labelled", "broadcast"))


@given(t=tensors, data=st.data())
def test_rename_changes_names_only(t, data):
    new = data.draw(st.permutations(["p", "q", "r", "s"]))[: t.ndim]
    dims = [space.rename(name) for space, name in zip(t.dims, new, strict=True)]
    check(t.rename(" ".join(new)) if t.ndim else t.rename(()), t.data, dims)
    check(t.rename(new), t.data, dims)
    check(t.rename(dict(zip(t.names, new, strict=True))), t.data, dims)
    check(t.rename(**dict(zip(t.names, new, strict=True))), t.data, dims)
    check(t.rename(dict(enumerate(new))).rename(t.names), t.data, t.dims)
    check(t.rename([None] * t.ndim), t.data, [space.rename(None) for space in t.dims])
    # Names may be exchanged at once.
    if t.ndim > 1:
        a, b = t.names[:2]
        assert t.rename({a: b, b: a}).names[:2] == (b, a)


@pytest.mark.parametrize("name", ["t", "names", "new", "self", "dim", "labels", "indexers", "dims", "data"])
def test_any_name_can_be_a_keyword(name):
    t = mo.tensor([1.0, 2.0], **{name: ["a", "b"]})
    assert t.rename(**{name: "other"}).names == ("other",)
    assert t.relabel(**{name: ["c", "d"]}).dims == (mo.Space(["c", "d"], name),)
    assert t.sel(**{name: "b"}).item() == t.isel(**{name: 1}).item() == 2.0
    assert mo.zeros(4).rename("n").unflatten("n", **{name: 2, "other": 2}).names == (name, "other")
    assert mo.zeros(**{name: 3}).sum(name).item() == 0.0


@given(t=some_axes, data=st.data())
def test_relabel_changes_labels_only(t, data):
    at = data.draw(st.integers(0, t.ndim - 1))
    fresh = [("new", i) for i in range(t.shape[at])]
    dims = list(t.dims)
    dims[at] = mo.Space(fresh, t.names[at])
    for given_labels in (fresh, tuple(fresh), mo.Space(fresh)):
        check(t.relabel(at, given_labels), t.data, dims)
        check(t.relabel(**{t.names[at]: given_labels}), t.data, dims)
    dims[at] = mo.Space(t.shape[at], t.names[at])
    check(t.relabel(t.names[at], None), t.data, dims)
    check(t.relabel(at, t.shape[at]), t.data, dims)
    dims[at] = mo.Space(range(t.shape[at]), t.names[at])
    check(t.relabel(at, torch.arange(t.shape[at])), t.data, dims)
    check(t.relabel(at, range(t.shape[at])), t.data, dims)
    check(t.relabel(at, t.dims[at]), t.data, t.dims)


@given(t=tensors, data=st.data())
def test_align_to_restores_the_order_of_axes_and_labels(t, data):
    other = data.draw(reordered(t))
    check(other.align_to(t.dims), t.data, t.dims)
    bare = t.rename([None] * t.ndim)
    check(bare.align_to(t.dims), t.data, t.dims)
    loose = mo.Tensor(t.data, [mo.Space(len(space)) for space in t.dims])
    check(loose.align_to(t.dims), t.data, t.dims)
    if t.ndim and t.shape[0]:
        wide = t.sum(t.names[0], keepdim=True)
        check(wide.align_to(t.dims), wide.data.expand(t.shape), t.dims)


@given(t=any_kind, data=st.data())
def test_permutations_of_axes_equal_torch(t, data):
    order = data.draw(st.permutations(range(t.ndim)))
    dims = [t.dims[i] for i in order]
    check(t.permute(*order) if t.ndim else t.permute(()), t.data.permute(order), dims)
    check(torch.permute(t, tuple(order)), t.data.permute(order), dims)
    check(t.permute(*order).permute(*[order.index(i) for i in range(t.ndim)]) if t.ndim else t, t.data, t.dims)
    if not t.ndim:
        return
    a, b = (data.draw(st.integers(-t.ndim, t.ndim - 1)) for _ in "ab")
    raw = t.data.transpose(a, b)
    dims = list(t.dims)
    dims[a], dims[b] = dims[b], dims[a]
    check(t.transpose(a, b), raw, dims)
    check(torch.transpose(t, a, b), raw, dims)
    check(t.h(a, b), raw.conj(), dims)
    moved = torch.movedim(torch.zeros(*range(1, t.ndim + 1)), a, b).shape
    check(t.movedim(a, b), t.data.movedim(a, b), [t.dims[size - 1] for size in moved])
    check(torch.movedim(t, a, b), t.data.movedim(a, b), [t.dims[size - 1] for size in moved])


@given(t=any_kind, data=st.data())
def test_unsqueeze_and_squeeze_are_inverse(t, data):
    at = data.draw(st.integers(-t.ndim - 1, t.ndim))
    wide = t.unsqueeze(at)
    dims = list(t.dims)
    dims.insert(at % (t.ndim + 1), mo.BROADCAST)
    check(wide, t.data.unsqueeze(at), dims)
    check(torch.unsqueeze(t, at), t.data.unsqueeze(at), dims)
    check(wide.squeeze(at), t.data, t.dims)
    check(t.unsqueeze(at, "new").squeeze("new"), t.data, t.dims)
    stretch = [i for i, space in enumerate(t.dims) if space.broadcast]
    remaining = [i for i in range(t.ndim) if i not in stretch]
    check(t.squeeze(), t.data.squeeze(tuple(stretch)), [t.dims[i] for i in remaining])
    check(torch.squeeze(t), t.data.squeeze(tuple(stretch)), [t.dims[i] for i in remaining])
    for i, size in enumerate(t.shape):
        if size == 1:
            check(t.squeeze(i), t.data.squeeze(i), t.dims[:i] + t.dims[i + 1 :])
        else:
            with pytest.raises(ValueError, match="only an axis of size 1"):
                t.squeeze(i)


@given(t=some_axes, data=st.data())
def test_flip_and_roll_move_labels_with_their_entries(t, data):
    at = data.draw(st.integers(0, t.ndim - 1))
    shift = data.draw(st.integers(-5, 5))
    for got, raw in (
        (t.flip(t.names[at]), t.data.flip(at)),
        (torch.flip(t, (at,)), t.data.flip(at)),
        (t.roll(shift, at), t.data.roll(shift, at)),
        (torch.roll(t, shift, at), t.data.roll(shift, at)),
    ):
        check(got, raw, got.dims)
        if t.dims[at].labelled:
            assert as_mapping(got) == as_mapping(t)
        else:
            assert got.dims == t.dims


# -- concatenation and splitting --------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(t=some_axes, data=st.data())
def test_split_and_cat_are_inverse(t, data):
    at = data.draw(st.integers(0, t.ndim - 1))
    size = t.shape[at]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    split_tensors = t.split(sizes, t.names[at])
    starts = [0, *cuts]
    for part, start, length in zip(split_tensors, starts, sizes, strict=True):
        dims = list(t.dims)
        dims[at] = t.dims[at][start : start + length]
        check(part, t.data.narrow(at, start, length), dims)
    dims = list(t.dims)
    if dims[at].broadcast:
        dims[at] = mo.Space(1, t.names[at])
    if not (t.dims[at].broadcast and len(split_tensors) == 1):
        # Each part may have its own order along the other axes.
        mixed = [split_tensors[0], *(data.draw(shuffled_but(part, at)) for part in split_tensors[1:])]
        check(mo.cat(mixed, t.names[at]), t.data, dims)
        check(torch.cat(list(split_tensors), at), t.data, dims)
    n = data.draw(st.integers(1, 4))
    parts = t.split(n, at)
    assert (
        [p.shape[at] for p in parts]
        == [p.shape[at] for p in t.data.split(n, at)]
        == [p.shape[at] for p in torch.split(t, n, at)]
    )
    assert [p.shape[at] for p in t.chunk(n, at)] == [p.shape[at] for p in t.data.chunk(n, at)]


@st.composite
def shuffled_but(draw, t, at):
    """Draw an equal tensor with permuted axes, and with other orders of labels along all axes but one.

    Args:
        draw: Given by hypothesis.
        t: The tensor.
        at: The axis whose labels keep their order.
    """
    data, dims = t.data, list(t.dims)
    for axis, space in enumerate(dims):
        if space.labelled and axis != at:
            order = draw(st.permutations(range(len(space))))
            data = data.index_select(axis, torch.tensor(order, dtype=torch.int64))
            dims[axis] = mo.Space([space[i] for i in order], space.name)
    permutation = draw(st.permutations(range(t.ndim)))
    return mo.Tensor(data.permute(permutation), [dims[i] for i in permutation])


@given(t=some_axes, data=st.data())
def test_stack_and_unbind_are_inverse(t, data):
    at = data.draw(st.integers(0, t.ndim - 1))
    parts = t.unbind(t.names[at])
    for i, part in enumerate(parts):
        check(part, t.data.select(at, i), t.dims[:at] + t.dims[at + 1 :])
    if parts:
        labels = None if not t.dims[at].labelled else list(t.dims[at])
        dims = list(t.dims)
        dims[at] = mo.Space(len(parts), t.names[at]) if labels is None else dims[at]
        mixed = [parts[0], *(data.draw(shuffled_but(part, -1)) for part in parts[1:])]
        check(mo.stack(mixed, t.names[at], labels=labels, dim=at), t.data, dims)
        check(torch.stack(list(parts), at).rename({at: t.names[at]}).relabel(at, labels), t.data, dims)
        if labels is not None:
            check(mo.stack(dict(zip(labels, parts, strict=True)), t.names[at], dim=at - t.ndim), t.data, dims)


@settings(max_examples=80)
@given(t=labelled(st.integers(1, 4), dtypes=ints), data=st.data())
def test_flatten_and_unflatten_are_inverse(t, data):
    group = data.draw(st.permutations(t.names))[: data.draw(st.integers(1, t.ndim))]
    flat = t.flatten(group, name="flat")
    rest = [name for name in t.names if name not in group]
    at = flat.names.index("flat")
    assert [name for name in flat.names if name != "flat"] == rest
    spaces = [t.dims[t.names.index(name)] for name in group]
    assert flat.dims[at].labelled == any(space.labelled for space in spaces)
    back = flat.unflatten("flat", spaces)
    assert as_mapping(back) == as_mapping(t)
    assert back.names[at : at + len(group)] == tuple(group)
    named = flat.unflatten("flat", **{space.name: space for space in spaces})
    check(named, back.data, back.dims)
    if flat.dims[at].labelled:  # the labels decide the positions, in any order
        mixed = data.draw(reordered(flat))
        assert as_mapping(mixed.unflatten("flat", spaces)) == as_mapping(t)
    check(torch.flatten(t), t.data.flatten(), torch.flatten(t).dims)


# -- by label ----------------------------------------------------------------------------------------------------------


@given(data=st.data(), size=st.integers(0, 4), batch=st.integers(0, 2))
def test_diagonal_pairs_by_label(data, size, batch):
    labels = data.draw(st.permutations("abcd"))[:size]
    raw = numbers((batch, size, size), torch.int64, data.draw(seeds))
    t = mo.tensor(raw, "n row col", row=labels, col=labels)
    expected = as_mapping(mo.Tensor(raw.diagonal(0, 1, 2), [t.dims[0], t.dims[1]]))
    other = data.draw(reordered(t))
    assert as_mapping(other.diagonal("row", "col")) == expected
    assert as_mapping(t.diagonal()) == expected
    check(torch.diagonal(t, 0, 1, 2), raw.diagonal(0, 1, 2), [t.dims[0], t.dims[1]])
    line = mo.Tensor(raw[:, 0] if size else raw.sum(1), [t.dims[0], t.dims[1]])
    embedded = line.diag_embed("col")
    check(embedded, torch.diag_embed(line.data), [*line.dims, t.dims[2]])
    assert as_mapping(embedded.diagonal("row", "col")) == as_mapping(line)
    check(torch.diag_embed(line), torch.diag_embed(line.data), [*line.dims, line.dims[1].rename(None)])


@given(t=labelled(st.integers(0, 3), dtypes=ints), extra=st.integers(0, 2))
def test_one_hot_has_an_axis_of_classes(t, extra):
    t = mo.Tensor(t.data.abs(), t.dims)
    size = (int(t.data.max()) + 1 if t.numel() else 1) + extra
    raw = torch.nn.functional.one_hot(t.data, size)
    check(t.one_hot(size), raw, [*t.dims, mo.Space(size)])
    classes = mo.Space([f"c{i}" for i in range(size)], "class")
    check(t.one_hot(classes), raw, [*t.dims, classes])
    check(mo.one_hot(t, list(classes), name="class"), raw, [*t.dims, classes])
    check(torch.nn.functional.one_hot(t, size), raw, [*t.dims, mo.Space(size)])


@settings(max_examples=80)
@given(t=labelled(st.integers(1, 3), st.integers(1, 4), ints), data=st.data())
def test_index_add_pairs_by_label(t, data):
    at = data.draw(st.integers(0, t.ndim - 1))
    count = data.draw(st.integers(0, 3))
    where = [data.draw(st.integers(0, t.shape[at] - 1)) for _ in range(count)]
    dims = [mo.Space(count, s.name) if i == at else s for i, s in enumerate(t.dims)]
    source = mo.Tensor(numbers(map(len, dims), torch.int64, data.draw(seeds)), dims)
    raw = torch.index_add(t.data, at, torch.tensor(where, dtype=torch.int64), source.data, alpha=2)
    mixed = data.draw(shuffled_but(source, at))
    for index in (where, torch.tensor(where, dtype=torch.int64), mo.tensor(torch.tensor(where, dtype=torch.int64))):
        check(t.index_add(t.names[at], index, mixed, alpha=2), raw, t.dims)
    if t.dims[at].labelled:
        some = data.draw(st.permutations(list(t.dims[at])))[: data.draw(st.integers(0, t.shape[at]))]
        part = mo.Tensor(
            numbers([len(some) if i == at else n for i, n in enumerate(t.shape)], torch.int64, 1),
            [mo.Space(some, s.name) if i == at else s for i, s in enumerate(t.dims)],
        )
        added = as_mapping(t)
        for key, value in as_mapping(part).items():
            added[key] += value
        assert as_mapping(t.index_add(at, None, data.draw(reordered(part)))) == added


@given(t=tensors, data=st.data())
def test_written_values_are_aligned(t, data):
    value = mo.Tensor(numbers(t.shape, torch.int64, data.draw(seeds)), t.dims)
    target = t.clone()
    target[...] = data.draw(reordered(value))
    assert as_mapping(target) == as_mapping(value)
