"""Layouts: packing and views, fingerprints and copies, and immutability."""

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

from layout.helpers import check_against_torch, mlp
from moduli.layout import (
    Entry,
    Layout,
    LayoutError,
    diff,
    layout_and_tensors,
    layout_of,
)
from strategies import ALL_DTYPES, modules, parameters


@given(modules(ALL_DTYPES))
def test_a_layout_agrees_with_the_listings_of_torch(net):
    layout = check_against_torch(net)
    assert layout_of(net) is layout


@given(modules(ALL_DTYPES))
def test_copies_of_a_module_have_the_identical_layout(net):
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
    layout, tensors = layout_and_tensors(net)
    vectors = layout.pack([t.detach() for t in tensors])
    assert [(v.dtype, v.numel()) for v in vectors] == [(g.dtype, g.numel) for g in layout.groups]
    for view, tensor in zip(layout.views(vectors), tensors, strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(view, tensor)
    out = [group.empty() for group in layout.groups]
    assert all(a is b for a, b in zip(layout.pack(tensors, out=out), out, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(out, vectors, strict=True))


def views_with_grad(layout, vectors):
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
        assert all(
            torch.equal(a, b) for a, b in zip(layout.views(stacks), views_with_grad(layout, stacks), strict=True)
        )
        assert [v.data_ptr() for v in layout.views(stacks)] == [v.data_ptr() for v in views_with_grad(layout, stacks)]
    for row in range(count):
        for entry, view in zip(layout, layout.views([s[row] for s in stacks]), strict=True):
            assert torch.equal(view, torch.full(entry.shape, entry.start, dtype=entry.dtype))


def test_views_under_function_transforms():
    layout = layout_of(nn.Linear(3, 2))
    assert torch.func.grad(lambda v: sum((x**2).sum() for x in layout.views(v)))(torch.ones(8)).tolist() == [2.0] * 8
    assert torch.vmap(lambda v: layout.views(v)[0])(torch.ones(5, 8)).shape == (5, 2, 3)


def test_each_device_and_dtype_has_its_own_group():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2).half(), nn.Linear(2, 2)])
    layout = check_against_torch(net)
    assert [g.indices for g in layout.groups] == [(0, 1, 6, 7), (2, 3), (4, 5)]
    assert layout.fingerprint == layout_of(copy.deepcopy(net).to("meta")).fingerprint


def test_duplicates_in_a_list_are_ties():
    a, b = torch.zeros(2), torch.zeros(2)
    assert [e.names for e in layout_of([a, b, a])] == [("0", "2"), ("1",)]


@given(st.lists(parameters(ALL_DTYPES), max_size=4))
def test_lists_are_named_by_position(tensors):
    layout, listed = layout_and_tensors(iter(tensors))
    assert layout.names == tuple(str(i) for i in range(len(tensors)))
    assert all(a is b for a, b in zip(listed, tensors, strict=True))


FINGERPRINT = """
import torch
from moduli.layout import layout_of
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
net[3].weight = net[2].weight
net[2].double()
print(layout_of(net).fingerprint)
"""


def test_fingerprints_are_stable_across_processes():
    fingerprints = set()
    for seed in ("0", "12345"):
        process = subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        fingerprints.add(process.stdout.strip())
    # A literal, because stored fingerprints would no longer match if the digest changed by accident.
    assert fingerprints == {"f821b40e494c476dc260bea8fcd0c35a0f1168e00d26135dbc2518b59df7f001"}


def test_the_fingerprint_ignores_buffers():
    plain, normed = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
    assert layout_of(plain) is not layout_of(normed)
    assert layout_of(plain).fingerprint == layout_of(normed).fingerprint
    assert diff(plain, normed) is None


def test_copies_of_a_layout_are_the_identical_object():
    layout = layout_of(mlp())
    for twin in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert twin is layout
    process = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; print(pickle.load(sys.stdin.buffer).fingerprint)"],
        input=pickle.dumps(layout),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert process.stdout.decode().strip() == layout.fingerprint


def test_entries_are_immutable():
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
def test_layout_of_raises_on_sources_without_parameters(source, message):
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


def test_packing_is_differentiable_unless_out_is_passed():
    net = nn.Linear(3, 2)
    layout, tensors = layout_and_tensors(net)
    (vector,) = layout.pack(tensors)
    vector.sum().backward()
    assert net.weight.grad.sum() == 6
    out = torch.zeros(8)
    layout.pack(tensors, out=out)
    assert not out.requires_grad
    assert torch.equal(out, vector)


def test_views_can_be_changed_in_place_under_autograd():
    layout = layout_of(nn.Linear(3, 2))
    scale = torch.ones((), requires_grad=True)
    vector = torch.ones(8)
    layout.views(vector)[0].mul_(scale)
    vector.sum().backward()
    assert scale.grad == 6


def test_the_error_for_an_unknown_name_lists_known_ones():
    with pytest.raises(KeyError, match=r"no parameter is called 'wieght'; the first ones are \['weight', 'bias'\]"):
        layout_of(nn.Linear(1, 1))["wieght"]
    with pytest.raises(KeyError, match=r"'7'\]"):
        layout_of([torch.zeros(1) for _ in range(9)])["x"]
    with pytest.raises(KeyError, match=r"are \[\]"):
        Layout()["x"]


def test_entries_compare_by_value_and_pickle():
    entry = layout_of(nn.Linear(1, 1))["weight"]
    assert entry == Entry("weight", (1, 1), torch.float32, torch.device("cpu"), 1, 0, 0, 0)
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_layouts_are_immutable():
    layout = layout_of(mlp())
    for name in ("entries", "numel", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(layout, name, 1)
