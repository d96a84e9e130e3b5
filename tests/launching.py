"""Starts worker programs, one for each process of a group, and waits for all of them."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# A worker that is done leaves at once: threads of torch may still ask for the interpreter, which aborts where it is gone.
_RUN = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
os._exit(0)
"""


def launch(worker, count, arguments):
    """Run a program of the tests in several processes, as `worker rank count *arguments`; one that fails is an error.

    Args:
        worker: Its path from the folder of all tests.
        count: How many processes.
        arguments: What else it is given, a function of the rank.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS.parent / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RUN, str(TESTS / worker), str(rank), str(count), *map(str, arguments(rank))],
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
            assert process.returncode == 0, f"{worker} ended with {process.returncode}: {errors}"
    finally:
        for process in processes:
            process.kill()
