"""Two processes under DistributedDataParallel: the same parameters, the same decisions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moduli import m

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_stay_in_step(tmp_path):
    kinds = ["adam", "search", *(["lbfgs"] if hasattr(m, "LBFGS") and hasattr(m, "StrongWolfe") else [])]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    files = [tmp_path / f"out{rank}.pt" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "ddp_worker.py"),
                str(rank),
                str(tmp_path / "store"),
                str(file),
                ",".join(kinds),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    first, second = (torch.load(file, weights_only=True) for file in files)
    for kind in kinds:
        for a, b in zip(first[kind]["params"], second[kind]["params"], strict=True):
            assert torch.equal(a, b), kind
        assert first[kind]["evaluations"] == second[kind]["evaluations"]
    assert first["search"]["losses"] == second["search"]["losses"]  # the reduced loss, which decides
    assert first["search"]["losses"][-1] < first["search"]["losses"][0]
    assert first["search"]["evaluations"] > 12  # the step was cut
    assert "could take different decisions" in first["refused"]
    assert first["sum"] == 3.0
