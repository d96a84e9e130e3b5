"""Evaluates a function of members whose parameters are W + s A Bᵀ, without forming these sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..layout import call_with_tensors
from ._low_rank import RULES, LowRankTensor
from ._low_rank_rules import TABLE

RULES.update(TABLE)
# Layers that write statistics of their inputs into buffers.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class FunctionOfMember(nn.Module):
    """A module that calls a function with a member, so that `call_with_tensors` can replace its parameters.

    Args:
        member: The module whose parameters are replaced.
    """

    def __init__(self, member: nn.Module) -> None:
        super().__init__()
        self.member = member

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call the function with the module and the arguments."""
        return fn(self.member, *args)


def call_low_rank(
    caller: FunctionOfMember,
    fn: Callable[..., Any],
    args: Sequence[Any],
    dims: tuple[Any, ...],
    means: Mapping[str, Tensor],
    factors: Mapping[str, tuple[Tensor, Tensor]],
    vectors: Mapping[str, Tensor],
    spreads: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    count: int,
    report: dict[str, set[str]],
    randomness: str = "different",
) -> Any:
    """Call a function for every member and return the stacked results.

    Args:
        caller: The module of which all members are.
        fn: The function, of a module and the arguments.
        args: The arguments.
        dims: For each argument the axis along which members have separate slices, or None.
        means: The parameters that have low-rank noise, the same for all members.
        factors: A and B of each of these, with the members along the first axis; A with the scale of the noise.
        vectors: Other parameters, with the members along the first axis.
        spreads: Elementwise factors of the noise of matrices, the same for all members.
        count: The number of members.
        report: Receives for each name how products with the parameter were evaluated.
        randomness: As for `torch.vmap`.
    """
    shared, own = _copy_buffers(caller.member, count)

    def run(
        factors: Mapping[str, tuple[Tensor, Tensor]],
        vectors: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        *args: Any,
    ) -> Any:
        matrices = {
            name: LowRankTensor(name, means[name], a, b, report, spread=spreads.get(name))
            for name, (a, b) in factors.items()
        }
        state = {f"member.{name}": each for name, each in {**shared, **own, **vectors, **matrices}.items()}
        return call_with_tensors(caller, state, (fn, *args))

    # The other attention kernels have no batching rule, so that vmap would loop over members.
    with sdpa_kernel(SDPBackend.MATH):
        return torch.vmap(run, in_dims=(0, 0, 0, *dims), randomness=randomness)(factors, vectors, own, *args)


def _copy_buffers(member: nn.Module, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of the buffers, which a call may write to: shared ones, and stacked ones of each member.

    Only buffers that normalisation layers write to in training are stacked.
    """
    written = {
        f"{path}.{name}" if path else name
        for path, layer in member.named_modules()
        if isinstance(layer, _NORMS) and layer.training
        for name in layer._buffers
    }
    shared, own = {}, {}
    for name, buffer in member.named_buffers():
        if name in written:
            own[name] = torch.stack([buffer] * count)
        else:
            shared[name] = buffer.clone()
    return shared, own
