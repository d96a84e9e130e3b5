"""Laws about gradients through steps: right, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim import ChainError, Module, functional
from ._case import Case, LawError, NotApplicable
from ._problems import all_links, expect, law, needs, problem, snapshot
from ._settings import list_numbers, named_links

_STEPS = 3


def _descend(links: Sequence[Module], start: list[Tensor]) -> Tensor:
    """A number that depends on where some steps down a smooth function end."""
    torch.manual_seed(0)
    params, state = start, functional.init(links, start)
    for _ in range(_STEPS):
        params, state = functional.step(links, params, [torch.sin(p) + 0.5 * p for p in params], state)  # type: ignore[assignment]
    return torch.stack([(p.reshape(-1) * torch.cos(torch.arange(p.numel()) + 1.0)).sum() for p in params]).sum()


@law
def differentiable(case: Case) -> None:
    """Gradients through steps, of parameters and of settings, are those of differences; or the chain refuses."""
    if case.members or any(need.evaluates for need in needs(case.links())):
        raise NotApplicable("a pure step has no closure to evaluate")
    start = snapshot(problem(case).params)
    live = [param.clone().requires_grad_() for param in start]
    if not all(link.differentiable for link in all_links(case.links())):
        try:
            functional.step(case.links(), live, live, functional.init(case.links(), live))
        except ChainError:
            return
        raise LawError("it does not say that it is, yet a step that is differentiated is not refused")
    along = [torch.cos(7.0 * p) for p in start]
    found = torch.autograd.grad(_descend(case.links(), live), live, allow_unused=True)
    ours = sum(float((g * v).sum()) for g, v in zip(found, along, strict=True) if g is not None)

    def moved(t: float) -> float:
        return _descend(case.links(), [p + t * v for p, v in zip(start, along, strict=True)]).item()

    _compare("the parameters", ours, moved, 1e-6)
    for name, key, value in list_numbers(case.links()):
        _of_setting(case, start, name, key, value)


def _of_setting(case: Case, start: list[Tensor], name: str, key: str, value: float) -> None:
    def links(new: Any) -> list[Module]:
        made = case.links()
        for link in named_links(made, name):
            if key in link.defaults:
                link.defaults[key] = new
        return made

    live = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    end = _descend(links(live), start)
    (found,) = torch.autograd.grad(end, live, allow_unused=True) if end.requires_grad else (None,)
    ours = 0.0 if found is None else float(found)
    _compare(f"{name}.{key}", ours, lambda t: _descend(links(value + t), start).item(), 1e-5 * abs(value) or 1e-7)


def _compare(what: str, ours: float, end: Callable[[float], float], length: float) -> None:
    with torch.no_grad():
        ahead, behind = end(length), end(-length)
    theirs = (ahead - behind) / (2 * length)
    rounding = 1e-13 * (1 + abs(ahead)) / length
    near = abs(ours - theirs) <= 1e-4 * (abs(ours) + abs(theirs)) + rounding + 1e-7
    expect(near, f"the derivative by {what} is {ours:.6g}, differences give {theirs:.6g}")
