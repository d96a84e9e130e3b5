"""Whatever happens to a writer, there is the old file or the new one."""

import gc
import os
import random
import resource
import signal
import time
import traceback

import pytest
import torch
from torch import nn

import moduli.io as mio
from moduli.io._write import beside

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
    # Nothing runs in the threads that this process may have.
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


def state(number, rows=64):
    return {"a": torch.full((rows, 33), float(number)), "b": torch.full((5,), number), "c": torch.tensor(number)}


def number_in(path):
    """Which state a file holds, all of it."""
    found = mio.read(path).module
    number = int(found["c"])
    assert all(torch.equal(found[name], value) for name, value in state(number, len(found["a"])).items())
    return number


def forked(work):
    """A child that does some work and then vanishes; gives its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must not go on as pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def waited(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_writer_killed_at_any_instant_leaves_a_good_file(tmp_path):
    path = tmp_path / "net.safetensors"
    mio.save(path, state(0))
    lasts = {}
    for fsync in (False, True):

        def write_ten(fsync=fsync):
            for number in range(10):
                mio.save(path, state(number), fsync=fsync)

        start = time.perf_counter()
        assert waited(forked(write_ten)) == 0
        # Of a child: its first writes are slower than later ones, as it copies the pages it shares with its parent.
        lasts[fsync] = (time.perf_counter() - start) / 10
    rng, seen = random.Random(0), set()
    gc.disable()
    try:
        for kill in range(500):
            fsync = kill % 4 == 0
            ready, begins = os.pipe()

            def write(kill=kill, fsync=fsync, begins=begins):
                os.write(begins, b"!")
                for number in range(10**6):
                    mio.save(path, state(kill + number), fsync=fsync)

            pid = forked(write)
            os.read(ready, 1)  # on a busy machine a child begins late
            time.sleep(rng.uniform(0, 6 * lasts[fsync]))
            os.kill(pid, signal.SIGKILL)
            assert waited(pid) == -signal.SIGKILL
            os.close(ready)
            os.close(begins)
            seen.add(number_in(path))
    finally:
        gc.enable()
    # The kills came at different moments, and what they left behind was swept up by those that wrote later.
    assert len(seen) > 20, (len(seen), lasts)
    mio.save(path, state(7))
    assert os.listdir(tmp_path) == ["net.safetensors"]
    assert number_in(path) == 7


def test_a_full_disk_is_told_and_the_old_file_stays(tmp_path):
    path = tmp_path / "net.safetensors"
    mio.save(path, state(1))

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        for rows in (400, 40_000):
            with pytest.raises(mio.CheckpointError, match="File too large; what was there before is unchanged"):
                mio.save(path, state(2, rows))

    assert waited(forked(write)) == 0
    assert number_in(path) == 1
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_places_that_cannot_be_written_to_are_told(tmp_path):
    directory = tmp_path / "missing"
    with pytest.raises(mio.CheckpointError, match="cannot write.*No such file"):
        mio.save(directory / "net.safetensors", state(1))
    with pytest.raises(mio.CheckpointError, match="directory"):
        mio.save(tmp_path, state(1))


def test_two_writers_never_interleave(tmp_path):
    path = tmp_path / "net.safetensors"
    mio.save(path, state(0))

    def write(offset):
        for number in range(60):
            mio.save(path, state(2 * number + offset), fsync=False)

    writers = [forked(lambda offset=offset: write(offset)) for offset in (0, 1)]
    left, seen = set(writers), set()
    while left:
        seen.add(number_in(path))
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.remove(pid)
                assert os.waitstatus_to_exitcode(status) == 0
    assert number_in(path) in (118, 119)
    assert len(seen) > 3
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_a_tensor_that_cannot_be_written_stops_nothing_half_way(tmp_path):
    path = tmp_path / "net.safetensors"
    mio.save(path, state(3))
    for bad, match in [
        (torch.zeros(2, device="meta"), "device 'meta'"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (3, "is a int, not a tensor"),
        (nn.parameter.UninitializedParameter(), "lazy"),
    ]:
        with pytest.raises(mio.CheckpointError, match=match):
            mio.save(path, {**state(4), "d": bad})
    assert number_in(path) == 3
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_links_and_permissions_stay(tmp_path):
    path, link = tmp_path / "net.safetensors", tmp_path / "newest"
    mio.save(path, state(1))
    path.chmod(0o640)
    link.symlink_to(path)
    mio.save(link, state(2))
    assert link.is_symlink()
    assert number_in(path) == 2
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_another_writer_is_writing_is_left_alone(tmp_path):
    import fcntl

    path = tmp_path / "net.safetensors"
    busy = tmp_path / ".net.safetensors.0123456789abcdef.part"
    with open(busy, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mio.save(path, state(1))
        assert list(beside(path)) == [busy]
    mio.save(path, state(1))
    assert list(beside(path)) == []
