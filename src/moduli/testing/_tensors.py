"""Laws about the parameters: dtype, memory format, odd shapes, missing gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import Case, NotApplicable
from ._problems import have_moved, optimizer, problem, run, run_eagerly, same, snapshot, step


def _identify(param: Tensor) -> tuple[object, ...]:
    return param.dtype, param.device, tuple(param.shape), param.stride(), param.data_ptr()


@run_eagerly
def formats(case: Case) -> None:
    """Parameters keep dtype, device, strides and memory; strided ones move as contiguous ones do."""
    if case.members:
        raise NotApplicable("a population stores its parameters itself")
    for dtype in (torch.float64, torch.float32):
        plain = problem(case, ((3, 2), (1, 2, 2, 2)), dtype=dtype)
        strided = problem(case, ((3, 2), (1, 2, 2, 2)), dtype=dtype)
        strided.params = [
            nn.Parameter(strided.params[0].detach().T.contiguous().T),
            nn.Parameter(strided.params[1].detach().to(memory_format=torch.channels_last)),
        ]
        before = [_identify(param) for param in strided.params]
        objects = list(strided.params)
        run(case, strided, 3)
        if [_identify(param) for param in strided.params] != before or any(
            a is not b for a, b in zip(objects, strided.params, strict=True)
        ):
            raise case.fail("formats", f"a {dtype} parameter changed its dtype, strides or memory")
        run(case, plain, 3)
        tolerance = 1e-10 if dtype is torch.float64 else 1e-4
        if (gap := same(strided.params, plain.params, tolerance)) is not None:
            raise case.fail("formats", f"with strided {dtype} parameters {gap}")


@run_eagerly
def shapes(case: Case) -> None:
    """0-d and empty parameters are taken, and empty ones change nothing."""
    with_empty, without = problem(case, ((), (0,), (3,), (2, 0))), problem(case, ((), (3,)))
    start = snapshot(without.params)
    run(case, with_empty, 3)
    run(case, without, 3)
    kept = [with_empty.params[0], with_empty.params[2]]
    if any(not torch.isfinite(param.detach()).all() for param in kept):
        raise case.fail("shapes", "a 0-d or ordinary parameter became infinite or NaN")
    if not case.random and (gap := same(kept, without.params, 1e-10)) is not None:
        raise case.fail("shapes", f"with an empty parameter beside them {gap}")
    if case.target and not have_moved(start, kept):
        raise case.fail("shapes", "nothing moved beside an empty parameter")


@run_eagerly
def complex_numbers(case: Case) -> None:
    """Complex parameters stay complex and finite; the loss goes down where the link is an optimizer."""
    if not case.complex:
        raise NotApplicable("it takes no complex parameters")
    at = problem(case, dtype=torch.complex128)
    first = at.value()
    opt = optimizer(case, at.params)
    for _ in range(10):
        step(case, opt, at)
    last = at.value()
    if any(not torch.isfinite(torch.view_as_real(param.detach())).all() for param in at.params):
        raise case.fail("complex_numbers", "a complex parameter became infinite or NaN")
    if case.target and not case.random and not last < first:
        raise case.fail("complex_numbers", f"the loss went from {first:.4g} to {last:.4g} in 10 steps")


@run_eagerly
def half(case: Case) -> None:
    """Half-precision parameters stay half and finite."""
    if not case.half:
        raise NotApplicable("it takes no half-precision parameters")
    for dtype in (torch.float16, torch.bfloat16):
        at = problem(case, dtype=dtype)
        start = snapshot(at.params)
        run(case, at, 3)
        for param in at.params:
            if param.dtype is not dtype or not torch.isfinite(param.detach()).all():
                raise case.fail("half", f"a {dtype} parameter became {param.dtype}, infinite or NaN")
        if case.target and not have_moved(start, at.params):
            raise case.fail("half", f"{dtype} parameters did not move")


@run_eagerly
def frozen(case: Case) -> None:
    """Frozen, unused and gradient-free parameters are left alone, and the others move as if alone."""
    alone, among = problem(case), problem(case)
    still = nn.Parameter(torch.full((2, 2), 3.0, dtype=torch.float64), requires_grad=False)
    unused = nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64))
    run(case, alone, 4)
    opt = optimizer(case, [among.params[0], still, unused, among.params[1]])
    for _ in range(4):
        step(case, opt, among)
    if not bool((still == 3.0).all()):
        raise case.fail("frozen", "a parameter with requires_grad=False moved")
    # A link that draws a direction for every parameter moves unused ones too; what it may not do is break.
    if case.random:
        if any(not torch.isfinite(param.detach()).all() for param in (*among.params, unused)):
            raise case.fail("frozen", "beside an unused parameter something became infinite or NaN")
        return
    if not bool((unused == 5.0).all()):
        raise case.fail("frozen", "a parameter that the loss does not depend on (its grad is None) moved")
    if (gap := same(among.params, alone.params, 1e-10)) is not None:
        raise case.fail("frozen", f"beside frozen and unused parameters {gap}")


@run_eagerly
def thawed(case: Case) -> None:
    """A parameter that is unfrozen later starts fresh; freezing one again keeps it still."""
    at = problem(case)
    at.params[1].requires_grad_(False)
    opt = optimizer(case, at.params)
    step(case, opt, at)
    start = snapshot(at.params)
    at.params[1].requires_grad_(True)
    for _ in range(2):
        step(case, opt, at)
    if any(not torch.isfinite(param.detach()).all() for param in at.params):
        raise case.fail("thawed", "after unfreezing a parameter became infinite or NaN")
    if case.target and not have_moved([start[1]], [at.params[1]]):
        raise case.fail("thawed", "an unfrozen parameter did not move")
    at.params[0].requires_grad_(False)
    start = snapshot(at.params)
    step(case, opt, at)
    if have_moved([start[0]], [at.params[0]]):
        raise case.fail("thawed", "a parameter that was frozen between steps moved")


LAWS = {
    "formats": formats,
    "shapes": shapes,
    "complex_numbers": complex_numbers,
    "half": half,
    "frozen": frozen,
    "thawed": thawed,
}
