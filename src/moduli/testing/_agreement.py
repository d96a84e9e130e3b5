"""Laws about the numbers: the optimum, the reference, forms that must agree, the halves of a step, gradients through steps."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from ..optim import Chain, ChainError, ClosureError, Module, Need, Objective, Transform, functional
from . import _problems as kit
from ._problems import Case, LawError, NotApplicable
from ._settings import list_numbers, named_links

_STEPS = 6


@kit.law
def optimum(case: Case) -> None:
    """It reaches the optimum of its target problem."""
    if not case.target:
        raise NotApplicable("it is no optimizer by itself")
    at = kit.problem(case, kind="bowl" if case.target == "least squares" else case.target)
    opt = kit.optimizer(case, at.subject)
    first = at.value()
    for i in range(case.steps):
        kit.step(case, opt, at)
        # Evaluating the loss costs as much as a step.
        if (i + 1) % 20 == 0 and at.value() <= case.tolerance:
            return
    last = at.value()
    kit.expect(
        last <= case.tolerance,
        f"on the problem {case.target!r} the loss went from {first:.4g} to {last:.4g} in {case.steps} steps, "
        f"and should be at most {case.tolerance:g}",
    )


@kit.law
def reference(case: Case) -> None:
    """It equals an independent implementation to 1e-10 in float64."""
    if case.reference is None:
        raise NotApplicable("it has no reference")
    kind = {"least squares": "bent", "": "bent"}.get(case.target, case.target)
    ours, theirs = (kit.LawProblem(kind=kind, residuals=case.target == "least squares") for _ in range(2))
    kit.run(case, ours, 2 * _STEPS)
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
    kit.expect_same(f"after {2 * _STEPS} steps", ours.params, theirs.params, 1e-10)


def _compare_with(form: str, case: Case) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        plain, fused = kit.problem(case, dtype=dtype), kit.problem(case, dtype=dtype)
        with kit.backend("eager"):
            a = kit.optimizer(case, plain.subject, fuse=False)
        b = kit.optimizer(case, fused.subject)
        for i in range(4):
            # Parameters are copied before each step, so that differences do not accumulate.
            with torch.no_grad():
                for x, y in zip(plain.params, fused.params, strict=True):
                    y.copy_(x)
            torch.manual_seed(i)
            with kit.backend("eager"):
                kit.step(case, a, plain)
            torch.manual_seed(i)
            with kit.backend(form):
                kit.step(case, b, fused)
            kit.expect_same(f"step {i + 1} in {dtype}:", fused.params, plain.params, tolerance)


# The fused pass, with and without a compiler, equals the links one by one.
kit.LAWS |= {f"fused_{form}": functools.partial(_compare_with, form) for form in ("eager", "c")}


@kit.law
def pieces(case: Case) -> None:
    """One tensor, and the same numbers split into several tensors, give the same steps."""
    if not case.pieces:
        raise NotApplicable("its step depends on the shapes of the parameters")
    whole, parts = kit.problem(case, ((7,),)), kit.problem(case, ((2,), (1, 3), (2, 1)))
    for at in (whole, parts):
        kit.run(case, at, _STEPS)
    kit.expect_same("in pieces", [parts.flat()], [whole.flat()], 1e-10)


@kit.law
def closures(case: Case) -> None:
    """Closures of every kind, and no closure, give the same step; a step without a needed closure raises ClosureError."""
    evaluates = {need for need in kit.needs(case.links()) if need.evaluates}
    graph = any(need.graph for need in evaluates) or case.target == "least squares"

    def trial(kind: str) -> list[torch.Tensor]:
        at = kit.problem(case)
        opt = kit.optimizer(case, at.subject)

        def with_flag(backward: bool = True) -> torch.Tensor:
            answer = at.answer()
            if backward:
                opt.zero_grad()
                torch.autograd.backward(answer.sum() if case.members else answer)
            return answer

        forms: dict[str, Any] = {"with closure(backward=True)": with_flag, "with closure()": lambda: with_flag()}
        for _ in range(3):
            if kind == "without a closure":
                at.backward()
            opt.step(forms.get(kind))
        return kit.snapshot(at.params)

    expected = kit.trial(case)
    kinds = ["without a closure"] if not case.closure and not evaluates else []
    if case.target != "least squares":
        kinds += ["with closure(backward=True)"] if graph else ["with closure(backward=True)", "with closure()"]
    for kind in kinds:
        kit.expect_same(kind, trial(kind), expected, 1e-12)
    if evaluates:
        at = kit.problem(case)
        opt, start = kit.optimizer(case, at.subject), kit.snapshot(at.params)
        at.backward()
        with contextlib.suppress(ClosureError):
            opt.step()
            raise LawError("it needs a closure, yet a step without one was not refused (ClosureError)")
        kit.expect_same("a step that was refused moved something:", at.params, start)


def _copy_numbers(tree: Any) -> list[Tensor]:
    """Return copies of the numbers in a nested value, without random generators, whose state may change."""
    leaves = pytree.tree_leaves(tree)
    return [torch.as_tensor(leaf).detach().clone() for leaf in leaves if isinstance(leaf, Tensor | int | float)]


def _parts(links: list[Module], half: str) -> list[Module]:
    """Return the links that implement this half of a step; a chain has those of its links.

    Links that evaluate closures (line searches, trust regions) update their state while they are applied, so they have no half.
    """
    return [
        link
        for link in kit.all_links(links)
        if isinstance(link, Transform)
        or (half == "update" and type(link).update is not Module.update and not isinstance(link, Chain))
        or (half == "apply" and Need.CLOSURE not in link.needs and not isinstance(link, Chain))
    ]


def _check_halves(case: Case, half: str, watched: Callable[..., Any]) -> None:
    if case.members or not _parts(case.links(), half):
        raise NotApplicable("it has no half of its step that learns alone")
    at = kit.problem(case)
    opt = kit.optimizer(case, at.subject, fuse=False)
    for link in _parts(opt.modules, half):
        # Replace the method that the link's step calls for this half.
        name = f"{half}_states" if isinstance(link, Transform) else half
        setattr(link, name, functools.partial(watched, link, getattr(link, name)))
    kit.step(case, opt, at, 3)


@kit.law
def learning(case: Case) -> None:
    """`update` does not change the update."""

    def check_hook(link: Module, learn: Callable[..., None], objective: Objective, *lists: Any) -> None:
        updates, untouched = list(objective.peek_updates()), objective.updates is None
        before = kit.snapshot(updates)
        learn(objective, *lists)
        for now in (updates, updates if untouched and objective.updates is None else objective.get_updates()):
            kit.expect_same(f"{type(link).__name__} changes the update while it learns:", now, before)

    _check_halves(case, "update", check_hook)


@kit.law
def applying(case: Case) -> None:
    """`apply` does not change the state of the link, so that it may be called again."""

    def check_hook(link: Module, apply: Callable[..., Objective], objective: Objective, *lists: Any) -> Objective:
        def copy_state() -> list[Tensor]:
            return _copy_numbers([[dict(row) for row in link.state.values()], link.global_state])

        before = copy_state()
        out = apply(objective, *lists)
        kit.expect_same(f"{type(link).__name__} changes what it has learnt when it is applied:", copy_state(), before)
        return out

    _check_halves(case, "apply", check_hook)


def _descend(links: Sequence[Module], start: Sequence[Tensor]) -> Tensor:
    """Return a smooth scalar function of the parameters after three steps."""
    torch.manual_seed(0)
    params, state = start, functional.init(links, start)
    for _ in range(3):
        params, state = functional.step(links, params, [torch.sin(p) + 0.5 * p for p in params], state)  # type: ignore[assignment]
    return torch.stack([(p.reshape(-1) * torch.cos(torch.arange(p.numel()) + 1.0)).sum() for p in params]).sum()


@kit.law
def differentiable(case: Case) -> None:
    """Gradients through steps, of parameters and of settings, equal finite differences; or the chain raises ChainError."""
    if case.members or any(need.evaluates for need in kit.needs(case.links())):
        raise NotApplicable("a pure step has no closure to evaluate")
    start = kit.snapshot(kit.problem(case).params)
    live = [param.clone().requires_grad_() for param in start]
    if not all(link.differentiable for link in kit.all_links(case.links())):
        try:
            functional.step(case.links(), live, live, functional.init(case.links(), live))
        except ChainError:
            return
        raise LawError("it does not say that it is, yet a step that is differentiated is not refused")
    _check_derivative("the parameters", lambda *params: _descend(case.links(), params), live, 1e-6)
    for name, key, value in list_numbers(case.links()):

        def end(t: Tensor, name: str = name, key: str = key, value: float = value) -> Tensor:
            links = case.links()
            for link in named_links(links, name):
                if key in link.defaults:
                    link.defaults[key] = value + t * (value or 0.01)
            return _descend(links, start) + 0 * t

        zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
        _check_derivative(f"{name}.{key}", end, [zero], 1e-5)


def _check_derivative(what: str, end: Callable[..., Tensor], live: Sequence[Tensor], length: float) -> None:
    try:
        torch.autograd.gradcheck(end, tuple(live), eps=length, atol=1e-6, rtol=2e-4, fast_mode=True)
    except RuntimeError as error:
        raise LawError(f"the derivative by {what} is not that of differences: {error}") from error
