"""Searches that try values along the line.

* Backtracking: shorten the step until it is good enough.
* Step lengths by methods for functions of one number.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from ...optim import Setting
from ._base import Line, LineSearchBase, Trials

Shortening = Generator[float, tuple[float, float], tuple[float | None, int, float]]


def accepts(condition: str, a: float, f: float, loss: float, slope: float, c: float) -> bool:
    """Return whether a length satisfies the condition.

    Args:
        condition: The name of the condition.
        a: The length.
        f: The value there.
        loss: The value at 0.
        slope: The slope at 0.
        c: The constant of the condition.
    """
    if condition == "decrease":
        return f < loss
    sufficient = f <= loss + c * a * slope
    return sufficient and (condition == "armijo" or f >= loss + (1 - c) * a * slope)


def shorten(a: Any, loss: float, slope: float, settings: Any) -> Shortening:
    """Yield trial lengths; return the first accepted one, or that of the lowest value, with the refusals and the next length.

    Args:
        a: The first length.
        loss: The value at 0.
        slope: The slope at 0.
        settings: The settings: maxiter, condition, c and beta.
    """
    lowest, best = math.inf, None
    for tries in range(settings["maxiter"]):
        f, _ = yield a
        if f < lowest:
            lowest, best = f, float(a)
        if accepts(settings["condition"], a, f, loss, slope, settings["c"]):
            return float(a), tries, a
        a *= settings["beta"]
    return (best if lowest < loss else None), settings["maxiter"], a


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

    init: Setting = 1.0
    beta: Setting = 0.5
    c: Setting = 1e-4
    condition: str = "armijo"
    maxiter: int = 10
    adaptive: bool = True

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        scale = memory.get("scale", 1.0) if settings["adaptive"] else 1.0
        length, _, _ = yield from shorten(settings["init"] * scale, loss, slope, settings)
        memory["scale"] = 1.0
        if length is None and scale > 1e-100:
            memory["scale"] = scale * settings["beta"] ** settings["maxiter"]
        return length


class AdaptiveBacktracking(LineSearchBase):
    r"""Backtracking with an adaptive first length: the last accepted length is then found after a few trials.

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

    init: Setting = 1.0
    beta: Setting = 0.5
    c: Setting = 1e-4
    condition: str = "armijo"
    maxiter: int = 20
    target_iters: int = 1
    nplus: Setting = 2.0
    scale_beta: Setting = 0.0

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        first = float(memory.get("first", settings["init"]))
        beta, target = settings["beta"], settings["target_iters"]
        length, tries, last = yield from shorten(first, loss, slope, settings)
        if length is None:
            memory["first"] = last if last > 1e-100 else float(settings["init"])
            return None
        wanted = length * settings["nplus"] ** target if tries == 0 else length / beta**target
        keep = settings["scale_beta"]
        wanted = keep * first + (1 - keep) * wanted
        memory["first"] = wanted if math.isfinite(wanted) and wanted < 1e100 else float(settings["init"])
        return length


class AdaptiveBisection(LineSearchBase):
    r"""Shortens the last step while that helps, or lengthens it while that helps.

    Where $f(x - au)$ is not below $f(x)$, a is multiplied by `nminus` until it is, and on while the value falls; where it is
    below, a is multiplied by `nplus` while the value falls. The lowest point is taken, and its length is where the next
    search starts.

    Args:
        init: The first length of the first search.
        nplus: How much the length grows.
        nminus: How much it shrinks.
        maxiter: How many lengths to try.
        adaptive: Start the next search from the length that this one found; False: from `init`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], m.AdaptiveBisection(init=4.0)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.])
    """

    init: Setting = 1.0
    nplus: Setting = 2.0
    nminus: Setting = 0.5
    maxiter: int = 10
    adaptive: bool = True

    def search(self, line: Line, loss: float, slope: float, settings: Any) -> float | None:
        a = float(self.global_state.get("last", settings["init"]) if settings["adaptive"] else settings["init"])
        f = line.value(a)
        factor = float(settings["nplus"] if f < loss else settings["nminus"])
        best: tuple[float, float] | None = (a, f) if f < loss else None
        for _ in range(settings["maxiter"] - 1):
            a *= factor
            f = line.value(a)
            if best is not None and f >= best[1]:
                break
            if f < loss:
                best = (a, f)
        if best is None:
            self.global_state["last"] = a if a > 1e-100 else float(settings["init"])
            return None
        self.global_state["last"] = best[0]
        return best[0]


class ScipyMinimizeScalar(LineSearchBase):
    r"""Minimises the loss along the update with SciPy's methods for one variable: an exact line search by values alone.

    Args:
        method: "brent", "golden" or "bounded"; None for "bounded" where there are bounds, else "brent".
        maxiter: The largest number of iterations; None for SciPy's own.
        bracket: Two or three lengths to start from.
        bounds: The shortest and the longest length.
        tol: The relative accuracy of the length.
        prev_init: Start the bracket at the last length.
        options: More options of the method.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ScipyMinimizeScalar())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 3 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-4)
        True

    References:
        R. P. Brent, Algorithms for Minimization without Derivatives, Prentice-Hall (1973).
    """

    def __init__(
        self,
        *,
        method: str | None = None,
        maxiter: int | None = None,
        bracket: tuple[float, ...] | None = None,
        bounds: tuple[float, float] | None = None,
        tol: float | None = None,
        prev_init: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        if method not in (None, "brent", "golden", "bounded"):
            raise ValueError(f"ScipyMinimizeScalar: method is {method!r}; it can be 'brent', 'golden' or 'bounded'")
        if method == "bounded" and bounds is None:
            raise ValueError("ScipyMinimizeScalar: the method 'bounded' needs bounds=(shortest, longest)")
        super().__init__()
        self.method, self.maxiter, self.bracket, self.bounds = method, maxiter, bracket, bounds
        self.tol, self.prev_init, self.options = tol, prev_init, dict(options or {})

    def search(self, line: Line, loss: float, slope: float, settings: Any) -> float | None:
        try:
            from scipy.optimize import minimize_scalar
        except ImportError:
            raise ImportError("ScipyMinimizeScalar needs SciPy: pip install scipy, or use m.StrongWolfe()") from None

        def value(a: float) -> float:
            result = line.value(float(a))
            return result if math.isfinite(result) else 1e300 if result > 0 else -1e300

        method = self.method or ("bounded" if self.bounds is not None else "brent")
        more: dict[str, Any] = {"options": dict(self.options)}
        if self.maxiter is not None:
            more["options"]["maxiter"] = self.maxiter
        if method == "bounded":
            more["bounds"] = self.bounds
        else:
            last = self.global_state.get("last")
            more["bracket"] = (0.0, last) if self.prev_init and last is not None else self.bracket
        minimize_scalar(value, method=method, tol=self.tol, **more)
        if line.lowest is None or not line.lowest[1] < loss:
            return None
        self.global_state["last"] = line.lowest[0]
        return line.lowest[0]
