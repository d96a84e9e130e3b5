"""Links that replace the loss by another objective."""

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import ClosureError, Optimizer, Reformulation
from optim.helpers import Backtrack, Counted, Half


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


class Ahead(Reformulation):
    """Evaluates at points that it moves the parameters to, and does not move them back."""

    def __init__(self, modules=None):
        super().__init__({"by": 1.0}, modules)
        self.begun = 0

    def pre_step(self, objective):
        self.begun += 1

    def closure(self, backward, closure, params, objective):
        for p in params:
            p.add_(self.settings[p]["by"])
        loss = closure(backward)
        return loss, [p.grad for p in params] if backward else None


@pytest.mark.parametrize("inside", [True, False])
def test_the_new_objective_is_optimized_and_the_parameters_stay(inside):
    w = parameter(2.0)
    link = Ahead(m.LR(0.1)) if inside else Ahead()
    opt = Optimizer([w], *([link] if inside else [link, m.LR(0.1)]))
    fn = Counted(lambda: (w**2).sum())
    opt.step(mo.closure(fn))
    assert w.item() == pytest.approx(2.0 - 0.1 * 2 * 3.0)
    assert fn.calls == 1 == opt.num_evaluations
    assert link.begun == 1
    opt.param_groups[0]["by"] = 0.0
    opt.step(mo.closure(fn))
    assert w.item() == pytest.approx(1.4 * 0.8)


def test_errors_inside_put_the_parameters_back():
    w = parameter(2.0)
    opt = Optimizer([w], Ahead(), m.LR(0.1))

    def fails():
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        opt.step(mo.closure(fails))
    assert w.item() == 2.0


def test_a_reformulation_needs_a_closure():
    w = parameter(2.0)
    w.grad = torch.ones_like(w)
    with pytest.raises(ClosureError, match="Ahead needs evaluations at other points"):
        Optimizer([w], Ahead(), m.LR(0.1)).step()


def test_line_searches_use_the_new_objective_and_reuse_no_evaluation():
    w = parameter(2.0)
    opt = Optimizer([w], Ahead(), Half(0.1), Backtrack())
    fn = mo.closure(lambda: (w**2).sum(), fixed=True)
    for _ in range(40):
        opt.step(fn)
    assert w.item() == pytest.approx(-1.0, abs=1e-3)  # its minimum lies one step behind
    assert opt._carried is None
