"""Values of relatives that follow an edit: after a change of sizes they keep their own values and receive only new entries."""

import copy
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moduli as mo
from moduli import particles
from moduli.layout import find_overlap
from moduli.particles import NytoModule, StructureError, adopt


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Sequential(nn.Linear(4, 2))
        self.w = nn.Parameter(torch.zeros(3))
        self.gain = mo.tensor([1.0, 2.0, 3.0], c=["r", "g", "b"]).attach()


def make_pair():
    net = Net()
    teacher = net.clone()
    with torch.no_grad():
        for param in teacher.parameters():
            param.fill_(7.0)
        for buffer in teacher.buffers():
            buffer.fill_(7)
    return net, teacher


def test_a_relative_keeps_its_values_in_a_wider_layer():
    net, teacher = make_pair()
    net.body = nn.Linear(4, 6)
    teacher.touch()
    assert torch.equal(teacher.body.weight[:4], torch.full((4, 4), 7.0))
    assert torch.equal(teacher.body.weight[4:], net.body.weight[4:])
    assert torch.equal(teacher.body.bias, torch.cat([torch.full((4,), 7.0), net.body.bias[4:]]))
    assert teacher.body.out_features == 6
    assert teacher.body.weight.requires_grad
    # The edited model has exactly what was assigned.
    assert not (net.body.weight == 7).any()


def test_tensors_of_equal_shape_in_a_resized_layer_keep_their_values():
    net, teacher = make_pair()
    net.body = nn.Linear(6, 4)
    teacher.touch()
    assert (teacher.body.bias == 7).all()
    assert torch.equal(teacher.body.weight[:, 4:], net.body.weight[:, 4:])
    assert (teacher.body.weight[:, :4] == 7).all()


def test_buffers_of_a_resized_layer_keep_their_values():
    net, teacher = make_pair()
    net.norm = nn.BatchNorm1d(6)
    teacher.touch()
    assert teacher.norm.running_mean.tolist() == [7, 7, 7, 7, 0, 0]
    assert teacher.norm.num_batches_tracked == 7
    net.register_buffer("seen", torch.zeros(2))
    teacher.touch().seen.fill_(5)
    net.register_buffer("seen", torch.zeros(3))
    assert teacher.touch().seen.tolist() == [5, 5, 0]


def test_layers_in_containers_and_adopted_models_keep_their_values():
    net, teacher = make_pair()
    net.head[0] = nn.Linear(4, 3)
    teacher.touch()
    assert (teacher.head[0].weight[:2] == 7).all()
    assert torch.equal(teacher.head[0].weight[2], net.head[0].weight[2])
    plain = adopt(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 3)))
    other = 0 * plain + 7
    plain[1] = nn.Conv1d(2, 3, 5)
    other.touch()
    assert (other[1].weight[:2, :, :3] == 7).all()
    assert torch.equal(other[1].weight[2], plain[1].weight[2])
    assert torch.equal(other[1].weight[..., 3:], plain[1].weight[..., 3:])


def test_a_resized_parameter_keeps_its_values():
    net, teacher = make_pair()
    net.w = nn.Parameter(torch.ones(5))
    assert teacher.touch().w.tolist() == [7, 7, 7, 1, 1]
    net.w = nn.Parameter(torch.ones(2))
    assert teacher.touch().w.tolist() == [7, 7]


@pytest.mark.parametrize(
    "assign",
    [
        lambda net: setattr(net, "body", nn.Linear(4, 4)),  # as large as before: other values, not other sizes
        lambda net: setattr(net, "w", nn.Parameter(torch.ones(3))),
        lambda net: setattr(net, "w", nn.Parameter(torch.ones(3, 2))),  # other axes
        lambda net: setattr(net, "w", nn.Parameter(torch.ones(5, dtype=torch.int32), requires_grad=False)),
        lambda net: setattr(net, "body", nn.Embedding(9, 9)),  # another class
        lambda net: setattr(net, "extra", nn.Linear(4, 4)),  # another name
    ],
    ids=["equal", "parameter", "axes", "kind", "class", "name"],
)
def test_assignments_that_are_no_resizes_are_received_as_they_are(assign):
    net, teacher = make_pair()
    before = set(net.state_dict())
    values = {name: value.clone() for name, value in net.state_dict().items()}
    assign(net)
    teacher.touch()
    changed = [
        name
        for name, value in net.state_dict().items()
        if name not in before or value.shape != values[name].shape or not torch.equal(value, values[name])
    ]
    assert changed
    for name in changed:
        assert torch.equal(teacher.state_dict()[name], net.state_dict()[name]), name


def test_resized_labelled_tensors_keep_values_by_label():
    net, teacher = make_pair()
    net.gain = mo.tensor([10.0, 20.0, 30.0, 40.0], c=["x", "b", "r", "y"]).attach()
    teacher.touch()
    assert {c: teacher.gain.sel(c=c).item() for c in "xbry"} == {"x": 10, "b": 7, "r": 7, "y": 40}
    # Other labels of the same number count as a resize too.
    net.gain = mo.tensor([1.0, 2.0, 3.0, 4.0], c=["r", "new", "b", "x"]).attach()
    teacher.touch()
    assert {c: teacher.gain.sel(c=c).item() for c in ("r", "new", "b", "x")} == {"r": 7, "new": 2, "b": 7, "x": 10}


def test_axes_in_another_order_are_matched_by_name():
    net = mo.Module()
    net.w = mo.tensor(torch.zeros(2, 2), row=["a", "b"], col=["x", "y"]).attach()
    twin = 0 * net + 7
    net.w = mo.tensor(torch.arange(6.0).reshape(3, 2), col=["z", "x", "y"], row=["b", "a"]).attach()
    twin.touch()
    assert twin.w.sel(col="z").data.tolist() == [0, 1]
    assert all(twin.w.sel(col=c, row=r).item() == 7 for c in "xy" for r in "ab")


def test_on_follow_is_set_by_touch_the_class_or_a_module():
    net, teacher = make_pair()
    net.body = nn.Linear(4, 6)
    with pytest.raises(ValueError, match="on_follow is 'kep'; choose 'keep'"):
        teacher.touch(on_follow="kep")
    assert teacher.body.out_features == 4
    assert torch.equal(teacher.touch(on_follow="copy").body.weight, net.body.weight)

    class Copying(Net):
        on_follow = "copy"

    net = Copying()
    twins = [0 * net + 7 for _ in range(3)]
    twins[1].on_follow = "keep"
    net.body = nn.Linear(4, 6)
    assert torch.equal(twins[0].touch().body.weight, net.body.weight)
    assert (twins[1].touch().body.weight[:4] == 7).all()
    assert (twins[2].touch(on_follow="keep").body.weight[:4] == 7).all()

    net, teacher = make_pair()
    teacher.body.on_follow = "copy"
    net.body, net.w = nn.Linear(4, 6), nn.Parameter(torch.zeros(4))
    teacher.touch()
    assert torch.equal(teacher.body.weight, net.body.weight)
    assert teacher.w.tolist() == [7, 7, 7, 0]


def test_an_invalid_on_follow_raises_and_changes_nothing():
    net, teacher = make_pair()
    teacher.on_follow = "average"
    net.body = nn.Linear(4, 6)
    with pytest.raises(ValueError, match=r"Net.on_follow: on_follow is 'average'"):
        teacher + net
    assert teacher.body.out_features == 4
    teacher.on_follow = "keep"
    assert (teacher.touch().body.weight[:4] == 7).all()


def test_a_child_may_be_called_on_follow():
    net = mo.Module()
    net.w = nn.Parameter(torch.zeros(2))
    net.on_follow = nn.Linear(2, 2)
    twin = 0 * net + 7
    net.w = nn.Parameter(torch.zeros(3))
    assert twin.touch().w.tolist() == [7, 7, 0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), lambda net: net + 0])
def test_copies_keep_their_values_too(duplicate):
    _, teacher = make_pair()
    other, net = duplicate(teacher), teacher.clone()
    net.body = nn.Linear(4, 6)
    assert (other.touch().body.weight[:4] == 7).all()


def test_operations_update_both_operands_with_their_own_values():
    net, teacher = make_pair()
    net.w = nn.Parameter(torch.ones(4))
    assert (net + teacher).w.tolist() == [8, 8, 8, 2]
    assert (teacher + net).w.tolist() == [8, 8, 8, 2]
    average = net.clone()
    net.w = nn.Parameter(torch.full((5,), 3.0))
    particles.lerp_(average, net, 0.5)
    assert average.w.tolist() == [2, 2, 2, 2, 3]


def test_ties_dtypes_and_frozen_parameters_survive_a_resize():
    net = NytoModule()
    net.a = nn.Linear(2, 2)
    net.b = net.a
    net.a.weight.requires_grad_(False)
    twin = (0 * net + 7).double()
    wide = nn.Linear(2, 3)
    wide.weight.requires_grad_(False)
    net.a = wide
    net.b = wide
    twin.touch()
    assert twin.a is twin.b
    assert (twin.a.weight[:2] == 7).all()
    assert not twin.a.weight.requires_grad
    assert twin.a.bias.requires_grad


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.booleans(), st.integers(0, 2**31))
def test_a_late_relative_has_the_values_of_one_that_follows_each_edit(sizes, labelled, seed):
    rng = random.Random(seed)
    net = mo.Module()

    def assign(size, value):
        tensor = torch.full((size,), float(value)) + torch.arange(size) / 8
        if labelled:
            net.w = mo.tensor(tensor, c=rng.sample("abcdefg", size)).attach()
        else:
            net.w = nn.Parameter(tensor)

    assign(3, 0)
    eager, late = (0 * net + 7 for _ in range(2))
    copying = net.clone()
    copying.on_follow = "copy"
    for position, size in enumerate(sizes):
        assign(size, 10 * (position + 1))
        eager.touch()
    assert torch.equal(next(late.touch().parameters()), next(eager.parameters()))
    assert torch.equal(next(copying.touch().parameters()), next(net.parameters()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_composed_overlaps_equal_two_in_a_row(data):
    """Copying through a middle tensor equals copying by the composed overlap."""
    letters = "abcdef"
    shapes = [data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4))) for _ in range(3)]
    labels = data.draw(st.booleans())
    axes = []
    for shape in shapes:
        sides = [tuple(data.draw(st.permutations(letters))[:size]) if labels else None for size in shape]
        named = [mo.layout.Axis(name, side) for name, side in zip("xy", sides, strict=True)]
        axes.append(tuple(named))
    if labels and data.draw(st.booleans()):
        axes[1], shapes[1] = axes[1][::-1], shapes[1][::-1]
    first = find_overlap(shapes[1], shapes[0], axes[1], axes[0])
    second = find_overlap(shapes[2], shapes[1], axes[2], axes[1])
    if first is None or second is None:
        return
    source = torch.arange(1.0, 1 + shapes[0][0] * shapes[0][1]).reshape(shapes[0])
    middle, whole, direct = torch.zeros(shapes[1]), torch.zeros(shapes[2]), torch.zeros(shapes[2])
    first.copy(middle, source)
    second.copy(whole, middle)
    second.after(first).copy(direct, source)
    assert torch.equal(whole, direct)


def test_edits_that_do_not_merge_are_still_refused():
    net, teacher = make_pair()
    net.body = nn.Linear(4, 6)
    teacher.head[0] = nn.Linear(4, 9)
    with pytest.raises(StructureError, match="the edits do not merge"):
        teacher.touch()


@pytest.mark.parametrize("late", [False, True], ids=["at each edit", "after two edits"])
def test_a_relative_keeps_its_dtype_and_stays_frozen(late):
    net = mo.adopt(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)))
    frozen, double, trained = net.clone().requires_grad_(False), net.clone().double(), net.clone()
    before = frozen[2].weight.clone()
    for size in (7, 9):
        net[2] = nn.Linear(6, size)
        if not late or size == 9:
            for relative in (frozen, double, trained):
                relative.touch()
    assert not any(param.requires_grad for param in frozen.parameters())
    assert all(param.requires_grad for param in (*double.parameters(), *trained.parameters()))
    assert {param.dtype for param in double.parameters()} == {torch.float64}
    assert frozen[2].weight.shape == (9, 6)
    assert torch.equal(frozen[2].weight[:5], before)
    double(torch.ones(1, 4, dtype=torch.float64))
    twin = net.clone().requires_grad_(False)
    net[2] = nn.Linear(6, 12)
    assert twin.touch(on_follow="copy")[2].weight.requires_grad
