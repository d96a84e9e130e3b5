"""Laws about the two halves of a step: learning leaves the update alone, applying leaves what was learnt alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..optim import Module, Objective, Transform
from ._case import Case, NotApplicable
from ._problems import eager, optimizer, problem, step

__all__ = ["LAWS"]


def _plain(value: Any) -> Any:
    """A copy to compare with; random generators are meant to change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not isinstance(item, torch.Generator)}
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return [_plain(item) for item in value]
    return value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a is b or bool(a == b)


def _transforms(links: list[Module]) -> list[Transform]:
    return [part for top in links for _, part in top.links() if isinstance(part, Transform)]


@eager
def learning(case: Case) -> None:
    """`update_states` does not change the update."""
    if not _transforms(case.links()):
        raise NotApplicable("it has no half of its step that learns alone")
    at = problem(case)
    opt = optimizer(case, at.subject if case.members else at.params, fuse=False)

    def watch(link: Transform) -> None:
        learn = link.update_states

        def watched(objective: Objective, states: Any, settings: Any) -> None:
            given, untouched = list(objective.peek_updates()), objective.updates is None
            before = _plain(given)
            learn(objective, states, settings)
            now = given if untouched and objective.updates is None else objective.get_updates()
            if not (_equal(before, _plain(given)) and _equal(before, _plain(now))):
                raise case.fail("learning", f"{type(link).__name__} changes the update while it learns")

        link.update_states = watched  # type: ignore[method-assign]

    for link in _transforms(opt.modules):
        watch(link)
    for _ in range(3):
        step(case, opt, at)


@eager
def applying(case: Case) -> None:
    """`apply_states` does not change what the link has learnt, so that it may be called again."""
    if not _transforms(case.links()):
        raise NotApplicable("it has no half of its step that learns alone")
    at = problem(case)
    opt = optimizer(case, at.subject if case.members else at.params, fuse=False)

    def watch(link: Transform) -> None:
        apply = link.apply_states

        def watched(objective: Objective, states: Any, settings: Any) -> Objective:
            before = _plain([list(map(dict, states)), link.global_state])
            out = apply(objective, states, settings)
            after = _plain([list(map(dict, states)), link.global_state])
            if not _equal(before, after):
                raise case.fail("applying", f"{type(link).__name__} changes what it has learnt when it is applied")
            return out

        link.apply_states = watched  # type: ignore[method-assign]

    for link in _transforms(opt.modules):
        watch(link)
    for _ in range(3):
        step(case, opt, at)


LAWS = {"learning": learning, "applying": applying}
