"""One file of what several processes hold in pieces: all take part in gathering, the first of them writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..layout import find_group, gather_objects, is_sharded, make_whole
from ._dtypes import order_for_file
from ._errors import CheckpointError
from ._replace import PathLike


def write_together(
    path: PathLike, tensors: Mapping[str, Tensor], write: Callable[[Iterable[tuple[str, Tensor]]], None]
) -> None:
    """Write tensors of which some are DTensors; returns in every process after the file is there.

    Args:
        path: The file, for errors.
        tensors: The tensors by name, in every process the same ones in the same order.
        write: Takes whole tensors one at a time and writes them; called in one process.

    Raises:
        CheckpointError: In every process, if the one that writes could not, or processes save different things.
    """
    distributed = torch.distributed
    group = find_group(tensors.values())
    asked = gather_objects([name for name, tensor in tensors.items() if is_sharded(tensor)], tensors.values())
    if any(names != asked[0] for names in asked):
        raise CheckpointError(f"the processes save different tensors in {str(path)!r}; call save alike in all of them")
    stream = _gather_each(order_for_file(tensors), writes=distributed.get_rank(group) == 0)
    failure: Exception | None = None
    if distributed.get_rank(group) == 0:
        try:
            write(stream)
        except Exception as error:  # noqa: BLE001 - raised below, when no other process waits any more
            failure = error
    for _ in stream:
        pass  # whatever was not written: the others wait for this process
    told = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    distributed.broadcast_object_list(told, group=group, group_src=0)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise CheckpointError(f"{str(path)!r} could not be written by the first process: {told[0]}")


def _gather_each(tensors: Iterable[tuple[str, Tensor]], writes: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if writes or is_sharded(tensor):
            yield name, make_whole(tensor.detach())


def choose_by_rank(values: list[Any]) -> Any:
    """What this process has saved, if there are as many as there were; otherwise None."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return values[distributed.get_rank()] if len(values) == distributed.get_world_size() else None
