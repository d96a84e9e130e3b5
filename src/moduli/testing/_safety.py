"""Laws about mistakes and endurance: errors undo the step, nothing leaks, nonsense is refused in a sentence."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..optim import Module, Optimizer, closure, flatten
from ._case import Case, LawError, NotApplicable
from ._problems import (
    LAWS,
    LawProblem,
    all_links,
    expect,
    expect_finite,
    expect_same,
    law,
    optimizer,
    problem,
    snapshot,
    step,
)
from ._settings import arguments, named_links, require_numbers


class _Boom(RuntimeError):
    pass


def _make_counting_closure(at: LawProblem, fail_at: int | None) -> tuple[Callable[[], Tensor], list[int]]:
    count = [0]

    def answer() -> Tensor:
        count[0] += 1
        if count[0] == fail_at:
            raise _Boom(f"evaluation {fail_at}")
        return at.answer()

    return answer, count


@law
def errors(case: Case) -> None:
    """Whichever evaluation raises, the parameters are back at the step's start, and the next step works."""

    def begin() -> tuple[LawProblem, Optimizer]:
        at = problem(case)
        opt = optimizer(case, at.params)
        opt.step(at.closure())
        return at, opt

    at, opt = begin()
    answer, count = _make_counting_closure(at, None)
    torch.manual_seed(2)
    opt.step(closure(answer))
    total = count[0]
    for k in sorted({*range(1, min(total, 5) + 1), (total + 5) // 2, total} - {0}):
        if k > total:
            continue
        at, opt = begin()
        start = snapshot(at.params)
        answer, _ = _make_counting_closure(at, k)
        torch.manual_seed(2)
        try:
            opt.step(closure(answer))
        except _Boom:
            pass
        else:
            raise LawError(f"the error raised by evaluation {k} of {total} was swallowed")
        expect_same(f"after evaluation {k} of {total} raised, beside the step's start", at.params, start)
        opt.step(at.closure())
        expect_finite(f"in the step after a failed one (evaluation {k} of {total}) a parameter", at.params)


def _alive() -> tuple[int, int, int]:
    gc.collect()
    objects = gc.get_objects()
    tensors = [thing for thing in objects if issubclass(type(thing), Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.layout is torch.strided)
    return len(tensors), size, len(objects)


def leaks(case: Case, steps: int = 1000) -> None:
    """Over 1000 steps neither tensors nor bytes nor other objects accumulate."""
    at = problem(case, ((2,),))
    opt = optimizer(case, at.params)
    evaluate = at.closure()
    start = snapshot(at.params)

    def go(count: int) -> None:
        for i in range(count):
            if case.closure or case.target == "least squares":
                opt.step(evaluate)
            else:
                at.params[0].grad = torch.full_like(start[0], 0.5)
                opt.step()
            if i % 20 == 19:  # at the optimum a line search has nothing to do
                with torch.no_grad():
                    at.params[0].copy_(start[0])
        for param in at.params:
            param.grad = None

    gc.collect()
    gc.freeze()  # what was there before is not looked at
    try:
        go(steps // 2)
        tensors, size, objects = _alive()
        go(steps - steps // 2)
        tensors2, size2, objects2 = _alive()
        if tensors2 > tensors + 8 or size2 > size + 4096 or objects2 > objects + 250:
            # What is kept once (an import, a cache) is no leak: a leak goes on.
            tensors, size, objects = tensors2, size2, objects2
            go(steps - steps // 2)
            tensors2, size2, objects2 = _alive()
    finally:
        gc.unfreeze()
    kept = tensors2 <= tensors + 8 and size2 <= size + 4096
    expect(kept, f"{steps // 2} steps left {tensors2 - tensors} tensors and {size2 - size} bytes behind")
    expect(objects2 <= objects + 250, f"{steps // 2} steps left {objects2 - objects} Python objects behind")


LAWS["leaks"] = leaks


def _expect_refusal(what: str, do: Callable[[], Any], kinds: Any, *words: str) -> None:
    try:
        do()
    except NotApplicable:
        return  # a population takes no groups, right or wrong
    except kinds as error:
        for word in words:
            expect(word.lower() in str(error).lower(), f"{what} is refused without naming {word!r}: {error}")
    else:
        raise LawError(f"{what} is accepted")


@law
def nan(case: Case) -> None:
    """A NaN setting is refused, by the constructor, by groups and by the link's own groups, in a sentence."""
    for name, key, _ in require_numbers(case):
        _refuse_nan(case, name, key)


def _refuse_nan(case: Case, name: str, key: str) -> None:
    at = problem(case)
    opt = optimizer(case, at.params)
    link = next(named_links(opt.modules, name))
    group = [{"params": at.params, key: math.nan}]
    addressed = [{"params": at.params, f"{name.lower()}.{key}": math.nan}]
    by_link = f"{name}.set_param_groups with {key}=NaN"
    _expect_refusal(by_link, lambda: link.set_param_groups(group), ValueError, name, key)
    _expect_refusal(f"a group with {name}.{key}=NaN", lambda: optimizer(case, addressed), ValueError, name, key)
    given = arguments(link, key, math.nan)
    if given is not None:
        _expect_refusal(f"{name}({key}=NaN)", lambda: type(link)(**given), ValueError, name)
    _refuse_step(case, opt, at, f"{name.lower()}.{key}", math.nan, key)


def _refuse_step(case: Case, opt: Optimizer, at: LawProblem, key: str, value: float, word: str) -> None:
    opt.param_groups[0][key] = value
    start = snapshot(at.params)
    _expect_refusal(f"a step with {key}={value}", lambda: step(case, opt, at), ValueError, word)
    expect_same(f"a step refused for {key}={value} moved something:", at.params, start)


@law
def duplicates(case: Case) -> None:
    """A parameter given twice is refused, in one group or in two, at once or later."""
    if case.members:
        raise NotApplicable("a population says itself what its parameters are")
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    refuse = ValueError, RuntimeError
    _expect_refusal("the same parameter twice", lambda: optimizer(case, [w, w]), refuse, "param")
    two = [{"params": [w]}, {"params": [w]}]
    _expect_refusal("a parameter in two groups", lambda: optimizer(case, two), refuse, "param")
    opt = optimizer(case, [w])
    _expect_refusal("a parameter added again", lambda: opt.add_param_group({"params": [w]}), refuse, "param")


@law
def shared(case: Case) -> None:
    """A link used twice, in one chain or in two optimizers, is refused by name."""
    at, other = problem(case), problem(case)
    links = case.links()
    name = next(type(link).__name__ for link in flatten(links))
    twice = [*links, links[0]]
    _expect_refusal("the same link twice in a chain", lambda: Optimizer(at.subject, *twice), ValueError, name)
    opt = Optimizer(at.subject, *links)
    again = opt.modules
    _expect_refusal("a link of another optimizer", lambda: Optimizer(other.subject, *again), ValueError, name)


@law
def unknown(case: Case) -> None:
    """Settings that no link has are refused, by name."""
    at = problem(case)
    word = "no_such_setting"
    group = [{"params": at.params, word: 1.0}]
    _expect_refusal("a group with an unknown setting", lambda: optimizer(case, group), ValueError, word)
    _refuse_step(case, optimizer(case, at.params), at, word, 1.0, word)
    for link in all_links(case.links()):
        _refuse_unknown(link, group, word)


def _refuse_unknown(link: Module, group: list[dict[str, Any]], word: str) -> None:
    kind: Any = type(link)
    name = kind.__name__
    what = f"{name}.set_param_groups with an unknown setting"
    _expect_refusal(what, lambda: link.set_param_groups(group), ValueError, word, name)
    kinds = {p.kind for p in inspect.signature(kind.__init__).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        _expect_refusal(f"{name}({word}=1)", lambda: kind(**{word: 1.0}), TypeError, word, name)
