"""Merging as on a device, with numbers: the CPU stands in for one.

There names that are merged alike are one vector, what agrees is kept by a mask, and questions about values are asked once,
at the end.
"""

import pytest
import torch
from torch import nn

from moduli import merge
from moduli.merge import MergeError, _checks, _driver, _rebuild, _trim

RECIPES = {
    "linear": lambda a, b, c, **k: merge.linear([a, b, c], [1, 2, 3], **k),
    "sum": lambda a, b, c, **k: merge.linear([a, b, c], [1, -1, 0.5], normalize=False, **k),
    "lerp": lambda a, b, c, **k: merge.lerp(a, b, {"0.*": 0.3, "*": 0.8}, **k),
    "task_vector": lambda a, b, c, **k: merge.task_vector(a, b, **k),
    "task_arithmetic": lambda a, b, c, **k: merge.task_arithmetic(a, [b, c], [0.5, -0.5], **k),
    "slerp": lambda a, b, c, **k: merge.slerp(a, b, 0.3, **k),
    "slerp of models": lambda a, b, c, **k: merge.slerp(a, b, 0.3, angle="model", **k),
    "ties": lambda a, b, c, **k: merge.ties(a, [b, c], 0.5, **k),
    "ties of models": lambda a, b, c, **k: merge.ties(a, [b, c], 0.5, trim="model", **k),
    "dare": lambda a, b, c, **k: merge.dare(a, [b, c], 0.5, generator=3, **k),
    "della": lambda a, b, c, **k: merge.della(a, [b, c], 0.5, epsilon=0.2, generator=3, **k),
    "breadcrumbs": lambda a, b, c, **k: merge.breadcrumbs(a, [b, c], 0.5, **k),
    "sce": lambda a, b, c, **k: merge.sce(a, [b, c], 0.5, **k),
    "stock": lambda a, b, c, **k: merge.stock(a, [b, c], **k),
    "karcher": lambda a, b, c, **k: merge.karcher([a, b, c], **k),
}


@pytest.fixture
def device(monkeypatch):
    """Turns the CPU into a device from here on."""

    def begin():
        for module in (_checks, _rebuild, _trim):
            monkeypatch.setattr(module, "is_elsewhere", lambda tensor: True)

    return begin


def make(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Conv2d(2, 2, 3)).to(dtype)
    net[3].to(memory_format=torch.channels_last)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64))
        net[0].bias.fill_(0.1)  # all models agree
        net[2].weight[0] = 1 / 3
        net[1].running_mean.copy_(torch.randn(3, dtype=torch.float64))
    net.register_parameter("again", net[2].weight)
    net.register_buffer("table", torch.arange(3))
    return net


@pytest.mark.parametrize("states", [False, True], ids=["models", "states"])
@pytest.mark.parametrize("buffers", ["first", "merge"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_give_the_numbers_of_the_host(name, buffers, states, device):
    models = [make(seed) for seed in range(3)]
    given = [model.state_dict() for model in models] if states else models
    expected = RECIPES[name](*given, buffers=buffers)
    before = [{key: value.clone() for key, value in model.state_dict().items()} for model in models]
    device()
    made = RECIPES[name](*given, buffers=buffers)
    if not states:
        assert made.again is made[2].weight
        assert made[3].weight.is_contiguous(memory_format=torch.channels_last)
        flags = [[param.requires_grad for param in model.parameters()] for model in (made, expected)]
        assert flags[0] == flags[1]
        made, expected = made.state_dict(), expected.state_dict()
    assert list(made) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value, rtol=1e-10, atol=1e-12)
    if name not in ("task_vector", "sum"):
        assert torch.equal(made["0.bias"], before[0]["0.bias"])  # bit for bit
    places = [value.untyped_storage().data_ptr() for key, value in made.items() if key != "again"]
    assert len(set(places)) == len(places)  # each has memory of its own
    for model, held in zip(models, before, strict=True):
        assert all(torch.equal(value, held[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_models_are_merged_in_single_precision(dtype, device):
    models = [make(seed, dtype) for seed in range(3)]
    expected = merge.linear(models, [1, 2, 3])
    device()
    made = merge.linear(models, [1, 2, 3])
    for ours, theirs in zip(made.parameters(), expected.parameters(), strict=True):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours, theirs)


def break_with_nan(models):
    models[1][2].bias.data[1] = torch.nan


def break_with_overflow(models):
    for model in models:
        model[2].bias.data.fill_(60000.0)


def break_integers(models):
    models[2].table[1] = 7


def break_variances(models):
    models[0][1].running_var.fill_(1.0)
    models[1][1].running_var.fill_(9.0)


@pytest.mark.parametrize(
    ("damage", "work", "dtype"),
    [
        (break_with_nan, lambda a, b, c: merge.linear([a, b, c]), torch.float64),
        (break_with_nan, lambda a, b, c: merge.ties(a, [b, c], 0.5), torch.float64),
        (break_with_overflow, lambda a, b, c: merge.linear([a, b], [1, 1], normalize=False), torch.float16),
        (break_integers, lambda a, b, c: merge.linear([a, b, c]), torch.float64),
        (break_variances, lambda a, b, c: merge.lerp(a, b, -1.0, buffers="merge"), torch.float64),
    ],
    ids=["NaN", "NaN by name", "overflow", "integers", "variances"],
)
def test_what_is_wrong_is_said_as_on_the_host(damage, work, dtype, device):
    models = [make(seed, dtype) for seed in range(3)]
    damage(models)
    with pytest.raises(MergeError) as host:
        work(*models)
    device()
    with pytest.raises(MergeError) as there:
        work(*models)
    assert str(there.value) == str(host.value)


def test_a_device_is_asked_once(device, monkeypatch):
    models = [make(seed) for seed in range(3)]
    device()
    asked = []
    fail = _checks.Checks.fail
    monkeypatch.setattr(_checks.Checks, "fail", lambda self: asked.append(len(self._noted)) or fail(self))
    merge.linear(models)
    assert len(asked) == 1
    assert asked[0] > 3


def test_large_models_are_several_vectors(device, monkeypatch):
    models = [make(seed) for seed in range(3)]
    expected = merge.linear(models)
    device()
    monkeypatch.setattr(_driver, "_PACK", 10)
    monkeypatch.setattr(_rebuild, "_PACK", 10)
    for ours, theirs in zip(merge.linear(models).parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
