"""Choices that are measured on this machine at first use: the form of a product, and how many members are taken together.

The forms of a product differ by rounding only. A choice is made once for each kind of product and stored for the life of the
process, so that calls are reproducible within it. `torch.use_deterministic_algorithms(True)` turns measuring off: the choice is
then the same in every process on every machine, as it is on devices other than the CPU, inside of transforms, and for products
that are too small or too large for the form to matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moduli._torch import in_transform, run_outside

# Another form replaces the default only if it takes less than this share of its time, so that noise does not decide.
_CLEARLY = 0.9
# Multiplications of all members together. With fewer, the call takes longer than the products; with more, one member's product
# is large enough for a matrix library to run at its full rate in any form.
_LEAST, _MOST = 1 << 20, 1 << 27
_MEASURED_MEMBERS = 32
_TURNS = 6
# Without a measurement: bytes of activations of one block, about the second-level cache of one core.
_WORKING_SET = 1 << 20
# Bytes of activations of all members that fit into any cache, so that nothing has to be measured.
_SMALL = 1 << 17
# The overhead of one layer of stacked members, in calls of an activation function.
_CALLS = 20

ProductForm = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class ProductKind(NamedTuple):
    """A kind of product of the weights of many members with data.

    Attributes:
        shared: Whether all members have the same data.
        rows: The number of rows, rounded up to a power of two.
        out: The number of outputs of the layer.
        into: The number of its inputs.
        dtype: The dtype.
        trained: Whether gradients are recorded.
        threads: The number of torch's threads.
    """

    shared: bool
    rows: int
    out: int
    into: int
    dtype: torch.dtype
    trained: bool
    threads: int

    def __str__(self) -> str:
        data = "shared rows" if self.shared else "rows of each member"
        return f"{self.out} x {self.into} on {self.rows} {data}{', with gradients' if self.trained else ''}"


class ActivationCost(NamedTuple):
    """The time of activation functions on this machine.

    Attributes:
        seconds: Seconds per byte, by the size of the tensor in bytes.
        overhead: The seconds of the calls of one layer in Python and in torch, whatever the sizes.
    """

    seconds: dict[int, float]
    overhead: float


_choices: dict[ProductKind, tuple[str, dict[str, float]]] = {}
_costs: dict[int, ActivationCost] = {}
_block_sizes: dict[tuple[int, int, int, int], int] = {}


def choose_form(x: Tensor, w: Tensor, b: Tensor | None, forms: Mapping[str, ProductForm]) -> str:
    """Return the name of the form that is fastest for this kind of product.

    Args:
        x: The data: of shape (rows, in) if all members share them, otherwise (members, rows, in).
        w: The weights, of shape (members, out, in).
        b: The biases, of shape (members, out), or None.
        forms: The forms that it has, by name, all of them functions of these three.
    """
    count, out, into = w.shape
    work = x.shape[-2] * out * into
    if work * count < _LEAST or work > _MOST or torch.are_deterministic_algorithms_enabled() or not w.is_cpu:
        return choose_first(x.shape[-2], out)
    rows = 1 << max(0, x.shape[-2] - 1).bit_length()
    trained = torch.is_grad_enabled() and (w.requires_grad or x.requires_grad)
    kind = ProductKind(x.dim() == 2, rows, out, into, w.dtype, trained, torch.get_num_threads())
    choice = _choices.get(kind)
    if choice is None:
        if not may_measure():
            return choose_first(x.shape[-2], out)
        # The first of two threads that come here decides for both.
        choice = _choices.setdefault(kind, run_outside(_measure_forms, kind, b is not None, forms))
    return choice[0]


def choose_first(rows: int, out: int) -> str:
    """Return the form that is taken where nothing is measured: the one whose results are longer along the last axis in memory."""
    return "left" if rows >= out else "right"


def choose_block(size: int, layers: int, count: int) -> int:
    """Return how many members to take together so that the time per member is minimal.

    Each block costs the calls of its operations. Tensors that do not fit into a cache, or that the allocator returns to the
    system and requests again (page faults), cost more per byte. The size at which they do depends on the processor and on
    earlier allocations of the process.

    Args:
        size: The bytes of an activation of one member.
        layers: The number of layers.
        count: The number of members.
    """
    if size * count <= _SMALL or not may_measure():
        return min(count, max(1, _WORKING_SET // max(1, size)))
    threads = torch.get_num_threads()
    key = (size, layers, count, threads)
    if key not in _block_sizes:
        cost = _costs.get(threads) or _costs.setdefault(threads, run_outside(_measure_activations))
        _block_sizes[key] = _find_block(cost, size, layers, count)
    return _block_sizes[key]


def _find_block(cost: ActivationCost, size: int, layers: int, count: int) -> int:
    """Return the number of members that costs least, a power of two or all."""
    blocks = [block for block in (1 << power for power in range(count.bit_length())) if block < count] + [count]

    def estimate(block: int) -> float:
        whole = min((each for each in cost.seconds if each >= block * size), default=max(cost.seconds))
        # A layer writes two results: that of the product, and that of the activation function.
        return 2 * layers * size * cost.seconds[whole] + layers * cost.overhead / block

    return min(blocks, key=estimate)


def describe_choices(shapes: set[tuple[int, int]]) -> list[str]:
    """Return the timings of this process for layers of these shapes (out, in), as sentences."""
    lines = []
    for kind, (form, times) in list(_choices.items()):
        if (kind.out, kind.into) in shapes:
            timings = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in times.items())
            lines.append(f"{kind}: {form} (microseconds of {_MEASURED_MEMBERS} members: {timings})")
    return lines


def may_measure() -> bool:
    """Whether a choice may be measured here: not in deterministic mode, nor inside of a transform or a compiler."""
    return not (torch.are_deterministic_algorithms_enabled() or torch.compiler.is_compiling() or in_transform())


def _measure_forms(kind: ProductKind, biased: bool, forms: Mapping[str, ProductForm]) -> tuple[str, dict[str, float]]:
    """Return the form that takes the least time, and the seconds that each takes."""
    count, rows, out, into = _MEASURED_MEMBERS, kind.rows, kind.out, kind.into
    # As in a population, the weights are columns of a matrix.
    matrix = torch.ones(count, out * into + out, dtype=kind.dtype)
    w, b = matrix[:, : out * into].view(count, out, into), matrix[:, out * into :]
    # The data of each member have the memory order of results of the "left" form: rows along the last axis.
    x = torch.ones((rows, into) if kind.shared else (count, into, rows), dtype=kind.dtype)
    x = x if kind.shared else x.transpose(1, 2)
    inputs = [each.requires_grad_(kind.trained) for each in ((w, b) if kind.shared else (w, b, x))]

    def run(form: ProductForm) -> None:
        with torch.set_grad_enabled(kind.trained):
            outputs = form(x, w, b if biased else None)
        if kind.trained:
            torch.autograd.grad(outputs, inputs, outputs, allow_unused=True)

    times = dict.fromkeys(forms, torch.inf)
    for turn in range(_TURNS):
        for name, form in forms.items():
            taken = _time(lambda form=form: run(form))  # type: ignore[misc]
            times[name] = min(times[name], taken) if turn else torch.inf  # the first turn warms up
    best, first = min(times, key=lambda name: times[name]), choose_first(rows, out)
    return (best if times[best] < _CLEARLY * times[first] else first), times


def _measure_activations() -> ActivationCost:
    """Measure the time of an activation function by the size of its argument."""
    seconds: dict[int, float] = {}
    with torch.no_grad():
        for power in range(12, 25):
            x = torch.ones(1 << power - 2)

            def run(x: Tensor = x) -> None:
                for _ in range(2):
                    x = torch.relu(x)

            seconds[1 << power] = min([_time(run) for _ in range(_TURNS)][1:]) / 2 / (1 << power)
    call = seconds.pop(1 << 12) * (1 << 12)
    # The call itself is subtracted, because it is counted once for each block.
    return ActivationCost({size: max(taken - call / size, 0.0) for size, taken in seconds.items()}, _CALLS * call)


def _time(run: Callable[[], None]) -> float:
    """Return the seconds of a call: CPU time of this thread if torch has one thread, so that other processes do not count."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start
