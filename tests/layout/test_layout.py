"""Layouts: packing and views, fingerprints and copies, and values that never change."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moduli.layout import (
    Entry,
    Layout,
    LayoutError,
    diff,
    layout_and_tensors,
    layout_of,
)
from strategies import ALL_DTYPES, modules, parameters


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def check_against_torch(net):
    """The layout, spelled out from torch's own listings."""
    layout, live = layout_and_tensors(net)
    listed = list(net.named_parameters())
    assert layout.names == tuple(name for name, _ in listed)
    assert [id(t) for t in live] == [id(p) for _, p in listed]
    every = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    filled, start = {}, 0
    for entry, (name, parameter) in zip(layout, listed, strict=True):
        key = (parameter.dtype, parameter.device)
        offset = filled.get(key, 0)
        assert entry.names == tuple(every[id(parameter)])
        assert (entry.shape, entry.dtype, entry.device) == (parameter.shape, parameter.dtype, parameter.device)
        assert (entry.offset, entry.start, entry.numel) == (offset, start, parameter.numel())
        assert layout.groups[entry.group].dtype is entry.dtype
        assert all(layout[n] is entry and n in layout for n in entry.names)
        filled[key] = offset + parameter.numel()
        start += parameter.numel()
        assert layout[name] is entry
    assert layout.numel == start == sum(group.numel for group in layout.groups)
    assert [(g.dtype, g.device, g.numel) for g in layout.groups] == [(*k, n) for k, n in filled.items()]
    saved = net.state_dict(keep_vars=True)
    assert [b.name for b in layout.buffers] == [name for name, _ in net.named_buffers()]
    for entry, (name, buffer) in zip(layout.buffers, net.named_buffers(), strict=True):
        assert (entry.shape, entry.dtype, entry.device) == (buffer.shape, buffer.dtype, buffer.device)
        assert entry.persistent == (name in saved)
        assert entry.numel == buffer.numel()
    return layout


@given(modules(ALL_DTYPES))
def test_a_layout_is_what_torch_lists(net):
    layout = check_against_torch(net)
    assert layout_of(net) is layout


@given(modules(ALL_DTYPES))
def test_copies_have_the_very_same_layout(net):
    assert layout_of(copy.deepcopy(net)) is layout_of(net)
    assert layout_of(pickle.loads(pickle.dumps(net))) is layout_of(net)


@given(modules())
def test_the_layout_of_a_listing_is_the_layout_of_the_module(net):
    layout = layout_of(net)
    pairs = list(net.named_parameters(remove_duplicate=False))
    assert layout_of(pairs).entries == layout.entries
    assert layout_of(dict(pairs)).entries == layout.entries
    assert layout_of(net.named_parameters(remove_duplicate=False)).fingerprint == layout.fingerprint
    assert [e.shape for e in layout_of(net.parameters())] == [e.shape for e in layout]


@given(modules(ALL_DTYPES))
def test_pack_and_views_are_inverse(net):
    layout, live = layout_and_tensors(net)
    vectors = layout.pack([t.detach() for t in live])
    assert [(v.dtype, v.numel()) for v in vectors] == [(g.dtype, g.numel) for g in layout.groups]
    for view, tensor in zip(layout.views(vectors), live, strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(view, tensor)
    out = [group.empty() for group in layout.groups]
    assert all(a is b for a, b in zip(layout.pack(live, out=out), out, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(out, vectors, strict=True))


def _graded(layout, vectors):
    with torch.enable_grad():
        return layout.views(vectors)


@given(modules(), st.integers(0, 3))
def test_views_of_a_stack_are_stacks_of_views(net, count):
    layout = layout_of(net)
    stacks = [group.empty(count).zero_() for group in layout.groups]
    for entry, view in zip(layout, layout.views(stacks), strict=True):
        assert view.shape == (count, *entry.shape)
        view.fill_(entry.start)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(layout.views(stacks), _graded(layout, stacks), strict=True))
        assert [v.data_ptr() for v in layout.views(stacks)] == [v.data_ptr() for v in _graded(layout, stacks)]
    for row in range(count):
        for entry, view in zip(layout, layout.views([s[row] for s in stacks]), strict=True):
            assert torch.equal(view, torch.full(entry.shape, entry.start, dtype=entry.dtype))


def test_views_under_function_transforms():
    layout = layout_of(nn.Linear(3, 2))
    assert torch.func.grad(lambda v: sum((x**2).sum() for x in layout.views(v)))(torch.ones(8)).tolist() == [2.0] * 8
    assert torch.vmap(lambda v: layout.views(v)[0])(torch.ones(5, 8)).shape == (5, 2, 3)


def test_devices_and_dtypes_have_groups_of_their_own():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2).half(), nn.Linear(2, 2)])
    layout = check_against_torch(net)
    assert [g.indices for g in layout.groups] == [(0, 1, 6, 7), (2, 3), (4, 5)]
    assert layout.fingerprint == layout_of(copy.deepcopy(net).to("meta")).fingerprint


def test_duplicates_in_a_list_are_ties():
    a, b = torch.zeros(2), torch.zeros(2)
    assert [e.names for e in layout_of([a, b, a])] == [("0", "2"), ("1",)]


@given(st.lists(parameters(ALL_DTYPES), max_size=4))
def test_lists_are_named_by_position(tensors):
    layout, live = layout_and_tensors(iter(tensors))
    assert layout.names == tuple(str(i) for i in range(len(tensors)))
    assert all(a is b for a, b in zip(live, tensors, strict=True))


FINGERPRINT = """
import torch
from moduli.layout import layout_of
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
net[3].weight = net[2].weight
net[2].double()
print(layout_of(net).fingerprint)
"""


def test_fingerprints_are_stable_across_processes():
    prints = set()
    for seed in ("0", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        prints.add(done.stdout.strip())
    # Written down, so that a change of the digest, which would orphan stored fingerprints, is a decision.
    assert prints == {"f821b40e494c476dc260bea8fcd0c35a0f1168e00d26135dbc2518b59df7f001"}


def test_the_fingerprint_is_about_parameters_only():
    plain, normed = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
    assert layout_of(plain) is not layout_of(normed)
    assert layout_of(plain).fingerprint == layout_of(normed).fingerprint
    assert diff(plain, normed) is None


def test_copies_of_a_layout_are_the_layout():
    layout = layout_of(mlp())
    for twin in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert twin is layout
    done = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; print(pickle.load(sys.stdin.buffer).fingerprint)"],
        input=pickle.dumps(layout),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == layout.fingerprint


def test_an_entry_never_changes():
    with pytest.raises(AttributeError):
        layout_of(mlp()).entries[0].name = "other"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(3), "put it in a list"),
        ("weight", "got str"),
        (3, "got int"),
        ([torch.zeros(1), 3], "item 1 is a int"),
        ([("w", 3)], "item 0 is a tuple"),
        ({1: torch.zeros(1)}, "item 0 is a tuple"),
        ([nn.Linear(1, 1)], "item 0 is a Linear"),
        (None, "got NoneType"),
    ],
)
def test_what_has_no_layout_is_refused(source, message):
    with pytest.raises(TypeError, match=message):
        layout_of(source)


def test_names_must_be_distinct():
    with pytest.raises(LayoutError, match="two parameters are called 'w'"):
        layout_of([("w", torch.zeros(1)), ("w", torch.zeros(1))])


def test_tensors_that_do_not_fit_are_refused():
    layout = layout_of(nn.Linear(3, 2))
    good = [torch.zeros(2, 3), torch.zeros(2)]
    with pytest.raises(LayoutError, match="2 parameters; 1 tensors"):
        layout.pack(good[:1])
    with pytest.raises(LayoutError, match=r"'bias' is float32 of shape \(2,\) in this layout.*\(1,\)"):
        layout.pack([good[0], torch.zeros(1)])
    with pytest.raises(LayoutError, match=r"'weight' is float32.*float64"):
        layout.pack([good[0].double(), good[1]])
    with pytest.raises(LayoutError, match="one vector of 8 elements"):
        layout.pack(good, out=torch.zeros(4, 8))
    for vectors in (torch.zeros(7), torch.zeros(()), torch.zeros(8).double()):
        with pytest.raises(LayoutError, match="must end in a dimension of 8"):
            layout.views(vectors)
    with pytest.raises(LayoutError, match=r"\(1: torch.float32 on cpu\); got 2"):
        layout.views([torch.zeros(8), torch.zeros(8)])


def test_packing_carries_gradients_unless_it_writes():
    net = nn.Linear(3, 2)
    layout, live = layout_and_tensors(net)
    (vector,) = layout.pack(live)
    vector.sum().backward()
    assert net.weight.grad.sum() == 6
    out = torch.zeros(8)
    layout.pack(live, out=out)
    assert not out.requires_grad
    assert torch.equal(out, vector)


def test_views_can_be_changed_in_place_under_autograd():
    layout = layout_of(nn.Linear(3, 2))
    scale = torch.ones((), requires_grad=True)
    vector = torch.ones(8)
    layout.views(vector)[0].mul_(scale)
    vector.sum().backward()
    assert scale.grad == 6


def test_unknown_names_list_the_known_ones():
    with pytest.raises(KeyError, match=r"no parameter is called 'wieght'; the first ones are \['weight', 'bias'\]"):
        layout_of(nn.Linear(1, 1))["wieght"]
    with pytest.raises(KeyError, match=r"'7'\]"):
        layout_of([torch.zeros(1) for _ in range(9)])["x"]
    with pytest.raises(KeyError, match=r"are \[\]"):
        Layout()["x"]


def test_entries_are_values():
    entry = layout_of(nn.Linear(1, 1))["weight"]
    assert entry == Entry("weight", (1, 1), torch.float32, torch.device("cpu"), 1, 0, 0, 0)
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_a_layout_never_changes():
    layout = layout_of(mlp())
    for name in ("entries", "numel", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(layout, name, 1)
