"""`repair`: give the units of a merged model the statistics of the units of its sources.

The average of two units that are not perfectly correlated has less variance than they have, so the activations of a merged
network shrink from layer to layer. Statistics of batch normalisation are measured again; without it, every layer's units are
shifted and scaled so that their means and deviations are the averages of the sources', by changing weights and biases.

Reference:
    Jordan, Sedghi, Saukh, Entezari, Neyshabur, "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", ICLR 2023,
    arXiv:2211.08403 (section 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from .._texts import shorten
from ..layout import copy_module, recompute_weights
from ._activations import run_batch
from ._data import reestimate_batch_norm
from ._models import MergeError

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ChannelStatistics:
    """Means and variances of the channels of a layer, over all batches.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.convolution = not isinstance(layer, nn.Linear)
        self.count = 0
        self.total: Any = 0.0
        self.squares: Any = 0.0

    def add(self, output: Tensor) -> None:
        """Add the outputs of a batch."""
        last = output.movedim(1, -1) if self.convolution else output
        rows = last.reshape(-1, last.shape[-1])
        rows = rows.to(torch.promote_types(rows.dtype, torch.float64))
        self.count += len(rows)
        self.total = self.total + rows.sum(0)
        self.squares = self.squares + rows.abs().square().sum(0)

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """The means and the standard deviations."""
        mean = self.total / self.count
        return mean, (self.squares / self.count - mean.abs().square()).clamp(min=0).sqrt()


@torch.no_grad()
def repair(
    model: ModuleT,
    data: Iterable[Any],
    sources: Sequence[nn.Module] = (),
    weights: Sequence[float] | None = None,
    *,
    forward: Callable[[Any, Any], Any] | None = None,
) -> ModuleT:
    """Give the units of a merged model the average means and deviations of the units of its sources.

    Statistics of batch normalisation are measured again on the data (`reestimate_batch_norm`). With `sources`, the outputs of
    linear layers and convolutions that have a bias, except for the last, are scaled and shifted as well, layer after layer.

    Args:
        model: The merged module, which is not changed.
        data: Batches: tensors, or tuples and lists whose first item is the input. All of them are stored.
        sources: The aligned models that were merged.
        weights: The share of each source; equal by default.
        forward: `forward(model, batch)` runs a model on a batch.

    Returns:
        A repaired copy.

    Raises:
        MergeError: If there is no batch, or weights or layers do not fit the sources; or if a layer can't be scaled, because its
            weight is tied or is computed from others (a weight norm that is a parametrization, and pruning, can).

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)) for _ in range(2))
        >>> x = torch.randn(100, 4)
        >>> middle = merge.repair(merge.lerp(a, b, 0.5), [x], [a, b])
        >>> torch.allclose(middle[0](x).std(0), (a[0](x).std(0) + b[0](x).std(0)) / 2, rtol=1e-4)
        True

    Reference:
        Jordan et al., "REPAIR", ICLR 2023, arXiv:2211.08403.
    """
    batches = list(data)
    if not batches:
        raise MergeError("data holds no batch, so there is nothing to measure; an iterator may be used up")
    shares = [1 / len(sources) for _ in sources] if weights is None else list(weights)
    if len(shares) != len(sources):
        raise MergeError(f"there are {len(shares)} weights for {len(sources)} sources; give one for each")
    result = copy_module(model)
    if sources:
        goals = _average_moments([_measure(each, batches, forward) for each in sources], shares)
        _check_layers(result, goals)
        _rescale(result, goals, batches, forward)
        recompute_weights(result)
    return reestimate_batch_norm(result, batches, forward=forward)


def _measure(
    net: nn.Module, batches: Sequence[Any], forward: Callable[[Any, Any], Any] | None
) -> dict[str, ChannelStatistics]:
    """Return the statistics of every layer of a network, in the order in which they run."""
    run = copy_module(net).eval()
    measured: dict[str, ChannelStatistics] = {}

    def watch(name: str) -> Callable[..., None]:
        def add(layer: nn.Module, args: Any, output: Tensor) -> None:
            measured.setdefault(name, ChannelStatistics(layer)).add(output)

        return add

    for name, layer in run.named_modules():
        if isinstance(layer, _LAYERS) and layer.bias is not None:
            layer.register_forward_hook(watch(name))
    for batch in batches:
        run_batch(run, batch, forward)
    return measured


def _average_moments(
    measured: Sequence[dict[str, ChannelStatistics]], shares: Sequence[float]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the means and deviations of every layer except the last, averaged over networks."""
    goals = {}
    for name in list(measured[0])[:-1]:
        sizes = [len(one[name].moments[0]) if name in one else None for one in measured]
        if len(set(sizes)) > 1:
            raise MergeError(
                f"the layer {shorten(name)} has {sizes} outputs in the sources; repair with models of one structure"
            )
        moments = [each[name].moments for each in measured]
        mean, deviation = (sum(share * one[at] for share, one in zip(shares, moments, strict=True)) for at in (0, 1))
        goals[name] = (torch.as_tensor(mean), torch.as_tensor(deviation))
    return goals


def _check_layers(net: nn.Module, goals: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Raise MergeError unless the model has all layers, and each of them can be scaled without changing another one."""
    names: dict[int, list[str]] = {}
    for name, param in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    layers = dict(net.named_modules())
    for path, (mean, _) in goals.items():
        layer = layers.get(path)
        rows = None if layer is None or getattr(layer, "bias", None) is None else len(layer.bias)
        if layer is None or rows != len(mean):
            raise MergeError(
                f"the layer {shorten(path)} has {len(mean)} outputs in the sources, and {rows} in the model; repair with models "
                "of one structure"
            )
        for param in layer.parameters():
            if len(names[id(param)]) > 1:
                raise MergeError(
                    f"{shorten(names[id(param)][0])} is also {shorten(names[id(param)][1])}: scaling one would change the other. "
                    "Repair only the batch normalisation, without sources"
                )


def _scale_outputs(path: str, layer: Any, scale: Tensor) -> None:
    """Multiply the outputs of a layer by a number each, but for the bias.

    Raises:
        MergeError: If the weight is computed from others that can't be set so.
    """
    stored = layer._parameters.get("weight", layer._parameters.get("weight_orig"))
    if stored is not None and not any(isinstance(each, SpectralNorm) for each in layer._forward_pre_hooks.values()):
        stored.mul_(scale.view(-1, *[1] * (stored.dim() - 1)))  # the mask of pruning acts on each entry
        return
    expected = layer.weight * scale.view(-1, *[1] * (layer.weight.dim() - 1))
    if is_parametrized(layer, "weight"):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            layer.weight = expected
    if not torch.allclose(layer.weight, expected, rtol=1e-3, atol=1e-6):
        raise MergeError(
            f"the weight of {shorten(path)} is computed from others, which can't be scaled; make it a parameter first "
            "(torch.nn.utils.remove_weight_norm, torch.nn.utils.parametrize.remove_parametrizations)"
        )


def _rescale(
    net: nn.Module,
    goals: dict[str, tuple[Tensor, Tensor]],
    batches: Sequence[Any],
    forward: Callable[[Any, Any], Any] | None,
) -> None:
    """Scale and shift the outputs of layers to have these means and deviations, one layer after the other."""
    run = copy_module(net).eval()
    for name, (mean, deviation) in goals.items():
        measured = _measure_one(run, name, batches, forward)
        ratio = torch.where(measured[1] > 0, deviation / measured[1], 1.0)
        for owner in (run, net):
            layer: Any = owner.get_submodule(name)
            scale = ratio.to(layer.bias)
            _scale_outputs(name, layer, scale)
            layer.bias.copy_((layer.bias - measured[0].to(layer.bias)) * scale + mean.to(layer.bias))


def _measure_one(
    run: nn.Module, name: str, batches: Sequence[Any], forward: Callable[[Any, Any], Any] | None
) -> tuple[Tensor, Tensor]:
    statistics = ChannelStatistics(run.get_submodule(name))
    handle = run.get_submodule(name).register_forward_hook(lambda layer, args, output: statistics.add(output))
    for batch in batches:
        run_batch(run, batch, forward)
    handle.remove()
    return statistics.moments
