"""Load programs of the repository, and run them in new processes: alone, or one for each rank of a group."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# Workers end with `os._exit`: a thread of torch may still use the interpreter, and aborts if that has ended.
_RUN = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
os._exit(0)
"""


def load_program(path):
    """Return a file of the repository that is in no package as a module; it is also added to `sys.modules`."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*arguments):
    """Run Python in a new process that can import moduli and the tests; return what it prints.

    Args:
        *arguments: The arguments of the interpreter: a path, or "-c" and code, and what the program is given.

    Raises:
        AssertionError: If the program fails; the message ends with what it wrote to stderr.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launch(worker, count, arguments):
    """Run a program of the tests in several processes, as `worker rank count *arguments`.

    Args:
        worker: Its path relative to `tests`.
        count: The number of processes.
        arguments: A function of the rank that returns the other arguments of the program.

    Raises:
        AssertionError: If a process fails.
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
