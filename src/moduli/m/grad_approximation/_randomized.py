"""Randomised finite differences: the gradient from a few random directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Objective, sample_like
from ._base import GradApproximator
from ._formulas import FORMULAS, check_formula, derivative

DISTRIBUTIONS = ("rademacher", "normal", "gaussian", "uniform", "sphere")


class RandomizedFDM(GradApproximator):
    r"""The mean of $z\,D_zf$ over random directions $z$, with the derivative $D_z f$ along $z$ by finite differences.

    Components of $z$ have mean 0 and variance 1, so that the estimate is unbiased up to the error of the differences.

    Args:
        h: The length of the differences.
        n_samples: How many directions.
        formula: As for `FDM`.
        distribution: "rademacher", "normal", "uniform" or "sphere".
        pre_generate: Draw the directions once per step, so that a line search sees one function.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.RandomizedFDM(n_samples=4, seed=0), m.LR(0.1))
        >>> for _ in range(99):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        Y. Nesterov, V. Spokoiny, "Random gradient-free minimization of convex functions", Found. Comput. Math. 17 (2017).
    """

    replays = False

    def __init__(
        self,
        *,
        h: Any = 1e-3,
        n_samples: int = 1,
        formula: str = "central",
        distribution: str = "rademacher",
        pre_generate: bool = True,
        seed: int | None = None,
        modules: Chainable | None = None,
    ) -> None:
        name = type(self).__name__
        check_formula(name, formula)
        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"{name}: distribution is {distribution!r}; it can be {', '.join(DISTRIBUTIONS)}")
        if n_samples < 1:
            raise ValueError(f"{name}: n_samples is {n_samples}; draw at least one direction")
        super().__init__(
            {
                "h": h,
                "n_samples": n_samples,
                "formula": formula,
                "distribution": distribution,
                "pre_generate": pre_generate,
            },
            modules,
        )
        self.seed = seed

    def _draw(self, params: list[Tensor], setting: Any) -> list[Tensor]:
        return sample_like(params, setting["distribution"], generator=self.get_generator(params[0].device, self.seed))

    def pre_step(self, objective: Objective) -> None:
        """Draws the directions of this step."""
        params = objective.params
        setting = self.settings[params[0]]
        if setting["pre_generate"] and not self.replays:
            draws = [self._draw(params, setting) for _ in range(setting["n_samples"])]
            for i, param in enumerate(params):
                self.state[param]["directions"] = [draw[i] for draw in draws]

    def direction(self, params: list[Tensor], k: int, setting: Any) -> list[Tensor]:
        """The k-th direction."""
        if setting["pre_generate"] and "directions" in self.state[params[0]]:
            return [self.state[param]["directions"][k] for param in params]
        return self._draw(params, setting)

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """As many evaluations as the formula has points, per direction."""
        h, formula, count = float(setting["h"]), setting["formula"], int(setting["n_samples"])
        grads = [torch.zeros_like(param) for param in params]
        start = [param.detach().clone() for param in params]
        if 0 in FORMULAS[formula][0] and loss is None:
            loss = value()
        for k in range(count):
            z = self.direction(params, k, setting)

            def evaluate_at(point: int, z: list[Tensor] = z) -> Tensor:
                for param, x, v in zip(params, start, z, strict=True):
                    param.copy_(x + point * h * v)
                return value()

            slope, loss = derivative(evaluate_at, formula, h, loss)
            for grad, v in zip(grads, z, strict=True):
                grad.add_(v * (slope / count).to(v.dtype))
        for param, x in zip(params, start, strict=True):
            param.copy_(x)
        return grads, loss
