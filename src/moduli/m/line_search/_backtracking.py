"""Backtracking: shorten the step until it is good enough."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from .._checks import collect_settings
from ._base import LineSearchBase
from ._more_thuente import Trials

Shortening = Generator[float, tuple[float, float], tuple[float | None, int, float]]
CONDITIONS = ("armijo", "decrease", "goldstein")


def accepts(condition: str, a: float, f: float, loss: float, slope: float, c: float) -> bool:
    """Whether the value f at the length a is good enough."""
    if condition == "decrease":
        return f < loss
    sufficient = f <= loss + c * a * slope
    return sufficient and (condition == "armijo" or f >= loss + (1 - c) * a * slope)


def shorten(a: Any, loss: float, slope: float, settings: Any) -> Shortening:
    """The first length that is accepted, else the one of the lowest value if it is below; refusals; the next length."""
    lowest, best = math.inf, None
    for tries in range(settings["maxiter"]):
        f, _ = yield a
        if f < lowest:
            lowest, best = f, float(a)
        if accepts(settings["condition"], a, f, loss, slope, settings["c"]):
            return float(a), tries, a
        a *= settings["beta"]
    return (best if lowest < loss else None), settings["maxiter"], a


def check_backtracking(name: str, init: Any, beta: Any, c: Any, condition: str, maxiter: int) -> None:
    """Refuse settings that can't make a search."""
    if condition not in CONDITIONS:
        raise ValueError(f"{name}: condition is {condition!r}; it can be {', '.join(CONDITIONS)}")
    if isinstance(init, int | float) and not init > 0:
        raise ValueError(f"{name}: init is {init}; the first length is positive")
    if isinstance(beta, int | float) and not 0 < beta < 1:
        raise ValueError(f"{name}: beta is {beta}; it shortens the step, so it is between 0 and 1")
    if isinstance(c, int | float) and not 0 <= c < 1:
        raise ValueError(f"{name}: c is {c}; the fraction of the decrease that is asked for is in [0, 1)")
    if maxiter < 1:
        raise ValueError(f"{name}: maxiter is {maxiter}; try at least one length")


class Backtracking(LineSearchBase):
    r"""Shortens the step by a factor until $f(x - a u) \le f(x) - c\,a\,\langle g, u\rangle$ (Armijo's condition).

    Args:
        init: The first length that is tried.
        beta: The factor that shortens it.
        c: The fraction of the decrease promised by the slope that is asked for.
        condition: "armijo"; "decrease" (any); "goldstein" (Armijo, and not too short: the value is at least what the
            fraction 1 - c of the slope promises).
        maxiter: How many lengths to try. Where none is good enough the lowest point found is taken if it is lower than
            the start, and no step otherwise.
        adaptive: After a search without any lower point, start the next one from where this one ended.

    The members of a population are evaluated together, and each accepts or rejects lengths on its own.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], m.Backtracking(init=2.0)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.])

    References:
        L. Armijo, "Minimization of functions having Lipschitz continuous first partial derivatives", Pacific J. Math.
        16 (1966); J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., algorithm 3.1.
    """

    members = "matrix"

    def __init__(
        self,
        *,
        init: Any = 1.0,
        beta: Any = 0.5,
        c: Any = 1e-4,
        condition: str = "armijo",
        maxiter: int = 10,
        adaptive: bool = True,
    ) -> None:
        check_backtracking("Backtracking", init, beta, c, condition, maxiter)
        super().__init__(collect_settings(locals()))

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        """Shortens until the condition holds."""
        scale = memory.get("scale", 1.0) if settings["adaptive"] else 1.0
        found, _, _ = yield from shorten(settings["init"] * scale, loss, slope, settings)
        memory["scale"] = 1.0
        if found is None and scale > 1e-100:
            memory["scale"] = scale * settings["beta"] ** settings["maxiter"]
        return found


class AdaptiveBacktracking(LineSearchBase):
    r"""Backtracking whose first length is learnt: set so that the last accepted length is found after a few trials.

    Where the first trial succeeds, the next search starts `nplus` times as far for each trial aimed at, so that the
    length grows again.

    Args:
        init: The first length of the first search.
        beta: The factor that shortens it.
        c: The fraction of the decrease promised by the slope that is asked for.
        condition: As for `Backtracking`.
        maxiter: How many lengths to try.
        target_iters: After how many shortenings the next search should end.
        nplus: How fast the first length grows.
        scale_beta: Memory of the running mean of the first length; 0 for none.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = mo.Optimizer([w], m.AdaptiveBacktracking(init=16.0))
        >>> for _ in range(9):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 1e-3
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 3.5 (initial step lengths).
    """

    members = "matrix"

    def __init__(
        self,
        *,
        init: Any = 1.0,
        beta: Any = 0.5,
        c: Any = 1e-4,
        condition: str = "armijo",
        maxiter: int = 20,
        target_iters: int = 1,
        nplus: Any = 2.0,
        scale_beta: Any = 0.0,
    ) -> None:
        check_backtracking("AdaptiveBacktracking", init, beta, c, condition, maxiter)
        if target_iters < 0:
            raise ValueError(f"AdaptiveBacktracking: target_iters is {target_iters}; it is a number of trials")
        if isinstance(nplus, int | float) and not nplus > 1:
            raise ValueError(f"AdaptiveBacktracking: nplus is {nplus}; it lengthens the step, so it is above 1")
        super().__init__(collect_settings(locals()))

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        """Shortens until the condition holds, and learns where to start next time."""
        first = float(memory.get("first", settings["init"]))
        beta, target = settings["beta"], settings["target_iters"]
        found, tries, last = yield from shorten(first, loss, slope, settings)
        if found is None:
            memory["first"] = last if last > 1e-100 else float(settings["init"])
            return None
        wanted = found * settings["nplus"] ** target if tries == 0 else found / beta**target
        keep = settings["scale_beta"]
        wanted = keep * first + (1 - keep) * wanted
        memory["first"] = wanted if math.isfinite(wanted) and wanted < 1e100 else float(settings["init"])
        return found
