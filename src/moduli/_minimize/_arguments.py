"""The arguments of `minimize`, checked: limits, tolerances, and SciPy's options by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ._direct import DIRECT
from ._functions import MODES
from ._least_squares import LeastSquaresOptions
from ._names import canonical
from ._point import StartPoint, align_numbers, to_numpy, to_vector

if TYPE_CHECKING:
    from ..optim import Module

# SciPy's names, for limits and for the tolerance of the gradient.
_STEPS = ("maxiter",)
_EVALUATIONS = ("maxfev", "maxfun", "max_nfev")
_GRADIENT = ("gtol",)
_FIT = tuple(field.name for field in fields(LeastSquaresOptions) if field.name not in ("tol", "eps", "scale"))


@dataclass(frozen=True)
class MinimizeRequest:
    """The checked arguments of `minimize`, besides the function and the point.

    Attributes:
        method: The passed name, or links.
        name: The canonical name; "links" for links.
        tol: The tolerance, or None for the default.
        max_evals: The largest number of evaluations, or None.
        max_steps: The largest number of steps, or None.
        callback: Called after each step with the result so far, or None.
        progress: Whether to show a progress bar.
        fit: Tolerances and variants of lm.
        fit_options: The names of the passed options that only lm has.
        mode: The mode in which Jacobians are computed: "forward", "reverse" or None.
    """

    method: Any
    name: str
    tol: float | None
    max_evals: int | None
    max_steps: int | None
    callback: Callable[[Any], Any] | None
    progress: bool
    fit: LeastSquaresOptions
    fit_options: tuple[str, ...] = ()
    mode: str | None = None

    def check_fit(self, name: str) -> None:
        """Raise TypeError if options of lm were passed to another method."""
        if self.fit_options and name != "lm":
            fact = f"minimize: {', '.join(self.fit_options)} are options of fits by lm"
            raise TypeError(f"{fact}; this is {name}, for which there are maxiter, maxfev, gtol and disp")


def read_request(
    method: str | Module | Any,
    options: Mapping[str, Any] | None,
    *,
    tol: float | None,
    max_evals: int | None,
    max_steps: int | None,
    callback: Callable[[Any], Any] | None,
    progress: bool,
    x0: Any,
    x_scale: Any,
    jac: Any,
    name: str | None = None,
) -> MinimizeRequest:
    """Return the arguments of a call, checked.

    Args:
        method: The method.
        options: SciPy's options, by name.
        tol: The tolerance.
        max_evals: The largest number of evaluations.
        max_steps: The largest number of steps.
        callback: Called after each step.
        progress: Whether to show a progress bar.
        x0: The starting point.
        x_scale: The size of a change of each variable, in the form of x0, or None.
        jac: The derivatives; a mode is taken from it.
        name: The canonical name of the method; by default it is looked up.

    Raises:
        TypeError: An option that the method does not have.
        ValueError: An invalid limit or tolerance.
    """
    name = name or (canonical(method) if isinstance(method, str) else "links")
    rest = dict(options or {})
    _refuse_repeated(rest, max_steps, max_evals)
    max_steps = _take(rest, _STEPS, max_steps)
    max_evals = _take(rest, _EVALUATIONS, max_evals)
    progress = bool(rest.pop("disp", False)) or progress
    fits = name in ("lm", "auto")
    if name not in DIRECT and (not fits or (name == "auto" and not set(rest) - {"gtol"})):
        tol = _take(rest, _GRADIENT, tol)
    _refuse_unknown(rest, name)
    _check_limits(tol, max_evals, max_steps)
    fit = replace(LeastSquaresOptions(tol=tol or 0.0), **rest)
    named = tuple(rest)
    if (scale := _read_scale(x0, x_scale)) is not None:
        fit, named = replace(fit, scale=scale), (*named, "x_scale")
    mode = _read_mode(jac)
    if fit.geodesic and (callable(jac) or jac is True):
        raise ValueError("minimize: geodesic takes second derivatives of the residuals, which jac= does not give")
    request = MinimizeRequest(
        method, name, tol, max_evals, max_steps, read_callback(callback), progress, fit, named, mode
    )
    if name not in ("lm", "auto"):
        request.check_fit(name)
    return request


def _refuse_repeated(options: Mapping[str, Any], max_steps: int | None, max_evals: int | None) -> None:
    """Raise TypeError if a limit is passed both as an argument and as an option."""
    for names, value in ((_STEPS, max_steps), (_EVALUATIONS, max_evals)):
        for key in names:
            if options.get(key) is not None and value is not None:
                raise TypeError(f"minimize: the option {key} says what max_steps or max_evals says already; give one")


def _refuse_unknown(options: Mapping[str, Any], name: str) -> None:
    """Raise TypeError for an option that a method does not have."""
    fits = name in ("lm", "auto")
    for key in options:
        if not fits or key not in _FIT:
            there = ["maxiter", "maxfev", "disp", *(_FIT if fits else () if name in DIRECT else _GRADIENT)]
            hint = "; tol= is the tolerance of every method" if "tol" in key else ""
            raise TypeError(f"minimize: {name} has no option {key!r}; there are {', '.join(there)}{hint}")


def _read_mode(jac: Any) -> str | None:
    """Return the mode of differentiation if `jac` is one; None for functions and other values."""
    if isinstance(jac, str) and jac not in MODES:
        instead = "torch differentiates exactly, so leave it out; or give a function, True, 'forward' or 'reverse'"
        raise ValueError(f"minimize: jac is {jac!r}; {instead}")
    return jac if isinstance(jac, str) else None


def _take(options: dict[str, Any], names: tuple[str, ...], value: Any) -> Any:
    """Remove the options of these names; return the last of them that is not None, or the value."""
    for name in names:
        option = options.pop(name, None)
        value = value if option is None else option
    return value


def _check_limits(tol: float | None, max_evals: int | None, max_steps: int | None) -> None:
    if tol is not None and not tol >= 0:
        raise ValueError(f"minimize: tol is {tol}; it is a size of the gradient, not negative")
    for name, limit in (("max_evals", max_evals), ("max_steps", max_steps)):
        if limit is not None and limit < 1:
            raise ValueError(f"minimize: {name} is {limit}; allow at least one")


def _read_scale(x0: Any, x_scale: Any) -> Any:
    """Return the scales of all variables as a vector, or None by default; raise ValueError if one is not above zero."""
    if x_scale is None or x_scale is False or (isinstance(x_scale, str) and x_scale == "jac"):
        return None
    point = StartPoint(x0)
    parts = point.match(x_scale, "scales of x", lambda part: isinstance(part, int | float))
    rows = zip(parts, point.leaves, point.list_labels(), strict=True)
    parts = [align_numbers(part, leaf, dims, "minimize: scales of x") for part, leaf, dims in rows]
    pairs = zip(parts, point.leaves, strict=True)
    try:
        leaves = [torch.as_tensor(1.0 if part is None else part).to(leaf) for part, leaf in pairs]
        leaves = [part.expand_as(leaf) for part, leaf in zip(leaves, point.leaves, strict=True)]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"minimize: x_scale does not have the form of x0: {error}") from None
    scale = to_numpy(to_vector(leaves))
    if not bool((scale > 0).all()):
        raise ValueError("minimize: x_scale is the size of a change of each variable, above zero")
    return scale


def read_callback(callback: Callable[..., Any] | None) -> Callable[[Any], Any] | None:
    """Return the callback as a function of the result; one whose argument is called `xk`, as in SciPy, gets the point."""
    if callback is None:
        return None
    try:
        names = list(inspect.signature(callback).parameters)
    except (TypeError, ValueError):  # builtins have no signature
        return callback
    if names == ["xk"]:
        return lambda result: callback(result.x)
    if names == ["intermediate_result"]:
        return lambda result: callback(intermediate_result=result)
    return callback
