"""What the units of two models compute on the same data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import ModelAxes, ParameterAxes
from ._matching import AxisTensor
from ._models import MergeError

ROWS = 10_000
"""So many values of each unit are kept, taken evenly from what a batch gives."""

_CHANNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def run_batch(model: nn.Module, batch: Any, forward: Callable[[Any, Any], Any] | None) -> Any:
    """Run a model on a batch: by a function, or on the batch or its first item."""
    if forward is not None:
        return forward(model, batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def find_layers(net: nn.Module, axes: ModelAxes) -> dict[str, tuple[ParameterAxes, int]]:
    """Return the layers by name whose outputs are units: the axes of the weight, and which of them the units are."""
    layers = {}
    for name, shown in axes.parameters.items():
        owner, _, last = name.rpartition(".")
        if last != "weight" or len(shown) < 2 or "out" not in shown.uses:
            continue
        if type(net.get_submodule(owner)) in (nn.Linear, nn.Embedding, *_CHANNELS):
            layers[owner] = (shown, shown.uses.index("out"))
    return layers


def collect_activations(
    model: nn.Module,
    to: nn.Module,
    axes: ModelAxes,
    data: Iterable[Any],
    forward: Callable[[Any, Any], Any] | None = None,
) -> list[AxisTensor]:
    """Return what the units of two models compute on data, so that inner products are correlations.

    Args:
        model: The model whose units are permuted.
        to: The other.
        axes: Their axes.
        data: Batches.
        forward: How to run a model on a batch.

    Returns:
        For each layer a tensor with one row for each value of its units.

    Raises:
        MergeError: If there is no batch, or no layer that puts out units.
    """
    layers = find_layers(model, axes)
    nets = [copy.deepcopy(each).eval() for each in (model, to)]
    kept: list[dict[str, list[Tensor]]] = [{name: [] for name in layers} for _ in nets]
    for net, store in zip(nets, kept, strict=True):
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
    for name, (shown, at) in layers.items():
        # Of grouped transposed convolutions a weight has the units of one group only.
        if not kept[0][name] or kept[0][name][0].shape[1] != shown.shape[at]:
            continue
        one, two = (_standardise(torch.cat(store[name])) for store in kept)
        rows = f"values of {name}"
        own = ParameterAxes(
            rows,
            tuple(one.shape),
            ((rows,), shown.dims[at]),
            ("kernel", "out"),
            "buffer",
            {**shown.sizes, rows: len(one)},
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
