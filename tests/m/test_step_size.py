"""Step sizes: fixed, warmed up, adaptive and random."""

import itertools

import pytest
import torch

import moduli as mo
from m.first_order import close, formula, run
from moduli import m, optim

FUSE = pytest.mark.parametrize("fuse", ["auto", False])


@FUSE
def test_warmup_rises_and_stays(fuse):
    def update(x, g, memory, t):
        return (0.01 + 0.09 * min((t - 1) / 5, 1.0)) * g

    close(run(lambda p: [m.Warmup(5, start_lr=0.01, end_lr=0.1)], fuse=fuse), run(formula(update)))


def test_a_warmup_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="Warmup: steps"):
        m.Warmup(0)


def test_lr_is_plain_descent():
    close(run(lambda p: [m.LR(0.1)]), run(lambda p: torch.optim.SGD(p, 0.1)))


# ---------------------------------------------------------------------- adaptive step sizes


def quadratic(links, steps=1, start=(4.0, -2.0)):
    """Return the path of a chain on a quadratic with curvatures 1 and 10, and the curvatures.

    Args:
        links: The links.
        steps: The number of steps.
        start: The first point.
    """
    w = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    scales = torch.tensor([1.0, 10.0], dtype=torch.float64)
    opt = mo.Optimizer([w], *links)
    path = [w.detach().clone()]
    for _ in range(steps):
        opt.step(mo.closure(lambda: 0.5 * (scales * w**2).sum()))
        path.append(w.detach().clone())
    return path, scales


def steps_of(path, scales):
    """Return the step sizes of the gradient steps that make a path."""
    return [((a - b) @ (scales * a) / ((scales * a) @ (scales * a))).item() for a, b in itertools.pairwise(path)]


def test_polyak_is_its_formula():
    path, scales = quadratic([m.PolyakStepSize()], 5)
    for x, step in zip(path, steps_of(path, scales), strict=False):
        assert step == pytest.approx((0.5 * (scales * x**2).sum() / (scales * x).square().sum()).item())
    path, scales = quadratic([m.PolyakStepSize(use_grad=False, max=0.01)], 2)
    assert steps_of(path, scales) == pytest.approx([0.01, 0.01])


def test_polyak_without_the_optimum():
    path, _scales = quadratic([m.PolyakStepSize(f_star=None, y=1.0)], 400)
    assert path[-1].norm() < path[0].norm() / 3


@pytest.mark.parametrize("kind", ["long", "short", "geom", "geom-fallback"])
def test_barzilai_borwein_is_its_formula(kind):
    path, scales = quadratic([m.BarzilaiBorwein(type=kind, alpha_0=0.05)], 6)
    sizes = steps_of(path, scales)
    assert sizes[0] == pytest.approx(0.05)
    for k in range(1, 6):
        s = path[k] - path[k - 1]
        y = scales * s
        long, short = (s @ s / (s @ y)).item(), (s @ y / (y @ y)).item()
        assert sizes[k] == pytest.approx({"long": long, "short": short}.get(kind, (long * short) ** 0.5))


def test_barzilai_borwein_reaches_the_optimum_and_gives_its_hessian():
    link = m.BarzilaiBorwein(alpha_0=0.05)
    path, _ = quadratic([link], 60)
    assert path[-1].norm() < 1e-8
    w = torch.nn.Parameter(torch.ones(2))
    assert link.get_H(optim.Objective([w])).to_dense()[0, 0].item() == pytest.approx(1 / link.global_state["alpha"])


def test_negative_curvature_falls_back_to_alpha_0():
    w = torch.nn.Parameter(torch.tensor([0.5]))
    opt = mo.Optimizer([w], m.BarzilaiBorwein(alpha_0=0.01))
    for _ in range(3):
        before = w.item()
        opt.step(mo.closure(lambda: -(w**2).sum()))
        assert w.item() - before == pytest.approx(0.02 * before, rel=1e-4)


def test_stabilised_steps_are_no_longer_than_allowed():
    path, _ = quadratic([m.BBStab(delta=0.1, alpha_0=0.001)], 20)
    assert max((b - a).norm().item() for a, b in itertools.pairwise(path)) <= 0.1 + 1e-9
    path, _ = quadratic([m.BBStab(alpha_0=0.01)], 400)
    assert path[-1].norm() < 1e-3


@pytest.mark.parametrize("variant", [1, 2])
def test_adgd_is_its_formula(variant):
    path, scales = quadratic([m.AdGD(variant=variant, alpha_0=1e-3)], 12)
    sizes = steps_of(path, scales)
    theta = 1 / 3 if variant == 2 else float("inf")
    for k in range(1, 12):
        s = path[k] - path[k - 1]
        L = ((scales * s).norm() / s.norm()).item()
        last = sizes[k - 1]
        if k == 1:
            expected = 1 / (2**0.5 * L)
            theta = 1 / 3 if variant == 2 else expected / last
        else:
            over = 2 * (last * L) ** 2 - 1
            bound = last / over**0.5 if over > 0 else float("inf")
            grown = (1 + theta) ** 0.5 if variant == 1 else (2 / 3 + theta) ** 0.5
            expected = min(grown * last, 1 / (2**0.5 * L) if variant == 1 else bound)
            theta = expected / last
        assert sizes[k] == pytest.approx(expected, rel=1e-6)
    path, _ = quadratic([m.AdGD(variant=variant)], 200)
    assert path[-1].norm() < 1e-6


def test_bold_driver_grows_after_a_decrease_and_shrinks_after_an_increase():
    path, scales = quadratic([m.BoldDriver(a_init=0.19, nplus=1.5, nminus=0.5)], 5)
    sizes, value = steps_of(path, scales), [0.5 * (scales * x**2).sum().item() for x in path]
    for k in range(1, 5):
        assert sizes[k] == pytest.approx(sizes[k - 1] * (1.5 if value[k] < value[k - 1] else 0.5))


def test_random_steps_repeat_with_their_seed_and_lie_between():
    u = [torch.ones(2), torch.ones(3)]
    once, again = (
        optim.step_tensors(m.RandomStepSize(low=0.2, high=0.4, seed=3), [x.clone() for x in u]) for _ in "ab"
    )
    close(once, again)
    assert once[0][0] == once[1][0]
    each = optim.step_tensors(m.RandomStepSize(parameterwise=True, seed=3), [x.clone() for x in u])
    assert each[0][0] != each[1][0]
    assert 0.2 <= once[0][0] <= 0.4


@FUSE
def test_warmup_of_a_bound(fuse):
    def norms(path):
        return [
            sum((a - b).square().sum() for a, b in zip(x, y, strict=False)).sqrt().item()
            for x, y in itertools.pairwise(path)
        ]

    paths = [run(lambda p: [m.WarmupNormClip(4, start_norm=0.1, end_norm=0.5)], steps=k, fuse=fuse) for k in range(5)]
    assert norms(paths) == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=1e-4)


def test_the_setting_of_step_size_has_the_given_name():
    w = torch.nn.Parameter(torch.ones(1))
    opt = mo.Optimizer([{"params": [w], "pace": 0.5}], m.StepSize(0.1, key="pace"))
    opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: m.BarzilaiBorwein(type="medium"), "BarzilaiBorwein: type"),
        (lambda: m.BBStab(delta=-1.0), "BBStab: delta"),
        (lambda: m.AdGD(variant=3), "AdGD: variant"),
        (lambda: m.BoldDriver(nplus=0.0), "BoldDriver: nplus"),
        (lambda: m.RandomStepSize(low=2.0), "RandomStepSize: low"),
        (lambda: m.PolyakStepSize(y_decay=1.0), "PolyakStepSize: y_decay"),
        (lambda: m.StepSize(key=""), "StepSize: key"),
    ],
)
def test_wrong_arguments_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
