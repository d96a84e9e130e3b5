"""Covariance matrix adaptation. Above 400 lines, because each method is one file with all of its mathematics.

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
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._covariance import add_product, cholesky_root, symmetric_root
from ._distribution import Distribution, choose_population
from ._problem import Bounds, Coordinates, Reason, check_choice, check_sigma

# Above this dimension the eigendecomposition costs more than everything else together; up to it, calling torch does.
_EIGEN_UP_TO = 40


class CMAES(Distribution):
    """Covariance matrix adaptation: a Gaussian whose step size and covariance follow from the order of the members.

    Args:
        x0: The first mean.
        population: The number of members; by default 4 + 3 ln P.
        sigma: The first step size; a third of the distance to the optimum is good.
        covariance: `"full"` (P x P numbers), or `"separable"` (P numbers, and noise that is drawn again from seeds).
        factor: How the full covariance is factored: `"eigen"` (the symmetric root; rotating the problem rotates the path),
            `"cholesky"` (cheaper; the same distribution, another path), or `"auto"`, which is `"eigen"` up to 40 dimensions.
        restarts: What to do when the distribution has converged: None (stop), `"ipop"` (restart with twice the population),
            or `"bipop"` (alternate between large populations and small ones).
        max_restarts: The most restarts.
        restart_region: (lower, upper) of the first mean of a restart, not of members; by default finite bounds, else near x0.
        **options: Those of `Search`.

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
        restart_region: Bounds | None = None,
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
        # Small problems on the CPU use NumPy in the memory of the tensors, because its calls take a third of torch's time.
        few = dim <= _EIGEN_UP_TO and x0.device.type == "cpu" and x0.dtype in (torch.float32, torch.float64)
        self._numpy = covariance == "full" and few
        self._views: dict[str, tuple[Tensor, Any]] = {}
        self._sigma0 = sigma
        self._default = choose_population(dim) if population is None else population
        options.setdefault("antithetic", False)
        super().__init__(x0, population=self._default, **options)
        self._region = self.coordinates
        if restart_region is not None:
            self._region = Coordinates(dim, x0.dtype, x0.device, restart_region, None, None)

    def _start(self, x0: Tensor) -> None:
        if self.restarts:
            self.state["x0"] = x0.clone()
        self.state["runs"], self.state["large"] = 0, self.population
        self.state["spent_large"], self.state["spent_small"], self.state["is_large"] = 0, 0, 1
        self._begin(x0, self._sigma0)

    def _begin(self, mean: Tensor, sigma: float) -> None:
        """Start a distribution: set mean and step size, and reset the covariance and the paths."""
        n, state = self.dim, self.state
        state["mean"], state["sigma"], state["first_sigma"], state["age"] = mean, float(sigma), float(sigma), 0
        state["p_sigma"], state["p_c"] = torch.zeros_like(mean), torch.zeros_like(mean)
        if self.covariance == "full":
            state["C"] = torch.eye(n, dtype=self.dtype, device=self.device)
            state["root"] = torch.eye(n, dtype=self.dtype, device=self.device)
            state["thin"], state["thick"] = 1.0, 1.0
        else:
            state["C"] = torch.ones_like(mean)
        # A thousand generations without change are enough to stop, in any dimension.
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
        return constants(self.dim, self.population, separable=self.covariance == "separable")

    def _scale(self) -> Tensor | float:
        if self.covariance == "full":
            return self.sigma
        return self._tensor("C").sqrt().mul_(self.sigma)

    def _directions(self, start: int, stop: int) -> Tensor:
        if self._separable():
            return super()._directions(start, stop)
        if self._pending is None:  # stored from `ask` to `tell`
            self._pending = super()._directions(0, self.population) @ self._tensor("root").mT
        return self._pending[start:stop]  # type: ignore[no-any-return]

    def _propose(self, start: int, stop: int) -> Tensor:
        if self._numpy:
            return torch.from_numpy(self._sample()[2][start:stop].copy())
        return super()._propose(start, stop)

    def _sample(self) -> tuple[Any, Any, Any]:
        """Return the normal rows z, the steps y = z Aᵀ and the members m + σ y (as evaluated) of this generation."""
        if self._pending is None:
            z = super()._directions(0, self.population).numpy()
            with np.errstate(all="ignore"):  # an overflow ends the run with a reason
                y = z @ self._view("root").T
                x = self._view("mean") + self.sigma * y
            self._pending = z, y, self._reflect(torch.from_numpy(x)).numpy() if self.coordinates.bounded else x
        return self._pending  # type: ignore[no-any-return]

    def _improve(self, index: int) -> None:
        if self._numpy and not self._lent:
            self._view("best")[:] = self._sample()[2][index]
        else:
            super()._improve(index)

    def _separable(self) -> bool:
        return self.covariance == "separable"

    def _learn(self, fitness: Tensor) -> None:
        state, k = self.state, self.constants
        values = fitness.cpu().numpy()
        order = values.argsort(kind="stable")
        state["age"] = age = self._int("age") + 1
        with np.errstate(all="ignore"):
            learn: Any = self._learn_separable if self._separable() else self._learn_full
            learn(order if self._numpy else torch.from_numpy(order).to(self.device), age, k)
        best, worst = float(values[order[0]]), float(values[order[-1]])
        if worst == math.inf:
            worst = float(values[np.isfinite(values)].max(initial=-math.inf))
        state["range"] = worst - best if worst > -math.inf else math.inf
        # A ring buffer: the fitness of generation g is at g modulo its length.
        recent = self._view("recent")
        recent[age % len(recent)] = best
        if self._int("runs"):  # the first run belongs to neither regime
            spent = "spent_large" if self._int("is_large") else "spent_small"
            state[spent] = self._int(spent) + self.population
        if self.restarts and self._int("runs") < self.max_restarts and self._run_over() is not None:
            self._restart()

    def _view(self, name: str) -> Any:
        """Return a tensor of the state, or for small problems a NumPy array that shares its memory."""
        tensor = self._tensor(name)
        if not self._numpy:
            return tensor
        if name not in self._views or self._views[name][0] is not tensor:
            self._views[name] = tensor, tensor.numpy()
        return self._views[name][1]

    def _learn_full(self, order: Any, age: int, k: Constants) -> None:
        C = self._view("C")
        if self._numpy:
            z, y = (each[order] for each in self._sample()[:2])
            w: Any = k.weights.numpy().astype(z.dtype, copy=False)
        else:
            sampled = super()._directions(0, self.population), self._directions(0, self.population)
            z, y = (each.index_select(0, order) for each in sampled)
            w = k.weights.to(z)
        # C^(-1/2) y_w is the root's inverse times y_w, whichever root; for the symmetric one it is the tutorial's.
        h = self._follow(w[: k.mu] @ z[: k.mu], w[: k.mu] @ y[: k.mu], age, k)
        # The weight of a bad step is divided by its squared length ‖C^(-1/2) y‖² = ‖z‖² (46): C stays positive definite.
        bad, scaled = z[k.mu :], y * w[:, None]
        scaled[k.mu :] *= k.dim / ((bad * bad).sum(1)[:, None] + 1e-8)
        decay = 1 + k.c_1 * (1 - h) * k.c_c * (2 - k.c_c) - k.c_1 - k.c_mu * k.total
        add_product(C, scaled.T, y, decay, k.c_mu)  # (47)
        p_c = self._view("p_c")
        add_product(C, p_c[:, None], p_c[None], 1.0, k.c_1)
        # The root follows C when C has changed enough to matter: appendix B.2 of the tutorial.
        gap = max(1, int(1 / (10 * self.dim * (k.c_1 + k.c_mu))))
        if age % gap == 0 and math.isfinite(float(C.diagonal().sum())):
            factor = symmetric_root if self.factor == "eigen" else cholesky_root
            root, self.state["thin"], self.state["thick"] = factor(C)
            self.state["root"] = torch.from_numpy(root) if self._numpy else root

    def _learn_separable(self, order: Tensor, age: int, k: Constants) -> None:
        C = self._tensor("C")
        weights = torch.zeros_like(k.weights, device=self.device)
        weights[order[: k.mu]] = k.weights[: k.mu].to(self.device)
        z_w, square = self._moments(*self._pair_weights(weights))
        h = self._follow(z_w, C.sqrt().mul_(z_w), age, k)
        # (47) on the diagonal, from Σ wᵢ zᵢ² over the μ best (yᵢ = √C∘zᵢ)
        decay = 1 + k.c_1 * (1 - h) * k.c_c * (2 - k.c_c) - k.c_1 - k.c_mu
        p_c = self._tensor("p_c")
        self.state["C"] = (decay * C).addcmul_(p_c, p_c, value=k.c_1).addcmul_(C, square, value=k.c_mu)

    def _follow(self, z_w: Any, y_w: Any, age: int, k: Constants) -> float:
        """Update the mean, the paths and the step size; return h_σ: 1 if the path of the covariance was updated, else 0."""
        p_sigma, p_c, sigma = self._view("p_sigma"), self._view("p_c"), self.sigma
        mean = (
            self._view("mean") + (k.c_m * sigma) * y_w
        )  # (42); not in place, because `revise` stores the caller's tensor
        self.state["mean"] = torch.from_numpy(mean) if self._numpy else mean
        p_sigma[:], p_c[:], self.state["sigma"], h = update_paths(p_sigma, p_c, z_w, y_w, sigma, age, k)
        return h

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}

    # -- the end of a run, and the next one

    def _run_over(self) -> Reason | None:
        """Return why this distribution has converged (appendix B.3 of the tutorial), or None."""
        C, mean, p_c = self._view("C"), self._view("mean"), self._view("p_c")
        sigma, first, age = self.sigma, self._float("first_sigma"), self._int("age")
        variances = C if self._separable() else C.diagonal()
        thin, thick = math.sqrt(max(float(variances.min()), 0.0)), math.sqrt(max(float(variances.max()), 0.0))
        if not (math.isfinite(sigma) and math.isfinite(thick)) or sigma * thick > 1e8 * first:
            return Reason.DIVERGED
        reach, least = max(float(abs(p_c).max()), thick), thin
        if not self._separable():
            thin, thick = min(thin, self._float("thin")), max(thick, self._float("thick"))
        if thick > (1e7 if self.dtype == torch.float64 else 1e4) * thin:
            return Reason.CONDITION
        if age == 0:
            return None
        size = float(abs(mean).max())
        if not math.isfinite(size):
            return Reason.DIVERGED
        # 0.2 deviations added to a coordinate are lost to rounding.
        small = 0.2 * sigma * least <= torch.finfo(self.dtype).eps * size
        unseen = small and bool((mean + 0.2 * sigma * variances.clip(0) ** 0.5 == mean).any())
        if sigma * reach < self.tol * first or unseen:
            return Reason.SMALL_STEP
        return Reason.FLAT if self._is_flat(age) else None

    def _is_flat(self, age: int) -> bool:
        """Whether the best fitness of recent generations, and all of the last one, are equal to the tolerance."""
        # Near an optimum the fitness is quadratic in the distance, so its relative differences are less precise: hence 10 tol.
        recent, spread, tol = self._view("recent"), self._float("range"), 10 * self.tol
        window = min(10 + math.ceil(30 * self.dim / self.population), len(recent))
        if age < window or spread > tol:
            return False
        best = [float(recent[generation % len(recent)]) for generation in range(age - window + 1, age + 1)]
        low, high = min(best), max(best)
        width = max(high - low, spread)
        return width <= tol * max(1e-300, min(1.0, max(abs(low), abs(high)))) or width == 0.0

    def _find_convergence(self) -> Reason | None:
        reason = self._run_over()
        return Reason.RESTARTS if reason and self.restarts and self.max_restarts else reason

    def _restart(self) -> None:
        state, c = self.state, self.coordinates
        g = self._make_generator(self._noise.blocks)
        u1, u2 = torch.rand(2, generator=g, dtype=torch.float64, device=self.device).tolist()
        uniform, normal = self._uniform(g, self.dim), self._gauss(g, self.dim)
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
        low, high = self._region.lower, self._region.upper
        both = low.isfinite() & high.isfinite()
        width = (high - low).nan_to_num(posinf=0.0)
        x0 = self._tensor("x0")
        start = torch.where(both, low.nan_to_num(neginf=0.0) + uniform * width, x0 + self._sigma0 * normal)
        state["runs"] = self._int("runs") + 1
        state["population"] = size
        state["flat"] = state["stalled"] = 0
        self._begin(start.clamp(c.lower, c.upper), self._sigma0 * shrink)
        self._restore_derived()

    def _draws(self) -> int:
        # One more than the noise uses, for the stream of a restart.
        return self._noise.blocks + 1


@dataclass(frozen=True)
class Constants:
    """The strategy parameters of one (dimension, population)."""

    dim: int
    weights: Tensor
    mu: int
    mueff: float
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float
    c_m: float
    total: float


@lru_cache(maxsize=32)
def constants(dim: int, population: int, *, separable: bool = False) -> Constants:
    """Return table 1 of the tutorial, equations (49) to (58), with active (negative) weights.

    Args:
        dim: The dimension n.
        population: The number of members λ.
        separable: Whether the covariance is diagonal: without negative weights, and with c₁ and c_μ multiplied by (n + 2)/3
            (Ros and Hansen 2008, section 3).
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
    return Constants(n, weights, mu, mueff, c_sigma, d_sigma, c_c, c_1, c_mu, 1.0, float(weights.sum()))


def update_paths(
    p_sigma: Any, p_c: Any, z_w: Any, y_w: Any, sigma: float, generation: int, k: Constants
) -> tuple[Any, Any, float, float]:
    """Return the updated evolution paths and step size, equations (43), (45) and (44), and h_σ.

    Args:
        p_sigma: The path of the step size, a tensor or an array.
        p_c: The path of the covariance.
        z_w: C^(-1/2) y_w.
        y_w: Σ wᵢ yᵢ, the step of the mean in units of σ.
        sigma: The step size.
        generation: The number of the generation, counted from one.
        k: The strategy parameters.
    """
    n = len(p_sigma)
    p_sigma = (1 - k.c_sigma) * p_sigma + math.sqrt(k.c_sigma * (2 - k.c_sigma) * k.mueff) * z_w  # (43)
    length, chi = math.sqrt(float(p_sigma @ p_sigma)), math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))  # below (27)
    stale = math.sqrt(1 - (1 - k.c_sigma) ** (2 * (generation + 1)))
    h_sigma = 1.0 if length / stale < (1.4 + 2 / (n + 1)) * chi else 0.0  # below (45)
    p_c = (1 - k.c_c) * p_c + (h_sigma * math.sqrt(k.c_c * (2 - k.c_c) * k.mueff)) * y_w  # (45)
    # One generation changes the step size by e at most.
    sigma *= math.exp(min(1.0, k.c_sigma / k.d_sigma * (length / chi - 1)))  # (44)
    return p_sigma, p_c, sigma, h_sigma


def bipop(
    default: int, large: int, spent_large: int, spent_small: int, u1: float, u2: float
) -> tuple[bool, int, float]:
    """Return whether the next run of BIPOP is large, its population, and the factor on the first step size.

    The regime that has spent fewer evaluations is next. A large run doubles the largest population so far; a small one has
    λ = ⌊λ₀ (½ λ_large / λ₀)^(u₁²)⌋ and σ₀ · 10^(-2 u₂).

    Args:
        default: λ₀, the population of the first run.
        large: λ_large, the largest population so far.
        spent_large: The evaluations of large runs.
        spent_small: The evaluations of small runs.
        u1: A uniform number, for the population.
        u2: A uniform number, for the step size.
    """
    if spent_large <= spent_small:
        return True, 2 * large, 1.0
    small = math.floor(default * (0.5 * large / default) ** (u1 * u1))
    return False, max(small, 2), 10 ** (-2 * u2)
