"""Lists of tensors as one vector, and random lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._torch import is_fake


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals that share its memory; other tensors unmodified."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def resolve_lazy(params: Iterable[Tensor]) -> None:
    """Replace lazily conjugated or negated views among parameters by materialised tensors with the same values.

    Writes through such a view would need a copy at every step, and torch's foreach functions reject them.
    """
    for param in params:
        if param.is_conj() or param.is_neg():
            param.data = param.detach().resolve_conj().resolve_neg()


def restore_complex(tensor: Tensor, param: Tensor) -> Tensor:
    """Undo `as_real` for a parameter that is complex."""
    if param.is_complex() and not tensor.is_complex():
        return torch.view_as_complex(tensor.contiguous())
    return tensor


def can_compare(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting for a device."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def fill_zeros(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients with zeros for parameters that have none."""
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]


def to_vector(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in order, as one vector of their common dtype."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def from_vector(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the vector split into tensors with the shapes and dtypes of `like`; views where possible."""
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def sample_like(
    params: Sequence[Tensor], distribution: str, variance: float = 1.0, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Return a random vector shaped like the parameters, each component with mean 0 and this variance.

    Args:
        params: The parameters.
        distribution: "normal" (or "gaussian"), "uniform", "rademacher", or "sphere" (uniform on a sphere whose radius
            gives the variance).
        variance: The variance of each component.
        generator: Draws the numbers.
    """
    scale = math.sqrt(variance)
    out: list[Tensor] = []
    for param in params:
        real = param.dtype.to_real() if param.is_complex() else param.dtype
        # Half types draw in float32, so that the same generator gives the same numbers rounded.
        work = torch.float32 if real in (torch.float16, torch.bfloat16) else real
        shape = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
        size = {"dtype": work, "device": param.device, "generator": generator}
        if distribution in ("normal", "gaussian", "sphere"):
            draw = torch.randn(shape, **size)  # type: ignore[call-overload]
        elif distribution == "uniform":
            draw = (torch.rand(shape, **size) * 2 - 1) * math.sqrt(3.0)  # type: ignore[call-overload]
        elif distribution == "rademacher":
            draw = torch.randint(0, 2, shape, device=param.device, generator=generator).to(work) * 2 - 1
        else:
            raise ValueError(f"distribution is {distribution!r}, not 'normal', 'uniform', 'rademacher' or 'sphere'")
        if param.is_complex():
            draw = torch.view_as_complex(draw.contiguous()) / math.sqrt(2.0)
        out.append(draw.to(param.dtype) * scale)
    if distribution == "sphere":
        length = math.sqrt(sum(float(tensor.abs().double().square().sum()) for tensor in out))
        stretch = scale * math.sqrt(sum(param.numel() for param in params)) / (length or 1.0)
        out = [tensor * stretch for tensor in out]
    return out
