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
from ._plan import CallPlan, PlanState
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
        plan: Its plan: one kernel over whole tensors, which writes into roles.
        state: Where its lists were.
        lists: All lists, by role.
        held: The lists that the caller gave, by role: what is returned.
        given: The roles that are given at each call, in order; the others stay where they are.
        numbers: How many numbers follow them.
        private: The roles whose tensors are the caller's own.
        runtime: The compiled reader.
    """

    def __init__(
        self,
        plan: CallPlan,
        state: PlanState,
        lists: Sequence[tuple[torch.Tensor, ...]],
        held: Sequence[Any],
        given: Sequence[int],
        numbers: int,
        private: frozenset[int],
        runtime: Runtime,
    ) -> None:
        piece = plan.pieces[0]
        self._runtime, self._reads = runtime, plan.reads
        self._piece = piece  # whose arrays the kernel reads
        self._kernel: Any = piece.form.kernel.run  # type: ignore[attr-defined]
        self._lists, self._arguments = len(given), len(given) + numbers
        self._mode, self._inference = _backend.mode(), torch.is_inference_mode_enabled()
        self._elements, self._runs = piece.starts[-1], len(piece.sizes)
        self._numbers = piece.numbers or ((0.0,) if not numbers else ())
        # The lists that do not move are held: a tensor of one's own may be given other memory through another reference.
        self._held = [tensor.untyped_storage() for r, own in enumerate(lists) if r not in given for tensor in own]
        chosen = [lists[r] for r in given]
        written = {output.role for output in plan.outputs}
        self._count = plan.count
        self._lazy = [k for k, r in enumerate(given) if r not in private]
        self._counted = [k for k, r in enumerate(given) if any(o.role == r and not o.private for o in plan.outputs)]
        # The columns of the kernel: the roles, then for each output the role that it overwrites.
        roles = [*range(plan.roles), *(output.role for output in plan.outputs if output.role is not None)]
        position = {r: k for k, r in enumerate(given)}
        self._columns = [np.ascontiguousarray(state.columns[r]) for r in roles]
        ranges = state.written
        facts = runtime.facts(chosen)
        arrays: dict[str, Any] = {
            "lengths": array("q", [plan.count] * len(given)),
            "known": array("q") if facts is None else facts,
            "before": np.concatenate([state.columns[r] for r in given]),
            "extents": np.concatenate([plan.extents[r] for r in given]),
            "written": array("q", [r in written for r in given]),
            "begin": np.ascontiguousarray(ranges.begin),  # type: ignore[union-attr]
            "end": np.ascontiguousarray(ranges.end),  # type: ignore[union-attr]
            "fixed": array("Q", [column.ctypes.data for column in self._columns]),
            "source": array("q", [position.get(r, -1) for r in roles]),
        }
        self._arrays = arrays
        self._table = WarmTable(
            count=len(given),
            n=plan.count,
            ranges=len(arrays["begin"]),
            columns=len(roles),
            **{name: find_address(values) for name, values in arrays.items()},
        )
        self._warm = find_address(self._table)
        # What is returned: the list of a role, given at the call or before it.
        over = [at if kind == "role" else plan.outputs[at].role or 0 for kind, at in plan.results]
        self._returned = [(r, position.get(r)) for r in over]
        self._roles, self._single = held, plan.single
        self._now, self._blank = bytes(8 * plan.count * len(given)), bytes(8 * len(roles))
        sizes = (piece.sizes.buffer_info()[0], piece.starts.buffer_info()[0])
        self._sizes: tuple[int, int] = sizes
        #: Whether the reader can describe the tensors.
        self.works = facts is not None

    def run(self, args: Sequence[Any]) -> Any:
        """Run with these lists and numbers; `DIFFERENT`, with nothing done, where anything is not as it was."""
        count = self._lists
        numbers = args[count:]
        if len(args) != self._arguments or not _NUMBERS.issuperset(map(type, numbers)):
            return DIFFERENT
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() is not self._inference or is_transformed():
            return DIFFERENT
        if has_dispatch_mode() or _backend.mode() != self._mode:
            return DIFFERENT
        for reads in self._reads:
            if reads.find_change() is not None:
                return DIFFERENT
        lists = tuple(map(tuple, args[:count]))
        for own in lists:
            if len(own) != self._count:
                return DIFFERENT
        now, table = array("Q", self._now), array("Q", self._blank)
        columns = table.buffer_info()[0]
        if not self._runtime.bind(lists, self._warm, now.buffer_info()[0], columns):
            return DIFFERENT
        for k in self._lazy:  # which the reader does not tell
            if True in map(_is_negated, lists[k]):
                return DIFFERENT
        for k in self._counted:
            increment_version(lists[k])
        scalars = array("d", (*numbers, *self._numbers))
        address = scalars.buffer_info()[0]
        self._kernel(self._runs, columns, *self._sizes, address, _backend.threads(self._elements))
        if not self._returned:
            return None
        returned = [self._roles[r] if k is None else args[k] for r, k in self._returned]
        return returned[0] if self._single else tuple(returned)


def make_warm(request: Request, plan: CallPlan, state: PlanState | None, given: Sequence[str]) -> WarmCall | None:
    """Return the warm form of a call that was just made; None where it has none.

    Args:
        request: The call.
        plan: Its plan.
        state: Where its lists are.
        given: The names of the arguments that are given at each call: lists, then numbers.
    """
    runtime = _backend.runtime()
    if state is None or state.overlap or state.exact or plan.allocates or request.outs or not plan.count:
        return None
    one = len(plan.pieces) == 1 and isinstance(plan.pieces[0].form, CForm)
    whole = one and len(plan.pieces[0].indices) == plan.count and isinstance(plan.runs.owner, slice)
    names = [request.fused.role_name(role, request.marks) for role in range(plan.roles)]
    lists = [names.index(name) for name in given if name in names]
    ordered = [name in names for name in given] == [True] * len(lists) + [False] * (len(given) - len(lists))
    numbers = set(map(type, request.scalars)) <= _NUMBERS
    if not (whole and ordered and lists and numbers and isinstance(runtime, Runtime) and runtime.python):
        return None
    private = frozenset(role for role, name in enumerate(names) if name in request.fused.private)
    warm = WarmCall(plan, state, request.roles, request.given, lists, len(given) - len(lists), private, runtime)
    return warm if warm.works else None


def find_address(values: Any) -> int:
    """Return where an array, a NumPy array or a structure lies."""
    if isinstance(values, array):
        return values.buffer_info()[0]
    if isinstance(values, np.ndarray):
        return values.ctypes.data
    return ctypes.addressof(values)
