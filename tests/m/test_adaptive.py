"""Adaptive links against torch and against the papers' formulas."""

import pytest
import torch

from m.first_order import close, formula, run
from moduli import m

FUSE = pytest.mark.parametrize("fuse", ["auto", False])


@FUSE
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_is_torchs(fuse, amsgrad):
    ours = run(lambda p: [m.Adam(eps=1e-3, amsgrad=amsgrad), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.Adam(p, 0.05, eps=1e-3, amsgrad=amsgrad)))


@FUSE
@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_is_torchs(fuse, centered):
    ours = run(lambda p: [m.RMSprop(smoothing=0.9, centered=centered), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.RMSprop(p, 0.05, alpha=0.9, centered=centered)))


@FUSE
def test_rmsprop_with_debias_and_amsgrad(fuse):
    def update(x, g, memory, t):
        memory["v"] = 0.9 * memory.get("v", 0) + 0.1 * g**2
        memory["top"] = torch.maximum(memory.get("top", torch.zeros_like(g)), memory["v"])
        return 0.05 * g / ((memory["top"] / (1 - 0.9**t)).sqrt() + 1e-8)

    ours = run(lambda p: [m.RMSprop(smoothing=0.9, debias=True, amsgrad=True), m.LR(0.05)], fuse=fuse)
    close(ours, run(formula(update)))


def test_rmsprop_from_the_first_update_and_inner():
    def update(x, g, memory, t):
        memory["v"] = 0.9 * memory.get("v", g**2) + 0.1 * g**2
        memory["m"] = 0.8 * memory.get("m", 0) + 0.2 * g
        return 0.05 * memory["m"] / (memory["v"].sqrt() + 1e-8)

    ours = run(lambda p: [m.RMSprop(smoothing=0.9, init="update", inner=m.EMA(0.8)), m.LR(0.05)])
    close(ours, run(formula(update)))


@FUSE
def test_adagrad_is_torchs(fuse):
    ours = run(lambda p: [m.Adagrad(lr_decay=0.1, initial_accumulator_value=0.2), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1, initial_accumulator_value=0.2)))


@FUSE
def test_lion_is_its_paper(fuse):
    def update(x, g, memory, t):
        before = memory.get("m", torch.zeros_like(g))
        memory["m"] = 0.99 * before + 0.01 * g
        return 0.01 * (0.9 * before + 0.1 * g).sign()

    close(run(lambda p: [m.Lion(), m.LR(0.01)], fuse=fuse, steps=40), run(formula(update), steps=40))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: m.Lion(beta2=0.0), "Lion: beta2"),
        (lambda: m.RMSprop(smoothing=1.5), "RMSprop: smoothing"),
        (lambda: m.RMSprop(init="update", debias=True), "no bias"),
        (lambda: m.Adagrad(eps=-1.0), "Adagrad: eps"),
    ],
)
def test_refuses(make, says):
    with pytest.raises(ValueError, match=says):
        make()
