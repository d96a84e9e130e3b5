"""Differences along random directions.

* Forward gradients: directional derivatives by forward-mode differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from ...optim import Chainable, ChainError, DeclaredLink, Objective, Optimizer, Setting, sample_like
from ...optim import ranges as check
from ._fdm import FORMULAS, Formula, GradApproximator, derivative

DISTRIBUTIONS = ("rademacher", "normal", "gaussian", "uniform", "sphere")


class _RandomDirections(DeclaredLink, GradApproximator):
    """The mean of z times the derivative along z, over random directions z."""

    ranges = {check.at_least_one: ("n_samples",)}
    attributes = ("seed",)

    seed: int | None

    def _draw(self, params: list[Tensor], setting: Any) -> list[Tensor]:
        return sample_like(params, setting["distribution"], generator=self.get_generator(params[0].device, self.seed))

    def pre_step(self, objective: Objective) -> None:
        """Draw the directions of this step."""
        params = objective.params
        setting = self.settings[params[0]]
        if setting["pre_generate"]:
            draws = [self._draw(params, setting) for _ in range(setting["n_samples"])]
            for i, param in enumerate(params):
                self.state[param]["directions"] = [draw[i] for draw in draws]

    def direction(self, params: list[Tensor], k: int, setting: Any) -> list[Tensor]:
        """Return the k-th direction.

        Args:
            params: The parameters.
            k: Its number.
            setting: The settings in force.
        """
        if setting["pre_generate"] and "directions" in self.state[params[0]]:
            return [self.state[param]["directions"][k] for param in params]
        return self._draw(params, setting)

    def difference(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any, formula: Formula
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the result of `approximate`, with a formula for the derivatives.

        Args:
            value: As for `approximate`.
            params: The parameters.
            loss: As for `approximate`.
            setting: The settings in force.
            formula: The points and their weights.
        """
        h, count = float(setting["h"]), int(setting["n_samples"])
        grads = [torch.zeros_like(param) for param in params]
        start = [param.detach().clone() for param in params]
        if 0 in formula[0] and loss is None:
            loss = value()
        for k in range(count):
            z = self.direction(params, k, setting)

            def evaluate_at(point: int, z: list[Tensor] = z) -> Tensor:
                for param, x, v in zip(params, start, z, strict=True):
                    param.copy_(x + point * h * v)
                return value()

            slope = derivative(evaluate_at, formula, h, loss) / count
            for grad, v in zip(grads, z, strict=True):
                grad.add_(v * slope.to(v.dtype))
        for param, x in zip(params, start, strict=True):
            param.copy_(x)
        return grads, loss


class RandomizedFDM(_RandomDirections):
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

    ranges = {check.one_of(*FORMULAS): ("formula",), check.one_of(*DISTRIBUTIONS): ("distribution",)}

    h: Setting = 1e-3
    n_samples: int = 1
    formula: str = "central"
    distribution: str = "rademacher"
    pre_generate: bool = True
    seed: int | None = None
    modules: Chainable | None = None

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        return self.difference(value, params, loss, setting, FORMULAS[setting["formula"]])


class SPSA(RandomizedFDM):
    r"""Simultaneous perturbation: $g = \Delta\,(f(x + h\Delta) - f(x - h\Delta)) / 2h$ with random signs $\Delta$.

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
        >>> _ = torch.manual_seed(0)
        >>> opt = mo.Optimizer([w], m.SPSA(), m.LR(0.1))
        >>> for _ in range(150):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        J. C. Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient approximation", IEEE
        Trans. Automatic Control 37 (1992).
    """


class RDSA(RandomizedFDM):
    r"""Random directions: the same as `SPSA` with normal directions.

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
        >>> _ = torch.manual_seed(0)
        >>> opt = mo.Optimizer([w], m.RDSA(), m.LR(0.1))
        >>> for _ in range(150):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        L. A. Prashanth et al., "Adaptive system optimization using random directions stochastic approximation", IEEE Trans.
        Automatic Control 62 (2017).
    """

    formula: str = "central2"
    distribution: str = "gaussian"


class GaussianSmoothing(RandomizedFDM):
    r"""The gradient of $E_z f(x + hz)$ with normal $z$, estimated from many forward differences.

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
        >>> _ = torch.manual_seed(0)
        >>> opt = mo.Optimizer([w], m.GaussianSmoothing(), m.LR(0.1))
        >>> for _ in range(150):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        Y. Nesterov, V. Spokoiny, "Random gradient-free minimization of convex functions", Found. Comput. Math. 17 (2017).
    """

    h: Setting = 1e-2
    n_samples: int = 100
    formula: str = "forward2"
    distribution: str = "gaussian"


class SPSA1(RandomizedFDM):
    r"""One evaluation for a gradient: $g = \Delta\, f(x + h\Delta) / h$ with random signs $\Delta$.

    It is unbiased up to an error of order h, with a variance that grows as $f^2 / h^2$: for losses that can't be evaluated
    twice under the same conditions, and near zero.

    Args:
        h: The length of the perturbation.
        n_samples: How many directions.
        pre_generate: Draw the directions once per step, so that a line search sees one function.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SPSA1(h=0.5, n_samples=16, seed=0), m.LR(0.05))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.3)
        True

    References:
        J. C. Spall, "A one-measurement form of simultaneous perturbation stochastic approximation", Automatica 33 (1997).
    """

    ranges = {check.positive: ("h",)}

    formula: str = field(default="central", init=False)
    distribution: str = field(default="rademacher", init=False)
    pre_generate: bool = False

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        return self.difference(value, params, loss, setting, ((1,), (1.0,)))


class MeZO(RandomizedFDM):
    r"""Randomised differences that store a seed in place of the directions, and draw them again when needed.

    Args:
        h: The length of the differences.
        n_samples: How many directions.
        formula: As for `FDM`.
        distribution: "rademacher", "normal", "uniform" or "sphere".
        seed: Draws from a generator of its own, which is saved; None for torch's.
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> _ = torch.manual_seed(0)
        >>> opt = mo.Optimizer([w], m.MeZO(), m.LR(0.1))
        >>> for _ in range(150):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        S. Malladi et al., "Fine-tuning language models with just forward passes", NeurIPS 2023.
    """

    formula: str = "central2"
    pre_generate: bool = field(default=True, init=False)

    def pre_step(self, objective: Objective) -> None:
        """Draw the seeds of this step."""
        generator = self.get_generator("cpu", self.seed)
        count = self.settings[objective.params[0]]["n_samples"]
        self.global_state["seeds"] = torch.randint(0, 2**62, (count,), generator=generator).tolist()

    def direction(self, params: list[Tensor], k: int, setting: Any) -> list[Tensor]:
        generator = torch.Generator(params[0].device).manual_seed(self.global_state["seeds"][k])
        return sample_like(params, setting["distribution"], generator=generator)


class ForwardGradient(_RandomDirections):
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

    ranges = {check.one_of("autograd", "fd_forward", "fd_central"): ("jvp_method",)}
    attributes = ("jvp_method",)

    n_samples: int = 1
    distribution: str = "gaussian"
    pre_generate: bool = True
    jvp_method: str = "autograd"
    h: Setting = 1e-3
    seed: int | None = None
    modules: Chainable | None = None

    def attached(self, optimizer: Optimizer) -> None:
        """Raise ChainError for sharded parameters: tangents of gathered parameters do not reach the model."""
        if optimizer.shards is not None and self.jvp_method == "autograd":
            raise ChainError(
                "ForwardGradient gives parameters a tangent, which those in pieces (DTensor, FSDP) can't carry; use "
                "jvp_method='fd_central', or train with DistributedDataParallel"
            )

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, list[Tensor] | None]:
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
                    # In place: the closure reads the parameter tensors themselves.
                    param.copy_(forward.make_dual(param.detach().clone(), v))  # type: ignore[no-untyped-call]
                value = objective._scalar(objective.evaluator.value())
                primal, tangent = forward.unpack_dual(value)  # type: ignore[no-untyped-call]
                loss = primal.detach().clone()
                slope = torch.zeros_like(primal) if tangent is None else tangent.detach().clone()
            if objective.reduce is not None:  # the derivative of the loss of all processes
                loss, slope = objective.reduce(primal.detach()), objective.reduce(slope)
            for grad, v in zip(grads, z, strict=True):
                grad.add_(v * (slope / count).to(v.dtype))
        return loss, grads

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        formula = FORMULAS["forward" if self.jvp_method == "fd_forward" else "central"]
        return self.difference(value, params, loss, setting, formula)
