"""The update in place of products with the Hessian, estimated or exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...optim import Module, Need, Objective, sample_like
from .._checks import check_at_least_one, choice, positive
from .._scalars import choose, read


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

    shared_settings = True

    def update(self, objective: Objective) -> None:
        """Compare with the last step."""
        params, updates = objective.params, objective.peek_updates()
        here = objective.present or [True] * len(params)
        known = [i for i, param in enumerate(params) if here[i] and "update" in self.state[param]]
        moved = [params[i].detach() - self.state[params[i]]["point"] for i in known]
        size = read(kernels.norm(moved)) if known else 0.0
        size = choose(size > 0, size, float("inf"))
        for i, (param, u) in enumerate(zip(params, updates, strict=True)):
            if not here[i]:
                continue
            row: Any = self.state[param]
            row["estimate"] = (u - row["update"]) / size if i in known else torch.zeros_like(u)
            row["update"], row["point"] = u.clone(), param.detach().clone()

    def apply(self, objective: Objective) -> Objective:
        """Emit the estimate."""
        found: list[Tensor] = []
        for param in objective.params:
            estimate = self.state[param].get("estimate")
            found.append(torch.zeros_like(param) if estimate is None else estimate.clone())
        objective.updates = found
        return objective

    def reset_for_online(self) -> None:
        """Forget the last step."""
        super().reset_for_online()
        self.state.clear()


class RandomHvp(Module):
    r"""$u \leftarrow Hz$, or $z \odot Hz$, for random z: with the latter an estimate of the Hessian's diagonal.

    Args:
        n_samples: How many z; their mean is emitted.
        distribution: "normal", "uniform", "rademacher" or "sphere".
        update_freq: Draw anew at every n-th step; in between the last result is emitted.
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

    def __init__(
        self,
        *,
        n_samples: int = 1,
        distribution: str = "normal",
        update_freq: int = 1,
        zHz: bool = False,
        hvp_method: str = "autograd",
        h: float = 1e-3,
        seed: int | None = None,
    ) -> None:
        check_at_least_one("RandomHvp", n_samples=n_samples, update_freq=update_freq)
        choice("RandomHvp", "distribution", distribution, ("normal", "uniform", "rademacher", "sphere"))
        choice("RandomHvp", "hvp_method", hvp_method, ("autograd", "fd_forward", "fd_central"))
        positive("RandomHvp", h=h)
        super().__init__({"h": h})
        self.n_samples, self.distribution, self.update_freq = n_samples, distribution, update_freq
        self.zHz, self.hvp_method, self.seed = zHz, hvp_method, seed

    def update(self, objective: Objective) -> None:
        """Draw, and multiply with the Hessian."""
        params = objective.params
        known = all("product" in self.state[param] for param in params)
        if self.increment_counter("steps", 0) % self.update_freq and known:
            return
        objective.get_loss(backward=True)
        total = [torch.zeros_like(param) for param in params]
        rgrad = None
        for _ in range(self.n_samples):
            z = sample_like(params, self.distribution, 1.0, self.get_generator(params[0].device, self.seed))
            found, rgrad = objective.hessian_vector_product(
                z, rgrad, hvp_method=self.hvp_method, h=self.settings[params[0]]["h"]
            )
            for sum_, v, Hv in zip(total, z, found, strict=True):
                sum_.add_((v.conj() * Hv if self.zHz else Hv) / self.n_samples)
        self.store(params, "product", total)

    def apply(self, objective: Objective) -> Objective:
        """Emit the products."""
        objective.updates = [self.state[param]["product"].clone() for param in objective.params]
        return objective
