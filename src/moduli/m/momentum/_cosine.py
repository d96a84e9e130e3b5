"""Scaling by how much an update agrees with the gradient, or with that of another chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from ...optim import Across, Chainable, Objective
from .._checks import non_negative
from .._flat import mask_absent
from .._lists import dot
from .._metrics import lengths, shape_like
from .._scalars import larger
from .._transforms import Settings, Tensors, UpdateTransform
from ..ops._operands import MultiOperation


def _find_cosine(first: Sequence[Tensor], second: Sequence[Tensor], eps: float, members: int | None) -> Any:
    """The cosine of two updates over all parameters; one for each member of a population."""
    if members is not None:
        return dot(first, second, members) / (lengths(first) * lengths(second)).clamp(min=eps)
    sizes = (dot(first, first) * dot(second, second)) ** 0.5
    return dot(first, second) / larger(sizes, eps)


class ScaleByGradCosineSimilarity(UpdateTransform):
    r"""Multiplies the update by its cosine with the gradient, over all parameters: $u \leftarrow u\,\cos(u, g)$.

    Args:
        eps: The smallest product of norms to divide by.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> u, g = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
        >>> optim.step_tensors(m.ScaleByGradCosineSimilarity(), [u], grads=[g])
        [tensor([1.8000, 2.4000])]
    """

    across = Across.SUMS
    differentiable = True
    elementwise = True
    ranges = {non_negative: ("eps",)}

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__(locals(), uses_grad=True)

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: Settings, members: int | None
    ) -> dict[str, Any] | None:
        return {"cosine": _find_cosine(tensors, cast(Tensors, grads), settings[0]["eps"], members)}

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * setting["cosine"]


class ScaleModulesByCosineSimilarity(MultiOperation):
    r"""Multiplies what one chain makes of the update by its cosine with what another makes of it: $u \leftarrow a\cos(a, b)$.

    Args:
        main: The links whose result is used, a.
        compare: The links it is compared with, b.
        eps: The smallest product of norms to divide by.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link = m.ScaleModulesByCosineSimilarity(m.Identity(), m.Sign())
        >>> optim.step_tensors(link, [torch.tensor([3.0, 0.0])])
        [tensor([3., 0.])]
    """

    def __init__(self, main: Chainable, compare: Chainable, *, eps: float = 1e-6) -> None:
        non_negative("ScaleModulesByCosineSimilarity", eps=eps)
        super().__init__({"eps": eps}, main=main, compare=compare)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        eps = self.settings[objective.params[0]]["eps"]
        first, second = (
            mask_absent(values["main"], objective.present),
            mask_absent(values["compare"], objective.present),
        )
        cosine = _find_cosine(first, second, eps, objective.members)
        return [a * (cosine if objective.members is None else shape_like(cosine, a)) for a in first]
