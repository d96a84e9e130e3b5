"""One step: an objective is made, threaded through the links, and the parameters move by minus the update.

Before it, when an optimizer is built, each link has to be used once and to find what it needs.
"""

from __future__ import annotations

import copy
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import map_tensors
from . import _fusion, _members
from ._closure import Evaluator, FormEvaluator, negate_gradients
from ._matrices import OtherPresenceError
from ._needs import PASS_LOSS, Across, ChainError, ClosureError, Need
from ._processes import find_across
from .objective import Objective

if TYPE_CHECKING:
    from . import Module, Optimizer


def make_step(
    optimizer: Optimizer, closure: Callable[..., Any] | None, loss: Tensor | None, storage: dict[str, Any]
) -> Tensor | None:
    """One step of an optimizer, or what torch's checkpoints need to know of one."""
    if closure is None and loss is None and is_called_from("torch.distributed.checkpoint.state_dict"):
        _rehearse(optimizer, storage)  # with gradients of zeros, so that an optimizer has state
        return None
    if optimizer.rehearsed:
        optimizer.reset()
        optimizer.rehearsed = False
    evaluator = None if closure is None else Evaluator(closure, optimizer.maximize)
    if not optimizer.maximize:
        return _make_step(optimizer, evaluator, loss, storage)
    # A step of descent on the negated loss; the loss and the gradients that users see are theirs.
    try:
        found = _make_step(optimizer, evaluator, None if loss is None else -loss, storage)
    finally:
        if evaluator is not None and evaluator.turned:
            negate_gradients(optimizer.list_params())
    return None if found is None else -found


def is_called_from(module: str) -> bool:
    """Whether one of the innermost calls is of a function of that module; tools of torch do not say who they are."""
    frames = itertools.islice(traceback.walk_stack(None), 12) if module in sys.modules else ()
    return any(frame.f_globals.get("__name__") == module for frame, _ in frames)


def _rehearse(optimizer: Optimizer, storage: dict[str, Any]) -> None:
    """Make the state of a first step without moving anything; the first real step begins anew."""
    if optimizer._evaluated or optimizer.differentiable or optimizer.current_step:
        return
    params = optimizer.list_params()
    before = [param.detach().clone() for param in params]
    try:
        _make_step(optimizer, None, None, storage)
    finally:
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
        optimizer.current_step = optimizer.num_evaluations = 0
    optimizer.rehearsed = True


def _make_step(
    optimizer: Optimizer, evaluator: Evaluator | None, loss: Tensor | None, storage: dict[str, Any]
) -> Tensor | None:
    """One step, for parameters as they are, as matrices of members, or in pieces."""
    optimizer.binding.step = optimizer.current_step
    watch, groups = optimizer._watch, optimizer.param_groups
    watch.sync(groups, optimizer.modules)
    leaves = watch.find_active(groups)
    if not leaves:
        optimizer.current_step += 1
        optimizer.num_evaluations += 1
        return None if evaluator is None else torch.as_tensor(evaluator.value()).detach()
    rows = optimizer.rows
    form: Any = optimizer.shards if rows is None else rows
    asked: Any = evaluator
    params = leaves
    if form is not None:
        params = form.begin(leaves, evaluated=evaluator is None)
        asked = None if evaluator is None else form.wrap(evaluator, leaves)

    model = optimizer.model if optimizer.population is None else optimizer.population
    objective = Objective(params, asked, loss, model, optimizer.current_step, modular=optimizer, storage=storage)
    objective.needs, objective.members, objective.reduce = (
        optimizer._needs,
        optimizer.binding.members,
        optimizer._reduce,
    )
    objective.tail = optimizer.modules[-1]
    objective.blocks, objective.shards = rows if rows is not None and rows.blocks else None, optimizer.shards
    objective.matrices = watch.matrices if params is leaves else None
    try:
        return _step_objective(optimizer, objective)
    except OtherPresenceError:
        return _make_step(optimizer, evaluator, loss, storage)


def run_links(objective: Objective, links: Sequence[Module], owner: Any) -> Objective:
    """Thread an objective through links, in order, until one stops the chain; moves no parameters and calls no hooks.

    Args:
        objective: The objective.
        links: The links.
        owner: Lives as long as the links: fused runs are remembered there.
    """
    shards = objective.shards
    for segment in links if objective.differentiable else _fusion.segments(owner, links):
        if objective.differentiable:
            objective = _step_with_graph(objective, segment)
        elif isinstance(segment, _fusion.FusedRun):
            objective = segment.step(objective)
        elif objective.members is not None:
            objective = _members.step(segment, objective)
        elif objective.shards is not None:
            objective = objective.shards.step(segment, objective)
        else:
            objective = segment.step(objective)
        if not isinstance(objective, Objective):
            raise TypeError(f"{segment!r} returned a {type(objective).__name__}; apply must return the objective")
        if objective.stop:
            break
    if shards is not None and objective.local is not None:  # a reformulation has left it whole, and ends here
        reformulated = objective.evaluator
        objective = shards.to_local(objective, objective.local)
        objective.evaluator = reformulated
    return objective


def _step_objective(optimizer: Optimizer, objective: Objective) -> Tensor | None:
    evaluator = objective.evaluator
    device = objective.params[0].device.type
    if torch.is_autocast_enabled(device):  # for the closure, not for what links compute
        if evaluator is not None:
            inner = evaluator.inner if isinstance(evaluator, FormEvaluator) else evaluator
            inner.scope = partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return _step_objective(optimizer, objective)
    if optimizer.differentiable:
        if evaluator is None:
            raise ClosureError(f"a differentiable step computes the gradient itself: {PASS_LOSS}")
        objective.differentiable = True
        for param in objective.params:
            if param.is_leaf and param.requires_grad:  # made part of a graph, so that a step can write into it
                origin = param.detach().clone().requires_grad_()
                param.requires_grad_(False)
                param.copy_(origin)
    elif evaluator is None:
        for need in optimizer._evaluated:
            if not (need is Need.LOSS and objective.loss is not None):
                name = next(type(link).__name__ for _, link in optimizer._links if need in link.all_needs())
                known = " (or step(loss=loss))" if need is Need.LOSS else ""
                raise ClosureError(f"{name} needs {need.value}, so step needs a closure{known}: {PASS_LOSS}")
        found = objective._gradients()
        if optimizer.maximize:
            found = [None if grad is None else -grad for grad in found]
        objective.set_gradients(found)
        if objective.present is not None and not any(objective.present):
            optimizer.current_step += 1
            optimizer.num_evaluations += 1
            return objective.loss
    elif evaluator.fixed and optimizer._carried is not None:
        # The loss and gradient that the last step found where it ended, if the parameters are still there.
        point, loss, grads = optimizer._carried
        if len(point) == len(objective.params) and all(map(torch.equal, point, objective.params)):
            objective.loss = objective.loss_approx = loss
            objective.grads = grads
    rows = optimizer.rows
    try:
        last = run_links(objective, optimizer.modules, optimizer)
        last.update_parameters()
    except BaseException:
        objective.restore_start()
        raise
    finally:
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
    replaced = last.evaluator is not evaluator
    if evaluator is not None and evaluator.start is not None and (replaced or objective.loss is None):
        return evaluator.start
    if objective.loss is not None or replaced:
        return objective.loss
    return last.loss_approx if last.loss is None else last.loss


# ---------------------------------------------------------------------- steps that autograd sees through

# Links work in place. So that the graphs of earlier steps keep their values, a link is run on copies (which are part of the
# graph) of what it remembers, of the update and of the parameters, and what the loss saves of the parameters is copied.


def wants_graph(tensors: Iterable[Any], links: Iterable[Module] = ()) -> bool:
    """Whether anything that goes into a step is differentiated: a tensor, or a setting given as one."""
    settings = [value for top in links for _, link in top.links() for value in link.defaults.values()]
    held = any(isinstance(value, Tensor) and value.requires_grad for value in (*tensors, *settings))
    return held and torch.is_grad_enabled()


def check_differentiable(links: Iterable[Module]) -> None:
    """Refuse links that would cut the graph."""
    for top in links:
        for _, link in top.links():
            if not link.differentiable:
                name = type(link).__name__
                raise ChainError(f"{name} can't be differentiated through; pointwise links, momentum and clipping can")


def copy_state(value: Any) -> Any:
    """A copy of what a link remembers, with the graphs of its tensors."""
    return map_tensors(value, Tensor.clone, copy.deepcopy)


def _renew(link: Module) -> None:
    for _, part in link.links():
        for row in part.state.values():
            row.update({key: copy_state(value) for key, value in row.items()})
        part.global_state.update({key: copy_state(value) for key, value in part.global_state.items()})


def _step_with_graph(objective: Objective, link: Module) -> Objective:
    """The step of a link, on copies."""
    from .chain import Chain

    if isinstance(link, Chain):
        outer = objective.stop
        objective = run_links(objective, link.get_children_sequence(), None)
        objective.stop = outer
        return objective
    _renew(link)
    link.update(objective)
    _renew(link)
    objective.updates = [update.clone() for update in objective.get_updates()]
    return link.apply(objective)


def detach_all(params: Iterable[Tensor], links: Iterable[Module]) -> None:
    """Parameters become leaves again, and what links remember forgets where it came from."""
    for param in params:
        if not param.is_leaf:
            param.detach_().requires_grad_()
    for top in links:
        with torch.no_grad():
            _renew(top)


# ---------------------------------------------------------------------- what is asked of a chain before, and the chain as text


def claim_links(optimizer: Optimizer) -> list[tuple[str, Module]]:
    """All links with their paths; each may be used once, in one optimizer."""
    out: list[tuple[str, Module]] = []
    seen: dict[int, str] = {}
    for i, top in enumerate(optimizer.modules):
        for path, link in top.links():
            here = f"{i}.{type(top).__name__}" + (f"/{path}" if path else "")
            name = type(link).__name__
            if id(link) in seen:
                raise ChainError(f"the same {name} is used twice, at {seen[id(link)]} and {here}; make two")
            owner = None if link._owner is None else link._owner()
            if owner is not None and owner is not optimizer:
                raise ChainError(f"{name} at {here} already belongs to another optimizer; make a new {name}(...)")
            seen[id(link)] = here
            out.append((here, link))
    return out


def check_chain(optimizer: Optimizer) -> None:
    """Refuse links that can't work here: by themselves, without a population, or with this one."""
    links, population = optimizer._links, optimizer.population
    for _, link in links:
        link.check()
    if Need.MEMBERS in optimizer._needs and population is None:
        name = next(type(link).__name__ for _, link in links if Need.MEMBERS in link.needs)
        raise ChainError(f"{name} moves the members of a population; give the optimizer a population")
    if population is not None:
        for top in optimizer.modules:
            _members.check(top)
        for path, link in links:
            _members.check_link(path, link, len(population), population.sharding)


def check_shares(links: Sequence[Module]) -> None:
    """Refuse links that need all parameters where torch's ZeroRedundancyOptimizer gives each process some of them."""
    for link in links if is_called_from("torch.distributed.optim.zero_redundancy_optimizer") else ():
        across = find_across(link)
        if across in (Across.SUMS, Across.EVERYTHING):
            raise ChainError(f"{type(link).__name__} needs {across.value}, which ZeroRedundancyOptimizer can't give")


def check_capturable(links: Sequence[Module]) -> None:
    """Refuse what a captured graph would repeat with the numbers of the step at which it was captured."""
    from .chain import Chain

    for link in links:
        changes = getattr(link, "counts", False) or any(callable(value) for value in link.defaults.values())
        if changes or not getattr(link, "elementwise", isinstance(link, Chain)):
            name = type(link).__name__
            raise ChainError(f"{name} counts or decides in Python, and a captured graph would repeat one step of it")


def check_graph(optimizer: Optimizer) -> None:
    """Refuse what autograd can't see through."""
    if optimizer.maximize:
        raise ValueError("a differentiable step descends; negate the loss in the closure instead of maximize=True")
    check_differentiable(optimizer.modules)
    if optimizer.population is not None:
        raise ChainError("a population's members share one storage, which can't be differentiated through")


def _needs(link: Module) -> str:
    wanted = sorted(need.value for need in link.all_needs())
    return f"needs {', '.join(wanted)}" if wanted else "needs nothing"


def explain(optimizer: Optimizer) -> str:
    """The chain, what each link needs, what runs as one pass, and why the rest does not."""
    params = optimizer.list_params()
    numbers = sum(param.numel() for param in params)
    lines = [f"{len(params)} parameter{'s' * (len(params) != 1)}, {numbers:,} numbers"]
    if optimizer.binding.members is not None:
        lines[0] += f", {optimizer.binding.members} members"
    width = max(len(type(link).__name__) for link in optimizer.modules)
    over = None if optimizer.rows is None else optimizer.rows.describe()
    fusing, where = optimizer.binding.fuse, "" if over is None else f" over {over}"
    for segment in _fusion.segments(optimizer, optimizer.modules):
        if isinstance(segment, _fusion.FusedRun):
            told = [bound.explain() for cohort in segment._cohorts for bound in cohort.bound.values() if fusing]
            forms = [each for each in told if each is not None]
            names = ", ".join(sorted({each.form for each in forms}))
            how = f"one pass{where}{f' ({names})' if names else ''}" if fusing else f"one by one{where} (fuse=False)"
            lines.append(f"{how}{', which also moves the parameters' if fusing and segment.tail else ''}:")
            lines += [f"  {type(link).__name__:<{width}}  {_needs(link)}" for link in segment.links]
            lines += dict.fromkeys(f"  {line}" for each in forms for line in each.slow)
        else:
            apart = "" if over is None else f", {_members.describe(segment, over)}"
            why = _fusion.explain_unfused(segment, over is not None)
            lines.append(f"{type(segment).__name__:<{width + 2}}  {_needs(segment)}; on its own{apart}: {why}")
            lines += [f"  {path}, inside it" for path, _ in segment.links() if path]
    return "\n".join(lines)
