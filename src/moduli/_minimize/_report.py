"""A result as a table, as lmfit prints it, and as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._figures import make_axes
from .._html import draw_spark, write_frame, write_html_table
from ._point import data_of, to_numpy

if TYPE_CHECKING:
    from ._result import FoundProblem, Result


def name_numbers(problem: FoundProblem) -> list[str]:
    """Return the name of every real number of a point: its path, with labels of axes if there are any."""
    out: list[str] = []
    for path, leaf, dims in zip(problem.point.names, problem.point.leaves, problem.point.dims, strict=True):
        plain = path.removeprefix("x0")
        if plain.startswith("['") and plain.count("[") == 1:
            plain = plain[2:-2]
        name = plain or "x"
        axes = [range(n) for n in leaf.shape] if dims is None else [list(dim.labels) for dim in dims]
        names = [name + (f"[{', '.join(map(str, index))}]" if index else "") for index in itertools.product(*axes)]
        parts = (".real", ".imag") if leaf.is_complex() else ("",)
        out += [one + part for one in names for part in parts]
    return out


def write_report(result: Result, min_correlation: float) -> str:
    """Return the table of a result.

    Args:
        result: The result.
        min_correlation: The least absolute correlation that is listed.
    """
    problem = result._require_problem()
    covariance = to_numpy(problem.compute_covariance())
    names, values, errors = name_numbers(problem), to_numpy(problem.at), np.sqrt(covariance.diagonal())
    fixed = problem.find_fixed().tolist()
    lines = ["[[Fit Statistics]]", *_describe_fit(result, problem), "[[Variables]]"]
    width = max(map(len, names)) + 1
    for name, value, error, is_fixed in zip(names, values, errors, fixed, strict=True):
        if is_fixed:
            about = "(fixed)"
        elif math.isinf(error):
            about = "+/- inf (not determined)"
        else:
            about = f"+/- {error:.8g}" + (f" ({100 * abs(error / value):.2f}%)" if value else "")
        lines.append(f"    {name + ':':<{width}} {value: .8g} {about}")
    pairs = sorted(_find_correlations(covariance, names, min_correlation), key=lambda pair: -abs(pair[1]))
    if pairs:
        lines.append(f"[[Correlations]] (below {min_correlation:g} not listed)")
        longest = max(len(pair) for pair, _ in pairs)
        lines += [f"    C({pair}){'':<{longest - len(pair)}} = {value:+.4f}" for pair, value in pairs]
    return "\n".join(lines)


def _describe_fit(result: Result, problem: FoundProblem) -> Iterator[str]:
    """Yield the lines about the fit as a whole."""
    size = int((~problem.find_fixed()).sum())
    rows: list[tuple[str, Any]] = [("method", result.method), ("success", result.success), ("message", result.reason)]
    rows += [("function evals", result.evaluations), ("variables", size)]
    freedom = problem.count_freedom()
    if math.isinf(freedom) and problem.count_values() == 1:
        rows.append(("loss", f"{result.value:.8g}"))
    else:
        count, chi = problem.count_values(), 2 * float(result.value)
        rows += [("data points", count), ("chi-square", f"{chi:.8g}")]
        if count > size:
            rows.append(("reduced chi-square", f"{chi / (count - size):.8g}"))
        if chi > 0:
            log = count * math.log(chi / count)
            rows += [
                ("Akaike info crit", f"{log + 2 * size:.8g}"),
                ("Bayesian info crit", f"{log + math.log(count) * size:.8g}"),
            ]
    width = max(len(name) for name, _ in rows)
    yield from (f"    {name:<{width}} = {value}" for name, value in rows)


def _find_correlations(covariance: Any, names: list[str], least: float) -> Iterator[tuple[str, float]]:
    matrix = correlate(torch.from_numpy(np.array(covariance)))
    for i, j in itertools.combinations(range(len(names)), 2):
        value = float(matrix[i, j])
        if abs(value) >= least:
            yield f"{names[i]}, {names[j]}", value


def correlate(covariance: Tensor) -> Tensor:
    """Return the correlations of a covariance: 0 with variables of variance 0, NaN with those of infinite variance."""
    errors = covariance.diagonal().sqrt()
    sizes = torch.where(errors == 0, 1.0, errors)
    out = covariance / sizes[:, None] / sizes
    out = torch.where(errors.isinf()[:, None] | errors.isinf(), math.nan, out).clamp(-1, 1)
    out.fill_diagonal_(1.0)
    return out


def draw_result(result: Result) -> Any:
    """Return a figure: data, fit and residuals; for a loss, its history."""
    residuals, size = _find_residuals(result), (6.4, 4.8)
    if residuals is None:
        axes = make_axes(None, size)
        axes.plot(*_read_history(result), marker=".")
        axes.set(xlabel="evaluations", ylabel="loss", title=result.method)
        return axes.figure
    if result.data is None or residuals.ndim != 1:
        above, below = make_axes(None, size, 2)
        above.plot(*_read_history(result), marker=".")
        above.set(xlabel="evaluations", ylabel="loss", title=result.method)
        below.plot(residuals.reshape(-1), ".")
        below.set(xlabel="residual", ylabel="value")
    else:
        above, below = make_axes(None, size, 2, sharex=True, height_ratios=[3, 1])
        _draw_curve(result, above, below)
    below.axhline(0, color="0.5", linewidth=0.8)
    return above.figure


def write_result_html(result: Result) -> str:
    """Return HTML with the facts of a result, the history of the loss, and its parameters if there are at most 60."""
    value = f"{float(torch.as_tensor(result.value).min()):.6g}"
    facts = [("value", value), ("success", str(result.success)), ("reason", result.reason), ("method", result.method)]
    facts += [("steps", str(result.steps)), ("evaluations", str(result.evaluations))]
    parts = [write_html_table([], facts, labelled=True), draw_spark(_read_history(result)[1])]
    problem = result.problem
    if problem is not None and problem.at.numel() <= 60:
        rows = [[name, f"{x:.6g}"] for name, x in zip(name_numbers(problem), problem.at.tolist(), strict=True)]
        parts.append(write_html_table(["parameter", "value"], rows, labelled=True))
    return write_frame("Result", *parts)


def _find_residuals(result: Result) -> Any:
    """Return the residuals as an array, for a curve fit in the units of y; None if the function is a loss."""
    if result.data is not None:
        with torch.no_grad():
            predicted = data_of(result.data.predict(result.x, result.data.x))
        difference = (result.data.y - predicted).abs() if predicted.is_complex() else result.data.y - predicted
        return difference.cpu().numpy()
    if result.starts or result.problem is None or result.problem.count_values() == 1:
        return None
    values = data_of(result.residuals)
    return (values.abs() if values.is_complex() else values).cpu().numpy()


def _read_history(result: Result) -> tuple[Any, Any]:
    counts = [count for count, _ in result.history]
    values = [float(torch.as_tensor(value).min()) for _, value in result.history]
    return counts, values


def _draw_curve(result: Result, above: Any, below: Any) -> None:
    """Draw data with their errors and the model above, and the residuals below."""
    data, residuals = result.data, _find_residuals(result)
    x = data_of(data.x)
    line = x is not None and x.dim() == 1 and len(x) == len(residuals)
    positions = x.detach().cpu().numpy() if line else np.arange(len(residuals))
    sigma = None if data.sigma is None else np.broadcast_to(to_numpy(data.sigma), residuals.shape)
    observed = (data.y.abs() if data.y.is_complex() else data.y).cpu().numpy()
    above.errorbar(positions, observed, yerr=sigma, fmt=".", label="data")
    order = np.argsort(positions)
    above.plot(positions[order], (observed - residuals)[order], label="fit")
    above.set(ylabel="y")
    above.legend()
    below.errorbar(positions, residuals, yerr=sigma, fmt=".")
    below.set(xlabel="x" if line else "observation", ylabel="residual")
