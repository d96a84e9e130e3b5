"""Links that pass tensors to inner links as a vector, as scalars, or in another dtype."""

import pytest
import torch

import moduli as mo
from m.first_order import close, run
from moduli import m


def test_vector_is_concat():
    close(
        run(lambda p: [m.VectorProjection([m.Normalize(), m.LR(0.1)])]),
        run(lambda p: [m.Normalize(), m.LR(0.1)]),
    )


def test_scalars_are_elementwise():
    close(run(lambda p: [m.ScalarProjection([m.Adam(), m.LR(0.05)])]), run(lambda p: torch.optim.Adam(p, 0.05)))


def test_to_double_is_double():
    """Inner links keep their state in float64 for float32 parameters; only the result is rounded."""
    w = torch.nn.Parameter(torch.zeros(1))
    opt = mo.Optimizer([w], m.To(m.EMA(0.999), dtype=torch.float64))
    opt.step(mo.closure(lambda: w.sum()))
    (inner,) = opt.link("EMA").state.values()
    assert inner["exp_avg"].dtype is torch.float64
    assert w.dtype is torch.float32
    again = mo.Optimizer([w], m.To(m.EMA(0.999), dtype=torch.float64))
    again.load_state_dict(opt.state_dict())
    (inner,) = again.link("EMA").state.values()
    assert inner["exp_avg"].dtype is torch.float64
    with pytest.raises(ValueError, match="floating"):
        m.To(m.Adam(), dtype=torch.int32)
    with pytest.raises(ValueError, match="give a dtype"):
        m.To(m.Adam())


@pytest.mark.parametrize("form", [m.VectorProjection, lambda links: m.To(links, dtype=torch.float64), m.ViewAsReal])
def test_links_inside_may_evaluate(form):
    """An inner line search evaluates its trial points, and ends where it ends without the projection."""

    def trial(links):
        x = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        opt = mo.Optimizer([x], *links)

        def rosenbrock():
            return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2

        for _ in range(40):
            opt.step(mo.closure(rosenbrock))
        return x.detach(), opt.num_evaluations

    end, count = trial([form([m.LBFGS(), m.StrongWolfe()])])
    expected, wanted = trial([m.LBFGS(), m.StrongWolfe()])
    torch.testing.assert_close(end, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(end, torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert count == wanted


def test_state_follows_its_parameter():
    """Inner state stays with its parameter when others are frozen and thawed."""
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = mo.Optimizer([a, b], m.To([m.Adam(), m.LR(0.1)], dtype=torch.float64))

    def step():
        opt.step(mo.closure(lambda: (a**2).sum() + (b**2).sum()))

    for _ in range(3):
        step()
    a.requires_grad_(False)
    step()
    a.requires_grad_(True)
    step()
    counts = sorted(row["step"] for row in opt.link("Adam").state.values())
    assert counts == [4, 5]


def test_settings_of_groups_are_inherited():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [a], "lr": 0.0}, {"params": [b]}]
    mo.Optimizer(groups, m.ScalarProjection(m.LR(0.5))).step(mo.closure(lambda: a.sum() + b.sum()))
    assert a.tolist() == [1.0, 1.0]
    assert b.tolist() == [0.5, 0.5]
    opt = mo.Optimizer(groups, m.VectorProjection(m.LR(0.5)))
    with pytest.raises(ValueError, match="one vector"):
        opt.step(mo.closure(lambda: a.sum() + b.sum()))
