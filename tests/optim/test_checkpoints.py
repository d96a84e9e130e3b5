"""Optimizer state saved by torch.distributed.checkpoint resumes in another number of processes.

Two processes train a sharded model (FSDP2, and FSDP1's flat vectors), a third trains it alone. Each loads what the others
saved, always into an optimizer that never stepped: 2 to 2, 2 to 1, 1 to 2, and 2 to 1 to 2. The processes are started once
and run all checks of `checkpoint_worker`.
"""

import ast

import pytest
import torch

from launching import launch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def test_every_number_of_processes_resumes_from_every_other(tmp_path):
    launch("optim/checkpoint_worker.py", 3, lambda rank: (tmp_path / "store", tmp_path, tmp_path / f"out{rank}"))
    for rank in range(3):
        assert ast.literal_eval((tmp_path / f"out{rank}").read_text()) == []
