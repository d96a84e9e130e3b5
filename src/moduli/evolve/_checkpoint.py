"""The file of a search: its state after the last whole generation, and a journal of the one that is under way.

The state is a checkpoint of `moduli.io`: written all or nothing, with a checksum of each tensor and of everything else. The
journal of a generation is created the same way and grows by one record for each fitness value. Each record has a checksum: a
record that was cut off at the end is ignored, and one that was damaged raises.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .._texts import cut
from ..io import CheckpointError, make_directory, read, read_bytes, save, write_bytes
from ._base import Search

_RECORD = struct.Struct("<qqd")
_CHECKSUM = struct.Struct("<I")
_SIZE = _RECORD.size + _CHECKSUM.size
_ENDS = ("tol", "patience")


def describe_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a search as texts that are equal where the settings are; tensors and arrays as lists.

    Those that only end a search are left out: a search may go on with others.
    """

    def read(value: Any) -> Any:
        """Return numbers for tensors and arrays, also inside of lists, which count as tuples."""
        if hasattr(value, "tolist"):
            return read(value.tolist())
        if isinstance(value, list | tuple):
            return tuple(map(read, value))
        if callable(value):  # its repr would have its address
            return getattr(value, "__qualname__", type(value).__qualname__)
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    return {name: repr(read(value)) for name, value in settings.items() if value is not None and name not in _ENDS}


class SearchFile:
    """The file of a search, and the journal beside it, which stores each fitness value so that no member is evaluated twice.

    A journal has one record of 28 bytes for each value: generation, member, fitness, and the CRC-32 of those and of the record
    before.

    Args:
        path: The path of the file; the journal is `path.journal`.
        writes: Whether this process writes it.
        about: Settings that must be equal for a search to resume from the file.
    """

    def __init__(self, path: str | Path, writes: bool, about: dict[str, Any]) -> None:
        self.path, self.writes, self.about = Path(path), writes, about
        self.journal = Path(f"{self.path}.journal")
        self._generation = self._checksum = 0

    def load(self, search: Search) -> tuple[list[float], dict[int, float]]:
        """Load the state of a search from the file if it exists, else write the file.

        Returns:
            The history so far, and the fitness of the members in the journal.

        Raises:
            CheckpointError: If the file or the journal was damaged. A record that was cut off at the end is ignored.
            ValueError: If it is the file of something else.
        """
        if not self.path.exists():
            self.save(search, [])
            return [], {}
        contents = read(self.path)
        extra = contents.extra if isinstance(contents.extra, dict) else {}
        about = extra.get("search")
        if not isinstance(about, dict) or contents.module is None:
            raise ValueError(f"{self.path} is not the checkpoint of a search; name another file")
        # Files of versions before 0.3 have no settings.
        mine, theirs = self.about.get("settings", {}), about.get("settings", self.about.get("settings", {}))
        settings = [(name, theirs.get(name, "none"), mine.get(name, "none")) for name in {**theirs, **mine}]
        fixed = [(name, about.get(name), value) for name, value in self.about.items() if name != "settings"]
        for name, saved, current in (*fixed, *settings):
            if saved != current:
                saved = cut(str(saved), 200)
                raise ValueError(
                    f"{self.path} holds a search with {name} {saved}; this one has {cut(str(current), 200)}"
                )
        search.load_state_dict({**extra["numbers"], **contents.module})
        return list(about["history"]), self._read_journal(search.generation)

    def save(self, search: Search, history: list[float]) -> None:
        """Write the state of a search, whole or not at all."""
        if self.writes:
            state = search.state_dict()
            tensors = {name: state.pop(name) for name in list(state) if isinstance(state[name], Tensor)}
            make_directory(self.path.parent)
            save(self.path, tensors, extra={"search": {**self.about, "history": history}, "numbers": state})

    def _read_journal(self, generation: int) -> dict[int, float]:
        """Return the fitness of the members of a generation that the journal has records of."""
        values: dict[int, float] = {}
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
                values[member] = value
        return values

    def begin(self, generation: int, known: dict[int, float]) -> None:
        """Start the journal of a generation with the fitness values that are known already."""
        self._generation, self._checksum = generation, 0
        if self.writes:
            write_bytes(self.journal, b"".join(self._pack(member, value) for member, value in known.items()))

    def note(self, member: int, value: float) -> None:
        """Append one value, unbuffered: it survives a kill of this process once this returns."""
        if self.writes:
            with self.journal.open("ab", buffering=0) as file:
                file.write(self._pack(member, value))

    def _pack(self, member: int, value: float) -> bytes:
        packed = _RECORD.pack(self._generation, member, value)
        self._checksum = zlib.crc32(packed, self._checksum)
        return packed + _CHECKSUM.pack(self._checksum)
