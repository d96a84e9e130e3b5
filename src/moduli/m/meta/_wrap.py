"""Any torch optimizer as a link."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import Module, Objective

__all__ = ["Wrap"]


class Wrap(Module):
    """A foreign `torch.optim.Optimizer` as a link: its step, taken on the incoming update, becomes the outgoing one.

    Its settings are reached by the groups of the surrounding optimizer under their own names, and its state is saved with
    the chain's.

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

    vector_state = False

    def __init__(
        self, opt_fn: Callable[..., torch.optim.Optimizer], *args: Any, use_param_groups: bool = True, **kwargs: Any
    ) -> None:
        if isinstance(opt_fn, torch.optim.Optimizer):
            raise TypeError(
                f"Wrap takes the class, not an optimizer: write Wrap({type(opt_fn).__name__}, lr=...); the link makes it for "
                "the parameters of the chain"
            )
        names = _settings(opt_fn)
        super().__init__({key: value for key, value in kwargs.items() if key in names and use_param_groups})
        self.opt_fn = opt_fn
        self.args = args
        self.kwargs = kwargs
        self._inner: torch.optim.Optimizer | None = None
        self._loaded: dict[str, Any] | None = None

    def _optimizer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """The foreign optimizer, over stand-ins: it never sees the parameters themselves, so nothing moves twice."""
        known = [p for group in self._inner.param_groups for p in group["params"]] if self._inner is not None else []
        if self._inner is not None and len(known) == len(params):
            return self._inner
        stand_ins = [torch.nn.Parameter(param.detach().clone()) for param in params]
        fresh = self.opt_fn([{"params": [p]} for p in stand_ins], *self.args, **self.kwargs)
        if self._inner is not None:
            # Parameters were added: those that were there keep what was learnt about them.
            for old, new in zip(known, stand_ins, strict=False):
                if old.shape == new.shape:
                    fresh.state[new] = self._inner.state[old]
        if self._loaded is not None:
            fresh.load_state_dict(self._loaded)
            self._loaded = None
        self._inner = fresh
        return fresh

    def apply(self, objective: Objective) -> Objective:
        """One step of the foreign optimizer on the update."""
        params = objective.params
        inner = self._optimizer(params)
        stand_ins = [group["params"][0] for group in inner.param_groups]
        updates = objective.get_updates()
        for i, (stand_in, param) in enumerate(zip(stand_ins, params, strict=True)):
            stand_in.data.copy_(param.detach())
            here = objective.present is None or objective.present[i]
            stand_in.grad = updates[i].clone() if here else None
            inner.param_groups[i].update(dict(self.settings[param]))
        inner.step()
        objective.updates = [
            param.detach() - stand_in.detach() for param, stand_in in zip(params, stand_ins, strict=True)
        ]
        return objective

    def reset(self) -> None:
        """Forget the foreign optimizer's state."""
        super().reset()
        self._inner = self._loaded = None

    def _extra_pack(self) -> dict[str, Any]:
        if self._inner is None:
            return {"optimizer": self._loaded}
        return {"optimizer": self._inner.state_dict()}

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        self._inner, self._loaded = None, extra.get("optimizer")


def _settings(opt_fn: Callable[..., Any]) -> set[str]:
    """The arguments that a torch optimizer keeps in its groups: all that are named, but for the parameters."""
    try:
        parameters = list(inspect.signature(opt_fn).parameters.values())
    except (TypeError, ValueError):
        return set()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters[1:] if p.kind in named}
