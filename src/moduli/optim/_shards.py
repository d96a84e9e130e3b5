"""Parameters that several processes hold in shards: what an optimizer can do with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels import is_sharded
from . import _fusion
from ._needs import ChainError

if TYPE_CHECKING:
    from .module import Module

__all__ = ["check", "is_sharded"]


def check(params: Iterable[Tensor], links: Sequence[Module]) -> bool:
    """Whether there are shards; a chain that would look at one process's shard only is refused."""
    from .chain import Chain
    from .transform import TensorTransform

    if not any(map(is_sharded, params)):
        return False
    for link in links:
        if isinstance(link, Chain):
            continue
        fits = isinstance(link, TensorTransform) and link.elementwise and not link.concat_params
        if isinstance(link, TensorTransform) and _fusion.measures(link):
            fits = fits and link.sharded
        if not isinstance(link, TensorTransform):
            fits = link.sharded
        if not fits:
            raise ChainError(
                f"{type(link).__name__} looks at all elements of a parameter, but parameters here are shards of tensors "
                "(DTensor, as FSDP makes them), of which each process holds a part. Pointwise links, ClipNorm, Normalize, "
                "OrthoGrad and line searches work on shards; for the others train with DistributedDataParallel"
            )
    return True
