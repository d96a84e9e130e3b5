"""The law about populations: all members at once move as each would by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..optim import ChainError, Module, Need, Optimizer, closure
from ..population import Population
from ._case import Case, NotApplicable
from ._problems import LawProblem, all_links, expect, expect_same, half_square, law, needs, problem, same

_MEMBERS = 3
_STEPS = 4
_RATES = torch.linspace(1.0, 0.5, _MEMBERS, dtype=torch.float64)


class _Model(nn.Module):
    """A problem as a model: calling it gives the loss."""

    def __init__(self, at: LawProblem) -> None:
        super().__init__()
        self.weight, self.bias = at.params
        self.at = at

    def forward(self) -> Tensor:
        return half_square(self.at.residuals_at([self.weight, self.bias]))


def _model(case: Case, index: int, dtype: torch.dtype) -> _Model:
    at = problem(case, dtype=dtype)
    with torch.no_grad():
        for param in at.params:
            param.mul_(1 + 0.3 * index)
    return _Model(at)


def _make_stacked(case: Case, population: Population, per_member: bool) -> Optimizer:
    torch.manual_seed(0)
    links = _make_links(case, _RATES if per_member else None)
    try:
        return Optimizer(population, *links)
    except ChainError as refused:
        raise NotApplicable(f"a population can't give it what it needs: {refused}") from refused


def _make_links(case: Case, rates: Tensor | float | None) -> list[Module]:
    """New links, whose learning rates are multiplied by others."""
    links = case.links()
    for link in all_links(links) if rates is not None else ():
        if isinstance(link.defaults.get("lr"), float):
            link.defaults["lr"] = link.defaults["lr"] * rates
    return links


@law
def population(case: Case) -> None:
    """On a population it does what N separate optimizers do, with one learning rate and with one per member."""
    if not case.population:
        raise NotApplicable("it does not run on a population as N separate optimizers would")
    links = case.links()
    if case.random:
        raise NotApplicable("separate optimizers draw other random numbers")
    if Need.MEMBERS in needs(links):
        raise NotApplicable("it couples the members")
    has_rate = any(isinstance(link.defaults.get("lr"), float) for link in all_links(links))
    for per_member in (False, True) if has_rate else (False,):
        _compare(case, per_member, torch.float64, 1e-10)
    _compare(case, has_rate, torch.float32, 1e-4)


def _compare(case: Case, per_member: bool, dtype: torch.dtype, tolerance: float) -> None:
    together = Population.from_modules([_model(case, i, dtype) for i in range(_MEMBERS)])
    opt = _make_stacked(case, together, per_member)
    for _ in range(_STEPS):
        opt.step(closure(lambda: together.losses(lambda net: net())))
    for i in range(_MEMBERS):
        alone = _train_alone(case, per_member, i, dtype)
        found = [leaf.detach()[i] for leaf in together.parameters()]
        if same(found, alone, tolerance) is None:
            continue
        # Eigenvectors of equal eigenvalues follow the last digit; nothing can be told apart below what that one moves.
        moved = _train_alone(case, per_member, i, dtype, nudge=torch.finfo(dtype).eps)
        noise = max(float((a - b).abs().max()) for a, b in zip(alone, moved, strict=True) if a.numel())
        how = " with a learning rate of its own" if per_member else ""
        what = f"member {i}{how} is not where it would be by itself ({dtype}):"
        expect_same(what, found, alone, max(tolerance, 100 * noise))


def _train_alone(case: Case, per_member: bool, i: int, dtype: torch.dtype, nudge: float = 0.0) -> list[torch.Tensor]:
    """Where a member comes by itself, from its start or one that differs from it by a factor of 1 + nudge."""
    model = _model(case, i, dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + nudge)
    one = Optimizer(model, *_make_links(case, float(_RATES[i]) if per_member else None))
    for _ in range(_STEPS):
        one.step(closure(model))
    return [param.detach() for param in model.parameters()]


@law
def operations(case: Case) -> None:
    """How many operations a step takes on a population does not depend on its size, unless `explain()` says that it does."""
    if not case.population:
        raise NotApplicable("it does not run on a population as N separate optimizers would")
    wanted = needs(case.links())
    if Need.MEMBERS in wanted or Need.CLOSURE in wanted:
        raise NotApplicable("it couples the members, or decides how often they are evaluated")
    (few, said), (many, _) = (_count_operations(case, count) for count in (2, 6))
    loops = "member by member" in said
    expect(loops != (few == many), f"2 members take {few} operations, 6 members {many}; explain() says: {said}")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch runs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _count_operations(case: Case, members: int) -> tuple[int, str]:
    """How many operations the steps after the first take, and what `explain()` says."""
    pop = Population.from_modules([_model(case, i, torch.float64) for i in range(members)])
    opt = _make_stacked(case, pop, False)
    for _ in range(2):
        opt.step(closure(lambda: pop.losses(lambda net: net())))
    with _Operations() as counter:  # type: ignore[no-untyped-call]
        for _ in range(2):
            opt.step(closure(lambda: pop.losses(lambda net: net())))
    return counter.count, str(opt.explain())
