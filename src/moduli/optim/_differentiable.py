"""Steps that autograd sees through: nothing that a graph holds is written to.

Links work in place. So that the graphs of earlier steps keep their values, a link is run on copies (which are part of the
graph) of what it remembers, of the update and of the parameters, and what the loss saves of the parameters is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import map_tensors
from ._needs import ChainError

if TYPE_CHECKING:
    from .module import Module
    from .objective import Objective


def wants_graph(tensors: Iterable[Any], links: Iterable[Module] = ()) -> bool:
    """Whether anything that goes into a step is differentiated: a tensor, or a setting given as one."""
    if not torch.is_grad_enabled():
        return False
    settings = [value for top in links for _, link in top.links() for value in link.defaults.values()]
    return any(isinstance(value, Tensor) and value.requires_grad for value in (*tensors, *settings))


def check(links: Iterable[Module]) -> None:
    """Refuse links that would cut the graph."""
    for top in links:
        for path, link in top.links():
            if not link.differentiable:
                where = f" (at {path})" if path else ""
                raise ChainError(
                    f"{type(link).__name__}{where} can't be differentiated through; pointwise links, momentum and clipping can. "
                    "Use it with tensors that require no gradient, or under torch.no_grad()"
                )


def copy_state(value: Any) -> Any:
    """A copy of what a link remembers, with the graphs of its tensors."""
    return map_tensors(value, Tensor.clone, copy.deepcopy)


def _renew(link: Module) -> None:
    for _, part in link.links():
        for row in part.state.values():
            row.update({key: copy_state(value) for key, value in row.items()})
        part.global_state.update({key: copy_state(value) for key, value in part.global_state.items()})


def run(objective: Objective, links: Sequence[Module]) -> Objective:
    """Each link in turn, on copies."""
    from .chain import Chain

    for link in links:
        if isinstance(link, Chain):
            outer = objective.stop
            objective = run(objective, link.get_children_sequence())
            objective.stop = outer
            continue
        _renew(link)
        link.update(objective)
        _renew(link)
        objective.updates = [update.clone() for update in objective.get_updates()]
        objective = link.apply(objective)
        if objective.stop:
            break
    return objective


def begin(params: Iterable[Tensor]) -> None:
    """Make leaves part of a graph, so that a step can write into them; values and objects stay the same."""
    for param in params:
        if param.is_leaf and param.requires_grad:
            origin = param.detach().clone().requires_grad_()
            param.requires_grad_(False)
            param.copy_(origin)


def detach_all(params: Iterable[Tensor], links: Iterable[Module]) -> None:
    """Parameters become leaves again, and what links remember forgets where it came from."""
    for param in params:
        if not param.is_leaf:
            param.detach_().requires_grad_()
    for top in links:
        with torch.no_grad():
            _renew(top)


def keep_values(params: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A block in which what a graph saves of the parameters is copied: they are written to after it."""
    theirs = {param.untyped_storage().data_ptr() for param in params}

    def pack(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in theirs else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
