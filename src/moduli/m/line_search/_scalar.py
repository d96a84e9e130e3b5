"""Step lengths by methods for functions of one number."""

from __future__ import annotations

import math
from typing import Any

from .._checks import check_at_least_one, collect_settings, fraction, positive
from ._base import LineSearchBase
from ._line import Line


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

    def __init__(
        self, *, init: Any = 1.0, nplus: Any = 2.0, nminus: Any = 0.5, maxiter: int = 10, adaptive: bool = True
    ) -> None:
        positive("AdaptiveBisection", init=init, nminus=nminus)
        fraction("AdaptiveBisection", nminus=nminus)
        check_at_least_one("AdaptiveBisection", maxiter=maxiter)
        if isinstance(nplus, int | float) and not nplus > 1:
            raise ValueError(f"AdaptiveBisection: nplus is {nplus}; the length grows by more than 1")
        super().__init__(collect_settings(locals()))

    def search(self, line: Line, loss: float, slope: float, settings: Any) -> float | None:
        """Goes up or down from the last length while the value falls."""
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
        """Asks SciPy."""
        try:
            from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]
        except ImportError:
            raise ImportError("ScipyMinimizeScalar needs SciPy: pip install scipy, or use m.StrongWolfe()") from None

        def value(a: float) -> float:
            found = line.value(float(a))
            return found if math.isfinite(found) else 1e300 if found > 0 else -1e300

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
