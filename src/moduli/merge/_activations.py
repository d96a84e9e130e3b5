"""The activations of the units of two models on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import ModelAxes, ParameterAxes
from ..layout import copy_module
from ._matching import AxisTensor
from ._models import MergeError

ROWS = 10_000
"""The number of values of each unit that are stored per batch, evenly spaced."""

_CHANNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def run_batch(model: nn.Module, batch: Any, forward: Callable[[Any, Any], Any] | None) -> Any:
    """Run a model on a batch.

    Args:
        model: The model.
        batch: The batch.
        forward: Called with the model and the batch; None to call the model with the batch, or with its first item.
    """
    if forward is not None:
        return forward(model, batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def find_layers(net: nn.Module, axes: ModelAxes) -> dict[str, tuple[ParameterAxes, int]]:
    """Return the layers by name whose outputs are units, with the axes of the weight and the position of the units."""
    layers = {}
    for name, own in axes.parameters.items():
        owner, _, last = name.rpartition(".")
        if last != "weight" or len(own) < 2 or "out" not in own.uses:
            continue
        if type(net.get_submodule(owner)) in (nn.Linear, nn.Embedding, *_CHANNELS):
            layers[owner] = (own, own.uses.index("out"))
    return layers


def collect_activations(
    model: nn.Module,
    to: nn.Module,
    axes: ModelAxes,
    data: Iterable[Any],
    forward: Callable[[Any, Any], Any] | None = None,
) -> list[AxisTensor]:
    """Return the standardised activations of the units of two models on data, whose inner products are correlations.

    Args:
        model: The model whose units are permuted.
        to: The other.
        axes: Their axes.
        data: Batches.
        forward: Runs a model on a batch; None to call it with the batch, or with its first item.

    Returns:
        For each layer a tensor with one row for each value of its units.

    Raises:
        MergeError: If there is no batch.
    """
    layers = find_layers(model, axes)
    nets = [copy_module(each).eval() for each in (model, to)]
    activations: list[dict[str, list[Tensor]]] = [{name: [] for name in layers} for _ in nets]
    for net, store in zip(nets, activations, strict=True):
        for name in layers:
            net.get_submodule(name).register_forward_hook(_make_hook(store[name]))
    batches = 0
    with torch.no_grad():
        for batch in data:
            batches += 1
            for net in nets:
                run_batch(net, batch, forward)
    if batches == 0:
        raise MergeError("data holds no batch, so there is nothing to compare; an iterator may be used up")
    tensors = []
    for name, (axes_of_weight, at) in layers.items():
        # The weight of a grouped transposed convolution has the units of one group only.
        if not activations[0][name] or activations[0][name][0].shape[1] != axes_of_weight.shape[at]:
            continue
        one, two = (_standardise(torch.cat(store[name])) for store in activations)
        rows = f"values of {name}"
        own = ParameterAxes(
            rows,
            tuple(one.shape),
            ((rows,), axes_of_weight.dims[at]),
            ("kernel", "out"),
            "buffer",
            {**axes_of_weight.sizes, rows: len(one)},
        )
        tensors.append(AxisTensor(own, one, two))
    return tensors


def _make_hook(store: list[Tensor]) -> Callable[..., None]:
    def keep(layer: nn.Module, args: Any, output: Tensor) -> None:
        rows = output.movedim(1, -1) if isinstance(layer, _CHANNELS) else output
        rows = rows.reshape(-1, rows.shape[-1])
        store.append(rows[:: max(1, len(rows) // ROWS)][:ROWS].to("cpu", torch.float64))

    return keep


def _standardise(rows: Tensor) -> Tensor:
    """Return columns with mean 0 and sum of squares 1; constant ones are zero."""
    rows = rows - rows.mean(0)
    norms = torch.linalg.vector_norm(rows, dim=0)
    return rows / torch.where(norms > 1e-12 * norms.max(), norms, torch.inf)
