"""Laws about the parameters: dtype, memory format, odd shapes, missing gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import Case, NotApplicable
from ._problems import expect, expect_finite, expect_same, have_moved, law, optimizer, problem, run, snapshot, step


def _identify(param: Tensor) -> tuple[object, ...]:
    return id(param), param.dtype, param.device, tuple(param.shape), param.stride(), param.data_ptr()


@law
def formats(case: Case) -> None:
    """Parameters keep dtype, device, strides and memory; strided ones move as contiguous ones do."""
    if case.members:
        raise NotApplicable("a population stores its parameters itself")
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        plain = problem(case, ((3, 2), (1, 2, 2, 2)), dtype=dtype)
        strided = problem(case, ((3, 2), (1, 2, 2, 2)), dtype=dtype)
        strided.params = [
            nn.Parameter(strided.params[0].detach().T.contiguous().T),
            nn.Parameter(strided.params[1].detach().to(memory_format=torch.channels_last)),
        ]
        before = [_identify(param) for param in strided.params]
        run(case, strided, 3)
        kept = [_identify(param) for param in strided.params] == before
        expect(kept, f"a {dtype} parameter changed its dtype, strides or memory")
        run(case, plain, 3)
        expect_same(f"with strided {dtype} parameters", strided.params, plain.params, tolerance)


@law
def shapes(case: Case) -> None:
    """0-d and empty parameters are taken, and empty ones change nothing."""
    with_empty, without = problem(case, ((), (0,), (3,), (2, 0))), problem(case, ((), (3,)))
    start = snapshot(without.params)
    run(case, with_empty, 3)
    run(case, without, 3)
    kept = [with_empty.params[0], with_empty.params[2]]
    expect_finite("a 0-d or ordinary parameter", kept)
    if not case.random:
        expect_same("with an empty parameter beside them", kept, without.params, 1e-10)
    expect(not case.target or have_moved(start, kept), "nothing moved beside an empty parameter")


@law
def complex_numbers(case: Case) -> None:
    """Complex parameters stay complex and finite; the loss goes down where the link is an optimizer."""
    if not case.complex:
        raise NotApplicable("it takes no complex parameters")
    at = problem(case, dtype=torch.complex128)
    first = at.value()
    run(case, at, 10)
    last = at.value()
    expect_finite("a complex parameter", at.params)
    if case.target and not case.random:
        expect(last < first, f"the loss went from {first:.4g} to {last:.4g} in 10 steps")


@law
def half(case: Case) -> None:
    """Half-precision parameters stay half and finite."""
    if not case.half:
        raise NotApplicable("it takes no half-precision parameters")
    for dtype in (torch.float16, torch.bfloat16):
        at = problem(case, dtype=dtype)
        start = snapshot(at.params)
        run(case, at, 3)
        for param in at.params:
            expect(param.dtype is dtype, f"a {dtype} parameter became {param.dtype}")
        expect_finite(f"a {dtype} parameter", at.params)
        expect(not case.target or have_moved(start, at.params), f"{dtype} parameters did not move")


@law
def frozen(case: Case) -> None:
    """Frozen, unused and gradient-free parameters are left alone, and the others move as if alone."""
    alone, among = problem(case), problem(case)
    still = nn.Parameter(torch.full((2, 2), 3.0, dtype=torch.float64), requires_grad=False)
    unused = nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64))
    run(case, alone, 4)
    opt = optimizer(case, [among.params[0], still, unused, among.params[1]])
    step(case, opt, among, 4)
    expect(bool((still == 3.0).all()), "a parameter with requires_grad=False moved")
    # A link that draws a direction for every parameter moves unused ones too; what it may not do is break.
    if case.random:
        expect_finite("beside an unused parameter something", (*among.params, unused))
        return
    expect(bool((unused == 5.0).all()), "a parameter that the loss does not depend on (its grad is None) moved")
    expect_same("beside frozen and unused parameters", among.params, alone.params, 1e-10)


@law
def thawed(case: Case) -> None:
    """A parameter that is unfrozen later starts fresh; freezing one again keeps it still."""
    at = problem(case)
    at.params[1].requires_grad_(False)
    opt = optimizer(case, at.params)
    step(case, opt, at)
    start = snapshot(at.params)
    at.params[1].requires_grad_(True)
    step(case, opt, at, 2)
    expect_finite("after unfreezing a parameter", at.params)
    expect(not case.target or have_moved(start[1:], at.params[1:]), "an unfrozen parameter did not move")
    at.params[0].requires_grad_(False)
    start = snapshot(at.params)
    step(case, opt, at)
    expect(not have_moved(start[:1], at.params[:1]), "a parameter that was frozen between steps moved")
