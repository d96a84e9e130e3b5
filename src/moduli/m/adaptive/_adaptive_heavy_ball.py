"""Heavy ball with step size and momentum from the loss and its optimum."""

from __future__ import annotations

import torch

from ...optim import Need, Objective, Transform
from .._flat import flat, mask_absent, unflat
from .._scalars import divide, read
from .._transforms import Settings, States


class AdaptiveHeavyBall(Transform):
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
    vector_state = True

    def __init__(self, *, f_star: float = 0.0) -> None:
        super().__init__({"f_star": f_star})

    def update_states(self, objective: Objective, states: States, settings: Settings) -> None:
        """Step size and momentum from this point and the last."""
        state = states[0]
        x, u = flat(objective.params), flat(mask_absent(objective.peek_updates(), objective.present))
        gap = read(objective.get_loss(backward=True).double()) - settings[0]["f_star"]
        square = read(torch.dot(u, u))
        state["h"], state["m"], state["moved"] = divide(2 * gap, square, 0.0), 0.0, torch.zeros_like(x)
        if "x" in state:
            across = gap * read(torch.dot(u, state["u"]))
            below = state["gap"] * square + across
            state["m"] = divide(-across, below, 0.0)
            state["moved"] = x - state["x"]
        state["x"], state["u"], state["gap"] = x.clone(), u.clone(), gap

    def apply_states(self, objective: Objective, states: States, settings: Settings) -> Objective:
        """Along the update, and on along the last step."""
        state = states[0]
        u = flat(mask_absent(objective.peek_updates(), objective.present))
        out = (1 + state["m"]) * state["h"] * u - state["m"] * state["moved"].to(u.dtype)
        objective.updates = unflat(out, objective.params)
        return objective

    def reset_for_online(self) -> None:
        """Forgets the last point."""
        super().reset_for_online()
        self.state.clear()
