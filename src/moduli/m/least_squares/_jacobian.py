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
    if not flat.requires_grad or m == 0:
        return torch.zeros(m, sum(p.numel() for p in params), dtype=flat.dtype, device=flat.device)
    if batched:
        eye = torch.eye(m, dtype=flat.dtype, device=flat.device)
        found = torch.autograd.grad(
            flat, params, grad_outputs=eye, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return torch.cat(
            [
                torch.zeros(m, p.numel(), dtype=flat.dtype, device=flat.device) if f is None else f.reshape(m, -1)
                for f, p in zip(found, params, strict=True)
            ],
            1,
        ).detach()
    rows = []
    with torch.enable_grad():
        elements = flat.unbind(0)
    for element in elements:
        found = torch.autograd.grad(element, params, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros_like(p).reshape(-1) if f is None else f.reshape(-1)
                    for f, p in zip(found, params, strict=True)
                ]
            )
        )
    return torch.stack(rows).detach()
