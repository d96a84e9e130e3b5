"""Sharded parameters (DTensors of FSDP2, HSDP and tensor parallel) in the forms for links.

A step works on **local** tensors: plain tensors that share the memory of the local shards. Pointwise links need nothing else, and
links that need sums over all elements compute them by `kernels`, which reduces over processes. For a link that needs
whole tensors, each process gathers the tensors that it **owns** (work and state are spread), and sends back shards of the result;
a link that needs all parameters at once gets all of them **whole**, the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._torch import is_flat_shard
from ...kernels import reducing_over
from ...layout import (
    Guard,
    cut,
    find_box,
    find_group,
    is_sharded,
    piece_of,
    show_pieces,
)
from .._closure import Evaluator, FormEvaluator, add_up
from .._needs import Across, ChainError, keeps_graph
from .._processes import Exchange, find_across
from .plain import StepForm

if TYPE_CHECKING:
    from .. import Module, Objective, Optimizer


def are_sharded(groups: Iterable[dict[str, Any]]) -> bool:
    """Return whether any parameter of these groups is sharded."""
    return any(is_sharded(param) or is_flat_shard(param) for group in groups for param in group["params"])


def _make_locals(params: Sequence[Any], before: ShardedParams | None) -> list[Tensor]:
    """Return a plain tensor for each parameter, which shares the memory of its local shard; those of `before` are reused."""
    local_of = {} if before is None else dict(zip(before.params, before.locals, strict=True))
    for p in params:
        if p not in local_of:
            local_of[p] = torch.nn.Parameter(piece_of(p), requires_grad=p.requires_grad) if is_sharded(p) else p
    return [local_of[p] for p in params]


class ShardedParams(StepForm):
    """The parameters of an optimizer, some of which are sharded.

    Args:
        optimizer: The optimizer.
        before: The object that it replaces after parameters were added to the optimizer.

    Attributes:
        params: All parameters of the optimizer.
        locals: A plain tensor for each, which shares the memory of the local shard.
        wholes: The gathered tensors that links have used here, by position.
        exchange: Moves shards between the processes; none for FSDP1, whose shards have no shapes.
    """

    exchange: Exchange

    enters = True

    def __init__(self, optimizer: Optimizer, before: ShardedParams | None = None) -> None:
        self.slots = optimizer.binding.slots
        self.links = [link for _, link in optimizer._links]
        self.params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
        self.flat = any(map(is_flat_shard, self.params))
        self.locals: list[Tensor] = _make_locals(self.params, before)
        self.wholes: dict[int, Tensor] = {} if before is None else dict(before.wholes)
        if self.flat:
            self.group = _find_flat_group(optimizer.model, self.links)
            self.counted = [is_flat_shard(p) or torch.distributed.get_rank(self.group) == 0 for p in self.params]
        else:
            self.group = find_group(self.params)
            shapes, boxes = [tuple(p.shape) for p in self.params], [find_box(p) for p in self.params]
            self.exchange = Exchange(self.group, shapes, boxes)
            self.counted = self.exchange.counted
            if before is not None:  # the state of a tensor stays in the process that owns it
                self.exchange.owners[: len(before.params)] = before.exchange.owners
        # Root modules of FSDP2 keep gathered parameters after a forward without a backward, and would reuse stale values.
        self.modules = [] if optimizer.model is None else list(optimizer.model.modules())
        self.keeps_whole = show_pieces(self.modules)
        self._active: tuple[list[Tensor], list[Tensor]] = ([], [])
        #: The position of a parameter by its slot, which its local shard and its gathered tensor share.
        self._positions = {self.slots.number(param): i for i, param in enumerate(self.params)}
        for param, local in zip(self.params, self.locals, strict=True):
            self.slots.alias(local, self.slots.number(param))
        self.forms: dict[Module, Across] = {}
        self._find_forms(optimizer.modules, Across.NOTHING)

    def _find_forms(self, links: Iterable[Module], outer: Across) -> None:
        """Store the form of each link: local shards (`NOTHING`), owned tensors (`MATRICES`), or all tensors (`EVERYTHING`).

        Args:
            links: The links.
            outer: The form of the link that they are inside of, which they have too, unless it is `NOTHING`.
        """
        from ..reformulation import Reformulation

        for link in links:
            across = find_across(link)
            form = across if outer is Across.NOTHING and across is not Across.SUMS else outer
            self.forms[link] = form
            self._find_forms(link.children.values(), form)
            if isinstance(link, Reformulation) and form is Across.EVERYTHING and not link.children:
                outer = form  # the links after it minimise another function, of whole parameters

    def find_position(self, tensor: Tensor) -> int:
        """Return the position of the parameter of which a tensor is a form; -1 if it is none."""
        slot = self.slots.find(tensor)
        return -1 if slot is None else self._positions.get(slot, -1)

    # ------------------------------------------------------------------ a step

    def enter(self, leaves: list[Any], evaluator: Evaluator | None) -> tuple[list[Tensor], Evaluator | None]:
        """Return the local tensors of these parameters, with their gradients if there is no evaluator."""
        if self._active[0] is not leaves:
            self._active = (leaves, [self.locals[self.find_position(param)] for param in leaves])
        locals_ = self._active[1]
        for param, local in zip(leaves, locals_, strict=True):
            if local is not param:
                shard = piece_of(param)
                if shard.data_ptr() != local.data_ptr() or shard.shape != local.shape or shard.dtype != local.dtype:
                    local.data = shard  # the module was moved, or its parameters were loaded again
        if evaluator is None:
            self.take_gradients()
            return locals_, None
        return locals_, self.wrap(evaluator, leaves)

    def take_gradients(self) -> None:
        """Set the gradient of each local tensor of the step to that of its parameter."""
        for param, local in zip(*self._active, strict=True):
            if local is not param:
                grad: Any = param.grad
                if grad is not None and grad.placements != param.placements:  # type: ignore[attr-defined]
                    grad = grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
                local.grad = None if grad is None else piece_of(grad)

    def wrap(self, evaluator: Evaluator, leaves: list[Tensor]) -> Evaluator:
        """Return the evaluator of a step, whose gradients are written to parameters and then to local tensors."""

        def evaluate() -> Any:
            if self.keeps_whole:
                loss = evaluator.value()
                show_pieces(self.modules)
                return loss
            # Without `keeps_whole`, only a backward pass frees gathered parameters.
            return evaluator.gradient(leaves, lambda loss: add_up(loss, None, False))

        form = FormEvaluator(evaluator, leaves, lambda: None, self.take_gradients)
        form.ask_value = evaluate
        return form

    def counting(self, locals_: Sequence[Tensor]) -> Any:
        """Return a context in which reductions over these local tensors are over all processes."""
        return reducing_over(self.group, [self.counted[self.find_position(local)] for local in locals_])

    def run(self, link: Module, objective: Objective) -> Objective:
        """Run a link on the tensors that it needs, and return an objective over local tensors."""
        across = find_across(link)
        if across is Across.NOTHING or objective.local is not None:  # already gathered by a reformulation
            return link.step(objective)
        if across is Across.SUMS:
            # Links with hooks on tensors skip parameters without a gradient.
            has_hooks = hasattr(link, "multi_tensor_apply")
            reduced = [objective.params[i] for i in objective.list_present()] if has_hooks else objective.params
            with self.counting(reduced):
                return link.step(objective)
        return self._step_owned(link, objective) if across is Across.MATRICES else self._step_whole(link, objective)

    def leave(self, objective: Objective) -> Objective:
        """Return an objective over local tensors; a reformulation may have left one over gathered tensors."""
        if objective.local is None:
            return objective
        evaluator = objective.evaluator  # that of the reformulated loss
        local = self.to_local(objective, objective.local)
        local.evaluator = evaluator
        return local

    def _step_owned(self, link: Module, objective: Objective) -> Objective:
        """Run the link in each process on the tensors that the process owns."""
        updates = objective.peek_updates()
        positions = list(map(self.find_position, objective.params))
        moved = objective.list_present()

        def gather(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
            return self.exchange.gather({positions[k]: tensors[k].detach() for k in moved}, everywhere=False)

        # A link that does not use gradients or values of parameters gets the update in their place, which has their shapes.
        grads = values = wholes = gather(updates)
        if objective.updates is not None and any(getattr(part, "uses_grad", True) for _, part in link.links()):
            grads = gather(objective.get_grads())
        if getattr(link, "uses_params", True):
            values = gather(objective.params)
        if wholes:
            inner = objective.clone(clone_updates=False)
            inner.params = [self.keep_whole(i, values[i]) for i in wholes]
            inner.grads, inner.updates = [grads[i] for i in wholes], [tensor.clone() for tensor in wholes.values()]
            inner.present, inner.shards, inner.evaluator, inner.matrices = None, None, None, None
            wholes = dict(zip(wholes, link.step(inner).get_updates(), strict=True))
            self.release(inner.params)
        local_updates = self.exchange.from_owners(wholes, {positions[k]: updates[k] for k in moved})
        objective.updates = [local_updates.get(i, updates[k]) for k, i in enumerate(positions)]
        return objective

    def _step_whole(self, link: Module, objective: Objective) -> Objective:
        """Run the link in every process on all tensors."""
        objective._remember_start()
        inner = self.to_whole(objective)
        evaluator = inner.evaluator
        earlier_hooks = len(inner.post_step_hooks)
        out = link.step(inner)

        def call_whole(hook: Callable[..., None], objective: Objective, links: Sequence[Any]) -> None:
            inner = self.to_whole(objective)
            hook(inner, links)
            self.push(inner.params)
            self.release(inner.params)

        added_hooks = out.post_step_hooks[earlier_hooks:]
        out.post_step_hooks[earlier_hooks:] = [partial(call_whole, hook) for hook in added_hooks]
        return out if out.evaluator is not evaluator else self.to_local(out, objective)

    def to_whole(self, objective: Objective) -> Objective:
        """Return an objective over gathered tensors; its evaluator writes them to the shards before it evaluates."""
        inner = objective.clone(clone_updates=False)
        positions = list(map(self.find_position, objective.params))

        def gather(tensors: Sequence[Tensor | None]) -> list[Any]:
            detached = {i: tensor.detach() for i, tensor in zip(positions, tensors, strict=True) if tensor is not None}
            gathered = self.exchange.gather(detached, everywhere=True)
            return [gathered.get(i) for i in positions]

        def gather_gradients() -> None:
            for whole, grad in zip(inner.params, gather([p.grad for p in objective.params]), strict=True):
                whole.grad = grad

        inner.params = list(map(self.keep_whole, positions, gather(objective.params)))
        inner.grads = None if objective.grads is None else gather(objective.grads)
        inner.updates = None if objective.updates is None else gather(objective.updates)
        for i, param in enumerate(inner.params):
            param.grad = None if inner.grads is None else inner.grads[i]
        inner.shards, inner.parent, inner.matrices, inner.accepted = None, None, None, None
        inner.guard = Guard()
        inner.local = objective
        if objective.evaluator is not None:
            push = partial(self.push, inner.params)
            inner.evaluator = FormEvaluator(objective.evaluator, objective.params, push, gather_gradients)
        return inner

    def to_local(self, whole: Objective, local: Objective) -> Objective:
        """Return an objective over local shards for the gathered one that a link returned.

        Args:
            whole: The gathered objective.
            local: The objective over local shards from which it was gathered.
        """
        out = whole.clone(clone_updates=False, parent=local.parent)
        self.push(whole.params)
        boxes = [self.exchange.boxes[self.find_position(p)][self.exchange.rank] for p in whole.params]

        def cut_all(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
            return None if tensors is None else [cut(t, b).contiguous() for t, b in zip(tensors, boxes, strict=True)]

        out.params = local.params
        out.updates = cut_all(whole.updates)
        out.grads = cut_all(whole.grads) if local.grads is None else local.grads
        out.shards, out.matrices, out.guard, out.local, out.accepted = self, None, local.guard, None, None
        out.evaluator = local.evaluator
        if out.parent is not None:
            out._pass_to_parent()
        self.release(whole.params)
        return out

    @staticmethod
    def release(wholes: Sequence[Tensor]) -> None:
        """Free the memory of gathered tensors, which keep their shapes with the memory of one element."""
        for whole in wholes:
            whole.grad = None
            whole.data = torch.empty((), dtype=whole.dtype, device=whole.device).expand(whole.shape)

    def push(self, wholes: Sequence[Tensor]) -> None:
        """Write gathered tensors into the local shards."""
        exchange = self.exchange
        with torch.no_grad():
            for whole in wholes:
                i = self.find_position(whole)
                self.locals[i].copy_(cut(whole.detach(), exchange.boxes[i][exchange.rank]))

    def keep_whole(self, i: int, value: Tensor) -> Tensor:
        """Return the gathered tensor of a parameter, which is the same object at every step, with this value.

        Args:
            i: The position of the parameter.
            value: The gathered value.
        """
        whole = self.wholes.get(i)
        if whole is None:
            whole = self.wholes[i] = torch.nn.Parameter(value, requires_grad=self.params[i].requires_grad)
            self.slots.alias(whole, self.slots.number(self.params[i]))
        else:
            whole.data = value
        return whole

    # ------------------------------------------------------------------ looking

    def check(self) -> None:
        """Raise ChainError for links whose needs can't be met; called when the optimizer is built."""
        for link in self.links:
            name, across = type(link).__name__, find_across(link)
            if keeps_graph(link.needs):
                raise ChainError(
                    f"{name} needs second derivatives, which parameters in pieces (DTensor) do not have; use DDP"
                )
            if link.keeps_outside:
                raise ChainError(f"{name} keeps what it learns elsewhere, which can't be in pieces; use DDP")
            by_tensors = link.divides_params and callable(getattr(link, "filter", None))
            if self.flat and (by_tensors or across in (Across.MATRICES, Across.EVERYTHING)):
                what = "chooses parameters by a function of tensors" if by_tensors else f"needs {across.value}"
                raise ChainError(f"{name} {what}, but parameters of FSDP1 have no shapes. Use FSDP2: fully_shard(net)")


# ---------------------------------------------------------------------- FSDP1: shards of one flat vector, without shapes


def _find_flat_group(model: torch.nn.Module | None, links: Sequence[Module]) -> Any:
    """Return the process group of FSDP1 shards, which only the module knows."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    modules = () if model is None else model.modules()
    wrapped = [module for module in modules if isinstance(module, FullyShardedDataParallel)]
    groups = {id(module.process_group): module.process_group for module in wrapped}
    whole = any(module.sharding_strategy is ShardingStrategy.NO_SHARD for module in wrapped)
    if len(groups) > 1 or whole:
        how = "with ShardingStrategy.NO_SHARD" if whole else f"over {len(groups)} process groups"
        raise ChainError(f"FSDP1 {how} does not say which sums are over all parameters; use FSDP2 (fully_shard)")
    if not wrapped and any(link.across is Across.SUMS for link in links):
        raise ChainError(
            "this chain sums over the processes of FSDP1, which only its module knows; give the module itself"
        )
    return next(iter(groups.values()), None)
