"""`check`: permute the free axes of a model and compare the outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import pytree
from ._model_axes import ModelAxes
from ._trace import trace


class ModelAxesError(ValueError):
    """An axis of a model is not what it was taken for: permuting its units changes the output."""


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

    The copies are in evaluation mode, and their parameters get a little noise, so that values from an initialisation (zeros,
    ones) do not hide a difference.

    Args:
        net: The model; it is not changed.
        *example: The arguments of a forward, with numbers.
        axes: The axes; by default those of `trace`.
        kwargs: Keyword arguments of the forward.
        output: A function of the result of the forward that returns what is compared.
        tolerance: The largest difference, relative to the largest output (at least 1).
        seed: Of the permutations and the noise.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        ModelAxesError: If the outputs differ, with the axes that make the difference.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> mo.axes.check(net, torch.randn(5, 4)) < 1e-5
        True
    """
    if axes is None:
        axes = trace(net, *example, kwargs=kwargs, output=output)
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(net).eval()
    tensors = _disturb(other, generator)
    units = {axis.name: torch.randperm(axis.size, generator=generator) for axis in axes.free}

    def run(stored: Mapping[str, Tensor]) -> list[Tensor]:
        # Layers write to their statistics; the tensors of the next call must not change.
        fresh = {name: tensor.clone() for name, tensor in stored.items()}
        with torch.no_grad():
            result = torch.func.functional_call(other, fresh, example, dict(kwargs or {}))
        result = result if output is None else output(result)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    expected = run(tensors)
    difference = _compare(expected, run(axes.take(tensors, units)))
    if difference <= tolerance:
        return difference
    alone = {name: _compare(expected, run(axes.take(tensors, {name: units[name]}))) for name in units}
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


def _compare(left: list[Tensor], right: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the largest entry of each tensor (at least 1)."""
    worst = 0.0
    for one, two in zip(left, right, strict=True):
        one, two = (
            each.double() if not each.is_complex() else torch.view_as_real(each).double() for each in (one, two)
        )
        if one.numel():
            difference = torch.where(one == two, 0.0, (one - two).abs()).max() / one.abs().nan_to_num().max().clamp(
                min=1
            )
            worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    return worst
