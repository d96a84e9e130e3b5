"""Recipes with data: Fisher information, and batch norm statistics estimated again."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from merge.helpers import BatchNormNet, Tied, assert_same, siblings
from moduli import merge
from moduli.merge import MergeError


def classes(net, batch):
    x, y = batch
    return F.cross_entropy(net(x), y, reduction="none")


def batches(count=3, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, generator=generator), torch.randint(2, (size,), generator=generator))
        for _ in range(count)
    ]


def test_fisher_information_is_the_mean_of_squared_gradients_by_example():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net[0].bias.requires_grad_(False)
    before = copy.deepcopy(net)
    data = batches()
    information = merge.fisher_information(net, data, classes)
    assert_same(net, before)
    assert all(p.grad is None for p in net.parameters())
    assert list(information) == ["0.weight", "2.weight", "2.bias"]

    def one(parameters, x, y):
        return F.cross_entropy(functional_call(net, parameters, (x[None],)), y[None])

    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    detached = {name: p.detach() for name, p in net.named_parameters()}
    gradients = vmap(grad(one), (None, 0, 0))(detached, x, y)
    for name, value in information.items():
        torch.testing.assert_close(value, gradients[name].square().mean(0))


def test_fisher_information_does_not_depend_on_batches_or_modes():
    net = BatchNormNet().train()
    before = copy.deepcopy(net)
    data = batches(count=2, size=3)
    together = merge.fisher_information(net, data, classes)
    assert net.training
    assert_same(net, before)
    singles = [(x[i : i + 1], y[i : i + 1]) for x, y in data for i in range(3)]
    separate = merge.fisher_information(net, singles, lambda net, batch: classes(net, batch).sum())
    for name, value in together.items():
        torch.testing.assert_close(separate[name], value)
    with torch.no_grad():
        without_grad = merge.fisher_information(net, data, classes)
    assert all(torch.equal(without_grad[name], value) for name, value in together.items())


def test_fisher_information_of_tied_half_and_complex_parameters():
    net = Tied()
    information = merge.fisher_information(
        net, [torch.tensor([[1, 2], [3, 4]])], lambda net, t: net(t).square().mean((1, 2))
    )
    assert information["head.weight"] is information["embedding.weight"]
    models = siblings(net, 2)
    merged = merge.fisher(models, [information, information])
    assert merged.head.weight is merged.embedding.weight
    merge.fisher([dict(model.state_dict()) for model in models], [information, information])

    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
            self.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))

        def forward(self, x):
            return (self.phase * x).abs().square().sum() * self.gain.float()

    information = merge.fisher_information(Phase(), [torch.tensor([1.0, 2.0])], lambda net, x: net(x))
    assert information["phase"].dtype == information["gain"].dtype == torch.float32
    # d/dz of 2 |z|^2 x^2 in torch's convention is 4 z x^2.
    torch.testing.assert_close(information["phase"], torch.tensor([32.0, 16.0 * 16 * 5]))


def test_merging_with_information_beats_the_average_where_tasks_use_different_parameters():
    base = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        base.weight.zero_()
    tasks = []
    for column in (0, 1):  # each task depends on one input and determines one weight
        x = torch.zeros(8, 2)
        x[:, column] = torch.linspace(-1, 1, 8)
        model = copy.deepcopy(base)
        with torch.no_grad():
            model.weight[0, column] = 2.0
        tasks.append((model, x, 2.0 * x.sum(1, keepdim=True)))
    fishers = [
        merge.fisher_information(model, [(x, y)], lambda net, b: (net(b[0]) - b[1] - 1).square().sum(1))
        for model, x, y in tasks
    ]
    models = [model for model, _, _ in tasks]

    def loss(net):
        return sum((net(x) - y).square().mean().item() for _, x, y in tasks)

    assert loss(merge.fisher(models, fishers)) < 1e-10 < loss(merge.soup(models))


def test_invalid_fisher_information_is_refused():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    good = {"weight": torch.ones(2, 2)}
    for fishers, text in (
        ([good], "1 fishers for 2 models"),
        ([good, {}], "not in all of the others"),
        ([{"module.weight": torch.ones(2, 2)}] * 2, "'module.weight', which is no parameter"),
        ([good, {"weight": torch.ones(2)}], r"fishers\[1\]\['weight'\] is torch.float32 of shape \(2,\)"),
        ([good, {"weight": -torch.ones(2, 2)}], "negative, infinite or NaN"),
        ([good, {"weight": torch.full((2, 2), float("nan"))}], "negative, infinite or NaN"),
    ):
        with pytest.raises(MergeError, match=text):
            merge.fisher([a, b], fishers)
    with pytest.raises(MergeError, match="floor is 0"):
        merge.fisher([a, b], [good, good], floor=0)

    x = torch.ones(3, 2)
    with pytest.raises(MergeError, match=r"loss gave torch.float32 of shape \(3, 2\)"):
        merge.fisher_information(a, [x], lambda net, x: net(x))
    with pytest.raises(MergeError, match="loss gave float"):
        merge.fisher_information(a, [x], lambda net, x: 1.0)
    with pytest.raises(MergeError, match="computed from the model"):
        merge.fisher_information(a, [x], lambda net, x: torch.ones(3))
    with pytest.raises(MergeError, match="use its first argument"):
        merge.fisher_information(a, [x], lambda net, x: a(x).sum())
    with pytest.raises(MergeError, match="data holds no example"):
        merge.fisher_information(a, iter(()), lambda net, x: net(x).sum())
    with pytest.raises(MergeError, match="no parameter of the model requires gradients"):
        merge.fisher_information(copy.deepcopy(a).requires_grad_(False), [x], lambda net, x: net(x).sum())


# -- batch normalisation ----------------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_estimated_on_the_merged_model():
    a, b = (model.train() for model in siblings(BatchNormNet(), 2))
    model = merge.linear([a, b])
    before = copy.deepcopy(model)
    data = [x for x, _ in batches(count=4, size=6)]
    estimated = merge.reestimate_batch_norm(model, data)
    assert_same(model, before)
    hidden = [model[0](x) for x in data]
    torch.testing.assert_close(estimated[1].running_mean, sum(h.mean(0) for h in hidden).detach() / 4)
    torch.testing.assert_close(estimated[1].running_var, sum(h.var(0) for h in hidden).detach() / 4)
    assert estimated[1].num_batches_tracked == 4
    assert estimated[1].momentum == model[1].momentum == 0.1
    assert [m.training for m in estimated.modules()] == [m.training for m in model.modules()]
    assert_same(estimated[4], model[4])


def test_batches_are_tensors_tuples_or_anything_with_a_forward():
    model = BatchNormNet().eval()
    data = batches()
    expected = merge.reestimate_batch_norm(model, [x for x, _ in data])
    assert not expected.training
    assert_same(merge.reestimate_batch_norm(model, data), expected)
    named = [{"x": x} for x, _ in data]
    assert_same(merge.reestimate_batch_norm(model, named, forward=lambda net, batch: net(batch["x"])), expected)
    with pytest.raises(TypeError, match="not dict"):
        merge.reestimate_batch_norm(model, named)
    with pytest.raises(MergeError, match="data holds no batch"):
        merge.reestimate_batch_norm(model, [])


def test_models_without_statistics_need_no_data():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    assert_same(merge.reestimate_batch_norm(net, []), net)
