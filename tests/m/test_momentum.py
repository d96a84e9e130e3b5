"""Momentum links against torch and against the formulas."""

import pytest
import torch

from m.first_order import close, doubles, formula, run
from moduli import m, optim

FUSE = pytest.mark.parametrize("fuse", ["auto", False])


@FUSE
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_heavy_ball_is_torchs_sgd(fuse, dampening):
    ours = run(lambda p: [m.HeavyBall(0.8, dampening=dampening), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, dampening=dampening)))


@FUSE
def test_nag_is_torchs_nesterov(fuse):
    ours = run(lambda p: [m.NAG(0.8), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True)))


@FUSE
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("lerp", [False, True])
@pytest.mark.parametrize("init", ["zeros", "update"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_ema_is_its_formula(fuse, debias, lerp, init, nesterov):
    if debias and lerp and init == "update":
        with pytest.raises(ValueError, match="no bias"):
            m.EMA(debias=debias, lerp=lerp, ema_init=init)
        return
    beta, damp = 0.7, 0.2

    def update(x, g, memory, t):
        seen = g if t == 1 and init == "update" else (1 - damp) * g
        before = memory.get("m", g if lerp and init == "update" else torch.zeros_like(g))
        memory["m"] = beta * before + ((1 - beta) if lerp else 1) * seen
        out = memory["m"] / (1 - beta**t) if debias else memory["m"]
        if nesterov:
            out = (1 - beta) * g + beta * out if lerp else g + beta * out
        return 0.05 * out

    links = lambda p: [  # noqa: E731
        m.EMA(beta, dampening=damp, debias=debias, lerp=lerp, ema_init=init, nesterov=nesterov),
        m.LR(0.05),
    ]
    close(run(links, fuse=fuse), run(formula(update)))


def test_heavy_ball_passes_the_first_update_on():
    link, u = m.HeavyBall(0.9), torch.tensor([2.0])
    assert torch.equal(optim.step_tensors(link, [u.clone()], params=[torch.zeros(1)])[0], u)


@FUSE
@pytest.mark.parametrize("normalize", [False, True])
def test_cautious_keeps_entries_of_equal_sign(fuse, normalize):
    u = [torch.tensor([1.0, 2.0, -3.0]), torch.tensor([4.0])]
    g = [torch.tensor([1.0, -1.0, -1.0]), torch.tensor([-1.0])]
    out = optim.step_tensors(m.Cautious(normalize=normalize), [x.clone() for x in u], grads=g)
    scale = 2.0 if normalize else 1.0
    close(out, [torch.tensor([1.0, 0.0, -3.0]) * scale, torch.tensor([0.0])])
    links = lambda p: [m.HeavyBall(), m.Cautious(normalize=normalize), m.LR(0.02)]  # noqa: E731
    close(run(links, fuse=fuse), run(links, fuse=False))


def test_cautious_modes():
    u, g = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -5.0])
    assert optim.step_tensors(m.Cautious(mode="grad"), [u.clone()], grads=[g])[0].tolist() == [1.0, -5.0]
    assert optim.step_tensors(m.Cautious(mode="backtrack"), [u.clone()], grads=[g])[0].tolist() == [1.0, -2.0]
    assert optim.step_tensors(m.Cautious(normalize=True, eps=0.5), [-u], grads=[u])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: m.EMA(1.0), "EMA: momentum is 1.0"),
        (lambda: m.NAG(-0.1), "NAG: momentum"),
        (lambda: m.EMA(ema_init="ones"), "ema_init"),
        (lambda: m.Cautious(mode="none"), "Cautious: mode"),
        (lambda: m.Cautious(normalize=True, mode="grad"), "dropped"),
        (lambda: m.EMA(float("nan")), "NaN"),
    ],
)
def test_wrong_arguments_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def series(link, values):
    w = torch.zeros(1)
    return [optim.step_tensors(link, [torch.tensor([v])], params=[w])[0].item() for v in values]


def test_averages_over_the_last_updates():
    values = [1.0, 2.0, 6.0, 4.0]
    assert series(m.Averaging(3), values) == pytest.approx([1.0, 1.5, 3.0, 4.0])
    assert series(m.MedianAveraging(3), values) == pytest.approx([1.0, 1.5, 2.0, 4.0])
    # weights are relative, and the first ones are used while there are fewer updates
    assert series(m.WeightedAveraging([2.0, 1.0, 1.0]), values) == pytest.approx([1.0, 1.5, 2.5, 3.5])
    assert series(m.WeightedAveraging([1.0] * 3), values) == pytest.approx(series(m.Averaging(3), values))


@FUSE
def test_scaling_and_masking_by_agreement_with_the_gradient(fuse):
    u, g = [torch.tensor([3.0, 4.0]), torch.tensor([0.0])], [torch.tensor([1.0, -1.0]), torch.tensor([1.0])]
    cosine = -1 / (5 * 3**0.5)
    out = optim.step_tensors(m.ScaleByGradCosineSimilarity(), [x.clone() for x in u], grads=g)
    close(out, [x * cosine for x in u], 1e-6)
    mask = optim.step_tensors(m.UpdateGradientSignConsistency(normalize=True), [x.clone() for x in u], grads=g)
    close(mask, [torch.tensor([3.0, 0.0]), torch.tensor([0.0])], 1e-6)
    for link in (m.ScaleByGradCosineSimilarity, m.UpdateGradientSignConsistency):
        links = lambda p, link=link: [m.HeavyBall(), link(), m.LR(0.02)]  # noqa: E731
        close(run(links, fuse=fuse), run(links, fuse=False))


def test_wrong_arguments_of_averages_are_refused():
    with pytest.raises(ValueError, match="Averaging: history_size"):
        m.Averaging(0)
    with pytest.raises(ValueError, match="sum to zero"):
        m.WeightedAveraging([1.0, 0.0])


def test_cautious_with_two_chains():
    u = doubles(1.0, -2.0, 3.0, 4.0)
    halves = m.IntermoduleCautious(m.Identity(), m.Mul(m.Fill(1.0)), normalize=True)
    torch.testing.assert_close(optim.step_tensors(halves, [u.clone()])[0], u)
    against = m.Sub(2.5)  # has the same signs in the last two entries only
    for mode, expected in (
        ("zero", doubles(0.0, -2.0, 3.0, 4.0)),
        ("grad", doubles(-1.5, -2.0, 3.0, 4.0)),
        ("backtrack", doubles(-1.0, -2.0, 3.0, 4.0)),
    ):
        link = m.IntermoduleCautious(m.Identity(), against, mode=mode)
        torch.testing.assert_close(optim.step_tensors(link, [u.clone()])[0], expected)
    link = m.IntermoduleCautious(m.Identity(), against, normalize=True)
    torch.testing.assert_close(optim.step_tensors(link, [u.clone()])[0], doubles(0.0, -2.0, 3.0, 4.0) / 0.75)
    with pytest.raises(ValueError, match="normalize"):
        m.IntermoduleCautious(m.Identity(), against, normalize=True, mode="grad")


def test_cosine_of_two_chains():
    tensors = [doubles(3.0, 0.0), doubles(4.0)]
    out = optim.step_tensors(m.ScaleModulesByCosineSimilarity(m.Identity(), m.Sign()), [t.clone() for t in tensors])
    cosine = 7 / (5 * 2**0.5)
    close(out, [t * cosine for t in tensors])
