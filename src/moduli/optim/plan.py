"""The plan of a step, the check that it still matches, and the step itself.

A plan is made again when it does not match any more. Changes to a group, to the defaults of a link, to one of its declarations
or to state that a fused pass is bound to are counted (`Writes`), so that a step compares one number. The parameters and their
`requires_grad` flags are compared one by one, since torch lets programs write into the lists of the groups. A number that
replaces a number (a learning rate that a scheduler writes) is read again and does not invalidate a plan.

A step creates an objective, passes it through the links, and subtracts the update from the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import REMOVED, Guard
from ._closure import Evaluator, FormEvaluator, negate_gradients
from ._following import check_removed
from ._fusion import Traced
from ._groups import apply_groups
from ._needs import PASS_LOSS, ClosureError, Need
from ._writes import CountedDict
from .forms import MEMBERS_FORM, PLAIN, GraphForm, StepForm
from .objective import Objective
from .segments import LinkRun, Segment, make_segments
from .transform import TensorTransform

if TYPE_CHECKING:
    from . import Module, Optimizer

_grad = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")


class StepPlan:
    """The precomputed part of an optimizer's steps, valid until something other than a number changes.

    Args:
        optimizer: The optimizer.
        before: The plan that it replaces; its traced kernels are reused.

    Attributes:
        active: The parameters that require a gradient, in the order of the groups.
        matrices: The positions in `active` of parameters with two axes or more.
        form: The form in which links get the parameters.
        checked: Whether a step with this plan has checked the results of hooks.
    """

    def __init__(self, optimizer: Optimizer, before: StepPlan | None = None) -> None:
        groups, writes = optimizer.param_groups, optimizer.binding.writes
        optimizer.binding.slots.name_params(groups)
        apply_groups(optimizer)
        self._writes, self._count, self._numbers = writes, writes.count, writes.numbers
        # A group that a program put into the list itself does not count its writes: with an empty list no plan matches.
        counted = all(isinstance(group, CountedDict) and group.writes is writes for group in groups)
        self._groups: list[Mapping[str, Any]] = list(groups) if counted else []
        self._lists = [group["params"] for group in groups]
        self._params = list(chain.from_iterable(self._lists))
        self._flags = list(map(_requires_grad, self._params))
        self.active: list[Tensor] = [param for param in self._params if param.requires_grad]
        self.matrices = [i for i, param in enumerate(self.active) if param.dim() > 1]
        self.form: StepForm = optimizer.rows or optimizer.shards or PLAIN
        self.checked = False
        #: The links and the segments of the optimizer's chain, and of chains inside its links, by the identity of the owner.
        self._segments: dict[int, tuple[Sequence[Module], list[Segment]]] = {}
        self._traced: Traced = {} if before is None else before._traced

    def matches(self, optimizer: Optimizer) -> bool:
        """Return whether nothing has changed that the plan depends on; changed numbers are read again."""
        groups = optimizer.param_groups
        if self._count != self._writes.count or len(groups) != len(self._groups):
            return False
        # This runs for every parameter at every step: `map` with C functions is faster than a loop.
        params = list(chain.from_iterable(self._lists))
        if len(params) != len(self._params) or not all(map(operator.is_, params, self._params)):
            return False
        if not all(map(operator.is_, groups, self._groups)) or list(map(_requires_grad, params)) != self._flags:
            return False
        if self._numbers != self._writes.numbers:
            apply_groups(optimizer)
            self._numbers = self._writes.numbers
            for segment in self.list_segments():
                segment.renew_numbers()
        return True

    def find_segments(self, owner: Any, links: Sequence[Module]) -> list[Segment]:
        """Return the segments of a chain: runs of pointwise links, and single links.

        Args:
            owner: The optimizer or link whose chain it is.
            links: The links.
        """
        entry = self._segments.get(id(owner))
        if entry is None or entry[0] != links:
            moves = getattr(owner, "moves_parameters", False)
            entry = self._segments[id(owner)] = (list(links), make_segments(links, moves, self._traced))
        return entry[1]

    def list_segments(self) -> list[Segment]:
        """Return the segments of all chains."""
        return [segment for _, segments in self._segments.values() for segment in segments]


def make_step(
    optimizer: Optimizer, closure: Callable[..., Any] | None, loss: Tensor | None, storage: dict[str, Any]
) -> Tensor | None:
    """Make one step of an optimizer, all of it or nothing, and return the loss.

    Interrupts are deferred while links run, so that parameters and state stay consistent; they are handled while the
    closure is evaluated and derivatives are taken. If an evaluation fails, the changes before it are undone.

    Args:
        optimizer: The optimizer.
        closure: The closure; None to use `.grad`.
        loss: The loss, if there is no closure.
        storage: Extra arguments for links.
    """
    if optimizer.evaluating:
        raise RuntimeError(
            "the parameters are averages since opt.eval(), to be evaluated; call opt.train() before a step"
        )
    following = optimizer._following
    if following is None:
        if optimizer._removals != REMOVED.count:
            check_removed(optimizer, evaluated=closure is not None)
        return _make_guarded_step(optimizer, closure, loss, storage)
    following.begin_step(optimizer)
    try:
        return _make_guarded_step(optimizer, closure, loss, storage)
    finally:
        following.busy = False


def _make_guarded_step(
    optimizer: Optimizer, closure: Callable[..., Any] | None, loss: Tensor | None, storage: dict[str, Any]
) -> Tensor | None:
    with Guard(deferred="often", grad=optimizer.differentiable) as guard:
        if optimizer.rehearsed:
            optimizer.reset()
            optimizer.rehearsed = False
        evaluator = None if closure is None else Evaluator(closure, optimizer.maximize)
        step = _ascend if optimizer.maximize else _make_step
        return step(optimizer, evaluator, loss, storage, guard)


def _ascend(
    optimizer: Optimizer, evaluator: Evaluator | None, loss: Tensor | None, storage: dict[str, Any], guard: Guard
) -> Tensor | None:
    """Make a step of descent on the negated loss; the returned loss and `.grad` have their original sign."""
    try:
        result = _make_step(optimizer, evaluator, None if loss is None else -loss, storage, guard)
    finally:
        if evaluator is not None and evaluator.turned:
            negate_gradients(optimizer.list_params())
    return None if result is None else -result


def make_first_state(optimizer: Optimizer) -> None:
    """Create the state that links have after a first step with zero gradients, without moving the parameters.

    The first real step clears this state. Chains that evaluate a closure can't make such a step, and get no state.
    """
    started = optimizer.current_step or any(link.rows for _, link in optimizer._links)
    if started or optimizer._evaluated or optimizer.differentiable:
        return
    params = optimizer.list_params()
    with Guard(deferred=True, grad=False) as guard:
        guard.tensors(params)
        guard.gradients(params)
        guard.mappings(vars(optimizer))
        for param in params:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        _make_step(optimizer, None, None, {}, Guard())
        guard.restore()
    optimizer.rehearsed = True


def _make_step(
    optimizer: Optimizer, evaluator: Evaluator | None, loss: Tensor | None, storage: dict[str, Any], guard: Guard
) -> Tensor | None:
    """Make one step in the form that fits the parameters (themselves, matrices of members, local shards); return the loss."""
    step = optimizer.binding.step = optimizer.current_step
    plan = optimizer._plan
    if plan is None or not plan.matches(optimizer):
        plan = optimizer._plan = StepPlan(optimizer, plan)
    params, entered = plan.active, evaluator
    if not params:
        optimizer.current_step += 1
        optimizer.num_evaluations += 1
        return None if evaluator is None else torch.as_tensor(evaluator.value()).detach()
    if plan.form.enters:
        params, entered = plan.form.enter(params, evaluator)
    model = optimizer.model if optimizer.population is None else optimizer.population
    closure: Any = entered  # an evaluator, which an objective accepts in place of a closure
    objective = Objective(params, closure, loss, model, step, modular=optimizer, storage=storage, guard=guard)
    objective.needs, objective.members = optimizer._needs, optimizer.binding.members
    objective.reduce, objective.tail = optimizer._reduce, optimizer.modules[-1]
    rows = optimizer.rows
    objective.blocks, objective.shards = rows if rows is not None and rows.blocks else None, optimizer.shards
    objective.plan, objective.checking = plan, not plan.checked
    if params is plan.active:
        objective.matrices = plan.matrices
    result = _step_objective(optimizer, objective)
    plan.checked = True
    return result


def run_links(objective: Objective, links: Sequence[Module], owner: Any, wide: bool = False) -> Objective:
    """Pass an objective through links, in order, until one stops the chain; move no parameters and call no post-step hooks.

    Args:
        objective: The objective.
        links: The links.
        owner: The optimizer or link whose chain it is; None to fuse nothing.
        wide: Whether a differentiated step may leave an update of half precision in single precision (`Objective.wide`).
    """
    form: StepForm = PLAIN if objective.shards is None else objective.shards
    if objective.differentiable:
        form = GraphForm(links, wide)
    elif objective.members is not None:
        form = MEMBERS_FORM
    if owner is None or not form.fuses:
        segments: Sequence[Segment] = list(map(LinkRun, links))
    else:
        segments = make_segments(links) if objective.plan is None else objective.plan.find_segments(owner, links)
    for segment in segments:
        objective = segment.run(objective, form)
        if objective.stop:
            break
    objective.wide = False
    return objective if objective.local is None else form.leave(objective)


def _step_objective(optimizer: Optimizer, objective: Objective) -> Tensor | None:
    """Run the chain with autocast for the closure only, not for the links."""
    device = objective.params[0].device.type
    if not torch.is_autocast_enabled(device):
        return _run_chain(optimizer, objective)
    evaluator = objective.evaluator
    if evaluator is not None:
        inner = evaluator.inner if isinstance(evaluator, FormEvaluator) else evaluator
        inner.scope = partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _run_chain(optimizer, objective)


def _run_chain(optimizer: Optimizer, objective: Objective) -> Tensor | None:
    """Run the links, move the parameters, and count the step."""
    evaluator, rows, guard = objective.evaluator, optimizer.rows, objective.guard
    if evaluator is None and not optimizer.differentiable:
        _take_gradients(optimizer, objective)
        if objective.present is not None and not any(objective.present):
            optimizer.current_step += 1
            optimizer.num_evaluations += 1
            return objective.loss
    else:
        _begin_evaluated(optimizer, objective)
    if rows is not None:
        guard.add(rows.push)
    if (evaluator is not None and optimizer._early) or not optimizer.current_step or not optimizer.binding.fuse:
        _protect(optimizer, objective.params, guard)
    watch = optimizer.binding.watch
    if watch is not None:
        watch.start(optimizer)
    last = run_links(objective, optimizer.modules, optimizer, wide=True)
    last.update_parameters()
    if rows is not None:
        rows.finish()
    _store_results(optimizer, evaluator, last)
    if last.post_step_hooks:
        guard.commit()
        last.apply_post_step_hooks(tuple(optimizer.modules))
    loss = _find_loss(objective, evaluator, last)
    if watch is not None:
        watch.finish(optimizer, last, loss)
    return loss


def _store_results(optimizer: Optimizer, evaluator: Evaluator | None, last: Objective) -> None:
    """Count a step, and store what its links reported in the optimizer.

    Args:
        optimizer: The optimizer.
        evaluator: The evaluator at the start of the step.
        last: The objective after the last link.
    """
    # A point that was accepted under another objective (a reformulation) can't be reused for this one.
    reusable = evaluator is not None and evaluator.fixed and last.evaluator is evaluator
    optimizer._carried = last.accepted if reusable else None
    if last.attrs:
        optimizer.attrs.update(last.attrs)
        optimizer.reasons = last.attrs.get("reasons", optimizer.reasons)
    if last.should_terminate is not None:
        optimizer.should_terminate = last.should_terminate
    optimizer.current_step += 1
    if optimizer.binding.device_steps is not None:
        optimizer.binding.device_steps.advance()
    optimizer.num_evaluations += 1 if evaluator is None else evaluator.count


def _take_gradients(optimizer: Optimizer, objective: Objective) -> None:
    """Read the gradients from `.grad` into the objective; raise ClosureError if links need more."""
    for need in optimizer._evaluated:
        if not (need is Need.LOSS and objective.loss is not None):
            name = next(type(link).__name__ for _, link in optimizer._links if need in link.all_needs())
            remedy = " (or step(loss=loss))" if need is Need.LOSS else ""
            raise ClosureError(f"{name} needs {need.value}, so step needs a closure{remedy}: {PASS_LOSS}")
    grads: list[Tensor | None] = list(map(_grad, objective.params))
    if optimizer.maximize:
        grads = [None if grad is None else -grad for grad in grads]
    objective.set_gradients(grads)


def _begin_evaluated(optimizer: Optimizer, objective: Objective) -> None:
    """Prepare a step that evaluates its closure.

    A differentiable step makes the parameters part of a graph; another one reuses the last step's evaluation if it can.
    """
    evaluator = objective.evaluator
    if optimizer.differentiable:
        if evaluator is None:
            raise ClosureError(f"a differentiable step computes the gradient itself: {PASS_LOSS}")
        objective.differentiable = True
        for param in objective.params:
            # A step can't write into a leaf that requires a gradient, so the parameter becomes a copy of a new leaf.
            if param.is_leaf and param.requires_grad:
                origin = param.detach().clone().requires_grad_()
                param.requires_grad_(False)
                param.copy_(origin)
    elif evaluator is not None and evaluator.fixed and optimizer._carried is not None:
        # The last step evaluated loss and gradient at its end; reuse them if the parameters have not moved.
        point, loss, grads = optimizer._carried
        if len(point) == len(objective.params) and all(map(torch.equal, point, objective.params)):
            objective.loss = objective.loss_approx = loss
            objective.grads = grads


def _find_loss(objective: Objective, evaluator: Evaluator | None, last: Objective) -> Tensor | None:
    """Return the loss at the start of the step, or one that was evaluated nearby.

    Args:
        objective: The objective at the start.
        evaluator: Its evaluator.
        last: The objective after the last link.
    """
    replaced = last.evaluator is not evaluator
    if evaluator is not None and evaluator.start is not None and (replaced or objective.loss is None):
        return evaluator.start
    if objective.loss is not None or replaced:
        return objective.loss
    return last.loss_approx if last.loss is None else last.loss


# Links with one of these needs may evaluate the closure after links before them have changed their state.
_LATE = frozenset({Need.CLOSURE, Need.PRODUCTS, Need.HESSIAN, Need.RESIDUALS})


def find_early_links(modules: Sequence[Module]) -> list[Module]:
    """Return the links that may change their state before the closure is evaluated or differentiated; none in most chains.

    These are the links up to the last one that evaluates by itself. Behind it only the first request for a gradient evaluates:
    a `TensorTransform` requests it before it changes anything, other links may request it later.
    """
    last = max((i for i, top in enumerate(modules) if top.all_needs() & _LATE), default=-1)
    links = [(i, link) for i, top in enumerate(modules) for _, link in top.links()]
    return [link for i, link in links if i <= last or not isinstance(link, TensorTransform)]


def _protect(optimizer: Optimizer, params: list[Tensor], guard: Guard) -> None:
    """Register state with a guard that restores it if an evaluation fails, or a link raises.

    To copy the state of every link at every step would cost as much as the step. So all links are registered only in the first
    step, when there is no state to copy, and with `fuse=False`; otherwise only those that change their state before a closure
    is evaluated. A fused pass can't fail after it has begun to write.
    """
    links = optimizer._early
    if not optimizer.binding.fuse:
        guard.tensors(params)
    if not optimizer.binding.fuse or not optimizer.current_step:
        links = [link for _, link in optimizer._links]
    for link in links:
        link.protect(guard)
