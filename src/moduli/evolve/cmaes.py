"""Covariance matrix adaptation.

Equation numbers are those of the tutorial. A factor A with A Aᵀ = C turns standard normal rows into samples. With the
symmetric root (from an eigendecomposition) the path of the step size is that of the tutorial; with the Cholesky factor
C^(-1/2) is replaced by A⁻¹, which costs n³/3 operations instead of about 9 n³.

References:
    Hansen, The CMA evolution strategy: a tutorial (2016, arXiv:1604.00772);
    Krause, Arbonès, Igel, CMA-ES with optimal covariance update and storage complexity, NeurIPS 2016, for A⁻¹ in the path.
    Ros and Hansen, A simple modification in CMA-ES achieving linear time and space complexity, PPSN X (2008), section 3.
    Auger and Hansen, A restart CMA evolution strategy with increasing population size, CEC 2005;
    Hansen, Benchmarking a BI-population CMA-ES on the BBOB-2009 function testbed, GECCO workshop 2009, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._coordinates import check_choice, check_sigma
from ._distribution import Distribution, choose_population
from ._fitness import Numbers, host, tensor
from ._reason import Reason

__all__ = ["CMAES"]


# Above this dimension the eigendecomposition costs more than everything else together.
_EIGEN_UP_TO = 40


class CMAES(Distribution):
    """Covariance matrix adaptation: a Gaussian learns its step size and its covariance from the order of the members.

    Args:
        x0: The first mean.
        population: How many members; by default 4 + 3 ln P.
        sigma: The first step size; a third of the distance to the optimum is good.
        covariance: `"full"` (P x P numbers), or `"separable"` (P numbers, and noise that is drawn again from seeds).
        factor: How the full covariance is factored: `"eigen"` (the symmetric root; rotating the problem rotates the path),
            `"cholesky"` (cheaper; the same distribution, another path), or `"auto"`, which is `"eigen"` up to 40 dimensions.
        restarts: What to do when the distribution has converged: None (stop), `"ipop"` (start again with twice the
            population), or `"bipop"` (take turns between large populations and small ones).
        max_restarts: How often to start again.
        **options: Those of `Search`. With finite bounds a restart begins anywhere inside them, otherwise near x0.

    Example:
        >>> import torch
        >>> from moduli.evolve import CMAES
        >>> def rosenbrock(x):
        ...     return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)
        >>> search = CMAES(torch.zeros(4, dtype=torch.float64), sigma=0.5, target=1e-10)
        >>> while not (reason := search.should_stop()):
        ...     search.tell(rosenbrock(search.ask()))
        >>> print(reason)
        The target fitness was reached.

    References:
        Hansen (2016), The CMA evolution strategy: a tutorial; Ros and Hansen (2008) for the separable form; Krause, Arbonès
        and Igel (2016) for the Cholesky form; Auger and Hansen (2005) for IPOP; Hansen (2009) for BIPOP.
    """

    least = 2

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int | None = None,
        sigma: float = 0.3,
        covariance: str = "full",
        factor: str = "auto",
        restarts: str | None = None,
        max_restarts: int = 9,
        **options: Any,
    ) -> None:
        check_choice("covariance", covariance, ("full", "separable"))
        check_choice("factor", factor, ("auto", "eigen", "cholesky"))
        check_choice("restarts", restarts, ("ipop", "bipop", None))
        check_sigma(sigma)
        if covariance == "full" and options.get("antithetic"):
            raise ValueError("mirrored members tell a full covariance nothing new; use covariance='separable'")
        if covariance == "full" and options.get("rank") is not None:
            raise ValueError("noise of low rank has no full covariance; use covariance='separable'")
        dim = x0.numel()
        self.covariance, self.restarts, self.max_restarts = covariance, restarts, max_restarts
        self.factor = ("eigen" if dim <= _EIGEN_UP_TO else "cholesky") if factor == "auto" else factor
        self._sigma0 = sigma
        self._default = choose_population(dim) if population is None else population
        self._constants: dict[int, Constants] = {}
        options.setdefault("antithetic", False)
        super().__init__(x0, population=self._default, **options)

    def _start(self, x0: Tensor) -> None:
        if self.restarts:
            self.state["x0"] = x0.clone()
        self.state["runs"], self.state["large"] = 0, self.population
        self.state["spent_large"], self.state["spent_small"], self.state["is_large"] = 0, 0, 1
        self._begin(x0, self._sigma0)

    def _begin(self, mean: Tensor, sigma: float) -> None:
        """A new distribution."""
        n, state = self.dim, self.state
        state["mean"], state["sigma"], state["first_sigma"], state["age"] = mean, float(sigma), float(sigma), 0
        state["p_sigma"], state["p_c"] = torch.zeros_like(mean), torch.zeros_like(mean)
        if self.covariance == "full":
            state["C"] = torch.eye(n, dtype=self.dtype, device=self.device)
            state["root"] = torch.eye(n, dtype=self.dtype, device=self.device)
            state["thin"], state["thick"] = 1.0, 1.0
        else:
            state["C"] = torch.ones_like(mean)
        # What has been flat for a thousand generations is flat, however many dimensions there are.
        window = min(10 + math.ceil(30 * n / self._default), 1000)
        state["recent"] = torch.full((window,), torch.inf, dtype=torch.float64, device=self.device)
        state["range"] = math.inf

    @property
    def sigma(self) -> float:
        """The step size."""
        return self._float("sigma")

    @property
    def constants(self) -> Constants:
        """The strategy parameters of the current population."""
        size = self.population
        if size not in self._constants:
            self._constants[size] = constants(self.dim, size, separable=self.covariance == "separable")
        return self._constants[size]

    def _scale(self) -> Tensor | float:
        if self.covariance == "full":
            return self.sigma
        return self._tensor("C").sqrt().mul_(self.sigma)

    def _steps(self) -> Tensor:
        """The same in the shape of the covariance, kept from `ask` to `tell`."""
        if self._pending is None:
            out = self._buffers.scratch("steps", (self.population, self.dim), self.dtype, self.device)
            self._pending = apply_root(self._normal(), self._tensor("root"), self.factor == "cholesky", out)
        return self._pending  # type: ignore[no-any-return]

    def _directions(self, start: int, stop: int) -> Tensor:
        if self.covariance != "full":
            return super()._directions(start, stop)
        steps = self._steps()
        return steps if stop - start == len(steps) else steps[start:stop]

    def _separable(self) -> bool:
        return self.covariance == "separable"

    def _reuses_directions(self) -> bool:
        return self.covariance == "full" or super()._reuses_directions()

    def _learn(self, fitness: Tensor) -> None:
        state, k = self.state, self.constants
        seen = host(fitness)
        order = seen.argsort(kind="stable")
        age = self._int("age") + 1
        state["age"] = age
        learn = self._learn_full if self.covariance == "full" else self._learn_separable
        learn(order, age, k)
        # A ring: the fitness of generation g is at g modulo its length.
        recent, best = self._tensor("recent"), float(seen[order[0]])
        recent[age % len(recent)] = best
        worst = float(seen[order[-1]])
        if not math.isfinite(worst):
            finite = seen[np.isfinite(seen)]
            best, worst = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, math.inf)
        state["range"] = worst - best
        spent = "spent_large" if self._int("is_large") else "spent_small"
        state[spent] = self._int(spent) + self.population
        if self.restarts and self._int("runs") < self.max_restarts and self._run_over() is not None:
            self._restart()

    def _learn_full(self, order: Numbers, age: int, k: Constants) -> None:
        z, y, C = self._normal(), self._steps(), self._tensor("C")
        of_mean, of_covariance = member_weights(order, host(z), k)
        w = tensor(of_mean, z)
        # C^(-1/2) y_w is the root's inverse times y_w, whichever root; for the symmetric one it is the tutorial's.
        z_w = w @ z
        h = self._follow(z_w, self._tensor("root") @ z_w if self.dim < len(z) else w @ y, age, k)
        update_covariance(C, self._tensor("p_c"), y, tensor(of_covariance, z), h, k)
        # The root follows C when C has changed enough to matter: appendix B.2 of the tutorial.
        gap = max(1, int(1 / (10 * self.dim * (k.c_1 + k.c_mu))))
        if age % gap == 0 and np.isfinite(host(C.diagonal())).all():
            root = symmetric_root(C) if self.factor == "eigen" else cholesky_root(C)
            self.state["root"], self.state["thin"], self.state["thick"] = root

    def _learn_separable(self, order: Numbers, age: int, k: Constants) -> None:
        C = self._tensor("C")
        weights = np.zeros(len(order))
        weights[order[: k.mu]] = k.weights[: k.mu]
        z_w, square = self._moments(*self._pair_weights(torch.from_numpy(weights).to(self.device)))
        h = self._follow(z_w, C.sqrt().mul_(z_w), age, k)
        self.state["C"] = update_variances(C, self._tensor("p_c"), square, h, k)

    def _follow(self, z_w: Tensor, y_w: Tensor, age: int, k: Constants) -> float:
        """Move the mean, the paths and the step size; whether the path of the covariance moved is the result."""
        state, sigma, mean = self.state, self.sigma, self._tensor("mean")
        state["mean"] = torch.add(mean, y_w, alpha=k.c_m * sigma)  # (42)
        before = host(self._tensor("p_sigma")), host(self._tensor("p_c"))
        p_sigma, p_c, state["sigma"], h = update_paths(*before, host(z_w), host(y_w), sigma, age, k)
        state["p_sigma"], state["p_c"] = tensor(p_sigma, mean), tensor(p_c, mean)
        return h

    # -- the end of a run, and the next one

    def _run_over(self) -> Reason | None:
        """Why this distribution has nothing more to find: appendix B.3 of the tutorial."""
        C, sigma = self._tensor("C"), self.sigma
        variances = host(C.diagonal() if self.covariance == "full" else C)
        largest, least = float(variances.max()), float(variances.min())
        first = self._float("first_sigma")
        if not (math.isfinite(sigma) and math.isfinite(largest)) or sigma * math.sqrt(max(largest, 0.0)) > 1e8 * first:
            return Reason.DIVERGED
        thin, thick = math.sqrt(max(least, 0.0)), math.sqrt(largest)
        if self.covariance == "full":
            thin, thick = min(thin, self._float("thin")), max(thick, self._float("thick"))
        limit = 1e7 if self.dtype == torch.float64 else 1e4
        if thick > limit * thin:
            return Reason.CONDITION
        if self._int("age") == 0:
            return None
        reach = max(float(np.abs(host(self._tensor("p_c"))).max()), math.sqrt(largest))
        if sigma * reach < self.tol * first:
            return Reason.SMALL_STEP
        # 0.2 deviations added to a coordinate change nothing that the dtype can show.
        mean = host(self._tensor("mean"))
        with np.errstate(over="ignore", invalid="ignore"):
            if (mean + 0.2 * sigma * np.sqrt(np.maximum(variances, 0)) == mean).any():
                return Reason.SMALL_STEP
        window = min(10 + math.ceil(30 * self.dim / self.population), len(self._tensor("recent")))
        ring, age = host(self._tensor("recent")), self._int("age")
        recent = ring[np.arange(age - window + 1, age + 1) % len(ring)]
        if age >= window and np.isfinite(recent).all():
            width = max(float(recent.max() - recent.min()), self._float("range"))
            if width <= self.tol * max(1e-300, min(1.0, float(np.abs(recent).max()))) or width == 0.0:
                return Reason.FLAT
        return None

    def _find_convergence(self) -> Reason | None:
        reason = self._run_over()
        return Reason.RESTARTS if reason and self.restarts and self.max_restarts else reason

    def _restart(self) -> None:
        state, c = self.state, self.coordinates
        g = self._make_generator(self._noise.blocks)
        u1, u2 = torch.rand(2, generator=g, dtype=torch.float64, device=self.device).tolist()
        uniform = torch.rand(self.dim, generator=g, dtype=self.dtype, device=self.device)
        normal = torch.randn(self.dim, generator=g, dtype=self.dtype, device=self.device)
        shrink = 1.0
        if self.restarts == "ipop":
            size = 2 * self.population
        else:
            large, size, shrink = bipop(
                self._default, self._int("large"), self._int("spent_large"), self._int("spent_small"), u1, u2
            )
            state["is_large"] = int(large)
            if large:
                state["large"] = size
        both = c.lower.isfinite() & c.upper.isfinite()
        width = (c.upper - c.lower).nan_to_num(posinf=0.0)
        x0 = self._tensor("x0")
        start = torch.where(both, c.lower.nan_to_num(neginf=0.0) + uniform * width, x0 + self._sigma0 * normal)
        state["runs"] = self._int("runs") + 1
        state["population"] = size
        state["flat"] = state["stalled"] = 0
        self._begin(start.clamp(c.lower, c.upper), self._sigma0 * shrink)
        self._restore_derived()

    def _draws(self) -> int:
        # One more than the noise takes: a restart has a stream of its own.
        return self._noise.blocks + 1


BLOCK = 256  # what is triangular is multiplied in blocks of so many rows, up to the diagonal


@dataclass(frozen=True)
class Constants:
    """The strategy parameters of one (dimension, population)."""

    dim: int
    weights: Numbers
    mu: int
    mueff: float
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float
    c_m: float
    total: float


def constants(dim: int, population: int, *, separable: bool = False) -> Constants:
    """Table 1 of the tutorial, equations (49) to (58), with active (negative) weights.

    With a diagonal covariance there are no negative weights, and c₁ and c_μ grow by (n + 2)/3 (Ros and Hansen 2008,
    section 3).
    """
    n, lam = dim, population
    raw = math.log((lam + 1) / 2) - torch.arange(1, lam + 1, dtype=torch.float64).log()  # (49)
    mu = lam // 2
    positive, negative = raw[:mu], raw[mu:]
    mueff = float(positive.sum() ** 2 / positive.square().sum())
    mueff_neg = float(negative.sum() ** 2 / negative.square().sum()) if float(negative.square().sum()) else 0.0
    c_c = (4 + mueff / n) / (n + 4 + 2 * mueff / n)  # (56)
    c_1 = 2 / ((n + 1.3) ** 2 + mueff)  # (57)
    c_mu = min(1 - c_1 - 1e-8, 2 * (mueff - 2 + 1 / mueff) / ((n + 2) ** 2 + mueff))  # (58)
    if separable:
        c_1 = min(1.0, c_1 * (n + 2) / 3)
        c_mu = min(1 - c_1, c_mu * (n + 2) / 3)
    bounds = [1 + 2 * mueff_neg / (mueff + 2)]  # (51)
    if c_mu > 0:
        bounds += [1 + c_1 / c_mu, (1 - c_1 - c_mu) / (n * c_mu)]  # (50) and (52)
    lost = float(negative.clamp(max=0).abs().sum())
    scale = 0.0 if separable or not lost else min(bounds) / lost
    weights = torch.where(raw >= 0, raw / positive.sum(), raw * scale)  # (53)
    c_sigma = (mueff + 2) / (n + mueff + 5)  # (55)
    d_sigma = 1 + 2 * max(0.0, math.sqrt((mueff - 1) / (n + 1)) - 1) + c_sigma  # (55)
    return Constants(n, weights.numpy(), mu, mueff, c_sigma, d_sigma, c_c, c_1, c_mu, 1.0, float(weights.sum()))


def expected_norm(dim: int) -> float:
    """E‖N(0, I)‖, to the third order that the tutorial uses below (27)."""
    return math.sqrt(dim) * (1 - 1 / (4 * dim) + 1 / (21 * dim**2))


def symmetric_root(C: Tensor) -> tuple[Tensor, float, float]:
    """C^(1/2), and the smallest and largest standard deviation; eigenvalues below rounding count as rounding."""
    values, B = torch.linalg.eigh(C)
    largest = float(values[-1])
    d = values.clamp(min=largest * torch.finfo(C.dtype).eps).sqrt()
    return (B * d) @ B.mT, float(d[0]), float(d[-1])


def cholesky_root(C: Tensor) -> tuple[Tensor, float, float]:
    """The lower triangular root, and bounds of the standard deviations from its diagonal.

    Rounding can make C lose its definiteness; then the smallest shift (in powers of ten of eps) that restores it is added.
    """
    shift = 0.0
    while True:
        # LAPACK works by columns, so that the transpose is where a matrix by rows has its lower triangle.
        A, info = torch.linalg.cholesky_ex(C.mT, upper=True)
        if not int(info):
            d = host(A.diagonal())
            return A.mT, float(d.min()), float(d.max())
        mean = float(C.diagonal().abs().mean())
        if not math.isfinite(mean) or shift > 1:
            raise ArithmeticError("the covariance matrix is not finite; the fitness or the step size overflowed")
        shift = 10 * shift if shift else torch.finfo(C.dtype).eps
        C = C.clone()
        C.diagonal().add_(shift * max(mean, torch.finfo(C.dtype).tiny))


def update_paths(
    p_sigma: Numbers, p_c: Numbers, z_w: Numbers, y_w: Numbers, sigma: float, generation: int, k: Constants
) -> tuple[Numbers, Numbers, float, float]:
    """Both evolution paths and the step size: (43), (45), (44). `generation` counts from one.

    `y_w` = Σ wᵢ yᵢ is the step of the mean in units of σ, and `z_w` = C^(-1/2) y_w. Returns h_σ last.
    """
    n = len(p_sigma)
    p_sigma = (1 - k.c_sigma) * p_sigma + math.sqrt(k.c_sigma * (2 - k.c_sigma) * k.mueff) * z_w  # (43)
    length, chi = math.sqrt(p_sigma.dot(p_sigma)), expected_norm(n)
    stale = math.sqrt(1 - (1 - k.c_sigma) ** (2 * (generation + 1)))
    h_sigma = 1.0 if length / stale < (1.4 + 2 / (n + 1)) * chi else 0.0  # below (45)
    p_c = (1 - k.c_c) * p_c + (h_sigma * math.sqrt(k.c_c * (2 - k.c_c) * k.mueff)) * y_w  # (45)
    # One generation changes the step size by e at most.
    sigma *= math.exp(min(1.0, k.c_sigma / k.d_sigma * (length / chi - 1)))  # (44)
    return p_sigma, p_c, sigma, h_sigma


def member_weights(order: Numbers, z: Numbers, k: Constants) -> tuple[Numbers, Numbers]:
    """The weights of the members, for the mean and for the covariance, from the order of their fitness, best first.

    The weight of a bad step is divided by its squared length ‖C^(-1/2) y‖² = ‖z‖² (46), so that C stays positive definite.
    """
    of_mean, of_covariance = np.zeros(len(order), z.dtype), np.empty(len(order), z.dtype)
    of_mean[order[: k.mu]] = k.weights[: k.mu]
    of_covariance[order] = k.weights
    bad = order[k.mu :]
    of_covariance[bad] *= k.dim / (np.einsum("ij,ij->i", z, z)[bad] + 1e-8)
    return of_mean, of_covariance


def update_covariance(C: Tensor, p_c: Tensor, y: Tensor, weights: Tensor, h_sigma: float, k: Constants) -> Tensor:
    """(47), in place: y are the steps in units of σ, and `weights` those that `member_weights` gives last.

    Only the lower triangle of C is meant: above `BLOCK` dimensions the blocks above the diagonal are left as they are,
    which saves nearly half of the work.
    """
    n = C.shape[0]
    delta = (1 - h_sigma) * k.c_c * (2 - k.c_c)
    decay = 1 + k.c_1 * delta - k.c_1 - k.c_mu * k.total
    scaled = y * weights[:, None]
    if n <= BLOCK:
        return C.addmm_(scaled.mT, y, beta=decay, alpha=k.c_mu).addr_(p_c, p_c, alpha=k.c_1)
    for low in range(0, n, BLOCK):
        high = min(low + BLOCK, n)
        C[low:high, :high].addmm_(scaled[:, low:high].mT, y[:, :high], beta=decay, alpha=k.c_mu)
        C[low:high, :high].addr_(p_c[low:high], p_c[:high], alpha=k.c_1)
    return C


def apply_root(z: Tensor, root: Tensor, triangular: bool, out: Tensor) -> Tensor:
    """Rows z as rows root @ z: samples of the covariance that the root is of."""
    n = root.shape[0]
    if not triangular or n <= BLOCK:
        return torch.mm(z, root.mT, out=out)
    for low in range(0, n, BLOCK):
        high = min(low + BLOCK, n)
        torch.mm(z[:, :high], root[low:high, :high].mT, out=out[:, low:high])
    return out


def update_variances(C: Tensor, p_c: Tensor, linear2: Tensor, h_sigma: float, k: Constants) -> Tensor:
    """(47) of the tutorial on the diagonal, from Σ wᵢ zᵢ² over the μ best (yᵢ = √C∘zᵢ)."""
    delta = (1 - h_sigma) * k.c_c * (2 - k.c_c)
    decay = 1 + k.c_1 * delta - k.c_1 - k.c_mu
    return (decay * C).addcmul_(p_c, p_c, value=k.c_1).addcmul_(C, linear2.to(C), value=k.c_mu)


def bipop(
    default: int, large: int, spent_large: int, spent_small: int, u1: float, u2: float
) -> tuple[bool, int, float]:
    """The next run of BIPOP: whether it is a large one, its population, and the factor on the first step size.

    The regime that has spent fewer evaluations goes next. A large run doubles the largest population so far; a small one
    has λ = ⌊λ₀ (½ λ_large / λ₀)^(u₁²)⌋ and σ₀ · 10^(-2 u₂).
    """
    if spent_large <= spent_small:
        return True, 2 * large, 1.0
    small = math.floor(default * (0.5 * large / default) ** (u1 * u1))
    return False, max(small, 2), 10 ** (-2 * u2)
