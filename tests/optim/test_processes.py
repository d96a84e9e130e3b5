"""Two processes: the numbers of one, or a refusal. They are started once and make all checks of `process_worker`."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
NAMES = [
    node.name
    for node in ast.parse((HERE / "process_worker.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """What each process found wrong, by the name of the check."""
    folder = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    worker = str(HERE / "process_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(folder / "store"), str(folder / f"out{rank}")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [ast.literal_eval((folder / f"out{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes(problems, name):
    for found in problems:
        assert found[name] == []
