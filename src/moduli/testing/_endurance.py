"""Laws about long runs: errors undo the step, nothing leaks, and restored runs continue bit for bit."""

import contextlib
import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import Optimizer, closure
from . import _problems as kit
from ._problems import Case, LawError

_NAMES = ("weight", "bias")


class _Boom(RuntimeError):
    pass


@kit.law
def errors(case: Case) -> None:
    """Whichever evaluation raises, parameters and state are those of the step's start, and the next step works."""

    def attempt(fail_at: int) -> tuple[int, kit.LawProblem, Optimizer, tuple[list[Tensor], Any]]:
        """Run two steps and a third one whose evaluation number `fail_at` raises."""
        at = kit.problem(case)
        opt = kit.optimizer(case, at.subject)
        for _ in range(2):
            opt.step(at.closure())
        start, count = (kit.snapshot(at.params), copy.deepcopy(opt.state_dict())), 0

        def answer() -> Tensor:
            nonlocal count
            count += 1
            if count == fail_at:
                raise _Boom(f"evaluation {fail_at}")
            return at.answer()

        torch.manual_seed(2)
        with contextlib.suppress(_Boom):
            opt.step(closure(answer))
            kit.expect(not fail_at, f"the error raised by evaluation {fail_at} was swallowed")
        return count, at, opt, start

    total = attempt(0)[0]
    for k in {*range(1, min(total, 5) + 1), (total + 1) // 2, total} - {0}:
        _, at, opt, start = attempt(k)
        kit.expect_same(f"after evaluation {k} of {total} raised, beside the step's start", at.params, start[0])
        changed = _find_change(start[1], opt.state_dict())
        kit.expect(not changed, f"after evaluation {k} of {total} raised, its state has changed: {changed}")
        opt.step(at.closure())
        kit.expect_finite(f"in the step after a failed one (evaluation {k} of {total}) a parameter", at.params)


def _find_change(before: Any, after: Any, path: str = "") -> str | None:
    """Return the path of the first difference between two state dicts, None if they are equal."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        same = before.shape == after.shape and torch.equal(before.nan_to_num(), after.nan_to_num())
        return None if same else path
    pairs = _pair_items(before, after)
    if pairs is None:
        return None if type(before) is type(after) and before == after else path
    return next((change for key, a, b in pairs if (change := _find_change(a, b, f"{path}/{key}"))), None)


def _pair_items(before: Any, after: Any) -> Iterable[tuple[Any, Any, Any]] | None:
    """Iterate over (key, item before, item after) of containers with equal keys or lengths; None for other values."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return ((key, value, after[key]) for key, value in before.items())
    if isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
        return ((i, *pair) for i, pair in enumerate(zip(before, after, strict=True)))
    return None


def _count_alive() -> tuple[int, int, int]:
    gc.collect()
    objects = gc.get_objects()
    tensors = [thing for thing in objects if issubclass(type(thing), Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.layout is torch.strided)
    return len(tensors), size, len(objects)


def leaks(case: Case, steps: int = 1000) -> None:
    """Over 1000 steps neither tensors nor bytes nor other objects accumulate."""
    at = kit.problem(case, ((2,),))
    opt = kit.optimizer(case, at.subject)
    start = kit.snapshot(at.params)

    def go() -> tuple[int, int, int]:
        for i in range(steps // 2):
            kit.step(case, opt, at)
            if i % 20 == 19:  # restart, because a line search takes no steps at the optimum
                with torch.no_grad():
                    at.params[0].copy_(start[0])
        at.params[0].grad = None
        return _count_alive()

    gc.collect()
    gc.freeze()  # excludes existing objects from the count
    try:
        before = go()
        for _ in range(2):  # one increase may be an import or a cache; a leak continues
            now = go()
            tensors, size, objects = (b - a for a, b in zip(before, now, strict=True))
            if tensors <= 8 and size <= 4096 and objects <= 250:
                return
            before = now
    finally:
        gc.unfreeze()
    raise LawError(f"{steps // 2} steps left {tensors} tensors, {size} bytes and {objects} Python objects behind")


kit.LAWS["leaks"] = leaks


def _name_params(at: kit.LawProblem) -> Any:
    return at.subject if at.members else list(zip(_NAMES, at.params, strict=True))


def _begin(case: Case) -> tuple[kit.LawProblem, Optimizer]:
    at = kit.problem(case)
    opt = kit.optimizer(case, _name_params(at))
    kit.step(case, opt, at, 3)
    return at, opt


def _go_on(case: Case, opt: Optimizer, at: kit.LawProblem) -> list[Tensor]:
    torch.manual_seed(5)
    kit.step(case, opt, at, 3)
    return kit.snapshot(at.params)


def _pass_through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _put(params: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=False):
            param.copy_(value)


def _resume(
    case: Case, at: kit.LawProblem, opt: Optimizer, order: Callable[[Any], Any] = lambda named: named
) -> tuple[kit.LawProblem, Optimizer]:
    """Return a copy of the problem, and a new optimizer with the state of the old one, passed through a file."""
    other = kit.problem(case)
    _put(other.params, at.params)
    resumed = kit.optimizer(case, order(_name_params(other)))
    resumed.load_state_dict(_pass_through_file(opt.state_dict()))
    return other, resumed


@kit.law
def saved(case: Case) -> None:
    """`state_dict` passes through torch.save and torch.load(weights_only=True), and the run continues bit for bit."""
    at, opt = _begin(case)
    other, resumed = _resume(case, at, opt)
    kit.expect_same("resumed from a file,", _go_on(case, resumed, other), _go_on(case, opt, at))
    counts = [(each.current_step, each.num_evaluations) for each in (opt, resumed)]
    kit.expect(counts[0] == counts[1], "the resumed optimizer counts its steps or evaluations differently")


@kit.law
def loaded_in_place(case: Case) -> None:
    """Loading an earlier state into the same optimizer restarts from that point."""
    at, opt = _begin(case)
    state, start = copy.deepcopy(opt.state_dict()), kit.snapshot(at.params)
    expected = _go_on(case, opt, at)
    _put(at.params, start)
    opt.load_state_dict(state)
    kit.expect_same("run again from its own state,", _go_on(case, opt, at), expected)


def _expect_twin(case: Case, copied: Callable[[Any], Any]) -> None:
    at, opt = _begin(case)
    try:
        twin, subject = copied((opt, at.subject))
    except (TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
        raise LawError(f"it can't be copied: {error}") from error
    other = kit.problem(case)
    other.subject = subject
    before = kit.snapshot(at.params)
    continued = _go_on(case, twin, other)
    kit.expect_same("a step of the copy moved the original:", at.params, before)
    kit.expect_same("the copy goes on differently:", continued, _go_on(case, opt, at))


@kit.law
def deepcopied(case: Case) -> None:
    """A deep copy continues bit for bit, and is independent."""
    _expect_twin(case, copy.deepcopy)


@kit.law
def pickled(case: Case) -> None:
    """A copy by pickle continues bit for bit, and is independent."""
    _expect_twin(case, lambda thing: pickle.loads(pickle.dumps(thing)))  # bytes from this process


@kit.law
def reordered(case: Case) -> None:
    """State is loaded by name: with parameters in another order, the run continues."""
    at, opt = _begin(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other, resumed = _resume(case, at, opt, lambda named: list(reversed(named)))
    continued = _go_on(case, resumed, other)
    # Random draws, and sums over one vector, follow the order of the parameters.
    if not case.random:
        kit.expect_same("with the parameters in another order", continued, _go_on(case, opt, at), 1e-9)


@kit.law
def grown(case: Case) -> None:
    """Parameters may be added between steps and before loading; the others keep their state, new ones start fresh."""
    at, opt = _begin(case)
    state = _pass_through_file(opt.state_dict())
    extra = kit.problem(case, ((3, 2), (4,), (2,)))
    _put(extra.params, at.params)
    bigger = kit.optimizer(case, [*zip(_NAMES, extra.params[:2], strict=True), ("new", extra.params[2])])
    whole_vector = any(link.vector_state for link in kit.all_links(case.links()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if whole_vector else "error")
        bigger.load_state_dict(state, strict=not whole_vector)
    _expect_alive(case, bigger, extra)
    new = nn.Parameter(torch.ones(3, dtype=torch.float64))
    whole = kit.problem(case, ((3, 2), (4,), (3,)))
    whole.subject = [*at.params, new]
    opt.add_param_group({"params": [("late", new)]})
    _expect_alive(case, opt, whole)


def _expect_alive(case: Case, opt: Optimizer, at: kit.LawProblem) -> None:
    start = kit.snapshot(at.params)
    kit.step(case, opt, at, 2)
    kit.expect_finite("after adding a parameter something", at.params)
    kit.expect(not case.target or kit.have_moved(start[-1:], at.params[-1:]), "an added parameter does not move")
