"""The file of a search: its state after the last whole generation, and a journal of the one that is under way.

The state is a checkpoint of `moduli.io`: written all or nothing, with a checksum of each tensor and of everything else. The
journal begins with the generation that it is of, in a file that is written the same way, and grows by one record for each
fitness value. A record has a checksum too: one that was cut off or damaged ends what is believed of the journal.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_RECORD = struct.Struct("<qqd")
_CHECKSUM = struct.Struct("<I")
_SIZE = _RECORD.size + _CHECKSUM.size


def save_state(path: Path, state: dict[str, Any], extra: dict[str, Any]) -> None:
    """Write a state and what else there is to say, whole or not at all."""
    from ..io import make_directory, save  # a chain of links needs no files

    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    make_directory(path.parent)
    save(path, tensors, extra={"search": extra, "numbers": numbers})


def load_state(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what `save_state` wrote.

    Raises:
        CheckpointError: If the file was damaged.
        ValueError: If it is the file of something else.
    """
    from ..io import read

    found = read(path)
    about = found.extra
    if not isinstance(about, dict) or not isinstance(about.get("search"), dict) or found.module is None:
        raise ValueError(f"{path} is not the checkpoint of a search; name another file")
    return {**about["numbers"], **{name: value.to(device) for name, value in found.module.items()}}, about["search"]


class Journal:
    """Fitness values as they come, so that a killed search need not evaluate them again.

    One record of 28 bytes for each: generation, member, fitness, and the CRC-32 of those and of the record before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".journal")

    def read(self, generation: int) -> dict[int, float]:
        """What is known of a generation: the records from the first to the last good one.

        Raises:
            CheckpointError: If a record in the middle was damaged. One that was cut off at the end is not there.
        """
        from ..io import CheckpointError

        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        known: dict[int, float] = {}
        before = 0
        for at in range(0, len(data) - _SIZE + 1, _SIZE):
            record, (checksum,) = data[at : at + _RECORD.size], _CHECKSUM.unpack_from(data, at + _RECORD.size)
            before = zlib.crc32(record, before)
            if before != checksum:
                if at + 2 * _SIZE > len(data):
                    break
                raise CheckpointError(
                    f"{str(self.path)!r} was damaged at byte {at}; remove it, and the generation under way is evaluated again"
                )
            number, member, value = _RECORD.unpack(record)
            if number == generation:
                known[member] = value
        return known

    @contextmanager
    def write(self, generation: int, known: dict[int, float]) -> Iterator[Callable[[int, float], None]]:
        """Start the journal of a generation with what is known of it; the block is given what notes one value more.

        A value is in the hands of the system before that returns.
        """
        from ..io import write_bytes

        before = 0

        def record(member: int, value: float) -> bytes:
            nonlocal before
            packed = _RECORD.pack(generation, member, value)
            before = zlib.crc32(packed, before)
            return packed + _CHECKSUM.pack(before)

        write_bytes(self.path, b"".join(record(member, value) for member, value in known.items()))
        with self.path.open("ab", buffering=0) as file:

            def note(member: int, value: float) -> None:
                file.write(record(member, value))

            yield note
