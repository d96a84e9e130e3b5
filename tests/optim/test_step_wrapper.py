"""Step hooks and the profiler, line searches at the end and inside of a chain, and unfused links in half precision."""

import pytest
import torch

import moduli as mo
from moduli import m, optim


def _make_problem(*links):
    w = torch.nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))
    return w, mo.Optimizer([w], *links), mo.closure(lambda: (w**4).sum() + (w**2).sum(), fixed=True)


def test_hooks_are_called_once_and_see_the_arguments():
    _, opt, closure = _make_problem(m.LR(0.01))
    opt.step(closure)
    seen = []
    opt.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("before", len(args))))
    opt.register_step_post_hook(lambda opt, args, kwargs: seen.append(("after", len(args))))
    opt.step(closure)
    assert seen == [("before", 2), ("after", 2)]


def test_a_hook_may_replace_the_arguments():
    w, opt, closure = _make_problem(m.LR(0.1))
    opt.register_step_pre_hook(lambda opt, args, kwargs: ((args[0], mo.closure(lambda: w.sum())), kwargs))
    opt.step(closure)
    torch.testing.assert_close(w.data, torch.tensor([2.9, -1.1], dtype=torch.float64))


def test_the_profiler_records_the_step():
    _, opt, closure = _make_problem(m.LR(0.01))
    with torch.autograd.profiler.profile() as seen:
        opt.step(closure)
    assert any(event.key == "Optimizer.step#Optimizer.step" for event in seen.key_averages())


class _Look(optim.Module):
    """Stores a copy of the first parameter at each step."""

    def apply(self, objective):
        self.seen = objective.params[0].detach().clone()
        return objective


def test_a_search_at_the_end_of_a_chain_equals_one_followed_by_a_link():
    look = _Look()
    w, opt, closure = _make_problem(m.LBFGS(), m.StrongWolfe())
    other, watched, same = _make_problem(m.LBFGS(), m.StrongWolfe(), look)
    for _ in range(6):
        before = other.detach().clone()
        assert torch.equal(w, other)
        assert torch.equal(opt.step(closure), watched.step(same))
        assert torch.equal(look.seen, before)
        assert opt.num_evaluations == watched.num_evaluations
    assert torch.equal(w, other)


def test_a_failure_in_the_search_puts_the_parameters_back():
    w, opt, closure = _make_problem(m.LBFGS(), m.StrongWolfe())
    opt.step(closure)
    before, calls = w.detach().clone(), []

    def fails():
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of luck")
        return (w**4).sum()

    with pytest.raises(RuntimeError, match="out of luck"):
        opt.step(mo.closure(fails))
    assert torch.equal(w, before)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_links_that_are_not_fused_compute_halves_in_single_precision_too(dtype):
    """Adam's eps of 1e-8 underflows to 0 in float16, where a zero gradient would give 0 / 0."""
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
    twin = torch.nn.Parameter(w.detach().clone())
    for param, fuse in ((w, False), (twin, "auto")):
        opt = mo.Optimizer([param], m.Adam(), m.LR(0.1), fuse=fuse)
        for _ in range(3):
            param.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=dtype)
            opt.step()
    assert w.isfinite().all()
    assert w[0] == 1.0
    torch.testing.assert_close(w, twin, rtol=0.01, atol=0)
