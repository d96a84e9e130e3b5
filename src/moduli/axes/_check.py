"""`check`: permute the free axes of a model and compare the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import pytree
from ..layout import call_with_tensors, copy_module
from ._model_axes import ModelAxes
from ._trace import trace


class ModelAxesError(ValueError):
    """An axis of a model is not free: permuting its units changes the output."""


def check(
    net: nn.Module,
    *example: Any,
    axes: ModelAxes | None = None,
    kwargs: Mapping[str, Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    tolerance: float = 1e-5,
    seed: int = 0,
) -> float:
    """Permute every free axis of a copy of the model at random, and compare its output with the model's.

    The copy is in evaluation mode, and its parameters get a little noise, so that initial values (zeros,
    ones) do not hide a difference.

    Args:
        net: The model; it is not changed.
        *example: The arguments of a forward, with numbers.
        axes: The axes; by default those of `trace`.
        kwargs: Keyword arguments of the forward.
        output: A function from the result of the forward to the outputs that are compared.
        tolerance: The largest accepted difference, relative to the largest output (at least 1).
        seed: The seed of the permutations and the noise.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        ModelAxesError: If the outputs differ, with the axes that cause it.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> mo.axes.check(net, torch.randn(5, 4)) < 1e-5
        True
    """
    if axes is None:
        axes = trace(net, *example, kwargs=kwargs, output=output)
    generator = torch.Generator().manual_seed(seed)
    other = copy_module(net).eval()
    tensors = _disturb(other, generator)
    units = {axis.name: torch.randperm(axis.size, generator=generator) for axis in axes.free}

    def run(stored: Mapping[str, Tensor]) -> list[Tensor]:
        # Layers write to their running statistics, so every call gets copies.
        fresh = {name: tensor.clone() for name, tensor in stored.items()}
        with torch.no_grad():
            result = call_with_tensors(other, fresh, example, kwargs)
        result = result if output is None else output(result)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    expected = run(tensors)
    difference = measure_difference(expected, run(axes.take(tensors, units)))
    if difference <= tolerance:
        return difference
    alone = {name: measure_difference(expected, run(axes.take(tensors, {name: units[name]}))) for name in units}
    worst = sorted((name for name, each in alone.items() if each > tolerance), key=lambda name: -alone[name])
    where = "; ".join(f"{name!r} in {', '.join(place for place, _ in axes[name].places[:4])}" for name in worst[:3])
    raise ModelAxesError(
        f"axes.check: permuting free axes changes the output by {difference:.1e}, relative to its size: "
        f"{where or 'only all of them together'}"
    )


def _disturb(net: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    tensors = {}
    for name, param in net.named_parameters():
        noise = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        scale = 0.02 if param.dim() < 2 else 0.2 * float(param.detach().std()) if param.numel() > 1 else 0.0
        tensors[name] = param.detach() + scale * noise
    return {**tensors, **{name: buffer.clone() for name, buffer in net.named_buffers()}}


def measure_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest difference between two lists of tensors, relative to the largest entry of each tensor (at least 1).

    Lists or tensors of different sizes, and NaN in one of them only, give infinity.
    """
    if len(before) != len(after) or any(a.shape != b.shape for a, b in zip(before, after, strict=True)):
        return float("inf")
    return max(map(_measure, before, after), default=0.0)


def _measure(before: Tensor, after: Tensor) -> float:
    if not before.numel():
        return 0.0
    if before.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    before, after = before.double(), after.double()
    difference = torch.where(before == after, 0.0, (before - after).abs()).max()
    return float((difference / before.abs().nan_to_num().max().clamp(min=1)).nan_to_num(nan=float("inf")))
