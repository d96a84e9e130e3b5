"""Tensors that several processes hold in pieces (`torch.distributed.tensor.DTensor`): what is held where, and both ways.

A DTensor is asked by what it can do, never by its class: importing that takes a second, and most programs have none.
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
"""Where a piece begins in the whole tensor, and its sizes."""


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor, or the class of them.

    Example:
        >>> from moduli.layout import is_sharded
        >>> is_sharded(torch.ones(2))
        False
    """
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def any_sharded(tensors: Iterable[object]) -> bool:
    """Whether any of them is a DTensor; asks next to nothing where no program has loaded those.

    Example:
        >>> from moduli.layout import any_sharded
        >>> any_sharded([torch.ones(2)])
        False
    """
    return "torch.distributed.tensor" in sys.modules and any(map(_is_sharded_class, set(map(type, tensors))))


_is_sharded_class = functools.lru_cache(maxsize=256)(is_sharded)


def piece_of(tensor: Any) -> Tensor:
    """What this process holds of a tensor, without a graph: the same memory; of a plain tensor all of it.

    Example:
        >>> from moduli.layout import piece_of
        >>> piece_of(torch.ones(2))
        tensor([1., 1.])
    """
    if not is_sharded(tensor):
        return tensor.detach()  # type: ignore[no-any-return]
    with torch.no_grad():
        found = tensor.to_local()
    return (found.wait() if hasattr(found, "wait") else found).detach()  # type: ignore[no-any-return]


def piece_like(piece: Tensor, held: Any, rest: tuple[int, ...] = ()) -> Any:
    """A piece as the DTensor that all processes make of theirs; beside a plain tensor it is whole already.

    Args:
        piece: What this process has, of the sizes of its piece of `held`.
        held: The tensor that it is laid out like.
        rest: Sizes that follow those of `held`.

    Example:
        >>> from moduli.layout import piece_like
        >>> piece_like(torch.zeros(2), torch.ones(2))
        tensor([0., 0.])
    """
    if not is_sharded(held):
        return piece
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*held.shape, *rest))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, held.device_mesh, held.placements, run_check=False, shape=shape, stride=stride)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are one place in memory, as `expand` makes them, so that it can't be written."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def make_whole(tensor: Any) -> Tensor:
    """A DTensor as the whole tensor, in every process; all that hold a piece take part. Any other as it is.

    Example:
        >>> from moduli.layout import make_whole
        >>> make_whole(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def cut_like(whole: Tensor, held: Any) -> Any:
    """A tensor that every process has whole, laid out like another: each keeps its piece, nothing is sent.

    Example:
        >>> from moduli.layout import cut_like
        >>> cut_like(torch.zeros(2), torch.ones(2))
        tensor([0., 0.])
    """
    if not is_sharded(held) or is_sharded(whole):
        return whole
    return piece_like(cut(whole, find_box(held)).to(held.device).contiguous(), held)


def memory_of(tensor: Any) -> tuple[object, ...]:
    """What two tensors have in common exactly if they are the same memory seen the same way, of DTensors their pieces.

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
    """Have modules of FSDP2 show their pieces: after a forward pass they may show whole parameters, which are copies.

    Returns:
        Whether any of them is wrapped by `fully_shard`.

    Example:
        >>> from moduli.layout import show_pieces
        >>> show_pieces(torch.nn.Linear(2, 1).modules())
        False
    """
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    found = [] if wrapper is None else [module for module in modules if isinstance(module, wrapper)]
    for module in found:
        module.reshard()
    return bool(found)


def find_box(tensor: Any) -> Box:
    """The piece of a tensor that this process holds: all of it, unless it is a DTensor.

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
    """The piece of a whole tensor, a view.

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
    """The processes that hold pieces of these tensors, as a process group; all processes are None.

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
    """What every process that holds pieces of these tensors has, in the order of the processes.

    Args:
        value: What this process has; it is pickled.
        tensors: The tensors.
    """
    group = find_group(tensors)
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, value, group=group)
    return every


@functools.lru_cache(maxsize=64)
def _make_group(ranks: tuple[int, ...], world: Any) -> Any:
    """One group for the same processes, as long as they are connected: each starts threads that never end."""
    # Only these processes know of the group: others may train another part of the model.
    return torch.distributed.new_group(list(ranks), use_local_synchronization=True)
