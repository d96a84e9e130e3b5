"""Parameters of FullyShardedDataParallel (FSDP1): pieces of one flat vector, without the shapes of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_flat_shard
from ._needs import Across, ChainError

if TYPE_CHECKING:
    from .module import Module


def find_flat_group(model: torch.nn.Module | None, params: Sequence[Tensor]) -> Any:
    """The processes that hold the pieces; all of them (None) where no module of FSDP1 is known and all hold other ones."""
    modules = () if model is None else model.modules()
    groups = {id(group): group for module in modules if (group := _find_group(module)) is not None}
    if len(groups) > 1:
        raise ChainError(
            f"the FSDP1 modules of {type(model).__name__} are sharded over {len(groups)} process groups, so that no sum is over "
            "all parameters; use FSDP2 (fully_shard)"
        )
    if not groups:
        _check_pieces([param.detach() for param in params if is_flat_shard(param)])
    return next(iter(groups.values()), None)


def _check_pieces(pieces: Sequence[Tensor]) -> None:
    """Refuse pieces that several processes hold alike: only the module knows which sums are over all of them once."""
    own = [(tuple(piece.shape), piece.flatten()[:64].tolist()) for piece in pieces if piece.numel()]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    held = [each for each in every if each]
    if any(held.index(each) != i for i, each in enumerate(held)):
        raise ChainError(
            "several processes hold the same pieces of the flat vectors of FSDP1 (ShardingStrategy.HYBRID_SHARD or NO_SHARD), "
            "so that sums over processes would count them more than once; give the module itself instead of its parameters"
        )


def _find_group(module: torch.nn.Module) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    if not isinstance(module, FullyShardedDataParallel):
        return None
    if module.sharding_strategy is ShardingStrategy.NO_SHARD:
        raise ChainError(
            "FSDP1 with ShardingStrategy.NO_SHARD keeps whole parameters under flat ones; use DistributedDataParallel, or "
            "FSDP2 (fully_shard)"
        )
    return module.process_group


def check_flat(links: Sequence[Module], find_across: Callable[[Module], Across]) -> None:
    """Refuse links that need the shapes of tensors, or whole ones."""
    for link in links:
        if link.divides_params and callable(getattr(link, "filter", None)):
            raise ChainError(
                f"{type(link).__name__} chooses parameters by a function of tensors, but those here are pieces of the flat "
                "vectors of FSDP1 (FullyShardedDataParallel), which have no shapes. Give a pattern of names, such as "
                "'*.weight', or use FSDP2: torch.distributed.fsdp.fully_shard(net)"
            )
        across = find_across(link)
        if across in (Across.MATRICES, Across.EVERYTHING):
            raise ChainError(
                f"{type(link).__name__} needs {across.value}, but parameters here are pieces of the flat vectors of FSDP1 "
                "(FullyShardedDataParallel), which have no shapes. Use FSDP2: torch.distributed.fsdp.fully_shard(net)"
            )
