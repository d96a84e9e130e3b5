"""The Jacobian of a vector by all parameters concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def jacobian(vector: Tensor, params: Sequence[Tensor], batched: bool) -> Tensor:
    """The matrix of derivatives, one row per component; zero columns for parameters it does not depend on.

    Args:
        vector: The components, with their graph.
        params: The parameters.
        batched: All rows in one vectorised pass, or one after another.
    """
    with torch.enable_grad():
        flat = vector.reshape(-1)
    m = flat.numel()

    def join(found: Sequence[Tensor | None], rows: int) -> Tensor:
        parts = [
            flat.new_zeros(rows, param.numel()) if f is None else f.reshape(rows, param.numel())
            for f, param in zip(found, params, strict=True)
        ]
        return torch.cat(parts, 1).detach()

    if not flat.requires_grad or m == 0:
        return join([None] * len(params), m)
    if batched:
        eye = torch.eye(m, dtype=flat.dtype, device=flat.device)
        found = torch.autograd.grad(flat, params, eye, retain_graph=True, allow_unused=True, is_grads_batched=True)
        return join(found, m)
    with torch.enable_grad():
        elements = flat.unbind(0)
    rows = [torch.autograd.grad(element, params, retain_graph=True, allow_unused=True) for element in elements]
    return torch.cat([join(row, 1) for row in rows])
