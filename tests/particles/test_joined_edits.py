"""Joined edits: versions that no particle is at are merged, so that a late relative stores the last values instead of all."""

import copy
import gc
import pickle
import random
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import moduli as mo
from moduli.particles import adopt, history
from moduli.particles._record import record_of


def edits_from(module):
    """Return the edits from the version of a particle to the newest."""
    edits, version = [], record_of(module).version
    while version.next_version is not None:
        edits.append(version.particle_updater)
        version = version.next_version
    return edits


def count_alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


def refer_to_values(edits, references):
    """Return weak references to the values of edits and those of `references` that are alive, without repeats."""
    values = [value for edit in edits for value in (*edit.add_params.values(), *edit.buffers.values())]
    every = [*references, *map(weakref.ref, values)]
    return list({id(reference()): reference for reference in every if reference() is not None}.values())


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.w = nn.Parameter(torch.ones(3))
        self.gain = mo.tensor([1.0, 2.0], c=["r", "g"]).attach()
        self.register_buffer("count", torch.zeros(1))


def replace_layer(net, k):
    net.body = nn.Linear(3, 3)


def replace_parameter(net, k):
    net.w = nn.Parameter(torch.full((3,), float(k)))


def replace_buffer(net, k):
    net.register_buffer("count", torch.full((1,), float(k)))


def replace_labelled(net, k):
    # The order alternates, because an assignment with the same axes only writes values, which is no edit.
    net.gain = mo.tensor([float(k), 2.0], c=["r", "g"] if k % 2 else ["g", "r"]).attach()


def replace_inner(net, k):
    net.head[0] = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "edit",
    [replace_layer, replace_parameter, replace_buffer, replace_labelled, replace_inner],
    ids=lambda f: f.__name__,
)
def test_many_assignments_of_one_name_store_few_values(edit):
    net = Net()
    relative = net.clone()
    assert torch.equal(relative.w, net.w)
    references, most = [], 0
    for k in range(60):
        edit(net, k)
        net.clone()  # detects the assignment in a plain child
        references = refer_to_values(edits_from(relative), references)
        most = max(most, len(edits_from(relative)))
    assert most <= 3
    per_edit = 2 if edit in (replace_layer, replace_inner) else 1
    assert 0 < count_alive(references) <= 3 * per_edit
    assert len(history(net)) == 60
    relative.touch()
    assert count_alive(references) == 0
    assert_same(relative, net)


def assert_same(left, right):
    """Check that two models have the same structure, ties and values, and share no parameter."""
    names = [name for name, _ in left.named_modules(remove_duplicate=False)]
    assert names == [name for name, _ in right.named_modules(remove_duplicate=False)]
    a, b = left.state_dict(), right.state_dict()
    assert list(a) == list(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
    ties = [[id(p) for _, p in each.named_parameters(remove_duplicate=False)] for each in (left, right)]
    assert [ties[0].index(each) for each in ties[0]] == [ties[1].index(each) for each in ties[1]]
    own = {id(p) for p in left.parameters()} & {id(p) for p in right.parameters()}
    assert not own


def edit_at_random(net, rng, k):
    kind = rng.randrange(13)
    if kind < 5:
        (replace_layer, replace_parameter, replace_buffer, replace_labelled, replace_inner)[kind](net, k)
    elif kind == 5:
        net.body.register_buffer("mask", torch.full((2,), float(k)))
    elif kind == 6:
        net.body.weight = nn.Parameter(torch.full((3, 2 + k % 3), float(k)))
    elif kind == 7:
        setattr(net, f"extra{k % 4}", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    elif kind == 8 and "extra1" in net._modules:
        del net.extra1
    elif kind == 9:
        net.twin = net.body
    elif kind == 10:
        net.head.append(nn.Linear(2, 2))
    elif kind == 11 and len(net.head) > 2:
        del net.head[2]
    elif kind == 12:
        net.w = None if net.w is not None else nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("seed", range(12))
def test_a_late_relative_equals_one_that_follows_each_edit(seed):
    rng = random.Random(seed)
    net = Net()
    eager, late, occasional = (net.clone() for _ in range(3))
    others = []
    for each in (eager, late, occasional):
        each.w.data.copy_(net.w)
    for k in range(40):
        edit_at_random(net, rng, k)
        eager.touch()
        if rng.random() < 0.2:
            occasional.touch()
        if rng.random() < 0.15:
            others.append(eager.clone())  # starts at an intermediate version
            _ = others[-1].w
        if rng.random() < 0.1 and others:
            others.pop()
    for each in (*others, late, occasional):
        each.touch()
        assert_same(each, eager)
        assert (each + eager).state_dict().keys() == eager.state_dict().keys()
    assert len(edits_from(late)) == 0


def test_referenced_versions_are_not_joined():
    net = Net()
    relative = net.clone()
    _ = relative.w
    versions = []
    for k in range(6):
        replace_layer(net, k)
        versions.append(net._version_kernel)
    assert len(edits_from(relative)) == 6
    assert all(one.next_version is two for one, two in pairwise(versions))
    # When nothing refers to them any more, the next edits join them.
    versions.clear()
    for k in range(2):
        replace_layer(net, k)
    assert len(edits_from(relative)) <= 3
    relative.touch()
    assert torch.equal(relative.body.weight, net.body.weight)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.dumps(net)], ids=["copy", "pickle"])
def test_copies_of_intermediate_versions_follow(duplicate):
    net = Net()
    relative = net.clone()
    _ = relative.w
    replace_layer(net, 0)
    duplicated = duplicate(net)
    for k in range(5):
        replace_layer(net, k)
        replace_parameter(net, k)
    restored = pickle.loads(duplicated) if isinstance(duplicated, bytes) else duplicated
    for each in (restored, relative):
        assert not torch.equal(each.w, net.w)
        each.touch()
        assert torch.equal(each.w, net.w)
        assert torch.equal(each.body.weight, net.body.weight)


def make_relatives(net, count=3):
    relatives = [net.clone() for _ in range(count)]
    for each in relatives:
        each.state_dict()
    return relatives


def count_edits(net):
    """Let a particle detect edits of its plain modules; return the number of edits so far."""
    return len(history(net.touch()))


def test_joined_edits_have_the_attributes_hooks_and_labels_of_both():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net = adopt(nn.ModuleDict({"inner": inner}))
    (late,) = make_relatives(net, 1)
    inner.first, inner.scale = nn.Linear(2, 2), 3.0
    prune.identity(inner[0], "weight")
    assert count_edits(net) == 1
    inner.second, inner.shift = nn.Linear(2, 2), 4.0
    prune.identity(inner[0], "bias")
    assert count_edits(net) == 2
    for _ in range(3):
        inner.third = nn.Linear(2, 2)
        count_edits(net)
    assert len(edits_from(late)) <= 3
    late.touch()
    inner_of_late = late["inner"]
    assert (inner_of_late.scale, inner_of_late.shift) == (3.0, 4.0)
    assert list(late.state_dict()) == list(net.state_dict())
    assert len(inner_of_late[0]._forward_pre_hooks) == len(inner[0]._forward_pre_hooks) == 2

    labelled = Net()
    (late,) = make_relatives(labelled, 1)
    labelled.gain = mo.tensor([4.0, 3.0], c=["g", "r"]).attach()
    labelled.more = mo.tensor([5.0, 6.0], d=["x", "y"]).attach()
    for k in range(3):
        replace_inner(labelled, k)
        count_edits(labelled)
    late.touch()
    assert float(late.gain.sel(c="g")) == 4
    assert float(late.more.sel(d="y")) == 6


class Pair(nn.Module):
    """A module whose one child has an attribute that refers to the other."""

    def __init__(self):
        super().__init__()
        self.x, self.y = nn.Linear(2, 2), nn.Linear(2, 2)
        self.x.friends = [self.y]


def test_references_inside_an_added_module_are_separate_after_it_is_edited():
    net = adopt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    one, two, eager = make_relatives(net)
    net[1] = Pair()
    eager.touch()
    net[1].y = nn.Linear(2, 2)
    for _ in range(3):
        count_edits(net)
        eager.touch()
        net[0] = nn.Linear(2, 2)
    for each in (one, two):
        each.touch()
    friends = [each[1].x.friends[0] for each in (net, one, two, eager)]
    assert len(set(map(id, friends))) == 4


def test_references_to_a_removed_module_are_separate_in_each_relative():
    net = adopt(nn.ModuleDict({"m": nn.Module(), "n": nn.Module()}))
    one, eager = make_relatives(net, 2)
    net["n"].layer = nn.Linear(2, 2)
    net["m"].other, net["m"].items = nn.Linear(2, 2), [net["n"].layer]
    assert count_edits(net) == 1
    eager.touch()
    del net["n"].layer
    for _ in range(3):
        count_edits(net)
        eager.touch()
        net["m"].other.weight = nn.Parameter(torch.ones(2, 3))
    one.touch()
    assert len({id(each["m"].items[0]) for each in (net, one, eager)}) == 3
