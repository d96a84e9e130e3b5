"""The address table that a Triton kernel reads on the device, and the number of elements per program."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def choose_block(compute: torch.dtype, roles: int) -> tuple[int, int]:
    """Return the number of elements of a chunk, and of warps of a program, by two rules.

    A thread processes eight elements of each role if values are computed in float32, so that accesses are 16 bytes wide and
    two of them are in flight; four in float64, whose values take two registers; half as many if there are more than
    eight roles and outputs, which would leave too few registers. A program has four warps, so that several programs
    share a processor and hide each other's latency. `MODULI_TRITON_BLOCK` sets the number of elements.
    """
    setting = os.environ.get("MODULI_TRITON_BLOCK")
    if setting is not None:
        block = int(setting) if setting.isdecimal() else 0
        if not 64 <= block <= 65536 or block & (block - 1):
            raise ValueError(f"MODULI_TRITON_BLOCK is {setting!r}; give a power of two from 64 to 65536, or unset it")
        return block, 4 if block < 4096 else 8
    each = 4 if compute is torch.float64 else 8
    return 128 * (each if roles <= 8 else each // 2), 4


class Table:
    """Rows (size and addresses of each tensor) and chunks (tensor and first element), on a device.

    Rebuilt only for other sizes. If addresses change the rows are copied again, from pinned memory, without waiting.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], columns: int, block: int) -> None:
        self.device = device
        self.block = block
        self.sizes = np.asarray(sizes, np.int64)
        self.elements = int(self.sizes.sum())
        self.host = np.zeros((len(self.sizes), columns + 1), np.int64)
        self.host[:, 0] = self.sizes
        each = -(-self.sizes // block)
        #: The number of programs.
        self.programs = int(each.sum())
        starts = (np.arange(self.programs) - np.repeat(np.cumsum(each) - each, each)) * block
        self._chunks = np.stack([np.repeat(np.arange(len(self.sizes)), each), starts], 1)
        self.rows: torch.Tensor | None = None
        self.chunks: torch.Tensor | None = None
        self.aligned = False
        self.lock = threading.Lock()
        self._stream: Any = None
        self._addresses: Any = None
        self._kept: list[torch.Tensor] = []

    def point(self, addresses: Sequence[np.ndarray[Any, Any]] | None) -> None:
        """Write the current addresses to the rows: an array for each column; None for tensors without memory."""
        if addresses is None:
            if self.rows is None:
                self.rows = torch.empty(self.host.shape, dtype=torch.int64, device=self.device)
                self.chunks = torch.empty((self.programs, 2), dtype=torch.int64, device=self.device)
            return
        stream, capturing = None, False
        if self.device.type != "cpu":
            stream = torch.accelerator.current_stream(self.device).stream_id
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        same = self.rows is not None and stream == self._stream
        if same and addresses is self._addresses and not capturing:
            return
        self._addresses = addresses
        now = np.stack([column.astype(np.uint64).view(np.int64) for column in addresses], 1)
        if same and np.array_equal(now, self.host[:, 1:]):
            return
        self.host[:, 1:] = now
        self.aligned = not bool((now[self.sizes > 0] & 15).any())
        if not same or capturing:
            # Another stream may still read the old rows, and a captured copy reads its source again at every replay.
            self.rows = self.chunks = None
        if self.chunks is None:
            self.chunks = self._send(self._chunks, None, capturing)
        self.rows = self._send(self.host, self.rows, capturing)
        self._stream = stream

    def _send(self, values: np.ndarray[Any, Any], over: torch.Tensor | None, capturing: bool) -> torch.Tensor:
        source = torch.from_numpy(values.copy())
        if self.device.type == "cpu":
            return source
        source = source.pin_memory()
        if over is None:
            over = torch.empty(source.shape, dtype=torch.int64, device=self.device)
        over.copy_(source, non_blocking=True)
        if capturing:
            self._kept += [source, over]
        return over
