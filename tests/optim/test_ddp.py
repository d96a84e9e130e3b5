"""Two processes under DistributedDataParallel have the same parameters and take the same decisions."""

import pytest
import torch

from launching import launch
from moduli import m


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_stay_in_step(tmp_path):
    kinds = ["adam", "search", *(["lbfgs"] if hasattr(m, "LBFGS") and hasattr(m, "StrongWolfe") else [])]
    files = [tmp_path / f"out{rank}.pt" for rank in range(2)]
    launch("optim/ddp_worker.py", 2, lambda rank: (tmp_path / "store", files[rank], ",".join(kinds)))
    first, second = (torch.load(file, weights_only=True) for file in files)
    for kind in kinds:
        for a, b in zip(first[kind]["params"], second[kind]["params"], strict=True):
            assert torch.equal(a, b), kind
        assert first[kind]["evaluations"] == second[kind]["evaluations"]
    assert first["search"]["losses"] == second["search"]["losses"]  # the reduced loss, on which the search decides
    assert first["search"]["losses"][-1] < first["search"]["losses"][0]
    assert first["search"]["evaluations"] > 12  # the search shortened a step
    assert "processes may differ" in first["refused"]
    assert first["sum"] == 3.0
