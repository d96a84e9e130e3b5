"""Laws about mistakes and endurance: errors undo the step, nothing leaks, nonsense is refused in a sentence."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..optim import Optimizer, closure
from . import _problems as kit
from ._problems import Case, LawError, NotApplicable
from ._settings import arguments, named_links, require_numbers


class _Boom(RuntimeError):
    pass


@kit.law
def errors(case: Case) -> None:
    """Whichever evaluation raises, the parameters are back at the step's start, and the next step works."""

    def attempt(fail_at: int) -> tuple[int, kit.LawProblem, Optimizer, list[Tensor]]:
        """A second step, whose evaluation of this number raises."""
        at = kit.problem(case)
        opt = kit.optimizer(case, at.subject)
        opt.step(at.closure())
        start, count = kit.snapshot(at.params), 0

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
        kit.expect_same(f"after evaluation {k} of {total} raised, beside the step's start", at.params, start)
        opt.step(at.closure())
        kit.expect_finite(f"in the step after a failed one (evaluation {k} of {total}) a parameter", at.params)


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
            if i % 20 == 19:  # at the optimum a line search has nothing to do
                with torch.no_grad():
                    at.params[0].copy_(start[0])
        at.params[0].grad = None
        return _count_alive()

    gc.collect()
    gc.freeze()  # what was there before is not looked at
    try:
        before = go()
        for _ in range(2):  # what is kept once (an import, a cache) is no leak: a leak goes on
            now = go()
            tensors, size, objects = (b - a for a, b in zip(before, now, strict=True))
            if tensors <= 8 and size <= 4096 and objects <= 250:
                return
            before = now
    finally:
        gc.unfreeze()
    raise LawError(f"{steps // 2} steps left {tensors} tensors, {size} bytes and {objects} Python objects behind")


kit.LAWS["leaks"] = leaks


@kit.law
def nan(case: Case) -> None:
    """A NaN setting is refused, by the constructor, by groups and by the link's own groups, in a sentence."""
    for name, key, _ in require_numbers(case):
        _check_refusals(case, name, key, math.nan)


@kit.law
def unknown(case: Case) -> None:
    """Settings that no link has are refused, by name."""
    for name in {type(link).__name__ for link in kit.all_links(case.links())}:
        _check_refusals(case, name, "no_such_setting", 1.0)


def _check_refusals(case: Case, name: str, key: str, value: float) -> None:
    """A setting of a link is refused wherever it can be given, in sentences that name both."""
    at = kit.problem(case)
    opt = kit.optimizer(case, at.subject)
    link = next(named_links(opt.modules, name))
    addressed = f"{name.lower()}.{key}"
    start = kit.snapshot(at.params)

    def step() -> None:
        opt.param_groups[0][addressed] = value
        kit.step(case, opt, at)

    _expect_refusal(
        f"{name}.set_param_groups with {key}={value}",
        lambda: link.set_param_groups([{"params": at.params, key: value}]),
        (name, key),
    )
    group = [{"params": at.params, addressed: value}]
    _expect_refusal(f"a group with {name}.{key}={value}", lambda: kit.optimizer(case, group), (name, key))
    _expect_refusal(f"a step with {name}.{key}={value}", step, (key,))
    kit.expect_same(f"a step refused for {name}.{key}={value} moved something:", at.params, start)
    known = inspect.signature(type(link)).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    given = arguments(link, key, value) if key in known or free else {key: value}
    if given is not None:
        _expect_refusal(f"{name}({key}={value})", lambda: type(link)(**given), (name,))


def _expect_refusal(what: str, do: Callable[[], Any], words: tuple[str, ...]) -> None:
    try:
        do()
    except NotApplicable:
        return  # a population takes no groups, right or wrong
    except (TypeError, ValueError) as error:
        for word in words:
            kit.expect(word.lower() in str(error).lower(), f"{what} is refused without naming {word!r}: {error}")
    else:
        raise LawError(f"{what} is accepted")
