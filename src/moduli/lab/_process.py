"""Whether another process sleeps, or only waits for its turn on a busy machine."""

import time
from pathlib import Path

# The share of a processor that a sleeping worker still uses, for the thread that checks whether its parent is there.
BUSY = 0.02


class ProcessWatch:
    """A watch over a process, which reports when it has slept for too long.

    Args:
        pid: The process.
        patience: How many seconds it may sleep.

    >>> import os
    >>> ProcessWatch(os.getpid(), 60.0).has_slept()
    False
    """

    def __init__(self, pid: int, patience: float) -> None:
        self.patience, self._file = patience, Path(f"/proc/{pid}/stat")
        self._since, self._used = time.monotonic(), self._read()[1]

    def has_slept(self) -> bool:
        """Whether it slept since the last sign of work, for longer than `patience`; False if the system does not report it."""
        state, used = self._read()
        now = time.monotonic()
        if used is None or self._used is None:
            return False
        if state in "RD" or used - self._used > BUSY * max(now - self._since, 1.0):
            self._since, self._used = now, used
        return now - self._since > self.patience

    def _read(self) -> tuple[str, float | None]:
        """Return the state of the process, and its processor seconds; None if the system does not report them."""
        try:
            fields = self._file.read_text().rpartition(")")[2].split()
            return fields[0], (int(fields[11]) + int(fields[12])) / 100
        except (OSError, IndexError, ValueError):
            return "", None
