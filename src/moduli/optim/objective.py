"""The record of one step that links pass on: parameters, loss, gradient, and the update so far."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Guard, allow_interrupts
from ._checks import HALVES
from ._closure import Evaluator, add_up, check_losses
from ._curvature import Curvature
from ._needs import PASS_LOSS, ClosureError, Need, keeps_graph
from ._processes import reduce_gradients
from ._vectors import fill_zeros, resolve_lazy

if TYPE_CHECKING:
    from ..population import Population
    from .optimizer import Optimizer

__all__ = ["Objective"]


_grad = operator.attrgetter("grad")
_layout = operator.attrgetter("layout")
_STRIDED = {torch.strided}


class Objective(Curvature):
    """The record of one step: the parameters, their loss and gradient (evaluated once, when first needed), and the update.

    Links read what they need and replace the update, which in the end is subtracted from the parameters.

    Args:
        params: The parameters.
        closure: Evaluates the loss; None to use `.grad`.
        loss: The loss at the parameters, if it was evaluated before.
        model: The `nn.Module` that the parameters belong to, if any.
        current_step: The number of steps before this one.
        parent: The objective that this one is a view of (a projection, a part); it gets the values evaluated here.
        modular: The optimizer.
        storage: Extra arguments of `Optimizer.step`.
        needs: The requirements of the chain, so that the first evaluation meets all of them.
        members: The number of members, where the parameters are those of a population.
        guard: Undoes the changes of links if the step fails.

    Attributes:
        reduce: Reduces the losses of several processes to one.
        updates: The update, one tensor per parameter, or None before any link has set it.
        grads: The gradient, or None while it is not evaluated.
        loss: The loss, detached, or None.
        loss_approx: A loss at a nearby point, if links evaluated only such points.
        attrs: Values that links publish; stored in `Optimizer.attrs`.
        post_step_hooks: Functions `(objective, links)` called after the parameters moved.
        stop: Whether to skip the rest of this chain.
        skip_update: Whether a link has moved the parameters itself.
        should_terminate: Whether a termination link requested to stop training.
        differentiable: Whether autograd differentiates through the step.
        present: For each parameter whether it has a gradient; None where all have.
        tail: The link that ends the optimizer's chain: it may move the parameters itself (`skip_update`).
        checking: Whether to check the results of hooks: in the first step of a plan.
        wide: Whether pointwise links leave the update of half-precision parameters in single precision, because another such
            link follows or the update is subtracted next. It is rounded once, as in a fused pass.

    Example:
        >>> import torch, moduli as mo
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> objective = mo.optim.Objective([w], mo.closure(lambda: (w**2).sum()))
        >>> objective.get_loss(backward=True), objective.grads
        (tensor(9.), [tensor([6.])])
    """

    # The values of a new objective are class attributes, since an objective is created at every step.
    updates: list[Tensor] | None = None
    grads: list[Tensor] | None = None
    stop: bool = False
    skip_update: bool = False
    should_terminate: bool | None = None
    temp: Any = None
    present: list[bool] | None = None
    differentiable: bool = False
    matrices: list[int] | None = None
    blocks: Any = None  # `MemberMatrices`, if the parameters are the matrices of a population
    accepted: tuple[list[Tensor], Tensor, list[Tensor]] | None = None
    tail: Any = None
    plan: Any = None  # the plan of the optimizer's step
    checking: bool = False
    wide: bool = False
    shards: Any = None  # `ShardedParams`, if the parameters are local shards
    local: Objective | None = None  # if they are gathered: the objective over local shards

    def __init__(
        self,
        params: Sequence[Tensor],
        closure: Callable[..., Any] | None = None,
        loss: Tensor | None = None,
        model: torch.nn.Module | Population | None = None,
        current_step: int = 0,
        parent: Objective | None = None,
        modular: Optimizer | None = None,
        storage: dict[str, Any] | None = None,
        *,
        needs: frozenset[Need] = frozenset(),
        members: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.params = params if type(params) is list else list(params)
        self.evaluator = closure if isinstance(closure, Evaluator) or closure is None else Evaluator(closure)
        self.model = model
        if self.evaluator is not None and self.evaluator.closure is not None and model is not None:
            self.evaluator.closure.model = model
        self.current_step = current_step
        self.parent = parent
        self.modular = modular
        self.needs = needs
        self.members = members
        self.loss: Tensor | None = None if loss is None else torch.as_tensor(loss).detach()
        self.loss_approx: Tensor | None = self.loss
        self.post_step_hooks: list[Callable[[Objective, Sequence[Any]], None]] = []
        self.attrs: dict[str, Any] = {}
        self.storage: dict[str, Any] = {} if storage is None else storage
        self.guard = Guard() if guard is None else guard

    # ------------------------------------------------------------------ names

    @property
    def update(self) -> list[Tensor] | None:
        """The update so far; the same as `updates`."""
        return self.updates

    @update.setter
    def update(self, value: list[Tensor] | None) -> None:
        self.updates = value

    @property
    def closure(self) -> Callable[..., Tensor] | None:
        """The closure as `closure(backward=True)`, or None; assigning one replaces it for the links that follow."""
        return None if self.evaluator is None else self._make_closure(self.evaluator)

    @closure.setter
    def closure(self, value: Callable[..., Any] | None) -> None:
        self.evaluator = None if value is None else Evaluator(value)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return self.params[0].dtype

    # ------------------------------------------------------------------ evaluation

    def _closure(self, what: str) -> Evaluator:
        """Return the evaluator; raise ClosureError if there is none, since this chain needs `what`."""
        if self.evaluator is None:
            raise ClosureError(f"this chain needs {what}, so step needs a closure: {PASS_LOSS}")
        return self.evaluator

    def _scalar(self, value: Any) -> Tensor:
        """Return the number to differentiate: the loss, half the squared residuals, or the sum over members."""
        return add_up(value, self.members, Need.RESIDUALS in self.needs)

    def _value(self, loss: Any) -> Tensor:
        """Return the loss to store: detached, reduced over processes, one per member for a population."""
        value = (self._scalar(loss) if self.members is None else check_losses(loss, self.members)).detach()
        return value if self.reduce is None else self.reduce(value)

    def list_present(self) -> list[int]:
        """Return the positions of the parameters with a gradient."""
        return [i for i in range(len(self.params)) if self.present is None or self.present[i]]

    def set_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Set the gradient; a parameter whose gradient is None does not move."""
        self.present = None
        if any(map(operator.is_, grads, itertools.repeat(None))):
            self.present = [grad is not None for grad in grads]
            grads = fill_zeros(grads, self.params)
        # Only matrices (embeddings) have sparse gradients, and a check takes 0.07 us per tensor, so vectors are not checked.
        checked = grads if self.matrices is None else [grads[i] for i in self.matrices]
        if checked and set(map(_layout, checked)) != _STRIDED:
            grads = [grad.to_dense() for grad in grads]  # type: ignore[union-attr]
        self.grads = grads  # type: ignore[assignment]

    def get_loss(
        self, backward: bool, retain_graph: bool | None = None, create_graph: bool = False, at_x0: bool = True
    ) -> Tensor:
        """Return the loss, evaluated at most once at the start of the step; at other points every call evaluates.

        Args:
            backward: Whether the gradient is wanted too.
            retain_graph: Whether to keep the graph of the loss (it is kept, if any link of the chain needs it).
            create_graph: Whether to keep the gradient differentiable.
            at_x0: False if a link has moved the parameters: nothing is stored.

        Returns:
            The loss, detached; one per member for a population.
        """
        graph = bool(retain_graph) or create_graph
        if not at_x0:
            return self._evaluate_elsewhere(backward, graph)
        if self.loss is None or (backward and self.grads is None) or (graph and self._graph is None):
            self._evaluate(backward, graph)
        if self.loss is None:
            raise ClosureError(f"the closure returned nothing, but this chain needs the loss: {PASS_LOSS}")
        return self.loss

    def _evaluate(self, backward: bool, graph: bool) -> None:
        """Evaluate the loss at the start of the step, and the gradient if it is requested or the chain needs it."""
        what = "the loss" if self.grads is not None or not backward else "the loss and its gradient"
        evaluator = self._closure(what)
        if graph or self.differentiable or keeps_graph(self.needs):
            self._evaluate_with_graph(evaluator)
        elif backward or Need.GRADIENT in self.needs:
            had_gradient = self.grads is not None
            loss = evaluator.gradient(self.params, self._scalar)
            if not had_gradient:
                self.set_gradients(list(map(_grad, self.params)))
            # Trainers that call backward themselves pass a closure that returns nothing.
            self.loss = None if loss is None else self._value(loss)
        else:
            self.loss = self._value(evaluator.value())
        self.loss_approx = self.loss
        self._pass_to_parent()

    def _evaluate_with_graph(self, evaluator: Evaluator) -> None:
        """Evaluate loss and gradient at the start of the step, and store their graphs."""
        with _keep_values(self.params) if self.differentiable else nullcontext():
            raw, grads, graph = self._evaluate_graph(evaluator)
        self.loss = self._value(raw)
        if self.differentiable:
            self.set_gradients(grads)
            return
        self._graph = graph
        if isinstance(raw, Tensor) and raw.dim() > 0 and Need.RESIDUALS in self.needs:
            self._residuals = raw
        self.set_gradients([None if grad is None else grad.detach() for grad in grads])
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.detach().clone()

    def _evaluate_graph(self, evaluator: Evaluator) -> tuple[Any, list[Tensor | None], tuple[Tensor, list[Tensor]]]:
        """Return the closure's value, the gradient with its graph, and the loss with the gradient where zeros replace None."""
        raw = evaluator.graph()
        with torch.enable_grad():
            loss = self._scalar(raw)
            with allow_interrupts():
                grads = torch.autograd.grad(loss, self.params, create_graph=True, allow_unused=True)
            reduced = reduce_gradients(self.reduce, grads, self.params)
        return raw, reduced, (loss, fill_zeros(reduced, self.params))

    def get_grads(
        self, retain_graph: bool | None = None, create_graph: bool = False, at_x0: bool = True
    ) -> list[Tensor]:
        """Return the gradient, one tensor per parameter (zeros where there is none); do not change it in place.

        Args:
            retain_graph: Whether to keep the graph of the loss.
            create_graph: Whether the gradient is differentiable.
            at_x0: False if a link has moved the parameters: nothing is stored.
        """
        return self.get_loss_grads(retain_graph, create_graph, at_x0)[1]

    def get_loss_grads(
        self, retain_graph: bool | None = None, create_graph: bool = False, at_x0: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the loss and the gradient, by one evaluation; see `get_loss` and `get_grads`.

        Args:
            retain_graph: Whether to keep the graph of the loss.
            create_graph: Whether the gradient is differentiable.
            at_x0: False if a link has moved the parameters: nothing is stored.
        """
        graph = bool(retain_graph) or create_graph
        if not at_x0:
            loss = self._evaluate_elsewhere(True, graph)
            if graph:
                return loss, [] if self._elsewhere_graph is None else self._elsewhere_graph[1]
            return loss, [grad.to_dense() for grad in fill_zeros(list(map(_grad, self.params)), self.params)]
        if self.grads is None or (graph and self._graph is None):
            self._evaluate(True, graph)
        if create_graph and self._graph is not None:
            return self.loss, self._graph[1]
        if self.grads is None:
            raise ClosureError("the gradient is not known")
        return self.loss, self.grads

    def get_updates(self) -> list[Tensor]:
        """Return the update so far, which may be changed in place; at first a copy of the gradient."""
        if self.updates is None:
            self.updates = [grad.clone() for grad in self.get_grads()]
        return self.updates

    def peek_updates(self) -> list[Tensor]:
        """Return the update so far, read-only: the gradient itself before any link has set it."""
        if self.updates is not None:
            return self.updates
        return self.get_grads() if self.grads is None else self.grads

    def _pass_to_parent(self) -> None:
        """Store the evaluated values in the parent, if there is one."""
        if self.parent is not None:
            self.parent._take_evaluations(self)

    def _take_evaluations(self, other: Objective) -> None:
        """Store the values evaluated under another objective of the same function."""
        if self.loss is None:
            self.loss = other.loss
        if self.loss_approx is None:
            self.loss_approx = other.loss_approx
        if self.grads is None and other.grads is not None and _same(self.params, other.params):
            self.grads, self.present = other.grads, other.present

    def update_parameters(self) -> None:
        """Subtract the update from the parameters, unless a link has moved them itself."""
        if self.skip_update:
            return
        updates = self.peek_updates()
        params = self.params
        if self.present is not None:
            moved = [i for i, present in enumerate(self.present) if present]
            params, updates = [params[i] for i in moved], [updates[i] for i in moved]
        if params:
            resolve_lazy(params)
            changes = [fit_update(update, param) for update, param in zip(updates, params, strict=True)]
            with torch.set_grad_enabled(self.differentiable):
                torch._foreach_sub_(params, changes)

    # ------------------------------------------------------------------ bookkeeping

    def counting(self, positions: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which reductions of `moduli.kernels` over these parameters are over all processes."""
        return nullcontext() if self.shards is None else self.shards.counting([self.params[i] for i in positions])

    def clone(self, clone_updates: bool, parent: Objective | None = None) -> Objective:
        """Return a copy for a link that drives others: same parameters and caches, own update and flags."""
        other = copy.copy(self)
        other.params, other.parent, other.temp = list(self.params), parent, None
        if self.updates is not None:
            other.updates = [tensor.clone() for tensor in self.updates] if clone_updates else list(self.updates)
        return other

    def update_attrs_from_clone_(self, other: Objective) -> None:
        """Store the results of a clone: its evaluations, and whether it requested to terminate."""
        self._take_evaluations(other)
        if self._graph is None and _same(self.params, other.params):
            self._graph, self._residuals = other._graph, other._residuals
        if other.should_terminate is not None:
            self.should_terminate = bool(self.should_terminate) or other.should_terminate
        self.skip_update = self.skip_update or other.skip_update
        self.accepted = self.accepted if other.accepted is None else other.accepted

    def terminate(self, reason: str) -> None:
        """Ask the training loop to stop, with the reason as a sentence; the request of one link is enough."""
        self.should_terminate = True
        reasons = self.attrs.setdefault("reasons", [])
        if reason not in reasons:
            reasons.append(reason)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients."""
        for param in self.params:
            param.grad = None if set_to_none or param.grad is None else torch.zeros_like(param.grad)

    def poptemp(self) -> Any:
        """Return the value that `update` left for `apply` in `temp`, and clear it."""
        value, self.temp = self.temp, None
        return value

    def apply_post_step_hooks(self, modules: Sequence[Any]) -> None:
        """Call the hooks that links registered."""
        for hook in self.post_step_hooks:
            hook(self, modules)


def fit_update(update: Tensor, param: Tensor) -> Tensor:
    """Return an update in the dtype of its parameter; for half precision one in single precision is not converted."""
    if update.dtype is param.dtype or (param.dtype in HALVES and update.dtype is torch.float32):
        return update
    return update.to(param.dtype)


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _keep_values(params: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Return a context in which autograd saves copies of the parameters, since the step writes to them later."""
    storages = {param.untyped_storage().data_ptr() for param in params}

    def pack(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
