"""Authors of links may use derivatives of any order, closures that call closures, and method names of their choice."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.optim import Module, Need, TensorTransform

D = torch.float64


class Looks(Module):
    needs = frozenset({Need.GRADIENT, Need.CLOSURE})

    def __init__(self, look):
        super().__init__()
        self.look = look

    def apply(self, objective):
        self.seen = self.look(objective)
        return objective


@pytest.mark.parametrize("method", ["autograd", "batched_autograd"])
@pytest.mark.parametrize("there", [None, "vector", "list"])
def test_derivatives_of_any_order_in_the_middle_of_a_step(method, there):
    start = [3.0, 5.0] if there else [1.0, 2.0]
    w = nn.Parameter(torch.tensor(start, dtype=D))
    at = torch.tensor([1.0, 2.0], dtype=D)
    at = [at] if there == "list" else at

    def look(objective):
        return objective.derivatives_at(at, 4, method=method) if there else objective.derivatives(4, method=method)

    link = Looks(look)
    mo.Optimizer([w], link, m.LR(0.0)).step(mo.closure(lambda: (w**4).sum() + w[0] * 3))
    loss, gradient, hessian, third, fourth = link.seen
    assert loss.item() == 20.0
    assert gradient.tolist() == [7.0, 32.0]
    assert hessian.tolist() == [[12.0, 0.0], [0.0, 48.0]]
    assert third.shape == (2, 2, 2)
    assert (third[0, 0, 0].item(), third[1, 1, 1].item(), third.abs().sum().item()) == (24.0, 48.0, 72.0)
    assert (fourth[0, 0, 0, 0].item(), fourth.abs().sum().item()) == (24.0, 48.0)
    assert w.tolist() == start


def test_derivatives_end_in_zeros_and_refuse_other_methods():
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=D))
    for method in ("autograd", "batched_autograd"):
        link = Looks(lambda objective, method=method: objective.derivatives(3, method=method))
        mo.Optimizer([w], link, m.LR(0.0)).step(mo.closure(lambda: w.sum()))
        assert link.seen[2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert link.seen[3].abs().sum() == 0
    link = Looks(lambda objective: objective.derivatives(2, method="guess"))
    with pytest.raises(ValueError, match="method is 'guess'"):
        mo.Optimizer([w], link).step(mo.closure(lambda: w.sum()))


class Times(Module):
    """Replaces the closure by one that calls it and scales loss and gradient."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def apply(self, objective):
        old = objective.closure

        def new(backward=True):
            loss = old(backward)
            if backward:
                for param in objective.params:
                    param.grad = self.factor * param.grad
            return self.factor * loss

        objective.closure = new
        return objective


def test_a_closure_may_be_replaced_by_one_that_calls_it():
    w = nn.Parameter(torch.tensor([1.0], dtype=D))
    opt = mo.Optimizer([w], Times(2.0), Times(3.0), m.LR(0.01))
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert w.item() == pytest.approx(1 - 0.01 * 12)
    assert opt.num_evaluations == 1
    searched = mo.Optimizer([w], Times(2.0), m.LR(100.0), m.Backtracking())
    searched.step(mo.closure(lambda: (w**2).sum()))
    assert abs(w.item()) < 0.88


@pytest.mark.parametrize(
    "links",
    [
        lambda: [m.LR(0.01)],
        lambda: [Times(3.0), m.LR(0.01)],
        lambda: [m.LBFGS(), m.StrongWolfe()],
        lambda: [m.Newton()],
        lambda: [m.SAM(), m.LR(0.01)],
        lambda: [m.SquareHomotopy(), m.LR(0.001)],
    ],
    ids=["descent", "twice", "L-BFGS", "Newton", "SAM", "homotopy"],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_step_returns_the_users_loss_where_a_link_replaces_the_closure(links, first):
    w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=D))
    chain = [Times(2.0), *links()] if first else [m.Identity(), Times(2.0), *links()]
    opt = mo.Optimizer([w], *chain)
    for _ in range(2):
        before = (w**4).sum().detach()
        assert torch.equal(opt.step(mo.closure(lambda: (w**4).sum())), before)


def test_a_replaced_closure_is_differentiated_twice():
    w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=D))
    v = nn.Parameter(w.detach().clone())
    mo.Optimizer([w], Times(2.0), m.Newton()).step(mo.closure(lambda: (w**4).sum()))
    mo.Optimizer([v], m.Newton()).step(mo.closure(lambda: 2 * (v**4).sum()))
    torch.testing.assert_close(w, v, rtol=1e-12, atol=1e-14)


class Names(TensorTransform):
    """A link with methods named as an author might name them."""

    elementwise = True

    def initialize(self):
        return "mine"

    def reset_buffers(self):
        return "mine"

    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        state["b"] = torch.zeros_like(tensor)

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        state["b"].add_(tensor)

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return state["b"].clone()


@pytest.mark.parametrize("fuse", ["auto", False])
def test_a_method_called_initialize_is_not_called_by_the_core(fuse):
    w = nn.Parameter(torch.zeros(1, dtype=D))
    opt = mo.Optimizer([w], Names(), m.LR(1.0), fuse=fuse)
    for _ in range(2):
        w.grad = torch.ones_like(w)
        opt.step()
    assert w.item() == -3.0


def test_a_breakpoint_in_a_hook_is_reached_at_every_step():
    reached = []

    class Stops(Names):
        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            reached.append((tensor.item(), param.item()))  # as a debugger would see them
            return tensor

    w = nn.Parameter(torch.zeros(1, dtype=D))
    opt = mo.Optimizer([w], Stops(), m.LR(1.0), fuse=False)
    for _ in range(3):
        w.grad = torch.ones_like(w)
        opt.step()
    assert reached == [(1.0, 0.0), (1.0, -1.0), (1.0, -2.0)]


@pytest.mark.parametrize("move", ["derivatives_at", "move_to"])
def test_derivatives_where_the_step_began_after_the_parameters_were_moved(move):
    def look(objective):
        first = objective.derivatives(2)
        if move == "derivatives_at":
            objective.derivatives_at(torch.tensor([3.0, 5.0], dtype=D), 2)
        else:
            start = [param.detach().clone() for param in objective.params]
            objective.move_to([torch.zeros_like(param) for param in objective.params])
            objective.move_to(start)
        return first, objective.derivatives(2), objective.hessian_vector_product([torch.ones(2, dtype=D)])[0]

    link = Looks(look)
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=D))
    mo.Optimizer([w], link, m.LR(0.0)).step(mo.closure(lambda: (w**4).sum()))
    first, again, (product,) = link.seen
    torch.testing.assert_close(first[2], torch.diag(torch.tensor([12.0, 48.0], dtype=D)))
    torch.testing.assert_close(again[2], first[2])
    torch.testing.assert_close(product, torch.tensor([12.0, 48.0], dtype=D))
