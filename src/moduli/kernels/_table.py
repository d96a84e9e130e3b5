"""The table that a Triton kernel reads: where tensors are, how large, and which part of them each program works on."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def choose_block(compute: torch.dtype, roles: int) -> tuple[int, int]:
    """Elements of a chunk, and warps of a program, by two rules.

    A thread holds eight elements of each role where values are computed in float32, so that accesses are 16 bytes wide and
    two of them are under way; four in float64, whose values take two registers; half as many where there are more than
    eight roles and outputs, which would leave too few registers. A program has four warps, so that several programs
    share a processor and hide each other's waiting. `MODULI_TRITON_BLOCK` sets the number of elements.
    """
    given = os.environ.get("MODULI_TRITON_BLOCK")
    if given is not None:
        block = int(given) if given.isdecimal() else 0
        if not 64 <= block <= 65536 or block & (block - 1):
            raise ValueError(f"MODULI_TRITON_BLOCK is {given!r}; give a power of two from 64 to 65536, or unset it")
        return block, 4 if block < 4096 else 8
    each = 4 if compute is torch.float64 else 8
    return 128 * (each if roles <= 8 else each // 2), 4


class Table:
    """Rows (size and addresses of each tensor) and chunks (tensor and first element), on a device.

    Made again only for other sizes. Where addresses change the rows are copied again, from pinned memory, without waiting.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], columns: int, block: int) -> None:
        self.device = device
        self.block = block
        self.sizes = np.asarray(sizes, np.int64)
        self.elements = int(self.sizes.sum())
        self.host = np.zeros((len(self.sizes), columns + 1), np.int64)
        self.host[:, 0] = self.sizes
        each = -(-self.sizes // block)
        #: How many programs it takes.
        self.programs = int(each.sum())
        first = np.repeat(np.cumsum(each) - each, each)
        self._starts = (np.arange(self.programs) - first) * block
        self._owners = np.repeat(np.arange(len(self.sizes)), each)
        self.rows: torch.Tensor | None = None
        self.chunks: torch.Tensor | None = None
        self.aligned = False
        self.lock = threading.Lock()
        #: How often rows were copied to the device.
        self.uploads = 0
        self._stream: Any = None
        self._addresses: Any = None
        self._kept: list[torch.Tensor] = []

    def point(self, addresses: Sequence[np.ndarray[Any, Any]]) -> None:
        """Have the rows say where the tensors are now: an array for each column."""
        stream, capturing = _find_stream(self.device)
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
        self._upload(capturing)
        self._stream = stream

    def pretend(self) -> None:
        """Make the rows without addresses, for tensors that have none."""
        if self.rows is None:
            self.rows = torch.empty(self.host.shape, dtype=torch.int64, device=self.device)
            self.chunks = torch.empty((self.programs, 2), dtype=torch.int64, device=self.device)

    def _upload(self, capturing: bool) -> None:
        self.uploads += 1
        if self.chunks is None:
            self.chunks = self._send(np.stack([self._owners, self._starts], 1), None, capturing)
        self.rows = self._send(self.host, self.rows, capturing)

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


def _find_stream(device: torch.device) -> tuple[Any, bool]:
    """The current stream of a device, and whether it is being captured in a graph."""
    if device.type == "cpu":
        return None, False
    stream = torch.accelerator.current_stream(device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return stream.stream_id, capturing
