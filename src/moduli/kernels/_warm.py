"""A bound call that was made before: one comparison in C, then the kernel.

In training only gradients move: they are new tensors at every step. So the lists that are given are compared with the plan and
their addresses written into the kernel's table by one call, and only a difference leaves it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .._torch import has_dispatch_mode, in_forward_ad, in_transform
from . import _backend
from ._c import CForm
from ._plain import arrange_results
from ._plan import CallPlan, PlanState, Ranges
from ._runtime import Runtime, WarmTable

if TYPE_CHECKING:
    from ._call import Request

_NUMBERS = frozenset({float, int})
_is_negated = torch.Tensor.is_neg
#: What a warm call returns where a plan has to be found.
DIFFERENT = object()


def is_transformed() -> bool:
    """Whether torch is doing something with operations other than running them."""
    return torch.compiler.is_compiling() or in_transform() or in_forward_ad()


class WarmCall:
    """What a call looked like, where its lists were, and its kernel. Never changed once it is made.

    Args:
        request: The call.
        plan: Its plan: one kernel over whole tensors, which writes into roles.
        state: Where its lists were.
        given: The roles that are given at each call, in order; the others stay where they are.
        facts: What the tensors of these roles look like.
        runtime: The compiled reader.
    """

    def __init__(
        self,
        request: Request,
        plan: CallPlan,
        state: PlanState,
        given: Sequence[int],
        facts: array[int],
        runtime: Runtime,
    ) -> None:
        piece = plan.pieces[0]
        self._runtime, self._reads = runtime, plan.reads
        self._piece = piece  # whose arrays the kernel reads
        self._kernel: Any = piece.form.kernel.run  # type: ignore[attr-defined]
        self._lists, self._arguments = len(given), len(given) + len(request.scalars)
        self._mode, self._inference = _backend.mode(), torch.is_inference_mode_enabled()
        self._elements, self._runs, self._lengths = piece.starts[-1], len(piece.sizes), frozenset({plan.count})
        self._sizes = (piece.sizes.buffer_info()[0], piece.starts.buffer_info()[0])
        self._numbers = piece.numbers or ((0.0,) if not request.scalars else ())
        # The lists that do not move are held: a tensor of one's own may be given other memory through another reference.
        fixed = [own for role, own in enumerate(request.roles) if role not in given]
        self._storages = [tensor.untyped_storage() for own in fixed for tensor in own]
        self._lazy = [k for k, role in enumerate(given) if role not in plan.private]
        self._counted = [k for k in self._lazy if given[k] in plan.written]
        # The columns of the kernel: the roles, then for each output the role that it overwrites.
        over = [output.role or 0 for output in plan.outputs]
        roles = [*range(plan.roles), *over]
        position = {role: k for k, role in enumerate(given)}
        self._checked = _CheckedTable(plan, state, given, facts, [(role, position.get(role, -1)) for role in roles])
        self._address = self._checked.address
        # What is returned: the list of a role, given at the call or before it.
        returned = [at if kind == "role" else over[at] for kind, at in plan.graph.results]
        self._returned = [(request.given[role], position.get(role)) for role in returned]
        self._single = plan.graph.single
        self._now, self._blank = bytes(8 * plan.count * len(given)), bytes(8 * len(roles))

    def _is_repeated(self, args: Sequence[Any], lists: Sequence[tuple[Any, ...]]) -> bool:
        """Whether everything but the tensors is as it was."""
        if len(args) != self._arguments or not _NUMBERS.issuperset(map(type, args[self._lists :])):
            return False
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() is not self._inference or is_transformed():
            return False
        if has_dispatch_mode() or _backend.mode() != self._mode:
            return False
        for reads in self._reads:
            if reads.find_change() is not None:
                return False
        return self._lengths.issuperset(map(len, lists))

    def run(self, args: Sequence[Any]) -> Any:
        """Run with these lists and numbers; `DIFFERENT`, with nothing done, where anything is not as it was."""
        lists = tuple(map(tuple, args[: self._lists]))
        if not self._is_repeated(args, lists):
            return DIFFERENT
        now, table = array("Q", self._now), array("Q", self._blank)
        columns = table.buffer_info()[0]
        if not self._runtime.bind(lists, self._address, now.buffer_info()[0], columns):
            return DIFFERENT
        for k in self._lazy:  # which the reader does not tell
            if True in map(_is_negated, lists[k]):
                return DIFFERENT
        for k in self._counted:
            increment_version(lists[k])
        scalars = array("d", (*args[self._lists :], *self._numbers))
        address = scalars.buffer_info()[0]
        self._kernel(self._runs, columns, *self._sizes, address, _backend.threads(self._elements))
        if not self._returned:
            return None
        return arrange_results([held if k is None else args[k] for held, k in self._returned], self._single)


class _CheckedTable:
    """The addresses and looks that the reader compares lists with, and the memory that holds them.

    Args:
        plan: The plan of the call.
        state: Where its lists were.
        given: The roles that are given at each call.
        facts: What their tensors look like.
        columns: For each column of the kernel its role, and its position among the given ones or -1.
    """

    def __init__(
        self,
        plan: CallPlan,
        state: PlanState,
        given: Sequence[int],
        facts: array[int],
        columns: Sequence[tuple[int, int]],
    ) -> None:
        ranges = state.written or Ranges(*[np.empty(0, np.uint64)] * 3)
        self._fixed = [np.ascontiguousarray(state.columns[role]) for role, _ in columns]
        arrays: dict[str, Any] = {
            "lengths": array("q", [plan.count] * len(given)),
            "known": facts,
            "before": np.concatenate([state.columns[role] for role in given]),
            "extents": np.concatenate([plan.extents[role] for role in given]),
            "written": array("q", [role in plan.written for role in given]),
            "begin": ranges.begin,
            "end": ranges.end,
            "fixed": array("Q", [column.ctypes.data for column in self._fixed]),
            "source": array("q", [k for _, k in columns]),
        }
        self._arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
        self._table = WarmTable(
            count=len(given),
            n=plan.count,
            ranges=len(ranges.begin),
            columns=len(columns),
            **{name: values.ctypes.data for name, values in self._arrays.items()},
        )
        self.address = ctypes.addressof(self._table)


def make_warm(request: Request, plan: CallPlan, state: PlanState | None, names: Sequence[str]) -> WarmCall | None:
    """Return the warm form of a call that was just made; None where it has none.

    Args:
        request: The call.
        plan: Its plan.
        state: Where its lists are.
        names: The arguments that are given at each call: lists, then numbers.
    """
    roles = {name: role for role, name in enumerate(request.names)}
    given = [roles[name] for name in names if name in roles]
    if not given or not roles.keys() >= set(names[: len(given)]):
        return None
    runtime = _backend.runtime()
    if state is None or not _is_one_kernel(request, plan, state) or isinstance(runtime, str):
        return None
    facts = runtime.facts([request.roles[role] for role in given])
    return None if facts is None else WarmCall(request, plan, state, given, facts, runtime)


def _is_one_kernel(request: Request, plan: CallPlan, state: PlanState) -> bool:
    """Whether a call is one kernel over whole tensors that writes into roles, with numbers of the host."""
    if state.overlap or state.exact or plan.allocates or request.outs or len(plan.pieces) != 1:
        return False
    dense = isinstance(plan.runs.owner, slice) and _NUMBERS.issuperset(map(type, request.scalars))
    return dense and isinstance(plan.pieces[0].form, CForm)
