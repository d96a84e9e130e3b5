"""Models with weights that hooks compute are copied, and calls leave these weights as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import moduli as mo
from moduli.layout import copy_module, recompute_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


def pruned():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    prune.l1_unstructured(net[0], "weight", 0.5)
    prune.random_unstructured(net[0], "weight", 0.5)
    return net


def normed():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(4, 2)))


@pytest.mark.parametrize("make", [pruned, normed])
@pytest.mark.parametrize("trained", [True, False])
def test_a_copy_has_weights_of_its_own_parameters(make, trained):
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(5, 3)
    with torch.set_grad_enabled(trained):
        y = net(x)
    twin = copy_module(net)
    assert torch.equal(twin[0].weight, net[0].weight)
    assert twin[0].weight.requires_grad == net[0].weight.requires_grad == trained
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(0.5)
    recompute_weights(twin)
    weight = twin[0].weight.detach().clone()
    twin(x)
    assert torch.equal(twin[0].weight, weight)
    assert not torch.equal(weight, net[0].weight)


def test_other_tensors_that_are_no_leaves_are_refused_as_ever():
    net = nn.Linear(2, 2)
    net.note = net.weight * 2
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy_module(net)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(net)


@pytest.mark.parametrize("make", [pruned, normed])
def test_a_trace_leaves_computed_weights(make):
    net, x = make().eval(), torch.randn(5, 3)
    y = net(x)
    kept = net[0].weight
    ax = mo.axes.trace(net, x)
    assert net[0].weight is kept
    assert "0.out" in ax
    assert mo.axes.check(net, x) < 1e-5
    assert torch.equal(net(x), y)


@pytest.mark.parametrize("make", [pruned, normed])
def test_minimize_takes_models_with_computed_weights(make):
    net, x = make().eval(), torch.randn(5, 3)
    start = net(x).square().mean().item()
    fit = mo.minimize(lambda f: f(x).square().mean(), net, "lbfgs", max_evals=20)
    weight = fit.x[0].weight.detach().clone()
    assert fit.x(x).square().mean() < start
    assert torch.equal(fit.x[0].weight, weight)


def test_a_copy_of_an_expanded_buffer_can_be_written():
    net = nn.Linear(2, 2)
    net.register_buffer("scale", torch.ones(1).expand(4))
    twin = copy_module(net)
    twin.scale[0] = 3.0
    assert twin.scale.tolist() == [3.0, 1.0, 1.0, 1.0]
    assert net.scale.tolist() == [1.0] * 4
    other = nn.Linear(2, 2)
    other.register_buffer("scale", torch.tensor([3.0, 5.0, 7.0, 9.0]))
    assert mo.merge.lerp(net, other, 0.5).scale.tolist() == [1.0] * 4
    assert mo.merge.lerp(net, other, 0.5, buffers="merge").scale.tolist() == [2.0, 3.0, 4.0, 5.0]
