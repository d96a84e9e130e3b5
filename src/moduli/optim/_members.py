"""Links over the members of a population: each member by itself, where a link can't take all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import pytree
from ._needs import ChainError, Need
from ._settings import check_members
from ._state import lend_state

if TYPE_CHECKING:
    from ..population import Population, Shard
    from ._settings import Binding
    from .module import Module
    from .objective import Objective


def _is_chain(link: Module) -> bool:
    from .chain import Chain

    return isinstance(link, Chain)


def _is_pointwise(link: Module) -> bool:
    return getattr(link, "elementwise", False)


def lifts(link: Module) -> bool:
    """Whether a link works on all members at once: pointwise hooks, or its own way."""
    return link.members in (True, "matrix") or _is_chain(link) or (_is_pointwise(link) and not link.children)


def takes_matrices(link: Module) -> bool:
    """Whether a link works on all parameters of all members as one N x P matrix, with everything inside it."""
    if _is_pointwise(link) and not link.children and not link.concat_params:  # type: ignore[attr-defined]
        return True
    fits = link.members == "matrix" or _is_chain(link)
    return fits and all(takes_matrices(child) for child in link.children.values())


def step(link: Module, objective: Objective) -> Objective:
    """The step of one link for all members: on matrices, on the parameters in their shapes, or member by member."""
    matrices = objective.blocks
    if matrices is not None and takes_matrices(link):
        return link.step(objective)
    if matrices is not None:
        matrices.to_leaves(objective)
    if lifts(link):
        out = link.step(objective)
    else:
        out = step_batched(link, objective) if batches(link) else run_each(link, objective)
    if matrices is not None and out.blocks is None:
        matrices.to_matrices(out)
    return out


def describe(link: Module, matrices: str) -> str:
    """What a link of a population works on, in words."""
    if takes_matrices(link):
        return f"over {matrices}"
    if not lifts(link):
        return "over parameters stacked over members, by vmap" if batches(link) else "member by member"
    alone = dict.fromkeys(type(part).__name__ for part in _find_alone(link))
    return "over parameters stacked over members" + (f", {' and '.join(alone)} member by member" if alone else "")


def _find_alone(link: Module) -> list[Module]:
    """The links inside a link that are run for each member by itself."""
    children = list(link.children.values())
    own = [child for child in children if not (lifts(child) or batches(child))]
    return own + [part for child in children if lifts(child) for part in _find_alone(child)]


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


def check_link(path: str, link: Module, count: int, shard: Shard | None) -> None:
    """Refuse other numbers of settings than members, and links that can't compare members of several processes."""
    if shard is not None and Need.MEMBERS in link.needs and not link.over_processes:
        raise ChainError(
            f"{path} compares the members of a population, which are spread over processes here, and can't do that yet. "
            "PSO, DE, GA, CEM and PBT can; or search with mo.search(..., executor=...)"
        )
    taken = shard is not None and all(len(value) == count for value in _vectors(link).values())
    check_members(path, link.defaults, count if shard is None or taken else shard.total)


def take_share(link: Module, shard: Shard) -> None:
    """Keep the settings of the members of this process, of those of all."""
    for key, value in _vectors(link).items():
        if len(value) == shard.total:
            link.defaults[key] = shard.own(value)


def _vectors(link: Module) -> dict[str, Tensor]:
    return {key: value for key, value in link.defaults.items() if isinstance(value, Tensor) and value.dim() == 1}


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


def run_each(link: Module, objective: Objective) -> Objective:
    """Run a link on every member by itself, with state, counters and settings of its own."""
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
            for path, part in inner:
                part.global_state = keep[path][i]
            if binding is not None:
                binding.member = i
            changes, slopes = [tensor[i].clone() for tensor in updates], [grad[i] for grad in grads]
            one = _make_member_objective(objective, rows[i], changes, slopes, None if losses is None else losses[i])
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


# ---------------------------------------------------------------------- all members in one vectorised call


def batches(link: Module) -> bool:
    """Whether all members are given to a link at once, as it declares, each as if it were alone.

    Not where settings inside it differ from member to member, nor where its state was read from a checkpoint that has it
    member by member.
    """
    return (
        _fits(link)
        and "members" not in link.global_state
        and not any(part.settings.are_per_member() for _, part in link.links())
    )


def _fits(link: Module) -> bool:
    """Whether a link and everything inside it can be vectorised."""
    fits = link.members == "batched" or _is_pointwise(link) or _is_chain(link)
    return fits and all(_fits(child) for child in link.children.values())


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
    rows = single.params
    fused = binding is not None and binding.fuse
    try:
        if binding is not None:
            binding.fuse = False  # a run is compiled for tensors that stay
            for row, param in zip(rows, params, strict=True):
                binding.sources[row], binding.names[row] = param, binding.names.get(param, "?")
        with lend_state(parts, rows, kept), _OutOfPlace():
            found = link.step(single).get_updates()
            return list(found), [([dict(part.state[row]) for row in rows], part.global_state) for part in parts]
    finally:
        if binding is not None:
            binding.fuse = fused
            for row in rows:
                binding.sources.pop(row, None)
                binding.names.pop(row, None)


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
