"""Newton's method with several points in each step, for a higher order of convergence."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ...optim import HESSIAN_METHODS, Module, Need, Objective
from ...optim import ranges as check
from .._vectors import flat, refuse_complex, unflat
from ._newton import shortest, solve, solve_live


class _Points:
    """Gradients and Hessians at points, as vectors and matrices."""

    def __init__(self, objective: Objective, method: str, lstsq: bool) -> None:
        self.objective = objective
        self.method = method
        self.how = shortest if lstsq else solve
        self.x = flat(objective.params).clone()

    def _is_at(self, point: Tensor) -> bool:
        if point is self.x:
            return True
        self.objective.move_to(unflat(point, self.objective.params))
        return False

    def gradient(self, point: Tensor) -> Tensor:
        """Return the gradient at a point."""
        return flat(self.objective.get_grads(at_x0=self._is_at(point))).to(self.x.dtype).clone()

    def hessian(self, point: Tensor) -> Tensor:
        """Return the Hessian at a point."""
        H = self.objective.hessian(self.method, 1e-3, at_x0=self._is_at(point))[2].to(self.x.dtype)
        return 0.5 * (H + H.mT)

    def solve(self, H: Tensor, b: Tensor) -> Tensor:
        """Return the solution d of H d = b; parameters without curvature keep b."""
        return solve_live(H, b, self.how)


class MultipointNewton(Module):
    """A step made of several Newton steps that share Hessians; override `end`.

    It looks at the loss alone: the update that comes in is not used. Evaluations at other points are within the step.

    Args:
        lstsq: Always take the shortest least-squares solution of systems.
        derivatives_method: How Hessians are computed (see `Objective.hessian`).

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.TwoPointNewton()).step(mo.closure(lambda: w.cosh().sum()))
        >>> round(w.item(), 5)
        0.00428
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.CLOSURE, Need.HESSIAN})

    def __init__(self, *, lstsq: bool = False, derivatives_method: str = "batched_autograd") -> None:
        check.one_of(*HESSIAN_METHODS)(type(self).__name__, "derivatives_method", derivatives_method)
        super().__init__()
        self.lstsq, self.derivatives_method = lstsq, derivatives_method

    @abstractmethod
    def end(self, at: _Points, x: Tensor) -> Tensor:
        """Return the end of the step from x.

        Args:
            at: Gives `gradient(point)`, `hessian(point)` and `solve(H, b)`.
            x: The parameters as one vector.
        """

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with the difference to the end as its update."""
        refuse_complex(type(self).__name__, objective.params)
        at = _Points(objective, self.derivatives_method, self.lstsq)
        objective.get_loss(backward=True)
        with objective.moved():
            end = self.end(at, at.x)
        difference = at.x - end
        if not bool(torch.isfinite(difference).all()):
            return objective
        parts = unflat(difference, objective.params)
        # Parameters without a gradient do not move; the solutions are zero for them.
        objective.updates = [part.clone() for part in parts]
        return objective


class TwoPointNewton(MultipointNewton):
    r"""Two Newton steps with one Hessian, of third order.

    $y = x - H_x^{-1} g_x,\quad x \leftarrow x - H_x^{-1}(g_x + g_y)$.

    Args:
        lstsq: Always take the shortest least-squares solution of systems.
        derivatives_method: How Hessians are computed (see `Objective.hessian`).

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.TwoPointNewton()).step(mo.closure(lambda: w.cosh().sum()))
        >>> round(w.item(), 5)
        0.00428

    References:
        F. A. Potra, V. Ptak, Nondiscrete Induction and Iterative Processes, Pitman (1984).
    """

    def end(self, at: _Points, x: Tensor) -> Tensor:
        H, g = at.hessian(x), at.gradient(x)
        y = x - at.solve(H, g)
        return x - at.solve(H, g + at.gradient(y))


class SixthOrder3P(MultipointNewton):
    r"""Three Newton steps with two Hessians, of sixth order.

    $y = x - H_x^{-1} g_x,\quad z = y - H_y^{-1} g_y,\quad x \leftarrow y - H_y^{-1}(g_y + g_z)$.

    Args:
        lstsq: Always take the shortest least-squares solution of systems.
        derivatives_method: How Hessians are computed (see `Objective.hessian`).

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.SixthOrder3P()).step(mo.closure(lambda: w.cosh().sum()))
        >>> abs(w.item()) < 1e-5
        True

    References:
        H. A. Abro, M. M. Shaikh, "A new time-efficient and convergent nonlinear solver", Applied Mathematics and
        Computation 355 (2019).
    """

    def end(self, at: _Points, x: Tensor) -> Tensor:
        y = x - at.solve(at.hessian(x), at.gradient(x))
        H, g = at.hessian(y), at.gradient(y)
        z = y - at.solve(H, g)
        return y - at.solve(H, g + at.gradient(z))


class SixthOrder3PM2(MultipointNewton):
    r"""Three steps with two Hessians, of which only the first is solved with.

    $y = x - H_x^{-1} g_x,\quad M = (2I - H_x^{-1}H_y)H_x^{-1},\quad z = y - M g_y,\quad x \leftarrow z - M g_z$.

    Args:
        lstsq: Always take the shortest least-squares solution of systems.
        derivatives_method: How Hessians are computed (see `Objective.hessian`).

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.SixthOrder3PM2()).step(mo.closure(lambda: w.cosh().sum()))
        >>> abs(w.item()) < 1e-3
        True

    References:
        X. Wang, Y. Li, "An efficient sixth-order Newton-type method for solving nonlinear systems", Algorithms 10 (2017).
    """

    def end(self, at: _Points, x: Tensor) -> Tensor:
        H = at.hessian(x)
        y = x - at.solve(H, at.gradient(x))
        other = at.hessian(y)

        def step(g: Tensor) -> Tensor:
            first = at.solve(H, g)
            return 2 * first - at.solve(H, other @ first)

        z = y - step(at.gradient(y))
        return z - step(at.gradient(z))


class SixthOrder5P(MultipointNewton):
    r"""Steps with means of Hessians along the way.

    With $y = x - H_x^{-1}g_x$ and $A(a, b) = H_a + 2H_{(a+b)/2} + H_b$,
    $z = y - 4A(x, y)^{-1} g_y,\quad x \leftarrow z - 4A(x, z)^{-1} g_z$.

    Args:
        lstsq: Always take the shortest least-squares solution of systems.
        derivatives_method: How Hessians are computed (see `Objective.hessian`).

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.SixthOrder5P()).step(mo.closure(lambda: w.cosh().sum()))
        >>> abs(w.item()) < 1e-4
        True

    References:
        I. K. Argyros et al., "Extended convergence of a sixth-order scheme for solving equations", Foundations 3 (2023).
    """

    def end(self, at: _Points, x: Tensor) -> Tensor:
        H = at.hessian(x)
        y = x - at.solve(H, at.gradient(x))

        def mean(point: Tensor) -> Tensor:
            return (H + 2 * at.hessian((x + point) / 2) + at.hessian(point)) / 4

        z = y - at.solve(mean(y), at.gradient(y))
        return z - at.solve(mean(z), at.gradient(z))
