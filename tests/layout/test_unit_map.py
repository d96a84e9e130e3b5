"""Unit maps: tensors and state after axes were resized, compared with a loop over entries."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moduli as mo
from moduli.layout import EntryGain, FreshEntries, ResizedParameters, UnitMap
from moduli.optim._resized_state import compose
from moduli.particles import grow, shrink


@st.composite
def maps(draw, size):
    """Draw (index, fresh) of one axis: growth by copies, or chosen units in any order with new ones between them."""
    if draw(st.booleans()):
        more = draw(st.integers(0, 4))
        return torch.arange(size + more) % size, torch.arange(size, size + more)
    units = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6, unique=True))
    index, fresh = [], []
    for position, unit in enumerate(units):
        index.append(unit)
        if draw(st.booleans()):
            fresh.append(len(index))
            index.append(draw(st.integers(0, position)))
    return torch.tensor(index), torch.tensor(fresh, dtype=torch.int64)


def resize_by_loop(tensor, index, fresh, start):
    """Return the resized state, filled entry by entry.

    Args:
        tensor: The state.
        index: For each axis, the old position of each new one.
        fresh: For each axis, the positions that are new.
        start: The value of new entries.
    """
    out = torch.full([len(each) for each in index], start)
    for position in itertools.product(*(range(len(each)) for each in index)):
        if not any(coordinate in news.tolist() for coordinate, news in zip(position, fresh, strict=True)):
            out[position] = tensor[
                tuple(int(each[coordinate]) for each, coordinate in zip(index, position, strict=True))
            ]
    return out


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([0.0, 2.5]))
def test_state_follows_its_entries_and_fresh_entries_get_the_start_value(data, shape, start):
    tensor = torch.randn(shape)
    pairs = [data.draw(maps(size)) for size in shape]
    index, fresh = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    unit_map = UnitMap(shape, index, [each if len(each) else None for each in fresh])
    expected = resize_by_loop(tensor, index, fresh, start)
    assert torch.equal(unit_map.resize_state(tensor, start), expected)
    stacked = torch.stack([tensor, 2 * tensor])
    assert torch.equal(unit_map.resize_state(stacked, start, lead=1)[0], expected)
    assert unit_map.shape_after == tuple(expected.shape)
    full = torch.full(expected.shape, start)
    assert torch.equal(unit_map.resize_state(tensor, full), expected)


@given(st.data(), st.integers(1, 5))
def test_composed_maps_equal_two_in_a_row(data, size):
    first = UnitMap((size,), *([each] for each in data.draw(maps(size))))
    second = UnitMap(first.shape_after, *([each] for each in data.draw(maps(first.shape_after[0]))))
    tensor = torch.randn(size)
    both = compose([first, second])
    assert torch.equal(both.resize_state(tensor), second.resize_state(first.resize_state(tensor)))
    assert torch.equal(both.resize(tensor), second.resize(first.resize(tensor)))


def test_gains_are_applied_before_fills_and_fills_before_masks():
    index = (None, torch.tensor([0, 1, 0]))
    gain = EntryGain(torch.tensor([[0.5, 1.0, 0.5]]), torch.tensor([[0.1, 0.0, -0.1]]), torch.tensor([[1.0], [-1.0]]))
    fill = FreshEntries(0, torch.tensor([1]), torch.ones(1, 3))
    mask = EntryGain(torch.tensor([[1.0, 1.0, 0.0]]))
    unit_map = UnitMap((2, 2), index, (None, torch.tensor([2])), [gain], [fill], [mask])
    out = unit_map.resize(torch.tensor([[10.0, 20.0], [30.0, 40.0]]))
    torch.testing.assert_close(out, torch.tensor([[6.0, 20.0, 0.0], [1.0, 1.0, 0.0]]))


def test_maps_between_resized_parameters_are_found_until_a_parameter_is_freed():
    resized, tensors = ResizedParameters(), [torch.ones(n) for n in (2, 3, 4)]
    steps = [UnitMap((n,), (torch.arange(n + 1) % n,), (torch.tensor([n]),)) for n in (2, 3)]
    resized.record(tensors[0], tensors[1], steps[:1])
    resized.record(tensors[1], tensors[2], steps[1:])
    assert resized.find(tensors[0], tensors[2]) == steps
    assert resized.find(tensors[1], tensors[2]) == steps[1:]
    assert resized.find(tensors[2], tensors[0]) is None
    del tensors[0]
    assert len(resized._lineages[id(tensors[1])][1]) == 1
    del tensors
    assert not resized._lineages


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 5), min_size=3, max_size=5),
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
    st.sampled_from(["split", "zero"]),
    st.integers(0, 3),
)
def test_growing_and_shrinking_keep_the_outputs_of_random_networks(widths, more, how, seed):
    layers = []
    for left, right in itertools.pairwise(widths):
        layers += [nn.Linear(left, right), nn.Tanh()]
    net, x = nn.Sequential(*layers).double(), torch.randn(4, widths[0], dtype=torch.float64)
    axes = mo.axes.trace(net, x)
    before = net(x)
    sizes = {axis.name: axis.size + extra for axis, extra in zip(axes.free, more, strict=False)}
    grow(net, sizes, axes, x, how=how, seed=seed, tolerance=1e-12)
    torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-12)
    if how == "zero":
        shrink(net, {name: range(axes[name].size) for name in sizes}, example=x)
        torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-12)


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def assign_norm(net):
    net.norm = nn.BatchNorm1d(net.body.out_features)


def assign_head(net):
    torch.manual_seed(1)
    net.head = nn.Linear(net.body.out_features, 2)


def widen(net):
    grow(net, {"body.out": net.body.out_features + 2}, example=X)


def halve(net):
    shrink(net, {"body.out": list(range(0, net.body.out_features, 2))}, example=X)


def add(net):
    net.extra = nn.Linear(2, 2)


STEPS = {"n": assign_norm, "h": assign_head, "w": widen, "s": halve, "a": add}


@pytest.mark.parametrize(
    "order", ["ww", "wsw", "nw", "hw", "whw", "wnw", "awnws", "hhww", "wwhn", "nwnw", "swsw", "wah"]
)
def test_a_relative_that_updates_late_equals_one_that_updates_at_once(order):
    torch.manual_seed(0)
    net = Net()
    eager, late = net.clone(), net.clone()
    with torch.no_grad():
        for a, b in zip(eager.parameters(), late.parameters(), strict=True):
            a.add_(torch.rand_like(a))
            b.copy_(a)
        eager.norm.running_mean.fill_(0.3)
        late.norm.running_mean.fill_(0.3)
    for each in order:
        STEPS[each](net)
        eager.touch()
    late.touch()
    assert list(late.state_dict()) == list(eager.state_dict()) == list(net.state_dict())
    for name, value in eager.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name
    assert eager.eval()(X).shape == (6, 2)
    assert [m.__dict__.get("out_features") for m in late.modules()] == [
        m.__dict__.get("out_features") for m in net.modules()
    ]


def test_joined_resizes_store_no_parameter_values():
    net = Net()
    late = net.clone()
    for _ in range(20):
        widen(net)
        halve(net)
    assert not late._version_kernel.particle_updater.add_params
    assert late.touch().body.out_features == net.body.out_features
