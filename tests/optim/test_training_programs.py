"""Uses in training programs: steps in backward hooks, weight averaging, autocast, sparse gradients, named groups."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m, presets


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def test_one_optimizer_per_parameter_stepped_in_backward():
    net, other = make(), make()
    each = {p: mo.Optimizer([p], m.Adam(), m.LR(1e-2)) for p in net.parameters()}

    def hook(param):
        each[param].step()
        each[param].zero_grad()

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(hook)
    opt = mo.Optimizer(other, m.Adam(), m.LR(1e-2))
    for _ in range(3):
        net(X).square().mean().backward()
        opt.zero_grad()
        other(X).square().mean().backward()
        opt.step()
    assert all(p.grad is None for p in net.parameters())
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_weight_averaging_with_its_schedule():
    net = make()
    average = torch.optim.swa_utils.AveragedModel(net)
    opt = mo.Optimizer(net, presets.adamw(lr=1e-2))
    scheduler = torch.optim.swa_utils.SWALR(opt, swa_lr=0.05, anneal_epochs=2)
    for _ in range(4):
        opt.zero_grad()
        net(X).square().mean().backward()
        opt.step()
        average.update_parameters(net)
        scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("preset", [presets.soap, presets.muon, presets.adamw], ids=lambda preset: preset.__name__)
def test_steps_inside_autocast_are_steps_outside_it(preset, closure):
    net, other = make(), make()
    opt, plain = mo.Optimizer(net, preset(lr=1e-2)), mo.Optimizer(other, preset(lr=1e-2))
    seen = []

    def loss(model):
        out = model(X)
        seen.append(out.dtype)
        return out.float().square().mean()

    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if closure:
                opt.step(mo.closure(lambda: loss(net)))
            else:
                opt.zero_grad()
                loss(net).backward()
                opt.step()
        plain.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(other)
        value.backward()
        plain.step()
    assert set(seen) == {torch.bfloat16}
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("search", [m.Backtracking, m.StrongWolfe], ids=lambda search: search.__name__)
def test_sparse_gradients_are_made_dense_for_vectors(search):
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=True)
    rows = torch.tensor([1, 2])
    opt = mo.Optimizer(table, m.LBFGS(), search())
    for _ in range(6):
        loss = opt.step(mo.closure(lambda: (table(rows) - 1).square().sum()))
    assert loss < 1e-6


def test_groups_have_names_that_are_saved():
    net = make()
    opt = mo.Optimizer([{"params": net[0].parameters(), "name": "body"}, {"params": net[2].parameters()}], m.LR(0.1))
    assert [group.get("name") for group in opt.param_groups] == ["body", None]
    assert opt.state_dict()["param_groups"][0]["name"] == "body"


@pytest.mark.parametrize("name", sorted(set(presets.__all__) - {"muonclip"}))  # muonclip needs the logits of a model
def test_one_cycle_on_every_preset_works_or_says_what_is_missing(name):
    opt = mo.Optimizer(make(), getattr(presets, name)())
    keys = opt.defaults
    if "lr" not in keys:
        with pytest.raises(KeyError, match="learning rate|function of the step"):
            torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=4, cycle_momentum=False)
        return
    momentum = "momentum" in keys or "betas" in keys
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=4, cycle_momentum=momentum)
    if not momentum:
        with pytest.raises(ValueError, match="momentum"):
            torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=4)
