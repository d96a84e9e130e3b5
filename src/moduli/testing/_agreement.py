"""Laws about the numbers: the optimum, the reference, and forms that must agree."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..optim import ClosureError
from ._case import Case, LawError, NotApplicable
from ._problems import (
    LAWS,
    LawProblem,
    backend,
    expect,
    expect_same,
    have_moved,
    law,
    needs,
    optimizer,
    problem,
    run,
    snapshot,
    step,
)

_STEPS = 6


@law
def optimum(case: Case) -> None:
    """It reaches the optimum of its target problem."""
    if not case.target:
        raise NotApplicable("it is no optimizer by itself")
    at = problem(case, kind="bowl" if case.target == "least squares" else case.target)
    opt = optimizer(case, at.params)
    first = at.value()
    for i in range(case.steps):
        step(case, opt, at)
        # Looking at the loss costs as much as a step.
        if (i + 1) % 20 == 0 and at.value() <= case.tolerance:
            return
    last = at.value()
    expect(
        last <= case.tolerance,
        f"on the problem {case.target!r} the loss went from {first:.4g} to {last:.4g} in {case.steps} steps, "
        f"and should be at most {case.tolerance:g}",
    )


@law
def reference(case: Case) -> None:
    """It equals an independent implementation to 1e-10 in float64."""
    if case.reference is None:
        raise NotApplicable("it has no reference")
    kind = {"least squares": "bent", "": "bent"}.get(case.target, case.target)
    ours, theirs = (LawProblem(kind=kind, residuals=case.target == "least squares") for _ in range(2))
    run(case, ours, 2 * _STEPS)
    torch.manual_seed(0)
    wanted = len(inspect.signature(case.reference).parameters)
    if wanted == 1:
        other = case.reference(theirs.params)

        def evaluate() -> torch.Tensor:
            theirs.backward()
            return theirs.loss().detach()

        for _ in range(2 * _STEPS):
            other.step(evaluate)
    else:
        memory: dict[Any, Any] = {}
        for t in range(1, 2 * _STEPS + 1):
            theirs.backward()
            with torch.no_grad():
                case.reference(theirs.params, [param.grad for param in theirs.params], memory, t)
    expect_same(f"after {2 * _STEPS} steps", ours.params, theirs.params, 1e-10)


def _compare_with(form: str, case: Case) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        plain, fused = problem(case, dtype=dtype), problem(case, dtype=dtype)
        with backend("eager"):
            a = optimizer(case, plain.params, fuse=False)
        b = optimizer(case, fused.params)
        for i in range(4):
            # Step by step, so that a difference is of one step and not of what it grows to.
            with torch.no_grad():
                for x, y in zip(plain.params, fused.params, strict=True):
                    y.copy_(x)
            torch.manual_seed(i)
            with backend("eager"):
                step(case, a, plain)
            torch.manual_seed(i)
            with backend(form):
                step(case, b, fused)
            expect_same(f"step {i + 1} in {dtype}:", fused.params, plain.params, tolerance)


def fused_eager(case: Case) -> None:
    """The fused pass without a compiler equals the links one by one."""
    _compare_with("eager", case)


def fused_c(case: Case) -> None:
    """The compiled pass equals the links one by one."""
    _compare_with("c", case)


LAWS |= {"fused_eager": fused_eager, "fused_c": fused_c}


@law
def pieces(case: Case) -> None:
    """One tensor and its pieces give the same steps."""
    if not case.pieces:
        raise NotApplicable("its step depends on the shapes of the parameters")
    whole, parts = problem(case, ((7,),)), problem(case, ((2,), (1, 3), (2, 1)))
    run(case, whole, _STEPS)
    run(case, parts, _STEPS)
    expect_same("in pieces", [parts.flat()], [whole.flat()], 1e-10)


@law
def closures(case: Case) -> None:
    """Closures of every kind, and no closure, give the same step; what can't be given is refused in a sentence."""
    links = case.links()
    evaluates = {need for need in needs(links) if need.evaluates}
    graph = any(need.graph for need in evaluates) or case.target == "least squares"
    base = problem(case)
    start = snapshot(base.params)

    def trial(kind: str) -> list[torch.Tensor]:
        at = problem(case)
        opt = optimizer(case, at.params)

        def with_flag(backward: bool = True) -> torch.Tensor:
            answer = at.answer()
            if backward:
                opt.zero_grad()
                torch.autograd.backward(answer.sum() if case.members else answer)
            return answer

        def ordinary() -> torch.Tensor:
            opt.zero_grad(set_to_none=False)
            loss = at.answer()
            torch.autograd.backward(loss.sum() if case.members else loss)
            return loss

        for _ in range(3):
            if kind == "none":
                at.backward()
                opt.step()
            else:
                forms: dict[str, Any] = {"moduli": at.closure(), "flag": with_flag, "ordinary": ordinary}
                opt.step(forms[kind])
        return snapshot(at.params)

    expected = trial("moduli")
    kinds = ["none"] if not case.closure and not evaluates else []
    if case.target != "least squares":
        kinds += ["flag"] if graph else ["flag", "ordinary"]
    for kind in kinds:
        words = {"none": "without a closure", "flag": "with closure(backward=True)", "ordinary": "with closure()"}
        expect_same(words[kind], trial(kind), expected, 1e-12)
    if evaluates:
        opt = optimizer(case, base.params)
        base.backward()
        try:
            opt.step()
        except ClosureError:
            pass
        else:
            raise LawError("it needs a closure, yet a step without one was not refused (ClosureError)")
        expect(not have_moved(start, base.params), "a step that was refused moved the parameters")
