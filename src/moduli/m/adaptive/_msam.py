"""Momentum-SAM: the gradient at a point perturbed along the momentum, without a second evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...optim import Chainable, Objective, Transform, as_real
from ...optim import step as run
from .._checks import check_settings, fraction, non_negative
from .._scalars import divide, read
from .._transforms import Settings, States


class _Perturbed(Transform):
    """Parameters that stay at points shifted along the momentum: keeps the momentum, and the shift before and now."""

    def update_states(self, objective: Objective, states: States, settings: Settings) -> None:
        """The momentum, and where it moves the points to."""
        kept: list[tuple[dict[str, Any], Any]] = []
        for i, (u, state, setting) in enumerate(zip(objective.peek_updates(), states, settings, strict=True)):
            if objective.present is not None and not objective.present[i]:
                continue
            if "velocity" not in state:
                state["velocity"], state["shift"] = torch.zeros_like(u), torch.zeros_like(u)
            beta = setting["momentum"]
            state["velocity"].mul_(beta).add_(u, alpha=1 - beta if setting["lerp"] else 1.0)
            kept.append((state, setting))
        if not kept:
            return
        size = read(kernels.norm([as_real(state["velocity"]) for state, _ in kept]))
        for state, setting in kept:
            state["before"] = state["shift"]
            state["shift"] = state["velocity"] * divide(setting["rho"], size, 0.0)

    @staticmethod
    def _shift_step(state: dict[str, Any], step: Tensor) -> Tensor:
        return step + state["shift"] - state["before"]


class MSAMMomentum(_Perturbed):
    r"""Momentum whose gradients are taken at points perturbed along it, which finds flatter minima at the price of momentum.

    $v_t = \beta v_{t-1} + u_t,\quad u \leftarrow \eta v_t + \rho\frac{v_t}{\|v_t\|} - \rho\frac{v_{t-1}}{\|v_{t-1}\|}$, so that
    the parameters are at $w_t - \rho v_t / \|v_t\|$ where $w_t = w_{t-1} - \eta v_t$ is what is trained. It has a step size
    of its own: do not add `LR`.

    Args:
        lr: The step size $\eta$.
        momentum: The memory $\beta$.
        rho: The size of the perturbation.
        weight_decay: Adds this multiple of the parameters to the step, times the step size.
        nesterov: Step along $u_t + \beta v_t$.
        lerp: Let v be a mean, $\beta v_{t-1} + (1 - \beta) u_t$.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], m.MSAMMomentum(0.25, rho=0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([1.])

    References:
        M. Becker, F. Altrock, B. Risse, "Momentum-SAM: sharpness aware minimization without computational overhead",
        arXiv:2401.12033, Algorithm 1.
    """

    ranges = {fraction: ("momentum",), non_negative: ("lr", "rho", "weight_decay")}

    def __init__(
        self,
        lr: Any,
        *,
        momentum: Any = 0.9,
        rho: Any = 0.3,
        weight_decay: Any = 0.0,
        nesterov: bool = False,
        lerp: bool = False,
    ) -> None:
        super().__init__(check_settings(self, locals()))

    def apply_states(self, objective: Objective, states: States, settings: Settings) -> Objective:
        """Along the momentum, and to the next perturbed point."""
        out = list(objective.get_updates())
        for i, (param, state, setting) in enumerate(zip(objective.params, states, settings, strict=True)):
            if "before" in state:
                step = state["velocity"]
                if setting["nesterov"]:
                    fresh = 1 - setting["momentum"] if setting["lerp"] else 1.0
                    step = out[i] * fresh + step * setting["momentum"]
                step = (step + param.detach() * setting["weight_decay"]) * setting["lr"]
                out[i] = self._shift_step(state, step)
        objective.updates = out
        return objective


class MSAM(_Perturbed):
    r"""Lets any links see gradients at points perturbed along a momentum, as `MSAMMomentum` does.

    The parameters are at $w_t - \rho v_t / \|v_t\|$, and w moves by what the links make of the gradient there.

    Args:
        modules: The links, with their step size.
        momentum: The memory of v.
        rho: The size of the perturbation.
        lerp: Let v be a mean, not a sum.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], m.MSAM(m.LR(0.25), rho=0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([1.])

    References:
        M. Becker, F. Altrock, B. Risse, "Momentum-SAM: sharpness aware minimization without computational overhead",
        arXiv:2401.12033.
    """

    def __init__(self, modules: Chainable, *, momentum: Any = 0.9, rho: Any = 0.3, lerp: bool = False) -> None:
        fraction("MSAM", momentum=momentum)
        non_negative("MSAM", rho=rho)
        super().__init__({"momentum": momentum, "rho": rho, "lerp": lerp})
        self.set_child("modules", modules)

    def apply_states(self, objective: Objective, states: States, settings: Settings) -> Objective:
        """What the links make of the update, and to the next perturbed point."""
        objective.get_updates()
        objective = run(objective, [self.children["modules"]])
        objective.updates = [
            self._shift_step(state, u) if "before" in state else u
            for u, state in zip(objective.get_updates(), states, strict=True)
        ]
        return objective
