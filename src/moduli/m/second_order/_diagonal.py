"""What methods that precondition by a sketch of the Hessian's diagonal have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...optim import Chainable, Need, Objective, Transform
from .._transforms import transform_buffers
from ._newton_cg import check_hvp, product_needs

_DISTRIBUTIONS = ("rademacher", "normal", "gaussian", "uniform", "sphere")


class HutchinsonBase(Transform):
    """Estimates the Hessian's diagonal, or products with random vectors, at every n-th step.

    Args:
        defaults: The settings, among them hvp_method, distribution, h, n_samples and zHz.
        every: Estimate at every n-th step.
        seed: Draws from a generator of its own; None for torch's.
        inner: Links between learning and the transformation.
        tfms: Links that transform copies of what is remembered before it is used, by argument.
    """

    shared_settings = ("n_samples", "zHz", "distribution", "hvp_method", "h")
    needs = frozenset({Need.GRADIENT, Need.PRODUCTS})

    def __init__(
        self,
        defaults: dict[str, Any],
        every: int,
        seed: int | None,
        inner: Chainable | None,
        tfms: Mapping[str, Chainable | None],
    ) -> None:
        name = type(self).__name__
        check_hvp(name, defaults["hvp_method"])
        if defaults["distribution"] not in _DISTRIBUTIONS:
            raise ValueError(
                f"{name}: distribution is {defaults['distribution']!r}; it can be {', '.join(_DISTRIBUTIONS)}"
            )
        if defaults["n_samples"] < 1 or every < 1:
            raise ValueError(f"{name}: n_samples and update_freq are at least 1")
        super().__init__(defaults, inner=inner)
        self.every = every
        self.seed = seed
        for key, links in tfms.items():
            self.set_child(key, links)

    def find_known(
        self, objective: Objective, states: list[dict[str, Any]], **buffers: str
    ) -> list[tuple[int, dict[str, Any]]]:
        """The parameters that something is known about, with their states as the `*_tfm` links make them.

        Args:
            objective: The objective.
            states: The states.
            **buffers: The state that each argument's links are for.
        """
        kept = [i for i, state in enumerate(states) if all(name in state for name in buffers.values())]
        rows = [dict(states[i]) for i in kept]
        params = [objective.params[i] for i in kept]
        for key, name in buffers.items():
            found = transform_buffers(self, key, [row[name] for row in rows], params, objective)
            for row, buffer in zip(rows, found, strict=True):
                row[name] = buffer
        return list(zip(kept, rows, strict=True))

    def all_needs(self) -> frozenset[Need]:
        """Products with the Hessian, or evaluations elsewhere."""
        return product_needs(super().all_needs(), self.defaults["hvp_method"])

    def estimate(self, objective: Objective, setting: Any) -> list[Tensor] | None:
        """The mean of z * Hz (or of Hz), or None where it is not the turn."""
        if self.increment_counter("estimates", 0) % self.every:
            return None
        generator = self.get_generator(objective.params[0].device, self.seed)
        return objective.hutchinson_hessian(
            n_samples=setting["n_samples"],
            distribution=setting["distribution"],
            hvp_method=setting["hvp_method"],
            h=setting["h"],
            generator=generator,
            zHz=setting["zHz"],
        )[0]
