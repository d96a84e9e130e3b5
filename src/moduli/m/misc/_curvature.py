"""Measurements of curvature, printing inside a chain, and escapes from points where nothing moves.

* The update replaced by products with the Hessian, estimated or exact.
* Printing inside a chain.
* Random jumps away from points where nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...optim import DeclaredLink, Module, Need, Objective, sample_like
from ...optim import ranges as check
from .._measures import choose, measure_move, read


class HpuEstimate(Module):
    r"""$u \leftarrow \frac{u_t - u_{t-1}}{\|x_t - x_{t-1}\|}$, an estimate of the Hessian times the last direction.

    Where nothing moved, and at the first step, there is no estimate, and the update becomes zero.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> link, seen = m.HpuEstimate(), []
        >>> opt = mo.Optimizer([w], m.Sum([link, m.PrintUpdate(print_fn=seen.append), m.Zeros()], m.LR(0.1)))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (1.5 * w**2).sum()))
        >>> seen[0], seen[1][:12]
        ('update = [[0.0]]', 'update = [[-')
    """

    points = ("point",)
    shared_settings = True

    def update(self, objective: Objective) -> None:
        """Compare update and point with those of the last step."""
        params, updates = objective.params, objective.peek_updates()
        here = objective.present or [True] * len(params)
        previous = [i for i, param in enumerate(params) if here[i] and "update" in self.state[param]]
        moved = [params[i].detach() - self.state[params[i]]["point"] for i in previous]
        size = read(kernels.norm(moved)) if previous else 0.0
        size = choose(size > 0, size, float("inf"))
        for i, (param, u) in enumerate(zip(params, updates, strict=True)):
            if not here[i]:
                continue
            row: Any = self.state[param]
            row["estimate"] = (u - row["update"]) / size if i in previous else torch.zeros_like(u)
            row["update"], row["point"] = u.clone(), param.detach().clone()

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with the estimate as its update."""
        estimates: list[Tensor] = []
        for param in objective.params:
            estimate = self.state[param].get("estimate")
            estimates.append(torch.zeros_like(param) if estimate is None else estimate.clone())
        objective.updates = estimates
        return objective

    def reset_for_online(self) -> None:
        """Clear the last step."""
        super().reset_for_online()
        self.state.clear()


class RandomHvp(DeclaredLink):
    r"""$u \leftarrow Hz$, or $z \odot Hz$, for random z: with the latter an estimate of the Hessian's diagonal.

    Args:
        n_samples: How many z; their mean is emitted.
        distribution: "normal", "uniform", "rademacher" or "sphere".
        update_freq: The number of steps between draws; in between the last result is emitted.
        zHz: Whether to multiply by z.
        hvp_method: "autograd", "fd_forward" or "fd_central".
        h: The length of a difference step.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.RandomHvp(zHz=True, distribution="rademacher", seed=0))
        >>> _ = opt.step(mo.closure(lambda: (torch.tensor([1.0, 3.0]) * w**2).sum() / 2))
        >>> w.data
        tensor([ 0., -2.])

    References:
        C. Bekas, E. Kokiopoulou, Y. Saad, "An estimator for the diagonal of a matrix", Applied Numerical Mathematics 57
        (2007).
    """

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.PRODUCTS})

    ranges = {
        check.at_least_one: ("n_samples", "update_freq"),
        check.one_of("normal", "uniform", "rademacher", "sphere"): ("distribution",),
        check.one_of("autograd", "fd_forward", "fd_central"): ("hvp_method",),
        check.positive: ("h",),
    }
    attributes = ("n_samples", "distribution", "update_freq", "zHz", "hvp_method", "seed")

    n_samples: int = 1
    distribution: str = "normal"
    update_freq: int = 1
    zHz: bool = False
    hvp_method: str = "autograd"
    h: float = 1e-3
    seed: int | None = None

    def update(self, objective: Objective) -> None:
        """Draw vectors, and multiply them with the Hessian."""
        params = objective.params
        has_products = all("product" in self.state[param] for param in params)
        if self.increment_counter("steps", 0) % self.update_freq and has_products:
            return
        objective.get_loss(backward=True)
        total = [torch.zeros_like(param) for param in params]
        rgrad = None
        for _ in range(self.n_samples):
            z = sample_like(params, self.distribution, 1.0, self.get_generator(params[0].device, self.seed))
            products, rgrad = objective.hessian_vector_product(
                z, rgrad, hvp_method=self.hvp_method, h=self.settings[params[0]]["h"]
            )
            for sum_, v, Hv in zip(total, z, products, strict=True):
                sum_.add_((v.conj() * Hv if self.zHz else Hv) / self.n_samples)
        self.store(params, "product", total)

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with the products as its update."""
        objective.updates = [self.state[param]["product"].clone() for param in objective.params]
        return objective


class _Print(Module):
    needs = frozenset()
    members = True
    text = ""

    def __init__(self, text: str | None = None, *, print_fn: Callable[[str], Any] = print) -> None:
        super().__init__()
        self.text = type(self).text if text is None else text
        self.print_fn = print_fn

    def observe(self, objective: Objective) -> Any:
        """Return the value to print."""
        raise TypeError(f"{type(self).__name__} does not say what to print")

    def apply(self, objective: Objective) -> Objective:
        """Print, and return the objective unmodified."""
        self.print_fn(f"{self.text}{self.observe(objective)}")
        return objective


class PrintLoss(_Print):
    """Prints the loss.

    Args:
        text: Printed before it.
        print_fn: Prints.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> _ = mo.Optimizer([w], m.PrintLoss(), m.LR(0.1)).step(mo.closure(lambda: w.sum()))
        loss = 1.0
    """

    decides_on_host = True

    needs = frozenset({Need.LOSS})
    text = "loss = "

    def observe(self, objective: Objective) -> Any:
        return objective.get_loss(backward=False).tolist()


class PrintParams(_Print):
    """Prints the parameters.

    Args:
        text: Printed before them.
        print_fn: Prints.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> _ = optim.step_tensors(m.PrintParams(), [torch.ones(1)], [torch.zeros(1)])
        params = [[0.0]]
    """

    decides_on_host = True

    text = "params = "

    def observe(self, objective: Objective) -> Any:
        return [param.tolist() for param in objective.params]


class PrintShape(_Print):
    """Prints the shapes of the update.

    Args:
        text: Printed before them.
        print_fn: Prints.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> _ = optim.step_tensors(m.PrintShape(), [torch.ones(1, 2)])
        shapes = [(1, 2)]
    """

    needs = frozenset({Need.GRADIENT})
    text = "shapes = "

    def observe(self, objective: Objective) -> Any:
        return [tuple(tensor.shape) for tensor in objective.peek_updates()]


class PrintUpdate(_Print):
    """Prints the update.

    Args:
        text: Printed before it.
        print_fn: Prints.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> _ = optim.step_tensors(m.PrintUpdate(), [torch.ones(2)])
        update = [[1.0, 1.0]]
    """

    decides_on_host = True

    needs = frozenset({Need.GRADIENT})
    text = "update = "

    def observe(self, objective: Objective) -> Any:
        return [tensor.tolist() for tensor in objective.peek_updates()]


class EscapeAnnealing(DeclaredLink):
    """Tries random points on growing spheres if the parameters are stuck, and jumps to the first that is better.

    Args:
        max_region: The radius of the largest sphere, per component.
        max_iter: How many points to try.
        tol: The largest change of a parameter that counts as none.
        n_tol: How many steps without change are stuck.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> opt = mo.Optimizer([w], m.EscapeAnnealing(n_tol=1, seed=0), m.LR(0.1))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: (w**4 - w**2).sum()))
        >>> bool(w.abs() > 0)
        True
    """

    points = ("previous",)
    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.CLOSURE})

    ranges = {check.positive: ("max_region",), check.at_least_one: ("max_iter", "n_tol")}
    attributes = ("max_iter", "n_tol", "seed")

    max_region: float = 1.0
    max_iter: int = 1000
    tol: float = 1e-6
    n_tol: int = 10
    seed: int | None = None

    def apply(self, objective: Objective) -> Objective:
        """Check whether the parameters have moved; if not, search around them."""
        params = objective.params
        setting = self.settings[params[0]]
        moved = measure_move(self, params, torch.inf)
        stuck = 0 if moved is None or moved > setting["tol"] else self.global_state.get("stuck", 0) + 1
        self.global_state["stuck"] = stuck
        if stuck < self.n_tol:
            return objective
        self.global_state["stuck"] = 0
        here = objective.get_loss(backward=True)
        generator = self.get_generator(params[0].device, self.seed)
        displacement = None
        with objective.moved() as start, torch.no_grad():
            for i in range(1, self.max_iter + 1):
                noise = sample_like(params, "sphere", 1.0, generator)
                radius = setting["max_region"] * i / self.max_iter
                for param, a, z in zip(params, start, noise, strict=True):
                    param.copy_(a + radius * z)
                if bool(objective.get_loss(backward=False, at_x0=False) < here):
                    displacement = [a - param.detach() for a, param in zip(start, params, strict=True)]
                    break
        if displacement is not None:
            objective.updates = displacement
            objective.stop = True
        return objective
