"""Whatever happens to a writer, there is the old file or the new one."""

import gc
import os
import random
import resource
import signal
import socket
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import moduli.io as mio
from moduli.io._replace import find_unfinished, replace_file

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


def test_a_writer_killed_at_any_instant_leaves_a_good_file(tmp_path, request):
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
        for kill in range(500 if request.config.getoption("--all") else 120):
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
        (3, "is a builtins.int, not a torch.Tensor"),
        (nn.parameter.UninitializedParameter(), "UninitializedParameter"),
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
    path = tmp_path / "net.safetensors"
    begun = []

    def write(descriptor):
        begun[:] = find_unfinished(tmp_path)
        mio.save(path, state(1))
        assert find_unfinished(tmp_path) == begun
        assert len(begun) == 1

    replace_file(path, write, fsync=False)
    # One that was killed holds no lock, whatever file it was to replace.
    begun[0].write_bytes(b"half")
    mio.save(tmp_path / "other", state(2))
    assert sorted(os.listdir(tmp_path)) == ["net.safetensors", "other"]


def test_only_files_with_names_that_a_writer_made_are_swept_up(tmp_path):
    path = tmp_path / "net.safetensors"
    mine = [
        ".net.safetensors.notes.part",
        ".net.safetensors.0123456789abcdef.part",
        f".moduli-{'0' * 16}-{'1' * 16}.part",
    ]
    for name in mine:
        (tmp_path / name).write_text("mine")
    mio.save(path, state(1))
    assert sorted(os.listdir(tmp_path)) == sorted([*mine, "net.safetensors"])


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    """As root, nothing but this stands between a checkpoint and a device."""
    pipe, listening, link = tmp_path / "pipe", tmp_path / "socket", tmp_path / "link"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
    link.symlink_to(pipe)
    for place in (pipe, listening, link, Path(os.devnull)):
        before = os.lstat(place)
        with pytest.raises(mio.CheckpointError, match="not a regular file"):
            mio.save(place, state(1))
        with pytest.raises(mio.CheckpointError, match="not a regular file"):
            mio.write_bytes(place, b"")
        assert os.lstat(place).st_ino == before.st_ino
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "new")
    mio.save(dangling, state(3))
    assert number_in(tmp_path / "new") == 3


def test_long_names(tmp_path):
    for length in (1, 240, 255):
        path = tmp_path / ("n" * length)
        mio.save(path, state(length))
        mio.save(path, state(length + 1))
        assert number_in(path) == length + 1


def test_new_directories_are_on_the_disk_before_what_is_in_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    run = mio.Checkpointer(tmp_path / "a" / "b", nn.Linear(1, 1), every=1)
    run.save(1)
    assert synced[:2] == [str(tmp_path), str(tmp_path / "a")]
    assert synced[-1] == str(tmp_path / "a" / "b")


def test_saving_while_another_thread_trains_gives_a_file_that_loads(tmp_path):
    """Large tensors and small ones change under the writer; the checksums are of what was written."""
    large, small, stop = torch.zeros(3_000_000), [torch.zeros(7) for _ in range(50)], threading.Event()

    def train():
        while not stop.is_set():
            large.add_(1)
            for each in small:
                each.add_(1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for at in range(8):
            mio.save(
                tmp_path / f"{at}", {"large": large, **{f"{i}": each for i, each in enumerate(small)}}, fsync=False
            )
    finally:
        stop.set()
        thread.join()
    changed = [bool((mio.read(tmp_path / f"{at}").module["large"].diff() != 0).any()) for at in range(8)]
    assert any(changed), "nothing was written while the other thread trained"
