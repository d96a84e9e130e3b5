"""`repair`: give the units of a merged model the statistics of the units of its sources.

The average of two units that are not perfectly correlated has less variance than they have, so the activations of a merged
network shrink from layer to layer. Statistics of batch normalisation are measured again; without it, every layer's units are
shifted and scaled so that their means and deviations are the averages of the sources', by changing weights and biases.

Reference:
    Jordan, Sedghi, Saukh, Entezari, Neyshabur, "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", ICLR 2023,
    arXiv:2211.08403 (section 4).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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
        rows = last.reshape(-1, last.shape[-1]).double()
        self.count += len(rows)
        self.total = self.total + rows.sum(0)
        self.squares = self.squares + rows.square().sum(0)

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """The means and the standard deviations."""
        mean = self.total / self.count
        return mean, (self.squares / self.count - mean.square()).clamp(min=0).sqrt()


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
        MergeError: If there is no batch, or weights do not fit the sources.

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
    result = copy.deepcopy(model)
    if sources:
        goals = _average_moments([_measure(each, batches, forward) for each in sources], shares)
        _rescale(result, goals, batches, forward)
    return reestimate_batch_norm(result, batches, forward=forward)


def _measure(
    net: nn.Module, batches: Sequence[Any], forward: Callable[[Any, Any], Any] | None
) -> dict[str, ChannelStatistics]:
    """Return the statistics of every layer of a network, in the order in which they run."""
    run = copy.deepcopy(net).eval()
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
        moments = [each[name].moments for each in measured]
        mean, deviation = (sum(share * one[at] for share, one in zip(shares, moments, strict=True)) for at in (0, 1))
        goals[name] = (torch.as_tensor(mean), torch.as_tensor(deviation))
    return goals


def _rescale(
    net: nn.Module,
    goals: dict[str, tuple[Tensor, Tensor]],
    batches: Sequence[Any],
    forward: Callable[[Any, Any], Any] | None,
) -> None:
    """Scale and shift the outputs of layers to have these means and deviations, one layer after the other."""
    run = copy.deepcopy(net).eval()
    for name, (mean, deviation) in goals.items():
        measured = _measure_one(run, name, batches, forward)
        ratio = torch.where(measured[1] > 0, deviation / measured[1], 1.0)
        for owner in (run, net):
            layer: Any = owner.get_submodule(name)
            scale = ratio.to(layer.weight)
            layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.dim() - 1)))
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
