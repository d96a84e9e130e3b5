"""Multi-point Newton methods, iterated inverses, matrix momentum and sketches against their formulas."""

import pytest
import torch

import moduli as mo
from m.first_order import F64, doubles
from moduli import m


def _bumpy(x):
    return (x.cosh() * doubles(1.0, 2.0, 0.5)).sum() + 0.3 * (x[0] * x[1]).sin() + 0.2 * (x[1] - x[2]) ** 4


def _parts(x):
    return torch.func.grad(_bumpy)(x), torch.func.hessian(_bumpy)(x)


def _two_points(x):
    g, H = _parts(x)
    y = x - torch.linalg.solve(H, g)
    return x - torch.linalg.solve(H, g + _parts(y)[0])


def _three_points(x):
    g, H = _parts(x)
    y = x - torch.linalg.solve(H, g)
    g, H = _parts(y)
    return y - torch.linalg.solve(H, g + _parts(y - torch.linalg.solve(H, g))[0])


def _three_points_again(x):
    g, H = _parts(x)
    inverse = torch.linalg.inv(H)
    y = x - inverse @ g
    g, other = _parts(y)
    M = (2 * torch.eye(3, dtype=F64) - inverse @ other) @ inverse
    z = y - M @ g
    return z - M @ _parts(z)[0]


def _five_points(x):
    g, H = _parts(x)
    y = x - torch.linalg.solve(H, g)
    z = y - 4 * torch.linalg.solve(H + 2 * _parts((x + y) / 2)[1] + _parts(y)[1], _parts(y)[0])
    return z - 4 * torch.linalg.solve(H + 2 * _parts((x + z) / 2)[1] + _parts(z)[1], _parts(z)[0])


@pytest.mark.parametrize(
    ("link", "step"),
    [
        (m.TwoPointNewton, _two_points),
        (m.SixthOrder3P, _three_points),
        (m.SixthOrder3PM2, _three_points_again),
        (m.SixthOrder5P, _five_points),
    ],
)
def test_steps_with_several_points_are_their_formulas(link, step):
    x = doubles(0.5, -0.3, 0.7)
    for method in ("batched_autograd", "func"):
        w = torch.nn.Parameter(x.clone())
        opt = mo.Optimizer([w], link(derivatives_method=method))
        expected = x
        for _ in range(2):
            opt.step(mo.closure(lambda w=w: _bumpy(w)))
            expected = step(expected)
            torch.testing.assert_close(w.detach(), expected, rtol=1e-10, atol=1e-10)


def test_orders_of_convergence():
    # From half the distance a step of order p ends 2^p times closer; the minimum of cosh(x) + x is at -asinh(1).
    optimum = -torch.asinh(doubles(1.0))

    def error(link, distance):
        w = torch.nn.Parameter(optimum + distance)
        mo.Optimizer([w], link()).step(mo.closure(lambda: (w.cosh() + w).sum()))
        return float((w.detach() - optimum).abs())

    for link, order in ((m.Newton, 2), (m.TwoPointNewton, 3), (m.SixthOrder3P, 6), (m.SixthOrder3PM2, 6)):
        ratio = error(link, 0.2) / error(link, 0.1)
        assert ratio > 2 ** (order - 0.5), link


def test_the_inverse_is_a_newton_schulz_iteration():
    A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=F64)
    w = torch.nn.Parameter(doubles(3.0, 1.0))
    link = m.InverseFreeNewton()
    opt = mo.Optimizer([w], link)
    Y = A / (torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(A, float("inf")))
    for _ in range(8):
        opt.step(mo.closure(lambda: w @ A @ w / 2))
        torch.testing.assert_close(link.state[w]["Y"], Y)
        Y = Y @ (2 * torch.eye(2, dtype=F64) - A @ Y)
    torch.testing.assert_close(link.state[w]["Y"], torch.linalg.inv(A), rtol=1e-6, atol=1e-6)


def test_an_inverse_that_would_diverge_is_restarted():
    w, scale = torch.nn.Parameter(doubles(1.0)), [1.0]
    link = m.InverseFreeNewton()
    opt = mo.Optimizer([w], link)
    for scale[0] in (1.0, 1.0, 100.0, 100.0, 100.0):
        opt.step(mo.closure(lambda: scale[0] * w.square().sum() / 2))
    torch.testing.assert_close(link.state[w]["Y"], torch.tensor([[0.01]], dtype=F64), rtol=1e-3, atol=0)


def test_matrix_momentum_is_its_formula():
    A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=F64)
    for method in ("autograd", "fd_central"):
        w = torch.nn.Parameter(doubles(3.0, 1.0))
        opt = mo.Optimizer([w], m.MatrixMomentum(0.02, mu=0.1, hvp_method=method))
        x, before = w.detach().clone(), None
        for _ in range(6):
            s = torch.zeros_like(x) if before is None else x - before
            before, x = x, x - (0.02 * A @ x - (s - 0.1 * A @ s))
            opt.step(mo.closure(lambda w=w: w @ A @ w / 2))
            torch.testing.assert_close(w.detach(), x, rtol=1e-8, atol=1e-8)


def test_adaptive_matrix_momentum_measures_curvature():
    w = torch.nn.Parameter(doubles(3.0))
    link = m.MatrixMomentum(0.02, mu=0.5, adaptive=True)
    opt = mo.Optimizer([w], link)
    for _ in range(3):
        opt.step(mo.closure(lambda: 4 * w.square().sum()))
    assert link.state[w]["radius"] == pytest.approx(1 / 8)


def test_subspace_newton_by_eigenvalues_is_saddle_free():
    A = torch.diag(doubles(2.0, -1.0))
    w = torch.nn.Parameter(doubles(1.0, 1.0))
    opt = mo.Optimizer([w], m.SubspaceNewton(sketch_type="orthonormal", sketch_size=2, eigval_fn=torch.abs, seed=0))
    opt.step(mo.closure(lambda: w @ A @ w / 2))
    torch.testing.assert_close(w.detach(), doubles(0.0, 2.0), rtol=1e-9, atol=1e-9)  # away from the saddle


def test_a_damped_sketch_solves_the_damped_system():
    A = torch.diag(doubles(4.0, 1.0, 0.25))
    g = A @ doubles(1.0, 1.0, 1.0)
    for more, system in (
        ({"damping": 0.5}, A + 0.6 * torch.eye(3, dtype=F64)),
        ({"rdamping": 0.5}, A + 2.1 * torch.eye(3, dtype=F64)),
        ({"truncate": 1}, torch.diag(doubles(4.1, 0.1, 0.1))),
        ({"eigv_tol": 0.2}, torch.diag(doubles(4.1, 1.1, 0.1))),
    ):
        w = torch.nn.Parameter(doubles(1.0, 1.0, 1.0))
        opt = mo.Optimizer([w], m.NystromSketchAndSolve(rank=3, reg=0.1, seed=0, **more))
        opt.step(mo.closure(lambda w=w: w @ A @ w / 2))
        torch.testing.assert_close(w.detach(), 1 - torch.linalg.solve(system, g), rtol=1e-5, atol=1e-5)
