"""Crashes of a writer: the file afterwards is the old one or the new one, complete."""

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
    # Idle threads of this process are harmless to a fork.
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


def state(number, rows=64):
    return {"a": torch.full((rows, 33), float(number)), "b": torch.full((5,), number), "c": torch.tensor(number)}


def number_in(path):
    """Return the number of the state that a file holds; check that the state is complete."""
    tensors = mio.read(path).module
    number = int(tensors["c"])
    assert all(torch.equal(tensors[name], value) for name, value in state(number, len(tensors["a"])).items())
    return number


def fork(work):
    """Return the id of a forked process that does some work and exits."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must not continue as pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def wait_for(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_writer_killed_at_any_time_leaves_a_complete_file(tmp_path, request):
    path = tmp_path / "net.safetensors"
    mio.save(path, state(0))
    durations = {}
    for fsync in (False, True):

        def write_ten(fsync=fsync):
            for number in range(10):
                mio.save(path, state(number), fsync=fsync)

        start = time.perf_counter()
        assert wait_for(fork(write_ten)) == 0
        # Measured in a child, whose first writes are slow because it copies the pages it shares with its parent.
        durations[fsync] = (time.perf_counter() - start) / 10
    rng, numbers = random.Random(0), set()
    gc.disable()
    try:
        for kill in range(500 if request.config.getoption("--all") else 120):
            fsync = kill % 4 == 0
            ready, begun = os.pipe()

            def write(kill=kill, fsync=fsync, begun=begun):
                os.write(begun, b"!")
                for number in range(10**6):
                    mio.save(path, state(kill + number), fsync=fsync)

            pid = fork(write)
            os.read(ready, 1)  # on a busy machine a child starts late
            time.sleep(rng.uniform(0, 6 * durations[fsync]))
            os.kill(pid, signal.SIGKILL)
            assert wait_for(pid) == -signal.SIGKILL
            os.close(ready)
            os.close(begun)
            numbers.add(number_in(path))
    finally:
        gc.enable()
    # The kills were at different moments, and later writers removed the temporary files.
    assert len(numbers) > 20, (len(numbers), durations)
    mio.save(path, state(7))
    assert os.listdir(tmp_path) == ["net.safetensors"]
    assert number_in(path) == 7


def test_a_full_disk_raises_and_the_old_file_stays(tmp_path):
    path = tmp_path / "net.safetensors"
    mio.save(path, state(1))

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        for rows in (400, 40_000):
            with pytest.raises(mio.CheckpointError, match="File too large; what was there before is unchanged"):
                mio.save(path, state(2, rows))

    assert wait_for(fork(write)) == 0
    assert number_in(path) == 1
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_paths_that_cannot_be_written_raise_with_the_reason(tmp_path):
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

    writers = [fork(lambda offset=offset: write(offset)) for offset in (0, 1)]
    running, numbers = set(writers), set()
    while running:
        numbers.add(number_in(path))
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                assert os.waitstatus_to_exitcode(status) == 0
    assert number_in(path) in (118, 119)
    assert len(numbers) > 3
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_a_tensor_that_cannot_be_written_leaves_the_old_file(tmp_path):
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


def test_saving_keeps_links_and_permissions(tmp_path):
    path, link = tmp_path / "net.safetensors", tmp_path / "newest"
    mio.save(path, state(1))
    path.chmod(0o640)
    link.symlink_to(path)
    mio.save(link, state(2))
    assert link.is_symlink()
    assert number_in(path) == 2
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_temporary_file_of_another_writer_is_not_removed(tmp_path):
    path = tmp_path / "net.safetensors"
    unfinished = []

    def write(descriptor):
        unfinished[:] = find_unfinished(tmp_path)
        mio.save(path, state(1))
        assert find_unfinished(tmp_path) == unfinished
        assert len(unfinished) == 1

    replace_file(path, write, fsync=False)
    # The file of a killed writer has no lock, so a writer of another file removes it.
    unfinished[0].write_bytes(b"half")
    mio.save(tmp_path / "other", state(2))
    assert sorted(os.listdir(tmp_path)) == ["net.safetensors", "other"]


def test_only_unfinished_files_of_writers_are_removed(tmp_path):
    path = tmp_path / "net.safetensors"
    other_names = [
        ".net.safetensors.notes.part",
        ".net.safetensors.0123456789abcdef.part",
        f".moduli-{'0' * 16}-{'1' * 16}.part",
    ]
    for name in other_names:
        (tmp_path / name).write_text("other")
    mio.save(path, state(1))
    assert sorted(os.listdir(tmp_path)) == sorted([*other_names, "net.safetensors"])


def test_pipes_sockets_and_devices_are_not_replaced(tmp_path):
    """For root, no permission protects a device from being replaced, only this check."""
    pipe, listening, link = tmp_path / "pipe", tmp_path / "socket", tmp_path / "link"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
    link.symlink_to(pipe)
    for target in (pipe, listening, link, Path(os.devnull)):
        before = os.lstat(target)
        with pytest.raises(mio.CheckpointError, match="not a regular file"):
            mio.save(target, state(1))
        with pytest.raises(mio.CheckpointError, match="not a regular file"):
            mio.write_bytes(target, b"")
        assert os.lstat(target).st_ino == before.st_ino
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "new")
    mio.save(dangling, state(3))
    assert number_in(tmp_path / "new") == 3


def test_names_of_any_length_are_saved(tmp_path):
    for length in (1, 240, 255):
        path = tmp_path / ("n" * length)
        mio.save(path, state(length))
        mio.save(path, state(length + 1))
        assert number_in(path) == length + 1


def test_new_directories_are_synced_before_the_files_in_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    run = mio.Checkpointer(tmp_path / "a" / "b", nn.Linear(1, 1), every=1)
    run.save(1)
    assert synced[:2] == [str(tmp_path), str(tmp_path / "a")]
    assert synced[-1] == str(tmp_path / "a" / "b")


def test_a_file_saved_while_another_thread_trains_is_loaded(tmp_path):
    """Tensors change while they are written; the checksums must be those of the written bytes."""
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
