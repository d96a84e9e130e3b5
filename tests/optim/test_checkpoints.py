"""torch.distributed.checkpoint: what an optimizer has learnt goes on in another number of processes."""

import pytest
import torch

from launching import launch

CHAINS = ["clip", "soap", "muon", "prodigy", "averaged"]
FLAT = ["clip", "prodigy"]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def run(folder, count, kind, task, names):
    store = folder / f"store-{kind}-{task}-{count}"
    launch("optim/checkpoint_worker.py", count, lambda rank: (store, folder, kind, task, *names))


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
