"""Derivatives of a solution by the arguments of its function, by the implicit function theorem.

S. G. Krantz, H. R. Parks, The Implicit Function Theorem (2002); M. Blondel et al., "Efficient and modular implicit
differentiation", NeurIPS 2022.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..labels import Tensor as Labelled
from ..linalg import FunctionOperator, Outcome, cg, minres
from ._args import BoundFunction
from ._constraints import Constraint, read_constraints
from ._derivatives import allow_derivatives, differentiate_rows
from ._names import RESIDUALS
from ._point import StartPoint, data_of, from_vector, to_vector, value_of
from ._result import Result
from ._variables import read_bounds

DENSE = 200
"""The number of variables and multipliers up to which second derivatives are a matrix; beyond, products with vectors."""


def minimize_implicit(
    minimize: Callable[..., Result], fun: Callable[[Any], Any], x0: Any, constraints: Any, **options: Any
) -> Result:
    """Minimise, and return the result with an `x` that depends on the arguments of the functions.

    Args:
        minimize: Runs the method.
        fun: The function of the point, with its arguments bound.
        x0: The starting point.
        constraints: The constraints, with arguments of their own.
        **options: Those of `minimize`.
    """
    if isinstance(x0, torch.nn.Module):
        raise TypeError(
            "minimize: with implicit=True x0 is tensors: a module's parameters can not depend on other tensors. Give "
            "dict(module.named_parameters()), and call torch.func.functional_call(module, x, inputs) in the function"
        )
    if any(t.requires_grad for t in _list_tensors([options.get(key) for key in ("bounds", "lower", "upper")])):
        raise ValueError(
            "minimize: with implicit=True bounds are numbers: the solution has no derivative by them here. Write a bound "
            "that depends on a tensor as a constraint: {'type': 'ineq', 'fun': lambda x, low: x - low, 'args': (low,)}"
        )
    if isinstance(options.get("bounds"), Iterator):
        options["bounds"] = list(options["bounds"])
    task = _ImplicitTask(minimize, fun, x0, read_constraints(constraints), options)
    live = task.read_tensors()
    z, inverse, slope = _FindSolution.apply(task, *live) if live else task.solve([])  # type: ignore[no-untyped-call]
    plain = [bound.args for bound in task.bound]
    task.write_tensors(live)
    try:
        # Each Newton step with the inverse at the solution makes the derivatives of one more order correct.
        for _ in range(0 if torch.is_inference_mode_enabled() else 2):
            change = task.differentiate(z) - slope
            z = z - (task.apply_inverse(change) if inverse.numel() == 0 else (inverse @ change[..., None])[..., 0])
    finally:
        for bound, args in zip(task.bound, plain, strict=True):
            bound.args = args
    return task.describe(z)


class _ImplicitTask:
    """A minimisation that is repeated with other arguments, and the equations that hold at its solution.

    With multipliers λ the equations are that the gradient of the Lagrangian L(x, λ) vanishes, for the variables that are
    not at a bound and the constraints that are active. Their Jacobian is the symmetric matrix of second derivatives of L.
    """

    def __init__(
        self,
        minimize: Callable[..., Result],
        fun: Callable[[Any], Any],
        x0: Any,
        constraints: list[Constraint],
        options: dict[str, Any],
    ) -> None:
        self.minimize, self.fun, self.x0, self.constraints, self.options = minimize, fun, x0, constraints, options
        self.batched = bool(options.get("batched"))
        functions = [fun, *(one.fun for one in constraints)]
        self.bound = [function for function in functions if isinstance(function, BoundFunction)]
        self.results: list[Result] = []
        self.many = False
        self.apply_inverse: Callable[[Tensor], Tensor] = torch.zeros_like

    # ------------------------------------------------------------------ arguments

    def read_tensors(self) -> list[Tensor]:
        """Return all tensors in the arguments, and those of x0, which may be traced as well."""
        return _list_tensors([*(bound.args for bound in self.bound), self.x0])

    def write_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors in the arguments, in the same order."""
        rest = iter(tensors)
        for bound in self.bound:
            bound.args = _replace_tensors(bound.args, lambda _: next(rest))
        self.x0 = _replace_tensors(self.x0, lambda _: next(rest))

    # ------------------------------------------------------------------ the solution, with arguments that are numbers

    def solve(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Minimise, and return the point with multipliers, the inverse of the second derivatives, and the gradient there.

        The inverse is zero for variables at a bound and for constraints that are not active. It is empty if there
        are many variables, and `apply_inverse` solves with products instead.
        """
        self.write_tensors([tensor.detach() for tensor in tensors])
        with allow_derivatives():
            self.start = StartPoint(self.x0)
            bounds, lower, upper = (self.options.get(key) for key in ("bounds", "lower", "upper"))
            self.sides = read_bounds(self.start, bounds, lower, upper, self.batched)
            result = self.minimize(self.fun, self.x0, constraints=self.constraints, **self.options)
            self.results.append(result)
            if not self.batched:
                return self._linearise(result, self.sides)
            rows = [self._linearise(one, self._pick_sides(i)) for i, one in enumerate(result.starts)]
        z, inverse, slope = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return z, inverse, slope

    def _pick_sides(self, i: int) -> tuple[list[Any], list[Any]]:
        """Return the bounds of one of many starts."""
        low, high = ([None if bound is None else bound[i] for bound in side] for side in self.sides)
        return low, high

    def _linearise(self, result: Result, sides: tuple[list[Any], list[Any]]) -> tuple[Tensor, Tensor, Tensor]:
        problem = result._require_problem()
        self.problem, self.residuals = problem, result.method in RESIDUALS
        self.sizes = [part.numel() for part in result.multipliers]
        z = torch.cat([problem.at, *(part.detach().reshape(-1).to(problem.at) for part in result.multipliers)])
        free = self._find_free(z, result, sides)
        dense = len(z) <= DENSE or self.batched or self.many
        for _ in range(3):
            leaf = z.clone().requires_grad_()
            (slope,) = torch.autograd.grad(
                self._lagrangian(leaf), leaf, create_graph=True, allow_unused=True, materialize_grads=True
            )
            inverse = self._invert(slope, leaf, free) if dense else z.new_zeros(0)
            if not dense:
                self.apply_inverse = _make_solver(slope, leaf, free)
            if not result.success:
                break
            # Newton steps as long as they help: the point, and so its derivatives, are then accurate to rounding.
            change = slope.detach() * free
            step = inverse @ change if dense else self.apply_inverse(change)
            with torch.no_grad():
                closer = self.differentiate(z - step) * free
            if not float(closer.abs().max()) < 0.5 * float(change.abs().max()):
                break
            z = z - step
        return z, inverse, self.differentiate(z).detach()

    def _find_free(self, z: Tensor, result: Result, sides: tuple[list[Any], list[Any]]) -> Tensor:
        """Return 1 for unknowns that the equations determine: variables off their bounds, multipliers of active constraints."""
        n = len(z) - sum(self.sizes)
        slope = self.differentiate(z).detach()[:n]
        free = torch.ones_like(z)
        like = [leaf[0] if self.batched else leaf for leaf in self.start.leaves]
        for side, sign in zip(sides, (1, -1), strict=True):
            if all(bound is None for bound in side):
                continue
            wide = [
                torch.full_like(leaf, -sign * torch.inf) if b is None else b for b, leaf in zip(side, like, strict=True)
            ]
            distance = sign * (
                z[:n] - to_vector([bound.expand_as(leaf) for bound, leaf in zip(wide, like, strict=True)])
            )
            # At an active bound the distance vanishes and the gradient does not; at an inactive one the reverse.
            free[:n] *= (distance > 0) & (sign * slope <= distance)
        with torch.no_grad():
            values = self._evaluate_constraints(z[:n])
        parts = zip(self.constraints, values, result.multipliers, strict=True)
        active = [
            (lam.reshape(-1) > c.clamp(min=0)) if one.inequality else torch.ones_like(c, dtype=torch.bool)
            for one, c, lam in parts
        ]
        if active:
            free[n:] = torch.cat(active).to(free)
        return free

    def _invert(self, slope: Tensor, leaf: Tensor, free: Tensor) -> Tensor:
        """Return the inverse of the second derivatives over the free unknowns; raise ValueError if they are singular."""
        zeros = torch.zeros(len(leaf), len(leaf), dtype=leaf.dtype, device=leaf.device)
        rows = free.nonzero()[:, 0]
        if not len(rows):
            return zeros
        K = differentiate_rows(slope, leaf) if slope.requires_grad else zeros
        inner = K[rows][:, rows].to(
            torch.promote_types(K.dtype, torch.float32)
        )  # eigh is not defined in half precision
        values, vectors = torch.linalg.eigh(0.5 * (inner + inner.T))
        sizes = values.abs()
        if not float(sizes.min()) > torch.finfo(K.dtype).eps * len(rows) * float(sizes.max()):
            raise ValueError(
                "minimize: the second derivatives are singular at the solution, so that it has no derivative by args "
                "(implicit=True): not every variable is determined, or two active constraints say the same"
            )
        return zeros.index_put((rows[:, None], rows), ((vectors / values) @ vectors.T).to(K.dtype))

    # ------------------------------------------------------------------ functions of the point with its multipliers

    def _evaluate_constraints(self, x: Tensor) -> list[Tensor]:
        if not self.constraints:
            return []
        leaves = from_vector(x, self.start.leaves)
        return [self.start.call(one.values, leaves).to(x) for one in self.constraints]

    def _lagrangian(self, z: Tensor) -> Tensor:
        n = z.shape[-1] - sum(self.sizes)
        problem = self.problem
        data: Tensor = data_of(problem.point.call(problem.fun, from_vector(z[:n], problem.point.leaves)))
        one = data.numel() == 1 and not self.residuals
        total = data.reshape(()) if one else value_of(data.reshape(-1))
        values, multipliers = self._evaluate_constraints(z[:n]), torch.split(z[n:], self.sizes)
        for constraint, c, lam in zip(self.constraints, values, multipliers, strict=True):
            total = total - (lam * c).sum() if constraint.inequality else total + (lam * c).sum()
        return total

    def differentiate(self, z: Tensor) -> Tensor:
        """Return the gradient of the Lagrangian, with a graph to the arguments."""
        gradient = torch.func.grad(self._lagrangian)
        out: Tensor = torch.func.vmap(gradient)(z) if z.dim() == 2 else gradient(z)
        return out

    # ------------------------------------------------------------------ the result

    def describe(self, z: Tensor) -> Result:
        """Return the result of the run, or of all of them, with this point."""
        n = z.shape[-1] - sum(self.sizes)
        like = [leaf[0] for leaf in self.start.leaves] if self.batched else self.start.leaves
        x = self.start.form(from_vector(z[..., :n], like))
        last = self.results[-1]
        if not self.many:
            return dataclasses.replace(last, x=x)
        bad = [one for one in self.results if not one.success]
        return dataclasses.replace(
            last, x=x, value=torch.tensor([float(one.value) for one in self.results]), success=not bad,
            reason=(bad or [last])[0].reason, starts=tuple(self.results), problem=None,
            evaluations=sum(one.evaluations for one in self.results), steps=sum(one.steps for one in self.results),
        )  # fmt: skip


class _FindSolution(torch.autograd.Function):
    """The solution as constants: torch's transforms call it with the values of the tensors that they trace."""

    @staticmethod
    def forward(task: _ImplicitTask, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return task.solve(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs)
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, task: _ImplicitTask, *tensors: Tensor) -> Any:
        if task.batched:
            raise ValueError(
                "minimize: batched=True runs many starts already; call it outside of vmap, or without batched"
            )
        task.many = True
        rows = [
            _FindSolution.apply(  # type: ignore[no-untyped-call]
                task, *(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims[1:], strict=True))
            )
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True)), (0, 0, 0)


class _SymmetricSolve(torch.autograd.Function):
    """A linear map that is its own transpose, so that both derivatives are the map itself."""

    @staticmethod
    def forward(v: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        return solve(v)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.solve = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _SymmetricSolve.apply(grads[0], ctx.solve), None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _SymmetricSolve.apply(tangents[0], ctx.solve)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Any, v: Tensor, solve: Callable[[Tensor], Tensor]) -> Any:
        rows = [_SymmetricSolve.apply(row, solve) for row in v.movedim(in_dims[0], 0)]  # type: ignore[no-untyped-call]
        return torch.stack(rows), 0


def _make_solver(slope: Tensor, leaf: Tensor, free: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a linear map that solves with the second derivatives over the free unknowns, by products with vectors."""
    rows = free.nonzero()[:, 0]

    def multiply(v: Tensor) -> Tensor:
        whole = torch.zeros_like(leaf).index_copy(0, rows, v)
        (product,) = torch.autograd.grad(
            slope, leaf, whole, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return product.detach()[rows]

    operator = FunctionOperator(multiply, len(rows), dtype=leaf.dtype, device=leaf.device, symmetric=True)

    def solve(v: Tensor) -> Tensor:
        right = v.detach()[rows]
        tol = 10 * torch.finfo(v.dtype).eps
        solution = cg(operator, right, rtol=tol)
        if solution.outcome is Outcome.NEGATIVE_CURVATURE:
            # A saddle of the Lagrangian, as with constraints.
            solution = minres(operator, right, rtol=tol)
        residual = torch.linalg.vector_norm(multiply(solution.x) - right)
        if float(residual) > tol**0.5 * float(torch.linalg.vector_norm(right)):
            raise ValueError(
                "minimize: the second derivatives at the solution could not be solved with (implicit=True): "
                f"{solution.outcome}"
            )
        return torch.zeros_like(leaf.detach()).index_copy(0, rows, solution.x)

    return lambda v: _SymmetricSolve.apply(v, solve)  # type: ignore[no-untyped-call]


def _list_tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested dictionaries, lists and tuples."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _replace_tensors(value, note)
    return tensors


def _replace_tensors(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """Return nested dictionaries, lists and tuples with every tensor replaced."""
    if isinstance(value, Labelled):
        return Labelled(act(value.data), value.dims)
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        return type(value)({key: _replace_tensors(item, act) for key, item in value.items()})
    if isinstance(value, list | tuple):
        several = [_replace_tensors(item, act) for item in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    return value
