"""Laws about saving: what is restored goes on bit by bit as if nothing had happened."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import Optimizer
from ._case import Case, LawError
from ._problems import (
    LawProblem,
    MemberProblem,
    all_links,
    expect,
    expect_finite,
    expect_same,
    have_moved,
    law,
    optimizer,
    problem,
    snapshot,
    step,
)

_NAMES = ("weight", "bias")


def _name_params(at: LawProblem) -> Any:
    return at.params if isinstance(at, MemberProblem) else list(zip(_NAMES, at.params, strict=True))


def _begin(case: Case) -> tuple[LawProblem, Optimizer]:
    at = problem(case)
    opt = optimizer(case, _name_params(at))
    step(case, opt, at, 3)
    return at, opt


def _go_on(case: Case, opt: Optimizer, at: LawProblem) -> list[Tensor]:
    torch.manual_seed(5)
    step(case, opt, at, 3)
    return snapshot(at.params)


def _pass_through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _put(params: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=False):
            param.copy_(value)


def _copy_problem(at: LawProblem, case: Case) -> LawProblem:
    other = problem(case)
    _put(other.params, at.params)
    return other


@law
def saved(case: Case) -> None:
    """`state_dict` goes through torch.save and torch.load(weights_only=True), and the run goes on bit by bit."""
    at, opt = _begin(case)
    state = _pass_through_file(opt.state_dict())
    other = _copy_problem(at, case)
    resumed = optimizer(case, _name_params(other))
    resumed.load_state_dict(state)
    expected = _go_on(case, opt, at)
    expect_same("resumed from a file,", _go_on(case, resumed, other), expected)
    counts = [(each.current_step, each.num_evaluations) for each in (opt, resumed)]
    expect(counts[0] == counts[1], "the resumed optimizer counts its steps or evaluations differently")


@law
def loaded_in_place(case: Case) -> None:
    """Loading an earlier state into the optimizer that made it goes back to that point."""
    at, opt = _begin(case)
    state, start = copy.deepcopy(opt.state_dict()), snapshot(at.params)
    expected = _go_on(case, opt, at)
    _put(at.params, start)
    opt.load_state_dict(state)
    expect_same("run again from its own state,", _go_on(case, opt, at), expected)


class _Holder(nn.Module):
    """A model and its optimizer, copied together so that the copy moves its own parameters."""

    def __init__(self, opt: Optimizer, at: LawProblem) -> None:
        super().__init__()
        self.opt = opt
        self.population = at.subject if isinstance(at, MemberProblem) else None
        self.params = nn.ParameterList([] if isinstance(at, MemberProblem) else at.params)


def _expect_twin(case: Case, copied: Callable[[_Holder], Any]) -> None:
    at, opt = _begin(case)
    try:
        twin = copied(_Holder(opt, at))
    except (TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
        raise LawError(f"it can't be copied: {error}") from error
    other = problem(case)
    if isinstance(other, MemberProblem):
        other.adopt(twin.population)
    else:
        other.params = list(twin.params)
    before = snapshot(at.params)
    found = _go_on(case, twin.opt, other)
    expect_same("a step of the copy moved the original:", at.params, before)
    expect_same("the copy goes on differently:", found, _go_on(case, opt, at))


@law
def deepcopied(case: Case) -> None:
    """A deep copy goes on bit by bit, and is independent."""
    _expect_twin(case, copy.deepcopy)


@law
def pickled(case: Case) -> None:
    """So does what comes out of pickle."""
    _expect_twin(case, lambda thing: pickle.loads(pickle.dumps(thing)))  # our own bytes


@law
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
    if not case.random:
        expect_same("with the parameters in another order", found, expected, 1e-9)


@law
def grown(case: Case) -> None:
    """Parameters may be added between steps and before loading; what is known goes on, what is new starts fresh."""
    at, opt = _begin(case)
    state = _pass_through_file(opt.state_dict())
    extra = problem(case, ((3, 2), (4,), (2,)))
    _put(extra.params, at.params)
    bigger = optimizer(case, [*zip(_NAMES, extra.params[:2], strict=True), ("new", extra.params[2])])
    whole_vector = any(link.vector_state for link in all_links(case.links()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if whole_vector else "error")
        bigger.load_state_dict(state, strict=not whole_vector)
    _expect_alive(case, bigger, extra)
    new = nn.Parameter(torch.ones(3, dtype=torch.float64))
    whole = problem(case, ((3, 2), (4,), (3,)))
    whole.params = [*at.params, new]
    opt.add_param_group({"params": [("late", new)]})
    _expect_alive(case, opt, whole)


def _expect_alive(case: Case, opt: Optimizer, at: LawProblem) -> None:
    start = snapshot(at.params)
    step(case, opt, at, 2)
    expect_finite("after adding a parameter something", at.params)
    expect(not case.target or have_moved(start[-1:], at.params[-1:]), "an added parameter does not move")
