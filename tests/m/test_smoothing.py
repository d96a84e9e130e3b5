"""Smoothing of updates and of losses."""

import pytest
import torch

import moduli as mo
from moduli import m, optim


def test_laplacian_solves_its_equation_and_keeps_the_mean():
    u = torch.randn(3, 5, dtype=torch.float64)
    v = optim.step_tensors(m.LaplacianSmoothing(2.5), [u.clone()])[0]
    flat = v.reshape(-1)
    back = flat - 2.5 * (torch.roll(flat, 1) - 2 * flat + torch.roll(flat, -1))
    torch.testing.assert_close(back, u.reshape(-1))
    assert float(v.sum()) == pytest.approx(float(u.sum()))


def test_laplacian_over_all_parameters_is_that_of_their_vector():
    parts = [torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)]
    params = [torch.zeros_like(part) for part in parts]
    whole = torch.cat([part.reshape(-1) for part in parts])
    smoothed = optim.step_tensors(m.LaplacianSmoothing(layerwise=False), [p.clone() for p in parts], params)
    expected = optim.step_tensors(m.LaplacianSmoothing(), [whole])[0]
    torch.testing.assert_close(torch.cat([f.reshape(-1) for f in smoothed]), expected)


def test_small_tensors_are_not_smoothed():
    u = torch.tensor([1.0, -1.0, 1.0])
    assert torch.equal(optim.step_tensors(m.LaplacianSmoothing(), [u.clone()])[0], u)
    assert not torch.equal(optim.step_tensors(m.LaplacianSmoothing(min_numel=3), [u.clone()])[0], u)


def test_sample_points_do_not_change_within_a_step():
    """Repeated evaluations use the same sample points, so losses are equal."""
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    seen = []

    class Look(optim.Module):
        needs = frozenset({optim.Need.CLOSURE, optim.Need.GRADIENT})

        def apply(self, objective):
            for _ in range(3):
                seen.append(float(objective.get_loss(backward=True, at_x0=False)))
                seen.append(float(objective.get_loss(backward=False, at_x0=False)))
            return objective

    opt = mo.Optimizer([w], m.GradientSampling(n=5, sigma=0.3, seed=0), Look(), m.LR(0.1))
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert len(set(seen)) == 1


def test_mean_is_the_smoothed_loss():
    """The mean of a quadratic over normal points is its value at x0 plus sigma^2 times half the trace of its Hessian."""
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    seen = []
    opt = mo.Optimizer(
        [w], m.GradientSampling(n=4000, sigma=0.5, seed=0), m.PrintLoss("", print_fn=seen.append), m.LR(0.0)
    )
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert float(seen[0]) == pytest.approx(5 + 0.25 * 2, abs=0.1)


def test_mean_of_gradients_is_the_gradient_of_the_mean():
    """The gradient of a quadratic is linear, so its mean over points around x0 is the gradient at x0."""
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    opt = mo.Optimizer([w], m.GradientSampling(n=4000, sigma=0.1, seed=0), m.LR(0.25))
    opt.step(mo.closure(lambda: (w**2).sum()))
    torch.testing.assert_close(w.data, torch.tensor([0.5, 1.0], dtype=torch.float64), rtol=0, atol=0.01)


def test_hull_descends_along_a_kink():
    """On |x| + 10 |y| plain descent oscillates in y; the shortest vector in the hull of gradients does not."""

    def trial(*links):
        w = torch.nn.Parameter(torch.tensor([1.0, 1e-3], dtype=torch.float64))
        opt = mo.Optimizer([w], *links, m.LR(0.01))
        across = []
        for _ in range(40):
            opt.step(mo.closure(lambda: w[0].abs() + 10 * w[1].abs()))
            across.append(float(w[1].detach().abs()))
        return float(w[0].detach()), max(across)

    along, across = trial(m.GradientSampling(sigma=0.01, n=20, aggregate="hull", seed=0))
    assert along < 0.65
    assert across < 0.02
    assert trial()[1] > 0.05


@pytest.mark.parametrize("aggregate", ["max", "min", "min-norm", "min-value"])
def test_other_aggregates_descend(aggregate):
    w = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    opt = mo.Optimizer([w], m.GradientSampling(sigma=0.01, n=5, aggregate=aggregate, seed=0), m.LR(0.1))
    for _ in range(60):
        opt.step(mo.closure(lambda: (w**2).sum()))
    assert float((w.detach() ** 2).sum()) < 1e-2


def test_the_radius_shrinks_when_the_criterion_is_met():
    w = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    link = m.GradientSampling(sigma=1.0, n=3, termination=m.TerminateAfterNSteps(2), decay=0.5, seed=0)
    opt = mo.Optimizer([w], link, m.Adam(), m.LR(0.01))
    scales, counts = [], []
    for _ in range(5):
        opt.step(mo.closure(lambda: (w**2).sum()))
        scales.append(link.global_state.get("scale", 1.0))
        counts.append(opt.link("Adam").state[w].get("step", 0) if w in opt.link("Adam").state else 0)
    assert scales == [1.0, 0.5, 0.5, 0.25, 0.25]
    assert counts == [1, 0, 1, 0, 1]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="aggregate is 'median'"):
        m.GradientSampling(aggregate="median")
    with pytest.raises(ValueError, match="sigma"):
        m.LaplacianSmoothing(-1.0)
