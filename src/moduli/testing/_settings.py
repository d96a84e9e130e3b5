"""Laws about settings: groups, schedulers and schedules are obeyed, and new numbers need no new kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..optim import FusedRun, Module, Optimizer, Schedule
from ._case import Case, NotApplicable
from ._problems import LawProblem, have_moved, optimizer, problem, run_eagerly, same, snapshot, step


def list_numbers(links: Sequence[Module]) -> Iterator[tuple[str, str, float]]:
    """(class, setting, value) of every setting that is a real number free to change."""
    seen = set()
    for top in links:
        for _, link in top.links():
            for key, value in link.defaults.items():
                found = (type(link).__name__, key)
                if type(value) is float and key not in getattr(link, "static", ()) and found not in seen:
                    seen.add(found)
                    yield *found, value


def _perturb(value: float) -> float:
    """A number near by, on the safe side of limits such as 1 for a momentum."""
    return 0.9 * value if value else 0.01


def _all(links: Sequence[Module], name: str) -> Iterator[Module]:
    for top in links:
        for _, link in top.links():
            if type(link).__name__ == name:
                yield link


def _trial(
    case: Case, change: Callable[[Optimizer, LawProblem], None], groups: Any = None, steps: int = 3
) -> list[Tensor]:
    at = problem(case)
    opt = optimizer(case, at.params if groups is None else groups(at.params))
    change(opt, at)
    torch.manual_seed(1)
    for _ in range(steps):
        step(case, opt, at)
    return snapshot(at.params)


@run_eagerly
def groups(case: Case) -> None:
    """A setting in the optimizer's groups or in the link's own does what the same default would."""
    found = list(list_numbers(case.links()))
    if not found:
        raise NotApplicable("it has no numbers to set")
    for name, key, value in found:
        new = _perturb(value)

        def by_default(opt: Optimizer, at: LawProblem, name: str = name, key: str = key, new: float = new) -> None:
            for link in _all(opt.modules, name):
                link.defaults[key] = new
            # What the optimizer shows to schedulers is older than this change.
            for group in opt.param_groups:
                group.pop(key, None)

        def by_link(opt: Optimizer, at: LawProblem, name: str = name, key: str = key, new: float = new) -> None:
            for link in _all(opt.modules, name):
                link.set_param_groups([{"params": at.params, key: new}])

        def nothing(opt: Optimizer, at: LawProblem) -> None: ...

        def addressed(params: Any, key: str = f"{name}.{key}", new: float = new) -> Any:
            return [{"params": params, key: new}]

        expected = _trial(case, by_default)
        by_group = _trial(case, nothing, addressed)
        for where, got in (("the optimizer's group", by_group), ("set_param_groups", _trial(case, by_link))):
            if (gap := same(got, expected, 1e-12)) is not None:
                raise case.fail("groups", f"{name}.{key}={new:g} given by {where} is not obeyed: {gap}")


def _settings(links: Sequence[Module]) -> Iterator[tuple[str, str, Any, Any]]:
    """(class, setting, value, another value) of every setting that is a number or a choice of two."""
    seen = set()
    for top in links:
        for _, link in top.links():
            for key, value in link.defaults.items():
                found = (type(link).__name__, key)
                if found in seen or not isinstance(value, bool | int | float):
                    continue
                seen.add(found)
                other = (
                    not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else _perturb(value)
                )
                yield *found, value, other


_THREE = ((3, 2), (4,), (2, 3))


@run_eagerly
def per_group(case: Case) -> None:
    """A setting of one group is obeyed for its parameters, or refused in a sentence that names it."""
    if case.members:
        raise NotApplicable("a population says itself what its parameters are")
    found = list(_settings(case.links()))
    if not found:
        raise NotApplicable("it has no settings")

    def trial(groups: Callable[[list[Tensor]], Any]) -> list[Tensor]:
        at = problem(case, _THREE, kind="bowl")  # what happens to one parameter does not reach another by the loss
        opt = optimizer(case, groups(list(at.params)))
        torch.manual_seed(1)
        for _ in range(3):
            step(case, opt, at)
        return snapshot(at.params)

    plain = trial(lambda params: params)
    broken: list[str] = []
    for name, key, _, new in found:
        address = f"{name}.{key}"

        def all_of(params: Any, address: str = address, new: Any = new) -> Any:
            return [{"params": params, address: new}]

        try:
            everywhere = trial(all_of)
        except ValueError:
            continue  # no value that this link can have here
        if not have_moved(plain[1:], everywhere[1:]):
            continue

        def some(params: Any, address: str = address, new: Any = new) -> Any:
            return [{"params": params[:1]}, {"params": params[1:], address: new}]

        try:
            partly = trial(some)
        except ValueError as error:
            if key not in str(error) or name not in str(error):
                broken.append(f"{address} of one group is refused without naming both: {error}")
            continue
        if not have_moved(plain, partly):
            broken.append(f"{address}={new} of the second group is ignored")
    if broken:
        raise case.fail("per_group", "; ".join(broken))


def arguments(link: Module, key: str, value: Any) -> dict[str, Any] | None:
    """Keyword arguments to build another such link with one setting changed; None where that can't be said."""
    known = inspect.signature(type(link).__init__).parameters
    if key not in known:
        return None
    out = {key: value}
    for name, parameter in list(known.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or name == key:
            continue
        if parameter.default is parameter.empty:
            if name not in link.defaults:
                return None
            out[name] = link.defaults[name]
        if parameter.kind is parameter.POSITIONAL_ONLY:
            return None
    return out


class _Always:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, step: int) -> Any:
        return self.value


@run_eagerly
def functions(case: Case) -> None:
    """A number given as a function of the step does what the number does, or is refused by name when it is given."""
    found = [row for row in _settings(case.links()) if not isinstance(row[2], bool)]
    if not found:
        raise NotApplicable("it has no numbers to set")
    plain = _trial(case, lambda opt, at: None)
    for name, key, value, _ in found:
        function = Schedule(_Always(value))
        link = next(_all(case.links(), name))
        given = arguments(link, key, function.fn)
        if given is not None:
            try:
                cast("Any", type(link))(**given)
            except (TypeError, ValueError) as error:
                if name not in str(error) or key not in str(error):
                    raise case.fail(
                        "functions", f"{name}({key}=a function) is refused without naming both: {error}"
                    ) from error
                continue

        def schedule(opt: Optimizer, at: LawProblem, name: str = name, key: str = key, value: Any = function) -> None:
            for part in _all(opt.modules, name):
                if part.defaults[key] == value.fn.value:
                    part.defaults[key] = value
            for group in opt.param_groups:  # what the optimizer shows to schedulers is older than this change
                group.pop(key, None)

        try:
            got = _trial(case, schedule)
        except (TypeError, RuntimeError) as error:
            raise case.fail("functions", f"{name}.{key} as a function: {type(error).__name__}: {error}") from error
        if (gap := same(got, plain, 1e-12)) is not None:
            raise case.fail("functions", f"{name}.{key} as a function that is always {value}: {gap}")


@run_eagerly
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
    start = snapshot(still.params)
    try:
        opt = optimizer(case, [{"params": [still.params[0]], "lr": 0.0}, {"params": [still.params[1]]}])
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


@run_eagerly
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


@run_eagerly
def no_rebuild(case: Case) -> None:
    """A new number for a setting never makes a new kernel."""
    found = list(list_numbers(case.links()))
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
    "functions": functions,
    "per_group": per_group,
    "split_groups": split_groups,
    "schedulers": schedulers,
    "no_rebuild": no_rebuild,
}
