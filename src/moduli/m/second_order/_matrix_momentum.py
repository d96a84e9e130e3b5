"""Momentum that knows the curvature along the last step."""

from __future__ import annotations

from typing import Any

import torch

from ...optim import Chainable, Objective
from .._checks import collect_settings, non_negative, positive
from .._flat import flat, mask_absent, unflat
from .._scalars import divide, read
from .._vector_link import gather_update, refuse_complex
from ._base import SecondOrderLink


class MatrixMomentum(SecondOrderLink):
    r"""Heavy ball with the matrix $I - \mu H$ as momentum: $u \leftarrow \eta u - (s - \mu Hs)$ with s the last step.

    Along directions of large curvature the ball slows down, along others it rolls on, so that $\mu$ is below
    $1 / \lambda_{max}$. One product with the Hessian per step. It has a step size of its own: do not add `LR`.

    Args:
        lr: The step size $\eta$.
        mu: The factor $\mu$ of the Hessian.
        hvp_method: "autograd", "batched_autograd", "fd_forward" or "fd_central".
        h: The length of difference steps.
        adaptive: Multiply $\mu$ by $\|s\| / \|y\|$, with y the change of the gradient: one over the curvature last seen.
        adapt_freq: Find that number at every n-th step only.
        inner: Links that transform the update first.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.MatrixMomentum(0.02, mu=0.1))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: 4 * w[0] ** 2 + 0.5 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-2)
        True

    References:
        G. B. Orr, T. K. Leen, "Using curvature information for fast stochastic search", NeurIPS 1996.
    """

    shared_settings = True
    vector_state = True

    def __init__(
        self,
        lr: Any,
        *,
        mu: Any = 0.1,
        hvp_method: str = "autograd",
        h: float = 1e-3,
        adaptive: bool = False,
        adapt_freq: int | None = None,
        inner: Chainable | None = None,
    ) -> None:
        non_negative("MatrixMomentum", lr=lr, mu=mu)
        positive("MatrixMomentum", h=h)
        if adapt_freq is not None and adapt_freq < 1:
            raise ValueError(f"MatrixMomentum: adapt_freq is {adapt_freq}; give a number of steps, at least 1")
        super().__init__(**collect_settings(locals()))

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """The momentum: the last step without what its curvature takes from it."""
        state, setting = states[0], settings[0]
        refuse_complex("MatrixMomentum", objective.params)
        x, u = flat(objective.params), gather_update(objective)
        state["momentum"] = torch.zeros_like(x)
        if "x" in state:
            s = x - state["x"]
            tensors = [part.clone() for part in unflat(s, objective.params)]
            product = objective.hessian_vector_product(tensors, hvp_method=setting["hvp_method"], h=setting["h"])[0]
            mu = setting["mu"]
            if setting["adaptive"]:
                due = state["steps"] % (setting["adapt_freq"] or 1) == 0
                if due or "radius" not in state:
                    bend = read(torch.linalg.vector_norm(u - state["u"]))
                    length = read(torch.linalg.vector_norm(s))
                    state["radius"] = divide(length, bend, state.get("radius", 1.0))
                mu = mu * state.get("radius", 1.0)
            state["momentum"] = s - mu * flat(product).to(s.dtype)
        state["x"], state["u"], state["steps"] = x.clone(), u.clone(), state.get("steps", 0) + 1

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Along the update, and on along the last step."""
        on = unflat(states[0]["momentum"], objective.params)
        objective.updates = [
            setting["lr"] * u - part.to(u.dtype)
            for u, part, setting in zip(
                mask_absent(objective.peek_updates(), objective.present), on, settings, strict=True
            )
        ]
        return objective

    def reset_for_online(self) -> None:
        """Forgets the last point."""
        super().reset_for_online()
        self.state.clear()
