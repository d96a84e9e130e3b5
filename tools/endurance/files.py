"""Endurance of files: interrupted saves, killed writers, and files changed at random.

`run(seconds)` returns counts, and raises `Violation` if a guarantee of `moduli.io` is broken: a descriptor or a temporary file
remains after an interrupt, a file is neither the old nor the new one, a changed file raises another error than
`CheckpointError`, or a changed file is loaded in part.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import moduli.io as mio


class Violation(AssertionError):
    """A broken guarantee of `moduli.io`."""


def run(seconds: float, seed: int = 0) -> dict[str, int]:
    """Run all checks for some seconds in total, and each check at least once.

    Args:
        seconds: The time for all checks.
        seed: The seed of the instants and the bytes.

    Returns:
        Counts: saves, interrupts, mutated files and how many of them loaded, kills.

    Raises:
        Violation: If a guarantee is broken.
    """
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        for share, work in (
            (0.35, interrupt_saves),
            (0.15, interrupt_merges),
            (0.25, mutate_files),
            (0.25, kill_writers),
        ):
            folder = Path(directory, work.__name__)
            folder.mkdir()
            counts.update(work(folder, seconds * share, rng))
    return dict(counts)


# -- interrupts ----------------------------------------------------------------------------------------------------------


def interrupt_saves(folder: Path, seconds: float, rng: random.Random) -> Counter[str]:
    """Interrupt `save` at random instants; no descriptor or temporary file may remain, and the file must be old or new.

    Args:
        folder: A directory to write to.
        seconds: The time to run.
        rng: The generator of the instants.
    """
    path = folder / "net.safetensors"
    states = [_make_state(number) for number in range(2)]
    mio.save(path, states[0], fsync=False)

    def work(turn: int) -> None:
        mio.save(path, states[turn % 2], fsync=turn % 4 == 0)

    def check() -> None:
        _read_number(path)

    return _interrupt(folder, ["net.safetensors"], work, check, seconds, rng)


def interrupt_merges(folder: Path, seconds: float, rng: random.Random) -> Counter[str]:
    """Interrupt merges into a directory, which must be complete or absent; the arguments are those of `interrupt_saves`."""
    model = folder / "model"
    model.mkdir()
    mio.save(model / "model.safetensors", _make_state(0), fsync=False)
    (model / "config.json").write_text("{}")
    merged = folder / "merged"

    def work(turn: int) -> None:
        mio.merge_files("linear", [model, model], merged, shard_size=4096, fsync=False)

    def check() -> None:
        if merged.exists():
            mio.TensorFiles(merged).verify()
            if not (merged / "config.json").exists():
                raise Violation(f"{merged} has its weights and not its configuration")
            for each in merged.iterdir():
                each.unlink()
            merged.rmdir()

    # An interrupted removal leaves a directory behind, which the next save removes.
    def sweep() -> None:
        mio.write_bytes(folder / "sweep", b"", fsync=False)
        (folder / "sweep").unlink()

    return _interrupt(folder, ["model"], work, check, seconds, rng, sweep)


def _interrupt(
    folder: Path,
    names: list[str],
    work: Callable[[int], None],
    check: Callable[[], None],
    seconds: float,
    rng: random.Random,
    sweep: Callable[[], None] = lambda: None,
) -> Counter[str]:
    """Call a function repeatedly, interrupt it at random instants, and check the result each time."""
    counts: Counter[str] = Counter()

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before, recording = signal.signal(signal.SIGALRM, raise_interrupt), torch.is_grad_enabled()
    try:
        durations = []
        for turn in range(5):
            start = time.perf_counter()
            work(turn)
            durations.append(time.perf_counter() - start)
            check()
        # The median, because one slow call would move all later interrupts behind the work.
        span, end, turn = 1.2 * sorted(durations)[2], time.monotonic() + seconds, 0
        gc.collect()
        descriptors = _count_descriptors()
        while not counts["interrupts"] or time.monotonic() < end:
            turn += 1
            counts["saves"] += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, span))
                work(turn)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                counts["interrupts"] += 1
            check()
            sweep()
            if sorted(os.listdir(folder)) != sorted(names):
                raise Violation(f"interrupt {counts['interrupts']} left {sorted(os.listdir(folder))}")
            if _count_descriptors() > descriptors and gc.collect() >= 0 and _count_descriptors() > descriptors:
                raise Violation(f"interrupt {counts['interrupts']} left a descriptor open")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(recording)  # an interrupt may leave torch's context managers without restoring it
    return counts


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- files that were changed ---------------------------------------------------------------------------------------------


def mutate_files(folder: Path, seconds: float, rng: random.Random) -> Counter[str]:
    """Load files that were changed at random; each loads, or raises `CheckpointError` and changes nothing.

    Args:
        folder: A directory to write to.
        seconds: The time to run.
        rng: The generator of the changes.
    """
    counts: Counter[str] = Counter()
    path, changed = folder / "net.safetensors", folder / "changed.safetensors"
    module = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    mio.save(path, module, optimizer=optimizer, extra={"epoch": 3, "seen": {1, 2}}, fsync=False)
    data, end = path.read_bytes(), time.monotonic() + seconds
    target = nn.Linear(4, 3)
    values = [value.clone() for value in target.state_dict().values()]
    while not counts["mutated"] or time.monotonic() < end:
        counts["mutated"] += 1
        changed.unlink(missing_ok=True)
        changed.write_bytes(mutate(data, rng))
        calls: tuple[Callable[[], Any], ...] = (
            lambda: mio.load(changed, target),
            lambda: mio.read(changed),
            lambda: str(mio.inspect(changed)),
        )
        for call in calls:
            try:
                call()
                counts["loaded"] += 1
            except mio.CheckpointError as error:
                if len(str(error)) > 4000:
                    raise Violation(f"an error of {len(str(error))} letters") from error
        same = all(map(torch.equal, target.state_dict().values(), values))
        whole = all(map(torch.equal, target.state_dict().values(), module.state_dict().values()))
        if not same and not whole:
            raise Violation("a file that was changed has changed a part of the module")
        values = [value.clone() for value in target.state_dict().values()]
    return counts


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a file with something cut off, inserted, removed or flipped."""
    kind, at, changed = rng.randrange(5), rng.randrange(len(data)), bytearray(data)
    if kind == 0:
        return data[:at]
    if kind == 1:
        changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 2:
        del changed[at : at + rng.randrange(1, 9)]
    elif kind == 3:
        changed[:8] = rng.getrandbits(rng.choice([8, 12, 30, 40, 64])).to_bytes(8, "little")
    else:
        for _ in range(rng.choice([1, 1, 4, 40])):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


# -- writers that are killed ---------------------------------------------------------------------------------------------


def kill_writers(folder: Path, seconds: float, rng: random.Random) -> Counter[str]:
    """Kill processes that save in a loop; the file must be old or new, and the next save must remove temporary files.

    Args:
        folder: A directory to write to.
        seconds: The time to run.
        rng: The generator of the instants.
    """
    counts: Counter[str] = Counter()
    path, end = folder / "net.safetensors", time.monotonic() + seconds
    states = [_make_state(number) for number in range(2)]
    gc.freeze()  # garbage collection in a child would copy all shared memory
    try:
        while not counts["kills"] or time.monotonic() < end:
            pid, ready = _start_writer(path, states)
            if not os.read(ready, 1):
                raise Violation("a writer ended by itself")
            time.sleep(rng.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(ready)
            counts["kills"] += 1
            _read_number(path)
            mio.save(path, states[1], fsync=False)
            if os.listdir(folder) != ["net.safetensors"]:
                raise Violation(f"a writer that was killed left {os.listdir(folder)} behind after the next save")
    finally:
        gc.unfreeze()
    return counts


def _start_writer(path: Path, states: list[dict[str, torch.Tensor]]) -> tuple[int, int]:
    """Fork a process that saves in a loop; return its id, and a descriptor that gets a byte after its second save."""
    ready, begins = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # no other thread of this process holds a lock
        pid = os.fork()
    if pid == 0:
        try:
            for turn in range(10**9):
                mio.save(path, states[turn % 2], fsync=False)
                if turn == 1:
                    os.write(begins, b"!")
        finally:
            os._exit(1)
    os.close(begins)
    return pid, ready


def _make_state(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 33), float(number)), "b": torch.full((5,), number), "c": torch.tensor(number)}


def _read_number(path: Path) -> int:
    """Return which state a file holds.

    Raises:
        Violation: If it holds parts of two.
    """
    try:
        module = mio.read(path).module
    except mio.CheckpointError as error:
        raise Violation(f"a file was written in part: {error}") from error
    number = int(module["c"])
    if not all(torch.equal(module[name], value) for name, value in _make_state(number).items()):
        raise Violation("a file has parts of two states")
    return number


if __name__ == "__main__":
    print(run(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))
