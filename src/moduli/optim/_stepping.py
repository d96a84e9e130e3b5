"""One step: an objective is made, threaded through the links, and the parameters move by minus the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _differentiable, _fusion, _members
from ._closure import Evaluator
from ._evaluators import FormEvaluator, MemberEvaluator, NegatedEvaluator, OtherPresenceError, ShardEvaluator
from ._foreign_state import is_rehearsal, rehearse
from ._needs import ClosureError, Need
from .objective import Objective

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer


def make_step(
    optimizer: Optimizer, closure: Callable[..., Any] | None, loss: Tensor | None, storage: dict[str, Any]
) -> Tensor | None:
    """One step of an optimizer, or what torch's checkpoints need to know of one."""
    if closure is None and loss is None and is_rehearsal():
        rehearse(optimizer, lambda: _make_step(optimizer, None, None, storage))
        return None
    if optimizer.rehearsed:
        optimizer.reset()
        optimizer.rehearsed = False
    return _make_step(optimizer, closure, loss, storage)


def _make_step(
    optimizer: Optimizer, closure: Callable[..., Any] | None, loss: Tensor | None, storage: dict[str, Any]
) -> Tensor | None:
    """One step, for parameters as they are, as matrices of members, or in pieces."""
    optimizer.binding.step = optimizer.current_step
    watch, groups = optimizer._watch, optimizer.param_groups
    watch.sync(groups, optimizer.modules)
    leaves = watch.find_active(groups)
    if not leaves:
        optimizer.current_step += 1
        optimizer.num_evaluations += 1
        return None if closure is None else torch.as_tensor(Evaluator(closure).value()).detach()
    evaluator: Evaluator | None = None
    if closure is not None:
        evaluator = NegatedEvaluator(closure) if optimizer.maximize else Evaluator(closure)
        optimizer._ascent = evaluator if isinstance(evaluator, NegatedEvaluator) else None
    rows = optimizer.rows if optimizer.rows is not None and optimizer.rows.used else None
    shards = optimizer.shards
    params = leaves
    if rows is not None:
        params = rows.begin(leaves, evaluated=closure is None)
        evaluator = None if evaluator is None else MemberEvaluator(evaluator, rows, leaves)
    elif shards is not None:
        params = shards.begin(leaves, evaluated=closure is None)
        evaluator = None if evaluator is None else ShardEvaluator(evaluator, shards, leaves)
    objective = _make_objective(optimizer, params, evaluator, loss, storage)
    objective.blocks, objective.shards = rows, shards
    objective.matrices = watch.matrices if params is leaves else None
    try:
        return _step_objective(optimizer, objective)
    except OtherPresenceError as found:
        again = _make_objective(optimizer, found.matrices.begin(leaves, evaluated=True), evaluator, loss, storage)
        again.blocks = rows
        again.loss = again.loss_approx = again._value(found.loss)
        again.set_gradients(again._gradients())
        return _step_objective(optimizer, again)


def run_links(objective: Objective, links: Sequence[Module], owner: Any) -> Objective:
    """Thread an objective through links, in order, until one stops the chain; moves no parameters and calls no hooks.

    Args:
        objective: The objective.
        links: The links.
        owner: Lives as long as the links: fused runs are remembered there.
    """
    if objective.differentiable:
        return _differentiable.run(objective, links)
    shards = objective.shards
    for segment in _fusion.segments(owner, links):
        if isinstance(segment, _fusion.FusedRun):
            objective = segment.step(objective)
        elif objective.members is not None:
            objective = _members.step(segment, objective)
        elif objective.shards is not None:
            objective = objective.shards.step(segment, objective)
        else:
            objective = segment.step(objective)
        if not isinstance(objective, Objective):
            raise TypeError(
                f"{segment!r} returned a {type(objective).__name__} from its step; apply must return the objective"
            )
        if objective.stop:
            break
    if shards is not None and objective.local is not None:  # a reformulation has left it whole, and ends here
        reformulated = objective.evaluator
        objective = shards.to_local(objective, objective.local)
        objective.evaluator = reformulated
    return objective


def _make_objective(
    optimizer: Optimizer, params: list[Tensor], evaluator: Any, loss: Tensor | None, storage: dict[str, Any]
) -> Objective:
    objective = Objective(
        params,
        evaluator,
        loss,
        optimizer.model if optimizer.population is None else optimizer.population,
        optimizer.current_step,
        modular=optimizer,
        storage=storage,
        needs=optimizer._needs,
        members=optimizer.binding.members,
        reduce=optimizer._reduce,
    )
    objective.tail = optimizer.modules[-1]
    return objective


def _step_objective(optimizer: Optimizer, objective: Objective) -> Tensor | None:
    evaluator = objective.evaluator
    device = objective.params[0].device.type
    if torch.is_autocast_enabled(device):  # for the closure, not for what links compute
        if evaluator is not None:
            inner = evaluator.inner if isinstance(evaluator, FormEvaluator) else evaluator
            inner.autocast = (device, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return _step_objective(optimizer, objective)
    if optimizer.differentiable:
        if evaluator is None:
            raise ClosureError(
                "a differentiable step computes the gradient itself, with its graph; pass the loss: "
                "opt.step(mo.closure(lambda: loss(net(x), y)))"
            )
        objective.differentiable = True
        _differentiable.begin(objective.params)
    elif evaluator is None:
        _take_gradients(optimizer, objective)
        if objective.present is not None and not any(objective.present):
            optimizer.current_step += 1
            optimizer.num_evaluations += 1
            return objective.loss
    elif evaluator.fixed:
        _take_last_evaluation(optimizer, objective)
    rows = optimizer.rows
    try:
        last = run_links(objective, optimizer.modules, optimizer)
        last.update_parameters()
    except BaseException:
        objective.restore_start()
        if rows is not None:
            rows.push()
        raise
    if rows is not None:
        rows.push()
    # What was accepted under another objective (a reformulation) says nothing about this one.
    same = evaluator is not None and evaluator.fixed and last.evaluator is evaluator
    optimizer._carried = last.accepted if same else None
    optimizer.attrs.update(last.attrs)
    optimizer.reasons = last.attrs.get("reasons", optimizer.reasons)
    if last.should_terminate is not None:
        optimizer.should_terminate = last.should_terminate
    optimizer.current_step += 1
    optimizer.num_evaluations += 1 if evaluator is None else evaluator.count
    last.apply_post_step_hooks(tuple(optimizer.modules))
    if evaluator is not None and evaluator.start is not None and last.evaluator is not evaluator:
        return evaluator.start
    if objective.loss is not None or last.evaluator is not evaluator:
        return objective.loss
    return last.loss_approx if last.loss is None else last.loss


def _take_gradients(optimizer: Optimizer, objective: Objective) -> None:
    """Take what is in `.grad`; links that need more are refused."""
    for need in optimizer._evaluated:
        if not (need is Need.LOSS and objective.loss is not None):
            name = next(type(link).__name__ for _, link in optimizer._links if need in link.all_needs())
            known = " (or step(loss=loss))" if need is Need.LOSS else ""
            raise ClosureError(
                f"{name} needs {need.value}, so step needs a closure{known}: "
                "opt.step(mo.closure(lambda: loss(net(x), y)))"
            )
    found = objective._gradients()
    if optimizer.maximize:
        found = [None if grad is None else -grad for grad in found]
        objective.loss = objective.loss_approx = None if objective.loss is None else -objective.loss
    objective.set_gradients(found)


def _take_last_evaluation(optimizer: Optimizer, objective: Objective) -> None:
    """Use the loss and gradient that the last step found where it ended, if the parameters are still there."""
    if optimizer._carried is None:
        return
    point, loss, grads = optimizer._carried
    if len(point) == len(objective.params) and all(
        value.shape == param.shape and torch.equal(value, param)
        for value, param in zip(point, objective.params, strict=True)
    ):
        objective.loss = objective.loss_approx = loss
        objective.grads = grads
