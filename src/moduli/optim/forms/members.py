"""Links over the members of a population: on all members at once, or on each separately; and the saved form of their state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._torch import pytree
from ...layout import map_tensors
from .._needs import ChainError, Need
from .._settings import check_values, is_per_member
from .._vectorize import OutOfPlace, flatten_tensors, unflatten_tensors
from ..state import replace_state
from ..state_encoding import MEMBERS, MemberValues
from .plain import StepForm

if TYPE_CHECKING:
    from ...population import Population, Shard
    from .. import Module, Objective, Optimizer
    from ..slots import Slots


def _is_chain(link: Module) -> bool:
    from ..chain import Chain

    return isinstance(link, Chain)


def _is_pointwise(link: Module) -> bool:
    return getattr(link, "elementwise", False)


def lifts(link: Module) -> bool:
    """Return whether a link works on all members at once: by pointwise hooks, or as it declares."""
    return link.members in (True, "matrix") or _is_chain(link) or (_is_pointwise(link) and not link.children)


def takes_matrices(link: Module) -> bool:
    """Return whether a link and its children work on all parameters of all members as one N x P matrix."""
    if _is_pointwise(link) and not link.children and not link.concat_params:  # type: ignore[attr-defined]
        return True
    fits = link.members == "matrix" or _is_chain(link)
    return fits and all(takes_matrices(child) for child in link.children.values())


class MembersForm(StepForm):
    """Parameters of a population: all members at once, as matrices or stacked, or each member separately."""

    def run(self, link: Module, objective: Objective) -> Objective:
        """Run one link for all members: on matrices, on the parameters in their shapes, or member by member."""
        matrices = objective.blocks
        if matrices is not None and takes_matrices(link):
            return link.step(objective)
        if matrices is not None:
            matrices.to_leaves(objective)
        out = link.step(objective) if lifts(link) else step_each(link, objective)
        if matrices is not None and out.blocks is None:
            matrices.to_matrices(out)
        return out

    def describe(self, link: Module) -> str:
        """Return a description of the tensors that a link of a population works on."""
        if takes_matrices(link):
            return f"over {self.name_tensors()}"
        return "member by member" if _is_alone(link) else "over parameters stacked over members"

    def name_tensors(self) -> str:
        """Return a description of the tensors for links that take matrices."""
        return "parameters stacked over members"


MEMBERS_FORM = MembersForm()


def _is_alone(link: Module) -> bool:
    """Return whether a link, or one inside it, is run for one member after the other."""
    if lifts(link):
        return any(map(_is_alone, link.children.values()))
    return not batches(link)


def check(link: Module) -> None:
    """Raise ChainError for links that work neither on all members at once nor on each separately."""
    if lifts(link):
        for child in link.children.values():
            check(child)
        return
    outside = next((part for _, part in link.links() if part.keeps_outside), None)
    if outside is not None:
        raise ChainError(f"{type(outside).__name__} keeps what it learns for one model; a population has many")
    unmet = {need for need in link.all_needs() if need not in (Need.GRADIENT, Need.LOSS)}
    if unmet:
        wanted = " and ".join(sorted(need.value for need in unmet))
        raise ChainError(f"{type(link).__name__} needs {wanted}, which there is for one model, not for a population")


def check_link(path: str, link: Module, count: int, shard: Shard | None) -> None:
    """Raise an error for a wrong number of per-member settings, and for links that can't compare members across processes.

    Args:
        path: The path of the link, for errors.
        link: The link.
        count: The number of members here.
        shard: The members of this process, if they are spread over processes.
    """
    if shard is not None and Need.MEMBERS in link.needs and not link.over_processes:
        raise ChainError(f"{path} compares members, which are spread over processes; PSO, DE, GA, CEM and PBT can")
    # Settings may have a number for each member here, or for each of all processes, until the optimizer slices them.
    sliced = all(len(value) == count for value in link.defaults.values() if is_per_member(value))
    check_values(path, link.defaults, count if shard is None or sliced else shard.total)


def adopt(population: Population, slots: Slots) -> None:
    """Make the tensors of a copied optimizer the parameters of the population that was copied with it.

    A population creates its parameters as views of its storage, so its copy has other tensors than the optimizer's copy.

    Args:
        population: The copied population.
        slots: The slots of the copied optimizer.
    """
    params = dict(zip(slots.names, slots.params, strict=True))
    leaves = list(population.parameters())
    for i, (name, leaf) in enumerate(population.named_parameters()):
        param = params.get(name)
        if param is not None and param is not leaf and param.shape == leaf.shape:
            param.data = leaf.detach()
            leaves[i] = param
    population._leaves = leaves


def take_member(row: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the state of one member, from the state of all."""
    own = {name: value[i] for name, value in row.items() if isinstance(value, MemberValues) and i in value}
    stacked = {name: value for name, value in row.items() if not isinstance(value, MemberValues)}
    return {**map_tensors(stacked, lambda tensor: tensor[i].clone(), copy.deepcopy), **own}


def stack_members(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of all members, from that of each: tensors stacked, equal values once, others as `MemberValues`."""
    stacked: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = MemberValues({i: row[name] for i, row in enumerate(rows) if name in row})
        flat = [pytree.tree_flatten(value) for value in values.values()]
        columns = list(map(_stack, zip(*(leaves for leaves, _ in flat), strict=False)))
        alike = len(values) == len(rows) and all(spec == flat[0][1] for _, spec in flat)
        alike = alike and all(column is not _RAGGED for column in columns)
        stacked[name] = pytree.tree_unflatten(columns, flat[0][1]) if alike else values
    return stacked


_RAGGED = object()


def _stack(values: Sequence[Any]) -> Any:
    """Return the values of members as one: a stack of tensors, or the value that all have; `_RAGGED` if there is none."""
    first = values[0]
    if isinstance(first, Tensor):
        kinds = {(value.shape, value.dtype) if isinstance(value, Tensor) else None for value in values}
        return torch.stack(list(values)) if len(kinds) == 1 else _RAGGED
    if isinstance(first, torch.Generator):
        return first if len({bytes(value.get_state().tolist()) for value in values}) == 1 else _RAGGED
    return first if all(type(value) is type(first) and value == first for value in values) else _RAGGED


def batches(link: Module) -> bool:
    """Return whether a link is run for all members in one vectorised call.

    It is not if settings differ between members that a link inside it does not list in `member_settings`, or if the states of
    members have different shapes.
    """
    parts = [part for _, part in link.links()]
    rows = [row for part in parts for row in (part.global_state, *part.rows.values())]
    ragged = any(isinstance(value, MemberValues) for row in rows for value in row.values())
    varied = all(key in part.member_settings for part in parts for key, _ in part.settings.find_per_member())
    return _fits(link) and not ragged and varied


def _fits(link: Module) -> bool:
    """Return whether a link and everything inside it can be vectorised."""
    fits = link.members == "batched" or _is_pointwise(link) or _is_chain(link)
    return fits and all(_fits(child) for child in link.children.values())


def step_each(link: Module, objective: Objective) -> Objective:
    """Return the objective after a link's step for each member separately: in one call of `torch.vmap`, or in turn."""
    updates, grads = objective.get_updates(), objective.get_grads()
    # As for one model, links that do not need the loss see it where the gradients were evaluated with it.
    losses = objective.get_loss(backward=True) if Need.LOSS in link.all_needs() else objective.loss
    step = _MemberStep(link, objective)
    run = step.run_batched if batches(link) else step.run_in_turn
    objective.updates, states = run((updates, grads, losses), step.copy_states())
    for part, (rows, shared) in zip(step.parts, states, strict=True):
        part.rows.update((slot, part.make_row(row)) for slot, row in rows.items())
        part.row_writes.add()
        part.global_state.clear()
        part.global_state.update(shared)
    # The members are separate runs, so training ends with the last of them.
    if step.results and all(result.should_terminate for result in step.results):
        for reason in dict.fromkeys(reason for result in step.results for reason in result.attrs.get("reasons", ())):
            objective.terminate(reason)
        objective.should_terminate = True
    return objective


_Inputs = tuple[list[Tensor], list[Tensor], Tensor | None]
"""Updates, gradients and loss."""
_State = tuple[dict[int, dict[str, Any]], dict[str, Any]]
"""The rows of a link by slot, and its global state."""


class _MemberStep:
    """A step of a link for each member separately.

    Args:
        link: The link.
        objective: The objective of all members.

    Attributes:
        parts: The link and those inside it.
        results: The objective of each call of the link.
    """

    def __init__(self, link: Module, objective: Objective) -> None:
        self.link, self.objective = link, objective
        self.parts = [part for _, part in link.links()]
        self.slots = list(map(link.settings.binding.slots.number, objective.params))
        self.results: list[Objective] = []

    def copy_states(self) -> list[_State]:
        """Return the state of each link, with new dictionaries for its rows."""
        return [({slot: dict(row) for slot, row in part.rows.items()}, part.global_state) for part in self.parts]

    def run(
        self, take: Callable[[Tensor], Any], params: list[Tensor], inputs: _Inputs, states: Sequence[_State]
    ) -> tuple[list[Tensor], list[_State]]:
        """Return the update and the states after a step of one member.

        Args:
            take: Returns the number of the member from one number for each member.
            params: Its parameters.
            inputs: Its update, gradient and loss.
            states: The state of each link.
        """
        from ..objective import Objective as MemberObjective

        link, outer = self.link, self.objective
        updates, grads, loss = inputs
        inner = MemberObjective(params, loss=loss, current_step=outer.current_step, modular=outer.modular)
        inner.checking = outer.checking
        inner.present, inner.updates, inner.grads = outer.present, list(updates), list(grads)
        slots = link.settings.binding.slots
        with _run_alone(link, take), slots.show(params, self.slots), replace_state(self.parts, states):
            if link.vector_state:
                link.follow(params)
            result = link.step(inner)
            self.results.append(result)
            return list(result.get_updates()), self.copy_states()

    def run_in_turn(self, inputs: _Inputs, states: Sequence[_State]) -> tuple[list[Tensor], list[_State]]:
        """Return the updates and the states of all members, after a call for each."""
        updates, grads, losses = inputs
        changes, states_after = [], []
        for i in range(self.objective.members or 0):
            own = [tensor[i].clone() for tensor in updates], [grad[i] for grad in grads]
            before = [
                ({slot: take_member(row, i) for slot, row in rows.items()}, take_member(shared, i))
                for rows, shared in states
            ]
            params = [param.detach()[i] for param in self.objective.params]
            loss = None if losses is None else losses[i]
            change, after = self.run(partial(_take_number, i), params, (*own, loss), before)
            changes.append(change)
            states_after.append(after)
        stacked = [torch.stack(tensors) for tensors in zip(*changes, strict=True)]
        return stacked, [_stack_states(of_members) for of_members in zip(*states_after, strict=True)]

    def run_batched(self, inputs: _Inputs, states: Sequence[_State]) -> tuple[list[Tensor], list[_State]]:
        """Return the updates and the states of all members, after one vectorised call.

        Random numbers are the same for every member.
        """
        flat, structure = flatten_tensors(states)
        structure_after: list[Any] = []
        # Also those of other links: Prodigy reads the step sizes that follow it.
        modular = self.objective.modular
        links = self.parts if modular is None else [part for _, part in modular._links]
        numbers = [value for part in links for _, value in part.settings.find_per_member()]

        def step_member(
            params: list[Tensor],
            updates: list[Tensor],
            grads: list[Tensor],
            loss: Any,
            leaves: list[Tensor],
            own_numbers: list[Tensor],
        ) -> Any:
            by_value = dict(zip(map(id, numbers), own_numbers, strict=True))
            before = unflatten_tensors(leaves, structure)
            with OutOfPlace():
                changes, states_after = self.run(
                    lambda value: by_value[id(value)], params, (updates, grads, loss), before
                )
            tensors, structure_after[:] = flatten_tensors(states_after)
            return changes, tensors

        updates, grads, losses = inputs
        params, own = [param.detach() for param in self.objective.params], [tensor.clone() for tensor in flat]
        mapped = torch.vmap(step_member, (0, 0, 0, None if losses is None else 0, 0, 0), randomness="same")
        changes, leaves = mapped(params, [update.clone() for update in updates], grads, losses, own, numbers)
        # Results that do not depend on the member are expanded views, but links write into updates.
        writable = [tensor if tensor.stride(0) or len(tensor) == 1 else tensor.clone() for tensor in changes]
        return writable, unflatten_tensors(leaves, structure_after)


def _take_number(i: int, value: Tensor) -> float:
    return value[i].item()


def _stack_states(states: Sequence[_State]) -> _State:
    """Return the state of a link for all members, from that of each."""
    rows = {slot: stack_members([own[slot] for own, _ in states]) for slot in states[0][0]}
    return rows, stack_members([shared for _, shared in states])


@contextmanager
def _run_alone(link: Module, member: Callable[[Tensor], Any]) -> Iterator[None]:
    """Run a link and those inside it unfused, on one member, for a block."""
    binding = link.settings.binding
    # Fused runs are bound to the tensors of all members.
    fused, binding.fuse, binding.member = binding.fuse, False, member
    try:
        yield
    finally:
        binding.fuse, binding.member = fused, None


# ---------------------------------------------------------------------- saved


def shard_saved(optimizer: Optimizer, shard: Shard, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state of the members here, from that of all.

    Args:
        optimizer: The optimizer.
        shard: The members of this process.
        saved: The saved state of all members.
    """
    if "shapes" not in saved:
        return dict(saved)  # `read` raises for it
    if saved.get("members") != shard.total:
        raise ValueError(f"the state is of {saved.get('members') or 'no'} members, here are {shard.total}")
    return map_saved(optimizer, shard, saved, shard.part, shard.stop - shard.start)


def map_saved(
    optimizer: Optimizer, shard: Shard, saved: Mapping[str, Any], act: Callable[[Any], Any], count: int
) -> dict[str, Any]:
    """Gather or shard per-member state; skip the state of replicated links.

    Args:
        optimizer: The optimizer.
        shard: The members of this process.
        saved: The saved state.
        act: Gathers or shards nested data.
        count: The number of members after it.
    """
    if any(shard.collect(_has_member_values(saved["state"]) or _has_member_values(saved["links"]))):
        raise TypeError("what members keep has another shape for each, which several processes can't save or load")
    replicated = {path for path, link in optimizer._links if link.replicated}
    return {
        **saved,
        "state": act(saved["state"]),
        "links": {path: own if path in replicated else act(own) for path, own in saved["links"].items()},
        "members": count,
        "shapes": {name: (count, *shape[1:]) for name, shape in saved["shapes"].items()},
    }


def _has_member_values(value: Any) -> bool:
    """Return whether plain data has a separate value for each member, which can't be stacked."""
    return isinstance(value, dict) and (MEMBERS in value or any(map(_has_member_values, value.values())))
