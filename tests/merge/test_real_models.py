"""Merges of real architectures: the result runs, trains, and computes the forward of the merged parameters."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import moduli as mo
from merge.helpers import RECIPES, BatchNormNet, Tied, siblings
from moduli import merge


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.two(torch.relu(self.norm(self.one(x)))))


def recurrent():
    return nn.LSTM(3, 4, num_layers=2, batch_first=True)


def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


def residual():
    return nn.Sequential(nn.Conv2d(1, 4, 3), Block(4), Block(4), nn.Flatten(), nn.LazyLinear(3))


def weight_normed():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))


MODELS = {
    "batch norm": (BatchNormNet, lambda: (torch.randn(5, 3),)),
    "tied": (Tied, lambda: (torch.randint(7, (2, 5)),)),
    "transformer": (transformer, lambda: (torch.randn(2, 5, 8), torch.randn(2, 4, 8))),
    "lstm": (recurrent, lambda: (torch.randn(2, 5, 3),)),
    "residual": (residual, lambda: (torch.randn(2, 1, 6, 6),)),
    "weight norm": (weight_normed, lambda: (torch.randn(5, 3),)),
}


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", MODELS)
def test_every_recipe_merges_real_models(name):
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    x = inputs()
    net = build().eval()
    net(*x)
    models = siblings(net, 3)
    for recipe in RECIPES.values():
        merged = recipe(models)
        assert list(merged.state_dict()) == list(net.state_dict())
        assert all(a is b for a, b in zip(map(type, merged.modules()), map(type, net.modules()), strict=True))
        output = first(merged(*x))
        assert torch.isfinite(output).all()
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in merged.parameters())
        state = recipe([model.state_dict() for model in models])
        torch.testing.assert_close(first(functional_call(models[1], dict(state), x)), output)
        loaded = build().eval()
        loaded(*x)
        loaded.load_state_dict(state)
        torch.testing.assert_close(first(loaded(*x)), output)


def test_a_merged_model_is_trained():
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    net = merge.linear([a, b])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(16, 2), torch.randn(16, 1)
    before = (net(x) - y).square().mean()
    for _ in range(20):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    assert (net(x) - y).square().mean() < before


def test_a_soup_of_fine_tuned_models_is_no_worse_than_their_mean():
    """On a convex problem the loss of an average is at most the average of the losses."""
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    models = [nn.Linear(3, 1) for _ in range(4)]

    def loss(net):
        return (net(x) - y).square().mean().item()

    assert loss(merge.soup(models)) <= sum(map(loss, models)) / 4
    assert loss(merge.greedy_soup(models, loss, mode="min")) <= min(map(loss, models))


def test_modules_with_labelled_tensors_are_merged():
    modules = pytest.importorskip("moduli.nn", reason="needs labelled modules")

    class Net(modules.Module):
        def __init__(self, labels, *values):
            super().__init__()
            self.gain = mo.tensor(values, "channel", channel=labels, requires_grad=True)

        @modules.virtual
        def twice(self):
            return 2 * self.gain

    a, b, c = Net(["x", "y"], 1.0, 2.0), Net(["x", "y"], 3.0, 4.0), Net(["y", "x"], 1.0, 2.0)
    merged = merge.linear([a, b])
    assert type(merged) is Net
    assert mo.equal(merged.gain, mo.tensor([2.0, 3.0], "channel", channel=["x", "y"]))
    assert mo.equal(merged.twice, mo.tensor([4.0, 6.0], "channel", channel=["x", "y"]))
    assert mo.equal(merge.linear([a, c]).gain, mo.tensor([1.5, 1.5], "channel", channel=["x", "y"]))
    d = Net(["x", "z"], 1.0, 2.0)
    with pytest.raises(merge.MergeError, match=r"models\[1\] \(right\): 'tensor:gain' .* only the right has \['z'\]"):
        merge.linear([a, d])
    with pytest.raises(merge.MergeError, match=r"the labels of 'gain' are .* only the checkpoint has \['z'\]"):
        merge.linear([a.state_dict(), d.state_dict()])
    assert mo.equal(merge.linear([a, c.state_dict()]).gain, mo.tensor([1.5, 1.5], "channel", channel=["x", "y"]))
