"""The objective: which evaluations it makes, how many, and which forms of closures it accepts."""

import itertools

import pytest
import torch

import moduli as mo
from moduli import optim
from moduli.optim import ClosureError, Need, Objective, Optimizer
from optim.helpers import Backtrack, Counted, Half, Momentum, Newton, WantsLoss, WantsProducts


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("links", list(itertools.permutations([WantsLoss, Half, WantsProducts, Newton], 3)))
def test_the_order_of_links_never_evaluates_twice_and_never_crashes(links):
    w = parameter(1.0, 2.0)
    fn = Counted(lambda: (w**4).sum())
    opt = Optimizer([w], *(link() for link in links))
    opt.step(mo.closure(fn))
    assert fn.calls == 1 == opt.num_evaluations
    assert torch.isfinite(w).all()


def test_a_loss_only_chain_takes_no_gradient():
    w = parameter(1.0)
    objective = Objective([w], mo.closure(lambda: (w**2).sum()), needs=frozenset({Need.LOSS}))
    assert objective.get_loss(backward=False).item() == 1.0
    assert w.grad is None
    assert objective.grads is None


def test_a_step_returns_the_detached_loss_at_the_start():
    w = parameter(3.0)
    loss = Optimizer([w], Backtrack()).step(mo.closure(lambda: (w**2).sum()))
    assert loss.item() == 9.0
    assert not loss.requires_grad
    assert w.grad is None or not w.grad.requires_grad


def closures(w, opt):
    def flag(backward=True):
        loss = (w**4).sum()
        if backward:
            opt.zero_grad()
            loss.backward()
        return loss

    def position(back):
        return flag(back) if back is not True else flag()

    def position_with_default(back=True):
        return flag(back)

    def anything(**kwargs):
        return flag(**kwargs)

    def zeroing_in_place(backward=True):
        opt.zero_grad(set_to_none=False)
        loss = (w**4).sum()
        if backward:
            loss.backward()
        return loss

    def ordinary():
        opt.zero_grad(set_to_none=False)
        loss = (w**4).sum()
        loss.backward()
        return loss

    return {
        "moduli": mo.closure(lambda: (w**4).sum()),
        "flag": flag,
        "position": position_with_default,
        "anything": anything,
        "in place": zeroing_in_place,
        "ordinary": ordinary,
    }


class Probe(optim.Module):
    """Evaluates at another point, then uses the gradient at the start."""

    needs = frozenset({Need.GRADIENT, Need.CLOSURE})

    def apply(self, objective):
        objective.get_grads()
        with objective.moved() as start:
            objective.move_to([s + 1 for s in start])
            objective.get_loss(backward=False, at_x0=False)
            objective.get_loss(backward=True, at_x0=False)
            objective.get_loss(backward=False, at_x0=False)
        objective.updates = [g.clone() for g in objective.get_grads()]
        return objective


@pytest.mark.parametrize("kind", ["moduli", "flag", "position", "anything", "in place", "ordinary"])
def test_every_kind_of_closure_gives_the_same_step(kind):
    w = parameter(1.0, -0.5)
    opt = Optimizer([w], Probe(), Half(0.1))
    opt.step(closures(w, opt)[kind])
    start = torch.tensor([1.0, -0.5], dtype=torch.float64)
    assert torch.allclose(w.detach(), start - 0.1 * 4 * start**3, atol=1e-15)


def test_closures_of_unusable_form_are_refused():
    w = parameter(1.0)
    opt = Optimizer([w], Newton())
    with pytest.raises(ClosureError, match="calls backward"):
        opt.step(closures(w, opt)["ordinary"])
    with pytest.raises(ClosureError, match="without a graph"):
        opt.step(mo.closure(lambda: (w**2).sum().detach()))
    with pytest.raises(ClosureError, match="does not depend"):
        Optimizer([parameter(1.0)], Half()).step(mo.closure(lambda: torch.ones(())))
    with pytest.raises(ClosureError, match="Newton needs the Hessian"):
        opt.step()
    with pytest.raises(ClosureError, match=r"shape \(1, 2\)"):
        opt.step(mo.closure(lambda: torch.stack([w, w], 1)))
    with pytest.raises(ClosureError, match="returned a float"):
        opt.step(mo.closure(lambda: 3.0))
    with pytest.raises(TypeError, match="is not a callable object"):
        opt.step(torch.ones(()))
    with pytest.raises(TypeError, match="is not a callable object"):
        mo.closure(w)
    assert w.item() == 1.0


def test_a_loss_of_one_element_counts_as_a_number():
    w = parameter(2.0)
    Optimizer([w], Half(0.5)).step(mo.closure(lambda: w**2))
    assert w.item() == 0.0


def test_unused_and_linear_parameters_have_no_curvature():
    w, unused, linear = parameter(2.0), parameter(1.0), parameter(1.0)
    opt = Optimizer([w, unused, linear], WantsProducts())
    opt.step(mo.closure(lambda: (w**2).sum() + 3 * linear.sum()))
    assert w.item() == 2.0 - 2 * 4.0
    assert unused.item() == 1.0
    assert linear.item() == 1.0


def test_moves_are_undone_for_every_parameter_that_any_link_moved():
    a, b = parameter(1.0), parameter(2.0)

    class Part(optim.Module):
        needs = frozenset({Need.GRADIENT, Need.CLOSURE})

        def __init__(self, which):
            super().__init__()
            self.which = which

        def apply(self, objective):
            part = objective.clone(clone_updates=False)
            part.params = [objective.params[self.which]]
            part.move_to([torch.full_like(part.params[0], 7.0)])
            if self.which:
                raise RuntimeError("late")
            return objective

    opt = Optimizer([a, b], Part(0), Part(1))
    with pytest.raises(RuntimeError, match="late"):
        opt.step(mo.closure(lambda: (a**2 + b**2).sum()))
    assert (a.item(), b.item()) == (1.0, 2.0)


def test_moved_restores_values_and_gradients():
    w = parameter(1.0)
    objective = Objective([w], mo.closure(lambda: (w**2).sum()))
    objective.get_grads()
    gradient = w.grad
    with pytest.raises(KeyError), objective.moved():
        objective.move_to([torch.zeros_like(w)])
        objective.get_loss(backward=True, at_x0=False)
        raise KeyError
    assert w.item() == 1.0
    assert w.grad is gradient
    assert objective.grads[0].item() == 2.0


HESSIANS = [
    "batched_autograd",
    "autograd",
    "func",
    "functional_revrev",
    "functional_fwdrev",
    "gfd_forward",
    "gfd_central",
]


@pytest.mark.parametrize("method", [*HESSIANS, "fd", "fd_full"])
def test_the_hessian_by_every_method(method):
    w, v = parameter(1.0, -0.5), parameter(0.3)
    objective = Objective([w, v], mo.closure(lambda: (w**4).sum() + (w[0] * v**2).sum()))
    loss, _, H = objective.hessian(method, h=1e-4)
    x, y, z = 1.0, -0.5, 0.3
    exact = torch.tensor([[12 * x * x, 0, 2 * z], [0, 12 * y * y, 0], [2 * z, 0, 2 * x]], dtype=torch.float64)
    exact_enough = 1e-10 if "fd" not in method.replace("fwd", "") else 2e-2
    assert torch.allclose(H, exact, atol=exact_enough)
    assert not H.requires_grad
    assert w.tolist() == [1.0, -0.5]
    assert loss is None or loss.item() == pytest.approx(1.0 + 0.0625 + 0.09)


@pytest.mark.parametrize("method", ["autograd", "batched_autograd", "fd_forward", "fd_central"])
def test_products_equal_the_hessian(method):
    w, v = parameter(1.0, -0.5), parameter(0.3)
    make = lambda: Objective([w, v], mo.closure(lambda: (w**4).sum() + (w[0] * v**2).sum()))  # noqa: E731
    H = make().hessian()[2]
    z = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    objective = make()
    product, rgrad = objective.hessian_vector_product([z[:2], z[2:]], hvp_method=method, h=1e-5)
    again, _ = objective.hessian_vector_product([z[:2], z[2:]], rgrad, hvp_method=method, h=1e-5)
    atol = 1e-12 if "autograd" in method else 1e-3
    assert torch.allclose(torch.cat(product), H @ z, atol=atol)
    assert torch.allclose(torch.cat(again), H @ z, atol=atol)
    Z = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(make().hessian_matrix_product(Z, hvp_method=method, h=1e-5)[0], H @ Z, atol=atol)
    _, vector, matrix = make().tensor_Hvp_function(method, h=1e-5)
    assert torch.allclose(vector(z), H @ z, atol=atol)
    assert torch.allclose(matrix(Z), H @ Z, atol=atol)
    with pytest.raises(ValueError, match="hvp_method is 'no'"):
        make().hessian_vector_product([z[:2], z[2:]], hvp_method="no")


@pytest.mark.parametrize("method", ["autograd", "batched_autograd", "fd_central"])
def test_hutchinson_draws_n_samples_vectors(method):
    w = parameter(1.0, -0.5, 2.0)
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def estimate(count):
        objective = Objective([w], mo.closure(lambda: 0.5 * (scale * w * w).sum() + w[0] * w[1]))
        generator = torch.Generator().manual_seed(1)
        return objective.hutchinson_hessian(n_samples=count, hvp_method=method, generator=generator)[0][0]

    assert not torch.allclose(estimate(1), scale, atol=1e-2)
    assert torch.allclose(estimate(400), scale, atol=0.15)
    objective = Objective([w], mo.closure(lambda: 0.5 * (scale * w * w).sum()))
    vectors = [[torch.ones_like(w)], [-torch.ones_like(w)]]
    assert torch.allclose(
        objective.hutchinson_hessian(distribution=vectors, n_samples=None, hvp_method=method)[0][0], scale, atol=1e-6
    )


def test_third_derivatives():
    w = parameter(2.0)
    loss, g, H, T = Objective([w], mo.closure(lambda: (w**3).sum())).derivatives(3)
    assert (loss.item(), g.item(), H.item(), T.item()) == (8.0, 12.0, 12.0, 6.0)
    objective = Objective([w], mo.closure(lambda: (w**3).sum()))
    assert objective.derivatives_at(torch.tensor([1.0], dtype=torch.float64), 1)[1].item() == 3.0
    assert w.item() == 2.0
    assert objective.derivatives(0)[0].item() == 8.0


def test_a_differentiable_gradient_after_a_plain_one():
    w = parameter(2.0)
    objective = Objective([w], mo.closure(lambda: (w**3).sum()))
    objective.get_grads()
    (grad,) = objective.get_grads(create_graph=True)
    assert torch.autograd.grad(grad, w)[0].item() == 12.0


def test_residuals():
    w = parameter(2.0, 1.0)
    objective = Objective([w], mo.closure(lambda: w * 3), needs=frozenset({Need.RESIDUALS}))
    assert objective.get_residuals().tolist() == [6.0, 3.0]
    assert objective.loss.item() == pytest.approx(22.5)
    with pytest.raises(ClosureError, match="vector of residuals"):
        Objective([w], mo.closure(lambda: w.sum()), needs=frozenset({Need.RESIDUALS})).get_residuals()


def test_fixed_closures_reuse_the_evaluation_at_the_accepted_point():
    def run(fixed):
        w = parameter(3.0, -2.0)
        fn = Counted(lambda: (w**4).sum())
        opt = Optimizer([w], Half(0.05), Backtrack())
        for _ in range(5):
            opt.step(mo.closure(fn, fixed=fixed))
        return w.detach(), fn.calls

    (a, twice), (b, once) = run(False), run(True)
    assert torch.equal(a, b)
    assert once == twice - 4


def test_a_reused_evaluation_is_dropped_when_the_parameters_changed():
    w = parameter(3.0)
    fn = Counted(lambda: (w**4).sum())
    opt = Optimizer([w], Half(0.005), Backtrack())
    opt.step(mo.closure(fn, fixed=True))
    w.data.fill_(1.0)
    loss = opt.step(mo.closure(fn, fixed=True))
    assert loss.item() == 1.0


def test_clones_share_evaluations_but_not_updates():
    w = parameter(2.0)
    objective = Objective([w], mo.closure(lambda: (w**2).sum()))
    twin = objective.clone(clone_updates=True)
    twin.get_updates()[0].zero_()
    twin.skip_update = True
    objective.update_attrs_from_clone_(twin)
    assert objective.loss.item() == 4.0
    assert objective.grads[0].item() == 4.0
    assert objective.updates is None
    assert objective.skip_update
    objective.temp = 3
    assert (objective.poptemp(), objective.temp) == (3, None)
    objective.update = [torch.ones(1)]
    assert objective.updates is objective.update


def test_the_closure_of_an_objective_evaluates_and_can_be_replaced():
    w = parameter(2.0)
    objective = Objective([w], mo.closure(lambda: (w**2).sum()))
    assert objective.closure(backward=False).item() == 4.0
    objective.closure = mo.closure(lambda: w.sum())
    assert objective.closure().item() == 2.0
    assert objective.dtype is torch.float64
    objective.zero_grad()
    assert w.grad is None
    assert Objective([w]).closure is None


def test_sparse_gradients_are_taken():
    table = torch.nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    opt = Optimizer(table, Momentum(), Half(0.1))
    opt.step(mo.closure(lambda: table(torch.tensor([1, 3])).sum()))
    moved = (table.weight.detach() != before).any(1).tolist()
    assert moved == [False, True, False, True, False]


def test_a_frozen_model_is_still_evaluated():
    w = parameter(2.0).requires_grad_(False)
    opt = Optimizer([w], Half())
    assert opt.step(mo.closure(lambda: (w**2).sum())).item() == 4.0
    assert opt.step() is None
    assert opt.current_step == 2
