"""Populations that are never stored: members evaluated in a second, and the memory that it takes.

    python benchmarks/around.py

A network of ten million parameters (five layers of 1,400 units), noise of rank 1, one row of data for each member, two threads. The
reference makes each member (W + sigma A Bᵀ for every layer, in place of a copy) and calls it. Rates are by wall time and by CPU
time: on a machine in use only the second says much.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import moduli as mo

WIDTH, LAYERS, ROUNDS = 1400, 5, 5


def make_net() -> nn.Module:
    """Return the network."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def read_peak() -> float:
    """Return the peak memory of this process in bytes; Linux only."""
    text = Path("/proc/self/status").read_text()
    return 1024 * float(text.split("VmHWM:")[1].split()[0])


def reset_peak() -> None:
    """Reset the peak memory of this process to its current size."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Print rates, their ratio, and the peak of memory in models."""
    torch.set_num_threads(2)
    net = make_net()
    model = 4 * sum(each.numel() for each in net.parameters())
    for count in (256, 1024):
        pop = mo.Population.around(net, count, sigma=0.02, rank=1)
        x = torch.randn(count, 1, WIDTH)
        pop(x, in_dims=0)
        gc.collect()
        reset_peak()
        before = read_peak()
        pop(x, in_dims=0)
        peak = (read_peak() - before) / model
        # Both take turns, so that a slow moment of the machine affects both.
        turns = [(*measure_called(pop, x), *measure_made(net, x, 12)) for _ in range(ROUNDS)]
        wall, cpu, made_wall, made_cpu = (median(column) for column in zip(*turns, strict=True))
        ratios = made_wall * count / wall, made_cpu * count / cpu
        print(
            f"{count} members: {count / wall:.0f} a second ({count / cpu:.0f} by CPU time), made one by one {1 / made_wall:.1f} "
            f"({1 / made_cpu:.1f}): {ratios[0]:.0f} times as many ({ratios[1]:.0f} by CPU time); "
            f"peak {peak + 2:.2f} models with net and mean"
        )
        began = time.process_time()
        pop.update(torch.randn(count) / count)
        print(f"update: {time.process_time() - began:.2f} s of CPU time")


def measure_called(pop: mo.population.PopulationAround, x: torch.Tensor) -> tuple[float, float]:
    """Return wall and CPU seconds for a call of all members of the next generation."""
    began, cpu = time.perf_counter(), time.process_time()
    pop(x, in_dims=0)
    return time.perf_counter() - began, time.process_time() - cpu


@torch.no_grad()
def measure_made(net: nn.Module, x: torch.Tensor, count: int) -> tuple[float, float]:
    """Return wall and CPU seconds for making and calling a member.

    Args:
        net: The mean.
        x: The input.
        count: The number of members to average over.
    """
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    began, cpu = time.perf_counter(), time.process_time()
    for at in range(count):
        h = x[at]
        for layer in layers:
            a, b = torch.randn(WIDTH, 1), torch.randn(1, WIDTH)
            h = torch.tanh(h @ torch.addmm(layer.weight, a, b, alpha=0.02).T + layer.bias)
    return (time.perf_counter() - began) / count, (time.process_time() - cpu) / count


if __name__ == "__main__":
    main()
