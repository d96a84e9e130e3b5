"""Smoothing: of the update over its elements, or of the loss over its neighbourhood.

* The loss and its gradient around a point, in place of those at the point.
* Smoothing the update over its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..optim import Chainable, DeclaredLink, Module, Objective, Reformulation, Setting, UpdateTransform, sample_like
from ..optim import ranges as check
from ._measures import reset_others
from ._vectors import copy_gradients
from .adaptive._axes import work
from .termination import TerminationCriteria

__all__ = ["GradientSampling", "LaplacianSmoothing"]


class GradientSampling(DeclaredLink, Reformulation):
    r"""Optimizes an aggregate of the loss at x and at points $x + \sigma z_i$ around it.

    "mean" is a smoothed loss (for normal $z_i$ a Gaussian homotopy). "hull" takes the loss at x and, as its gradient, the
    shortest vector in the convex hull of the sampled gradients, $\arg\min_{\lambda \ge 0, \sum\lambda = 1} \|\sum_i
    \lambda_i g_i\|$, which descends where the loss has kinks; it is the method of the paper. The other ways: "max" and "min"
    (of the values, and element by element the largest or smallest components in size), "min-norm" (the shortest sampled
    gradient), "min-value" (that of the lowest point).

    Args:
        modules: Links that see the new objective; None for all that follow.
        sigma: The radius.
        n: How many points, x itself included if it is.
        aggregate: How values and gradients are made one.
        distribution: Of the points: "normal", "uniform", "rademacher" or "sphere".
        include_x0: Whether x is one of the points.
        fixed: The same points at all evaluations of a step, so that line searches see one function; False draws new ones at
            each evaluation.
        termination: A criterion; where it is met, $\sigma$ shrinks and the criterion restarts.
        decay: What $\sigma$ is then multiplied by.
        reset_on_termination: Whether the state of all other links is reset, too.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> opt = mo.Optimizer([w], m.GradientSampling(sigma=0.1, n=8, seed=0), m.LR(0.25))
        >>> _ = opt.step(mo.closure(lambda: w.abs().sum()))
        >>> w.data, opt.num_evaluations
        (tensor([1.7500]), 8)

    References:
        J. V. Burke, A. S. Lewis, M. L. Overton, "A robust gradient sampling algorithm for nonsmooth, nonconvex
        optimization", SIAM Journal on Optimization 15 (2005).
    """

    decides_on_host = True

    ranges = {
        check.positive: ("sigma", "decay"),
        check.at_least_one: ("n",),
        check.one_of("mean", "max", "min", "min-norm", "min-value", "hull"): ("aggregate",),
        check.one_of("normal", "uniform", "rademacher", "sphere"): ("distribution",),
    }
    attributes = (
        "n",
        "aggregate",
        "distribution",
        "include_x0",
        "fixed",
        "termination",
        "reset_on_termination",
        "seed",
    )

    modules: Chainable | None = field(default=None, kw_only=False)
    sigma: float = 1.0
    n: int = 100
    aggregate: str = "mean"
    distribution: str = "normal"
    include_x0: bool = True
    fixed: bool = True
    termination: TerminationCriteria | None = None
    decay: float = 2 / 3
    reset_on_termination: bool = True
    seed: int | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        self.set_child("termination", self.termination)
        self._points: list[list[Tensor]] | None = None

    def _draw(self, params: list[Tensor]) -> list[list[Tensor]]:
        generator = self.get_generator(params[0].device, self.seed)
        count = self.n - 1 if self.include_x0 else self.n
        return [sample_like(params, self.distribution, 1.0, generator) for _ in range(count)]

    def pre_step(self, objective: Objective) -> None:
        """Draw the points of this step, and reduce the radius if it is due."""
        self._points = self._draw(objective.params) if self.fixed else None
        criterion = self.children.get("termination")
        if isinstance(criterion, TerminationCriteria) and criterion.check_now(objective) is not None:
            criterion.reset()
            shrink = self.settings[objective.params[0]]["decay"]
            self.global_state["scale"] = self.global_state.get("scale", 1.0) * shrink
            if self.reset_on_termination:
                objective.post_step_hooks.append(self._reset_others)

    def _reset_others(self, objective: Objective, modules: Sequence[Module]) -> None:
        reset_others(self, objective, modules)
        if "modules" in self.children:
            self.children["modules"].reset()

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor, Sequence[Tensor] | None]:
        points = self._points if self._points is not None else self._draw(params)
        scale = self.global_state.get("scale", 1.0)
        start = [param.detach().clone() for param in params]
        values: list[Tensor] = []
        grads: list[list[Tensor]] = []
        for point in [None, *points] if self.include_x0 or not points else points:
            for param, a, z in zip(params, start, point or start, strict=True):
                param.copy_(a if point is None else a + scale * self.settings[param]["sigma"] * z)
            # The closure may return the same tensor every time.
            values.append(closure(backward).clone())
            if backward:
                grads.append(copy_gradients(params))
        value, gradient = _aggregate(self.aggregate, torch.stack(values), grads)
        if gradient is None:
            return value, None
        # A parameter that no point has a gradient for has none.
        absent = [None if param.grad is None else g for g, param in zip(gradient, params, strict=True)]
        return value, absent  # type: ignore[return-value]


def _aggregate(way: str, values: Tensor, grads: list[list[Tensor]]) -> tuple[Tensor, list[Tensor] | None]:
    """Return the aggregate of the losses and that of the gradients; None without gradients."""
    if way == "min-norm" and not grads:
        way = "mean"
    if way == "min-norm":
        pick = torch.stack([_square(g, g) for g in grads]).argmin()
    else:
        pick = values.argmin() if way in ("min", "min-value") else values.argmax()
    value = {"mean": values.mean(), "hull": values[0]}.get(way, values[pick])
    if not grads:
        return value, None
    columns = [torch.stack(list(column)) for column in zip(*grads, strict=True)]
    if way == "mean":
        return value, [column.mean(0) for column in columns]
    if way in ("max", "min"):
        return value, [_extreme(column, way == "max") for column in columns]
    if way == "hull":
        weights = _shortest(grads)
        return value, [torch.tensordot(weights.to(column.dtype), column, 1) for column in columns]
    return value, grads[int(pick)]


def _square(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(x.conj() * y).real.double().sum() for x, y in zip(a, b, strict=True)]).sum()


def _extreme(column: Tensor, largest: bool) -> Tensor:
    sizes = column.abs()
    index = sizes.argmax(0, keepdim=True) if largest else sizes.argmin(0, keepdim=True)
    return column.gather(0, index).squeeze(0)


def _shortest(vectors: list[list[Tensor]], rounds: int = 1000) -> Tensor:
    """Return the weights of the shortest vector in a convex hull, by Wolfe's criterion with pairwise exact steps."""
    gram = torch.stack([torch.stack([_square(a, b) for b in vectors]) for a in vectors])
    weights = torch.zeros(len(gram), dtype=gram.dtype, device=gram.device)
    weights[int(gram.diagonal().argmin())] = 1.0
    for _ in range(rounds):
        slope = gram @ weights
        toward = int(slope.argmin())
        away = int(torch.where(weights > 0, slope, -torch.inf).argmax())
        gain = float(slope[away] - slope[toward])
        if gain <= 1e-12 * float(gram.diagonal().max()):
            break
        bend = float(gram[toward, toward] - 2 * gram[toward, away] + gram[away, away])
        length = min(float(weights[away]), gain / bend) if bend > 0 else float(weights[away])
        weights[toward] += length
        weights[away] -= length
    return weights


class LaplacianSmoothing(UpdateTransform):
    r"""Solves $(I - \sigma\Delta)\,v = u$ with the periodic second difference $\Delta$ over the elements of each tensor.

    In Fourier space it is a division by $1 + 2\sigma(1 - \cos(2\pi k/n))$. The sum of the elements stays, noise between
    neighbours shrinks.

    Args:
        sigma: How much is smoothed; 0 changes nothing.
        layerwise: Each tensor by itself, in the order of its elements; False: all parameters as one vector.
        min_numel: Tensors with fewer elements stay as they are.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.LaplacianSmoothing(), [torch.tensor([1.0, -1.0, 1.0, -1.0])])
        [tensor([ 0.2000, -0.2000,  0.2000, -0.2000])]

    References:
        S. Osher et al., "Laplacian smoothing gradient descent", Research in the Mathematical Sciences 9 (2022).
    """

    members = "batched"
    differentiable = True

    ranges = {check.non_negative: ("sigma",), check.at_least_one: ("min_numel",)}
    attributes = ("min_numel",)

    sigma: Setting = field(default=1.0, kw_only=False)
    layerwise: bool = True
    min_numel: int = 4

    def collect(self, given: Mapping[str, Any]) -> None:
        settings = {key: given[key] for key in ("sigma", "min_numel")}
        super().collect({**settings, "concat_params": not given["layerwise"]})

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        n = tensor.numel()
        if n < self.min_numel:
            return tensor
        x = work(tensor).reshape(-1)
        real = not x.is_complex()
        spectrum = torch.fft.rfft(x) if real else torch.fft.fft(x)
        angle = torch.arange(len(spectrum), device=tensor.device, dtype=spectrum.real.dtype) * (2 * math.pi / n)
        spectrum = spectrum / (1 + 2 * setting["sigma"] * (1 - torch.cos(angle)))
        smooth = torch.fft.irfft(spectrum, n) if real else torch.fft.ifft(spectrum)
        return smooth.reshape(tensor.shape).to(tensor.dtype)
