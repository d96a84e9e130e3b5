"""Running links by hand: on an objective, or on plain lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..layout import Guard
from ._needs import ChainError
from ._settings import Binding
from ._transformed import TransformedTensors, has_tangent
from .forms.graph import check_differentiable, copy_state, wants_graph
from .objective import Objective, fit_update
from .plan import run_links
from .state import replace_state

if TYPE_CHECKING:
    from .module import Chainable, Module
    from .transform import Transform

__all__ = ["apply", "init", "step", "step_tensors", "update"]

Params = Sequence[Tensor] | Mapping[str, Tensor]
Grads = Sequence[Tensor | None] | Mapping[str, Tensor | None]
State = dict[str, Any]


def init(modules: Chainable, params: Sequence[Tensor] | Mapping[str, Tensor]) -> State:
    """Return the initial state of links for `step`: plain data, which the caller stores.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.functional.init([m.HeavyBall(0.9), m.LR(0.1)], [torch.ones(2)])["step"]
        0
    """
    from .chain import maybe_chain

    paths = [path for path, _ in maybe_chain(modules).links()]
    return {"step": 0, "links": {path: {"state": [{} for _ in params], "global": {}} for path in paths}}


@overload
def step(objective: Objective, modules: Module | Sequence[Module], /, *, owner: Any = None) -> Objective: ...


@overload
def step(
    modules: Chainable, params: Params, grads: Grads, state: State, /, *, loss: Tensor | None = None
) -> tuple[Params, State]: ...


def step(*args: Any, owner: Any = None, loss: Tensor | None = None) -> Any:
    """Run links by hand, on an objective or as a pure function.

    `step(objective, links)` passes an objective through links, in order, until one stops the chain. It calls no hooks and
    moves no parameters; with `owner`, the optimizer or link whose chain they are, pointwise links run as one pass.

    `step(links, params, grads, state)` returns new parameters and a new state (see `init`), and writes into neither its
    arguments nor the links. Gradients and tangents flow through it, also those of settings given as tensors, and
    `torch.func.grad`, `torch.func.jvp` and `torch.vmap` may transform it; links that would cut them raise ChainError.
    `params` and `grads` are lists, or dictionaries by name; a parameter whose gradient is None does not move.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m, optim
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> objective = optim.Objective([w], mo.closure(lambda: (w**2).sum()))
        >>> optim.step(objective, [m.LR(0.5)]).updates
        [tensor([1., 1.])]
        >>> def after(rate):
        ...     links, x = [m.HeavyBall(0.9), m.LR(rate)], [torch.tensor(1.0)]
        ...     state = optim.functional.init(links, x)
        ...     for _ in range(2):
        ...         x, state = optim.functional.step(links, x, [2 * x[0]], state)
        ...     return x[0]
        >>> torch.func.grad(after)(torch.tensor(0.1))  # x = 1 - 5.8 r + 4 r^2
        tensor(-5.)
    """
    if not isinstance(args[0], Objective):
        modules, params, grads, state = args
        with Guard(deferred=True):  # the state of links is replaced meanwhile
            return _pure_step(modules, params, grads, state, loss)
    objective, modules = args
    with Guard(deferred=True, grad=False):  # links write in place, without a graph
        return run_links(objective, list(modules) if isinstance(modules, list | tuple) else [modules], owner)


def _pure_step(
    modules: Chainable, params: Params, grads: Grads, state: State, loss: Tensor | None
) -> tuple[Params, State]:
    """Return new parameters and a new state; see `step`."""
    from .chain import maybe_chain

    chain = maybe_chain(modules)
    links = list(chain.links())
    names, values, gradients = _pair_gradients(params, grads)
    stored = state.get("links", {})
    if list(stored) != [path for path, _ in links] or any(len(own["state"]) != len(values) for own in stored.values()):
        raise ValueError(f"the state is not one of {len(values)} parameters and these links; make it with init")
    settings = [value for _, link in links for value in link.defaults.values()]
    if wants_graph((*values, *gradients), [chain]) or any(map(has_tangent, (*values, *gradients, *settings))):
        check_differentiable([chain])
    binding = Binding()
    binding.step = state["step"]
    copied = copy_state(stored)
    form = TransformedTensors([values, gradients, settings, copied])
    inner_params, inner_gradients = form.enter_each(values, values), form.enter_each(gradients, values)
    slots = [binding.slots.number(param) for param in inner_params]
    states = [
        (dict(zip(slots, form.enter_each(own["state"], values), strict=True)), form.enter(own["global"]))
        for own in copied.values()
    ]
    every = [link for _, link in links]
    with _replace_binding(every, binding), replace_state(every, states), form.run_batched():
        objective = Objective(inner_params, None, loss, current_step=state["step"])
        objective.differentiable, objective.checking = True, state["step"] == 0
        objective.set_gradients(inner_gradients)
        updates = run_links(objective, [chain], None, wide=True).get_updates()
        states_after = {path: _read_state(link, slots, form, values) for path, link in links}
    moved = _move(values, gradients, list(map(form.leave, updates, values)))
    new_params: Any = dict(zip(names, moved, strict=True)) if isinstance(params, Mapping) else moved
    return new_params, {"step": state["step"] + 1, "links": states_after}


def _pair_gradients(params: Params, grads: Grads) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
    """Return the names (or positions) of parameters, the parameters, and their gradients in the same order.

    Raises:
        ValueError: Parameters and gradients do not have the same names.
    """
    names: list[Any] = list(params) if isinstance(params, Mapping) else list(range(len(params)))
    grad_names = list(grads) if isinstance(grads, Mapping) else list(range(len(grads)))
    if set(names) != set(grad_names):
        raise ValueError(f"the parameters are {names}, the gradients {grad_names}; give one for each, or None")
    return names, [params[name] for name in names], [grads[name] for name in names]


def _read_state(link: Module, slots: Sequence[int], form: TransformedTensors, params: Sequence[Tensor]) -> State:
    """Return the state of a link after a pure step; raise ChainError for state of other tensors than the parameters.

    Args:
        link: The link.
        slots: The slots of the parameters.
        form: The form of the tensors in the step.
        params: The parameters outside of it.
    """
    rows = [dict(link.get_row(slot)) for slot in slots]
    if len(link.rows) != len(params):
        raise ChainError(f"{type(link).__name__} keeps state of other tensors, which a pure step can't carry")
    return {"state": list(map(form.leave, rows, params)), "global": dict(link.global_state)}


def _move(params: Sequence[Tensor], grads: Sequence[Tensor | None], updates: Sequence[Tensor]) -> list[Tensor]:
    """Return parameters minus their updates; those without a gradient unmodified.

    Args:
        params: The parameters.
        grads: Their gradients.
        updates: Their updates.
    """
    return [
        param if grad is None else (param - fit_update(update, param)).to(param.dtype)
        for param, grad, update in zip(params, grads, updates, strict=True)
    ]


@contextmanager
def _replace_binding(links: Sequence[Module], binding: Binding) -> Iterator[None]:
    """Replace the binding of links for a block."""
    bindings = [link.settings.binding for link in links]
    try:
        for link in links:
            link.settings.binding = binding
        yield
    finally:
        for link, own in zip(links, bindings, strict=True):
            link.settings.binding = own


def update(
    objective: Objective, module: Transform, states: list[dict[str, Any]], settings: Sequence[Any] | None = None
) -> None:
    """Have a `Transform` learn with states (and settings) that the caller stores.

    Args:
        objective: The objective.
        module: The link.
        states: Its state for each parameter, which is changed.
        settings: Its settings for each parameter; None for those of the link.

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
    """Have a `Transform` transform the update with states (and settings) that the caller stores; return the objective.

    Args:
        objective: The objective.
        module: The link.
        states: Its state for each parameter.
        settings: Its settings for each parameter; None for those of the link.

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
    *,
    clone: bool = True,
) -> list[Tensor]:
    """Return any tensors transformed by links as if they were the update. Neither they nor the gradient are written to.

    Where they require a gradient (or a setting does) and grad mode is on, the result does too.

    Args:
        modules: The links.
        tensors: The tensors to transform.
        params: The parameters that they belong to; without them every call starts with fresh state.
        grads: The gradient for the links.
        loss: The loss for the links.
        closure: A closure for the links.
        objective: An objective, instead of the three above.
        clone: False if the tensors may be written to.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.functional.step_tensors([m.ClipValue(1.0), m.LR(0.1)], [torch.tensor([5.0, 0.5])])
        [tensor([0.1000, 0.0500])]
    """
    from .chain import Chain, maybe_chain

    if objective is not None and (grads, loss, closure) != (None, None, None):
        raise ValueError("give either an objective, or grads, loss and closure; the objective has its own")
    link = modules if isinstance(modules, Chain) else maybe_chain(modules)
    tensors = list(map(Tensor.clone, tensors)) if clone else list(tensors)
    own_params = list(map(Tensor.detach, tensors)) if params is None else list(params)
    inner = Objective(own_params, closure, loss) if objective is None else _derive_objective(objective, own_params)
    inner.updates = tensors
    if grads is not None:
        inner.grads = list(grads)
    elif inner.grads is None and inner.evaluator is None:
        inner.grads = _copy_for_readers(tensors, link)
    inner.differentiable = wants_graph((*tensors, *own_params, *(grads or ())), [link])
    if inner.differentiable:
        check_differentiable([link])
    with torch.set_grad_enabled(inner.differentiable):
        out = run_links(inner, [link], None)
    if objective is not None:
        objective.should_terminate = out.should_terminate or objective.should_terminate
    return out.get_updates()


def _copy_for_readers(updates: list[Tensor], link: Module) -> list[Tensor]:
    """Return the updates as gradients: copies if a link reads the gradient, since links may write into the update."""
    from .chain import Chain

    reads_gradient = any(getattr(part, "uses_grad", not isinstance(part, Chain)) for _, part in link.links())
    return list(map(Tensor.clone, updates)) if reads_gradient else list(updates)


def _derive_objective(objective: Objective, params: list[Tensor]) -> Objective:
    """Return a copy of an objective if these are its parameters, or else one for these in the same step."""
    if [id(param) for param in params] == [id(param) for param in objective.params]:
        return objective.clone(clone_updates=False)
    inner = Objective(params, None, objective.loss, objective.model, objective.current_step)
    inner.modular, inner.members, inner.checking = objective.modular, objective.members, objective.checking
    inner.plan = objective.plan
    return inner
