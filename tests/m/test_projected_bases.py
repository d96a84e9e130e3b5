"""Links in the eigenbasis of Shampoo's covariances, and in the space of the last updates."""

import pytest
import torch

import moduli as mo
from m.first_order import close, formula, run
from moduli import m, optim

SHAPES = ((3, 4), (5,), (), (2, 3, 2))


def test_adam_in_the_basis_is_soap():
    soap = run(lambda p: [m.SOAP(precond_freq=3), m.LR(0.05)], shapes=SHAPES)
    basis = run(lambda p: [m.SOAPBasis(m.Adam(beta1=0.95, beta2=0.95), precond_freq=3), m.LR(0.05)], shapes=SHAPES)
    close(basis, soap)


def descent(momentum=0.0, decay=0.0, lr=0.01):
    """Return descent that skips the first gradient, which only makes the basis.

    Args:
        momentum: The momentum.
        decay: The weight decay.
        lr: The step size.
    """

    def update(x, g, memory, t):
        if t == 1:
            return torch.zeros_like(g)
        memory["v"] = momentum * memory.get("v", 0) + g + decay * x
        return lr * memory["v"]

    return formula(update)


def test_plain_descent_does_not_depend_on_the_basis():
    """Rotating into the basis and back cancels; momentum is rotated with the basis."""
    close(
        run(lambda p: [m.SOAPBasis(m.HeavyBall(0.9), precond_freq=2), m.LR(0.01)], shapes=SHAPES),
        run(descent(momentum=0.9), shapes=SHAPES),
    )


def test_decay_inside_the_basis_is_decay():
    close(
        run(lambda p: [m.SOAPBasis([m.WeightDecay(0.1)], precond_freq=2), m.LR(0.05)], shapes=SHAPES),
        run(descent(decay=0.1, lr=0.05), shapes=SHAPES),
    )


def test_first_step_makes_the_basis_and_moves_nothing_and_the_second_is_not_clipped():
    w = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    target = torch.tensor([[3.0, 1.0], [0.5, 7.0]], dtype=torch.float64)
    opt = mo.Optimizer([w], m.SOAPBasis(m.Identity()))
    opt.step(mo.closure(lambda: -(w * target).sum()))
    assert not w.any()
    opt.step(mo.closure(lambda: -(w * target).sum()))
    torch.testing.assert_close(w.data, target)


def test_parameter_that_joins_later_waits_while_the_others_move():
    a, b = (torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)) for _ in range(2))
    opt = mo.Optimizer([a, b], m.SOAPBasis(m.HeavyBall(0.5)))
    steps = []
    for with_b in (False, True, True):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b) if with_b else None
        opt.step()
        steps += [a.detach().mean().item(), b.detach().mean().item()]
    assert steps == pytest.approx([0.0, 0.0, -1.0, 0.0, -2.5, -1.0])


def test_ggt_basis_of_the_identity_is_the_identity():
    close(
        run(lambda p: [m.GGTBasis(m.Identity(), history_size=4), m.LR(0.05)]), run(lambda p: torch.optim.SGD(p, 0.05))
    )
    # The component outside of a truncated space is kept.
    close(
        run(lambda p: [m.GGTBasis(m.Identity(), history_size=4, truncate=1), m.LR(0.05)]),
        run(lambda p: torch.optim.SGD(p, 0.05)),
    )


def test_momentum_is_transformed_with_the_space():
    """While the space contains all updates so far, momentum in it equals ordinary momentum."""
    close(
        run(lambda p: [m.GGTBasis(m.HeavyBall(0.9), history_size=50, eig_tol=0.0), m.LR(0.01)], steps=8),
        run(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), steps=8),
        1e-6,
    )


def test_ggt_basis_refuses_links_that_evaluate():
    w = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(optim.ChainError, match="nothing can be evaluated"):
        mo.Optimizer([w], m.GGTBasis(m.StrongWolfe()))


def test_products_with_the_hessian():
    scale = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    for method in ("autograd", "fd_forward", "fd_central"):
        w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        link = m.RandomHvp(zHz=True, distribution="rademacher", hvp_method=method, seed=0)
        mo.Optimizer([w], link).step(mo.closure(lambda w=w: (scale * w**2).sum() / 2))
        torch.testing.assert_close(w.data, -scale, rtol=1e-6, atol=1e-6)


def test_products_are_reused_until_the_next_draw():
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = mo.Optimizer([w], m.RandomHvp(update_freq=3, seed=0), m.LR(0.0))
    seen = []
    for _ in range(4):
        opt.step(mo.closure(lambda: (w**4).sum()))
        seen.append(opt.link("RandomHvp").state[w]["product"].clone())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[3])


def test_estimate_is_the_product_on_a_quadratic():
    scale = torch.tensor([1.0, 4.0], dtype=torch.float64)
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    link = m.HpuEstimate()
    for point in ([1.0, 1.0], [0.5, -1.0]):
        before = w.detach().clone()
        w.data.copy_(torch.tensor(point))
        objective = optim.Objective([w], mo.closure(lambda: (scale * w**2).sum() / 2))
        out = link.step(objective).updates[0]
    s = w.detach() - before
    torch.testing.assert_close(out, scale * s / s.norm())
