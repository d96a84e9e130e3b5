"""How every benchmark here measures: side by side, in one thread, taking turns."""

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
    """Seconds per call of each candidate: the median over rounds in which all of them take turns.

    Taking turns means that a slow moment of the machine falls on all candidates alike; rotating and reversing the order
    means that none always runs in the wake of the same other. One thread, and no garbage collection while the clock runs.

    Args:
        candidates: What to call, by name.
        rounds: How many turns each candidate gets.
        number: Calls per turn; None chooses it for each candidate so that a turn lasts about `seconds`.
        seconds: How long a turn lasts when `number` is None.
        clock: `time.process_time` for the time of this process alone, where others use the machine.
    """
    if os.environ.get("MODULI_BENCH_QUICK"):  # set by `run.py --quick`
        rounds = min(rounds, 5)
    names = list(candidates)
    threads = torch.get_num_threads()
    collecting = gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        counts = {name: number or _calls_in(candidates[name], seconds, clock) for name in names}
        turns: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            shift = turn // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in reversed(order) if turn % 2 else order:
                turns[name].append(_clocked(candidates[name], counts[name], clock) / counts[name])
            gc.collect()
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    return {name: median(times) for name, times in turns.items()}


def _calls_in(call: Callable[[], object], seconds: float, clock: Callable[[], float]) -> int:
    """How many calls take about `seconds`. The calls made to find out also warm the candidate up.

    The lesser of two turns counts: the first call does what is done once, and any may be interrupted. Taken for slow, a quick
    candidate would be called once per turn, and look many times slower than one that is called often.
    """
    count = 1
    while (taken := min(_clocked(call, count, clock), _clocked(call, count, clock))) < seconds / 2:
        count = max(count * 2, min(count * 16, int(count * seconds / max(taken, 1e-9))))
    return count


def _clocked(call: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        call()
    return clock() - start
