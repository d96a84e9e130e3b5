"""A tuned race: settings as members of one population against one after the other, and how long twelve optimizers take.

Twelve optimizers with 15 settings each (three studies of five, and the chains as written) on workloads of MLPs, 1000 steps each.
Seconds are processor time, in one process on one thread, of the same runs done both ways; winners are the best settings of each
study. The last row is the wall clock of all 12 x 15 x 3 runs, as `moduli race --tune 15` does them on two
cores; --full prints that alone, with the standings.

    python benchmarks/race.py [--full]
"""

import os
import sys
import time
from statistics import median

import torch

from moduli import lab

FIELD = [
    "LR(0.1)",
    "HeavyBall(0.9) | LR(0.05)",
    "NAG(0.9) | LR(0.05)",
    "Adam | LR(0.01)",
    "adamw",
    "NAdam | LR(0.01)",
    "RMSprop | LR(0.01)",
    "Lion | LR(0.001)",
    "Adan | LR(0.01)",
    "ADOPT | LR(0.01)",
    "SOAP | LR(0.01)",
    "muon",
]
WORKLOADS = ("digits-mlp", "mnist1d", "spirals")


def choose(results):
    """Return the settings that won, by problem, contender and study."""
    return {(row["problem"], row["contender"], row["seed"]): row["chain"] for row in lab.chosen_settings(results)}


def measure(chain, workload, budget):
    """Return processor seconds stacked and one by one, and how many of the winners are the same."""
    times, winners = [], []
    for stack in (True, False):
        began = time.process_time()
        results = lab.race([workload], [chain], tune=15, seeds=3, budget=budget, seconds=120.0, workers=0, stack=stack)
        times.append(time.process_time() - began)
        winners.append(choose(results))
    return *times, sum(winners[0][key] == winners[1][key] for key in winners[0])


def table(chains=FIELD, workloads=WORKLOADS):
    """Rows for `run.py`."""
    torch.set_num_threads(1)
    budget = 200 if os.environ.get("MODULI_BENCH_QUICK") else 1000
    for chain in chains:  # compiles what is to be compiled
        lab.race(list(workloads), [chain], tune=3, seeds=3, budget=10, workers=0)
    rows, every, same, count = [], [], 0, 0
    for workload in workloads:
        ratios = []
        total = [0.0, 0.0]
        for chain in chains:
            stacked, alone, equal = measure(chain, workload, budget)
            print(
                f"{workload:20} {chain:28} {stacked:6.1f} s  {alone:6.1f} s  {alone / stacked:.2f}  {equal} of 3",
                flush=True,
            )
            ratios.append(alone / stacked)
            total = [total[0] + stacked, total[1] + alone]
            same, count = same + equal, count + 3
        every += ratios
        for what, value in (("all optimizers together", total[1] / total[0]), ("median optimizer", median(ratios))):
            rows.append(row(f"{workload}, {what}: one by one / stacked", value, 3.0))
    rows.append(
        {
            "name": "studies with the same winner both ways",
            "value": same,
            "bar": str(count),
            "unit": f"of {count}",
            "ok": same == count,
        }
    )
    if (chains, workloads, budget) == (FIELD, WORKLOADS, 1000):
        what = f"{len(FIELD)} optimizers x 15 settings x {len(WORKLOADS)} workloads on two cores"
        minutes = race_all()[0]
        rows.append({"name": what, "value": minutes, "bar": "30 min", "unit": "min", "ok": minutes <= 30})
    return rows


def row(name, value, least):
    return {"name": name, "value": value, "bar": f"at least {least:g} x", "unit": "x", "ok": value >= least}


def race_all():
    """Return the minutes that the whole race takes on two cores, and its results."""
    began = time.perf_counter()
    results = lab.race(WORKLOADS, FIELD, tune=15, seeds=3, budget=1000, seconds=120.0, workers=2)
    return (time.perf_counter() - began) / 60, results


def print_all():
    """Print how long the whole race takes, and its standings."""
    minutes, results = race_all()
    counts = f"{len(FIELD)} optimizers x 15 settings x {len(WORKLOADS)} workloads, {len(results.runs)} runs"
    print(f"{counts}: {minutes:.1f} minutes")
    for standing in lab.standings(results):
        tied = ", ".join(standing.tied) or "nobody"
        print(f"{standing.rank:5.2f} {standing.rank_interval}  {standing.contender}; tied with {tied}")


if __name__ == "__main__":
    if "--full" in sys.argv:
        print_all()
    else:
        for found in table():
            print(
                f"{found['name']:60} {found['value']:.3g} {found['unit']}  ({found['bar']})  {'met' if found['ok'] else 'MISSED'}"
            )
