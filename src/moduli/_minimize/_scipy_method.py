"""The methods of `minimize` for callers of `scipy.optimize.minimize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ._functions import DifferentiatedFunction
from ._names import canonical


def scipy_method(name: str, **settings: Any) -> Callable[..., Any]:
    """Return a method of `minimize` in the form that `scipy.optimize.minimize(method=...)` takes.

    The function, its gradient and its constraints are those of SciPy's caller, in NumPy; without `jac` they are
    differentiated by differences, as SciPy's own methods do.

    Args:
        name: The name of a method, as `minimize` takes it.
        **settings: Other arguments of `minimize`, such as `max_evals`.

    Returns:
        A function for SciPy's `method`; SciPy's result has x, fun, jac, nfev, njev, nit, message, status and success.

    Raises:
        ValueError: There is no such method.

    Example:
        >>> import scipy.optimize, moduli as mo  # doctest: +SKIP
        >>> scipy.optimize.minimize(scipy.optimize.rosen, [-1.2, 1.0], method=mo.scipy_method("lbfgs")).success  # doctest: +SKIP
        True
    """
    canonical(name)

    def run(fun: Callable[..., Any], x0: Any, args: Any = (), **options: Any) -> Any:
        return _run_for_scipy(name, fun, x0, args, {**settings, **options})

    return run


def _run_for_scipy(name: str, fun: Callable[..., Any], x0: Any, args: Any, options: dict[str, Any]) -> Any:
    """Run `minimize` on SciPy's function, and return SciPy's result."""
    from scipy.optimize import OptimizeResult

    from . import minimize  # this module is imported by that one

    options.pop("hessp", None)  # not supported: products are computed from hess
    jac, hess = options.pop("jac", None), options.pop("hess", None)
    callback, constraints = options.pop("callback", None), options.pop("constraints", ())
    several = constraints if isinstance(constraints, list | tuple) else [constraints]
    named = {key: options.pop(key) for key in ("bounds", "tol", *_NAMED) if options.get(key) is not None}
    options = {key: value for key, value in options.items() if value is not None}
    counts = [0]

    def evaluate(x: Any) -> float:
        counts[0] += 1
        return float(np.asarray(fun(x, *args)).reshape(()))

    start = np.array(x0, dtype=float)
    result = minimize(
        evaluate, start, name, jac=_find_jacobian(evaluate, jac, args),
        hess=(lambda x: hess(x, *args)) if callable(hess) else None, constraints=[_translate(one, start) for one in several],
        callback=None if callback is None else lambda now: callback(now.x.numpy()), options=options, **named,
    )  # fmt: skip
    x = result.x.numpy()
    out = OptimizeResult(
        x=x, fun=result.value, success=result.success, status=result.status, message=result.message, nit=result.nit,
        nfev=counts[0], njev=result.njev,
    )  # fmt: skip
    if result.gradient_norm is not None:
        out["jac"] = np.asarray(result.jac)
    return out


_NAMED = ("max_evals", "max_steps", "progress", "bounds_by")


def _find_jacobian(fun: Callable[..., Any], jac: Any, args: Any = ()) -> Callable[[Any], Any]:
    """Return the caller's derivatives, or differences of the function."""
    if callable(jac):
        return lambda x: np.asarray(jac(x, *args), dtype=float)
    from scipy.optimize import approx_fprime

    return lambda x: approx_fprime(x, fun)


def _translate(constraint: Any, x0: Any) -> Any:
    """Return one of SciPy's constraints with a function that torch can differentiate."""
    if isinstance(constraint, Mapping):
        args, jac = constraint.get("args", ()), constraint.get("jac")
        function = _differentiate(lambda x: constraint["fun"](x, *args), jac, args, x0)
        return {"type": constraint["type"], "fun": function}
    A = getattr(constraint, "A", None)
    if A is None:
        function = _differentiate(constraint.fun, getattr(constraint, "jac", None), (), x0)
    else:
        dense = np.asarray(A.toarray() if hasattr(A, "toarray") else A, dtype=float)
        function = _differentiate(lambda x: dense @ x, lambda x: dense, (), x0)
    # SciPy's ends may be read-only views of one number, which torch does not accept.
    return FunctionBetween(function, np.array(constraint.lb, dtype=float), np.array(constraint.ub, dtype=float))


class FunctionBetween(NamedTuple):
    """A function between two ends, with the attributes of SciPy's NonlinearConstraint."""

    fun: Callable[[Any], Any]
    lb: Any
    ub: Any


def _differentiate(fun: Callable[[Any], Any], jac: Any, args: Any, x0: Any) -> DifferentiatedFunction:
    """Return a function of NumPy arrays, with values as a vector, as one of torch."""

    def evaluate(x: Any) -> Any:
        return np.atleast_1d(np.asarray(fun(x), dtype=float))

    return DifferentiatedFunction(evaluate, x0, _find_jacobian(evaluate, jac, args), None)
