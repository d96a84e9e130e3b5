"""State that was saved under other names, without names, or in another precision."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m

D = torch.float64


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


X = torch.linspace(-1, 1, 15, dtype=D).reshape(5, 3)


def train(opt, net, steps=3):
    for _ in range(steps):
        opt.step(mo.closure(lambda: net(X.to(net[0].weight.dtype)).square().mean()))


def chain():
    return [m.ClipNorm(0.1), m.Adam(), m.LR(1e-2)]


class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.module = net


FORMS = {
    "module": lambda net: net,
    "compiled": torch.compile,
    "data parallel": nn.DataParallel,
    "parameters": lambda net: net.parameters(),
    "named": lambda net: net.named_parameters(),
    "named in a wrapper": lambda net: Wrapped(net).named_parameters(),
    "named in a compiled one": lambda net: torch.compile(net).named_parameters(),
}


@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("here", FORMS)
@pytest.mark.parametrize("links", [chain, lambda: [m.LBFGS(), m.Backtracking()]], ids=["adam", "lbfgs"])
def test_a_run_resumes_whatever_form_the_parameters_were_passed_in(here, there, links):
    net = make()
    opt = mo.Optimizer(FORMS[there](net), *links())
    train(opt, net)
    other = make()
    other.load_state_dict(net.state_dict())
    resumed = mo.Optimizer(FORMS[here](other), *links())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(opt, net)
    train(resumed, other)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_without_names_go_by_order_and_shape():
    net = make()
    opt = mo.Optimizer(net.parameters(), *chain())
    train(opt, net)
    with pytest.raises(ValueError, match="only one side has names"):
        mo.Optimizer(reversed(list(net.named_parameters())), *chain()).load_state_dict(opt.state_dict())


@pytest.mark.parametrize(("first", "second"), [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_loaded_state_has_the_precision_of_the_parameters(first, second):
    net = make().to(first)
    opt = mo.Optimizer(net, m.Adam(), m.LR(1e-2))
    train(opt, net)
    other = make().to(second)
    resumed = mo.Optimizer(other, m.Adam(), m.LR(1e-2))
    resumed.load_state_dict(opt.state_dict())
    row = resumed.link("Adam").state[other[0].weight]
    assert row["exp_avg"].dtype is second
    torch.testing.assert_close(row["exp_avg"].to(first), opt.link("Adam").state[net[0].weight]["exp_avg"])
    train(resumed, other)


def test_saved_state_without_a_parameter_is_an_error():
    net = make()
    opt = mo.Optimizer(net, *chain())
    train(opt, net)
    less = mo.Optimizer(net[0].named_parameters(prefix="0"), *chain())
    with pytest.raises(ValueError, match=r"saved state of 2\.bias has no parameter here.*strict=False"):
        less.load_state_dict(opt.state_dict())
    assert not less.link("Adam").state
    with pytest.warns(UserWarning, match="left out"):
        less.load_state_dict(opt.state_dict(), strict=False)
    assert less.link("Adam").state[net[0].weight]["step"] == 3


def test_history_over_other_parameters_is_an_error():
    net = make()
    opt = mo.Optimizer(net, m.LBFGS(), m.LR(0.1))
    train(opt, net)
    grown = mo.Optimizer([*net.named_parameters(), ("new", nn.Parameter(torch.ones(2, dtype=D)))], m.LBFGS(), m.LR(0.1))
    with pytest.raises(ValueError, match="LBFGS would start afresh"):
        grown.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="LBFGS would start afresh"):
        grown.load_state_dict(opt.state_dict(), strict=False)
