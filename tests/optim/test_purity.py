"""Pointwise hooks may read values outside their arguments: these are compared at each step, or the link runs unfused."""

import torch

import moduli as mo
from moduli import m

SETTINGS = {"scale": 1.0}
FACTOR = 1.0


class Configured(mo.optim.TensorTransform):
    elementwise = True

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * SETTINGS["scale"]


class Named(mo.optim.TensorTransform):
    elementwise = True

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * FACTOR


class Own(mo.optim.TensorTransform):
    elementwise = True

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * self.factor


def run(link, change):
    """Return the lengths of three steps, with factors 1, 3 and 2, and the explanation."""
    w = torch.nn.Parameter(torch.zeros(3))
    opt = mo.Optimizer([w], m.HeavyBall(0.0), link, m.LR(1.0))
    moved = []
    for factor in (1.0, 3.0, 2.0):
        change(factor)
        before = w.detach().clone()
        w.grad = torch.ones(3)
        opt.step()
        moved.append((before - w.detach())[0].item())
    change(1.0)
    return moved, opt.explain()


def test_a_link_that_reads_a_dictionary_is_not_fused():
    moved, explained = run(Configured(), lambda value: SETTINGS.update(scale=value))
    assert moved == [1.0, 3.0, 2.0]
    assert "Configured.single_tensor_apply.SETTINGS is a dict" in explained
    assert explained.count("one pass") == 2  # the links before and after it are still fused


def test_a_fused_link_reads_globals_and_attributes_at_every_step():
    moved, explained = run(Named(), lambda value: globals().update(FACTOR=value))
    assert moved == [1.0, 3.0, 2.0]
    assert explained.count("one pass") == 1
    link = Own()
    moved, explained = run(link, lambda value: setattr(link, "factor", value))
    assert moved == [1.0, 3.0, 2.0]
    assert explained.count("one pass") == 1


def test_a_plan_is_made_again_after_each_kind_of_change():
    """The step after a change of groups, settings, or frozen and new parameters uses the change."""
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    lr = m.LR(1.0)
    opt = mo.Optimizer([a], m.HeavyBall(0.0), lr)

    def step():
        before = [p.detach().clone() for p in (a, b)]
        a.grad, b.grad = torch.ones(2), torch.ones(2)
        opt.step()
        return [(x - p.detach())[0].item() for x, p in zip(before, (a, b), strict=True)]

    assert step() == step() == [1.0, 0.0]
    plan = opt._plan
    assert step() == [1.0, 0.0]
    assert opt._plan is plan
    opt.param_groups[0]["lr"] = 0.5
    assert step() == [0.5, 0.0]
    opt.param_groups[0].update(lr=0.25)
    assert step() == [0.25, 0.0]
    opt.param_groups[0]["params"].append(b)
    assert step() == [0.25, 0.25]
    a.requires_grad_(False)
    assert step() == [0.0, 0.25]
    a.requires_grad_(True)
    opt.param_groups[0] = dict(opt.param_groups[0])  # a plain dict, which does not record changes
    opt.param_groups[0]["lr"] = 2.0
    assert step() == [2.0, 2.0]
    opt.param_groups[0]["lr"] = 3.0
    assert step() == [3.0, 3.0]


def test_changes_of_defaults_and_declarations_take_effect():
    w = torch.nn.Parameter(torch.zeros(2))
    link = Own()
    opt = mo.Optimizer([w], link, m.Mul(1.0))
    mul = opt.link("mul")

    def step():
        before = w.detach().clone()
        w.grad = torch.ones(2)
        opt.step()
        return (before - w.detach())[0].item()

    assert step() == step() == 1.0
    mul.defaults[next(iter(mul.defaults))] = 4.0
    assert step() == 4.0
    link.elementwise = False
    link.factor = 2.0
    assert step() == 8.0
    assert "not declared pointwise" in opt.explain()
