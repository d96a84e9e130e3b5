"""A call with other tensors is `functional_call`, and leaves modules with several names as they were."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli.layout import call_with_tensors


def twice():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.BatchNorm1d(3))


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def list_slots(net):
    return [
        (path, name, tensor)
        for path, module in net.named_modules(remove_duplicate=False)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
    ]


@pytest.mark.parametrize("make", [twice, tied])
def test_a_call_replaces_every_name_and_puts_all_back(make):
    net, x = make().eval(), torch.randn(4, 3)
    slots, before = list_slots(net), {name: each.clone() for name, each in net.state_dict().items()}
    other = make().eval()
    result = call_with_tensors(net, dict(other.named_parameters()), (x,))
    assert torch.equal(result, other(x))
    assert all(now is was for (*_, now), (*_, was) in zip(list_slots(net), slots, strict=True))
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())


def test_a_second_name_of_a_tied_tensor_is_enough():
    net, x = tied(), torch.randn(4, 3)
    result = call_with_tensors(net, {"2.weight": torch.zeros(3, 3), "2.bias": torch.ones(3)}, (x,))
    assert torch.equal(result, torch.ones(4, 3))


def test_unknown_names_are_those_of_functional_call():
    net, x = nn.Linear(2, 2), torch.randn(4, 2)
    expected = torch.func.functional_call(net, {"nothing": torch.ones(1)}, (x,))
    assert torch.equal(call_with_tensors(net, {"nothing": torch.ones(1)}, (x,)), expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda net, x: mo.axes.trace(net, x),
        lambda net, x: mo.axes.check(net, x),
        lambda net, x: mo.minimize(lambda f: f(x).square().mean(), net, "lbfgs", max_evals=5),
        lambda net, x: mo.minimize(lambda f: f(x).flatten(), net, "lm", max_evals=5),
    ],
    ids=["trace", "check", "minimize", "least squares"],
)
def test_functions_that_leave_a_model_as_it_is_do_so_with_one_layer_twice(use):
    net, x = twice(), torch.randn(6, 3)
    slots, before = list_slots(net), {name: each.clone() for name, each in net.state_dict().items()}
    use(net, x)
    assert all(now is was for (*_, now), (*_, was) in zip(list_slots(net), slots, strict=True))
    assert all(torch.equal(each, before[name]) for name, each in net.named_parameters())


@pytest.mark.parametrize("options", [{}, {"vectorised": True}, {"rank": 1, "method": "openes"}], ids=str)
def test_a_search_evaluates_members_with_one_layer_twice(options):
    torch.manual_seed(0)
    net, x = twice().eval(), torch.randn(6, 3)
    kept = list(net.parameters())

    def fitness(f):
        return f(x).square().mean()

    start = fitness(net).item()
    result = mo.search(net, fitness, budget=300, seed=0, **options)
    assert all(a is b for a, b in zip(kept, net.parameters(), strict=True))
    assert fitness(net).item() == pytest.approx(result.value, rel=1e-4)
    assert result.value < start
