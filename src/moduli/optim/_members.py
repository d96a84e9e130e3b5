"""Links over the members of a population: each member by itself, where a link can't take all at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._member_batches import batches, step_batched
from ._needs import ChainError, Need
from ._settings import check_members

if TYPE_CHECKING:
    from ..population import Population, Shard
    from ._binding import Binding
    from .module import Module
    from .objective import Objective
    from .optimizer import Optimizer


# The member in a name such as `0.weight[3]`.
_MEMBER = re.compile(r"\[(\d+)\]")


def lifts(link: Module) -> bool:
    """Whether a link works on all members at once: pointwise hooks, or its own way."""
    from .chain import Chain
    from .transform import TensorTransform

    if link.members in (True, "matrix") or isinstance(link, Chain):
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


def take_share(link: Module, shard: Shard | None) -> None:
    """Keep the settings of the members of this process, of those of all."""
    for key, value in _vectors(link).items():
        if shard is not None and len(value) == shard.total:
            link.defaults[key] = shard.own(value)


def _vectors(link: Module) -> dict[str, Tensor]:
    return {key: value for key, value in link.defaults.items() if isinstance(value, Tensor) and value.dim() == 1}


def join_shards(optimizer: Optimizer, shard: Shard, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state of all members, from that of the members of each process."""
    stacked, apart = _separate(saved)
    out = _map_members(optimizer, stacked, shard.join, shard.total)
    if any(apart):
        for start, (state, links) in zip(shard.starts, shard.collect(apart), strict=False):
            out["state"].update(_renumber(state, start))
            for path, kept in links.items():
                held = out["links"][path]["global"].setdefault("members", {})
                for inner, rows in kept.items():
                    held.setdefault(inner, []).extend(_renumber(rows, start))
    return out


def part_shards(optimizer: Optimizer, shard: Shard, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of the saved state of all members, that of those here."""
    if "shapes" not in saved:
        return dict(saved)  # refused where it is read
    if saved.get("members") != shard.total:
        raise ValueError(
            f"the state is of {saved.get('members') or 'no'} members, over all processes are {shard.total}"
        )
    stacked, (state, links) = _separate(saved)
    out = _map_members(optimizer, stacked, shard.part, shard.stop - shard.start)
    here = {name: row for name, row in state.items() if shard.start <= _number(name) < shard.stop}
    out["state"].update(_renumber(here, -shard.start))
    for path, kept in links.items():
        own = {inner: _renumber(shard.own(rows), -shard.start) for inner, rows in kept.items()}
        out["links"][path]["global"]["members"] = own
    return out


def _separate(saved: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[dict[str, Any], dict[str, Any]]]:
    """A saved optimizer without what links keep member by member; and that: by parameter, and by link."""
    state = {name: row for name, row in saved["state"].items() if _MEMBER.search(name)}
    links = {path: kept["global"]["members"] for path, kept in saved["links"].items() if "members" in kept["global"]}
    rest = {name: row for name, row in saved["state"].items() if name not in state}
    plain = {
        path: {**kept, "global": {key: value for key, value in kept["global"].items() if key != "members"}}
        for path, kept in saved["links"].items()
    }
    return {**saved, "state": rest, "links": plain}, (state, links)


def _number(name: str) -> int:
    """The member of a name such as `0.weight[3]`."""
    found = _MEMBER.search(name)
    return -1 if found is None else int(found[1])


def _renumber(value: Any, by: int) -> Any:
    """Plain data in which the members of names have other numbers."""
    if isinstance(value, str):
        return _MEMBER.sub(lambda found: f"[{int(found[1]) + by}]", value)
    if isinstance(value, dict):
        return {_renumber(key, by): _renumber(item, by) for key, item in value.items()}
    return [_renumber(item, by) for item in value] if isinstance(value, list) else value


def _map_members(optimizer: Optimizer, saved: dict[str, Any], act: Callable[[Any], Any], count: int) -> dict[str, Any]:
    """What is kept for members, joined or parted; not that of links that keep it for all members in every process."""
    whole = {path for path, link in optimizer._links if link.replicated}
    links = {path: kept if path in whole else act(kept) for path, kept in saved["links"].items()}
    shapes = {name: (count, *shape[1:]) for name, shape in saved["shapes"].items()}
    return {**saved, "state": act(saved["state"]), "links": links, "members": count, "shapes": shapes}


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
