"""Time candidates that take turns, in one thread."""

import gc
import os
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch


def interleaved(
    candidates: dict[str, Callable[[], object]],
    rounds: int = 15,
    number: int | None = None,
    seconds: float = 0.005,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, float]:
    """Return the seconds per call of each candidate, the median over rounds in which all of them take turns.

    A slow moment of the machine then affects all candidates alike. The order rotates and reverses, so that no candidate always
    follows the same other. There is one thread, and no garbage collection while the clock runs.

    Args:
        candidates: The functions to call, by name.
        rounds: The number of turns of each candidate.
        number: Calls per turn; None chooses it for each candidate so that a turn lasts about `seconds`.
        seconds: The length of a turn if `number` is None.
        clock: `time.process_time` for the time of this process only, on a machine in use.
    """
    if os.environ.get("MODULI_BENCH_QUICK"):  # set by `run.py --quick`
        rounds = min(rounds, 5)
    names = list(candidates)
    threads = torch.get_num_threads()
    collecting = gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        counts = {name: number or _count_calls(candidates[name], seconds, clock) for name in names}
        turns: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            shift = turn // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in reversed(order) if turn % 2 else order:
                turns[name].append(_time_calls(candidates[name], counts[name], clock) / counts[name])
            gc.collect()
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    return {name: median(times) for name, times in turns.items()}


def _count_calls(call: Callable[[], object], seconds: float, clock: Callable[[], float]) -> int:
    """Return how many calls take about `seconds`; these calls also warm the candidate up.

    The shorter of two turns counts, because the first call includes setup and any call may be interrupted. Otherwise a fast
    candidate could be called once per turn, and appear many times slower than one that is called often.
    """
    count = 1
    while (taken := min(_time_calls(call, count, clock), _time_calls(call, count, clock))) < seconds / 2:
        count = max(count * 2, min(count * 16, int(count * seconds / max(taken, 1e-9))))
    return count


def _time_calls(call: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        call()
    return clock() - start
