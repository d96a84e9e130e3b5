"""Step sizes that are computed from the effect of earlier steps.

* The base of links that compute a step size, and of those that use differences of points and gradients.
* Adaptive gradient descent without a line search.
* Barzilai and Borwein's step sizes, plain and stabilised.
* The bold driver: a step size that grows while the loss falls.
* Polyak's step size: from the distance to the optimum's value.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from ...linalg import LinearOperator
from ...optim import Chainable, DeclaredLink, Need, Objective, SettingsList, States, Transform
from ...optim import ranges as check
from .._measures import choose, divide, dot, larger, norm, read, root, smaller
from ..ops._unary import make_scaled_identity


class _StepScale(DeclaredLink, Transform):
    """A link that multiplies the update by one step size for all parameters, which it keeps in `global_state`.

    Args:
        given: The settings and `inner`: the arguments of the link as they are, `locals()`.

    Attributes:
        ranges: The arguments that a check of `optim.ranges` is for, by check.
        key: The step size in `global_state`: a number, or a 0-d tensor on the parameters' device.
    """

    members = "batched"
    shared_settings = True
    key: ClassVar[str] = "alpha"

    def apply_states(self, objective: Objective, states: States, settings: SettingsList) -> Objective:
        step = self.global_state[self.key]
        objective.updates = [update.mul_(step) for update in objective.get_updates()]
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """Return a multiple of the identity, with the step as its inverse."""
        step = self.global_state.get(self.key, 0.0)
        return make_scaled_identity(objective, step) if step > 0 else None


class _DifferenceStep(_StepScale):
    """A step size found from $s = x - x_-$ and $y = g - g_-$; the first step has a given size."""

    points = ("previous",)
    ranges = {check.positive: ("alpha_0",)}

    @abstractmethod
    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        """Return the step size: a number, or a 0-d tensor on the parameters' device.

        Args:
            s: The last step.
            y: The difference of gradients.
            grads: The gradients.
            setting: The settings.
        """

    def update_states(self, objective: Objective, states: States, settings: SettingsList) -> None:
        setting = settings[0]
        grads = objective.get_grads() if setting["use_grad"] else objective.peek_updates()
        params = [param.detach() for param in objective.params]
        if all("previous" in state for state in states):
            s = [param - state["previous"] for param, state in zip(params, states, strict=True)]
            y = [grad - state["previous_grad"] for grad, state in zip(grads, states, strict=True)]
            self.global_state["alpha"] = self.find(s, y, grads, setting)
        else:
            self.global_state.setdefault("alpha", setting["alpha_0"])
        for state, param, grad in zip(states, params, grads, strict=True):
            state["previous"], state["previous_grad"] = param.clone(), grad.clone()

    def reset_for_online(self) -> None:
        """Clear the last point."""
        super().reset_for_online()
        self.clear_state_keys("previous", "previous_grad")


class AdGD(_DifferenceStep):
    r"""Descent whose step follows the local curvature $L = \|y\| / \|s\|$ and grows no faster than the theory allows.

    With $\theta$ the ratio of the last two steps, variant 1 takes
    $\alpha = \min(\sqrt{1+\theta}\,\alpha_-,\ 1/(\sqrt2 L))$ (1/(2L) without `sqrt`), variant 2
    $\alpha = \min(\sqrt{2/3+\theta}\,\alpha_-,\ \alpha_- / \sqrt{[2\alpha_-^2 L^2 - 1]_+})$. The first step is only there to
    measure L; the second is $1/(\sqrt2 L)$.

    Args:
        variant: 1 (2020) or 2 (2023, longer steps).
        alpha_0: The first step.
        sqrt: The longer step of variant 1.
        use_grad: Differences of the gradient; False: of the update.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = mo.Optimizer([w], m.AdGD())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 1e-3
        True

    References:
        Y. Malitsky, K. Mishchenko, "Adaptive gradient descent without descent", ICML 2020.
        Y. Malitsky, K. Mishchenko, "Adaptive proximal gradient method for convex optimization", 2023.
    """

    variant: Literal[1, 2] = 2
    alpha_0: float = 1e-7
    sqrt: bool = True
    use_grad: bool = True
    inner: Chainable | None = None

    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        last, theta = self.global_state["alpha"], self.global_state.get("theta", math.inf)
        first = not isinstance(theta, Tensor) and math.isinf(theta)
        curvature = divide(norm(y), norm(s), 0.0)
        safe = 2.0 if setting["variant"] == 1 and not setting["sqrt"] else math.sqrt(2.0)
        if setting["variant"] == 1 or first:
            bound = divide(1.0, safe * curvature, math.inf)
            grown = root(1 + theta) * last
        else:
            over = 2 * (last * curvature) ** 2 - 1
            bound = divide(last, root(larger(over, 0.0)), math.inf)
            grown = root(2 / 3 + theta) * last
        alpha = smaller(bound, grown)
        measured = alpha < math.inf
        if not isinstance(measured, Tensor) and not measured:
            return last
        restart = first and setting["variant"] == 2
        self.global_state["theta"] = choose(measured, 1 / 3 if restart else alpha / last, theta)
        return choose(measured, alpha, last)


Type = Literal["long", "short", "geom", "geom-fallback"]


def _step(s: list[Tensor], y: list[Tensor], kind: str, otherwise: Any) -> Any:
    """Return the step size; a fallback if the curvature along the last step is not positive."""
    ss, sy, yy = dot(s, s), dot(s, y), dot(y, y)
    if kind == "long":
        size = divide(ss, sy, 0.0)
    elif kind == "short":
        size = larger(divide(sy, yy, 0.0), 0.0)
    else:
        size = root(divide(ss, yy, 0.0))
        size = size if kind == "geom-fallback" else choose(sy > 0, size, 0.0)
    usable = (size > 0) & (size < math.inf)
    return choose(usable, size, otherwise)


class BarzilaiBorwein(_DifferenceStep):
    r"""Multiplies the update by a step size from the last step s and the change y of the gradient along it.

    The long one is $\frac{s^T s}{s^T y}$, the short one $\frac{s^T y}{y^T y}$; their geometric mean is $\|s\| / \|y\|$.
    Its model of the Hessian, a multiple of the identity, can be used by trust regions.

    Args:
        type: "long", "short", "geom", or "geom-fallback", which takes the mean where the curvature is negative too.
        alpha_0: The first step, and that where the curvature is not positive.
        use_grad: Differences of the gradient; False: of the update.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = mo.Optimizer([w], m.BarzilaiBorwein(alpha_0=0.1))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 1e-6
        True

    References:
        J. Barzilai, J. M. Borwein, "Two-point step size gradient methods", IMA J. Numer. Anal. 1988.
    """

    type: Type = "geom"
    alpha_0: float = 1e-7
    use_grad: bool = True
    inner: Chainable | None = None

    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        return _step(s, y, setting["type"], setting["alpha_0"])


class BBStab(_DifferenceStep):
    r"""Barzilai and Borwein's step, cut so that no step is longer than $\Delta$: $\alpha = \min(\alpha_{BB}, \Delta / \|g\|)$.

    Args:
        c: Where `delta` is not given, $\Delta$ is c times the shortest of the first steps.
        delta: The longest step.
        type: "long", "short", "geom", or "geom-fallback".
        alpha_0: The first step, and that where the curvature is not positive.
        use_grad: Differences of the gradient; False: of the update.
        inf_iters: How many steps are made before $\Delta$ is known.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = mo.Optimizer([w], m.BBStab(alpha_0=0.1, delta=0.5))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> round(w.item(), 4)
        2.7

    References:
        O. Burdakov, Y.-H. Dai, N. Huang, "Stabilized Barzilai-Borwein method", J. Comput. Math. 2019.
    """

    ranges = {
        check.positive: ("alpha_0", "c"),
        check.at_least_one: ("inf_iters",),
        check.allow(check.positive, None): ("delta",),
    }

    c: float = 0.2
    delta: float | None = None
    type: Type = "geom"
    alpha_0: float = 1e-7
    use_grad: bool = True
    inf_iters: int = 3
    inner: Chainable | None = None

    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        alpha = _step(s, y, setting["type"], setting["alpha_0"])
        limit = setting["delta"]
        if limit is None:
            memory = self.global_state
            seen = memory.get("seen", 0)
            # The first difference is that of the given first step, which says nothing about the problem.
            if 0 < seen <= setting["inf_iters"]:
                memory["shortest"] = smaller(norm(s), memory.get("shortest", math.inf))
            memory["seen"] = seen + 1
            limit = setting["c"] * memory["shortest"] if seen >= setting["inf_iters"] else math.inf
        length = norm(grads)
        return smaller(alpha, divide(limit, length, math.inf))


class BoldDriver(_StepScale):
    """Multiplies the update by a step size that grows when the loss fell and shrinks when it did not.

    Args:
        a_init: The first step size.
        nplus: The growth.
        nminus: The shrinkage.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.BoldDriver(a_init=0.25, nplus=2.0))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.])

    References:
        R. Battiti, "Accelerated backpropagation learning: two optimization methods", Complex Systems 1989.
    """

    needs = frozenset({Need.GRADIENT, Need.LOSS})
    ranges = {check.positive: ("a_init", "nplus", "nminus")}

    a_init: float = 1e-3
    nplus: float = 1.1
    nminus: float = 0.1
    inner: Chainable | None = None

    def update_states(self, objective: Objective, states: States, settings: SettingsList) -> None:
        setting, memory = settings[0], self.global_state
        loss = read(objective.get_loss(backward=True).double())
        if "loss" in memory:
            memory["alpha"] = memory["alpha"] * choose(loss < memory["loss"], setting["nplus"], setting["nminus"])
        else:
            memory.setdefault("alpha", setting["a_init"])
        memory["loss"] = loss

    def reset_for_online(self) -> None:
        """Clear the last loss."""
        super().reset_for_online()
        self.global_state.pop("loss", None)


class PolyakStepSize(_StepScale):
    r"""Multiplies the update by $\frac{f(x) - f^*}{\langle u, g\rangle}$.

    For a convex function with known least value it needs nothing else. Where that is not known (`f_star=None`) the target
    is the best value so far minus y, which shrinks.

    Args:
        f_star: The least value of the loss; None to estimate it.
        y: How far below the best value so far the target is.
        y_decay: The part of y that each step takes away.
        max: The largest step.
        use_grad: Divide by $\langle u, g\rangle$; False: by $\|u\|^2$.
        alpha: A factor.
        inner: Links that transform the update before the step is measured.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> _ = mo.Optimizer([w], m.PolyakStepSize()).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.])

    References:
        B. T. Polyak, "Introduction to optimization", 1987.
    """

    needs = frozenset({Need.GRADIENT, Need.LOSS})
    ranges = {
        check.non_negative: ("y",),
        check.fraction: ("y_decay",),
        check.positive: ("alpha",),
        check.allow(check.positive, None): ("max",),
    }
    key = "step"

    f_star: float | None = 0.0
    y: float = 1.0
    y_decay: float = 1e-3
    max: float | None = None
    use_grad: bool = True
    alpha: float = 1.0
    inner: Chainable | None = None

    def update_states(self, objective: Objective, states: States, settings: SettingsList) -> None:
        setting, memory = settings[0], self.global_state
        loss = read(objective.get_loss(backward=True).double())
        memory["y"] = memory["y"] * (1 - setting["y_decay"]) if "y" in memory else setting["y"]
        memory["best"] = smaller(memory.get("best", loss), loss)
        target = setting["f_star"]
        memory["gap"] = loss - (memory["best"] - memory["y"] if target is None else target)
        memory["step"] = self._step(objective, objective.peek_updates(), setting)

    def _step(self, objective: Objective, updates: Sequence[Tensor], setting: Mapping[str, Any]) -> Any:
        size = dot(updates, objective.get_grads()) if setting["use_grad"] else dot(updates, updates)
        if isinstance(size, Tensor) or size <= 0:  # no descent direction: its length is used instead
            size = choose(size > 0, size, dot(updates, updates))
        gap = self.global_state["gap"]
        step = divide(setting["alpha"] * larger(gap, 0.0), size, 0.0)
        return step if setting["max"] is None else smaller(step, setting["max"])

    def apply_states(self, objective: Objective, states: States, settings: SettingsList) -> Objective:
        updates = objective.get_updates()
        # The inner links may have changed the update, on which the step size depends.
        step = self._step(objective, updates, settings[0])
        objective.updates = [update.mul_(step) for update in updates]
        return objective
