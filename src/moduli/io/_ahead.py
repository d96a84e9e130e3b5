"""Computing what comes next while what came is being written: an iterator that is run in a thread, a few items ahead."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Final, TypeVar

T = TypeVar("T")

_END: Final = object()


@contextmanager
def run_ahead(items: Iterator[T], ahead: int = 1) -> Generator[Iterator[T]]:
    """Run an iterator in a thread of its own, and give its items in their order.

    At most `ahead` items wait, one more is being computed, and one is with the caller. An exception of the iterator is raised where
    its item would have been. When the block ends, also by an exception, the thread has ended: it stops after the item it is at.

    Args:
        items: What to iterate over. Nothing else may use it, or what it reads from, until the block has ended.
        ahead: How many items may wait.

    Example:
        >>> with run_ahead(iter("abc")) as letters:
        ...     print(*letters)
        a b c
    """
    waiting: Queue[tuple[Any, BaseException | None]] = Queue(ahead)
    stopped = Event()
    thread = Thread(target=_fill, args=(items, waiting, stopped), name="moduli-ahead", daemon=True)
    thread.start()
    try:
        yield _take(waiting)
    finally:
        stopped.set()
        _drain(waiting)
        thread.join()


def _fill(items: Iterator[Any], waiting: "Queue[Any]", stopped: Event) -> None:
    """Put items into a queue until there are none, one cannot be computed, or the block has ended."""
    item, error = None, None
    while item is not _END and error is None and not stopped.is_set():
        try:
            item = next(items, _END)
        except BaseException as reason:  # noqa: BLE001 - it is raised in the thread that waits for the item
            item, error = None, reason
        _put(waiting, (item, error), stopped.is_set)
        if item is not _END:
            item = None  # the queue has it: keeping it here would hold one more in memory


def _put(waiting: "Queue[Any]", item: Any, is_stopped: Callable[[], bool]) -> None:
    while not is_stopped():
        try:
            waiting.put(item, timeout=0.1)
            return
        except Full:  # look again whether the block has ended
            continue


def _take(waiting: "Queue[Any]") -> Iterator[Any]:
    while True:
        item, error = waiting.get()
        if error is not None:
            raise error
        if item is _END:
            return
        yield item
        del item  # before the next one is waited for


def _drain(waiting: "Queue[Any]") -> None:
    """Make room, so that a thread that waits to put an item can end."""
    while True:
        try:
            waiting.get_nowait()
        except Empty:
            return
