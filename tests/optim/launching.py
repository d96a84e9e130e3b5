"""Starts the processes of `wrapping_worker` and reads what they found."""

import ast
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKER = HERE / "wrapping_worker.py"


def run(folder, kind, count, names):
    """What each process found wrong, by the name of the row."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(WORKER),
                str(rank),
                str(count),
                str(folder / "store"),
                str(folder / f"out{rank}"),
                kind,
                *names,
            ],
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
    return [ast.literal_eval((folder / f"out{rank}").read_text()) for rank in range(count)]


def check(found, names):
    for each in found:
        assert {name: what for name, what in each.items() if what is not None} == {}
        assert len(each) >= (len(names) or 300)
