"""What a form is: one way to run a graph over lists of tensors. `_choice` has the ordered list of them.

A form for another kind of device is one file with a subclass of `Form`, and one entry in that list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ._graph import Graph

if TYPE_CHECKING:
    from ._call import Request
    from ._plan import CallPlan, Piece, PlanState

#: For each value that a graph computes: its node, the dtype of its storage, and the role it overwrites or None.
Outputs = Sequence[tuple[int, torch.dtype, int | None]]


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice of form depends on besides the graph.

    Attributes:
        device: Where the tensors are.
        setting: The value of `MODULI_KERNELS`.
        plain: Why the function itself has to run, if it has.
        seen: Why operations of torch have to run one by one (a dispatch mode watches them, the graph changes too often).
    """

    device: torch.device
    setting: str
    plain: str | None
    seen: str | None


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a form: a piece of the lists, what is given and where results go.

    Attributes:
        request: The call.
        plan: Its plan.
        state: Where its lists are; None where the tensors have no memory to look at.
        piece: The part of the lists that this form runs.
        targets: For each output the tensors that it goes to.
        scalars: The numbers of the graph, on the device of the piece.
        columns: For each role and output the addresses of the tensors; None where they have none.
        table: The addresses of the columns.
    """

    request: Request
    plan: CallPlan
    state: PlanState | None
    piece: Piece
    targets: Sequence[Any]
    scalars: Sequence[Any]
    columns: Any
    table: Any

    def choose(self, tensors: Any) -> Sequence[torch.Tensor]:
        """Return the tensors of a list that belong to the piece."""
        indices = self.piece.indices
        return tensors if len(indices) == self.plan.count else [tensors[i] for i in indices]

    def count_versions(self) -> None:
        """Count up the versions of what a kernel writes, as an in-place operation of torch does."""
        for output, target in zip(self.plan.outputs, self.targets, strict=True):
            if output.kind == "new" or output.role in self.plan.private:
                continue
            written = self.choose(target)
            if torch.is_inference_mode_enabled():
                written = [tensor for tensor in written if not tensor.is_inference()]
            torch.autograd.graph.increment_version(written)


class Form(ABC):
    """A graph that is ready to run in one way.

    Args:
        graph: The graph.
        outputs: Where its values go.
        why: Why this form was chosen and no faster one.

    Attributes:
        name: What `explain` and `MODULI_KERNELS` call it.
        sentence: What it does, for `explain`.
        compiled: Whether it is one pass of compiled code.
        fallback: The form that runs where this one finds at a call that it can't.
    """

    name: ClassVar[str]
    sentence: ClassVar[str]
    compiled: ClassVar[bool] = False
    fallback: Form | None = None

    def __init__(self, graph: Graph, outputs: Outputs, why: str) -> None:
        self.graph = graph
        self.outputs = outputs
        self.why = why

    @classmethod
    def concerns(cls, situation: Situation) -> bool:
        """Whether the form is meant for such tensors at all, so that its absence is worth a reason."""
        return True

    @classmethod
    def find_problem(cls, graph: Graph, situation: Situation) -> str | None:
        """Return why the form can't run this graph there; None where it can."""
        return None

    @abstractmethod
    def run(self, work: Work) -> bool:
        """Run; False, with nothing done, where it turns out that the form can't."""

    def find_running(self, state: PlanState | None) -> tuple[Form, str]:
        """Return the form that runs lists in these places, this one or its fallback, and why."""
        return self, self.why
