"""Forward gradients: directional derivatives by forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from ...optim import Chainable, ChainError, Objective, Optimizer
from .._transforms import collect_settings
from ._fdm import FORMULAS
from ._randomized import RandomDirections

_METHODS = ("autograd", "fd_forward", "fd_central")


class ForwardGradient(RandomDirections):
    r"""The mean of $z\,(\nabla f \cdot z)$ over random directions $z$, without a backward pass.

    The parameters carry a tangent while the loss is evaluated, so that one forward pass gives value and derivative.

    Args:
        n_samples: How many directions.
        distribution: "gaussian", "rademacher", "uniform" or "sphere".
        pre_generate: Draw the directions once per step, so that a line search sees one function.
        jvp_method: "autograd" (forward mode), or the differences "fd_forward" and "fd_central".
        h: The length of the differences.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ForwardGradient(seed=0, n_samples=4), m.LR(0.1))
        >>> for _ in range(99):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        A. G. Baydin et al., "Gradients without backpropagation", arXiv:2202.08587 (2022).
    """

    def __init__(
        self,
        *,
        n_samples: int = 1,
        distribution: str = "gaussian",
        pre_generate: bool = True,
        jvp_method: str = "autograd",
        h: Any = 1e-3,
        seed: int | None = None,
        modules: Chainable | None = None,
    ) -> None:
        if jvp_method not in _METHODS:
            raise ValueError(f"ForwardGradient: jvp_method is {jvp_method!r}; it can be {', '.join(_METHODS)}")
        super().__init__(collect_settings(locals(), "jvp_method", "seed", "modules"), seed, modules)
        self.jvp_method = jvp_method

    def attached(self, optimizer: Optimizer) -> None:
        """Tangents of whole parameters do not reach a model whose parameters are in pieces."""
        if optimizer.shards is not None and self.jvp_method == "autograd":
            raise ChainError(
                "ForwardGradient gives parameters a tangent, which those in pieces (DTensor, FSDP) can't carry; use "
                "jvp_method='fd_central', or train with DistributedDataParallel"
            )

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, list[Tensor] | None]:
        """The loss, and its forward gradient where it is asked for."""
        if not backward or self.jvp_method != "autograd" or objective.evaluator is None:
            return super().closure(backward, closure, params, objective)
        setting = self.settings[params[0]]
        count = int(setting["n_samples"])
        grads = [torch.zeros_like(param) for param in params]
        loss: Tensor | float = 0.0
        for k in range(count):
            z = self.direction(params, k, setting)
            with forward.dual_level():
                for param, v in zip(params, z, strict=True):
                    # In place: the closure reads these very tensors.
                    param.copy_(forward.make_dual(param.detach().clone(), v))  # type: ignore[no-untyped-call]
                value = objective._scalar(objective.evaluator.value())
                found, tangent = forward.unpack_dual(value)  # type: ignore[no-untyped-call]
                loss = found.detach().clone()
                slope = torch.zeros_like(found) if tangent is None else tangent.detach().clone()
            if objective.reduce is not None:  # the derivative of the loss of all processes
                loss, slope = objective.reduce(found.detach()), objective.reduce(slope)
            for grad, v in zip(grads, z, strict=True):
                grad.add_(v * (slope / count).to(v.dtype))
        return loss, grads

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """The same by differences."""
        formula = FORMULAS["forward" if self.jvp_method == "fd_forward" else "central"]
        return self.difference(value, params, loss, setting, formula)
