"""Laws about the two halves of a step: learning leaves the update alone, applying leaves what was learnt alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..optim import Chain, Module, Need, Objective, Transform
from ._case import Case, NotApplicable
from ._problems import all_links, expect, law, optimizer, problem, step


def _copy_plain(value: Any) -> Any:
    """A copy to compare with; random generators are meant to change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy_plain(item) for key, item in value.items() if not isinstance(item, torch.Generator)}
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return [_copy_plain(item) for item in value]
    return value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a is b or bool(a == b)


def _parts(links: list[Module], half: str) -> list[Module]:
    """The links that have this half of a step themselves; a chain has those of its links.

    What a link learns from the points that it tries (a line search, a trust region) it can only learn while it is applied.
    """
    return [
        link
        for link in all_links(links)
        if isinstance(link, Transform)
        or (half == "update" and type(link).update is not Module.update and not isinstance(link, Chain))
        or (half == "apply" and Need.CLOSURE not in link.needs and not isinstance(link, Chain))
    ]


def _wrap(link: Module, half: str, watched: Callable[..., Any]) -> None:
    """Put a function around one half of a link's step, where its own step calls it."""
    name = f"{half}_states" if isinstance(link, Transform) else half
    inner = getattr(link, name)
    setattr(link, name, lambda objective, *lists: watched(link, inner, objective, *lists))


def _check(case: Case, half: str, watched: Callable[..., Any]) -> None:
    if not _parts(case.links(), half):
        raise NotApplicable("it has no half of its step that learns alone")
    at = problem(case)
    opt = optimizer(case, at.subject if case.members else at.params, fuse=False)
    for link in _parts(opt.modules, half):
        _wrap(link, half, watched)
    step(case, opt, at, 3)


@law
def learning(case: Case) -> None:
    """`update` does not change the update."""

    def check_hook(link: Module, learn: Callable[..., None], objective: Objective, *lists: Any) -> None:
        given, untouched = list(objective.peek_updates()), objective.updates is None
        before = _copy_plain(given)
        learn(objective, *lists)
        now = given if untouched and objective.updates is None else objective.get_updates()
        kept = _equal(before, _copy_plain(given)) and _equal(before, _copy_plain(now))
        expect(kept, f"{type(link).__name__} changes the update while it learns")

    _check(case, "update", check_hook)


@law
def applying(case: Case) -> None:
    """`apply` does not change what the link has learnt, so that it may be called again."""

    def check_hook(link: Module, apply: Callable[..., Objective], objective: Objective, *lists: Any) -> Objective:
        def learnt() -> Any:
            return _copy_plain([[dict(row) for row in link.state.values()], link.global_state])

        before = learnt()
        out = apply(objective, *lists)
        expect(_equal(before, learnt()), f"{type(link).__name__} changes what it has learnt when it is applied")
        return out

    _check(case, "apply", check_hook)
