"""Links that reset the state of other links."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .. import kernels
from ..optim import Chainable, ChainError, Module, Objective
from ..optim import ranges as check
from ..optim import step as run
from ._measures import measure_move, reset_others

__all__ = ["BirginMartinezRestart", "PowellRestart", "RestartEvery", "RestartOnStuck", "RestartStrategy"]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float(kernels.dot(a, b).real)


class RestartStrategy(Module):
    """Resets links when a condition is met: those inside, or, without any, all others of the optimizer after the step.

    Override `should_reset`.

    Args:
        defaults: Settings.
        modules: The links to reset.
    """

    shared_settings = True
    needs = frozenset()

    def __init__(self, defaults: dict[str, Any] | None = None, modules: Chainable | None = None) -> None:
        super().__init__(defaults)
        self.set_child("modules", modules)

    @abstractmethod
    def should_reset(self, objective: Objective) -> bool:
        """Return whether to reset now."""

    def update(self, objective: Objective) -> None:
        """Check the condition, and let the inner links learn."""
        reset = self.should_reset(objective)
        if "modules" in self.children:
            if reset:
                self.children["modules"].reset()
            self.children["modules"].update(objective)
        elif reset:
            if self.settings.binding.member is not None:
                raise ChainError(
                    f"{type(self).__name__} can't reset all other links for one member of a population; "
                    f"put those to reset inside: {type(self).__name__}(modules, ...)"
                )
            objective.post_step_hooks.append(partial(reset_others, self))

    def apply(self, objective: Objective) -> Objective:
        """Transform the update by the inner links."""
        return self.children["modules"].apply(objective) if "modules" in self.children else objective

    def step(self, objective: Objective) -> Objective:
        """Check the condition, and run the step of the inner links."""
        if "modules" not in self.children:
            self.update(objective)
            return objective
        if self.should_reset(objective):
            self.children["modules"].reset()
        return run(objective, [self.children["modules"]])


class RestartOnStuck(RestartStrategy):
    """Restarts when the parameters have hardly moved for several steps.

    Args:
        modules: The links to reset; None for all others of the optimizer.
        tol: The largest change of a parameter that counts as none; None for the smallest that the dtype can show.
        n_tol: How many steps in a row.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = mo.Optimizer([w], m.RestartOnStuck(m.Adam(), n_tol=2), m.LR(0.0))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.link("Adam").state[w]["step"]
        1
    """

    points = ("previous",)
    decides_on_host = True

    def __init__(self, modules: Chainable | None = None, *, tol: float | None = None, n_tol: int = 10) -> None:
        check.at_least_one("RestartOnStuck", "n_tol", n_tol)
        super().__init__({"tol": tol}, modules)
        self.n_tol = n_tol

    def should_reset(self, objective: Objective) -> bool:
        tol = self.settings[objective.params[0]]["tol"]
        tol = 2 * torch.finfo(objective.params[0].dtype).tiny if tol is None else tol
        moved = measure_move(self, objective.params, torch.inf)
        stuck = 0 if moved is None or moved > tol else self.global_state.get("stuck", 0) + 1
        self.global_state["stuck"] = 0 if stuck >= self.n_tol else stuck
        return stuck >= self.n_tol


class RestartEvery(RestartStrategy):
    """Restarts every n steps.

    Args:
        modules: The links to reset; None for all others of the optimizer.
        steps: How many steps; "ndim" for the number of parameters, as conjugate gradients want it.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = mo.Optimizer([w], m.RestartEvery(m.Adam(), steps=2), m.LR(0.1))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.link("Adam").state[w]["step"]
        1
    """

    members = True

    def __init__(self, modules: Chainable | None = None, *, steps: int | Literal["ndim"]) -> None:
        if steps != "ndim":
            check.at_least_one("RestartEvery", "steps", steps)
        super().__init__(None, modules)
        self.steps = steps

    def should_reset(self, objective: Objective) -> bool:
        every = self.steps
        if every == "ndim":
            every = sum(p.numel() for p in objective.params) // (objective.members or 1)
        # Inner links are reset before the step that follows the n-th, all others after the n-th, which is equivalent.
        done = self.increment_counter("steps", 0 if "modules" in self.children else 1)
        return done > 0 and done % max(every, 1) == 0


class PowellRestart(RestartStrategy):
    r"""Restarts when successive gradients are far from orthogonal, or the direction is a bad one.

    $|g_k^\top g_{k-1}| \ge c_1 \|g_k\|^2$, or $d^\top g$ outside of $[(1-c_2)\|g\|^2, (1+c_2)\|g\|^2]$ for the update d of the
    links inside. (The update is subtracted, so a descent direction has $d^\top g > 0$.)

    Args:
        modules: The links to reset; None for all others of the optimizer.
        cond1: $c_1$; None to leave the first test out.
        cond2: $c_2$; None to leave the second test out.

    Example:
        >>> from moduli import m
        >>> m.PowellRestart(m.HeavyBall()).defaults
        {'cond1': 0.2, 'cond2': 0.2}

    References:
        M. J. D. Powell, "Restart procedures for the conjugate gradient method", Mathematical Programming 12 (1977).
    """

    decides_on_host = True

    def __init__(
        self, modules: Chainable | None = None, *, cond1: float | None = 0.2, cond2: float | None = 0.2
    ) -> None:
        super().__init__({"cond1": cond1, "cond2": cond2}, modules)

    def should_reset(self, objective: Objective) -> bool:
        grads = objective.get_grads()
        setting = self.settings[objective.params[0]]
        fresh = any("gradient" not in self.state[param] for param in objective.params)
        before = self.get_state(objective.params, "gradient", init=torch.zeros_like)
        square = _dot(grads, grads)
        reset = False
        if not fresh and setting["cond1"] is not None:
            reset = abs(_dot(grads, before)) >= setting["cond1"] * square
        direction = self.state[objective.params[0]].get("direction_slope")
        if not fresh and not reset and setting["cond2"] is not None and direction is not None:
            slope, size = direction
            reset = not (1 - setting["cond2"]) * size <= slope <= (1 + setting["cond2"]) * size
        for value, grad in zip(before, grads, strict=True):
            value.copy_(grad)
        return reset

    def step(self, objective: Objective) -> Objective:
        """Also store the slope along the direction, for the second test of the next step."""
        grads = [grad.clone() for grad in objective.get_grads()]
        out = super().step(objective)
        slope = _dot(out.peek_updates(), grads)
        self.state[objective.params[0]]["direction_slope"] = (slope, _dot(grads, grads))
        return out


class BirginMartinezRestart(Module):
    r"""Resets the links inside and follows the gradient where their update hardly points downhill.

    $d^\top g < c\,\|d\|\,\|g\|$ for the update d (which is subtracted).

    Args:
        module: The links.
        cond: c.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = mo.Optimizer([w], m.BirginMartinezRestart(m.Negate()), m.LR(0.25))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.5000])

    References:
        E. G. Birgin, J. M. Martínez, "A spectral conjugate gradient method for unconstrained optimization", Applied
        Mathematics and Optimization 43 (2001).
    """

    decides_on_host = True

    shared_settings = True

    def __init__(self, module: Chainable, *, cond: float = 1e-3) -> None:
        super().__init__({"cond": cond})
        self.set_child("module", module)

    def update(self, objective: Objective) -> None:
        """Let the inner links learn."""
        self.children["module"].update(objective)

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with the inner links' update, or with the gradient."""
        grads = [grad.clone() for grad in objective.get_grads()]
        return self._judge(self.children["module"].apply(objective), grads)

    def step(self, objective: Objective) -> Objective:
        """Run the step of the inner links, then check its direction."""
        grads = [grad.clone() for grad in objective.get_grads()]
        return self._judge(run(objective, [self.children["module"]]), grads)

    def _judge(self, objective: Objective, grads: list[Tensor]) -> Objective:
        update = objective.get_updates()
        cond = self.settings[objective.params[0]]["cond"]
        slope = _dot(update, grads)
        if slope < cond * float(kernels.norm(update)) * float(kernels.norm(grads)):
            self.children["module"].reset()
            objective.updates = grads
        return objective
