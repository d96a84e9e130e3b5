"""Any torch optimizer as a link."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import Module, Need, Objective


class Wrap(Module):
    """A foreign `torch.optim.Optimizer` as a link: its step, taken on the incoming update, becomes the outgoing one.

    Its settings are reached by the groups of the surrounding optimizer under their own names, and its state is saved with
    the chain's, by the names of the parameters. An optimizer whose step must have a closure (such as `torch.optim.LBFGS`)
    gets one; it has to come first in the chain, since only the gradient can be evaluated elsewhere.

    Args:
        opt_fn: An optimizer class, or a function of parameters that makes one.
        *args: Positional arguments for it, after the parameters.
        use_param_groups: Whether settings in the surrounding optimizer's groups (and schedulers) reach it.
        **kwargs: Keyword arguments for it.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.Wrap(torch.optim.SGD, lr=0.25))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.5000])
    """

    keeps_outside = True

    def __init__(
        self, opt_fn: Callable[..., torch.optim.Optimizer], *args: Any, use_param_groups: bool = True, **kwargs: Any
    ) -> None:
        if isinstance(opt_fn, torch.optim.Optimizer):
            raise TypeError(
                f"Wrap takes the class, not an optimizer: write Wrap({type(opt_fn).__name__}, lr=...); the link makes "
                "it for the parameters of the chain"
            )
        names = _settings(opt_fn)
        super().__init__({key: value for key, value in kwargs.items() if key in names and use_param_groups})
        self.opt_fn = opt_fn
        self.args = args
        self.kwargs = kwargs
        self.evaluates = _wants_closure(opt_fn)
        self.decides_on_host = self.evaluates  # an optimizer that evaluates reads their values
        # By the names of their parameters: one, or one for each member of a population.
        self._inner: dict[tuple[str, ...], torch.optim.Optimizer] = {}
        self._loaded: dict[str, Any] | None = None

    def all_needs(self) -> frozenset[Need]:
        """Return the gradient, and evaluations if the foreign optimizer makes some."""
        return super().all_needs() | (frozenset({Need.LOSS, Need.CLOSURE}) if self.evaluates else frozenset())

    def check_shared(self, params: Sequence[Tensor], every: bool = False) -> None:
        """Raise ValueError for several groups if the foreign optimizer evaluates (L-BFGS), since it takes one."""
        super().check_shared(params, every or self.evaluates)

    def _optimizer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return the foreign optimizer, over placeholders: it never gets the parameters themselves, so nothing moves twice."""
        slots = self.settings.binding.slots
        names = tuple(slots.find_name(param) or str(i) for i, param in enumerate(params))
        if names in self._inner:
            return self._inner[names]
        stand_ins = [
            torch.nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format)) for param in params
        ]
        groups: Any = stand_ins if self.evaluates else [{"params": [p]} for p in stand_ins]
        fresh = self.opt_fn(groups, *self.args, **self.kwargs)
        # Parameters that were there keep their state, also at another position.
        saved = self._extra_pack()
        rows, shared = saved.get("state", {}), saved.get("groups", {})
        if not self.evaluates or list(names) in saved.get("names", []):
            for i, (name, stand_in) in enumerate(zip(names, stand_ins, strict=True)):
                if name in rows:
                    fresh.state[stand_in] = rows[name]
                if name in shared and i < len(fresh.param_groups):
                    fresh.param_groups[i].update(shared[name])
        for old in [old for old in self._inner if set(old) & set(names)]:
            del self._inner[old]
        self._inner[names] = fresh
        return fresh

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with one step of the foreign optimizer on the update."""
        params = objective.params
        inner = self._optimizer(params)
        stand_ins = [p for group in inner.param_groups for p in group["params"]]
        updates = objective.get_updates()
        for i, (stand_in, param) in enumerate(zip(stand_ins, params, strict=True)):
            stand_in.data.copy_(param.detach())
            here = objective.present is None or objective.present[i]
            stand_in.grad = updates[i].clone(memory_format=torch.contiguous_format) if here else None
            if i < len(inner.param_groups):
                inner.param_groups[i].update(dict(self.settings[param]))
        if self.evaluates:
            with objective.moved(), torch.enable_grad():
                inner.step(_Evaluate(objective, stand_ins))  # type: ignore[arg-type]
        else:
            inner.step()
        objective.updates = [
            param.detach() - stand_in.detach() for param, stand_in in zip(params, stand_ins, strict=True)
        ]
        return objective

    def reset(self) -> None:
        """Clear the foreign optimizer's state."""
        super().reset()
        self._inner, self._loaded = {}, None

    def __getstate__(self) -> dict[str, Any]:
        # Some optimizers of torch can't be copied; their state can, and they are constructed again from it.
        return {**super().__getstate__(), "_inner": {}, "_loaded": self._extra_pack() or None}

    def _extra_pack(self) -> dict[str, Any]:
        """Return the state of the foreign optimizer, by the names of the parameters."""
        out: dict[str, Any] = {"names": [], "state": {}, "groups": {}, **(self._loaded or {})}
        out = {"names": list(out["names"]), "state": dict(out["state"]), "groups": dict(out["groups"])}
        for names, inner in self._inner.items():
            stand_ins = [p for group in inner.param_groups for p in group["params"]]
            out["names"] = [old for old in out["names"] if not set(old) & set(names)] + [list(names)]
            out["state"].update(
                {name: dict(inner.state[p]) for name, p in zip(names, stand_ins, strict=True) if p in inner.state}
            )
            for name, group in zip(names, inner.param_groups, strict=False):
                out["groups"][name] = {key: value for key, value in group.items() if key != "params"}
        return out if out["names"] else {}

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        self._inner, self._loaded = {}, extra or None


class _Evaluate:
    """The closure for a foreign optimizer; the first evaluation reuses that of the chain."""

    def __init__(self, objective: Objective, stand_ins: list[Tensor]) -> None:
        self.objective, self.stand_ins, self.first = objective, stand_ins, True

    @torch.no_grad()
    def __call__(self) -> Tensor:
        objective = self.objective
        if self.first:
            self.first = False
            return objective.get_loss(backward=True)
        objective.move_to([p.detach() for p in self.stand_ins])
        loss, grads = objective.get_loss_grads(at_x0=False)
        for stand_in, grad in zip(self.stand_ins, grads, strict=True):
            stand_in.grad = grad.clone(memory_format=torch.contiguous_format)
        return objective.get_loss(backward=True) if loss is None else loss


def _settings(opt_fn: Callable[..., Any]) -> set[str]:
    """Return the arguments that a torch optimizer stores in its groups: all that are named, except the parameters."""
    try:
        parameters = list(inspect.signature(opt_fn).parameters.values())
    except (TypeError, ValueError):
        return set()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters[1:] if p.kind in named}


def _wants_closure(opt_fn: Callable[..., Any]) -> bool:
    """Return whether a step can't be made without a closure."""
    step = getattr(opt_fn, "step", None)
    if step is None:
        return False
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
