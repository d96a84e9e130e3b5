"""Schedules equal torch's at every step, and any setting takes one."""

import pickle
from itertools import pairwise

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import schedules


def torch_rates(scheduler, steps):
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    torch_scheduler = scheduler(opt)
    rates = []
    for _ in range(steps):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        torch_scheduler.step()
    return rates


def test_cosine_is_torchs_after_a_linear_warmup():
    lr = torch.optim.lr_scheduler

    def both(opt):
        rise = lr.LambdaLR(opt, lambda t: (t + 1) / 5)
        fall = lr.CosineAnnealingLR(opt, 15, 0.1)
        return lr.SequentialLR(opt, [rise, fall], [5])

    rate = schedules.Cosine(1.0, steps=20, warmup=5, floor=0.1)
    assert [rate(t) for t in range(20)] == pytest.approx(torch_rates(both, 20))


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_wsd_rises_stays_and_falls(shape):
    rate = schedules.WSD(2.0, steps=100, warmup=10, decay=30, floor=0.5, shape=shape)
    values = [rate(t) for t in range(120)]
    assert values[:10] == pytest.approx([2.0 * (t + 1) / 10 for t in range(10)])
    assert set(values[10:71]) == {2.0}
    assert all(a > b for a, b in pairwise(values[70:101]))
    assert set(values[100:]) == {0.5}


def test_any_setting_takes_them_and_they_are_saved_by_pickle():
    w = torch.nn.Parameter(torch.zeros(1))
    rate = schedules.WSD(0.1, steps=4, warmup=2, decay=1)
    opt = mo.Optimizer([w], m.EMA(schedules.Cosine(0.9, steps=4)), m.LR(rate))
    opt = pickle.loads(pickle.dumps(opt))
    (w,) = opt.param_groups[0]["params"]
    moved, mean = 0.0, 0.0
    for t in range(4):
        w.grad = torch.ones(1)
        opt.step()
        beta = schedules.Cosine(0.9, steps=4)(t)
        mean = beta * mean + (1 - beta)
        moved -= rate(t) * mean
        assert w.item() == pytest.approx(moved)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: schedules.Cosine(1.0, steps=5, warmup=5), "leave some for the rest"),
        (lambda: schedules.WSD(1.0, steps=10, decay=11), "from 1 to 10"),
        (lambda: schedules.WSD(1.0, steps=10, shape="steep"), "'linear', 'sqrt' or 'cosine'"),
        (lambda: schedules.Cosine(1.0, steps=0), "at least 1"),
    ],
)
def test_impossible_schedules_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_after_is_zero_until_its_step():
    rate = schedules.After(2, schedules.Cosine(1.0, steps=4))
    assert [rate(t) for t in (0, 1)] == [0.0, 0.0]
    assert rate(2) == schedules.Cosine(1.0, steps=4)(2)
    assert schedules.After(1, 0.5)(1) == 0.5
    with pytest.raises(ValueError, match="whole number"):
        schedules.After(1.5, 0.1)
