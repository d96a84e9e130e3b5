"""An edit of the model in the middle of a run leaves the steps of all other parameters unchanged, for all links."""

import re

import pytest
import torch
from torch import nn

import moduli as mo
from laws.registry import collect

D = torch.float64
ROWS = [row for row in collect() if not row.members]
# Links that need residuals.
RESIDUALS = re.compile("GaussNewton|NaturalGradient|LevenbergMarquardt")


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.w = mo.tensor(torch.linspace(-1, 1, 12, dtype=D).view(3, 4).sin(), "row column").attach()
        self.v = mo.tensor(torch.tensor([0.3, -0.4, 0.9], dtype=D), "row").attach()


TARGET = torch.arange(12, dtype=D).view(3, 4).cos()
SCALE = torch.tensor([[0.5], [1.0], [2.0]], dtype=D)


def train(net, opt, steps):
    def loss():
        w, v = net.w.data[:3], net.v.data[:3]
        return (((w - TARGET) * SCALE) ** 2).sum() + ((v - 0.1) ** 2 * SCALE[:, 0]).sum() + (v.sum() * w.sum()) * 0.01

    for _ in range(steps):
        opt.step(mo.closure(loss))


def read(net):
    return {"w": net.w.data[:3].detach().clone(), "v": net.v.data[:3].detach().clone()}


def run(row, edit):
    """Return the parameters after six steps with an edit in the middle, and the optimizer."""
    torch.manual_seed(0)
    net = Net()
    opt = mo.Optimizer(net, *row.make())
    train(net, opt, 3)
    state = torch.get_rng_state()
    edit(net)
    torch.set_rng_state(state)
    train(net, opt, 3)
    return read(net), opt


def add_frozen(net):
    net.extra = nn.Parameter(torch.ones(2, dtype=D), requires_grad=False)


def replace(net):
    """Replace parameters by equal ones, as `load_state_dict(assign=True)` does."""
    for name in ("tensor:w", "tensor:v"):
        net._parameters[name] = nn.Parameter(net._parameters[name].detach().clone())


def grow(net):
    """Add rows that the loss does not use."""
    mo.particles.grow(net, {"row": 5})


# Steps of these links depend on the number of entries (a mean, the shape, random draws), so new rows change those of old ones.
COUNTS_ENTRIES = re.compile(
    "KLShampoo|LMO, spectral|MuonAdjustLR|Centralize|Adafactor|CAME|Cautious, normalised|PSGDKronNewton|LaplacianSmoothing"
    "|RelativeWeightDecay"
)


# Links with pointwise, factored, Kronecker or rotated state, or stored points: they never restart when units are added.
FOLLOWING = {
    "Adam",
    "Adafactor",
    "Shampoo",
    "SOAP",
    "PSGDKronWhiten",
    "Lookahead",
    "ScheduleFree",
    "Prodigy",
    "Rprop",
    "EMA",
}


def test_links_that_never_restart_are_rows():
    assert {row.name for row in ROWS} >= FOLLOWING


@pytest.mark.parametrize("row", [row for row in ROWS if not RESIDUALS.search(row.name)], ids=str)
def test_parameters_that_are_not_edited_continue(row):
    expected, _ = run(row, lambda net: None)
    for edit in (add_frozen, replace, grow):
        values, opt = run(row, edit)
        text = opt.explain()
        assert "the module was edited" in text
        if edit is grow:
            assert "2 parameters resized, with the state of units that stay (tensor:w, tensor:v)" in text
        if "restarted" in text:
            # State over all parameters, some of which were replaced, or without a rule for resizing, restarts and is reported.
            assert edit is not add_frozen
            assert row.name not in FOLLOWING
        if "restarted" in text or (edit is grow and (row.random or COUNTS_ENTRIES.search(row.name))):
            assert all(value.isfinite().all() for value in values.values())
            continue
        tolerance = {"rtol": 1e-7, "atol": 1e-9} if edit is grow else {"rtol": 0, "atol": 0}
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], **tolerance, msg=f"{edit.__name__}: {name}")
