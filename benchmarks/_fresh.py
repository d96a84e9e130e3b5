"""Time steps as in training: gradients are new tensors at every step, and making them is not counted."""

import time
from collections.abc import Callable, Sequence

import torch


def time_steps(
    candidates: dict[str, tuple[Sequence[torch.nn.Parameter], Callable[[], object]]], steps: int, rounds: int = 9
) -> dict[str, float]:
    """Return the CPU seconds of a step of each candidate, the median over rounds in which candidates take turns.

    Args:
        candidates: The parameters and the step of each; parameters get new gradients before every step.
        steps: The number of steps of a round.
        rounds: The number of rounds, besides a first one that is not counted.
    """
    grads = {name: [torch.randn_like(param) for param in params] for name, (params, _) in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, (params, step) in candidates.items():
            spent = 0.0
            for _ in range(steps):
                for param, grad in zip(params, grads[name], strict=True):
                    param.grad = grad.clone()
                start = time.process_time()
                step()
                spent += time.process_time() - start
            if turn:
                times[name].append(spent / steps)
    return {name: sorted(spent)[len(spent) // 2] for name, spent in times.items()}
