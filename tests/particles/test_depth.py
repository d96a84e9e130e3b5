"""Inserting and removing layers: outputs stay the same, names are shifted, and optimizer state follows its layer."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.particles import GrowthError, insert, remove

from ..axes.zoo import Block, Model


def transformer(layers=2):
    def run(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    torch.manual_seed(0)
    blocks = nn.ModuleList([Block() for _ in range(layers)])
    return Model(run, embed=nn.Embedding(11, 24), blocks=blocks, norm=nn.LayerNorm(24), head=nn.Linear(24, 11))


IDS = torch.arange(14).reshape(2, 7) % 11


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("particle", [False, True])
def test_a_residual_block_starts_as_the_identity(position, particle):
    net = transformer()
    twin = mo.adopt(net).clone() if particle else None
    before, names = net(IDS), [id(block) for block in net.blocks]
    block = Block()
    queries = block.att.q.weight.clone()
    insert(net, f"blocks.{position}", block, IDS)
    torch.testing.assert_close(net(IDS), before)
    assert [id(each) for each in net.blocks if each is not block] == names
    assert net.blocks[position] is block
    # Only the last weights of the two branches are zero, so that all others get gradients from the second step on.
    zeros = [name for name, param in block.named_parameters() if not param.any()]
    assert {"att.o.weight", "att.o.bias", "down.weight", "down.bias"} <= set(zeros)
    assert torch.equal(block.att.q.weight, queries)
    net(IDS).square().sum().backward()
    assert block.att.o.weight.grad.abs().sum() > 0
    if particle:
        assert len(twin.touch().blocks) == 3
        torch.testing.assert_close(twin(IDS), before)
        assert mo.particles.history(twin) == [f"version 1: a Block was inserted at 'blocks.{position}'"]


def test_linear_and_convolution_layers_start_as_the_identity():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    before = net(x)
    insert(net, "2", nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
    insert(net, "-1", nn.Linear(4, 4))  # before the last, without an example
    torch.testing.assert_close(net(x), before)
    image = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU())
    y = torch.randn(2, 3, 8, 8)
    before = image(y)
    insert(image, "2", nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()), y)
    insert(image, "1", nn.Conv2d(6, 6, 5, padding=2, groups=6), y)
    torch.testing.assert_close(image(y), before)
    insert(image, "0", nn.Identity(), y)
    insert(image, "0", nn.BatchNorm2d(3), y, start="as given")


def test_layers_that_cannot_start_as_the_identity_are_refused_and_nothing_changes():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    values, keys, before = [p.detach().clone() for p in block.parameters()], list(net.state_dict()), net(x)
    with pytest.raises(GrowthError, match=r"the Sequential for '2' can't start as the identity"):
        insert(net, "2", block, x)
    with pytest.raises(GrowthError, match=r"pass example=inputs, or start='as given'"):
        insert(net, "2", block)
    with pytest.raises(GrowthError, match="can't start as the identity"):
        insert(net, "1", nn.Linear(4, 5), x)
    assert all(torch.equal(a, b) for a, b in zip(values, block.parameters(), strict=True))
    assert list(net.state_dict()) == keys
    assert torch.equal(net(x), before)
    insert(net, "2", block, x, start="as given")
    assert len(net) == 4
    with pytest.raises(ValueError, match="is in the model already"):
        insert(net, "0", block, x)
    with pytest.raises(IndexError, match="has 4 layers, and no position '7'"):
        insert(net, "7", nn.Linear(4, 4))
    with pytest.raises(KeyError, match="'blocks' is no module of the model.*the model itself"):
        insert(net, "blocks.0", nn.Linear(4, 4))
    with pytest.raises(KeyError, match="'0' is a Linear"):
        insert(net, "0.0", nn.Linear(4, 4))
    with pytest.raises(ValueError, match="start='zero'"):
        insert(net, "0", nn.Linear(3, 3), start="zero")

    class Counting(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * len(self)

    with pytest.raises(GrowthError, match="something else reads the layers"):
        insert(Counting(nn.Linear(3, 3)), "0", nn.Linear(3, 3), x)


@pytest.mark.parametrize("particle", [False, True])
def test_optimizer_state_follows_its_layer(particle):
    net = transformer(3)
    if particle:
        twin = mo.adopt(net).clone()  # noqa: F841  a relative makes edits versions
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.01), groups={"blocks.2.*": {"lr": 0.002}})
    loss = mo.closure(lambda: nn.functional.cross_entropy(net(IDS).flatten(0, 1), IDS.flatten()))
    opt.step(loss)
    adam = opt.link("Adam")
    rows = {name: adam.state[name] for name, _ in net.named_parameters()}
    insert(net, "blocks.1", Block(), IDS)
    opt.zero_grad()
    _ = opt.param_groups
    for layer, before in ((0, 0), (2, 1), (3, 2)):
        assert adam.state[f"blocks.{layer}.up.weight"] is rows[f"blocks.{before}.up.weight"]
    assert "blocks.1.up.weight" not in adam.state
    assert adam.state["head.weight"] is rows["head.weight"]
    assert opt.step(loss) < 3
    assert adam.state["blocks.1.up.weight"]["step"] == 1
    # A parameter stays in its group.
    assert opt.link("LR").settings[net.blocks[3].up.weight]["lr"] == 0.002
    row = adam.state["blocks.3.up.weight"]
    remove(net, "blocks.0")
    opt.step(loss)
    assert adam.state["blocks.2.up.weight"] is row
    assert len(net.blocks) == 3


def test_removing_a_layer_is_one_edit():
    net = mo.adopt(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2)))
    twin = net.clone()
    with torch.no_grad():
        twin[3].weight.fill_(7.0)
    remove(net, "2")
    assert [type(each).__name__ for each in twin.touch()] == ["Linear", "ReLU", "Linear"]
    assert (twin[2].weight == 7).all()
    assert mo.particles.history(net) == ["version 1: the Linear at '2' was removed"]
    with pytest.raises(IndexError, match="no position '3'"):
        remove(net, "3")


def test_a_population_is_no_model_to_insert_into():
    pop = mo.Population.of(nn.Sequential(nn.Linear(2, 2)), 3)
    with pytest.raises(TypeError, match="insert: it takes one nn.Module, not a Population"):
        insert(pop, "0", nn.Linear(2, 2))
    with pytest.raises(TypeError, match="remove: it takes one nn.Module, not a Population"):
        remove(pop, "0")
