"""What several processes that train one model must have in common: the loss, derivatives, and random numbers.

Gradients of `backward` are averaged by what wraps the model (DistributedDataParallel). Everything else is known to one
process only: the loss of its data, derivatives taken by `torch.autograd.grad` (which passes the hooks of the wrapper), and
what it draws at random. A link that used these as they are would take another step in every process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._needs import Across, ChainError, Need, keeps_graph
from ._shards import find_across
from ._vectors import fill_zeros

if TYPE_CHECKING:
    from ..population import Population
    from .module import Module


# Of links without a seed of their own, where several processes have to draw the same numbers.
COMMON_SEED = 0x6D6F64756C69


def are_several() -> bool:
    """Whether this process is one of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class OverProcesses:
    """The sum or the mean over all processes."""

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean

    def __call__(self, loss: Tensor) -> Tensor:
        return self.reduce([loss])[0]

    def reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New tensors with the sum or the mean of those of all processes; one exchange for each dtype and device."""
        out = [tensor.detach().clone() for tensor in tensors]
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, tensor in enumerate(out):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
        for places in kinds.values():
            flat = torch.cat([out[i].reshape(-1) for i in places])
            torch.distributed.all_reduce(flat)
            if self.mean:
                flat /= torch.distributed.get_world_size()
            for i, piece in zip(places, torch.split(flat, [out[i].numel() for i in places]), strict=True):
                out[i] = piece.view(out[i].shape)
        return out


def reduce_derivatives(reduce: Callable[[Tensor], Tensor] | None, found: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives of this process's loss made derivatives of the loss of all; as they are where there is one process."""
    return reduce.reduce(found) if isinstance(reduce, OverProcesses) else list(found)


def reduce_gradients(
    reduce: Callable[[Tensor], Tensor] | None, found: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients with a graph: the values are those of all processes, the graph is that of this one.

    Differentiated once more they give this process's product, which `reduce_derivatives` makes the product of all.
    """
    if not isinstance(reduce, OverProcesses):
        return list(found)
    own = fill_zeros(found, params)
    whole = reduce.reduce(own)
    return [_WithValues.apply(g, w) for g, w in zip(own, whole, strict=True)]  # type: ignore[no-untyped-call]


class _WithValues(torch.autograd.Function):
    """A tensor with the values of another, to the last bit, and its own history."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def choose_reduction(
    reduce: Any,
    model: torch.nn.Module | None,
    population: Population | None,
    links: Sequence[Module],
    in_pieces: bool,
) -> Callable[[Tensor], Tensor] | None:
    """How the losses of several processes become one for these links; a chain that would drift apart is refused.

    Args:
        reduce: As it was given to the optimizer.
        model: The module that was given, which tells whether processes train one model.
        population: The population that was given.
        links: All links.
        in_pieces: Whether processes hold pieces of the parameters, which then are those of one model.
    """
    if not callable(reduce) and reduce not in (None, "auto", "mean", "sum"):
        raise ValueError(f"reduce is {reduce!r}; it is 'mean', 'sum', a function of the loss, or None")
    if reduce is None or (reduce == "auto" and not are_several()):
        return None
    if population is not None and population.sharding is not None:
        if reduce == "auto":
            return None  # gradients and losses are those of the members here
        raise ChainError(
            f"each process holds other members of this population, so reduce={reduce!r} would mix them. Processes that share "
            "the data of one member as well are not supported: give each member its data where it is"
        )
    if population is not None and are_several() and reduce == "auto":
        raise ChainError(
            "there are several processes, and the members of a population would drift apart between them. Spread them over "
            "the processes with pop.shard(mesh); or say reduce='mean' where all processes train the same members on their "
            "own data, reduce=None where they have populations of their own"
        )
    if reduce == "auto":
        if not any(need.evaluates for link in links for need in link.all_needs()):
            return None
        one = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        if not one and not in_pieces:
            raise ChainError(
                "there are several processes, and this chain decides on the loss, so that they could take "
                "different decisions. Give the DistributedDataParallel (or FSDP) module itself, or say reduce='mean' (all "
                "processes train one model) or reduce=None (each trains its own)"
            )
        reduce = "mean"
    chosen = reduce if callable(reduce) else OverProcesses(mean=reduce == "mean")
    for link in links:
        _check(chosen, link.needs, type(link).__name__)
    return chosen


def is_called_from(module: str) -> bool:
    """Whether one of the innermost calls is of a function of that module; tools of torch do not say who they are."""
    frame = inspect.currentframe() if module in sys.modules else None
    for _ in range(12):
        if frame is None or frame.f_globals.get("__name__") == module:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def check_shares(links: Sequence[Module]) -> None:
    """Refuse links that need all parameters where torch's ZeroRedundancyOptimizer gives each process some of them."""
    for link in links if is_called_from("torch.distributed.optim.zero_redundancy_optimizer") else ():
        across = find_across(link)
        if across in (Across.SUMS, Across.EVERYTHING):
            raise ChainError(
                f"{type(link).__name__} needs {across.value}, but ZeroRedundancyOptimizer gives each process some of the "
                "parameters and does not say what the others have. Use FSDP2: torch.distributed.fsdp.fully_shard(net)"
            )


def _check(reduce: Callable[[Tensor], Tensor], needs: frozenset[Need], name: str) -> None:
    """Refuse what can't be had from several processes."""
    if Need.RESIDUALS in needs:
        raise ChainError(
            f"{name} makes a matrix of the residuals, of which each process has its own. Gather them in the closure "
            "(torch.distributed.nn.functional.all_gather) and say reduce=None, or train in one process"
        )
    if keeps_graph(needs) and not isinstance(reduce, OverProcesses):
        raise ChainError(
            f"{name} needs second derivatives, and reduce is a function of the loss, which does not say how those of "
            "several processes become one; say reduce='mean' or reduce='sum'"
        )
