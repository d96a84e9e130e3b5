"""Sequences of linear layers and activation functions, evaluated for all members without gradients.

Only the next layer reads each intermediate result of such a model. So results are written alternately into two buffers that all
blocks of members reuse, activation functions act in place, and the last layer writes directly to the outputs. The number of
members of a block is measured with the model itself, at the first call with sizes like these.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._measured import choose_first, may_measure

# The in-place function of each activation layer.
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.ReLU: lambda layer, x: x.relu_(),
    nn.Tanh: lambda layer, x: x.tanh_(),
    nn.Sigmoid: lambda layer, x: x.sigmoid_(),
    nn.SiLU: lambda layer, x: F.silu(x, inplace=True),
    nn.ELU: lambda layer, x: F.elu(x, layer.alpha, inplace=True),
    nn.LeakyReLU: lambda layer, x: F.leaky_relu(x, layer.negative_slope, inplace=True),
    nn.Identity: lambda layer, x: x,
}
_BLOCKS = (16, 32, 64, 128, 256, 512)
_FIRST_BLOCK = 32
# With fewer multiplications of all members together nothing is measured, because calls take longer than products.
_LEAST = 1 << 22
# How often each choice is timed, how many of the best are compared again, and how often.
_TURNS, _BEST, _MORE_TURNS = 2, 4, 6
# The size of a block's activations, in numbers, if nothing is measured.
_WORKING_SET = 1 << 17
_blocks: dict[Any, tuple[int, str]] = {}


class LinearStep(NamedTuple):
    """A linear layer of a sequence, and the activation functions after it.

    Attributes:
        weight: The position of the weight among the tensors of a member.
        bias: That of the bias, or -1.
        out: The number of outputs.
        activations: The layers that follow, up to the next linear one.
    """

    weight: int
    bias: int
    out: int
    activations: list[nn.Module]


def find_steps(template: nn.Module, entries: Sequence[Tensor]) -> list[LinearStep] | None:
    """Return the layers of a model that is a sequence of linear layers and activation functions; None for other models.

    Args:
        template: The model; it has no hooks and no parameters but those of linear layers.
        entries: The parameters of a member, in the order of its layout.
    """
    places = {id(entry): place for place, entry in enumerate(entries)}
    steps: list[LinearStep] = []
    for layer in _list_layers(template):
        kind = getattr(type(layer), "_adopted", type(layer))
        if "forward" in vars(layer) or kind not in (*_ACTIVATIONS, nn.Linear):
            return None
        if kind is nn.Linear:
            own: Any = layer
            bias = -1 if own.bias is None else places[id(own.bias)]
            steps.append(LinearStep(places[id(own.weight)], bias, own.out_features, []))
        elif not steps:
            return None
        else:
            steps[-1].activations.append(layer)
    return steps or None


def _list_layers(module: nn.Module) -> list[nn.Module]:
    kind = getattr(type(module), "_adopted", type(module))
    if kind is not nn.Sequential or "forward" in vars(module):
        return [module]
    return [layer for child in module.children() for layer in _list_layers(child)]


def run_steps(steps: Sequence[LinearStep], tensors: Sequence[Tensor], x: Tensor, shared: bool) -> Tensor:
    """Return the outputs of all members, of shape (members, *rows, out).

    Args:
        steps: The layers, from `find_steps`.
        tensors: The parameters, each with the members in front.
        x: The data, with the members in front unless they are shared.
        shared: Whether all members have the same data.
    """
    count, into = len(tensors[0]), x.shape[-1]
    data = x.reshape(-1, into).expand(count, -1, -1) if shared else x.reshape(count, -1, into)
    outputs = _run_blocks(steps, tensors, data, *_choose_blocks(steps, tensors, data))
    return outputs.reshape(count, *(x.shape[:-1] if shared else x.shape[1:-1]), steps[-1].out)


def _run_blocks(steps: Sequence[LinearStep], tensors: Sequence[Tensor], data: Tensor, block: int, form: str) -> Tensor:
    """Return the outputs, of shape (members, rows, out).

    Args:
        steps: The layers.
        tensors: The parameters.
        data: The inputs, of shape (members, rows, in).
        block: The number of members of a block.
        form: "left" if results have the rows along the last axis in memory, "right" if the units.
    """
    left = form == "left"
    count, rows, _ = data.shape
    outputs = data.new_empty(count, *_order(steps[-1].out, rows, left))
    widest = max((step.out for step in steps[:-1]), default=0)
    memory = [data.new_empty(min(block, count) * widest * rows) for _ in range(min(2, len(steps) - 1))]
    for start in range(0, count, block):
        part = slice(start, start + block)
        x = data[part].transpose(1, 2) if left else data[part]
        size = len(x)
        for number, step in enumerate(steps):
            if number + 1 < len(steps):
                y = memory[number % 2][: size * step.out * rows].view(size, *_order(step.out, rows, left))
            else:
                y = outputs[part]
            w = tensors[step.weight][part]
            factors = (w, x) if left else (x, w.transpose(1, 2))
            if step.bias < 0:
                torch.bmm(*factors, out=y)
            else:
                torch.baddbmm(tensors[step.bias][part].unsqueeze(2 if left else 1), *factors, out=y)
            x = y
            for layer in step.activations:
                x = _ACTIVATIONS[getattr(type(layer), "_adopted", type(layer))](layer, x)
    return outputs.transpose(1, 2) if left else outputs


def _order(units: int, rows: int, left: bool) -> tuple[int, int]:
    return (units, rows) if left else (rows, units)


def _choose_blocks(steps: Sequence[LinearStep], tensors: Sequence[Tensor], data: Tensor) -> tuple[int, str]:
    """Return the size of blocks and the form, which are measured once per process for layers and data of these sizes."""
    count, rows, into = data.shape
    widths = (into, *(step.out for step in steps))
    work = rows * sum(a * b for a, b in itertools.pairwise(widths))
    if count <= _BLOCKS[0] or work * count < _LEAST or not data.is_cpu or not may_measure():
        return max(_FIRST_BLOCK, _WORKING_SET // (rows * max(widths))), choose_first(rows, max(widths))
    size = 1 << (rows - 1).bit_length()
    key = (widths, size, data.dtype, torch.get_num_threads(), min(count, _BLOCKS[-1]) >= _BLOCKS[-1])
    return _blocks.get(key) or _blocks.setdefault(key, _measure_blocks(steps, tensors, data))


def describe_blocks(steps: Sequence[LinearStep]) -> list[str]:
    """Return the measured sizes of blocks for layers of these sizes, as sentences."""
    outs = tuple(step.out for step in steps)
    return [
        f"{' - '.join(map(str, widths))} on up to {rows} rows: {block} members at a time, {form}; measured"
        for (widths, rows, *_), (block, form) in list(_blocks.items())
        if widths[1:] == outs
    ]


def _measure_blocks(steps: Sequence[LinearStep], tensors: Sequence[Tensor], data: Tensor) -> tuple[int, str]:
    """Return the size of blocks and the form with the least time per member."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def run(choice: tuple[int, str]) -> float:
        some = slice(0, max(2 * choice[0], 2 * _FIRST_BLOCK))
        own = [each[some] for each in tensors]
        start = clock()
        _run_blocks(steps, own, data[some], *choice)
        return (clock() - start) / len(data[some])

    choices = [(block, form) for block in _BLOCKS if block < 2 * len(data) for form in ("left", "right")]
    for choice in choices:  # warms up
        run(choice)
    times = {choice: min(run(choice) for _ in range(_TURNS)) for choice in choices}
    # The best differ by less than the noise of a busy machine, so they are timed alternately.
    best = sorted(times, key=lambda choice: times[choice])[:_BEST]
    for choice in best * _MORE_TURNS:
        times[choice] = min(times[choice], run(choice))
    return min(best, key=lambda choice: times[choice])
