"""`Ranks`: the ranks of torch.distributed, which exchange seeds and fitness only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._executor import Executor, InProcess, KnownValues, Listener, RowFitness, Rows
from ._noise import Share


class Ranks(Executor):
    """Every rank runs the same search with the same seed, evaluates its share, and hears of the others' fitness.

    Member i is evaluated by rank i modulo the number of ranks. Members are made from seeds where they are needed, so what
    travels is one (seed, fitness) pair for each member: 16 bytes, whatever the size of the model. The seeds prove that all
    ranks are doing the same; if not, `evaluate` raises.

    To learn, every rank draws the noise of all members again, so that the result is that of one process bit for bit. Where
    that costs more than to exchange a vector of the size of the model, each rank draws its share of the directions only and
    the sums are reduced: for models of more than 131,072 parameters, when (1 - 1 / ranks) * directions is at least 16 (drawing
    takes some 6 ns for each number, a network of 1 Gbit/s some 80). All ranks then have the same result, which is that of
    one process to rounding.

    A `checkpoint` is one path that all ranks can read; rank 0 writes it. If a rank is lost the others raise, and the same
    call goes on from the checkpoint, with as many ranks as there are then.

    Args:
        group: The process group; by default the one that `init_process_group` made.
        device: Where the pairs are gathered; with the NCCL back end, a CUDA device.

    Example:
        >>> from moduli.evolve import Ranks
        >>> Ranks.__name__  # on each rank: search(net, fitness, executor=Ranks(), seed=0)
        'Ranks'
    """

    def __init__(self, group: Any = None, device: torch.device | str = "cpu") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "Ranks needs torch.distributed: call torch.distributed.init_process_group on each rank first"
            )
        self.group, self.device = group, torch.device(device)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.keeps_files = self.rank == 0
        self.share = Share(self.rank, self.world, self._reduce)

    def _reduce(self, vector: Tensor) -> None:
        there = vector.to(self.device)
        with _explain_lost_rank():
            dist.all_reduce(there, group=self.group)
        if there is not vector:
            vector.copy_(there)

    def evaluate(
        self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: KnownValues, report: Listener
    ) -> dict[int, float]:
        """The fitness of every member that is not known, by index; `report` hears of each as it comes."""
        others = {i: known.get(i, 0.0) for i in range(len(seeds)) if i % self.world != self.rank or i in known}
        failure: BaseException | None = None
        mine: dict[int, float] = {}
        try:
            mine = InProcess().evaluate(fitness, rows, seeds, others, report)
        except RuntimeError as error:
            # The others are waiting: they are told before this rank gives up.
            failure = error
        width = -(-len(seeds) // self.world)
        pairs = torch.full((width, 2), -1.0, dtype=torch.float64, device=self.device)
        for member in range(self.rank, len(seeds), self.world):
            value = mine.get(member, known.get(member, torch.nan))
            pairs[member // self.world] = torch.tensor([float(seeds[member]), value], dtype=torch.float64)
        gathered = torch.empty(self.world * width, 2, dtype=torch.float64, device=self.device)
        with _explain_lost_rank():
            dist.all_gather_into_tensor(gathered, pairs, group=self.group)
        if failure is not None:
            raise failure
        table = gathered.cpu().view(self.world, width, 2).tolist()
        found: dict[int, float] = {}
        for member, seed in enumerate(seeds):
            told, value = table[member % self.world][member // self.world]
            if int(told) != seed:
                raise RuntimeError(
                    f"rank {member % self.world} evaluated member {member} with seed {int(told)}, rank {self.rank} expects "
                    f"{seed}: the ranks do not run the same search; give all of them the same method, settings and seed"
                )
            found[member] = value
            if member not in mine and member not in known:
                report(member, value)
        return found


@contextmanager
def _explain_lost_rank() -> Iterator[None]:
    """Say what it means that the others can't be reached."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"a rank was lost, or does not answer ({str(error).splitlines()[0]}); what was told is in the checkpoint, if there "
            "is one: start the ranks again with the same call, also with fewer"
        ) from error
