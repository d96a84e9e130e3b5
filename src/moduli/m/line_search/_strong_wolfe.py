"""A step length that satisfies the strong Wolfe conditions."""

from __future__ import annotations

import math
from typing import Any

from .._checks import collect_settings
from ._base import LineSearchBase
from ._more_thuente import Trials, more_thuente_trials

_INITS = ("fixed", "previous", "first-order", "quadratic", "quadratic-clip")


class StrongWolfe(LineSearchBase):
    r"""Searches for a length where the value has fallen enough and the slope has flattened enough.

    $f(x - a u) \le f(x) + c_1 a \phi'(0),\qquad |\phi'(a)| \le c_2 |\phi'(0)|,\qquad \phi(a) = f(x - a u)$.

    Quasi-Newton links need the second condition for their curvature, conjugate gradients a tight one (`c2=0.1`). With
    `mo.closure(fn, fixed=True)` the loss and gradient of the accepted point are handed to the next step.

    Args:
        c1: The fraction of the decrease promised by the slope that is asked for.
        c2: The fraction of the slope that may be left.
        a_init: The first length: "fixed" (`init_value`), "previous" (the last one), "first-order" (the last one, times
            the ratio of slopes), "quadratic" (the minimiser of a parabola with the last decrease), "quadratic-clip"
            (that times 1.01, at most 1).
        a_max: The longest step.
        init_value: The first length where nothing else is known.
        maxiter: The largest number of evaluations.
        tol_change: End when the interval is this small relative to its upper end.
        adaptive: Halve the first length after a search that found no lower point.
        fallback: Where the conditions can't be met, take the lowest point found if it is lower than the start.
        plus_minus: Where the update points uphill, search along minus the update (otherwise along the gradient).
        parabola: Where the function is exactly quadratic along the line, and more than this fraction of the slope is left,
            go to the minimum of the parabola at the price of one more evaluation; None for never.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> rosenbrock = mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2, fixed=True)
        >>> opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
        >>> for _ in range(40):
        ...     _ = opt.step(rosenbrock)
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        J. J. More, D. J. Thuente, "Line search algorithms with guaranteed sufficient decrease", ACM TOMS 20 (1994);
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 3.5.
    """

    members = "matrix"
    uses_slopes = True

    def __init__(
        self,
        *,
        c1: Any = 1e-4,
        c2: Any = 0.9,
        a_init: str = "fixed",
        a_max: Any = 1e12,
        init_value: Any = 1.0,
        maxiter: int = 25,
        tol_change: Any = 1e-9,
        adaptive: bool = True,
        fallback: bool = True,
        plus_minus: bool = False,
        parabola: float | None = 0.1,
    ) -> None:
        if a_init not in _INITS:
            raise ValueError(f"StrongWolfe: a_init is {a_init!r}; it can be {', '.join(_INITS)}")
        if isinstance(c1, int | float) and isinstance(c2, int | float) and not 0 < c1 < c2 < 1:
            raise ValueError(f"StrongWolfe: c1 is {c1} and c2 is {c2}; they obey 0 < c1 < c2 < 1")
        if isinstance(init_value, int | float) and not init_value > 0:
            raise ValueError(f"StrongWolfe: init_value is {init_value}; the first length is positive")
        if isinstance(a_max, int | float) and not a_max > 0:
            raise ValueError(f"StrongWolfe: a_max is {a_max}; the longest step is positive")
        if maxiter < 1:
            raise ValueError(f"StrongWolfe: maxiter is {maxiter}; make at least one evaluation")
        super().__init__(collect_settings(locals()))

    def choose_first_length(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> float:
        """The first length to try."""
        kind, start = settings["a_init"], float(settings["init_value"])
        last = memory.get("last")
        out = start
        if kind != "fixed" and last is not None:
            a, slope_before, loss_before = last
            if kind == "previous":
                out = a
            elif kind == "first-order":
                out = a * slope_before / slope
            else:
                out = 2 * (loss - loss_before) / slope
                if kind == "quadratic-clip":
                    out = min(1.0, 1.01 * out)
        if not math.isfinite(out) or out <= 0:
            out = start
        return out * (memory.get("scale", 1.0) if settings["adaptive"] else 1.0)

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        """Looks for a length where both conditions hold."""
        found, good, lowest, best = yield from more_thuente_trials(
            loss,
            slope,
            self.choose_first_length(loss, slope, settings, memory),
            c1=settings["c1"],
            c2=settings["c2"],
            most=settings["a_max"],
            maxiter=settings["maxiter"],
            width=settings["tol_change"],
            parabola=settings["parabola"],
        )
        if not good:
            found = best if lowest == -math.inf or (settings["fallback"] and lowest < loss) else None
        if found is None:
            scale = memory.get("scale", 1.0)
            memory["scale"] = scale / 2 if scale > 1e-30 else 1.0
            return None
        memory["scale"] = 1.0
        memory["last"] = (found, slope, loss)
        return found

    def reset_for_online(self) -> None:
        """Forgets the last step length."""
        super().reset_for_online()
        self.global_state.pop("last", None)
