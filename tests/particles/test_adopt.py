"""Real models after `adopt`: unchanged keys, correct arithmetic, and the forward of the combined parameters."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from moduli import particles
from moduli.layout import layout_of
from moduli.particles import adopt


class Block(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        same = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + same)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.body(self.embedding(x)))


def transformer():
    return nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)


def recurrent():
    return nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)


MODELS = {
    "resnet": (ResNet, lambda: (torch.randn(2, 3, 32, 32),)),
    "transformer": (transformer, lambda: (torch.randn(2, 3, 16), torch.randn(2, 4, 16))),
    "lstm": (recurrent, lambda: (torch.randn(2, 3, 4),)),
    "gru": (lambda: nn.GRU(4, 5), lambda: (torch.randn(2, 3, 4),)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), lambda: (torch.randn(5, 3),)),
    "tied": (Tied, lambda: (torch.arange(5),)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        lambda: (torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(2, 3, 4)),
    ),
    "parameter dict": (lambda: nn.ParameterDict({"a": torch.ones(2), "b": torch.zeros(3, 2)}), None),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), lambda: (torch.randn(2, 3),)),
}  # fmt: skip


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", MODELS)
def test_adopted_models_have_arithmetic_and_copies(name):
    make, inputs = MODELS[name]
    a, b = make(), make()
    keys, kind = list(a.state_dict()), type(a)
    assert adopt(a) is a
    adopt(b)
    assert isinstance(a, kind)
    assert list(a.state_dict()) == keys
    result = a + 0.5 * (b - a)
    assert list(result.state_dict()) == keys
    other_params = dict(b.named_parameters())
    combined = {n: p + 0.5 * (other_params[n] - p) for n, p in a.named_parameters()}
    for n, p in result.named_parameters():
        torch.testing.assert_close(p, combined[n])
    if inputs is not None:
        x = inputs()
        for net in (a, result):
            net.eval()
        torch.testing.assert_close(first(result(*x)), first(functional_call(a, combined, x)), rtol=1e-4, atol=1e-5)
        result.train()
        first(result(*x)).sum().backward()
        assert all(p.grad is not None for p in result.parameters() if p.requires_grad)
    assert [e.names for e in layout_of(result)] == [e.names for e in layout_of(a)]
    a *= 2
    twin = copy.deepcopy(a)
    assert torch.equal(particles.vector(twin + a), 2 * particles.vector(a))
    again = pickle.loads(pickle.dumps(a + 0)) if name != "weight norm" else copy.deepcopy(a + 0)
    assert torch.equal(particles.vector(again - a), 0 * particles.vector(a))


def test_training_a_result_does_not_change_the_operand():
    net = adopt(ResNet())
    before = {k: v.clone() for k, v in net.state_dict().items()}
    result = 1.0 * net
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        result(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert int(result.bn1.num_batches_tracked) == 2


def test_values_that_are_no_modules_or_no_particles_are_refused():
    with pytest.raises(TypeError, match=r"adopt makes a particle of a torch\.nn\.Module"):
        adopt(3)
    net = adopt(nn.Linear(2, 2))
    assert adopt(net) is net
    with pytest.raises(TypeError, match=r"is not a particle; write moduli\.adopt"):
        net + nn.Linear(2, 2)
    with pytest.raises(TypeError, match="is not a particle"):
        particles.norm(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="a particle is expected"):
        particles.norm(3)


def test_buffer_policies_operate_copy_reset_and_share():
    net = adopt(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)))
    net(torch.randn(6, 2) + 3)
    assert torch.equal((net + net)[0].running_mean, net[0].running_mean)
    particles.buffer_policy(net, "operate", "0.*")
    particles.buffer_policy(net, "reset", "1.running_*")
    particles.buffer_policy(net, "share", "1.num_batches_tracked")
    other = net.clone()
    other[0](torch.randn(6, 2) - 3)
    result = 0.5 * net + 0.5 * other
    expected = 0.5 * net[0].running_mean + 0.5 * other[0].running_mean
    torch.testing.assert_close(result[0].running_mean, expected)
    assert int(result[0].num_batches_tracked) == 1  # integers are never averaged
    assert not result[1].running_mean.any()
    assert torch.equal(result[1].running_var, torch.ones(2))
    assert result[1].num_batches_tracked is net[1].num_batches_tracked
    assert (0.5 * result)[1].num_batches_tracked is net[1].num_batches_tracked
    with pytest.raises(ValueError, match="is not a policy"):
        particles.buffer_policy(net, "average")
    with pytest.raises(ValueError, match="has no buffer called"):
        particles.buffer_policy(net, "copy", "2.*")


def test_only_limits_operations_to_the_selected_parameters():
    net, other = (
        adopt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
        adopt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
    )
    part = particles.only(net, "0.*", "1.bias")
    result = part + other
    assert torch.equal(result[0].weight, net[0].weight + other[0].weight)
    assert torch.equal(result[1].weight, net[1].weight)
    assert torch.equal((-part)[1].bias, -net[1].bias)
    assert torch.equal((0 * part)[0].weight, 0 * net[0].weight)
    before = net[1].weight.clone()
    part *= 3
    part += part
    assert torch.equal(net[1].weight, before)
    expected = torch.cat([net[0].weight.flatten(), net[0].bias, net[1].bias]).norm()
    torch.testing.assert_close(particles.norm(part), expected)
    assert particles.vector(part).shape == (8,)
    assert particles.distance(part, net).item() == 0
    assert torch.equal(particles.randn(part)[1].weight, net[1].weight)
    assert torch.equal(particles.map(torch.zeros_like, part)[1].weight, net[1].weight)
    particles.axpy_(part, 0.0, other)
    with pytest.raises(ValueError, match="has no parameter called"):
        particles.only(net, "2.*")


def test_functions_of_models_and_products_have_the_values_of_torch():
    net = adopt(nn.Linear(2, 2)) * 0 + 4
    product = net.product()
    assert particles.sqrt(net).bias.tolist() == [2, 2]
    assert product.sqrt().module().bias.tolist() == [2, 2]
    assert particles.clamp(net, 1, 3).bias.tolist() == [3, 3]
    assert particles.sign(-net).bias.tolist() == [-1, -1]
    assert particles.exp(net * 0).bias.tolist() == [1, 1]
    assert product.lerp(0 * product, 0.25).module().bias.tolist() == [3, 3]
    assert product.zeros_like().module().bias.tolist() == [0, 0]
    assert product.map(lambda p, q: p * q, product).module().bias.tolist() == [16, 16]
    assert product.vector().tolist() == [4] * 6
    assert particles.where(False, net, 2 * net).bias.tolist() == [8, 8]
    assert particles.where(net - 4, net, 1.0).bias.tolist() == [1, 1]
    assert particles.where(torch.tensor([True] * 5 + [False]), product, 0 * product).module().bias.tolist() == [4, 0]
    assert particles.cosine(net, 0 * net).item() == 0
    assert product.cosine(product).item() == pytest.approx(1)
    assert product.distance(2 * product).item() == pytest.approx(96**0.5)
    assert particles.norm(net, float("inf")).item() == 4
    joined = torch.ones(6)
    net.weight.data, net.bias.data = joined[:4].view(2, 2), joined[4:]
    particles.vector(net, copy=False).zero_()
    assert not net.weight.any()
    assert not net.bias.any()
    net.bias.data = torch.ones(2)
    particles.vector(net, copy=False).zero_()
    assert net.bias.all()
    with pytest.raises(particles.StructureError, match="6 parameters in all"):
        particles.from_vector(net, torch.zeros(5))
    with pytest.raises(particles.StructureError, match="the condition has 2 elements"):
        particles.where(torch.tensor([True, False]), net, net)
    with pytest.raises(particles.StructureError, match=r"gave shape \(1,\) for 'weight'"):
        particles.map(lambda p: p.sum().reshape(1), net)
    with pytest.raises(particles.StructureError, match="a product and a module"):
        particles.dot(product, net)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        product.absent
    with pytest.raises(RuntimeError, match="in place are refused"), particles.differentiable():
        net += 1
    with pytest.raises(RuntimeError, match="in place are refused"), particles.differentiable():
        particles.lerp_(net, net, 0.5)
