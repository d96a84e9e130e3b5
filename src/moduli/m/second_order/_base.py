"""What second-order links have in common: how derivatives are asked for, and how much of the spectrum is kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...linalg import FunctionOperator
from ...optim import HESSIAN_METHODS, Chainable, Need, Objective, Transform
from .._flat import flat, size

HVP = ("autograd", "batched_autograd", "fd_forward", "fd_central")


class SecondOrderLink(Transform):
    """A link that asks for second derivatives, by autograd or by differences of gradients.

    Args:
        update_freq: Learn at every n-th step only.
        inner: Links between learning and the transformation.
        seed: Of a generator of its own; None for torch's.
        **settings: The settings, whose `hvp_method`, `hessian_method`, `eigv_tol` and `truncate` are checked.
    """

    needs = frozenset({Need.GRADIENT, Need.PRODUCTS})

    def __init__(
        self, *, update_freq: int = 1, inner: Chainable | None = None, seed: int | None = None, **settings: Any
    ) -> None:
        name = type(self).__name__
        for key, known in (("hvp_method", HVP), ("hessian_method", HESSIAN_METHODS)):
            if key in settings and settings[key] not in known:
                raise ValueError(f"{name}: {key} is {settings[key]!r}; it can be {', '.join(known)}")
        truncate, eigv_tol = settings.get("truncate"), settings.get("eigv_tol")
        if truncate is not None and truncate < 1:
            raise ValueError(f"{name}: truncate is {truncate}; keep at least one eigenvalue")
        if eigv_tol is not None and not 0 <= eigv_tol < 1:
            raise ValueError(f"{name}: eigv_tol is {eigv_tol}; it is a fraction of the largest eigenvalue")
        super().__init__(settings, update_freq=update_freq, inner=inner)
        self.seed = seed

    def all_needs(self) -> frozenset[Need]:
        """Second derivatives; evaluations elsewhere where they are made of differences."""
        needs, own = super().all_needs(), self.defaults
        if "fd" in own.get("hvp_method", own.get("hessian_method", "")):
            return (needs - {Need.PRODUCTS, Need.HESSIAN}) | {Need.CLOSURE}
        return needs


def hessian_operator(objective: Objective, setting: Any) -> FunctionOperator:
    """The Hessian of the loss as an operator, in the precision of the parameters' vector."""
    like = flat(objective.params)
    _, vector, _ = objective.tensor_Hvp_function(setting["hvp_method"], setting["h"])

    def product(z: Tensor) -> Tensor:
        out = vector(z)
        return out.to(like.dtype)

    return FunctionOperator(product, size(objective.params), dtype=like.dtype, device=like.device, symmetric=True)
