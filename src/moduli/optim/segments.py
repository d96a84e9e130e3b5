"""The segments of a chain: runs of pointwise links, each of which is one pass over all parameters, and single links."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ._checks import check_updates
from ._fusion import FusedRun, Traced
from ._needs import Across
from .objective import Objective
from .offload import fetched_rows
from .transform import TensorTransform
from .watch import run_watched

if TYPE_CHECKING:
    from . import Module
    from .forms import StepForm


def explain_unfused(link: Module, over_members: bool = False) -> str | None:
    """Return the reason why a link can't be part of a fused run; None if it can."""
    if not isinstance(link, TensorTransform):
        return "it works on the objective, not on tensors"
    name = link.find_override()
    # A scalar of a kernel is one number for all members.
    differs = over_members and (link.finds_numbers() or bool(link.settings.find_per_member()))
    reasons = {
        "its hooks are not declared pointwise": not link.elementwise,
        "it works on one vector of all parameters": link.concat_params,
        f"it has inner links ({', '.join(link.children)})": bool(link.children),
        f"it learns at every {link.update_freq}th step only": link.update_freq != 1,
        "it uses the loss": link.uses_loss,
        "a number differs between members": differs,
        f"it overrides {name}": name is not None,
        f"its hooks are not pure: {link.impure}": link.impure is not None,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def make_segments(links: Sequence[Module], moves: bool = False, traced: Traced | None = None) -> list[Segment]:
    """Return links as segments: each maximal run of pointwise ones is a `FusedRun`, each other one a `LinkRun`.

    Args:
        links: The links of a chain.
        moves: Whether the chain's update is subtracted from the parameters: a run at its end then does this itself.
        traced: Traced kernels of earlier runs; new ones are added.
    """
    parts: list[Any] = []  # a link that is not fused, or the list of links of a run
    for link in links:
        binding = link.settings.binding
        whole = (Across.MATRICES, Across.EVERYTHING) if binding.sharded else ()
        if explain_unfused(link, binding.members is not None) is not None or link.across in whole:
            parts.append(link)
        elif parts and isinstance(parts[-1], list) and not link.finds_numbers():  # type: ignore[attr-defined]
            parts[-1].append(link)
        else:
            parts.append([link])
    traced, last = {} if traced is None else traced, len(parts) - 1 if moves else -1
    return [
        FusedRun(part, i == last, traced.setdefault(tuple(part), {})) if isinstance(part, list) else LinkRun(part)
        for i, part in enumerate(parts)
    ]


class LinkRun:
    """A single link as a segment of a chain.

    Attributes:
        links: The link, in a list, as in a `FusedRun`.
    """

    def __init__(self, link: Module) -> None:
        self.links = [link]

    def run(self, objective: Objective, form: StepForm) -> Objective:
        """Run the link in a form, and check its result."""
        (link,) = self.links
        with fetched_rows(link, objective.params):
            objective = run_watched(link, objective, partial(form.run, link))
        if not isinstance(objective, Objective):
            raise TypeError(f"{link!r} returned a {type(objective).__name__}; apply must return the objective")
        if objective.checking:
            check_updates(objective, link)
        return objective

    def renew_numbers(self) -> None:
        """Do nothing: a link that is not fused reads its settings at every step."""


Segment = LinkRun | FusedRun
