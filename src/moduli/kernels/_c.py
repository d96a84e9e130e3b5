"""The form for the CPU: the graph as a C loop over tables of addresses, built by the system's compiler."""

from __future__ import annotations

from array import array

import numpy as np

from . import _backend
from ._backend import Kernel, KernelError
from ._emit_c import emit
from ._forms import Form, Outputs, Situation, Work
from ._graph import Graph
from ._operations import NoFormError
from ._squares import add_runs


class CForm(Form):
    """A compiled kernel."""

    name = "c"
    sentence = "a compiled kernel, one pass, {threads}"
    compiled = True

    def __init__(self, graph: Graph, outputs: Outputs, why: str) -> None:
        super().__init__(graph, outputs, "compiled")
        try:
            source = emit(graph, [(node, dtype) for node, dtype, _ in outputs])
        except NoFormError as missing:
            raise NoFormError(f"{missing} has no C form") from None
        built = _backend.kernel(source)
        if isinstance(built, str):
            if _backend.mode() == "c":
                raise KernelError(f"MODULI_KERNELS=c, but the kernel can't be compiled: {built}")
            raise NoFormError(built)
        self.kernel: Kernel = built

    @classmethod
    def concerns(cls, situation: Situation) -> bool:
        """Return whether the tensors are on the CPU, and no other form was requested there."""
        return situation.device.type == "cpu" and situation.setting != "triton"

    @classmethod
    def find_problem(cls, graph: Graph, situation: Situation) -> str | None:
        """Return why operations have to run one by one; None if they need not."""
        setting = situation.setting
        return situation.stepwise or (f"MODULI_KERNELS={setting}" if setting not in ("auto", "c") else None)

    def run(self, work: Work) -> bool:
        """Run the kernel over the runs of a piece."""
        work.count_versions()
        piece, numbers = work.piece, array("d", work.scalars or (0.0,))
        threads, slots = _backend.threads(piece.starts[-1]), work.plan.squares
        before = len(numbers)
        if slots:
            numbers.frombytes(bytes(8 * threads * len(piece.sizes) * slots))
        self.kernel.run(
            len(piece.sizes),
            work.table.buffer_info()[0],
            piece.sizes.buffer_info()[0],
            piece.starts.buffer_info()[0],
            numbers.buffer_info()[0],
            threads,
        )
        if slots:
            partial = np.frombuffer(numbers)[before:].reshape(threads, len(piece.sizes), slots)
            owner = work.plan.runs.owner
            owner = None if isinstance(owner, slice) else owner[piece.runs]
            add_runs(work.request.squares, partial, piece.indices, owner)
        return True
