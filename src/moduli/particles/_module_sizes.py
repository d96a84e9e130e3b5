"""The size attributes of torch's modules, such as `in_features`, computed from tensors that were resized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..axes import ModelAxes
from ._unit_plan import AxisResize, scale_leading


def list_sizes(module: nn.Module, path: str, axes: ModelAxes, resizes: Mapping[str, AxisResize]) -> dict[str, Any]:
    """Return the size attributes of a module that differ from its tensors, which are resized already, with their new values.

    Args:
        module: The module.
        path: Its path in the model.
        axes: The axes of the model before the resize.
        resizes: The axes that were resized, by name.
    """

    def count_groups(name: str, axis: int, count: int) -> int:
        own = axes.of(f"{path}.{name}" if path else name)
        return scale_leading(own.dims[axis], own.sizes, {each.name: each.after for each in resizes.values()}, count)

    for kinds, describe in _SIZES:
        if isinstance(module, kinds):
            sizes: dict[str, Any] = describe(module, count_groups)
            return {name: value for name, value in sizes.items() if module.__dict__.get(name) != value}
    return {}


CountGroups = Callable[[str, int, int], int]


def _linear(module: Any, _: CountGroups) -> dict[str, Any]:
    shape = module.weight.shape
    return {"out_features": shape[0], "in_features": shape[1]}


def _bilinear(module: Any, _: CountGroups) -> dict[str, Any]:
    shape = module.weight.shape
    return {"out_features": shape[0], "in1_features": shape[1], "in2_features": shape[2]}


def _embedding(module: Any, _: CountGroups) -> dict[str, Any]:
    return {"num_embeddings": module.weight.shape[0], "embedding_dim": module.weight.shape[1]}


def _convolution(module: Any, count_groups: CountGroups) -> dict[str, Any]:
    first, second = module.weight.shape[:2]
    groups = count_groups("weight", 0, module.groups) if "weight" in module._parameters else module.groups
    out, inner = (second * groups, first) if module.transposed else (first, second * groups)
    return {"out_channels": out, "in_channels": inner, "groups": groups}


def _channel_norm(module: Any, _: CountGroups) -> dict[str, Any]:
    tensors = [each for each in (module.weight, module.running_mean) if each is not None]
    return {"num_features": tensors[0].shape[0]} if tensors else {}


def _group_norm(module: Any, count_groups: CountGroups) -> dict[str, Any]:
    if module.weight is None:
        return {}
    return {"num_channels": module.weight.shape[0], "num_groups": count_groups("weight", 0, module.num_groups)}


def _layer_norm(module: Any, _: CountGroups) -> dict[str, Any]:
    return {} if module.weight is None else {"normalized_shape": tuple(module.weight.shape)}


def _attention(module: Any, count_groups: CountGroups) -> dict[str, Any]:
    width = module.out_proj.weight.shape[0]
    heads = count_groups("out_proj.weight", 1, module.num_heads)
    sizes = {"embed_dim": width, "num_heads": heads, "head_dim": module.out_proj.weight.shape[1] // heads}
    same = module.in_proj_weight is not None
    keys, values = (width, width) if same else (module.k_proj_weight.shape[1], module.v_proj_weight.shape[1])
    return {**sizes, "kdim": keys, "vdim": values}


def _recurrent(module: Any, _: CountGroups) -> dict[str, Any]:
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    return {"hidden_size": module.weight_hh_l0.shape[0] // gates, "input_size": module.weight_ih_l0.shape[1]}


CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CHANNEL_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_SIZES: list[tuple[tuple[type, ...], Callable[[Any, CountGroups], dict[str, Any]]]] = [
    ((nn.Linear,), _linear),
    ((nn.Bilinear,), _bilinear),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    (CONVOLUTIONS, _convolution),
    (_CHANNEL_NORMS, _channel_norm),
    ((nn.GroupNorm,), _group_norm),
    ((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    ((nn.MultiheadAttention,), _attention),
    ((nn.RNNBase,), _recurrent),
    ((nn.PReLU,), lambda module, _: {"num_parameters": module.weight.shape[0]}),
]
NORMALISATIONS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""Layers that take statistics over units."""
