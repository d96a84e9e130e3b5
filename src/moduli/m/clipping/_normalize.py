"""A given norm for the update."""

from __future__ import annotations

from typing import Any

from .._metrics import Axes
from ._clip_norm import NormLink


class Normalize(NormLink):
    r"""Scales the update to a given norm, $u \leftarrow c\,u / \|u\|$; an update of zero stays.

    Args:
        norm_value: The norm c.
        ord: The norm: p, or "mad" (mean absolute value), "std", "var", "sum", "l0" to "l4", "linf".
        dim: "global" for one norm over all parameters, None for one per tensor, axes for one per slice along them. A
            tensor that has none of the axes is left as it is.
        inverse_dims: The axes are those to keep.
        min_size: Fewer elements are left as they are.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Normalize(), [torch.tensor([3.0]), torch.tensor([4.0])])
        [tensor([0.6000]), tensor([0.8000])]
        >>> optim.step_tensors(m.Normalize(2.0, dim=None), [torch.tensor([3.0]), torch.tensor([4.0])])
        [tensor([2.]), tensor([2.])]
    """

    members = "batched"

    def __init__(
        self,
        norm_value: Any = 1.0,
        *,
        ord: Any = 2,
        dim: Axes | str = "global",
        inverse_dims: bool = False,
        min_size: int = 1,
    ) -> None:
        super().__init__("norm_value", norm_value, ord, dim, inverse_dims, min_size)

    def factor(self, norm: Any, setting: Any) -> Any:
        """1 where there is nothing to scale."""
        nothing = (norm == 0) * 1.0
        return setting["norm_value"] / (norm + nothing) * (1 - nothing) + nothing
