"""Quasi-Newton updates of a matrix from one pair, in place and in O(n^2).

Each is written for the inverse Hessian H with the pair (s, y), where H y = s is to hold. A rule for the Hessian B is the
dual of one: B s = y is the same equation with s and y exchanged. `bfgs` and `dfp` decide by masks, so that they can be
vectorised over many matrices by `torch.vmap`; a pair of zeros changes nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """What a rule sees: the step s, the change y of the gradient, the gradient before and after, a threshold, settings."""

    s: Tensor
    y: Tensor
    before: Tensor
    after: Tensor
    tol: float
    setting: Any

    def dual(self) -> Pair:
        """The same pair for the other matrix."""
        return Pair(self.y, self.s, self.before, self.after, self.tol, self.setting)


Rule = Callable[[Tensor, Pair], bool | Tensor]
"""Changes the matrix in place; False where the pair is of no use to it."""


def may_hold(condition: Tensor) -> bool:
    """Whether a condition holds; True inside of `torch.vmap`, where it can hold for some of many.

    What it guards has to be right where the condition does not hold, too: it saves a pass that would change nothing.
    """
    try:
        return bool(condition)
    except RuntimeError:
        return True


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a, b).item()


def _symmetric(M: Tensor, a: Tensor, b: Tensor) -> None:
    """M += a b^T + b a^T in one pass."""
    M.addmm_(torch.stack([a, b], 1), torch.stack([b, a], 0))


def bfgs(H: Tensor, pair: Pair) -> Tensor:
    """H += (1 + y'Hy / s'y) ss' / s'y - (Hy s' + s y'H) / s'y."""
    s, y = pair.s, pair.y
    sy = torch.dot(s, y)
    used = sy > pair.tol
    if may_hold(used):
        over, Hy = torch.where(used, 1 / sy, 0.0), H @ y
        _symmetric(H, s, s * (0.5 * (1 + torch.dot(y, Hy) * over) * over) - Hy * over)
    return used


def dfp(H: Tensor, pair: Pair) -> Tensor:
    """H += ss' / s'y - Hy y'H / y'Hy."""
    s, y = pair.s, pair.y
    sy, Hy = torch.dot(s, y), H @ y
    yHy = torch.dot(y, Hy)
    used = (sy > pair.tol) & (yHy > pair.tol)
    if may_hold(used):
        along, across = torch.where(used, 1 / sy, 0.0), torch.where(used, -1 / yHy, 0.0)
        H.addmm_(torch.stack([s * along, Hy * across], 1), torch.stack([s, Hy], 0))
    return used


def sr1(H: Tensor, pair: Pair) -> bool:
    """H += zz' / z'y with z = s - Hy, unless z'y is small (Nocedal and Wright, equation 6.26)."""
    z = pair.s - H @ pair.y
    zy = _dot(z, pair.y)
    size = float(torch.linalg.vector_norm(z)) * float(torch.linalg.vector_norm(pair.y))
    if not abs(zy) > max(pair.tol, 1e-8) * size or size == 0.0:
        return False
    H.addr_(z, z, alpha=1 / zy)
    return True


def psb(B: Tensor, pair: Pair) -> bool:
    """For the Hessian (s and y are exchanged here): B += (r s' + s r') / s's - (r's) ss' / (s's)^2, r = y - Bs."""
    s, y = pair.y, pair.s
    ss, r = _dot(s, s), y - B @ s
    if not ss > pair.tol:
        return False
    _symmetric(B, s / ss, r - s * (0.5 * _dot(r, s) / ss))
    return True


def rank_one(direction: Callable[[Tensor, Pair], Tensor]) -> Rule:
    """H += (s - Hy) c' / c'y, for a choice of c."""

    def rule(H: Tensor, pair: Pair) -> bool:
        c = direction(H, pair)
        cy = _dot(c, pair.y)
        size = float(torch.linalg.vector_norm(c)) * float(torch.linalg.vector_norm(pair.y))
        if not abs(cy) > max(pair.tol, 1e-12) * size or size == 0.0:
            return False
        H.addr_(pair.s - H @ pair.y, c, alpha=1 / cy)
        return True

    return rule


def column(H: Tensor, pair: Pair) -> Tensor:
    """The unit vector of y's largest component, so that one column of H changes."""
    unit = torch.zeros_like(pair.y)
    unit[int(pair.y.abs().argmax())] = 1.0
    return unit


def hoshino(H: Tensor, pair: Pair) -> bool:
    """H += [(1 + 2 y'Hy / s'y) ss' - s y'H - Hy s' - Hy y'H] / (s'y + y'Hy)."""
    s, y = pair.s, pair.y
    sy, Hy = _dot(s, y), H @ y
    yHy = _dot(y, Hy)
    if not sy > pair.tol or not sy + yHy > pair.tol:
        return False
    below = sy + yHy
    H.addmm_(
        torch.stack([s * ((1 + 2 * yHy / sy) / below) - Hy / below, (s + Hy) / -below], 1), torch.stack([s, Hy], 0)
    )
    return True


def dilation(H: Tensor, pair: Pair) -> bool:
    """H -= (1 - alpha^2) Hy y'H / y'Hy: space is stretched along y."""
    Hy = H @ pair.y
    yHy = _dot(pair.y, Hy)
    if not yHy > pair.tol:
        return False
    H.addr_(Hy, Hy, alpha=-(1 - pair.setting["alpha"] ** 2) / yHy)
    return True


def ssvm(H: Tensor, pair: Pair) -> bool:
    """A self-scaling member of Broyden's family, after Oren and Spedicato."""
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
    H.addr_(Hy, Hy, alpha=-1 / tau)
    H.addr_(v, v, alpha=theta * tau)
    H.mul_(mu)
    H.addr_(s, s, alpha=1 / omega)
    return True


def _switch(kind: int, epsilon: float, omega: float, tau: float) -> tuple[float, float]:
    """(mu, theta) as the paper's four strategies choose them, from s'H^-1 s, s'y and y'Hy."""
    if kind == 2:
        return max(epsilon / tau, 0.0) ** 0.5, 1 / (1 + max(tau * epsilon, 0.0) ** 0.5 / omega)
    if kind == 4:
        return epsilon / tau, 0.5
    if epsilon <= omega:
        return epsilon / omega, 0.0
    if omega >= tau:
        return omega / tau, 1.0
    below = epsilon * tau - omega * omega
    if below <= 0:
        return 1.0, 0.5
    return 1.0, omega * ((epsilon - omega) if kind == 1 else (tau - omega)) / below
