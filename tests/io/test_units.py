"""Checkpoints of models with other numbers of units: common units are loaded by label or by position."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.io import CheckpointError

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def make(width, out=2, links=lambda: [m.Adam(), m.LR(0.01)]):
    torch.manual_seed(width)
    net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, out))
    opt = mo.Optimizer(net, *links())
    return net, opt


def train(net, opt, steps=3):
    for _ in range(steps):
        opt.step(mo.closure(lambda: ((net(X) - 1) ** 2).mean()))


@pytest.mark.parametrize(("before", "after"), [(4, 7), (7, 4)])
def test_state_of_common_units_is_loaded_by_position(before, after):
    (a, one), (b, two) = make(before), make(after)
    train(a, one)
    saved, n = copy.deepcopy(one.state_dict()), min(before, after)
    with pytest.raises(ValueError, match="strict=False leaves it out"):
        two.load_state_dict(saved)
    two.load_state_dict(saved, axes=mo.axes.trace(b, X))
    old, new = one.link("Adam").state, two.link("Adam").state
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(new["0.weight"][key][:n], old["0.weight"][key][:n])
        assert torch.equal(new["3.weight"][key][:, :n], old["3.weight"][key][:, :n])
        assert not new["0.weight"][key][n:].any()
        assert torch.equal(new["3.bias"][key], old["3.bias"][key])
    assert new["0.weight"]["step"] == 3
    train(b, two)


def test_heads_are_loaded_head_by_head(tmp_path):
    """The first heads of each part are loaded, not the first rows of the fused matrix."""

    class Attention(nn.Module):
        def __init__(self, heads):
            super().__init__()
            self.qkv, self.out = nn.Linear(6, 3 * heads * 2), nn.Linear(heads * 2, 6)
            self.heads = heads

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 2)).permute(2, 0, 3, 1, 4)
            y = (q @ k.mT / 2).softmax(-1) @ v
            return self.out(y.transpose(1, 2).flatten(2))

    small, large, x = Attention(2), Attention(3), torch.randn(2, 5, 6)
    opt = mo.Optimizer(small, m.Adam(), m.LR(0.1))
    opt.step(mo.closure(lambda: small(x).square().sum()))
    mo.save(tmp_path / "a.safetensors", module=small, optimizer=opt)
    other = mo.Optimizer(large, m.Adam(), m.LR(0.1))
    names = mo.axes.trace(large, x)
    values = large.qkv.weight.detach().view(3, 3, 2, 6).clone()
    with pytest.raises(CheckpointError, match="qkv.weight"):
        mo.load(tmp_path / "a.safetensors", module=large, optimizer=other)
    mo.load(tmp_path / "a.safetensors", module=large, optimizer=other, axes=names)
    loaded = large.qkv.weight.detach().view(3, 3, 2, 6)
    assert torch.equal(loaded[:, :2], small.qkv.weight.detach().view(3, 2, 2, 6))
    assert torch.equal(loaded[:, 2:], values[:, 2:])  # units that the file does not have keep their values
    assert torch.equal(large.out.weight[:, :4], small.out.weight)
    moments = [each.link("Adam").state["qkv.weight"]["exp_avg"] for each in (opt, other)]
    assert torch.equal(moments[1].view(3, 3, 2, 6)[:, :2], moments[0].view(3, 2, 2, 6))


class Speaker(mo.Module):
    def __init__(self, words):
        super().__init__()
        space = mo.Space(words, name="token")
        self.embed = mo.Tensor(torch.randn(len(words), 4, requires_grad=True), (space, mo.Space(4, name="model")))
        self.bias = mo.Tensor(torch.randn(len(words), requires_grad=True), (space,))


def test_a_vocabulary_is_loaded_by_label(tmp_path):
    small, large = Speaker(["a", "b", "c"]), Speaker(["x", "c", "a", "y"])
    opts = [mo.Optimizer(net, m.Adam(), m.LR(0.1)) for net in (small, large)]
    opts[0].step(mo.closure(lambda: small.embed.data.sin().sum() + small.bias.data.square().sum()))
    mo.save(tmp_path / "a.safetensors", module=small, optimizer=opts[0])
    rows_before = large.embed.data.detach().clone()
    mo.load(tmp_path / "a.safetensors", module=large, optimizer=opts[1], axes=mo.axes.trace(large))
    assert large.embed.dims[0].labels == ("x", "c", "a", "y")
    assert torch.equal(large.embed.data[[1, 2]], small.embed.data[[2, 0]])
    assert torch.equal(large.embed.data[[0, 3]], rows_before[[0, 3]])
    assert torch.equal(large.bias.data[[1, 2]], small.bias.data[[2, 0]])
    moments = [opt.link("Adam").state["tensor:bias"]["exp_avg"] for opt in opts]
    assert torch.equal(moments[1][[1, 2]], moments[0][[2, 0]])
    assert not moments[1][[0, 3]].any()


def test_torch_optimizers_load_the_state_of_common_units(tmp_path):
    (a, _), (b, _) = make(4), make(6)
    one, two = (torch.optim.Adam(net.parameters(), 0.01) for net in (a, b))
    (a(X) ** 2).mean().backward()
    one.step()
    mo.save(tmp_path / "a.safetensors", module=a, optimizer=one)
    mo.load(tmp_path / "a.safetensors", module=b, optimizer=two, axes=mo.axes.trace(b, X))
    assert torch.equal(two.state[b[0].weight]["exp_avg"][:4], one.state[a[0].weight]["exp_avg"])
    assert torch.equal(b[1].running_mean[:4], a[1].running_mean)
    (b(X) ** 2).mean().backward()
    two.step()


def test_state_without_a_rule_is_reported():
    for links, message in (
        (lambda: [m.GaLore(m.Adam(), rank=2), m.LR(0.01)], "can't follow a parameter with other units"),
        (lambda: [m.LBFGS(), m.LR(0.01)], "LBFGS would start afresh"),
    ):
        (a, one), (b, two) = make(4, links=links), make(6, links=links)
        train(a, one)
        ax = mo.axes.trace(b, X)
        with pytest.raises(ValueError, match=message):
            two.load_state_dict(one.state_dict(), axes=ax)
        with pytest.warns(UserWarning, match=message):
            two.load_state_dict(one.state_dict(), axes=ax, strict=False)
        train(b, two)


def test_another_model_is_refused(tmp_path):
    net, opt = make(4)
    train(net, opt)
    mo.save(tmp_path / "a.safetensors", module=net)
    saved = opt.state_dict()
    saved["shapes"]["3.weight"] = (2, 5)
    with pytest.raises(ValueError, match="no numbers of units"):
        opt.load_state_dict(saved, axes=mo.axes.trace(net, X))
    other, _ = make(4, out=3)
    mo.load(tmp_path / "a.safetensors", module=other, axes=mo.axes.trace(other, X))
    assert torch.equal(other[3].bias[:2], net[3].bias)
