"""The form of steps that autograd differentiates through: a link is run on copies, which are part of the graph.

Links work in place. So that the graphs of earlier steps keep their values, the state of a link, the update and the parameters are
copied before it runs, and the values that autograd saves for the loss are copied too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...layout import map_tensors
from .._needs import ChainError
from .plain import StepForm

if TYPE_CHECKING:
    from .. import Module, Objective


class GraphForm(StepForm):
    """The form of a step that autograd differentiates through.

    Args:
        links: The links of the chain.
        wide: Whether the last of them may leave an update of half precision in single precision (`Objective.wide`).
    """

    fuses = False

    def __init__(self, links: Sequence[Module], wide: bool) -> None:
        self._wide = iter(_find_wide(links, wide))

    def run(self, link: Module, objective: Objective) -> Objective:
        """Run a link on copies."""
        from ..chain import Chain
        from ..plan import run_links

        objective.wide = next(self._wide)
        if isinstance(link, Chain):
            outer = objective.stop
            objective = run_links(objective, link.get_children_sequence(), None, objective.wide)
            objective.stop = outer
            return objective
        _renew(link)
        link.update(objective)
        _renew(link)
        objective.updates = [update.clone() for update in objective.get_updates()]
        return link.apply(objective)


def wants_graph(tensors: Iterable[Any], links: Iterable[Module] = ()) -> bool:
    """Return whether an input of a step is differentiated: a tensor, or a setting given as one."""
    settings = [value for top in links for _, link in top.links() for value in link.defaults.values()]
    requires_grad = any(isinstance(value, Tensor) and value.requires_grad for value in (*tensors, *settings))
    return requires_grad and torch.is_grad_enabled()


def check_differentiable(links: Iterable[Module]) -> None:
    """Raise ChainError for links that would cut the graph."""
    for top in links:
        for _, link in top.links():
            if not link.differentiable:
                name = type(link).__name__
                raise ChainError(f"{name} can't be differentiated through; pointwise links, momentum and clipping can")


def copy_state(value: Any) -> Any:
    """Return a copy of a link's state whose tensors are clones in the graph of the originals."""
    return map_tensors(value, Tensor.clone, copy.deepcopy)


def _renew(link: Module) -> None:
    """Replace the state of a link and of those inside it by copies; detached ones if grad mode is off."""
    for _, part in link.links():
        for row in part.rows.values():
            row.update({key: copy_state(value) for key, value in row.items()})
        part.global_state.update({key: copy_state(value) for key, value in part.global_state.items()})


def _find_wide(links: Sequence[Module], wide: bool) -> list[bool]:
    """Return for each link whether it may leave the update in single precision.

    It may if it is pointwise or a chain, and the next link is pointwise; after the last link `wide` decides.
    """
    from ..chain import Chain
    from ..segments import explain_unfused

    pointwise = [explain_unfused(link) is None for link in links]
    can_widen = [own or isinstance(link, Chain) for own, link in zip(pointwise, links, strict=True)]
    return [own and following for own, following in zip(can_widen, [*pointwise[1:], wide], strict=True)]


def detach_all(params: Iterable[Tensor], links: Iterable[Module]) -> None:
    """Make parameters leaves again, and detach the state of links from its graphs."""
    for param in params:
        if not param.is_leaf:
            param.detach_().requires_grad_()
    for top in links:
        with torch.no_grad():
            _renew(top)
