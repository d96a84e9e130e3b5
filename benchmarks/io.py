"""Checkpoints: saving and loading against safetensors alone and torch.save, what checksums cost, and merging.

Every candidate ends with the same thing: a file on the same file system, or a module that holds the values (files are in
the page cache; `load_file` and `torch.load` are followed by `load_state_dict`); what is written replaces the file of the round
before. Neither peer waits for the disk, so `fsync=False` is compared with them; the default, which waits, is listed by
itself. 100M parameters are 16 layers of 2500 x 2500; 1000 tensors are 500 layers of 16 x 16.

Merging two sharded bfloat16 checkpoints (0.5 GB each; `python benchmarks/io.py 5` for 5 GB) is compared with reading both and
writing one of them, with fsync: by plain reads and writes, and by safetensors (every tensor of both is read, shard by shard).
Its peak memory is that of a process of its own.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import moduli.io as mio
from _timing import interleaved


def layers(count, size, bias):
    with torch.no_grad():
        return nn.Sequential(*(nn.Linear(size, size, bias=bias) for _ in range(count)))


NETS = {
    "100M parameters": (lambda: layers(16, 2500, False), 7, 1.1),
    "1000 tensors": (lambda: layers(500, 16, True), 25, 1.3),
}


def table():
    rows = []
    directory = Path(tempfile.mkdtemp(prefix="moduli-bench-"))
    try:
        for name, (make, rounds, bar) in NETS.items():
            rows += measured(name, make(), directory, rounds, bar)
        rows += merged(directory, 0.5)
    finally:
        shutil.rmtree(directory)
    return rows


def measured(name, net, directory, rounds, bar):
    ours, checked, synced, peer, pickled = (directory / each for each in ("a", "b", "c", "d", "e"))
    saving = interleaved(
        {
            "ours": lambda: mio.save(ours, net, checksums=False, fsync=False),
            "checked": lambda: mio.save(checked, net, fsync=False),
            "synced": lambda: mio.save(synced, net),
            "safetensors": lambda: save_file(net.state_dict(), peer),
            "torch": lambda: torch.save(net.state_dict(), pickled),
        },
        rounds=rounds,
        number=1,
    )
    synced.unlink()
    loading = interleaved(
        {
            "ours": lambda: mio.load(ours, net, checksums=False),
            "checked": lambda: mio.load(checked, net),
            "safetensors": lambda: net.load_state_dict(load_file(peer)),
            "torch": lambda: net.load_state_dict(torch.load(pickled, weights_only=True)),
            "file": lambda: mio.TensorFile(ours),
            "load_file": lambda: load_file(peer),
        },
        rounds=rounds,
        number=1,
    )
    for file in (ours, checked, peer, pickled):
        file.unlink()
    rows = []
    for what, times in (("save", saving), ("load", loading)):
        raw = times["safetensors"]
        rows += [
            row(f"{name}: {what}, no checksums / safetensors", times["ours"] / raw, bar),
            row(f"{name}: {what}, no checksums / torch.{what}", times["ours"] / times["torch"], 1.0),
            row(f"{name}: {what}, checksums / safetensors", times["checked"] / raw, 1.5 if what == "load" else None),
            row(f"{name}: {what}, checksums / torch.{what}", times["checked"] / times["torch"], None),
            row(f"{name}: {what}, checksums", times["checked"] * 1e3, None, "ms"),
        ]
    rows.append(row(f"{name}: save, checksums and fsync (the default)", saving["synced"] * 1e3, None, "ms"))
    rows.append(row(f"{name}: opening lazily, TensorFile / load_file", loading["file"] / loading["load_file"], None))
    return rows


def row(name, value, bar, unit="x"):
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


MERGE = """
import sys, time
import moduli.io as io
began = time.perf_counter()
spent = time.process_time()
io.merge_files("lerp", sys.argv[1:3], sys.argv[3], shard_size=10**9, t=0.3)
spent = time.process_time() - spent
# Not ru_maxrss, which begins with what the process that started this one had.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.perf_counter() - began, int(peak.split()[1]) * 1024, spent)
"""
SAFETENSORS = """
import os, sys, time
from pathlib import Path
from safetensors.torch import load_file, save_file
began, spent, out = time.perf_counter(), time.process_time(), Path(sys.argv[3])
out.mkdir()
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    # Tensors are views of a mapped file: a copy reads them.
    first, _ = ({name: value.clone() for name, value in load_file(each).items()} for each in (file, Path(sys.argv[2], file.name)))
    save_file(first, out / file.name)
    with open(out / file.name, "rb") as written:
        os.fsync(written.fileno())
print(time.perf_counter() - began, time.process_time() - spent)
"""
COPY = """
import os, sys, time
from pathlib import Path
began, buffer, out = time.perf_counter(), bytearray(1 << 24), Path(sys.argv[3])
out.mkdir()
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with open(file, "rb", 0) as a, open(Path(sys.argv[2], file.name), "rb", 0) as b, open(out / file.name, "wb", 0) as c:
        while count := a.readinto(buffer):
            b.readinto(buffer)
            c.write(memoryview(buffer)[:count])
        os.fsync(c.fileno())
print(time.perf_counter() - began)
"""


def merged(directory, gigabytes, rounds=3):
    """Return rows for a merge of two checkpoints against reading and writing the same bytes, in processes that take turns.

    Args:
        directory: A directory for the files.
        gigabytes: The size of each checkpoint.
        rounds: The number of turns.
    """
    places = [directory / name for name in ("first", "second", "out")]
    for seed, place in enumerate(places[:2]):
        write_checkpoint(place, gigabytes, seed)
    ratios, peers, spent, peaks = [], [], [], []
    for _ in range(rounds):
        (copying,) = timed(COPY, places)
        merging, peak, ours = timed(MERGE, places)
        peer, theirs = timed(SAFETENSORS, places)
        ratios.append(merging / copying)
        peers.append(merging / peer)
        spent.append(ours / theirs)
        peaks.append(peak / 1e9)
    for place in places[:2]:
        shutil.rmtree(place)
    name = f"merging two checkpoints of {gigabytes:g} GB"
    return [
        row(f"{name}: time / reading and writing the bytes", statistics.median(ratios), 1.3),
        row(f"{name}: time / reading both and writing one by safetensors", statistics.median(peers), 1.5),
        row(f"{name}: processor time / that of safetensors", statistics.median(spent), None),
        row(f"{name}: peak memory", max(peaks), 1.0, "GB"),
    ]


def write_checkpoint(folder, gigabytes, seed):
    folder.mkdir()
    values = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(seed)).bfloat16()
    shards = max(1, round(gigabytes * 1e9 / (3 * values.nbytes)))
    weight_map = {}
    for at in range(shards):
        part = {f"layers.{at}.{name}.weight": values * (1 + 0.01 * at) for name in ("q", "k", "v")}
        file = f"model-{at + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def timed(program, places):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, places)], check=True, capture_output=True, text=True
    )
    shutil.rmtree(places[-1])
    return [float(number) for number in done.stdout.split()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="moduli-bench-") as folder:
        for each in merged(Path(folder), float(sys.argv[1]) if len(sys.argv) > 1 else 0.5, rounds=3):
            print(f"{each['name']}: {each['value']:.2f} {each['unit']} (bar {each['bar']})")
