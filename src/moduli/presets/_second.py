"""Deterministic and second-order optimizers."""

from __future__ import annotations

from typing import Any

from .. import m
from ..optim import Module


def lbfgs(*, history_size: int = 10) -> list[Module]:
    """L-BFGS with a strong Wolfe line search; give it `mo.closure(fn, fixed=True)` for a fixed batch.

    Args:
        history_size: The number of stored pairs.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.lbfgs(), [])  # doctest: +ELLIPSIS
        Chain(LBFGS, StrongWolfe)
    """
    return [m.LBFGS(history_size=history_size), m.StrongWolfe()]


def bfgs() -> list[Module]:
    """BFGS with a strong Wolfe line search, for up to some thousand numbers.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.bfgs(), [])  # doctest: +ELLIPSIS
        Chain(BFGS, StrongWolfe)
    """
    return [m.BFGS(), m.StrongWolfe()]


def cg(rule: str = "polak-ribiere") -> list[Module]:
    """Conjugate gradients with a tight line search.

    Args:
        rule: The formula for beta (see `m.ConjugateGradient`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.cg(), [])  # doctest: +ELLIPSIS
        Chain(ConjugateGradient, StrongWolfe)
    """
    return [m.ConjugateGradient(rule, clip_beta=rule == "polak-ribiere"), m.StrongWolfe(c2=0.1, a_init="first-order")]


def newton(*, damping: float = 0.0) -> list[Module]:
    """Newton's method with backtracking.

    Args:
        damping: Added to the Hessian's diagonal.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.newton(), [])  # doctest: +ELLIPSIS
        Chain(Newton, Backtracking)
    """
    return [m.Newton(damping=damping), m.Backtracking()]


def newton_cg(*, maxiter: int | None = None) -> list[Module]:
    """Truncated Newton with backtracking: products with the Hessian only.

    Args:
        maxiter: The largest number of products per step.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.newton_cg(), [])  # doctest: +ELLIPSIS
        Chain(NewtonCG, Backtracking)
    """
    return [m.NewtonCG(maxiter=maxiter, tol=None), m.Backtracking()]


def trust_cg(*, radius: float = 1.0) -> list[Module]:
    """A trust region by truncated conjugate gradients on the true Hessian.

    Args:
        radius: The first radius.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.trust_cg(), [])  # doctest: +ELLIPSIS
        TrustCG(...)
    """
    return [m.TrustCG(m.NewtonCG(reg=0.0), cg_tol=None, init=radius)]


def trust_exact(*, radius: float = 1.0) -> list[Module]:
    """A trust region solved exactly on the true Hessian.

    Args:
        radius: The first radius.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.trust_exact(), [])  # doctest: +ELLIPSIS
        TrustExact(...)
    """
    return [m.TrustExact(m.Newton(), init=radius)]


def gauss_newton(*, reg: float = 1e-8) -> list[Module]:
    """The Gauss-Newton method with backtracking; the closure returns residuals.

    Args:
        reg: Added to the diagonal.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.gauss_newton(), [])  # doctest: +ELLIPSIS
        Chain(GaussNewton, Backtracking)
    """
    return [m.GaussNewton(reg=reg), m.Backtracking()]


def levenberg_marquardt(*, damping: Any = 1.0) -> list[Module]:
    """Levenberg and Marquardt's method; the closure returns residuals.

    Args:
        damping: The first damping.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.levenberg_marquardt(), [])  # doctest: +ELLIPSIS
        LevenbergMarquardt(...)
    """
    if isinstance(damping, str):
        raise TypeError(f"levenberg_marquardt: damping is {damping!r}; give a number above zero")
    if not damping > 0:
        raise ValueError(f"levenberg_marquardt: damping is {damping!r}; give a number above zero")
    return [m.LevenbergMarquardt(m.GaussNewton(), init=1 / damping)]


def spsa(lr: float = 1e-2, *, h: float = 1e-3, n_samples: int = 1, seed: int | None = None) -> list[Module]:
    """Simultaneous perturbation: two values of the loss per sample, no gradient.

    Args:
        lr: The step size.
        h: The length of the differences.
        n_samples: Directions per step.
        seed: The seed of the random generator, which is saved; None for torch's default generator.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.spsa(), [])  # doctest: +ELLIPSIS
        Chain(SPSA, LR)
    """
    return [m.SPSA(h=h, n_samples=n_samples, seed=seed), m.LR(lr)]


def adahessian(lr: float = 1e-1, *, seed: int | None = None) -> list[Module]:
    """AdaHessian.

    Args:
        lr: The step size.
        seed: The seed of the random generator, which is saved; None for torch's default generator.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.adahessian(), [])  # doctest: +ELLIPSIS
        Chain(AdaHessian, LR)
    """
    return [m.AdaHessian(seed=seed), m.LR(lr)]


def sophia(lr: float = 1e-3, *, seed: int | None = None) -> list[Module]:
    """Sophia with Hutchinson's estimator.

    Args:
        lr: The step size.
        seed: The seed of the random generator, which is saved; None for torch's default generator.

    Example:
        >>> from moduli import optim, presets
        >>> optim.maybe_chain(presets.sophia(), [])  # doctest: +ELLIPSIS
        Chain(SophiaH, LR)
    """
    return [m.SophiaH(seed=seed), m.LR(lr)]
