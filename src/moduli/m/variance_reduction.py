"""Variance reduction: less noise in gradients of batches.

* SVRG: gradients corrected by a full one from a while ago.
* MARS: a gradient corrected by its change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..optim import (
    Across,
    DeclaredLink,
    ListTransform,
    Objective,
    Reformulation,
    Setting,
    SettingsList,
    States,
    Tensors,
)
from ..optim import ranges as check
from ._measures import divide, norm, read, reset_others, smaller
from ._vectors import copy_gradients

__all__ = ["SVRG", "MARSCorrection"]


class SVRG(DeclaredLink, Reformulation):
    r"""Stochastic variance-reduced gradient: $g_b(x) - \alpha\,(g_b(x_0) - \bar g(x_0))$ in place of $g_b(x)$.

    First the gradient at $x_0$ is averaged over `accum_steps` batches, during which the parameters stay (or it is taken from
    `opt.step(closure, full_closure=...)` at once). Then follow `svrg_steps` steps with corrected gradients, each of which
    evaluates its batch at $x$ and at $x_0$; then it starts again.

    Args:
        svrg_steps: Steps between full gradients.
        accum_steps: Batches that make a full gradient; None: as many as `svrg_steps`.
        reset_before_accum: Whether the other links are reset when a new full gradient is started.
        svrg_loss: Whether the loss is corrected in the same way, by $-\alpha (f_b(x_0) - \bar f(x_0))$.
        alpha: How much is corrected, a number or a schedule; 1 is unbiased with the least variance near $x_0$.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.SVRG(2, accum_steps=2), m.LR(0.25))
        >>> for c in (1.0, 3.0, 1.0, 3.0):  # batches; the mean of all has its optimum at 2
        ...     _ = opt.step(mo.closure(lambda: ((w - c) ** 2).sum()))
        ...     print(w.item())
        1.0
        1.0
        1.5
        1.75

    References:
        R. Johnson, T. Zhang, "Accelerating stochastic gradient descent using predictive variance reduction", NIPS 2013.
        Y. Yin et al., "A coefficient makes SVRG effective", 2023 (alpha).
    """

    points = ("anchor",)
    shared_settings = True
    ranges = {
        check.at_least_one: ("svrg_steps",),
        check.allow(check.at_least_one, None): ("accum_steps",),
        check.non_negative: ("alpha",),
    }

    svrg_steps: int = field(kw_only=False)
    accum_steps: int | None = None
    reset_before_accum: bool = True
    svrg_loss: bool = True
    alpha: Setting = 1.0

    def apply(self, objective: Objective) -> Objective:
        """Average the full gradient, or install the corrected loss."""
        setting, memory = self.settings[objective.params[0]], self.global_state
        if any("anchor" not in self.state[param] for param in objective.params):  # a new parameter: begin again
            memory["left"] = memory["gathered"] = 0
        if memory.get("left", 0) == 0 and not self._gather(objective, setting):
            objective.stop = objective.skip_update = True
            objective.updates = [torch.zeros_like(param) for param in objective.params]
            return objective
        memory["left"] -= 1
        return super().apply(objective)

    def _gather(self, objective: Objective, setting: Any) -> bool:
        """Add the gradient of one batch to the average; return whether this step may go on with it."""
        memory, states = self.global_state, [self.state[param] for param in objective.params]
        count = memory.get("gathered", 0)
        if count == 0:
            self._restart(objective, states, setting)
        full = objective.storage.get("full_closure")
        if full is not None:
            with objective.moved():
                whole = objective.clone(clone_updates=False)
                whole.closure = full
                loss, grads = whole.get_loss_grads(at_x0=False)
                grads_copy = [grad.clone() for grad in grads]
            wanted = 1
        else:
            loss, grads_copy = objective.get_loss_grads()
            wanted = setting["accum_steps"] or setting["svrg_steps"]
        for state, grad in zip(states, grads_copy, strict=True):
            state["full"].add_((grad - state["full"]) / (count + 1))
        memory["full_loss"] = memory.get("full_loss", 0.0) + (
            (0.0 if loss is None else read(loss)) - memory.get("full_loss", 0.0)
        ) / (count + 1)
        memory["gathered"] = count + 1
        if count + 1 < wanted:
            return False
        memory["gathered"], memory["left"] = 0, setting["svrg_steps"]
        return full is not None

    def _restart(self, objective: Objective, states: Sequence[dict[str, Any]], setting: Any) -> None:
        again = bool(states[0])
        for state, param in zip(states, objective.params, strict=True):
            state["anchor"], state["full"] = param.detach().clone(), torch.zeros_like(param)
        self.global_state["full_loss"] = 0.0
        if again and setting["reset_before_accum"]:
            reset_others(self, objective, [] if objective.modular is None else objective.modular.modules)

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, Sequence[Tensor] | None]:
        setting = self.settings[params[0]]
        alpha, states = setting["alpha"], [self.state[param] for param in params]
        here = [param.clone() for param in params]
        loss: Tensor = closure(backward)
        grads = copy_gradients(params) if backward else None
        if not backward and not setting["svrg_loss"]:
            return loss, None
        for param, state in zip(params, states, strict=True):
            param.copy_(state["anchor"])
        old = closure(backward)
        if grads is not None:
            rows = zip(grads, copy_gradients(params), states, strict=True)
            grads = [grad - alpha * (before - state["full"]) for grad, before, state in rows]
        for param, value in zip(params, here, strict=True):
            param.copy_(value)
        if setting["svrg_loss"]:
            loss = loss - alpha * (old - self.global_state["full_loss"])
        return loss, grads


class MARSCorrection(ListTransform):
    r"""Adds a multiple of the change of the update, which makes the momentum that follows vary less.

    $c_t = u_t + \gamma \frac{\beta}{1-\beta}(u_t - u_{t-1})$, scaled down to norm at most 1 over all parameters. Put it
    before `Adam(beta1=...)` or `Lion` with the same $\beta$. It is the approximate variant, with the last update in place of
    the last parameters' gradient on this batch; inside `Online` it is the exact one.

    Args:
        beta: The memory of the momentum that follows.
        scaling: The factor $\gamma$.
        max_norm: The largest norm; None: any.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.MARSCorrection(beta=0.5, scaling=0.5, max_norm=None), torch.zeros(1)
        >>> for u in (1.0, 2.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([2.5000])]

    References:
        H. Yuan, Y. Liu, S. Wu, X. Zhou, Q. Gu, "MARS: unleashing the power of variance reduction for training large
        models", 2024.
    """

    members = "batched"

    across = Across.SUMS

    shared_settings = ("max_norm",)
    buffers = {"change": "grad"}
    ranges = {check.fraction: ("beta",), check.positive: ("scaling",), check.allow(check.positive, None): ("max_norm",)}

    projects = {"grad": ("previous",)}

    beta: float = 0.9
    scaling: float = 0.025
    max_norm: float | None = 1.0

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        previous = state.get("previous")
        state["change"] = torch.zeros_like(tensor) if previous is None else tensor - previous
        state["previous"] = tensor.clone()

    def transform_all(self, tensors: Tensors, states: States, settings: SettingsList) -> list[Tensor]:
        out = []
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            beta = setting["beta"]
            out.append(tensor.add(state["change"], alpha=setting["scaling"] * beta / (1 - beta)))
        limit = settings[0]["max_norm"]
        if limit is not None:
            scale = smaller(divide(limit, norm(out), 1.0), 1.0)
            if isinstance(scale, Tensor) or scale < 1:
                out = [tensor.mul_(scale) for tensor in out]
        return out

    def reset_for_online(self) -> None:
        """Clear the last update."""
        super().reset_for_online()
        self.clear_state_keys("previous")
