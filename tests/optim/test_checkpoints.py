"""torch.distributed.checkpoint: what an optimizer has learnt goes on in another number of processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
CHAINS = ["clip", "soap", "muon", "prodigy", "averaged"]
FLAT = ["clip", "prodigy"]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def run(folder, count, kind, task, names):
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent / "src"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    store = folder / f"store-{kind}-{task}-{count}"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "checkpoint_worker.py"),
                *map(str, (rank, count, store, folder, kind, task)),
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
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


def test_two_processes_save_and_two_or_one_go_on(tmp_path):
    run(tmp_path, 2, "fsdp2", "save", CHAINS)
    run(tmp_path, 2, "fsdp2", "load", CHAINS)
    run(tmp_path, 1, "plain", "load", CHAINS)


def test_one_process_saves_and_two_go_on(tmp_path):
    run(tmp_path, 1, "plain", "save", CHAINS)
    run(tmp_path, 2, "fsdp2", "load", CHAINS)


def test_flat_parameters_of_fsdp1(tmp_path):
    run(tmp_path, 2, "fsdp1", "save", FLAT)
    run(tmp_path, 2, "fsdp1", "load", FLAT)
    run(tmp_path, 1, "plain", "load", FLAT)
