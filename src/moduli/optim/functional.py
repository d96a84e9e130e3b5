"""Running links by hand: on an objective, or on plain lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _fusion, _members
from .objective import Objective

if TYPE_CHECKING:
    from .module import Chainable, Module
    from .transform import Transform

__all__ = ["apply", "step", "step_tensors", "update"]


def step(objective: Objective, modules: Module | Sequence[Module], *, owner: Any = None) -> Objective:
    """Thread an objective through links, in order, until one stops the chain. Calls no hooks, moves no parameters.

    Args:
        objective: The objective.
        modules: The links.
        owner: Whoever calls it each step with the same links, so that what is fused can be remembered there.

    Returns:
        The objective that the last link returned.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m, optim
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> objective = optim.Objective([w], mo.closure(lambda: (w**2).sum()))
        >>> optim.step(objective, [m.LR(0.5)]).updates
        [tensor([1., 1.])]
    """
    from .module import Module

    if torch.is_grad_enabled():  # run by hand: links change things in place, which needs no graph
        with torch.no_grad():
            return step(objective, modules, owner=owner)
    return run(objective, [modules] if isinstance(modules, Module) else list(modules), owner)


def run(objective: Objective, links: Sequence[Module], owner: Any) -> Objective:
    """`step`, for a caller that has a list of links and no graph."""
    for segment in _fusion.segments(owner, links):
        if isinstance(segment, _fusion.FusedRun):
            objective = segment.step(objective)
        elif objective.members is not None and not _members.lifts(segment):
            objective = _members.each(segment, objective)
        else:
            objective = segment.step(objective)
        if not isinstance(objective, Objective):
            raise TypeError(
                f"{segment!r} returned a {type(objective).__name__} from its step; apply must return the objective"
            )
        if objective.stop:
            break
    return objective


def update(
    objective: Objective, module: Transform, states: list[dict[str, Any]], settings: Sequence[Any] | None = None
) -> None:
    """Let a `Transform` learn with states (and settings) kept elsewhere than in the link.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m, optim
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> states = [{}]
        >>> optim.functional.update(optim.Objective([w], mo.closure(lambda: w.sum())), m.EMA(), states)
        >>> sorted(states[0])
        ['exp_avg', 'step']
    """
    with torch.no_grad():
        module.update_states(objective, states, _settings(objective, module, settings))


def apply(
    objective: Objective, module: Transform, states: list[dict[str, Any]], settings: Sequence[Any] | None = None
) -> Objective:
    """Let a `Transform` transform the update with states (and settings) kept elsewhere than in the link.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m, optim
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> optim.functional.apply(optim.Objective([w], mo.closure(lambda: w.sum())), m.LR(0.1), [{}]).updates
        [tensor([0.1000])]
    """
    with torch.no_grad():
        return module.apply_states(objective, states, _settings(objective, module, settings))


def _settings(objective: Objective, module: Transform, settings: Sequence[Any] | None) -> Sequence[Any]:
    return [module.settings[param] for param in objective.params] if settings is None else settings


def step_tensors(
    modules: Chainable,
    tensors: list[Tensor],
    params: Iterable[Tensor] | None = None,
    grads: Sequence[Tensor] | None = None,
    loss: Tensor | None = None,
    closure: Callable[..., Any] | None = None,
    objective: Objective | None = None,
) -> list[Tensor]:
    """Run links on any tensors as if they were the update.

    Args:
        modules: The links.
        tensors: What to transform.
        params: The parameters they belong to; without them every call starts with fresh state.
        grads: The gradient to show to the links.
        loss: The loss to show to the links.
        closure: A closure to show to the links.
        objective: Instead of the three above.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.functional.step_tensors([m.ClipValue(1.0), m.LR(0.1)], [torch.tensor([5.0, 0.5])])
        [tensor([0.1000, 0.0500])]
    """
    from .chain import Chain, maybe_chain

    if objective is not None and any(value is not None for value in (grads, loss, closure)):
        raise ValueError("give either an objective, or grads, loss and closure; the objective has its own")
    link = maybe_chain(modules)
    given = [tensor.detach() for tensor in tensors] if params is None else list(params)
    if objective is not None:
        inner = objective.clone(clone_updates=False)
        if [id(p) for p in given] != [id(p) for p in objective.params]:
            inner = Objective(
                given, None, objective.loss, objective.model, objective.current_step, modular=objective.modular
            )
            inner.members = objective.members
    else:
        inner = Objective(given, closure, loss)
    if grads is not None:
        inner.grads = list(grads)
    elif inner.grads is None and inner.evaluator is None:
        # Links transform the update in place; whoever looks at the gradient must not see that.
        looks = any(getattr(part, "uses_grad", not isinstance(part, Chain)) for _, part in link.links())
        inner.grads = [tensor.clone() for tensor in tensors] if looks else list(tensors)
    inner.updates = list(tensors)
    out = step(inner, [link])
    for _, part in link.links():
        part._settle()  # a chain made for this call is gone after it, and with it what its fused runs have counted
    if objective is not None:
        objective.should_terminate = out.should_terminate or objective.should_terminate
    return out.get_updates()
