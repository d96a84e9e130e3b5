"""`Checkpointer`: files by steps and by time, rotation, and resuming past damaged files."""

import os

import pytest
import torch
from torch import nn

import moduli.io as mio


def test_checkpoints_rotate_and_damaged_ones_are_skipped(tmp_path):
    net, generator = nn.Linear(2, 2), torch.Generator()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parts = {"optimizer": optimizer, "extra": {"generator": generator}}
    run = mio.Checkpointer(tmp_path / "run", net, every=2, keep=3, **parts)
    assert run.resume() == 0
    assert run.loaded is None
    weights = {}
    for step in range(1, 12):
        with torch.no_grad():
            net.weight += 1
        weights[step] = net.weight.detach().clone()
        assert (run.step(step) is not None) == (step % 2 == 0)
    assert [path.name for path in run.files()] == [f"step-{n:09d}.safetensors" for n in (6, 8, 10)]
    (tmp_path / "run" / "notes.txt").write_text("other")
    assert mio.Checkpointer(tmp_path / "run", net, every=2, **parts).resume() == 10
    assert torch.equal(net.weight, weights[10])
    data = run.files()[-1].read_bytes()
    run.files()[-1].write_bytes(data[:-3])
    again = mio.Checkpointer(tmp_path / "run", net, every=2, **parts)
    with pytest.warns(RuntimeWarning, match="passed over a checkpoint.*000000010"):
        assert again.resume() == 8
    assert torch.equal(net.weight, weights[8])
    assert isinstance(again.loaded.extra["generator"], torch.Generator)
    assert again.step(9) is None
    assert again.step(10) is not None
    assert mio.Checkpointer(tmp_path / "run", net, every=2, **parts).resume() == 10
    # An undamaged checkpoint that does not fit is not skipped.
    wrong = mio.Checkpointer(tmp_path / "run", nn.Linear(3, 3), every=2)
    with pytest.raises(mio.CheckpointError, match="does not fit"):
        wrong.resume()
    for path in run.files():
        path.write_bytes(b"")
    with pytest.warns(RuntimeWarning), pytest.raises(mio.DamagedFileError):
        mio.Checkpointer(tmp_path / "run", net, every=2).resume()
    assert sorted(os.listdir(tmp_path / "run"))[0] == "notes.txt"


def test_checkpoints_are_saved_by_time(tmp_path):
    run = mio.Checkpointer(tmp_path, nn.Linear(1, 1), seconds=0, keep=1)
    assert run.step(1).name == "step-000000001.safetensors"
    later = mio.Checkpointer(tmp_path, nn.Linear(1, 1), seconds=1000)
    assert later.resume() == 1
    assert later.step(2) is None
    for options in ({}, {"every": 0}, {"every": 1, "keep": 0}, {"seconds": -1}):
        with pytest.raises(ValueError):
            mio.Checkpointer(tmp_path, nn.Linear(1, 1), **options)
    with pytest.raises(ValueError, match="needs something to save"):
        mio.Checkpointer(tmp_path, every=1)
    with pytest.raises(ValueError, match="how many steps are done"):
        run.save(-1)


def test_a_new_run_in_the_directory_of_another_is_refused(tmp_path):
    def start():
        return mio.Checkpointer(tmp_path, nn.Linear(1, 1), every=1, keep=2)

    old = start()
    for step in (98, 99, 100):
        old.save(step)
    before = sorted(os.listdir(tmp_path))
    for call in (lambda: start().step(1), lambda: start().save(1), lambda: start().step(1, {"a": 1})):
        with pytest.raises(
            mio.CheckpointError, match=r"holds a run already, up to step-000000100.*resume\(\).*new directory"
        ):
            call()
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(mio.CheckpointError, match="step 3 comes after step 100"):
        old.save(3)
    assert sorted(os.listdir(tmp_path)) == before
    resumed = start()
    assert resumed.resume() == 100
    resumed.step(101)
    assert [path.name for path in resumed.files()] == ["step-000000100.safetensors", "step-000000101.safetensors"]


def test_damaged_checkpoints_do_not_count_in_rotation(tmp_path):
    run = mio.Checkpointer(tmp_path, nn.Linear(1, 1), every=1, keep=2)
    for step in (1, 2, 9):
        run.save(step)
    run.files()[-1].write_bytes(b"damaged")
    again = mio.Checkpointer(tmp_path, nn.Linear(1, 1), every=1, keep=2)
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert again.resume() == 2
    again.save(3)
    assert [path.name[5:14] for path in again.files()] == ["000000002", "000000003", "000000009"]
    again.save(9)
    assert [path.name[5:14] for path in again.files()] == ["000000003", "000000009"]
    assert mio.Checkpointer(tmp_path, nn.Linear(1, 1), every=1).resume() == 9
