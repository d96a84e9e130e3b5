"""Laws about settings: groups, schedulers and schedules are obeyed, and new numbers need no new kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim import FusedRun, Module, Optimizer
from ._case import Case, NotApplicable
from ._problems import Problem, eager, optimizer, problem, same, snapshot, step

__all__ = ["LAWS", "numbers"]


def numbers(links: Sequence[Module]) -> Iterator[tuple[str, str, float]]:
    """(class, setting, value) of every setting that is a real number free to change."""
    seen = set()
    for top in links:
        for _, link in top.links():
            for key, value in link.defaults.items():
                found = (type(link).__name__, key)
                if type(value) is float and key not in getattr(link, "static", ()) and found not in seen:
                    seen.add(found)
                    yield *found, value


def _other(value: float) -> float:
    """A number near by, on the safe side of limits such as 1 for a momentum."""
    return 0.9 * value if value else 0.01


def _all(links: Sequence[Module], name: str) -> Iterator[Module]:
    for top in links:
        for _, link in top.links():
            if type(link).__name__ == name:
                yield link


def _trial(
    case: Case, change: Callable[[Optimizer, Problem], None], groups: Any = None, steps: int = 3
) -> list[Tensor]:
    at = problem(case)
    opt = optimizer(case, at.params if groups is None else groups(at.params))
    change(opt, at)
    torch.manual_seed(1)
    for _ in range(steps):
        step(case, opt, at)
    return snapshot(at.params)


@eager
def groups(case: Case) -> None:
    """A setting in the optimizer's groups or in the link's own does what the same default would."""
    found = list(numbers(case.links()))
    if not found:
        raise NotApplicable("it has no numbers to set")
    for name, key, value in found:
        new = _other(value)

        def by_default(opt: Optimizer, at: Problem, name: str = name, key: str = key, new: float = new) -> None:
            for link in _all(opt.modules, name):
                link.defaults[key] = new
            # What the optimizer shows to schedulers is older than this change.
            for group in opt.param_groups:
                group.pop(key, None)

        def by_link(opt: Optimizer, at: Problem, name: str = name, key: str = key, new: float = new) -> None:
            for link in _all(opt.modules, name):
                link.set_param_groups([{"params": at.params, key: new}])

        def nothing(opt: Optimizer, at: Problem) -> None: ...

        def addressed(params: Any, key: str = f"{name}.{key}", new: float = new) -> Any:
            return [{"params": params, key: new}]

        expected = _trial(case, by_default)
        by_group = _trial(case, nothing, addressed)
        for where, got in (("the optimizer's group", by_group), ("set_param_groups", _trial(case, by_link))):
            if (gap := same(got, expected, 1e-12)) is not None:
                raise case.fail("groups", f"{name}.{key}={new:g} given by {where} is not obeyed: {gap}")


@eager
def split_groups(case: Case) -> None:
    """Parameters in two groups with equal settings move as in one; settings of one group do not reach another."""
    at, apart = problem(case), problem(case)
    opt = optimizer(case, at.params)
    two = optimizer(case, [{"params": [param]} for param in apart.params])
    torch.manual_seed(1)
    for _ in range(3):
        step(case, opt, at)
    torch.manual_seed(1)
    for _ in range(3):
        step(case, two, apart)
    if (gap := same(apart.params, at.params, 1e-12)) is not None:
        raise case.fail("split_groups", f"with each parameter in a group of its own {gap}")
    if "lr" not in opt.param_groups[0]:
        return
    still = problem(case)
    opt = optimizer(case, [{"params": [still.params[0]], "lr": 0.0}, {"params": [still.params[1]]}])
    start = snapshot(still.params)
    try:
        step(case, opt, still)
        if torch.equal(start[1], still.params[1].detach()):
            step(case, opt, still)  # the first step of some links only measures
    except ValueError as error:
        if "one vector" in str(error) or "all parameters" in str(error):
            return  # a link over all parameters says that it has one value for all
        raise
    if not torch.equal(start[0], still.params[0].detach()):
        raise case.fail("split_groups", "a parameter with lr=0 in its group moved")
    if case.target and torch.equal(start[1], still.params[1].detach()):
        raise case.fail("split_groups", "lr=0 of one group stopped another")


@eager
def schedulers(case: Case) -> None:
    """A scheduler of torch, a function of the step, and numbers written by hand into the group do the same."""
    links = case.links()
    if not any("lr" in part.defaults for top in links for _, part in top.links()):
        raise NotApplicable("it has no learning rate")
    at = problem(case)
    opt = optimizer(case, at.params)
    if "lr" not in opt.param_groups[0]:
        raise NotApplicable("its links have different learning rates")
    base = opt.param_groups[0]["lr"]
    if not isinstance(base, float | int):
        raise NotApplicable("its learning rate is a schedule already")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for _ in range(4):
        step(case, opt, at)
        scheduler.step()
    by_hand = problem(case)
    opt = optimizer(case, by_hand.params)
    for t in range(4):
        opt.param_groups[0]["lr"] = base * 0.5**t
        step(case, opt, by_hand)
    if (gap := same(at.params, by_hand.params, 1e-12)) is not None:
        raise case.fail("schedulers", f"under a scheduler {gap}")
    function = problem(case)
    opt = optimizer(case, [{"params": function.params, "lr": lambda t: base * 0.5**t}])
    for _ in range(4):
        step(case, opt, function)
    if (gap := same(function.params, by_hand.params, 1e-12)) is not None:
        raise case.fail("schedulers", f"with the learning rate a function of the step {gap}")


def kernels_of(opt: Optimizer) -> int:
    """How many kernels the optimizer's fused runs have made."""
    owners: list[Any] = [opt, *(link for top in opt.modules for _, link in top.links())]
    return sum(
        len(part._fused)
        for owner in owners
        for part in (getattr(owner, "_segments", None) or ((), ()))[1]
        if isinstance(part, FusedRun)
    )


@eager
def no_rebuild(case: Case) -> None:
    """A new number for a setting never makes a new kernel."""
    found = list(numbers(case.links()))
    if not found:
        raise NotApplicable("it has no numbers to set")
    at = problem(case)
    opt = optimizer(case, at.params)
    for _ in range(3):
        step(case, opt, at)
    before = kernels_of(opt)
    for i in range(3):
        for name, key, value in found:
            opt.param_groups[0][f"{name.lower()}.{key}"] = value * (1 - 0.01 * (i + 1))
        step(case, opt, at)
    after = kernels_of(opt)
    if after > before:
        raise case.fail("no_rebuild", f"changing numbers made {after - before} more kernels ({before} before)")


LAWS = {
    "groups": groups,
    "split_groups": split_groups,
    "schedulers": schedulers,
    "no_rebuild": no_rebuild,
}
