"""Parameters that several processes hold in pieces (DTensors of FSDP2, HSDP and tensor parallel), as links see them.

A step works on **local** tensors: plain tensors that share the memory of the pieces. Pointwise links need nothing else, and
links that need sums over all elements find them by `kernels`, which adds up those of the processes. For a link that needs
whole tensors, each process gets some of them (**owned**: work and state are spread), and sends back the pieces of the result;
a link that needs all parameters at once is given all of them **whole**, in every process alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_flat_shard
from ..kernels import reducing_over
from ..layout import cut, find_box, find_group, is_sharded, piece_of, show_pieces
from ._evaluators import WholeEvaluator
from ._exchange import Exchange
from ._needs import Across, ChainError, keeps_graph
from ._shard_state import hollow

if TYPE_CHECKING:
    from .module import Module
    from .objective import Objective
    from .optimizer import Optimizer


def are_in_pieces(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether processes hold pieces of any of these parameters."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return any(is_sharded(param) or is_flat_shard(param) for group in groups for param in group["params"])


def find_across(link: Module) -> Across:
    """What a link and those inside it need across processes; inner links see what theirs sees, in one process as in many."""
    from .chain import Chain

    run_apart = isinstance(link, Chain) or link.divides_params  # each child by itself may need something else
    return Across.EVERYTHING if link.children and not run_apart else link.across


class ShardedParams:
    """The parameters of an optimizer of which some are in pieces.

    Args:
        optimizer: The optimizer.
        before: Those of the optimizer before parameters were added to it.

    Attributes:
        params: All parameters of the optimizer.
        locals: A plain tensor for each, with the memory of the piece that this process holds.
        wholes: The whole tensors that links have seen here, by position.
        exchange: Moves pieces between the processes; none for FSDP1, whose pieces are not known to be of any shape.
        places: The position of each parameter, by `id` of it and of the forms in which links see it.
    """

    exchange: Exchange

    def __init__(self, optimizer: Optimizer, before: ShardedParams | None = None) -> None:
        self.binding = optimizer.binding
        self.links = [link for _, link in optimizer._links]
        self.params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
        self.flat = any(map(is_flat_shard, self.params))
        known = {} if before is None else dict(zip(before.params, before.locals, strict=True))
        self.locals: list[Tensor] = [known[p] if p in known else _stand_in(p) for p in self.params]
        self.wholes: dict[int, Tensor] = {}
        self.places = {id(form): i for forms in (self.params, self.locals) for i, form in enumerate(forms)}
        if self.flat:
            self.group = _find_flat_group(optimizer.model, self.params)
            self.counted = [is_flat_shard(p) or torch.distributed.get_rank(self.group) == 0 for p in self.params]
        else:
            self.group = find_group(self.params)
            self.exchange = Exchange(
                self.group, [tuple(p.shape) for p in self.params], [find_box(p) for p in self.params]
            )
            self.counted = self.exchange.counted
        if before is not None and not self.flat:
            # What was learnt of a tensor stays where it is.
            self.exchange.owners[: len(before.params)] = before.exchange.owners
            self.wholes = dict(before.wholes)
            self.places.update({id(whole): i for i, whole in self.wholes.items()})
        # Roots of FSDP2 keep whole parameters after a forward without a backward, and would use them again.
        self.modules = [] if optimizer.model is None else list(optimizer.model.modules())
        self.keeps_whole = show_pieces(self.modules)
        self._active: tuple[list[Tensor], list[Tensor]] = ([], [])
        for param, local in zip(self.params, self.locals, strict=True):
            self._name(local, param)
        for link in self.links:
            link._state.find = self.find_state

        self.forms: dict[Module, Across] = {}
        self._find_forms(optimizer.modules, Across.NOTHING)

    def _find_forms(self, links: Iterable[Module], outer: Across) -> None:
        """Find for each link what it runs on: pieces (`NOTHING`), tensors of its own (`MATRICES`), all of them."""
        from .reformulation import Reformulation

        for link in links:
            across = find_across(link)
            own = across if outer is Across.NOTHING and across is not Across.SUMS else outer
            self.forms[link] = own
            self._find_forms(link.children.values(), own)
            if isinstance(link, Reformulation) and own is Across.EVERYTHING and not link.children:
                outer = own  # what follows descends another function, of whole parameters

    def _name(self, form: Tensor, param: Tensor) -> None:
        if form is not param:
            self.binding.sources[form] = param
            self.binding.names[form] = self.binding.names[param]

    # ------------------------------------------------------------------ a step

    def begin(self, params: list[Any], evaluated: bool) -> list[Tensor]:
        """The local tensors of these parameters for one step; with their gradients, where those are known already."""
        if self._active[0] is not params:
            self._active = (params, [self.locals[self.places[id(param)]] for param in params])
        locals_ = self._active[1]
        for param, local in zip(params, locals_, strict=True):
            if local is not param:
                piece = piece_of(param)
                if piece.data_ptr() != local.data_ptr() or piece.shape != local.shape or piece.dtype != local.dtype:
                    local.data = piece  # the module was moved, or its parameters were loaded anew
        if evaluated:
            self.take_gradients(params, locals_)
        return locals_

    @staticmethod
    def take_gradients(params: Sequence[Any], locals_: Sequence[Tensor]) -> None:
        """Give each local tensor the gradient of its parameter."""
        for param, local in zip(params, locals_, strict=True):
            if local is not param:
                grad = param.grad
                if grad is not None and grad.placements != param.placements:
                    grad = grad.redistribute(param.device_mesh, param.placements)
                local.grad = None if grad is None else piece_of(grad)

    def counting(self, locals_: Sequence[Tensor]) -> Any:
        """A block in which reductions over these tensors are over all processes."""
        return reducing_over(self.group, [self.counted[self.places[id(local)]] for local in locals_])

    def step(self, link: Module, objective: Objective) -> Objective:
        """Run a link on what it needs, and come back to local tensors."""
        across = find_across(link)
        if across is Across.NOTHING:
            return link.step(objective)
        if across is Across.SUMS:
            # Hooks on tensors see those of parameters that have a gradient.
            here = objective.present if hasattr(link, "multi_tensor_apply") else None
            seen = (
                objective.params
                if here is None
                else [p for p, kept in zip(objective.params, here, strict=True) if kept]
            )
            with self.counting(seen):
                return link.step(objective)
        return self._step_owned(link, objective) if across is Across.MATRICES else self._step_whole(link, objective)

    def _step_owned(self, link: Module, objective: Objective) -> Objective:
        """Each process runs the link on the tensors that it owns."""
        exchange = self.exchange
        updates = objective.peek_updates()
        present = objective.present
        chosen = [k for k in range(len(updates)) if present is None or present[k]]
        places = [self.places[id(param)] for param in objective.params]
        pieces = {places[k]: updates[k] for k in chosen}
        uses_grad = any(getattr(part, "uses_grad", True) for _, part in link.links())
        wholes = exchange.to_owners(pieces)
        grads = wholes
        if uses_grad and objective.updates is not None:
            given = objective.get_grads()
            grads = exchange.to_owners({places[k]: given[k] for k in chosen})
        values = wholes
        if getattr(link, "uses_params", True):
            values = exchange.to_owners({places[k]: objective.params[k].detach() for k in chosen})
        if wholes:
            inner = objective.clone(clone_updates=False)
            inner.params = [self.keep_whole(i, values[i]) for i in wholes]
            inner.grads, inner.updates = [grads[i] for i in wholes], [tensor.clone() for tensor in wholes.values()]
            inner.present, inner.shards, inner.evaluator, inner.matrices = None, None, None, None
            out = link.step(inner)
            wholes = dict(zip(wholes, out.get_updates(), strict=True))
            self.release(inner.params)
        found = exchange.from_owners(wholes, pieces)
        objective.updates = [found.get(i, updates[k]) for k, i in enumerate(places)]
        return objective

    def _step_whole(self, link: Module, objective: Objective) -> Objective:
        """Every process runs the link on all tensors."""
        objective._remember_start()
        inner = self.to_whole(objective)
        evaluator = inner.evaluator
        hooks = len(inner.post_step_hooks)
        out = link.step(inner)
        out.post_step_hooks[hooks:] = [self._on_whole(hook) for hook in out.post_step_hooks[hooks:]]
        return out if out.evaluator is not evaluator else self.to_local(out, objective)

    def _on_whole(self, hook: Callable[..., None]) -> Callable[..., None]:
        def call(objective: Objective, links: Sequence[Any]) -> None:
            inner = self.to_whole(objective)
            hook(inner, links)
            self.push(inner.params)
            self.release(inner.params)

        return call

    def to_whole(self, objective: Objective) -> Objective:
        """An objective over whole tensors; its evaluations move the pieces first."""
        inner = objective.clone(clone_updates=False)
        places = [self.places[id(param)] for param in objective.params]
        exchange = self.exchange

        def gather_tensors(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
            if tensors is None:
                return None
            return list(exchange.to_all({i: t.detach() for i, t in zip(places, tensors, strict=True)}).values())

        values = gather_tensors(objective.params) or []
        inner.params = [self.keep_whole(i, value) for i, value in zip(places, values, strict=True)]
        inner.grads, inner.updates = gather_tensors(objective.grads), gather_tensors(objective.updates)
        for i, param in enumerate(inner.params):
            param.grad = None if inner.grads is None else inner.grads[i]
        inner.shards, inner.parent, inner.matrices, inner.accepted = None, None, None, None
        inner._starts = {}
        inner.local = objective
        if objective.evaluator is not None:
            inner.evaluator = WholeEvaluator(objective.evaluator, self, objective.params)
        return inner

    def to_local(self, whole: Objective, local: Objective) -> Objective:
        """The objective that a link has made of one over whole tensors, over pieces."""
        out = whole.clone(clone_updates=False, parent=local.parent)
        self.push(whole.params)
        boxes = [self.exchange.boxes[self.places[id(p)]][self.exchange.rank] for p in whole.params]

        def cut_all(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
            return None if tensors is None else [cut(t, b).contiguous() for t, b in zip(tensors, boxes, strict=True)]

        out.params = local.params
        out.updates = cut_all(whole.updates)
        out.grads = cut_all(whole.grads) if local.grads is None else local.grads
        out.shards, out.matrices, out._starts, out.local, out.accepted = self, None, local._starts, None, None
        out.evaluator = local.evaluator
        if out.parent is not None:
            out._hand_up()
        self.release(whole.params)
        return out

    @staticmethod
    def release(wholes: Sequence[Tensor]) -> None:
        """Let go of the memory of whole tensors; their shapes stay."""
        for whole in wholes:
            whole.grad = None
            whole.data = hollow(whole, whole.device)

    def push(self, wholes: Sequence[Tensor]) -> None:
        """Write whole tensors into the pieces."""
        exchange = self.exchange
        with torch.no_grad():
            for whole in wholes:
                i = self.places[id(whole)]
                self.locals[i].copy_(cut(whole.detach(), exchange.boxes[i][exchange.rank]))

    def keep_whole(self, i: int, value: Tensor) -> Tensor:
        """The tensor that stands for a whole parameter, the same object at every step."""
        found = self.wholes.get(i)
        if found is None:
            found = self.wholes[i] = torch.nn.Parameter(value, requires_grad=self.params[i].requires_grad)
            self.places[id(found)] = i
            self._name(found, self.params[i])
        else:
            found.data = value
        return found

    # ------------------------------------------------------------------ looking

    def find_state(self, store: Any, key: Any) -> Any:
        """What a link keeps for a parameter of the optimizer, or for its name; None where it keeps nothing."""
        for i, param in enumerate(self.params):
            if param is key or (isinstance(key, str) and self.binding.names.get(param) == key):
                forms = (self.locals[i], self.wholes.get(i))
                return next((dict.__getitem__(store, form) for form in forms if form in store), None)
        return None

    def check(self) -> None:
        """Refuse links that can't have what they need; called when the optimizer is built."""
        for link in self.links:
            if keeps_graph(link.needs):
                raise ChainError(
                    f"{type(link).__name__} needs second derivatives, and parameters here are in pieces (DTensor, as "
                    "fully_shard makes them), through which a loss can be differentiated once. Train with "
                    "DistributedDataParallel, or use a link that needs the gradient only"
                )
            if link.keeps_outside:
                raise ChainError(
                    f"{type(link).__name__} keeps what it learns outside of the optimizer, which can't be spread over "
                    "processes; train with DistributedDataParallel"
                )
        if self.flat:
            _check_flat(self.links)


def _stand_in(param: Any) -> Tensor:
    if not is_sharded(param):
        return param  # type: ignore[no-any-return]
    return torch.nn.Parameter(piece_of(param), requires_grad=param.requires_grad)


# ---------------------------------------------------------------------- FSDP1: pieces of one flat vector, without shapes


def _find_flat_group(model: torch.nn.Module | None, params: Sequence[Tensor]) -> Any:
    """The processes that hold the pieces; all of them (None) where no module of FSDP1 is known and all hold other ones."""
    modules = () if model is None else model.modules()
    groups = {id(group): group for module in modules if (group := _find_group(module)) is not None}
    if len(groups) > 1:
        raise ChainError(
            f"the FSDP1 modules of {type(model).__name__} are sharded over {len(groups)} process groups, so that no sum is over "
            "all parameters; use FSDP2 (fully_shard)"
        )
    if not groups:
        _check_pieces([param.detach() for param in params if is_flat_shard(param)])
    return next(iter(groups.values()), None)


def _check_pieces(pieces: Sequence[Tensor]) -> None:
    """Refuse pieces that several processes hold alike: only the module knows which sums are over all of them once."""
    own = [(tuple(piece.shape), piece.flatten()[:64].tolist()) for piece in pieces if piece.numel()]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    held = [each for each in every if each]
    if any(held.index(each) != i for i, each in enumerate(held)):
        raise ChainError(
            "several processes hold the same pieces of the flat vectors of FSDP1 (ShardingStrategy.HYBRID_SHARD or NO_SHARD), "
            "so that sums over processes would count them more than once; give the module itself instead of its parameters"
        )


def _find_group(module: torch.nn.Module) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    if not isinstance(module, FullyShardedDataParallel):
        return None
    if module.sharding_strategy is ShardingStrategy.NO_SHARD:
        raise ChainError(
            "FSDP1 with ShardingStrategy.NO_SHARD keeps whole parameters under flat ones; use DistributedDataParallel, or "
            "FSDP2 (fully_shard)"
        )
    return module.process_group


def _check_flat(links: Sequence[Module]) -> None:
    """Refuse links that need the shapes of tensors, or whole ones."""
    for link in links:
        if link.divides_params and callable(getattr(link, "filter", None)):
            raise ChainError(
                f"{type(link).__name__} chooses parameters by a function of tensors, but those here are pieces of the flat "
                "vectors of FSDP1 (FullyShardedDataParallel), which have no shapes. Give a pattern of names, such as "
                "'*.weight', or use FSDP2: torch.distributed.fsdp.fully_shard(net)"
            )
        across = find_across(link)
        if across in (Across.MATRICES, Across.EVERYTHING):
            raise ChainError(
                f"{type(link).__name__} needs {across.value}, but parameters here are pieces of the flat vectors of FSDP1 "
                "(FullyShardedDataParallel), which have no shapes. Use FSDP2: torch.distributed.fsdp.fully_shard(net)"
            )
