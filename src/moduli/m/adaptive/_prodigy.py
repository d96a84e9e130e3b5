"""Adaptive links that find their own step size.

* Prodigy: Adam that estimates its step size.
* D-Adaptation: Adam that estimates its step size by a lower bound.
* Heavy ball with step size and momentum from the loss and its optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ..._search_ranges import OWN_STEPS
from ..._torch import in_transform
from ...optim import Across, BufferTransform, ListTransform, Need, Objective, Setting, SettingsList, States, Tensors
from ...optim import ranges as check
from .._decays import DecayingLink, Decays
from .._measures import divide, dot, larger, norm, read, smaller
from .._vectors import VectorLink, flat, gather_update
from ..step_size._lr import multiply_scales
from ._adam import correct_bias
from ._axes import work


class Prodigy(BufferTransform, DecayingLink):
    r"""Adam times an estimate d of the distance to the solution, which only grows.

    With $\beta_3 = \sqrt{\beta_2}$ by default, $m = \beta_1 m + (1-\beta_1)\, d\, u,\quad v = \beta_2 v + (1-\beta_2)\, d^2 u^2$,
    $r = \beta_3 r + (1-\beta_3)\, \gamma d^2 \langle u, x_0 - x\rangle,\quad s = \beta_3 s + (1-\beta_3)\, \gamma d^2 u$,
    $u \leftarrow d\, (m / (\sqrt v + d\,\epsilon) + \lambda x)$, and then
    $d \leftarrow \max(d,\ r / \|s\|_1)$. No step size is needed: put `LR(1.0)`, with a schedule if any, after it. Its value in
    this step is $\gamma$, and so are the values of `StepSize` and `Warmup` behind it, multiplied.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        beta3: Memory of the estimate; None: the root of beta2.
        eps: Added to the denominator.
        d0: The first estimate: small, and below the true distance.
        d_coef: A factor of the estimate.
        growth_rate: How much the estimate may grow in a step.
        debias: Correct for the moments starting at zero (the authors leave it out).
        weight_decay: Decoupled weight decay $\lambda$, times the estimate as the steps are.
        only: "matrices" leaves biases and scales of normalisations alone, as in `WeightDecay`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([5.0]))
        >>> opt = mo.Optimizer([w], m.Prodigy(), m.LR(1.0))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 0.5
        True

    References:
        K. Mishchenko, A. Defazio, "Prodigy: an expeditiously adaptive parameter-free learner", ICML 2024, Algorithm 4.
    """

    search_ranges = {"lr": OWN_STEPS}

    points = ("start",)
    members = "batched"
    across = Across.SUMS

    shared_settings = ("d0", "d_coef", "growth_rate", "beta3")
    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    attributes = ("only",)
    ranges = {
        check.fraction: ("beta1", "beta2"),
        check.allow(check.fraction, None): ("beta3",),
        check.non_negative: ("eps", "weight_decay"),
        check.positive: ("d0", "d_coef"),
        check.above_one: ("growth_rate",),
    }

    beta1: float = 0.9
    beta2: float = 0.999
    beta3: float | None = None
    eps: float = 1e-8
    d0: float = 1e-6
    d_coef: float = 1.0
    growth_rate: float = float("inf")
    debias: bool = False
    weight_decay: Setting = 0.0
    only: Decays = "all"

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["start"] = param.clone()
        tensor = work(tensor)  # the square of a small estimate underflows in half precision
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_sq"] = torch.zeros_like(tensor.abs())
        state["s"] = torch.zeros_like(tensor)

    def multi_tensor_update(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: SettingsList,
    ) -> None:
        tensors = [work(tensor) for tensor in tensors]
        memory, setting = self.global_state, settings[0]
        d: Any = memory.get("next_d", setting["d0"])
        memory["d"] = d
        beta3 = setting["beta2"] ** 0.5 if setting["beta3"] is None else setting["beta3"]
        scales = multiply_scales(self, None if self._owner is None else self._owner(), params)
        away: list[Tensor] = [param.detach() for param in params]
        gamma: Any = scales[0]
        alike = all(_is_equal(scale, gamma) for scale in scales)
        for places in _find_alike(settings, scales):
            row, scale = settings[places[0]], scales[places[0]]
            lists = [[states[i][key] for i in places] for key in ("exp_avg", "exp_avg_sq", "s", "start")]
            numbers = (row["beta1"], row["beta2"], beta3)
            factors = (d * (1 - row["beta1"]), d * d * (1 - row["beta2"]), scale * d * d * (1 - beta3))
            differences = _learn([tensors[i] for i in places], *lists, [away[i] for i in places], *numbers, *factors)
            for i, tensor in zip(places, differences, strict=True):
                away[i] = tensor if alike else tensor * scale
        r = beta3 * memory.get("r", 0.0) + (1 - beta3) * (gamma if alike else 1.0) * d * d * dot(tensors, away)
        total = norm([state["s"] for state in states], 1)
        memory["r"] = r
        estimate = divide(setting["d_coef"] * r, total, 0.0)
        memory["next_d"] = larger(d, smaller(estimate, d * setting["growth_rate"]))

    def multi_tensor_apply(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: SettingsList,
    ) -> Sequence[Tensor]:
        d, out = self.global_state["d"], list(tensors)
        for places in _find_alike(settings, [state["step"] for state in states]):
            row = settings[places[0]]
            size, grow = correct_bias(d, states[places[0]]["step"], row)
            means, squares = ([states[i][key] for i in places] for key in ("exp_avg", "exp_avg_sq"))
            numbers = (size, grow, d * row["eps"], size * row["weight_decay"])
            own = [params[i].detach() for i in places]
            for i, tensor in zip(places, _step(means, squares, own, *numbers), strict=True):
                out[i] = tensor.to(tensors[i].dtype)
        return out


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two scalars are equal; tensors are compared by identity."""
    return value is other or (not isinstance(value, Tensor) and value == other)


def _find_alike(settings: SettingsList, others: Sequence[Any]) -> list[list[int]]:
    """Return the positions of parameters with equal settings and one more equal value, which share a pass."""
    groups: list[list[int]] = []
    for i, setting in enumerate(settings):
        for places in groups:
            first = places[0]
            if _is_equal(others[i], others[first]) and (
                setting is settings[first] or dict(setting) == dict(settings[first])
            ):
                places.append(i)
                break
        else:
            groups.append([i])
    return groups


def _learn_pointwise(
    g: Tensor,
    m: Tensor,
    v: Tensor,
    s: Tensor,
    start: Tensor,
    p: Tensor,
    beta1: Any,
    beta2: Any,
    beta3: Any,
    take1: Any,
    take2: Any,
    take3: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both moments and the weighted sum of updates after one more, and the distance from the start."""
    return m * beta1 + g * take1, v * beta2 + g * g * take2, s * beta3 + g * take3, start - p


def _step_pointwise(m: Tensor, v: Tensor, p: Tensor, size: Any, grow: Any, eps: Any, decay: Any) -> Tensor:
    return m * size / (v.sqrt() * grow + eps) + p * decay


_learn_fused = kernels.fuse(_learn_pointwise, inplace=("m", "v", "s", None))
_step_fused = kernels.fuse(_step_pointwise)


def _can_fuse(tensors: Tensors) -> bool:
    return not in_transform() and not torch.is_grad_enabled() and not any(map(torch.is_complex, tensors))


def _learn(g: Tensors, m: Tensors, v: Tensors, s: Tensors, start: Tensors, p: Tensors, *numbers: Any) -> list[Tensor]:
    """Run `_learn_pointwise` over lists, in one pass for real tensors; return the differences to the start."""
    if _can_fuse(g):
        return list(_learn_fused(g, m, v, s, start, p, *numbers)[-1])
    beta1, beta2, beta3, take1, take2, take3 = numbers
    for tensor, mean, square, total in zip(g, m, v, s, strict=True):
        mean.mul_(beta1).add_(tensor * take1)
        square.mul_(beta2).add_((tensor * tensor.conj()).real * take2)
        total.mul_(beta3).add_(tensor * take3)
    return [work(first - param) for first, param in zip(start, p, strict=True)]


def _step(m: Tensors, v: Tensors, p: Tensors, *numbers: Any) -> list[Tensor]:
    """Run `_step_pointwise` over lists, in one pass for real tensors."""
    if _can_fuse(m):
        return list(_step_fused(m, v, p, *numbers))
    return [_step_pointwise(*row, *numbers) for row in zip(m, v, map(work, p), strict=True)]


class DAdaptAdam(ListTransform):
    r"""Adam times a lower bound d of the distance to the solution, which only grows.

    With $A = \operatorname{diag}(\sqrt v + \epsilon)$ and $\rho = \sqrt{\beta_2}$,
    $m = \beta_1 m + (1-\beta_1)\, \gamma d\, u,\quad v = \beta_2 v + (1-\beta_2) u^2$,
    $r = \rho r + (1-\rho)\, \gamma d\, \langle u, A^{-1} s\rangle,\quad s = \rho s + (1-\rho)\, \gamma d\, u$,
    $u \leftarrow A^{-1} m$, and then $d \leftarrow \max\left(d,\ \frac{r}{(1-\rho)\|s\|_1}\right)$. No step size is needed:
    put `LR(1.0)` after it. The bound has to know of a schedule, which is given as `gamma`.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: Added to the denominator.
        d0: The first bound: small, and below the true distance.
        growth_rate: How much the bound may grow in a step.
        gamma: A factor of the steps that is part of the bound, usually a schedule that ends at 0.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([5.0]))
        >>> opt = mo.Optimizer([w], m.DAdaptAdam(), m.LR(1.0))
        >>> for _ in range(300):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 0.5
        True

    References:
        A. Defazio, K. Mishchenko, "Learning-rate-free learning by D-adaptation", ICML 2023, Algorithm 5.
    """

    search_ranges = {"lr": OWN_STEPS}

    members = "batched"
    shared_settings = ("d0", "growth_rate")
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {
        check.fraction: ("beta1", "beta2"),
        check.non_negative: ("eps", "gamma"),
        check.positive: ("d0",),
        check.above_one: ("growth_rate",),
    }

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    d0: float = 1e-6
    growth_rate: float = float("inf")
    gamma: Setting = 1.0

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)  # products with a small bound underflow in half precision
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_sq"] = torch.zeros_like(tensor.abs())
        state["s"] = torch.zeros_like(tensor)

    def learn_all(self, tensors: Tensors, states: States, settings: SettingsList) -> None:
        tensors = [work(tensor) for tensor in tensors]
        memory, setting = self.global_state, settings[0]
        d = memory.get("d", setting["d0"])
        rho = setting["beta2"] ** 0.5
        gained: Any = 0.0
        total: Any = 0.0
        for tensor, state, row in zip(tensors, states, settings, strict=True):
            square = tensor.abs().square() if tensor.is_complex() else tensor * tensor
            size = d * row["gamma"]
            state["exp_avg"].mul_(row["beta1"]).add_(tensor * (size * (1 - row["beta1"])))
            state["exp_avg_sq"].mul_(row["beta2"]).add_(square, alpha=1 - row["beta2"])
            denominator = state["exp_avg_sq"].sqrt() + row["eps"]
            gained = gained + size * dot([tensor], [state["s"] / torch.where(denominator > 0, denominator, 1.0)])
            state["s"].mul_(rho).add_(tensor * (size * (1 - rho)))
            total = total + read(state["s"].abs().sum(dtype=torch.float64))
        memory["r"] = rho * memory.get("r", 0.0) + (1 - rho) * gained
        estimate = divide(memory["r"], (1 - rho) * total, 0.0)
        memory["d"] = larger(d, smaller(estimate, d * setting["growth_rate"]))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        out = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + setting["eps"])
        return out.to(tensor.dtype)


class AdaptiveHeavyBall(VectorLink):
    r"""Heavy ball whose step size and momentum follow from the value of the optimum.

    $h_t = \frac{2(f_t - f^*)}{\|u_t\|^2},\quad m_t = \frac{-(f_t - f^*)\langle u_t, u_{t-1}\rangle}{(f_{t-1} - f^*)\|u_t\|^2 +
    (f_t - f^*)\langle u_t, u_{t-1}\rangle},\quad u \leftarrow (1 + m_t) h_t u_t - m_t (x_t - x_{t-1})$,
    with no momentum at first. On quadratics each point is the nearest to the optimum that gradients so far can reach, as with
    conjugate gradients, so that n steps are enough. It has a step size of its own: do not add `LR`.

    Args:
        f_star: The value of the optimum.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.AdaptiveHeavyBall())
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        B. Goujaud, A. Taylor, A. Dieuleveut, "Quadratic minimization: from conjugate gradient to an adaptive heavy-ball
        method with Polyak step-sizes", arXiv:2210.06367.
    """

    members = "batched"

    shared_settings = ("f_star",)
    needs = frozenset({Need.GRADIENT, Need.LOSS})

    f_star: float = 0.0

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        x, u = flat(objective.params), gather_update(objective)
        gap = read(objective.get_loss(backward=True).double()) - setting["f_star"]
        square = read(torch.dot(u, u))
        state["h"], state["m"], state["moved"] = divide(2 * gap, square, 0.0), 0.0, torch.zeros_like(x)
        if "x" in state:
            across = gap * read(torch.dot(u, state["u"]))
            below = state["gap"] * square + across
            state["m"] = divide(-across, below, 0.0)
            state["moved"] = x - state["x"]
        state["x"], state["u"], state["gap"] = x.clone(), u.clone(), gap

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        out: Tensor = (1 + state["m"]) * state["h"] * u - state["m"] * state["moved"].to(u.dtype)
        return out

    def reset_for_online(self) -> None:
        """Clear the last point."""
        super().reset_for_online()
        self.state.clear()
