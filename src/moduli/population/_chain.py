"""Evaluating a `Sequential` of linear layers and activations on one batch for all members, without gradients.

The general way (`_stacked`) runs the model's own `forward` on stacked tensors. Here the whole computation is known, so that
activations are applied in place to the block of members just computed, while it is in the cache, every layer writes into
one of two buffers that are used again for the next block, and the last one into the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from moduli import kernels
from moduli._torch import in_transform

__all__ = ["chain", "run"]

# From how many rows of a shared batch on one large product pays for laying the weights side by side.
ROWS = 32
# Below so many elements torch's own function is as good as a fused one.
_LEAST = 1 << 14
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class Layer(NamedTuple):
    """A linear layer, as the places of its weight and bias, and the activations after it."""

    weight: int
    bias: int | None
    activations: list[tuple[Callable[[Any, Tensor], Tensor], nn.Module]]


def _fused(fn: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """An activation that torch computes slowly, by a fused kernel where it pays."""
    kernel = kernels.fuse(fn, inplace="h")

    def act(_: Any, h: Tensor) -> Tensor:
        if h.numel() < _LEAST or not h.is_contiguous():
            return plain(h)
        kernel([h])
        return h

    return act


def _tanh(h: Tensor) -> Tensor:
    return torch.tanh(h)


def _sigmoid(h: Tensor) -> Tensor:
    return torch.sigmoid(h)


_ACTIVATIONS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Identity: lambda _, h: h,
    nn.ReLU: lambda _, h: h.relu_(),
    nn.Tanh: _fused(_tanh, torch.tanh_),
    nn.Sigmoid: _fused(_sigmoid, torch.sigmoid_),
    nn.SiLU: lambda _, h: F.silu(h, inplace=True),
    nn.GELU: lambda module, h: F.gelu(h, approximate=module.approximate),
    nn.LeakyReLU: lambda module, h: F.leaky_relu(h, module.negative_slope, inplace=True),
    nn.ELU: lambda module, h: F.elu(h, module.alpha, inplace=True),
}


def chain(template: nn.Module, entries: Sequence[Tensor]) -> list[Layer] | None:
    """The layers of a model that is nothing but a sequence of them, as it is now; None if it is anything else."""
    if any(getattr(_torch_module, hooks) for hooks in _GLOBAL_HOOKS):
        return None
    places = {id(tensor): place for place, tensor in enumerate(entries)}
    found: list[Layer] = []
    return found if _collect(template, places, found) and found else None


def _collect(module: nn.Module, places: dict[int, int], found: list[Layer]) -> bool:
    state = module.__dict__
    if "forward" in state or state.get("_compiled_call_impl") is not None or any(state[hooks] for hooks in _HOOKS):
        return False
    kind = getattr(type(module), "_adopted", type(module))
    if kind is nn.Sequential:
        return all(_collect(child, places, found) for child in module.children())
    if kind is nn.Linear:
        weight, bias = places.get(id(module.weight)), places.get(id(module.bias))
        if weight is None or (module.bias is not None and bias is None):
            return False
        found.append(Layer(weight, bias, []))
        return True
    if kind in _ACTIVATIONS and found:
        found[-1].activations.append((_ACTIVATIONS[kind], module))
        return True
    return False


def run(layers: list[Layer], parameters: Sequence[Tensor], x: Any, block: int) -> Tensor | None:
    """The outputs (N, B, out) of all members on a batch (B, in), or None if this is not a case for it.

    Args:
        layers: From `chain`.
        parameters: One tensor of shape (N, *shape) per parameter.
        x: The batch.
        block: How many members at a time.
    """
    if type(x) is not Tensor or x.dim() != 2 or x.shape[0] < ROWS or x.layout is not torch.strided:
        return None
    first = parameters[layers[0].weight]
    if x.dtype is not first.dtype or x.device != first.device or x.shape[1] != first.shape[2]:
        return None
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters)):
        return None
    if in_transform() or torch.is_autocast_enabled(x.device.type):
        return None
    widths = [parameters[layer.weight].shape[1] for layer in layers]
    if any(parameters[b.weight].shape[2] != width for b, width in zip(layers[1:], widths, strict=False)):
        return None
    with torch.no_grad():
        return _run(layers, [p.detach() for p in parameters], x.detach(), block, widths)


def _run(layers: list[Layer], parameters: list[Tensor], x: Tensor, block: int, widths: list[int]) -> Tensor:
    count, rows = parameters[0].shape[0], x.shape[0]
    block = min(block, count)
    made = x.new_empty(count, widths[-1], rows)
    widest = max(widths[:-1], default=0)
    buffers = [x.new_empty(block * widest * rows) for _ in range(min(2, len(layers) - 1))]
    for start in range(0, count, block):
        stop = min(count, start + block)
        h = x.t()
        for number, (layer, width) in enumerate(zip(layers, widths, strict=True)):
            w = parameters[layer.weight][start:stop]
            b = None if layer.bias is None else parameters[layer.bias][start:stop]
            last = number == len(layers) - 1
            size = (stop - start) * width * rows
            out = made[start:stop] if last else buffers[number % 2][:size].view(stop - start, width, rows)
            if number == 0:
                # One product for all members: their weights, laid one under the other, times the batch.
                long, flat = w.reshape(-1, w.shape[2]), out.view(-1, rows)
                torch.mm(long, h, out=flat) if b is None else torch.addmm(b.reshape(-1, 1), long, h, out=flat)
            elif b is None:
                torch.bmm(w, h, out=out)
            else:
                torch.baddbmm(b.unsqueeze(2), w, h, out=out)
            h = out
            for act, module in layer.activations:
                h = act(module, h)
            if last and h is not out:
                out.copy_(h)
    return made.transpose(1, 2)
