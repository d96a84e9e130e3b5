"""A fused call with bound lists: it stores its own plans, and repeats an earlier call on a fast path.

In training only gradients move: they are new tensors at every step. So the lists passed at a call are compared with the plan and
their addresses written into the kernel's table by one call in C, and only a difference leaves this path.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from os import environ
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .._torch import has_dispatch_mode, is_transformed
from . import _backend, _call
from ._backend import SETTING, SETTING_KEY, VARIABLES
from ._c import CForm
from ._plain import arrange_results
from ._plan import CallPlan, Plans, PlanState, Ranges
from ._reduce import CompiledReduction, are_plain, norm
from ._runtime import READ_ERRORS, Runtime, WarmTable
from ._squares import PartialSquares

if TYPE_CHECKING:
    from ._call import Request
    from ._fuse import Fused

_NUMBERS = frozenset({float, int})
_SCALARS = ("scalar", "whole")
_is_negated = torch.Tensor.is_neg
#: The result of a warm call that needs another plan.
DIFFERENT = object()


class Bound:
    """A fused call with bound lists. Created by `Fused.bind`.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> halve = kernels.fuse(lambda x, by: x / by, inplace="x").bind([torch.ones(2)])
        >>> halve(2.0)
        [tensor([0.5000, 0.5000])]
    """

    def __init__(
        self,
        fused: Fused,
        given: dict[str, Any],
        out: Any,
        flat: bool,
        offsets: Sequence[int] | None,
        norms: Mapping[str, str],
    ) -> None:
        self.fused = fused
        self._given, self._norms = given, norms
        self._values = [given.get(name) for name in fused.names]
        self._rest = [name for name in fused.names if name not in given and name not in norms]
        self._open = [fused.names.index(name) for name in self._rest]
        self._options = (out, flat, offsets)
        self._plans = Plans()
        # Bound lists of private roles do not move; others are checked in every call.
        self._stays = given.keys() <= fused.private
        self._warm: WarmCall | None = None
        #: Partial sums of squares of the last call.
        self.partial_squares: PartialSquares | torch.Tensor | None = None

    @property
    def squares(self) -> torch.Tensor | None:
        """Sums of squares of the last call (`record_square`), by tensor and slot; None if there are none."""
        partial = self.partial_squares
        return partial.read() if isinstance(partial, PartialSquares) else partial

    def explain(self) -> Any:
        """Return the form of the last call, and why it was chosen: an `Explanation`, or None before the first call.

        Example:
            >>> import torch
            >>> from moduli import kernels
            >>> count = kernels.fuse(lambda x, by: x + by).bind([torch.ones(3, dtype=torch.int64)])
            >>> count.explain(), count(1)
            (None, [tensor([2, 2, 2])])
            >>> count.explain().form
            'plain'
        """
        from ._explain import explain_plan

        return explain_plan(self._plans.kept[0], self._plans.kept[0].state) if self._plans.kept else None

    def __repr__(self) -> str:
        return f"{self.fused!r}.bind({', '.join(self._given)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run with the arguments that were not bound, in the order of the function's parameters."""
        warm = self._warm
        if warm is not None and not kwargs:
            result = warm.run(args, self)
            if result is not DIFFERENT:
                return result
        if len(args) > len(self._rest):
            names = ", ".join(self._rest)
            raise TypeError(f"{self!r} takes {len(self._rest)} more arguments ({names}), got {len(args)}")
        if len(args) == len(self._rest) and not kwargs:
            values: list[Any] = list(self._values)
            for i, value in zip(self._open, args, strict=True):
                values[i] = value
        else:
            named = {**self._given, **dict.fromkeys(self._norms), **dict(zip(self._rest, args, strict=False)), **kwargs}
            values = list(self.fused._arguments((), named))
        for name, role in self._norms.items():
            values[self.fused.names.index(name)] = norm(values[self.fused.names.index(role)])
        if is_transformed():
            return _call.call(self.fused, values, *self._options, self._plans)
        request = _call.Request(self.fused, values, *self._options)
        plan, state = _call.find_plan(request, self._plans)
        result = _call.run_plan(request, plan, state)
        self.partial_squares = request.squares
        if self._stays:
            self._warm = make_warm(request, plan, state, self._rest, self._norms)
        return result


class WarmCall:
    """A repeated call: the layouts and addresses of its lists, and its kernel. It is never changed after construction.

    Args:
        request: The call.
        plan: Its plan: one kernel over whole tensors, which writes into roles.
        state: The addresses of its lists.
        given: The roles that are passed at each call, in order; the others do not move.
        facts: The layouts of the tensors of these roles, for the compiled reader.
        runtime: The compiled reader.
        norms: The scalar that is the norm of a role, with that role.
    """

    def __init__(
        self,
        request: Request,
        plan: CallPlan,
        state: PlanState,
        given: Sequence[int],
        facts: array[int],
        runtime: Runtime,
        norms: Mapping[str, str],
    ) -> None:
        piece = plan.pieces[0]
        self._bind, self._reads = runtime.bind, [reads.get_comparison() for reads in plan.reads]
        self._piece = piece  # whose arrays the kernel reads
        self._kernel: Any = piece.form.kernel.run  # type: ignore[attr-defined]
        self._lists, self._arguments = len(given), len(given) + len(request.scalars) - len(norms)
        self._surroundings = (environ.get(SETTING), torch.is_inference_mode_enabled(), torch.get_default_dtype())
        self._elements, self._runs, self._lengths = piece.starts[-1], len(piece.sizes), frozenset({plan.count})
        self._short = self._elements < 2 * _backend.GRAIN  # not worth a second thread
        self._sizes = (piece.sizes.buffer_info()[0], piece.starts.buffer_info()[0])
        self._numbers = piece.numbers or ((0.0,) if not request.scalars else ())
        # Storages of bound lists are referenced, so that their memory is not freed if a tensor's `.data` is replaced.
        bound = (own for role, own in enumerate(request.roles) if role not in given)
        self._storages = [tensor.untyped_storage() for tensor in chain.from_iterable(bound)]
        self._lazy = [k for k, role in enumerate(given) if role not in plan.private]
        self._counted = [k for k in self._lazy if given[k] in plan.written]
        self._checked = _CheckedTable(plan, state, given, facts, runtime)
        # The positions of norms among the scalars, and of their lists among the passed ones.
        self._norms: list[tuple[int, int, CompiledReduction]] = []
        numbered = [name for name, mark in zip(request.fused.names, request.marks, strict=True) if mark in _SCALARS]
        for name, role in norms.items():
            k = given.index(request.names.index(role))
            tensors = (request.roles[given[k]],)
            reduction = CompiledReduction(tensors, runtime, runtime.facts(tensors) or facts)
            self._norms.append((numbered.index(name), 8 * plan.count * k, reduction))
        # The returned lists: of a role, passed at the call or bound.
        position = dict(zip(given, range(len(given)), strict=True))
        returned = [at if kind == "role" else plan.outputs[at].role or 0 for kind, at in plan.graph.results]
        self._returned = [(request.given[role], position.get(role)) for role in returned]
        self._single, self._squares = plan.graph.single, plan.squares
        self._now, self._blank = bytes(8 * plan.count * len(given)), bytes(8 * (plan.roles + len(plan.outputs)))

    def run(self, args: Sequence[Any], bound: Bound) -> Any:
        """Run with these lists and scalars; return `DIFFERENT`, with nothing done, if anything differs from the call before.

        Partial sums of squares are stored in the bound call.
        """
        lists, numbers = tuple(map(tuple, args[: self._lists])), args[self._lists :]
        if self._differs(lists, numbers):
            return DIFFERENT
        now, table = array("Q", self._now), array("Q", self._blank)
        columns = table.buffer_info()[0]
        try:
            if self._bind(lists, *self._checked.addresses, now.buffer_info()[0], columns):
                return DIFFERENT
        except READ_ERRORS:
            return DIFFERENT
        for k in self._lazy:  # not checked by the reader
            if True in map(_is_negated, lists[k]):
                return DIFFERENT
        for k in self._counted:
            increment_version(lists[k])
        scalars = array("d", (*numbers, *self._numbers))
        for i, offset, reduction in self._norms:
            scalars.insert(i, reduction.run_at("norm", now.buffer_info()[0] + offset))
        threads = 1 if self._short else _backend.threads(self._elements)
        before = len(scalars)
        if self._squares:
            scalars.frombytes(bytes(8 * threads * self._runs * self._squares))
        self._kernel(self._runs, columns, *self._sizes, scalars.buffer_info()[0], threads)
        if self._squares:
            bound.partial_squares = PartialSquares(scalars, before, (threads, self._runs, self._squares))
        if not self._returned:
            return None
        return arrange_results([own if k is None else args[k] for own, k in self._returned], self._single)

    def _differs(self, lists: Sequence[Sequence[torch.Tensor]], numbers: Sequence[Any]) -> bool:
        """Return whether arguments differ in number or type, or a mode, a setting or a global that the function reads."""
        if not (_NUMBERS.issuperset(map(type, numbers)) and self._lengths.issuperset(map(len, lists))):
            return True
        if torch.is_grad_enabled() or is_transformed() or has_dispatch_mode():
            return True
        for find_changed, names in self._reads:
            if find_changed(*names) >= 0:
                return True
        setting = environ[SETTING] if SETTING_KEY in VARIABLES else None
        surroundings = setting, torch.is_inference_mode_enabled(), torch.get_default_dtype()
        return surroundings != self._surroundings or len(lists) + len(numbers) != self._arguments


class _CheckedTable:
    """The addresses and layouts that the reader compares lists with, in arrays that this object keeps alive.

    Args:
        plan: The plan of the call.
        state: The addresses of its lists.
        given: The roles that are given at each call.
        facts: What their tensors look like.
        runtime: The compiled reader.
    """

    def __init__(
        self,
        plan: CallPlan,
        state: PlanState,
        given: Sequence[int],
        facts: array[int],
        runtime: Runtime,
    ) -> None:
        ranges = state.written or Ranges(*[np.empty(0, np.uint64)] * 3)
        # The columns of the kernel: the roles, then for each output the role that it overwrites.
        columns = [*range(plan.roles), *(output.role or 0 for output in plan.outputs)]
        position = dict(zip(given, range(len(given)), strict=True))
        self._fixed = [np.ascontiguousarray(state.columns[role]) for role in columns]
        arrays: dict[str, Any] = {
            "lengths": array("q", [plan.count] * len(given)),
            "known": facts,
            "before": np.concatenate([state.columns[role] for role in given]),
            "extents": np.concatenate([plan.extents[role] for role in given]),
            "written": array("q", [role in plan.written for role in given]),
            "begin": ranges.begin,
            "end": ranges.end,
            "fixed": array("Q", [column.ctypes.data for column in self._fixed]),
            "source": array("q", [position.get(role, -1) for role in columns]),
        }
        self._arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
        self._table = WarmTable(
            count=len(given),
            n=plan.count,
            ranges=len(ranges.begin),
            columns=len(columns),
            **{name: values.ctypes.data for name, values in self._arrays.items()},
        )
        self.addresses = (runtime.python, ctypes.addressof(self._table))


def make_warm(
    request: Request, plan: CallPlan, state: PlanState | None, names: Sequence[str], norms: Mapping[str, str]
) -> WarmCall | None:
    """Return the warm form of the last call; None if it has none.

    Args:
        request: The call.
        plan: Its plan.
        state: The addresses of its lists.
        names: The arguments that are passed at each call: lists, then scalars.
        norms: The scalars that are norms of roles.
    """
    roles = {name: role for role, name in enumerate(request.names)}
    positions = [roles[name] for name in names if name in roles]
    if not positions or not roles.keys() >= set(names[: len(positions)]):
        return None
    runtime = _backend.runtime()
    if state is None or not _is_one_kernel(request, plan, state) or isinstance(runtime, str):
        return None
    if not all(roles[role] in positions and are_plain([request.roles[roles[role]]]) for role in norms.values()):
        return None
    facts = runtime.facts([request.roles[role] for role in positions])
    return None if facts is None else WarmCall(request, plan, state, positions, facts, runtime, norms)


def _is_one_kernel(request: Request, plan: CallPlan, state: PlanState) -> bool:
    """Return whether a call is one kernel over whole tensors that writes into roles, with scalars on the host."""
    if state.overlap or state.exact or plan.allocates or request.outs or len(plan.pieces) != 1:
        return False
    dense = isinstance(plan.runs.owner, slice) and _NUMBERS.issuperset(map(type, request.scalars))
    return dense and isinstance(plan.pieces[0].form, CForm)
