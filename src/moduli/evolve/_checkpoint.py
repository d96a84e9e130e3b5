"""The file of a search: its state after the last whole generation, and a journal of the one that is under way.

The state is a checkpoint of `moduli.io`: written all or nothing, with a checksum of each tensor and of everything else. The
journal begins with the generation that it is of, in a file that is written the same way, and grows by one record for each
fitness value. A record has a checksum too: one that was cut off or damaged ends what is believed of the journal.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from .._texts import cut
from ..io import CheckpointError, make_directory, read, read_bytes, save, write_bytes
from ._base import Search

_RECORD = struct.Struct("<qqd")
_CHECKSUM = struct.Struct("<I")
_SIZE = _RECORD.size + _CHECKSUM.size


class SearchFile:
    """The file of a search, and beside it the journal: fitness values as they come, which need not be evaluated again.

    A journal has one record of 28 bytes for each value: generation, member, fitness, and the CRC-32 of those and of the record
    before.

    Args:
        path: Where it is.
        writes: Whether this process writes it.
        about: What has to be the same for a search to go on.
    """

    def __init__(self, path: str | Path, writes: bool, about: dict[str, Any]) -> None:
        self.path, self.writes, self.about = Path(path), writes, about
        self.journal = Path(f"{self.path}.journal")
        self._generation = self._checksum = 0

    def load(self, search: Search) -> tuple[list[float], dict[int, float]]:
        """Have a search go on from the file, if there is one: the history until then, and what the journal knows.

        Raises:
            CheckpointError: If the file or the journal was damaged. A record that was cut off at the end is not there.
            ValueError: If it is the file of something else.
        """
        if not self.path.exists():
            self.save(search, [])
            return [], {}
        found = read(self.path)
        extra = found.extra if isinstance(found.extra, dict) else {}
        about = extra.get("search")
        if not isinstance(about, dict) or found.module is None:
            raise ValueError(f"{self.path} is not the checkpoint of a search; name another file")
        for name, mine in self.about.items():
            if about.get(name) != mine:
                raise ValueError(
                    f"{self.path} holds a search with {name} {cut(str(about.get(name)), 200)}; this one has {mine}"
                )
        search.load_state_dict({**extra["numbers"], **found.module})
        return list(about["history"]), self._read_journal(search.generation)

    def save(self, search: Search, history: list[float]) -> None:
        """Write the state of a search, whole or not at all."""
        if self.writes:
            state = search.state_dict()
            tensors = {name: state.pop(name) for name in list(state) if isinstance(state[name], Tensor)}
            make_directory(self.path.parent)
            save(self.path, tensors, extra={"search": {**self.about, "history": history}, "numbers": state})

    def _read_journal(self, generation: int) -> dict[int, float]:
        """What is known of a generation: the records from the first to the last good one."""
        known: dict[int, float] = {}
        data, before = read_bytes(self.journal) if self.journal.exists() else b"", 0
        for at in range(0, len(data) - _SIZE + 1, _SIZE):
            record, (checksum,) = data[at : at + _RECORD.size], _CHECKSUM.unpack_from(data, at + _RECORD.size)
            before = zlib.crc32(record, before)
            if before != checksum:
                if at + 2 * _SIZE > len(data):
                    break
                raise CheckpointError(f"{str(self.journal)!r} was damaged at byte {at}; remove it, and go on without")
            number, member, value = _RECORD.unpack(record)
            if number == generation:
                known[member] = value
        return known

    def begin(self, generation: int, known: dict[int, float]) -> None:
        """Start the journal of a generation with what is known of it."""
        self._generation, self._checksum = generation, 0
        if self.writes:
            write_bytes(self.journal, b"".join(self._pack(member, value) for member, value in known.items()))

    def note(self, member: int, value: float) -> None:
        """One value more, which is in the hands of the system before this returns."""
        if self.writes:
            with self.journal.open("ab", buffering=0) as file:
                file.write(self._pack(member, value))

    def _pack(self, member: int, value: float) -> bytes:
        packed = _RECORD.pack(self._generation, member, value)
        self._checksum = zlib.crc32(packed, self._checksum)
        return packed + _CHECKSUM.pack(self._checksum)
