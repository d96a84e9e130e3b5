"""Edits that nobody has to follow one by one are joined: a relative that was not used keeps the last values, not all."""

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
    """The edits from the version of a particle to the newest."""
    found, version = [], record_of(module).version
    while version.next_version is not None:
        found.append(version.particle_updater)
        version = version.next_version
    return found


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


def refer_to_values(edits, references):
    """Weak references to the values of edits, and those of before that still refer to something, once each."""
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
    # In another order every time: the same axes would be an update of the values, which is no edit.
    net.gain = mo.tensor([float(k), 2.0], c=["r", "g"] if k % 2 else ["g", "r"]).attach()


def replace_inner(net, k):
    net.head[0] = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "edit",
    [replace_layer, replace_parameter, replace_buffer, replace_labelled, replace_inner],
    ids=lambda f: f.__name__,
)
def test_many_assignments_of_one_name_keep_few_values(edit):
    net = Net()
    rel = net.clone()
    assert torch.equal(rel.w, net.w)
    references, most = [], 0
    for k in range(60):
        edit(net, k)
        net.clone()  # notices what a plain child was assigned
        references = refer_to_values(edits_from(rel), references)
        most = max(most, len(edits_from(rel)))
    assert most <= 3
    per_edit = 2 if edit in (replace_layer, replace_inner) else 1
    assert 0 < alive(references) <= 3 * per_edit
    assert len(history(net)) == 60
    rel.touch()
    assert alive(references) == 0
    same(rel, net)


def same(left, right):
    """Whether two models have the same structure, ties and values of what edits brought."""
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
def test_a_relative_that_sleeps_ends_where_one_that_follows_each_edit_does(seed):
    rng = random.Random(seed)
    net = Net()
    awake, asleep, dozing = (net.clone() for _ in range(3))
    others = []
    for each in (awake, asleep, dozing):
        each.w.data.copy_(net.w)
    for k in range(40):
        edit_at_random(net, rng, k)
        awake.touch()
        if rng.random() < 0.2:
            dozing.touch()
        if rng.random() < 0.15:
            others.append(awake.clone())  # begins at a version in the middle
            _ = others[-1].w
        if rng.random() < 0.1 and others:
            others.pop()
    for each in (*others, asleep, dozing):
        each.touch()
        same(each, awake)
        assert (each + awake).state_dict().keys() == awake.state_dict().keys()
    assert len(edits_from(asleep)) == 0


def test_versions_that_something_is_at_are_kept_as_they_are():
    net = Net()
    rel = net.clone()
    _ = rel.w
    kept = []
    for k in range(6):
        replace_layer(net, k)
        kept.append(net._version_kernel)
    assert len(edits_from(rel)) == 6
    assert all(one.next_version is two for one, two in pairwise(kept))
    # When they are let go, the next edits join them.
    kept.clear()
    for k in range(2):
        replace_layer(net, k)
    assert len(edits_from(rel)) <= 3
    rel.touch()
    assert torch.equal(rel.body.weight, net.body.weight)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.dumps(net)], ids=["copy", "pickle"])
def test_copies_of_versions_in_the_middle_follow(way):
    net = Net()
    rel = net.clone()
    _ = rel.w
    replace_layer(net, 0)
    kept = way(net)
    for k in range(5):
        replace_layer(net, k)
        replace_parameter(net, k)
    back = pickle.loads(kept) if isinstance(kept, bytes) else kept
    for each in (back, rel):
        assert not torch.equal(each.w, net.w)
        each.touch()
        assert torch.equal(each.w, net.w)
        assert torch.equal(each.body.weight, net.body.weight)


def make_relatives(net, count=3):
    relatives = [net.clone() for _ in range(count)]
    for each in relatives:
        each.state_dict()
    return relatives


def look(net):
    """Have a particle notice edits of plain modules in it."""
    return len(history(net.touch()))


def test_attributes_hooks_and_labels_of_joined_edits_are_those_of_both():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net = adopt(nn.ModuleDict({"inner": inner}))
    (asleep,) = make_relatives(net, 1)
    inner.first, inner.scale = nn.Linear(2, 2), 3.0
    prune.identity(inner[0], "weight")
    assert look(net) == 1
    inner.second, inner.shift = nn.Linear(2, 2), 4.0
    prune.identity(inner[0], "bias")
    assert look(net) == 2
    for _ in range(3):
        inner.third = nn.Linear(2, 2)
        look(net)
    assert len(edits_from(asleep)) <= 3
    asleep.touch()
    there = asleep["inner"]
    assert (there.scale, there.shift) == (3.0, 4.0)
    assert list(asleep.state_dict()) == list(net.state_dict())
    assert len(there[0]._forward_pre_hooks) == len(inner[0]._forward_pre_hooks) == 2

    labelled = Net()
    (asleep,) = make_relatives(labelled, 1)
    labelled.gain = mo.tensor([4.0, 3.0], c=["g", "r"]).attach()
    labelled.more = mo.tensor([5.0, 6.0], d=["x", "y"]).attach()
    for k in range(3):
        replace_inner(labelled, k)
        look(labelled)
    asleep.touch()
    assert float(asleep.gain.sel(c="g")) == 4
    assert float(asleep.more.sel(d="y")) == 6


class Pair(nn.Module):
    """A module of which one child knows the other."""

    def __init__(self):
        super().__init__()
        self.x, self.y = nn.Linear(2, 2), nn.Linear(2, 2)
        self.x.friends = [self.y]


def test_what_a_new_module_knows_is_its_own_also_if_it_is_removed_again():
    net = adopt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    one, two, awake = make_relatives(net)
    net[1] = Pair()
    awake.touch()
    net[1].y = nn.Linear(2, 2)
    for _ in range(3):
        look(net)
        awake.touch()
        net[0] = nn.Linear(2, 2)
    for each in (one, two):
        each.touch()
    friends = [each[1].x.friends[0] for each in (net, one, two, awake)]
    assert len(set(map(id, friends))) == 4


def test_what_an_attribute_refers_to_is_there_also_if_it_is_removed_again():
    net = adopt(nn.ModuleDict({"m": nn.Module(), "n": nn.Module()}))
    one, awake = make_relatives(net, 2)
    net["n"].layer = nn.Linear(2, 2)
    net["m"].other, net["m"].items = nn.Linear(2, 2), [net["n"].layer]
    assert look(net) == 1
    awake.touch()
    del net["n"].layer
    for _ in range(3):
        look(net)
        awake.touch()
        net["m"].other.weight = nn.Parameter(torch.ones(2, 3))
    one.touch()
    assert len({id(each["m"].items[0]) for each in (net, one, awake)}) == 3
