"""Sharded tensors (`torch.distributed.tensor.DTensor`): the local shard, its position, gathering and sharding.

A DTensor is recognised by its attributes, not its class: importing the class takes a second, and most programs have none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import find_storage

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets of a shard in the whole tensor, and its sizes."""


def is_sharded(tensor: object) -> bool:
    """Whether an object is a DTensor, or the class of DTensors.

    Example:
        >>> from moduli.layout import is_sharded
        >>> is_sharded(torch.ones(2))
        False
    """
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def any_sharded(tensors: Iterable[object]) -> bool:
    """Whether any of some objects is a DTensor; costs a dictionary lookup while DTensor is not imported.

    Example:
        >>> from moduli.layout import any_sharded
        >>> any_sharded([torch.ones(2)])
        False
    """
    return "torch.distributed.tensor" in sys.modules and any(map(_is_sharded_class, set(map(type, tensors))))


_is_sharded_class = functools.lru_cache(maxsize=256)(is_sharded)


def piece_of(tensor: Any) -> Tensor:
    """Return the local shard of a tensor, detached and sharing memory; a plain tensor is its own shard.

    Example:
        >>> from moduli.layout import piece_of
        >>> piece_of(torch.ones(2))
        tensor([1., 1.])
    """
    if not is_sharded(tensor):
        return tensor.detach()  # type: ignore[no-any-return]
    with torch.no_grad():
        piece = tensor.to_local()
    return (piece.wait() if hasattr(piece, "wait") else piece).detach()  # type: ignore[no-any-return]


def piece_like(piece: Tensor, like: Any, rest: tuple[int, ...] = ()) -> Any:
    """Return the DTensor whose local shard is `piece`, sharded like another tensor; `piece` itself if that one is plain.

    Args:
        piece: The local shard, of the sizes of the local shard of `like`.
        like: The tensor whose mesh and placements are used.
        rest: Sizes that follow those of `like`.

    Example:
        >>> from moduli.layout import piece_like
        >>> piece_like(torch.zeros(2), torch.ones(2))
        tensor([0., 0.])
    """
    if not is_sharded(like):
        return piece
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*like.shape, *rest))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a tensor share one memory location, as after `expand`, so that it can't be written."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def make_whole(tensor: Any) -> Tensor:
    """Gather a DTensor into a whole tensor in every process of its mesh, all of which must call this; others are returned.

    Example:
        >>> from moduli.layout import make_whole
        >>> make_whole(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def cut_like(whole: Tensor, like: Any) -> Any:
    """Shard a tensor that every process has whole like another tensor; each process slices its shard, nothing is sent.

    Example:
        >>> from moduli.layout import cut_like
        >>> cut_like(torch.zeros(2), torch.ones(2))
        tensor([0., 0.])
    """
    if not is_sharded(like) or is_sharded(whole):
        return whole
    return piece_like(cut(whole, find_box(like)).to(like.device).contiguous(), like)


def memory_of(tensor: Any) -> tuple[object, ...]:
    """Return a key that is equal for two tensors exactly if they are the same view of the same memory (of local shards).

    Example:
        >>> from moduli.layout import memory_of
        >>> x = torch.ones(2)
        >>> memory_of(x) == memory_of(x.view(2)), memory_of(x) == memory_of(x.clone())
        (True, False)
    """
    piece = piece_of(tensor)
    seen = find_storage(piece), piece.storage_offset(), tuple(piece.shape), piece.stride()
    return *seen, tensor.dtype, tensor.device, tuple(tensor.shape)


def show_pieces(modules: Iterable[nn.Module]) -> bool:
    """Reshard modules of FSDP2: after a forward pass their parameters may be gathered copies.

    Returns:
        Whether any of them is wrapped by `fully_shard`.

    Example:
        >>> from moduli.layout import show_pieces
        >>> show_pieces(torch.nn.Linear(2, 1).modules())
        False
    """
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    wrapped = [] if wrapper is None else [module for module in modules if isinstance(module, wrapper)]
    for module in wrapped:
        module.reshard()
    return bool(wrapped)


def find_box(tensor: Any) -> Box:
    """Return the box of the local shard of a tensor: the whole tensor, unless it is a DTensor.

    Example:
        >>> from moduli.layout import find_box
        >>> find_box(torch.ones(2, 3))
        ((0, 0), (2, 3))
    """
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    chunk = tensor.__create_chunk_list__()[0]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def cut(whole: Tensor, box: Box) -> Tensor:
    """Return the part of a whole tensor inside a box, as a view.

    Example:
        >>> from moduli.layout import cut
        >>> cut(torch.arange(4), ((1,), (2,)))
        tensor([1, 2])
    """
    offsets, sizes = box
    if sizes == tuple(whole.shape):
        return whole
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


def find_group(tensors: Iterable[Any]) -> Any:
    """Return the process group of the processes that hold shards of some tensors; None if it is all processes.

    Example:
        >>> from moduli.layout import find_group
        >>> find_group([]) is None
        True
    """
    ranks = sorted({rank for t in tensors if is_sharded(t) for rank in t.device_mesh.mesh.flatten().tolist()})
    if not ranks or len(ranks) == torch.distributed.get_world_size():
        return None
    return _make_group(tuple(ranks), torch.distributed.group.WORLD)


def gather_objects(value: Any, tensors: Iterable[Any]) -> list[Any]:
    """Gather an object from every process that holds shards of some tensors, in the order of the processes.

    Args:
        value: The object of this process; it is pickled.
        tensors: The tensors.
    """
    group = find_group(tensors)
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, value, group=group)
    return every


@functools.lru_cache(maxsize=64)
def _make_group(ranks: tuple[int, ...], world: Any) -> Any:
    """Return a process group, the same one for the same ranks and world: each new group starts threads that never end."""
    # Only these processes create the group: others may train another part of the model.
    return torch.distributed.new_group(list(ranks), use_local_synchronization=True)
