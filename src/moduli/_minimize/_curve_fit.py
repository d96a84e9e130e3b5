"""`curve_fit`: a model with named parameters, fitted to data."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..labels import Tensor as Labelled
from ._derivatives import allow_derivatives
from ._point import StartPoint, align_numbers, data_of
from ._result import Result


class CurveData(NamedTuple):
    """The data of a curve fit, and the model, which `Result.plot` draws.

    Attributes:
        predict: The model, a function of the parameters in the form of `Result.x`, and of x.
        x: The predictors.
        y: The observed values.
        sigma: Their standard deviations, or None.
    """

    predict: Callable[[Any, Any], Any]
    x: Any
    y: Tensor
    sigma: Tensor | None

    def __reduce__(self) -> Any:
        # A pickled result has no functions.
        return type(None), ()


@allow_derivatives()
def curve_fit(
    f: Callable[..., Any],
    x: Any,
    y: Any,
    p0: Any = None,
    sigma: Any = None,
    bounds: Any = None,
    *,
    absolute_sigma: bool = False,
    jac: Any = None,
    **settings: Any,
) -> Result:
    """Fit a model f(x, a, b, ...) to observed values; the names of parameters are those of f's arguments.

    Args:
        f: The model in torch's functions: takes x and the parameters, returns predictions of y.
        x: The predictors, passed to f: numbers become tensors; labelled tensors, and anything else, are passed unchanged.
        y: The observed values.
        p0: The initial parameters: a dictionary by name, or a list of numbers in f's order. By default 1, or inside of
            the bounds. Names are taken from f; if f takes `*params` they are p0, p1, ...
        sigma: Standard deviations of y, or the covariance matrix of its errors.
        bounds: Intervals by name, a list of intervals, one interval for all, or as SciPy's `curve_fit` a tuple of all lower
            and all upper bounds.
        absolute_sigma: Whether sigma is in the units of y, so that covariances are not scaled by the residuals.
        jac: "forward" or "reverse", or a function of x and the parameters that returns the Jacobian, one column for each
            parameter; without it torch differentiates.
        **settings: Other arguments of `minimize`: method, loss, f_scale, nan, tol, max_evals, callback, options, ...

    Returns:
        A `Result` whose `x` is a dictionary by name, with `stderr`, `covariance()`, `report()` and `plot()`.

    Raises:
        TypeError: f has no parameters after x, or p0 does not name them.
        ValueError: Shapes do not fit, or sigma is not above zero.

    Example:
        >>> import torch, moduli as mo
        >>> t = torch.linspace(0, 3, 30, dtype=torch.float64)
        >>> fit = mo.curve_fit(lambda t, a, rate: a * torch.exp(-rate * t), t, 2.5 * torch.exp(-1.3 * t))
        >>> {name: round(float(value), 6) for name, value in fit.x.items()}
        {'a': 2.5, 'rate': 1.3}
    """
    x, y = _read_data(x), _read_data(y)
    start = _read_start(f, p0, bounds)
    bounds = _read_intervals(bounds, list(start)) or None
    sigma = _align_sigma(sigma, y)
    model = _CurveModel(f, x, y, isinstance(p0, Mapping))
    observed = model.observed
    model.weigh = _read_sigma(sigma, observed)
    if settings.get("nan") == "mask" and sigma is not None and _is_covariance(sigma, observed):
        model.mask(sigma, start)
    if jac is not None and not isinstance(jac, str):
        jac = model.weigh_columns(jac)
    result = _minimize(model.residuals, start, settings.pop("method", "lm"), bounds=bounds, jac=jac, **settings)
    problem = result._require_problem()._replace(absolute=absolute_sigma and sigma is not None)
    spread = None if sigma is None else _read_sigma_vector(sigma, observed)
    return dataclasses.replace(result, problem=problem, data=CurveData(model.predict, x, observed.detach(), spread))


class _CurveModel:
    """A model with the data that it is fitted to, and its residuals.

    Args:
        f: The function of x and the parameters.
        x: The predictors.
        y: The observed values.
        by_name: Whether parameters are passed by name.
    """

    def __init__(self, f: Callable[..., Any], x: Any, y: Any, by_name: bool) -> None:
        self.f, self.x, self.y, self.by_name = f, x, y, by_name
        self.observed: Tensor = data_of(y) if data_of(y) is not None else torch.as_tensor(y)
        if self.observed.numel() == 0:
            raise ValueError("curve_fit: y has no numbers in it")
        self.order = _RowOrder(y)
        #: Makes residuals of unit variance.
        self.weigh: Callable[[Tensor], Tensor] | None = None
        #: Which observed values are used; None for all.
        self.used: Tensor | None = None

    def _call(self, function: Callable[..., Any], p: Mapping[str, Any], x: Any) -> Any:
        """Call a function of x and the parameters."""
        return function(x, **p) if self.by_name else function(x, *p.values())

    def predict(self, p: Mapping[str, Any], x: Any) -> Any:
        """Return the values of the model; at the x of the data in their order."""
        values = self._call(self.f, p, x)
        return self.order.align(values) if x is self.x else values

    def subtract(self, p: Mapping[str, Any]) -> Any:
        """Return the differences of the model from all observed values."""
        values = self.predict(p, self.x)
        data = data_of(values)
        if data is None:
            raise TypeError(f"curve_fit: f returned a {type(values).__name__}; write it in torch's functions")
        if data.shape != self.observed.shape:
            shapes = f"f returned shape {tuple(data.shape)}, and y has shape {tuple(self.observed.shape)}"
            raise ValueError(f"curve_fit: {shapes}; they have to be the same")
        labelled = isinstance(values, Labelled) and isinstance(self.y, Labelled)
        return values - self.y if labelled else data - self.observed

    def residuals(self, p: Mapping[str, Any]) -> Any:
        """Return the weighted differences from the values that are used."""
        difference = self.subtract(p) if self.used is None else data_of(self.subtract(p))[self.used]
        return difference if self.weigh is None else self.weigh(data_of(difference))

    def mask(self, sigma: Any, start: dict[str, Any]) -> None:
        """Leave out the values whose residuals are not a number at the start, where `sigma` is a covariance matrix.

        Each residual of unit variance is a sum, in which one that is not a number would be in all that follow.
        """
        point = StartPoint(start)
        with torch.no_grad():
            used = self.used = ~data_of(self.subtract(point.result(point.leaves))).isnan()
        self.weigh = _read_sigma(_read_numbers(sigma)[used][:, used], self.observed[used])

    def weigh_columns(self, jac: Any) -> Callable[[Any], Any]:
        """Return the user's Jacobian, a function of x and the parameters, as that of the residuals, by parameter."""
        if not callable(jac):
            raise TypeError("curve_fit: jac is a function of x and the parameters, 'forward' or 'reverse'")

        def differentiate(p: Mapping[str, Any]) -> dict[str, Tensor]:
            out = self._call(jac, p, self.x)
            matrix = torch.as_tensor(_read_data(out) if data_of(out) is None else data_of(out))
            matrix = matrix.reshape(self.observed.numel(), -1)
            if matrix.shape[1] != len(p):
                raise ValueError(f"curve_fit: jac returned {matrix.shape[1]} columns for {len(p)} parameters")
            matrix = matrix if self.order.places is None else matrix[self.order.places]
            matrix = matrix if self.used is None else matrix[self.used]
            columns = matrix.unbind(1)
            return dict(zip(p, columns if self.weigh is None else map(self.weigh, columns), strict=True))

        return differentiate


class _RowOrder:
    """The order of the values of a labelled model, which can be other than that of the labelled data.

    Args:
        y: The data.
    """

    def __init__(self, y: Any) -> None:
        self.dims = y.dims if isinstance(y, Labelled) else None
        #: For each value of the data its place in the model, if the order is another.
        self.places: Tensor | None = None

    def align(self, values: Any) -> Any:
        """Return values of the model in the order of the data; those without labels unchanged."""
        if self.dims is None or not isinstance(values, Labelled) or values.dims == self.dims:
            return values
        try:
            aligned = values.align_to(self.dims)
            places = torch.arange(values.data.numel(), device=values.data.device).reshape(values.data.shape)
            self.places = Labelled(places, values.dims).align_to(self.dims).data.reshape(-1)
        except ValueError as error:
            raise ValueError(f"curve_fit: f returned values whose axes or labels are not those of y: {error}") from None
        return aligned


def _align_sigma(sigma: Any, y: Any) -> Any:
    """Return labelled standard deviations, or a labelled covariance matrix, in the order of labelled data; others unchanged."""
    if not isinstance(sigma, Labelled) or not isinstance(y, Labelled):
        return sigma
    if y.data.dim() == 1 and sigma.data.dim() == 2:
        try:
            return sigma.align_to([y.dims[0].rename(axis.name) for axis in sigma.dims]).data
        except ValueError as error:
            raise ValueError(f"curve_fit: sigma does not have the labels of y: {error}") from None
    return align_numbers(sigma, y.data, y.dims, "curve_fit: sigma", "y")


def _minimize(*args: Any, **settings: Any) -> Result:
    from . import minimize  # this module is imported by that one

    return minimize(*args, **settings)


def _read_data(values: Any) -> Any:
    """Return numbers as a tensor in double precision; tensors and other objects unchanged."""
    if isinstance(values, Tensor | Labelled):
        return values
    if isinstance(values, np.ndarray | list | tuple | int | float) or hasattr(values, "__array__"):
        try:
            array = np.asarray(values)
        except ValueError:  # a tuple of predictors of different shapes
            return values
        if array.dtype.kind in "iufc":
            return torch.from_numpy(np.array(array, dtype=complex if array.dtype.kind == "c" else float))
    return values


def _read_start(f: Callable[..., Any], p0: Any, bounds: Any) -> dict[str, Any]:
    """Return the starting values by name."""
    if isinstance(p0, Mapping):
        if not p0:
            raise TypeError("curve_fit: p0 names no parameters")
        return {name: _read_data(value) for name, value in p0.items()}
    names, accepts_more = _list_parameters(f)
    if p0 is None:
        if not names:
            raise TypeError("curve_fit: f names no parameters after x; give p0")
        ends = _read_intervals(bounds, names)
        starts: list[Any] = [_start_inside(ends.get(name)) for name in names]
    else:
        values = data_of(p0)
        starts = list(np.atleast_1d(p0) if values is None else values.detach().reshape(-1))
        if accepts_more and len(starts) > len(names):
            names = [*names, *(f"p{i}" for i in range(len(names), len(starts)))]
        if len(starts) != len(names):
            raise TypeError(
                f"curve_fit: p0 has {len(starts)} numbers, and f takes {', '.join(names) or 'none'} after x"
            )
    return {
        name: _read_data(float(v) if isinstance(v, np.generic) else v) for name, v in zip(names, starts, strict=True)
    }


def _list_parameters(f: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of the positional arguments of a function after the first one, and whether it takes any others."""
    parameters = list(inspect.signature(f).parameters.values())[1:]
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return names, any(one.kind is one.VAR_POSITIONAL for one in parameters)


def _start_inside(interval: Any) -> float:
    """Return 1 if it is inside of an interval, else a point inside."""
    low, high = interval or (None, None)
    low, high = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    if low < 1 < high or low == high == 1:
        return 1.0
    if math.isfinite(low) and math.isfinite(high):
        return 0.5 * (low + high)
    return low + 1 if math.isfinite(low) else high - 1


def _read_intervals(bounds: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return an interval for each name; raise ValueError if there are more or fewer."""
    if bounds is None:
        return {}
    if isinstance(bounds, Mapping):
        return dict(bounds)
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):  # scipy.optimize.Bounds
        bounds = (bounds.lb, bounds.ub)
    pairs = list(bounds)
    if len(pairs) == 2 and all(one is None or np.ndim(one) == 0 for one in pairs):
        return dict.fromkeys(names, (pairs[0], pairs[1]))
    if isinstance(bounds, tuple) and len(pairs) == 2:
        pairs = _pair_sides(pairs, len(names))
    if len(pairs) != len(names):
        raise ValueError(
            f"curve_fit: there are {len(names)} parameters ({', '.join(names)}); give an interval for each"
        )
    return dict(zip(names, (None if pair is None else tuple(pair) for pair in pairs), strict=True))


def _pair_sides(sides: Sequence[Any], count: int) -> list[Any]:
    """Return all lower and all upper bounds as intervals, of which there are `count`; none if a side has more or fewer."""
    low, high = (list(side) if np.ndim(side) else [side] * count for side in sides)
    return list(zip(low, high, strict=True)) if len(low) == len(high) == count else []


def _read_sigma_vector(sigma: Any, y: Tensor) -> Tensor:
    """Return the standard deviations, also from a covariance matrix."""
    values = _read_numbers(sigma)
    return values.diagonal().sqrt() if _is_covariance(sigma, y) else values


def _read_numbers(sigma: Any) -> Tensor:
    return torch.as_tensor(_read_data(sigma) if data_of(sigma) is None else data_of(sigma)).detach()


def _is_covariance(sigma: Any, y: Tensor) -> bool:
    """Return whether sigma is a covariance matrix of the data, and not their standard deviations."""
    return y.dim() == 1 and _read_numbers(sigma).shape == (len(y), len(y))


def _read_sigma(sigma: Any, y: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return the function that makes residuals of unit variance, or None."""
    if sigma is None:
        return None
    values = _read_numbers(sigma).to(y.device)
    if _is_covariance(sigma, y):
        symmetric = torch.allclose(values, values.mT, rtol=1e-4, atol=1e-6 * float(values.abs().max()))
        L, failed = torch.linalg.cholesky_ex(values)
        if not symmetric:
            raise ValueError("curve_fit: sigma, as a covariance matrix, is not symmetric")
        if int(failed):
            raise ValueError("curve_fit: sigma, as a covariance matrix, is not positive definite")
        return lambda r: torch.linalg.solve_triangular(L.to(r), r[:, None], upper=False)[:, 0]
    try:
        values.expand(y.shape)
    except RuntimeError:
        raise ValueError(
            f"curve_fit: sigma of shape {tuple(values.shape)} does not fit y of {tuple(y.shape)}"
        ) from None
    if not bool((values > 0).all()):
        raise ValueError("curve_fit: sigma is standard deviations, above zero")
    return lambda r: r / values.to(r.real.dtype)
