"""Links over the members of a population: each member by itself, where a link can't take all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._needs import ChainError, Need

if TYPE_CHECKING:
    from ..population import Population
    from ._binding import Binding
    from .module import Module
    from .objective import Objective

__all__ = ["adopt", "check", "describe", "each", "lifts", "step", "takes_matrices", "views"]


def lifts(link: Module) -> bool:
    """Whether a link works on all members at once: pointwise hooks, or its own way."""
    from .chain import Chain
    from .transform import TensorTransform

    if link.members or isinstance(link, Chain):
        return True
    return isinstance(link, TensorTransform) and link.elementwise and not link.children


def takes_matrices(link: Module) -> bool:
    """Whether a link works on all parameters of all members as one N x P matrix, with everything inside it."""
    from .chain import Chain
    from .transform import TensorTransform

    if isinstance(link, TensorTransform) and link.elementwise and not link.children and not link.concat_params:
        return True
    fits = link.members == "matrix" or isinstance(link, Chain)
    return fits and all(takes_matrices(child) for child in link.children.values())


def step(link: Module, objective: Objective) -> Objective:
    """The step of one link for all members: on matrices, on the parameters in their shapes, or member by member."""
    matrices = objective.blocks
    if matrices is not None and takes_matrices(link):
        return link.step(objective)
    if matrices is not None:
        matrices.to_leaves(objective)
    out = link.step(objective) if lifts(link) else each(link, objective)
    if matrices is not None and out.blocks is None:
        matrices.to_matrices(out)
    return out


def describe(link: Module, matrices: str) -> str:
    """What a link of a population works on, in words."""
    if takes_matrices(link):
        return f"over {matrices}"
    return "over parameters stacked over members" if lifts(link) else "member by member"


def check(link: Module) -> None:
    """Refuse what neither works on all members at once nor on each by itself."""
    if lifts(link):
        for child in link.children.values():  # a link that takes all at once may drive one that can't
            check(child)
        return
    outside = next((part for _, part in link.links() if part.keeps_outside), None)
    if outside is not None:
        raise ChainError(
            f"{type(outside).__name__} keeps what it learns for one model, so it can't be run for each member of a "
            "population; use it on one model, or a link that lifts"
        )
    far = {need for need in link.all_needs() if need not in (Need.GRADIENT, Need.LOSS)}
    if far:
        wanted = " and ".join(sorted(need.value for need in far))
        raise ChainError(
            f"{type(link).__name__} needs {wanted}, which a population evaluates for all members at once; "
            "it can't be given to each member by itself. Use it on one model, or a link made for populations"
        )


def adopt(population: Population, params: Mapping[str, Tensor]) -> None:
    """Make tensors that were copied with an optimizer the parameters of the population that was copied with it.

    A population makes its parameters as views of its storage, so that of a copy is not what the optimizer's copy holds.
    """
    leaves = list(population.parameters())
    for i, (name, leaf) in enumerate(population.named_parameters()):
        param = params.get(name)
        if param is not None and param is not leaf and param.shape == leaf.shape:
            param.data = leaf.detach()
            leaves[i] = param
    population._leaves = leaves


def each(link: Module, objective: Objective) -> Objective:
    """Run a link on every member by itself, with state, counters and settings of its own."""
    from .objective import Objective as Single

    count = objective.members or 0
    binding = link.settings.binding
    rows = views(binding, objective.params, count)
    updates, grads = objective.get_updates(), objective.get_grads()
    keep: dict[str, list[dict[str, Any]]] = link.global_state.setdefault("members", {})
    inner = list(link.links())
    for path, _ in inner:
        keep.setdefault(path, [{} for _ in range(count)])
    own = [part.global_state for _, part in inner]
    done: list[Objective] = []
    losses = objective.get_loss(backward=True) if Need.LOSS in link.all_needs() else objective.loss
    try:
        for i in range(count):
            for (path, part), _ in zip(inner, own, strict=True):
                part.global_state = keep[path][i]
            if binding is not None:
                binding.member = i
            one = Single(
                rows[i],
                loss=None if losses is None else losses[i],
                current_step=objective.current_step,
                modular=objective.modular,
            )
            one.present = objective.present
            one.grads = [grad[i] for grad in grads]
            one.updates = [tensor[i].clone() for tensor in updates]
            if link.vector_state:
                link.follow(rows[i])
            one = link.step(one)
            for tensor, new in zip(updates, one.get_updates(), strict=True):
                tensor[i] = new
            done.append(one)
    finally:
        for (_, part), state in zip(inner, own, strict=True):
            part.global_state = state
        if binding is not None:
            binding.member = None
    objective.updates = updates
    # N separate runs are over when the last one is.
    if done and all(one.should_terminate for one in done):
        for reason in dict.fromkeys(reason for one in done for reason in one.attrs.get("reasons", ())):
            objective.terminate(reason)
        objective.should_terminate = True
    return objective


def views(binding: Binding | None, params: Sequence[Tensor], members: int) -> list[list[Tensor]]:
    """The members' parameters as tensors that stay the same objects, so that state can be kept for them."""
    known = binding.views if binding is not None else None
    pointers = [param.data_ptr() for param in params]
    if known is not None and known[0] == pointers:
        return known[1]
    found = [[param.detach()[i] for param in params] for i in range(members)]
    if binding is not None:
        if known is not None and [len(row) for row in known[1]] == [len(row) for row in found]:
            for old, new in zip(known[1], found, strict=True):
                for a, b in zip(old, new, strict=True):
                    a.data = b  # the storage moved, the members did not
            found = known[1]
        for i, row in enumerate(found):
            for view, param in zip(row, params, strict=True):
                binding.sources[view] = param
                binding.names[view] = f"{binding.names.get(param, '?')}[{i}]"
        binding.views = (pointers, found)
    return found
