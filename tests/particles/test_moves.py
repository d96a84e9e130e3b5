"""Values of older versions are those of the same layers, where edits have moved layers to other names."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles
from moduli.particles import StructureError, find_events_since, follow_names, migrate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("angles", torch.ones(4), persistent=False)

    def forward(self, x):
        return x + self.inner(x) * self.scale * self.angles


def make():
    net = mo.adopt(nn.Sequential(Block(), Block(), nn.Linear(4, 2)))
    particles.species(net)
    return net


def copy_state(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def disturb(net):
    with torch.no_grad():
        for param in net.parameters():
            param.add_(torch.randn(param.shape))


EDITS = {
    "insert": (lambda net, x: particles.insert(net, "1", Block(), x), {0: 0, 1: 2, 2: 3}),
    "insert first": (lambda net, x: particles.insert(net, "0", Block(), x), {0: 1, 1: 2, 2: 3}),
    "remove": (lambda net, x: particles.remove(net, "0"), {1: 0, 2: 1}),
    "by hand": (lambda net, x: net.insert(1, nn.Identity()), {0: 0, 1: 2, 2: 3}),
    "both": (
        lambda net, x: (
            particles.insert(net, "0", Block(), x),
            particles.remove(net, "2"),
            particles.insert(net, "1", Block(), x),
        ),
        {0: 2, 2: 3},
    ),
}


# With both edits the names of the first version are those of the last one, and only a file of ours tells which it is.
CASES = [
    (name, form)
    for name in EDITS
    for form in ("state", "module", "file", "torch file")
    if name != "both" or form == "file"
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_older_values_are_those_of_the_same_layers(name, form, tmp_path):
    torch.manual_seed(0)
    edit, places = EDITS[name]
    net, x = make(), torch.randn(3, 4)
    state, source = copy_state(net), particles.independent(net.clone())
    path = tmp_path / ("old.pt" if form == "torch file" else "old.safetensors")
    if form == "torch file":
        torch.save(state, path)
    elif form == "file":
        mo.save(path, net)
    edit(net, x)
    disturb(net)
    if form in ("file", "torch file"):
        result = net
        loaded = mo.load(path, net)
        new = set(range(len(net))) - set(places.values())
        assert {int(each.partition(".")[0]) for each in loaded.fresh} <= new
    else:
        result = migrate(state if form == "state" else source, net)
    for old, place in places.items():
        own = result[place].state_dict()
        assert all(torch.equal(value, state[f"{old}.{each}"]) for each, value in own.items())


def test_an_optimizer_of_an_older_version_follows(tmp_path):
    torch.manual_seed(0)
    net, x = make(), torch.randn(3, 4)
    opt = mo.Optimizer(net, mo.m.Adam(), mo.m.LR(0.1))
    loss = mo.closure(lambda f: f(x).square().mean())
    opt.step(loss)
    mo.save(tmp_path / "old.safetensors", net, optimizer=opt)
    twin = particles.independent(net.clone())
    other = mo.Optimizer(twin, mo.m.Adam(), mo.m.LR(0.1))
    mo.load(tmp_path / "old.safetensors", twin, optimizer=other)
    particles.insert(net, "1", nn.Identity(), x, start="as given")
    for _ in range(2):
        opt.step(loss)
    mo.load(tmp_path / "old.safetensors", net, optimizer=opt)
    for _ in range(2):
        opt.step(loss)
        other.step(loss)
    assert torch.equal(net[3].weight, twin[2].weight)
    assert torch.equal(net[2].inner.weight, twin[1].inner.weight)


def test_a_file_of_the_present_version_without_edits_is_loaded_by_name(tmp_path):
    net, x = make(), torch.randn(3, 4)
    particles.insert(net, "1", Block(), x)
    disturb(net)
    state = copy_state(net)
    torch.save(state, tmp_path / "new.pt")
    disturb(net)
    assert mo.load(tmp_path / "new.pt", net).fresh == ()
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(value, state[name]) for name, value in migrate(state, net).state_dict().items())


def test_a_layer_that_a_rollback_brings_back_has_its_values(tmp_path):
    net, x = make(), torch.randn(3, 4)
    particles.insert(net, "1", Block(), x)
    disturb(net)
    state, number = copy_state(net), net.history.version
    mo.save(tmp_path / "old.safetensors", net)
    particles.remove(net, "1")
    particles.rollback(net, number)
    disturb(net)
    assert mo.load(tmp_path / "old.safetensors", net).fresh == ()
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_names_of_no_version_are_refused_where_layers_have_moved():
    net, x = make(), torch.randn(3, 4)
    state = copy_state(net)
    particles.insert(net, "1", Block(), x)
    del state["0.inner.weight"]
    with pytest.raises(StructureError, match="the names of the source are those of no version .* was inserted at '1'"):
        migrate(state, net)


def test_events_say_what_they_moved():
    net, x = make(), torch.randn(3, 4)
    before = list(net.state_dict())
    particles.insert(net, "2", nn.Linear(4, 4), x)
    particles.remove(net, "0")
    first, second = net.history
    assert dict(first.moved) == {"2.weight": "3.weight", "2.bias": "3.bias"}
    assert dict(second.moved)["3.bias"] == "2.bias"
    followed = follow_names(before, net.history)
    assert followed.names["2.weight"] == "2.weight"
    assert followed.names["0.inner.weight"] is None
    assert followed.names["1.scale"] == "0.scale"
    assert find_events_since(before, net, net.history) == net.history
    assert find_events_since(net.state_dict(), net, net.history) == ()
