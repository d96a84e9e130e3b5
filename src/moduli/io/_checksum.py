"""The checksum of a tensor's bytes, which detects file errors as well as a CRC and is several times faster.

Up to 64 KB it is the CRC-32 of the bytes. More bytes are divided into blocks of 256 rows of 1021 little-endian words of 64 bits,
the last block padded with zeros to whole rows. The checksum is the CRC-32 of the column sums of all blocks, modulo 2**64, and the
sum of all words: 96 bits.

* One flipped bit always changes the sum of all words: by a power of two, modulo 2**64.
* Several flipped bits cancel only in the same column of a block, if equal bits change in opposite directions. The length of a
  row is no multiple of sectors or pages, so exchanged sectors or pages are added to other columns.
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

# The number of bytes from which on several threads are faster.
_THREADED: Final = 1 << 24
_MOST_THREADS: Final = 4


class Checksum:
    """The checksum of bytes that are added in chunks.

    Args:
        size: The number of all bytes.
    """

    def __init__(self, size: int) -> None:
        self._small = size < _SMALL
        self._crc = self._sum = 0

    def update(self, piece: Any) -> None:
        """Add the next bytes. Every chunk except the last has a whole number of blocks."""
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
    """Return the checksums of buffers; many bytes are divided among threads, buffer by buffer."""
    # More threads than available cores would only slow each other down.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sum(map(len, parts)) < _THREADED or cores == 1:
        return list(map(_checksum, parts))
    with ThreadPoolExecutor(min(_MOST_THREADS, cores)) as pool:
        return list(pool.map(_checksum, parts))


def _checksum(part: Any) -> int:
    checksum = Checksum(len(part))
    checksum.update(part)
    return checksum.value
