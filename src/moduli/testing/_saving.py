"""Laws about saving: what is restored goes on bit by bit as if nothing had happened."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import Module, Optimizer
from ._case import Case
from ._problems import LawProblem, MemberProblem, optimizer, problem, run_eagerly, same, snapshot, step

_NAMES = ("weight", "bias")


def _name_params(at: LawProblem) -> Any:
    return at.params if isinstance(at, MemberProblem) else list(zip(_NAMES, at.params, strict=True))


def _begin(case: Case, steps: int = 3) -> tuple[LawProblem, Optimizer]:
    at = problem(case)
    opt = optimizer(case, _name_params(at))
    for _ in range(steps):
        step(case, opt, at)
    return at, opt


def _go_on(case: Case, opt: Optimizer, at: LawProblem, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(5)
    for _ in range(steps):
        step(case, opt, at)
    return snapshot(at.params)


def _pass_through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _copy_problem(at: LawProblem, case: Case) -> LawProblem:
    other = problem(case)
    with torch.no_grad():
        for mine, theirs in zip(other.params, at.params, strict=True):
            mine.copy_(theirs)
    return other


@run_eagerly
def saved(case: Case) -> None:
    """`state_dict` goes through torch.save and torch.load(weights_only=True), and the run goes on bit by bit."""
    at, opt = _begin(case)
    state = _pass_through_file(opt.state_dict())
    other = _copy_problem(at, case)
    resumed = optimizer(case, _name_params(other))
    resumed.load_state_dict(state)
    expected = _go_on(case, opt, at)
    if (gap := same(_go_on(case, resumed, other), expected)) is not None:
        raise case.fail("saved", f"resumed from a file, {gap}")
    if resumed.current_step != opt.current_step or resumed.num_evaluations != opt.num_evaluations:
        raise case.fail("saved", "the resumed optimizer counts its steps or evaluations differently")


@run_eagerly
def loaded_in_place(case: Case) -> None:
    """Loading an earlier state into the optimizer that made it goes back to that point."""
    at, opt = _begin(case)
    state, start = copy.deepcopy(opt.state_dict()), snapshot(at.params)
    expected = _go_on(case, opt, at)
    with torch.no_grad():
        for param, value in zip(at.params, start, strict=True):
            param.copy_(value)
    opt.load_state_dict(state)
    if (gap := same(_go_on(case, opt, at), expected)) is not None:
        raise case.fail("loaded_in_place", f"run again from its own state, {gap}")


class _Holder(nn.Module):
    """A model and its optimizer, copied together so that the copy moves its own parameters."""

    def __init__(self, opt: Optimizer, at: LawProblem) -> None:
        super().__init__()
        self.opt = opt
        self.population = at.subject if isinstance(at, MemberProblem) else None
        self.params = nn.ParameterList([] if isinstance(at, MemberProblem) else at.params)


def _copy_law(case: Case, law: str, copied: Any) -> None:
    at, opt = _begin(case)
    try:
        twin = copied(_Holder(opt, at))
    except (TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
        raise case.fail(law, f"it can't be copied: {error}") from error
    other = problem(case)
    if isinstance(other, MemberProblem):
        other.adopt(twin.population)
    else:
        other.params = list(twin.params)
    before = snapshot(at.params)
    found = _go_on(case, twin.opt, other)
    if (gap := same(at.params, before)) is not None:
        raise case.fail(law, f"a step of the copy moved the original: {gap}")
    expected = _go_on(case, opt, at)
    if (gap := same(found, expected)) is not None:
        raise case.fail(law, f"the copy goes on differently: {gap}")


def _pass_through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))  # our own bytes


@run_eagerly
def deepcopied(case: Case) -> None:
    """A deep copy goes on bit by bit, and is independent."""
    _copy_law(case, "deepcopied", copy.deepcopy)


@run_eagerly
def pickled(case: Case) -> None:
    """So does what comes out of pickle."""
    _copy_law(case, "pickled", _pass_through_pickle)


@run_eagerly
def reordered(case: Case) -> None:
    """State is by name: loaded into parameters in another order, the run goes on."""
    at, opt = _begin(case)
    state = _pass_through_file(opt.state_dict())
    other = _copy_problem(at, case)
    resumed = optimizer(case, list(reversed(_name_params(other))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
    expected = _go_on(case, opt, at)
    found = _go_on(case, resumed, other)
    # Random draws, and sums over one vector, follow the order of the parameters.
    if not case.random and (gap := same(found, expected, 1e-9)) is not None:
        raise case.fail("reordered", f"with the parameters in another order {gap}")


def _vector(link: Module) -> bool:
    return any(part.vector_state for _, part in link.links())


@run_eagerly
def grown(case: Case) -> None:
    """Parameters may be added between steps and before loading; what is known goes on, what is new starts fresh."""
    at, opt = _begin(case)
    state = _pass_through_file(opt.state_dict())
    extra = problem(case, ((3, 2), (4,), (2,)))
    with torch.no_grad():
        for mine, theirs in zip(extra.params, at.params, strict=False):
            mine.copy_(theirs)
    bigger = optimizer(case, [*zip(_NAMES, extra.params[:2], strict=True), ("new", extra.params[2])])
    whole_vector = any(map(_vector, case.links()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if whole_vector else "error")
        bigger.load_state_dict(state, strict=not whole_vector)
    start = snapshot(extra.params)
    for _ in range(2):
        step(case, bigger, extra)
    _alive(case, "grown", start, extra.params)
    new = nn.Parameter(torch.ones(3, dtype=torch.float64))
    whole = problem(case, ((3, 2), (4,), (3,)))
    whole.params = [*at.params, new]
    opt.add_param_group({"params": [("late", new)]})
    start = snapshot(whole.params)
    for _ in range(2):
        step(case, opt, whole)
    _alive(case, "grown", start, whole.params)


def _alive(case: Case, law: str, start: list[Tensor], params: list[nn.Parameter]) -> None:
    if any(not torch.isfinite(param.detach()).all() for param in params):
        raise case.fail(law, "after adding a parameter something became infinite or NaN")
    if case.target and torch.equal(start[-1], params[-1].detach()):
        raise case.fail(law, "an added parameter does not move")


LAWS = {
    "saved": saved,
    "loaded_in_place": loaded_in_place,
    "deepcopied": deepcopied,
    "pickled": pickled,
    "reordered": reordered,
    "grown": grown,
}
