"""`Result`, with derivatives and error bars in the form of x0; above 400 lines because half of them are docstrings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..labels import Space
from ..labels import Tensor as Labelled
from ._derivatives import VectorFunction, allow_derivatives
from ._intervals import find_intervals
from ._point import StartPoint, data_of, from_vector, to_vector, value_of
from ._report import correlate, draw_result, write_report, write_result_html


def ask_to_stop(callback: Callable[[Result], Any], result: Result) -> bool:
    """Whether a callback ends the run: by a true answer, or by StopIteration as SciPy's do."""
    try:
        return bool(callback(result))
    except StopIteration:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The best point of a run, and a report of the run.

    Among points with equal values up to rounding, the one with the smallest gradient is the best. With residuals r the value is
    half of |r|^2.

    Args:
        x: The best point, in the form of x0.
        value: The loss there (one per start, for batched starts).
        reason: The reason why it ended, as a sentence.
        success: Whether it ended at an apparent minimum (for batched starts: all of them).
        steps: The number of steps.
        evaluations: The number of calls of the function.
        gradient_norm: The largest component of the gradient at `x`, as far as bounds let it be followed; None for methods
            without gradients.
        seconds: The duration.
        history: (evaluations, best value) after each step.
        method: The method that was used.
        starts: For batched starts the result of each; otherwise empty.
        multipliers: For each constraint its Lagrange multipliers, in the order they were given.
        kkt_residual: The largest violation of the conditions of Karush, Kuhn and Tucker: of the gradient of the Lagrangian,
            of a constraint, or of complementarity. None without constraints.
        jacobians: The number of Jacobians that a fit has computed.
        data: The data of a `curve_fit`, which `plot` draws.

    `fun`, `jac`, `nfev`, `njev`, `nit`, `message` and `status` are SciPy's names of these.

    Example:
        >>> import torch, moduli as mo
        >>> t = torch.linspace(0, 1, 5, dtype=torch.float64)
        >>> noise = torch.tensor([0.1, -0.1, 0.0, -0.1, 0.1], dtype=torch.float64)
        >>> fit = mo.minimize(lambda p: p["a"] + p["b"] * t - (1 + 2 * t + noise), {"a": 0.0, "b": 0.0})
        >>> fit.success, round(float(fit.x["b"]), 3), round(float(fit.stderr["b"]), 3)
        (True, 2.0, 0.146)
    """

    x: Any
    value: Any
    reason: str
    success: bool
    steps: int
    evaluations: int
    gradient_norm: Any
    seconds: float
    history: tuple[tuple[int, Any], ...]
    method: str
    starts: tuple[Result, ...] = ()
    multipliers: tuple[Any, ...] = ()
    kkt_residual: float | None = None
    problem: FoundProblem | None = field(default=None, repr=False)
    jacobians: int = 0
    data: Any = field(default=None, repr=False)

    @property
    def fun(self) -> Any:
        """The loss at `x`: `value`, by SciPy's name."""
        return self.value

    @property
    def jac(self) -> Any:
        """The gradient at `x`, or the Jacobian of the residuals: `jacobian()`, by SciPy's name."""
        return self.jacobian()

    @property
    def nfev(self) -> int:
        """The number of calls of the function: `evaluations`, by SciPy's name."""
        return self.evaluations

    @property
    def njev(self) -> int:
        """The number of Jacobians of a fit; for other methods with gradients an upper bound, one per evaluation."""
        return self.jacobians or (self.evaluations if self.gradient_norm is not None else 0)

    @property
    def nit(self) -> int:
        """The number of steps: `steps`, by SciPy's name."""
        return self.steps

    @property
    def message(self) -> str:
        """The reason why it ended: `reason`, by SciPy's name."""
        return self.reason

    @property
    def status(self) -> int:
        """0 for an apparent minimum, 1 for a limit, 99 if the callback ended the run, 2 otherwise."""
        if self.success:
            return 0
        return 1 if "limit of" in self.reason and "reached" in self.reason else 99 if "callback" in self.reason else 2

    @property
    def residuals(self) -> Any:
        """The residuals of a fit at `x`, as the function returns them."""
        return self._require_problem().evaluate_residuals()

    def jacobian(self) -> Any:
        """Return the derivatives of the function at `x`: for residuals with one more axis before those of x0; else the gradient.

        In the form of x0, labelled where x0 is (the axis of residuals is called "residual", or as they call it).
        """
        return self._require_problem().jacobian()

    def hessian(self) -> Any:
        """Return the second derivatives of the value at `x`: for each tensor of x0, in its form, a block for each tensor of x0.

        For one tensor of shape S it has shape S + S. Where x0 is labelled, the second axes have a prime in their name.
        """
        problem = self._require_problem()
        return problem.part_blocks(problem.compute_hessian())

    def covariance(self) -> Any:
        r"""Return the covariance of the parameters, in the form of `hessian`.

        For residuals it is $s^2 (J^TJ)^{-1}$ with $s^2 = |r|^2 / (m - n)$, as in SciPy's `curve_fit`; for a loss the inverse of
        its Hessian, which is the covariance if the loss is a negative log-likelihood. Parameters that are fixed, or determined by
        constraints, have variance 0; parameters that the function does not determine have an infinite variance.
        """
        problem = self._require_problem()
        return problem.part_blocks(problem.compute_covariance())

    @property
    def stderr(self) -> Any:
        """The standard error of each parameter: roots of the diagonal of `covariance`, in the form of x0."""
        problem = self._require_problem()
        variances = problem.compute_covariance().diagonal()
        return problem.point.form(from_vector(variances.sqrt(), problem.point.leaves))

    def correlation(self) -> Any:
        """Return the correlations of the parameters, in the form of `hessian`; NaN with undetermined ones."""
        problem = self._require_problem()
        return problem.part_blocks(correlate(problem.compute_covariance()))

    def confidence_interval(self, level: float = 0.95, by: str = "t") -> tuple[Any, Any]:
        """Return the ends of the confidence interval of each parameter: a pair, both in the form of x0.

        A function that returns one number is treated as a negative log-likelihood.

        Args:
            level: The probability that an interval covers the true value.
            by: "t" for symmetric intervals from `stderr` and Student's t; "profile" for those outside of which the sum of
                squares, minimised over all other parameters, has grown by as much. The latter need not be symmetric,
                follow the curvature of the model, and end at bounds; infinite where the data set no limit.

        Returns:
            The lower ends and the upper ends.
        """
        problem = self._require_problem()
        low, high = find_intervals(problem, level, by)
        leaves = problem.point.leaves
        return problem.point.form(from_vector(low, leaves)), problem.point.form(from_vector(high, leaves))

    def report(self, min_correlation: float = 0.1) -> str:
        """Return a table of the fit, its parameters with standard errors, and correlations, as text.

        Args:
            min_correlation: The least absolute correlation that is listed.
        """
        return write_report(self, min_correlation)

    def plot(self) -> Any:
        """Return a figure of matplotlib: data, fit and residuals; for a loss, its value by evaluations.

        `figure.savefig("fit.png")` writes it; a notebook shows it. Needs `pip install moduli[plot]`.
        """
        return draw_result(self)

    def _require_problem(self) -> FoundProblem:
        if self.starts:
            raise ValueError("this result is of many starts; ask one of them: result.starts[i].stderr")
        if self.problem is None and self.method in ("fista", "proximal-gradient"):
            fact = "this result is of a sum with prox=, which has no derivatives where the penalty has a corner"
            raise ValueError(f"{fact}; differentiate the function itself at result.x")
        if self.problem is None:
            raise ValueError("this result was loaded without its function, so it can not be differentiated any more")
        return self.problem

    def _repr_html_(self) -> str:
        return write_result_html(self)

    def __repr__(self) -> str:
        value = f"{self.value:.6g}" if isinstance(self.value, float) else repr(self.value)
        return (
            f"Result(value={value}, success={self.success}, steps={self.steps}, evaluations={self.evaluations}, "
            f"method={self.method!r}, reason={self.reason!r})"
        )


class FoundProblem(NamedTuple):
    """A function of a point of some form, and the point at which it is differentiated.

    Args:
        fun: The function.
        point: The form of x0.
        at: The point, as the real vector of all leaves.
        fixed: For each leaf the mask of the numbers that bounds fix, or None.
        constraints: Functions of the point that are zero at the result: the active constraints.
        J: The Jacobian at the point, if the run has computed it.
        absolute: Whether residuals have unit variance, so that covariances are not scaled by their size.
        sides: The lower and upper bounds of each leaf; empty if there are none.
    """

    fun: Callable[[Any], Any]
    point: StartPoint
    at: Tensor
    fixed: Sequence[Tensor | None]
    constraints: Sequence[Callable[[Any], Any]] = ()
    J: Tensor | None = None
    absolute: bool = False
    sides: tuple[Sequence[Tensor | None], Sequence[Tensor | None]] = ((), ())

    def __reduce__(self) -> Any:
        # Functions are seldom picklable, so a result is pickled without them.
        return type(None), ()

    # ------------------------------------------------------------------ as matrices

    def _evaluate(self, fun: Callable[[Any], Any], vector: Tensor) -> Any:
        """Return a function at the point of a real vector."""
        return self.point.call(fun, from_vector(vector, self.point.leaves))

    @allow_derivatives()
    def _differentiate(self, fun: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        """Return the values as a vector, and their Jacobian by the real vector of all leaves."""
        function = VectorFunction(fun, self.point)
        with torch.no_grad():
            values = function(self.at)
        if fun is self.fun and self.J is not None:
            return values, self.J.to(values)
        return values, function.jacobian(self.at, values.numel())

    @allow_derivatives()
    def compute_hessian(self) -> Tensor:
        """Return the Hessian of the value by the real vector of all leaves."""

        def value(vector: Tensor) -> Tensor:
            data: Tensor = data_of(self._evaluate(self.fun, vector))
            return value_of(data if data.numel() > 1 else data.reshape(()))

        H: Tensor = torch.autograd.functional.hessian(value, self.at)  # type: ignore[no-untyped-call]
        return 0.5 * (H + H.T)

    @allow_derivatives()
    def compute_covariance(self) -> Tensor:
        """Return the covariance by the real vector of all leaves.

        The Jacobian is decomposed with its columns scaled to length one, never its square: J'J has the square of its
        condition. Where the data say nothing of a direction, entries to which it belongs are infinite, and the others are
        those of the directions that are determined.
        """
        vector, J = self._differentiate(self.fun)
        Z = self._find_free_directions(J.dtype)
        if vector.numel() == 1:
            H = Z.T @ self.compute_hessian() @ Z
            sizes = _avoid_zeros(H.diagonal().abs().sqrt())
            values, vectors = torch.linalg.eigh(H / sizes / sizes[:, None])
            weights, scale = values, 1.0
        else:
            free = J @ Z
            sizes = _avoid_zeros(torch.linalg.vector_norm(free, dim=0))
            _, roots, Vh = torch.linalg.svd(free / sizes, full_matrices=free.shape[0] < free.shape[1])
            values = torch.cat([roots, roots.new_zeros(len(Vh) - len(roots))])
            weights, vectors = values.square(), Vh.T
            freedom = vector.numel() - Z.shape[1]
            scale = float(vector.square().sum()) / freedom if freedom > 0 else math.inf
            scale = 1.0 if self.absolute else scale
        least = torch.finfo(values.dtype).eps * max(J.shape) * float(values.abs().max() if values.numel() else 0.0)
        determined = values > least if math.isfinite(scale) else torch.zeros_like(values, dtype=torch.bool)
        directions = Z @ (vectors / sizes[:, None])
        out: Tensor = (
            scale * (directions[:, determined] / weights[determined]) @ directions[:, determined].T
            if determined.any()
            else 0 * Z @ Z.T
        )
        blind = directions[:, ~determined]
        if blind.shape[1]:
            # An undetermined direction has a weight of rounding in variables that it does not concern.
            blind = blind / torch.linalg.vector_norm(blind, dim=0)
            free = blind @ blind.T
            out = torch.where(free.abs() > 1e-10, free.sign() * math.inf, out)
        return out

    def count_values(self) -> int:
        """Return the number of real values of the function."""
        with torch.no_grad():
            return VectorFunction(self.fun, self.point)(self.at).numel()

    def count_freedom(self) -> float:
        """Return the degrees of freedom of the residuals; infinite if their variance is known, and for a loss."""
        count = self.count_values()
        if count == 1 or self.absolute:
            return math.inf
        return count - self._find_free_directions(self.at.dtype).shape[1]

    def find_fixed(self) -> Tensor:
        """Return the mask of the real numbers that bounds fix."""
        marks = [torch.zeros_like(leaf) for leaf in self.point.leaves]
        for mark, fixed in zip(marks, self.fixed, strict=True):
            if fixed is not None:
                mark[fixed] = 1
        return to_vector(marks) != 0

    def find_sides(self) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper bound of every real number, infinite where open."""
        out = []
        for side, end in zip(self.sides, (-math.inf, math.inf), strict=True):
            parts = []
            for bound, leaf in zip(side or [None] * len(self.point.leaves), self.point.leaves, strict=True):
                real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
                parts.append(torch.full_like(real, end) if bound is None else bound)
            out.append(to_vector(parts))
        return out[0], out[1]

    def _find_free_directions(self, dtype: torch.dtype) -> Tensor:
        """Return an orthonormal basis of the directions in which no fixed number and no constraint changes."""
        fixed_numbers = self.find_fixed()
        identity = torch.eye(len(fixed_numbers), dtype=dtype, device=fixed_numbers.device)
        if not self.constraints:
            return identity[:, ~fixed_numbers]
        rows = [identity[fixed_numbers], *(self._differentiate(constraint)[1] for constraint in self.constraints)]
        _, sizes, Vh = torch.linalg.svd(torch.cat(rows), full_matrices=True)
        rank = int((sizes > 1e-10 * max(1.0, float(sizes.max()) if sizes.numel() else 1.0)).sum())
        basis: Tensor = Vh[rank:].T
        return basis

    # ------------------------------------------------------------------ in x0's form

    def evaluate_residuals(self) -> Any:
        """Return the residuals as the function returns them."""
        with torch.no_grad():
            values = self._evaluate(self.fun, self.at)
        if data_of(values).dim() == 0:
            raise ValueError("this result is of a loss of one number; residuals are those of a fit")
        return values

    @allow_derivatives()
    def jacobian(self) -> Any:
        """Return the Jacobian in the form of x0."""
        _, J = self._differentiate(self.fun)
        values = self._evaluate(self.fun, self.at)
        shape = data_of(values).shape
        if isinstance(values, Labelled):
            return self._part(J, shape, values.dims, everywhere=True)
        return self._part(J, shape, [Space(n, "residual") for n in shape])

    def part_blocks(self, matrix: Tensor) -> Any:
        """Return a matrix as blocks by pairs of leaves, in the form of x0."""
        point = self.point
        if any(leaf.is_complex() for leaf in point.leaves):
            raise TypeError("minimize: second derivatives are given of real parameters; x0 has complex ones")
        bands = torch.split(matrix, [leaf.numel() for leaf in point.leaves])
        rows = zip(bands, point.leaves, point.dims, strict=True)
        return point.form([self._part(band, leaf.shape, dims) for band, leaf, dims in rows])

    def _part(self, matrix: Tensor, shape: Sequence[int], dims: Any, everywhere: bool = False) -> Any:
        """Return the rows of a matrix in the form of x0, after the axes of the rows themselves.

        Labelled if the rows and x0 are, or always with `everywhere`.
        """
        parts: list[Any] = []
        for leaf, own in zip(from_vector(matrix, self.point.leaves), self.point.dims, strict=True):
            if own is None and everywhere:
                own = tuple(Space(n) for n in leaf.shape[1:])
            part = leaf.reshape((*shape, *leaf.shape[1:]))
            parts.append(part if own is None or dims is None else Labelled(part, (*dims, *_prime(own, dims))))
        return self.point.form(parts)


def _prime(spaces: Sequence[Space], taken: Sequence[Space]) -> tuple[Space, ...]:
    """Return Spaces with a prime appended to names that another axis has."""
    names = {space.name for space in taken if space.name is not None}
    out = []
    for space in spaces:
        name = space.name
        while name is not None and name in names:
            name += "'"
        out.append(space if name == space.name else space.rename(name))
        names |= {name} if name is not None else set()
    return tuple(out)


def _avoid_zeros(sizes: Tensor) -> Tensor:
    """Return divisors, with 1 instead of 0."""
    return torch.where(sizes == 0, 1.0, sizes)
