"""Starts worker programs, one for each process of a group, and waits for all of them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def launch(worker, count, arguments):
    """Run a program of this folder in several processes, as `worker rank count *arguments`; one that fails is an error."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(rank), str(count), *map(str, arguments(rank))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=3600)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


def run(folder, kind, count, names):
    """What each process of the law of wrappings found wrong, by the name of the row."""
    launch("wrapping_worker.py", count, lambda rank: (folder / "store", folder / f"out{rank}", kind, *names))
    return [ast.literal_eval((folder / f"out{rank}").read_text()) for rank in range(count)]


def check(found, names):
    for each in found:
        assert {name: what for name, what in each.items() if what is not None} == {}
        assert len(each) >= (len(names) or 300)
