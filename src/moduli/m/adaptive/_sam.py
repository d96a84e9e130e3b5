"""Gradients at a perturbed point, and orthogonal to the parameters.

* Sharpness-aware minimisation: the gradient at the worst point nearby.
* Momentum-SAM: the gradient at a point perturbed along the momentum, without a second evaluation.
* Updates orthogonal to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...optim import (
    Across,
    Chainable,
    DeclaredLink,
    Objective,
    Reformulation,
    Setting,
    SettingsList,
    States,
    Tensors,
    Transform,
    UpdateTransform,
    as_real,
)
from ...optim import ranges as check
from ...optim import step as run
from .._measures import divide, dot, read
from .._vectors import copy_gradients


class SAM(DeclaredLink, Reformulation):
    r"""Replaces the loss by about the largest one within a ball, $\max_{\|\epsilon\|_p \le \rho} f(x + \epsilon)$.

    The gradient is taken at $x + \epsilon$ with, for $1/p + 1/q = 1$,
    $\epsilon = \rho\,\operatorname{sign}(g)\,|g|^{q-1} / \|g\|_q^{q-1}$, that is $\rho g / \|g\|$ for p = 2, with one norm over
    all parameters. Every evaluation costs two gradients, and the loss that later links see is that at $x + \epsilon$.

    Args:
        rho: The radius $\rho$.
        p: The norm of the ball, above 1; infinity for a box.
        eps: Added to the norm of the gradient.
        asam: Measure the radius relative to the size of each weight, see `ASAM`.
        modules: Links that see the new loss; by default all that follow.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], m.SAM(rho=1.0), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([1.])

    References:
        P. Foret, A. Kleiner, H. Mobahi, B. Neyshabur, "Sharpness-aware minimization for efficiently improving
        generalization", ICLR 2021.
        J. Kwon, J. Kim, H. Park, I. K. Choi, "ASAM: adaptive sharpness-aware minimization", ICML 2021.
    """

    across = Across.SUMS

    shared_settings = ("p", "eps")

    ranges = {check.non_negative: ("rho", "eps"), check.above_one: ("p",)}

    rho: Setting = 0.05
    p: float = 2.0
    eps: float = 1e-10
    asam: bool = False
    modules: Chainable | None = None

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, Sequence[Tensor] | None]:
        closure(True)
        grads = copy_gradients(params)
        present = [p.grad is not None for p in params]
        with objective.counting(range(len(params))):
            shifts = self._shifts(params, grads)
        for param, shift in zip(params, shifts, strict=True):
            param.add_(shift)
        loss = closure(backward)
        if not backward:
            return loss, None
        perturbed_grads = [grad if here else None for grad, here in zip(copy_gradients(params), present, strict=True)]
        return loss, perturbed_grads  # type: ignore[return-value]

    def _shifts(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        settings = [self.settings[param] for param in params]
        p, eps = settings[0]["p"], settings[0]["eps"]
        q = 1.0 if p == float("inf") else p / (p - 1)
        weights = [param.abs() if s["asam"] else None for param, s in zip(params, settings, strict=True)]
        scaled = [g if w is None else g * w for g, w in zip(grads, weights, strict=True)]
        size = read(_norm(scaled, q) ** (q - 1)) + eps
        out = []
        for g, w, s in zip(scaled, weights, settings, strict=True):
            direction = torch.sgn(g) if q == 1 else g if q == 2 else torch.sgn(g) * g.abs() ** (q - 1)
            step = direction * (s["rho"] / size)
            out.append(step if w is None else step * w)
        return out


def _norm(tensors: list[Tensor], q: float) -> Tensor:
    """Return the q-norm of all tensors as one vector, over all processes for sharded parameters."""
    if q in (1, 2):
        return kernels.norm(tensors, q)
    return kernels.sum([tensor.abs().double() ** q for tensor in tensors]) ** (1 / q)


class ASAM(SAM):
    r"""`SAM` with a ball that is relative to the size of each weight: $\epsilon = \rho\, x^2 g / \||x| g\|$ for p = 2.

    Rescaling weights so that the function stays the same does not change its sharpness.

    Args:
        rho: The radius.
        p: The norm of the ball, above 1.
        eps: Added to the norm of the gradient.
        modules: Links that see the new loss; by default all that follow.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> _ = mo.Optimizer([w], m.ASAM(rho=0.5), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.5000])

    References:
        J. Kwon, J. Kim, H. Park, I. K. Choi, "ASAM: adaptive sharpness-aware minimization for scale-invariant learning
        of deep neural networks", ICML 2021.
    """

    rho: Setting = 0.5
    asam: bool = field(default=True, init=False)


class _Perturbed(DeclaredLink, Transform):
    """A base for parameters at points shifted along the momentum: stores the momentum, and the shifts before and now."""

    def update_states(self, objective: Objective, states: States, settings: SettingsList) -> None:
        entries: list[tuple[dict[str, Any], Any]] = []
        for i, (u, state, setting) in enumerate(zip(objective.peek_updates(), states, settings, strict=True)):
            if objective.present is not None and not objective.present[i]:
                continue
            if "velocity" not in state:
                state["velocity"], state["shift"] = torch.zeros_like(u), torch.zeros_like(u)
            beta = setting["momentum"]
            state["velocity"].mul_(beta).add_(u, alpha=1 - beta if setting["lerp"] else 1.0)
            entries.append((state, setting))
        if not entries:
            return
        size = read(kernels.norm([as_real(state["velocity"]) for state, _ in entries]))
        for state, setting in entries:
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

    ranges = {check.fraction: ("momentum",), check.non_negative: ("lr", "rho", "weight_decay")}

    lr: Setting = field(kw_only=False)
    momentum: Setting = 0.9
    rho: Setting = 0.3
    weight_decay: Setting = 0.0
    nesterov: bool = False
    lerp: bool = False

    def apply_states(self, objective: Objective, states: States, settings: SettingsList) -> Objective:
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

    ranges = {check.fraction: ("momentum",), check.non_negative: ("rho",)}

    modules: Chainable = field(kw_only=False)
    momentum: Setting = 0.9
    rho: Setting = 0.3
    lerp: bool = False

    def apply_states(self, objective: Objective, states: States, settings: SettingsList) -> Objective:
        objective.get_updates()
        objective = run(objective, [self.children["modules"]])
        objective.updates = [
            self._shift_step(state, u) if "before" in state else u
            for u, state in zip(objective.get_updates(), states, strict=True)
        ]
        return objective


class OrthoGrad(UpdateTransform):
    r"""Removes the part of the update along the weights, $u_\perp = u - \frac{\langle x, u\rangle}{\|x\|^2 + \epsilon}\,x$.

    Args:
        eps: Added to the squared norm of the weights.
        renormalize: Scale the result to the norm of the update.
        dim: "global" for all parameters as one vector, None for each tensor by itself.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> x, u = torch.tensor([2.0, 0.0]), torch.tensor([3.0, 4.0])
        >>> optim.step_tensors(m.OrthoGrad(renormalize=False), [u], params=[x])
        [tensor([0., 4.])]

    References:
        L. Prieto, M. Barsbey, P. A. M. Mediano, T. Birdal, "Grokking at the edge of numerical stability", ICLR 2025.
    """

    members = "batched"
    differentiable = True
    ranges = {check.non_negative: ("eps",), check.one_of("global", None): ("dim",)}

    @property
    def across(self) -> Across:  # type: ignore[override]
        return Across.MATRICES if self.defaults["dim"] is None else Across.SUMS

    eps: float = 1e-8
    renormalize: bool = True
    dim: str | None = "global"

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        self.elementwise = self.measures = given["dim"] == "global"

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        if settings[0]["dim"] is None:
            return None
        pairs = {"xu": (params, tensors), "xx": (params, params), "uu": (tensors, tensors)}
        return {key: dot(a, b, members) for key, (a, b) in pairs.items()}

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        if setting["dim"] is None:
            wide = torch.promote_types(tensor.dtype, torch.float32)  # squares underflow in half precision
            x, u = param.to(wide), tensor.to(wide)
            setting = {
                **setting,
                "xu": (x.conj() * u).real.sum(),
                "xx": x.abs().square().sum(),
                "uu": u.abs().square().sum(),
            }
        eps, xu, xx, uu = setting["eps"], setting["xu"], setting["xx"], setting["uu"]
        along = xu / (xx + eps)
        out: Tensor = tensor - param * along
        if setting["renormalize"]:
            left = uu - 2 * along * xu + along * along * xx
            # Of an update along the weights only rounding is left, which would be scaled beyond the norm of the update.
            least = 8 * torch.finfo(tensor.dtype).eps * uu
            left = least + (left - least) * ((left > least) * 1.0)
            out = out * (uu**0.5 / (left**0.5 + eps))
        return out.to(tensor.dtype) if setting["dim"] is None else out
