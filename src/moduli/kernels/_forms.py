"""The interface of forms: ways to run a graph over lists of tensors. `_choice` has the ordered list of them.

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
    """The facts besides the graph on which the choice of a form depends.

    Attributes:
        device: Where the tensors are.
        setting: The value of `MODULI_KERNELS`.
        plain: Why the function itself has to run; None if it need not.
        stepwise: Why operations have to run one by one (a dispatch mode observes them, the graph changes too often), or None.
    """

    device: torch.device
    setting: str
    plain: str | None
    stepwise: str | None


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a form: a piece of the lists, the arguments and the places of results.

    Attributes:
        request: The call.
        plan: Its plan.
        state: The addresses of its lists; None if the tensors have no memory.
        piece: The part of the lists that this form runs.
        targets: For each output the tensors that it goes to.
        scalars: The numbers of the graph, on the device of the piece.
        columns: For each role and output the addresses of the tensors; None if they have none.
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
        """Increment the versions of the tensors that a kernel writes, as an in-place operation of torch does."""
        for output, target in zip(self.plan.outputs, self.targets, strict=True):
            if output.kind == "new" or output.role in self.plan.private:
                continue
            written = self.choose(target)
            if torch.is_inference_mode_enabled():
                written = [tensor for tensor in written if not tensor.is_inference()]
            torch.autograd.graph.increment_version(written)


class Form(ABC):
    """A graph that is ready to run in one form.

    Args:
        graph: The graph.
        outputs: The places of its values.
        why: Why this form was chosen and no faster one.

    Attributes:
        name: Its name in `explain` and `MODULI_KERNELS`.
        sentence: A description for `explain`.
        compiled: Whether it is one pass of compiled code.
        fallback: The form that runs if this one can't run a call.
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
        """Return whether the form is meant for such tensors, so that `explain` gives a reason if it is not chosen."""
        return True

    @classmethod
    def find_problem(cls, graph: Graph, situation: Situation) -> str | None:
        """Return why the form can't run this graph there; None if it can."""
        return None

    @abstractmethod
    def run(self, work: Work) -> bool:
        """Run and return True; return False, with nothing done, if the form can't."""

    def find_running(self, state: PlanState | None) -> tuple[Form, str]:
        """Return the form that runs lists at these addresses, this one or its fallback, and why."""
        return self, self.why
