"""One fused call: find or make the plan, locate the tensors, run each piece, tell autograd what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _backend
from ._cut import Target
from ._graph import Graph
from ._hot import STALE, hot_of
from ._plain import apply_one, compiled, run_plain, write
from ._plan import Output, Piece, Plan, locate, run_piece
from ._prepare import prepare, values_of

if TYPE_CHECKING:
    from ._fuse import Fused

__all__ = ["call", "find_plan", "transformed"]


def transformed() -> bool:
    """Whether torch is doing something with operations other than running them."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def call(
    fused: Fused,
    args: Sequence[Any],
    out: Any,
    flat: bool,
    offsets: Sequence[int] | None,
    plans: list[Plan],
) -> Any:
    """Run a fused function; the meaning of the arguments is told in `Fused.__call__`."""
    if torch.compiler.is_compiling() or transformed():
        return _directly(fused, args, out, flat, offsets)
    marks, roles, scalars = fused._classify(args)
    key, outs, given, flats = _key(fused, marks, roles, out, flat, offsets)
    if not torch.is_grad_enabled():  # the compiled check does not see requires_grad
        for plan in plans:
            if plan.hot is not None and plan.key == key:
                if plan.hot.run(roles + given, flats, scalars) is not STALE:
                    return _result(plan, roles, outs)
                break
    plan = find_plan(fused, marks, roles, scalars, outs, flat, offsets, plans, key)
    if plan.needs_graph is not None and torch.is_grad_enabled():
        raise RuntimeError(plan.needs_graph)
    with torch.no_grad():
        return _execute(fused, plan, marks, roles, scalars, outs)


def _key(
    fused: Fused, marks: tuple[Any, ...], roles: list[list[torch.Tensor]], out: Any, flat: bool, offsets: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...], list[list[torch.Tensor]], list[torch.Tensor]]:
    """(what a plan must have been made for, places given, those that are lists, those that are vectors)."""
    if not roles:
        raise TypeError(f"{fused.where} was given no list of tensors; give a list for each role")
    shape: Any = ()
    outs: tuple[Any, ...] = ()
    given: list[list[torch.Tensor]] = []
    flats: list[torch.Tensor] = []
    if offsets is not None:
        offsets = tuple(offsets)  # a copy: the list may change between calls
    if out is not None:
        outs = out if isinstance(out, tuple) else (out,)
        given = [item for item in outs if isinstance(item, list)]
        flats = [item for item in outs if isinstance(item, torch.Tensor)]
        shape = (
            ["none" if item is None else "flat" if isinstance(item, torch.Tensor) else "list" for item in outs],
            [(v.dtype, v.shape, v.stride(), type(v), v.requires_grad, v.is_inference()) for v in flats],
        )
    inference = torch.is_inference_mode_enabled()
    key = (marks, fused._captured(), len(roles[0]), shape, flat, offsets, _backend.mode(), inference)
    return key, outs, given, flats


def find_plan(
    fused: Fused,
    marks: tuple[Any, ...],
    roles: list[list[torch.Tensor]],
    scalars: list[Any],
    outs: tuple[Any, ...],
    flat: bool,
    offsets: Sequence[int] | None,
    plans: list[Plan],
    key: tuple[Any, ...],
) -> Plan:
    """The plan of a call: one that fits, or a new one."""
    count = len(roles[0])
    lists = roles + [item for item in outs if isinstance(item, list)]
    whole = tuple(isinstance(value, int) for value in scalars)
    for position, plan in enumerate(plans):
        if plan.key != key or any(len(tensors) != count for tensors in lists):
            continue
        try:
            fits = all(watch.same(tensors) for watch, tensors in zip(plan.watches, lists, strict=True))
        except (TypeError, AttributeError):
            fits = False  # something in a list is not a tensor; the plan that is made next says which
        if fits and plan.whole in (None, whole):
            if position:
                fused._remember(plans, plan)
            return plan
    plan = prepare(fused, marks, roles, whole, outs, flat, offsets, key)
    plan.hot = hot_of(plan, lists)
    fused._remember(plans, plan)
    return plan


def _allocate(plan: Plan, outs: Sequence[Any]) -> tuple[list[Target], list[list[torch.Tensor]], list[torch.Tensor]]:
    """(target of each output or a role still to be filled in, lists, vectors)."""
    given = iter([item for item in outs if item is not None])
    targets: list[Any] = []
    lists: list[list[torch.Tensor]] = []
    flats: list[torch.Tensor] = []
    for output, dtypes in zip(plan.outputs, plan.dtypes, strict=True):
        if output.kind == "role":
            targets.append(None)
        elif output.kind == "list":
            lists.append(next(given))
            targets.append(lists[-1])
        elif output.kind == "new":
            if plan.opaque is not None:
                targets.append([None] * plan.count)
                continue
            if not isinstance(dtypes, list):  # pragma: no cover - new lists always carry one dtype per tensor
                dtypes = [dtypes] * plan.count
            lists.append([torch.empty(s, dtype=d, device="cpu") for s, d in zip(plan.shapes, dtypes, strict=True)])
            targets.append(lists[-1])
        else:
            if output.kind == "flat":
                vector = next(given)
            else:
                end = max((o + s for o, s in zip(plan.offsets, plan.sizes, strict=True)), default=0)
                dtype = dtypes if isinstance(dtypes, torch.dtype) else None
                vector = torch.empty(end, dtype=dtype, device="cpu")
                if end != sum(plan.sizes):
                    vector.zero_()  # between the tensors
            flats.append(vector)
            targets.append((vector, plan.offsets))
    return targets, lists, flats


def _execute(
    fused: Fused,
    plan: Plan,
    marks: tuple[Any, ...],
    roles: list[list[torch.Tensor]],
    scalars: list[Any],
    outs: tuple[Any, ...],
) -> Any:
    targets, lists, flats = _allocate(plan, outs)
    for position, output in enumerate(plan.outputs):
        if output.role is not None:
            targets[position] = roles[output.role]

    def graph_of(i: int) -> Graph:
        return fused._graph(marks, tuple(tensors[i].dtype for tensors in roles), plan.whole or ())

    def plain(indices: Sequence[int]) -> None:
        run_plain(
            fused.fn,
            marks,
            graph_of,
            roles,
            targets,
            lambda graph, returned, changed: values_of(fused, marks, graph, returned, changed),
            scalars,
            indices,
            at_once=plan.opaque is not None,
        )

    if plan.opaque is not None:
        if plan.pieces and all(piece.form.name == "compile" for piece in plan.pieces):
            _on_accelerator(fused, marks, plan, roles, scalars, targets, graph_of)
        else:
            plain(range(plan.count))
        return _results(plan, roles, targets)
    state = locate(plan, roles + lists, flats)
    if state.overlap:
        plain(range(plan.count))
        return _results(plan, roles, targets)
    for piece, keep in zip(plan.pieces, state.tables, strict=True):
        if state.exact and piece.form.program is not None:
            plain(range(plan.count) if piece.indices is None else piece.indices)
            continue
        if piece.form.kernel is not None:
            _tell(plan.outputs, targets, piece)  # first: it refuses what must not be written
        run_piece(plan, piece, keep, roles, targets, scalars, plain)
    return _results(plan, roles, targets)


def _tell(outputs: Sequence[Output], targets: Sequence[Target], piece: Piece) -> None:
    """Count up the versions of what a kernel wrote, as an in-place operation of torch does."""
    for output, target in zip(outputs, targets, strict=True):
        if output.kind in ("new", "newflat") or output.quiet:
            continue
        if isinstance(target, tuple):
            written = [target[0]]
        else:
            written = target if piece.indices is None else [target[i] for i in piece.indices]
        if torch.is_inference_mode_enabled():
            written = [tensor for tensor in written if not tensor.is_inference()]
        increment_version(written)


def _results(plan: Plan, roles: Sequence[Any], targets: Sequence[Target]) -> Any:
    results: list[Any] = []
    for kind, position in plan.results:
        target = roles[position] if kind == "role" else targets[position]
        results.append(target[0] if isinstance(target, tuple) else target)
    if plan.single:
        return results[0]
    return tuple(results) if results else None


def _result(plan: Plan, roles: Sequence[Any], outs: Sequence[Any]) -> Any:
    """The same where every output was given."""
    given = iter(outs)
    targets = [next(given) if output.role is None else roles[output.role] for output in plan.outputs]
    return _results(plan, roles, targets)


def _directly(fused: Fused, args: Sequence[Any], out: Any, flat: bool, offsets: Sequence[int] | None) -> Any:
    """The function itself, for torch.compile, torch.func, forward mode and dispatch modes, which see its operations."""
    if out is not None or offsets is not None:
        raise ValueError(
            f"{fused.where} was called with out= or offsets= inside torch.compile, a torch.func transform or a "
            "dispatch mode; call it without, the transform decides where results live"
        )
    lists = [position for position, value in enumerate(args) if isinstance(value, list | tuple)]
    if not lists:
        raise TypeError(f"{fused.where} was given no list of tensors; give a list for each role")
    columns: list[list[Any]] = []
    single = False
    for i in range(len(args[lists[0]])):
        values = [value[i] if position in lists else value for position, value in enumerate(args)]
        result = fused.fn(*values)
        single = isinstance(result, torch.Tensor)
        results = [] if result is None else [result] if single else list(result)
        for position, name in enumerate(fused.inplace):
            if name is not None:
                place = args[fused._names.index(name)][i]
                place.copy_(results[position])
                results[position] = place
        columns.append(results)
    gathered: list[Any] = [list(column) for column in zip(*columns, strict=True)]
    if flat:
        gathered = [torch.cat([value.reshape(-1) for value in column]) for column in gathered]
    return gathered[0] if single else tuple(gathered) if gathered else None


def _on_accelerator(
    fused: Fused,
    marks: tuple[Any, ...],
    plan: Plan,
    roles: list[list[torch.Tensor]],
    scalars: list[Any],
    targets: Sequence[Any],
    graph_of: Any,
) -> None:
    """One `torch.compile`d pass over the lists; scalars travel as 0-d tensors, so a new value is not a new kernel."""
    if fused._compiled is None:

        def sweep(lists: list[list[torch.Tensor]], numbers: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            found = []
            for i in range(len(lists[0])):
                graph = graph_of(i)
                returned, changed = apply_one(fused.fn, marks, graph, [tensors[i] for tensors in lists], numbers)
                found.append(values_of(fused, marks, graph, returned, changed))
            return found

        fused._compiled = compiled(sweep)
    numbers = [torch.tensor(float(value), dtype=torch.float64) for value in scalars]
    for i, values in enumerate(fused._compiled(roles, numbers)):
        for target, value in zip(targets, values, strict=True):
            if isinstance(target, tuple):
                write(target[0].narrow(0, target[1][i], value.numel()), value)
            elif target[i] is None:
                target[i] = value
            else:
                write(target[i], value)
