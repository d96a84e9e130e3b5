"""The shortest way through a call: the lists are what they were, one kernel takes them all, nothing is allocated."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from . import _backend
from ._plan import Plan, State, locate
from ._runtime import Runtime

__all__ = ["STALE", "Hot", "hot_of"]

#: What a hot call returns when it can't be one: the long way then finds out why.
STALE = object()


class Hot:
    """A plan whose addresses are worked out. It holds no tensor."""

    def __init__(self, plan: Plan, shared: Runtime, facts: array[int], layout: array[int], lists: int) -> None:
        self._plan = plan
        self._check = shared.raw_check
        self._keep = (shared, facts, layout)
        self._facts = (layout.buffer_info()[0], facts.buffer_info()[0], plan.sizes.buffer_info()[0])
        self._lists = lists
        self._n = plan.count
        self._blank = bytes(8 * plan.count * lists)
        piece = plan.pieces[0]
        self._kernel = piece.form.kernel
        self._piece = (piece.sizes.buffer_info()[0], piece.starts.buffer_info()[0], piece.elements)
        self._written = [output.role for output in plan.outputs if output.role is not None and not output.quiet]
        self._columns = list(range(plan.roles))
        position = plan.roles
        for output in plan.outputs:
            self._columns.append(position if output.role is None else output.role)
            position += output.kind == "list"
        self._mask = sum(1 << column for column in set(self._columns[plan.roles :]))

    def _follow(self, state: State, moved: int, now: array[int], flats: Sequence[torch.Tensor]) -> State | None:
        """The state after only things that are read have moved (gradients, usually), or None for the long way."""
        if flats or moved & self._mask or state.ranges is None or state.overlap or state.exact:
            return None
        base, step = now.buffer_info()[0], 8 * self._n
        ranges = state.ranges.buffer_info()[0]
        for role in range(self._plan.roles):
            if moved >> role & 1:
                extents = self._plan.extents[role].buffer_info()[0]
                if self._keep[0].clash(state.written, ranges, self._n, base + step * role, extents):
                    return None
        tables = array("Q", [base + step * column for column in self._columns])
        found = State(now, state.bases, state.flats, ((None, tables),), state.ranges, state.written, False, False)
        self._plan.state = found
        return found

    def run(self, lists: list[list[torch.Tensor]], flats: Sequence[torch.Tensor], scalars: list[Any]) -> Any:
        """Run, or `STALE` with nothing written."""
        n, plan = self._n, self._plan
        for tensors in lists:
            if len(tensors) != n:
                return STALE
        state = plan.state
        if state is None or self._kernel is None:
            return STALE
        now = array("Q", self._blank)
        layout, facts, sizes = self._facts
        moved = self._check(
            tuple(lists), self._lists, n, layout, facts, sizes, now.buffer_info()[0], state.pointers.buffer_info()[0]
        )
        if moved < 0:
            return STALE
        if moved or (flats and tuple(vector.data_ptr() for vector in flats) != state.bases):
            state = self._follow(state, moved, now, flats) or locate(plan, lists, flats, (state, moved, now))
        if state.overlap:
            return STALE
        # Versions first: what must not be written is refused here.
        for role in self._written:
            increment_version(lists[role])
        for tensors in lists[plan.roles :]:
            increment_version(tensors)
        if flats:
            increment_version(flats)
        numbers = array("d", scalars or (0.0,))
        elements = self._piece[2]
        self._kernel.run(
            n,
            state.tables[0][1].buffer_info()[0],
            self._piece[0],
            self._piece[1],
            numbers.buffer_info()[0],
            1 if elements < 32768 else _backend.threads(elements),
        )
        return None


def hot_of(plan: Plan, lists: Sequence[list[torch.Tensor]]) -> Hot | None:
    """The hot form of a plan, where it has one."""
    if len(plan.pieces) != 1 or plan.opaque is not None or plan.count == 0 or torch.is_inference_mode_enabled():
        return None
    piece = plan.pieces[0]
    shared = _backend.native()
    if piece.form.kernel is None or piece.indices is not None or isinstance(shared, str) or shared.torch is None:
        return None
    # New storage takes its shapes from the first role, and the compiled check knows numbers of elements only.
    if any(output.kind in ("new", "newflat") for output in plan.outputs):
        return None
    facts = shared.facts(lists)
    return None if facts is None else Hot(plan, shared, facts, shared.torch, len(lists))
