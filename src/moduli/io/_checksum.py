"""The checksum of a tensor's bytes: as good as a CRC against what happens to files, and several times faster.

Up to 64 KB it is the CRC-32 of the bytes. More are cut into blocks of 256 rows of 1021 little-endian words of 64 bits, the
last one filled up with zeros to whole rows. The sums of the columns of each block, modulo 2**64, go through CRC-32, and the
sum of all words stands beside it: 96 bits.

* One flipped bit always changes the sum of all words: by a power of two, modulo 2**64.
* More of them cancel only in the same column of a block, the same bit one way and the other. A row is no whole number of
  sectors or pages, so that these, when they change places, come to other columns.
"""

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

_SMALL: Final = 1 << 16
_COLUMNS: Final = 1021
_ROW: Final = 8 * _COLUMNS
BLOCK: Final = 256 * _ROW
_WORDS: Final = np.dtype("<u8")

# From how many bytes on threads are worth starting.
_THREADED: Final = 1 << 24
_MOST_THREADS: Final = 4


class Checksum:
    """The checksum of bytes that come piece by piece.

    Args:
        size: How many bytes there will be.
    """

    def __init__(self, size: int) -> None:
        self._small = size < _SMALL
        self._crc = self._sum = 0

    def update(self, piece: Any) -> None:
        """Take the next bytes. Every piece but the last has a whole number of blocks."""
        if self._small:
            self._crc = zlib.crc32(piece, self._crc)
            return
        raw = np.frombuffer(piece, np.uint8)
        for begin in range(0, len(raw), BLOCK):
            block = raw[begin : begin + BLOCK]
            if len(block) % _ROW:
                block = np.concatenate([block, np.zeros(-len(block) % _ROW, np.uint8)])
            columns = np.add.reduce(block.view(_WORDS).reshape(-1, _COLUMNS), axis=0)
            self._crc = zlib.crc32(columns.astype(_WORDS, copy=False), self._crc)
            self._sum = (self._sum + int(np.add.reduce(columns))) % 2**64

    @property
    def value(self) -> int:
        """The checksum, a number of 96 bits."""
        return self._crc << 64 | self._sum


def checksums_of(parts: Sequence[Any]) -> list[int]:
    """The checksums of buffers. Many bytes are shared out to threads, buffer by buffer."""
    # More threads than the cores that this process may use only take them from each other.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sum(map(len, parts)) < _THREADED or cores == 1:
        return list(map(_checksum, parts))
    with ThreadPoolExecutor(min(_MOST_THREADS, cores)) as pool:
        return list(pool.map(_checksum, parts))


def _checksum(part: Any) -> int:
    found = Checksum(len(part))
    found.update(part)
    return found.value
