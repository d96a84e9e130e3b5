"""A link that is written for one model, run for all members of a population in one vectorised call.

State is kept stacked over members, for the population's parameters; inside the call the link sees that of one member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import pytree
from ._needs import Need
from ._settings import is_per_member
from ._state import StateStore

if TYPE_CHECKING:
    from .module import Module
    from .objective import Objective


def batches(link: Module) -> bool:
    """Whether all members are given to a link at once, as it declares, each as if it were alone.

    Not where settings inside it differ from member to member, nor where its state was read from a checkpoint that has it
    member by member.
    """
    return _fits(link) and "members" not in link.global_state and not any(_differs(part) for _, part in link.links())


def _fits(link: Module) -> bool:
    """Whether a link and everything inside it can be vectorised."""
    from .chain import Chain
    from .transform import TensorTransform

    pointwise = isinstance(link, TensorTransform) and link.elementwise
    fits = link.members == "batched" or pointwise or isinstance(link, Chain)
    return fits and all(_fits(child) for child in link.children.values())


def _differs(link: Module) -> bool:
    layers: list[dict[str, Any]] = [link.defaults, *link.settings.overrides, *link.settings.local.values()]
    return any(is_per_member(value) for layer in layers for value in layer.values())


def step_batched(link: Module, objective: Objective) -> Objective:
    """The step of a link for all members, by `torch.vmap`. State is replaced at the end, so that a failure changes none."""
    parts = [part for _, part in link.links()]
    params = objective.params
    losses = objective.get_loss(backward=True) if Need.LOSS in link.all_needs() else objective.loss
    updates, grads = objective.get_updates(), objective.get_grads()
    given, shape = _flatten([([dict(part.state[param]) for param in params], part.global_state) for part in parts])
    held = [tensor.clone() for tensor in given]
    left: list[Any] = []

    def one(
        rows: list[Tensor], changes: list[Tensor], slopes: list[Tensor], loss: Tensor | None, known: list[Tensor]
    ) -> Any:
        single = _make_member_objective(objective, rows, changes, slopes, loss)
        kept = _unflatten(known, shape)
        found, made = _run(link, parts, params, single, kept)
        flat, left[:] = _flatten(made)
        return found, flat

    count = len(params[0])
    leaves = [param.detach() for param in params]
    # Links with a seed draw the same for every member where members run one after the other, too.
    mapped = torch.vmap(one, (0, 0, 0, None if losses is None else 0, 0), randomness="same")
    made: tuple[list[Tensor], list[Tensor]] = mapped(leaves, [u.clone() for u in updates], grads, losses, held)
    objective.updates = [tensor if tensor.stride(0) or count == 1 else tensor.clone() for tensor in made[0]]
    for part, (rows, shared) in zip(parts, _unflatten(made[1], left), strict=True):
        for param, row in zip(params, rows, strict=True):
            part._state[param] = row
        part.global_state.clear()
        part.global_state.update(shared)
    return objective


def _make_member_objective(
    objective: Objective, rows: list[Tensor], changes: list[Tensor], slopes: list[Tensor], loss: Tensor | None
) -> Objective:
    """The objective of one member."""
    from .objective import Objective as Single

    single = Single(rows, loss=loss, current_step=objective.current_step, modular=objective.modular)
    single.present, single.grads, single.updates = objective.present, list(slopes), list(changes)
    return single


def _run(
    link: Module, parts: Sequence[Module], params: Sequence[Tensor], single: Objective, kept: Sequence[Any]
) -> tuple[list[Tensor], list[Any]]:
    """The step of one member: its update, and what every part of the link then keeps for it."""
    binding = link.settings.binding
    before = [(part._state, part.global_state) for part in parts]
    rows = single.params
    fused = binding is not None and binding.fuse
    try:
        for part, (states, shared) in zip(parts, kept, strict=True):
            part._state, part.global_state = StateStore(), shared
            for row, state in zip(rows, states, strict=True):
                part._state[row] = state
        if binding is not None:
            binding.fuse = False  # a run is compiled for tensors that stay
            for row, param in zip(rows, params, strict=True):
                binding.sources[row], binding.names[row] = param, binding.names.get(param, "?")
        with _OutOfPlace():
            found = link.step(single).get_updates()
        made = [([dict(part.state[row]) for row in rows], part.global_state) for part in parts]
        return list(found), made
    finally:
        if binding is not None:
            binding.fuse = fused
            for row in rows:
                binding.sources.pop(row, None)
                binding.names.pop(row, None)
        for part, (state, shared) in zip(parts, before, strict=True):
            part._state, part.global_state = state, shared


class _OutOfPlace(TorchFunctionMode):
    """Runs in-place operations for which `torch.vmap` would loop over the members by those for which it does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _PLAIN.get(func)
        if plain is None:
            return func(*args, **(kwargs or {}))
        return args[0].copy_(plain(*args, **(kwargs or {})))


_PLAIN: dict[Any, Any] = {
    Tensor.lerp_: torch.lerp,
    Tensor.addcmul_: torch.addcmul,
    Tensor.addcdiv_: torch.addcdiv,
    Tensor.addmm_: torch.addmm,
    Tensor.baddbmm_: torch.baddbmm,
}


def _flatten(held: Any) -> tuple[list[Tensor], Any]:
    """The tensors of nested data, and the rest of it."""
    leaves, spec = pytree.tree_flatten(held)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [spec, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]]


def _unflatten(tensors: Sequence[Tensor], rest: Any) -> Any:
    spec, others = rest
    items = iter(tensors)
    return pytree.tree_unflatten([next(items) if other is None else other[0] for other in others], spec)
