"""Checkpoints: saving and loading against safetensors alone and torch.save, and what checksums cost.

Every candidate ends with the same thing: a file on the same file system, or a module that holds the values (files are in
the page cache; `load_file` and `torch.load` are followed by `load_state_dict`); what is written replaces the file of the round
before. Neither peer waits for the disk, so `fsync=False` is compared with them; the default, which waits, is listed by
itself. 100M parameters are 16 layers of
2500 x 2500; 1000 tensors are 500 layers of 16 x 16.
"""

import shutil
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
