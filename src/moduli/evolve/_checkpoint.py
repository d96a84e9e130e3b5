"""The file of a search: its state after the last whole generation, and a journal of the one that is under way."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Journal", "load_state", "save_state"]

_RECORD = struct.Struct("<qqd")


def save_state(path: Path, state: dict[str, Any], extra: dict[str, Any]) -> None:
    """Write a state and what else there is to say, whole or not at all, without pickle."""
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, Tensor)}
    numbers = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
    beside = path.with_name(path.name + ".new")
    save_file(tensors, beside, {"moduli.search": json.dumps({"numbers": numbers, "extra": extra})})
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def load_state(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what `save_state` wrote."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        text = (file.metadata() or {}).get("moduli.search")
        if text is None:
            raise ValueError(f"{path} is not the checkpoint of a search; name another file")
        said = json.loads(text)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return {**said["numbers"], **tensors}, said["extra"]


class Journal:
    """Fitness values as they come, so that a killed search need not evaluate them again.

    One record of 24 bytes for each: generation, member, fitness. A record that was cut off is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".journal")

    def read(self, generation: int) -> dict[int, float]:
        """What is known of a generation."""
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = len(data) // _RECORD.size * _RECORD.size
        return {member: value for g, member, value in _RECORD.iter_unpack(data[:whole]) if g == generation}

    def begin(self, generation: int, known: dict[int, float]) -> None:
        """Start the journal of a generation with what is known of it."""
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_bytes(b"".join(_RECORD.pack(generation, m, v) for m, v in known.items()))
        beside.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def add(self, generation: int, member: int, value: float) -> None:
        """Note one value. It is in the hands of the system before this returns."""
        self._file.write(_RECORD.pack(generation, member, value))

    def end(self) -> None:
        """Close the file."""
        self._file.close()
