"""Quasi-Newton updates of a matrix from one pair, in place and in O(n^2).

Each is written for the inverse Hessian H with the pair (s, y), where H y = s is to hold. A rule for the Hessian B is the
dual of one: B s = y is the same equation with s and y exchanged. `bfgs` and `dfp` decide by masks, so that they can be
vectorised over many matrices by `torch.vmap`; a pair of zeros changes nothing there.

Near an optimum inner products are products of two small numbers, and underflow long before the vectors do. Denominators are
therefore normal numbers of their dtype, and divide a vector before the outer product is formed.

* Dense quasi-Newton methods: one implementation, many rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...linalg import Dense, LinearOperator
from ...optim import Chainable, Objective, Ranges
from ...optim import ranges as check
from .._vectors import HessianLink, flat, gather_update, vector_like
from ._pairs import _PairLink, count_skipped


@dataclass(frozen=True)
class Pair:
    """The input of a rule: the step s, the change y of the gradient, the gradient before and after, a threshold, settings.

    The threshold is at least the smallest normal number of the dtype.
    """

    s: Tensor
    y: Tensor
    before: Tensor
    after: Tensor
    tol: float
    setting: Any

    @property
    def tiny(self) -> float:
        """The smallest normal number of the dtype."""
        return torch.finfo(self.s.dtype).tiny

    def dual(self) -> Pair:
        """Return the same pair for the other matrix."""
        return Pair(self.y, self.s, self.before, self.after, self.tol, self.setting)


Rule = Callable[[Tensor, Pair], bool | Tensor]
"""Changes the matrix in place; False where the pair is of no use to it."""


def may_hold(condition: Tensor | bool) -> bool:
    """Return whether a condition holds; True inside of `torch.vmap`, where it can hold for some of many.

    The guarded code has to be correct if the condition does not hold, too: the condition only saves a pass that changes nothing.
    """
    return _decide(condition) is not False


def _decide(condition: Tensor | bool) -> bool | None:
    """Return the condition as a bool, or None inside of `torch.vmap`."""
    try:
        return bool(condition)
    except RuntimeError:
        return None


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a, b).item()


def _symmetric(M: Tensor, a: Tensor, b: Tensor) -> None:
    """Set M to M + a b^T + b a^T in one pass."""
    M.addmm_(torch.stack([a, b], 1), torch.stack([b, a], 0))


def bfgs(H: Tensor, pair: Pair) -> Tensor:
    """Update H += (1 + y'Hy / s'y) ss' / s'y - (Hy s' + s y'H) / s'y."""
    s, y = pair.s, pair.y
    sy = torch.dot(s, y)
    used = sy > pair.tol
    if may_hold(used):
        over, Hy = torch.where(used, 1 / sy, 0.0), H @ y
        _symmetric(H, s * over, s * (0.5 * (1 + torch.dot(y, Hy) * over)) - Hy)
    return used


def dfp(H: Tensor, pair: Pair) -> Tensor:
    """Update H += ss' / s'y - Hy y'H / y'Hy."""
    s, y = pair.s, pair.y
    sy, Hy = torch.dot(s, y), H @ y
    yHy = torch.dot(y, Hy)
    used = (sy > pair.tol) & (yHy > pair.tol)
    if may_hold(used):
        along, across = torch.where(used, 1 / sy, 0.0), torch.where(used, -1 / yHy, 0.0)
        H.addmm_(torch.stack([s * along, Hy * across], 1), torch.stack([s, Hy], 0))
    return used


def _is_above_rounding(product: float, a: Tensor, b: Tensor, part: float, tiny: float) -> bool:
    """Return whether a'b is a normal number and more than a fraction of |a| |b|, or more than rounding if that is larger."""
    size = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return abs(product) > max(max(part, torch.finfo(a.dtype).eps) * size, tiny)


def sr1(H: Tensor, pair: Pair) -> bool:
    """Update H += zz' / z'y with z = s - Hy, unless z'y is small (Nocedal and Wright, equation 6.26)."""
    z = pair.s - H @ pair.y
    zy = _dot(z, pair.y)
    if not _is_above_rounding(zy, z, pair.y, max(pair.tol, 1e-8), pair.tiny):
        return False
    H.addr_(z / zy, z)
    return True


def psb(B: Tensor, pair: Pair) -> bool:
    """Update the Hessian (s and y are exchanged here): B += (r s' + s r') / s's - (r's) ss' / (s's)^2, r = y - Bs."""
    s, y = pair.y, pair.s
    ss, r = _dot(s, s), y - B @ s
    if not ss > pair.tol:
        return False
    _symmetric(B, s / ss, r - s * (0.5 * _dot(r, s) / ss))
    return True


def rank_one(direction: Callable[[Tensor, Pair], Tensor]) -> Rule:
    """Update H += (s - Hy) c' / c'y, for a choice of c."""

    def rule(H: Tensor, pair: Pair) -> bool:
        c = direction(H, pair)
        cy = _dot(c, pair.y)
        if not _is_above_rounding(cy, c, pair.y, max(pair.tol, 1e-12), pair.tiny):
            return False
        H.addr_(pair.s - H @ pair.y, c / cy)
        return True

    return rule


def column(H: Tensor, pair: Pair) -> Tensor:
    """Return the unit vector of y's largest component, so that one column of H changes."""
    unit = torch.zeros_like(pair.y)
    unit[int(pair.y.abs().argmax())] = 1.0
    return unit


def hoshino(H: Tensor, pair: Pair) -> bool:
    """Update H += [(1 + 2 y'Hy / s'y) ss' - s y'H - Hy s' - Hy y'H] / (s'y + y'Hy)."""
    s, y = pair.s, pair.y
    sy, Hy = _dot(s, y), H @ y
    yHy = _dot(y, Hy)
    if not sy > pair.tol or not sy + yHy > pair.tol:
        return False
    below = sy + yHy
    H.addmm_(torch.stack([s / below * (1 + 2 * yHy / sy) - Hy / below, (s + Hy) / -below], 1), torch.stack([s, Hy], 0))
    return True


def dilation(H: Tensor, pair: Pair) -> bool:
    """Update H -= (1 - alpha^2) Hy y'H / y'Hy: space is stretched along y."""
    Hy = H @ pair.y
    yHy = _dot(pair.y, Hy)
    if not yHy > pair.tol:
        return False
    H.addr_(Hy / yHy, Hy, alpha=-(1 - pair.setting["alpha"] ** 2))
    return True


def ssvm(H: Tensor, pair: Pair) -> bool:
    """Update by a self-scaling member of Broyden's family, after Oren and Spedicato."""
    s, y, g = pair.s, pair.y, pair.before
    Hy = H @ y
    omega, tau, gHy = _dot(s, y), _dot(y, Hy), _dot(g, Hy)
    if not (omega > pair.tol and tau > pair.tol) or gHy == 0.0:
        return False
    # s'H^-1 s without the inverse: s is a multiple of H g, so g's / g'Hy is s'H^-1 s / s'y.
    epsilon = omega * _dot(g, s) / gHy
    mu, theta = _switch(int(pair.setting["switch"]), epsilon, omega, tau)
    if not mu > 0:
        mu, theta = omega / tau, 1.0
    v = s / omega - Hy / tau
    H.addr_(Hy / tau, Hy, alpha=-1)
    H.addr_(v * tau, v, alpha=theta)
    H.mul_(mu)
    H.addr_(s / omega, s)
    return True


_TIE = 1e-5
"""Inner products that differ by less than this part are equal: about the rounding of float32."""


def _switch(kind: int, epsilon: float, omega: float, tau: float) -> tuple[float, float]:
    """Return (mu, theta) as the paper's four strategies choose them, from s'H^-1 s, s'y and y'Hy."""
    if kind == 2:
        return max(epsilon / tau, 0.0) ** 0.5, 1 / (1 + max(tau * epsilon, 0.0) ** 0.5 / omega)
    if kind == 4:
        return epsilon / tau, 0.5
    # A matrix scaled with the first pair makes omega and tau equal, so that rounding must not choose between them.
    if epsilon <= omega * (1 + _TIE):
        return epsilon / omega, 0.0
    if omega >= tau * (1 - _TIE):
        return omega / tau, 1.0
    below = epsilon * tau - omega * omega
    if below <= 0:
        return 1.0, 0.5
    return 1.0, omega * ((epsilon - omega) if kind == 1 else (tau - omega)) / below


class QuasiNewton(_PairLink, HessianLink):
    r"""Keeps a matrix over all parameters that learns curvature from pairs $s = x - x_-$, $y = u - u_-$; override the rules.

    Either the inverse Hessian $H$ is kept (the update becomes $Hu$) or the Hessian $B$ (it becomes $B^{-1}u$). A subclass
    names a rule for each that it has, and says `members = "batched"` where its rules decide by masks: all matrices of a
    population are then processed in one call. Follow it with a line search, or put it into a trust region.

    A pair that carries no information is skipped: s, y or a denominator is within its threshold, underflows, or is rounding.
    The optimizer's `attrs` have the number of pairs skipped so far, as `"BFGS.skipped_pairs"`; not that of a population.

    Args:
        inverse: Whether the inverse is kept.
        init_scale: The matrix starts as this multiple of the identity; "auto" scales it with the first pair, to
            $s^Ty / y^Ty$ for the inverse, unless the function is exactly quadratic along the first step: the small
            matrix would then cost more steps than it saves trials.
        tol: A pair whose $s^Ty$ (or the rule's own denominator) is not above this is skipped.
        ptol: A step whose largest component is not above this gives no pair.
        ptol_restart: Start from the identity again after such a step.
        gtol: A change of the gradient whose largest component is not above this gives no pair.
        restart_interval: Start from the identity again after this many pairs; "auto" for n + 1, None for never.
        beta: Mix the new matrix with the old one, of which this part is kept.
        scale_first: Before there is a pair, also after a restart, scale the update to a length of at most one.
        update_freq: Learn at every n-th step only.
        inner: Links between learning and the product.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.BFGS(), m.StrongWolfe())
        >>> for _ in range(25):
        ...     _ = opt.step(mo.closure(lambda: (w**4).sum() + (w**2).sum(), fixed=True))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., chapter 6.
    """

    symmetric: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {
        check.once(check.allow(check.positive, "auto")): ("init_scale",),
        check.allow(check.at_least_one, "auto", None): ("restart_interval",),
        check.allow(check.fraction, None): ("beta",),
    }
    rules: ClassVar[dict[str, Rule]] = {}

    attributes = ("inverse",)

    inverse: bool = True
    init_scale: float | str = "auto"
    tol: float = 1e-32
    ptol: float = 1e-32
    ptol_restart: bool = False
    gtol: float = 1e-32
    restart_interval: int | str | None = None
    beta: float | None = None
    scale_first: bool = True
    update_freq: int = 1
    inner: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        if ("inverse" if self.inverse else "hessian") not in self.rules:
            matrix = "the inverse Hessian" if self.inverse else "the Hessian"
            raise ValueError(f"{type(self).__name__} has no rule for {matrix}; say inverse={not self.inverse}")

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(inverse={self.inverse}, ", 1)

    # ------------------------------------------------------------------ the matrix

    def _start(self, state: Any, like: Tensor, setting: Any) -> Tensor:
        n = like.numel()
        scale = 1.0 if setting["init_scale"] == "auto" else float(setting["init_scale"])
        matrix = torch.zeros(n, n, dtype=like.dtype, device=like.device)
        matrix.diagonal().fill_(scale)
        state["matrix"], state["pairs"] = matrix, torch.zeros((), dtype=torch.long, device=like.device)
        return matrix

    def _matrix(self, state: Any, like: Tensor, setting: Any) -> Tensor:
        matrix: Tensor | None = state.get("matrix")
        if matrix is None or matrix.shape[0] != like.numel() or matrix.dtype is not like.dtype:
            return self._start(state, like, setting)
        return matrix

    def _restart(self, where: Tensor, state: Any, like: Tensor, setting: Any) -> None:
        """Reset the matrix to the identity if the condition holds."""
        if may_hold(where):
            matrix, pairs = state["matrix"], state["pairs"]
            state["matrix"] = torch.where(where, self._start(state, like, setting), matrix)
            state["pairs"] = torch.where(where, state["pairs"], pairs)

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        x, u = flat(objective.params), gather_update(objective)
        x_before, u_before, loss_before = state.get("x"), state.get("u"), state.get("loss")
        state["x"], state["u"], state["loss"] = x.clone(), u.clone(), objective.loss
        self._matrix(state, x, setting)
        if x_before is None or u_before is None or x_before.shape != x.shape or x_before.dtype is not x.dtype:
            return
        s, y = x - x_before, u - u_before
        moved = _exceeds(s, setting["ptol"])
        useful = moved & _exceeds(y, setting["gtol"])
        if setting["ptol_restart"]:
            self._restart(~moved, state, x, setting)
        if not may_hold(useful):
            count_skipped(self, objective, state)
            return
        every = setting["restart_interval"]
        if every is not None:
            self._restart(useful & (state["pairs"] >= (len(x) + 1 if every == "auto" else every)), state, x, setting)
        s, y = torch.where(useful, s, 0.0), torch.where(useful, y, 0.0)
        state["quadratic"] = _is_parabola(loss_before, objective.loss, s, u_before, u)
        tol = max(setting["tol"], torch.finfo(x.dtype).tiny)
        used = self.learn(state["matrix"], Pair(s, y, u_before, u, tol, setting), state, setting)
        if _decide(used) is False:
            count_skipped(self, objective, state)

    def learn(self, matrix: Tensor, pair: Pair, state: Any, setting: Any) -> bool | Tensor:
        """Update the matrix by one pair; return whether the pair was used.

        Args:
            matrix: The matrix, which is changed.
            pair: The pair.
            state: The state of the vector.
            setting: Its settings.
        """
        if setting["init_scale"] == "auto":
            first = (state["pairs"] == 0) & ~state["quadratic"]
            if may_hold(first):
                largest = torch.linalg.vector_norm(pair.y, float("inf"))
                s, y = pair.s / largest, pair.y / largest
                sy, yy = torch.dot(s, y), torch.dot(y, y)
                is_usable = first & (sy > pair.tiny) & yy.isfinite()
                matrix.mul_(torch.where(is_usable, sy / yy if self.inverse else yy / sy, 1.0))
        rule = self.rules["inverse" if self.inverse else "hessian"]
        old = matrix.clone() if setting["beta"] else None
        used = rule(matrix, pair if self.inverse else pair.dual())
        if old is not None:
            matrix.lerp_(old, setting["beta"])
        state["pairs"] = state["pairs"] + used
        self._restart(~torch.isfinite(matrix.diagonal()).all(), state, pair.s, setting)
        return used

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        matrix = self._matrix(state, u, setting)
        first = state["pairs"] == 0
        if self.inverse:
            out = matrix @ u
        else:
            out, failed = torch.linalg.solve_ex(matrix, u)
            unsolved = (failed != 0) | ~torch.isfinite(out).all()
            self._restart(unsolved, state, u, setting)
            out = torch.where(unsolved, u, out)
        if setting["scale_first"] and may_hold(first):
            length = torch.linalg.vector_norm(out)
            out = torch.where(first & (length > 1) & length.isfinite(), out / length, out)
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        dense = Dense(self._matrix(state, vector_like(objective), setting).clone(), symmetric=self.symmetric)
        return dense.inverse() if self.inverse else dense


def _exceeds(vector: Tensor, tol: float) -> Tensor:
    """Return whether the largest component is above a threshold, and all are finite."""
    if vector.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=vector.device)
    largest = torch.linalg.vector_norm(vector, float("inf"))
    return (largest > tol) & largest.isfinite()


def _is_parabola(before: Tensor | None, loss: Tensor | None, s: Tensor, g_before: Tensor, g: Tensor) -> Tensor:
    """Return whether values and slopes show that the function is exactly quadratic along the step."""
    if before is None or loss is None:
        return torch.zeros((), dtype=torch.bool, device=s.device)
    first, last = torch.dot(s, g_before), torch.dot(s, g)
    size = 1e-9 * (first.abs() + last.abs())
    visible = size > 4e-16 * torch.maximum(before.abs(), loss.abs())
    return visible & ((loss - before - 0.5 * (first + last)).abs() <= size)
