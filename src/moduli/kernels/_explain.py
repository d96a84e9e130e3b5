"""Explanations of the form that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._torch import is_transformed
from . import _backend, _compiler
from ._c import CForm
from ._call import Request, find_plan
from ._checks import refuse_graphs
from ._choice import describe_dtypes
from ._forms import Form
from ._plain import PlainForm
from ._plan import CallPlan, PlanState

if TYPE_CHECKING:
    from ._fuse import Fused


_NOTHING = "nothing, there are no tensors"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The form that runs, and why; its text is readable.

    Attributes:
        form: `c`, `triton`, `foreach`, `plain`, `mixed` or `nothing`; without a function the best that is available.
        lines: The sentences.
        source: The C source, if there is one.
        path: The file of the source, beside the compiled library.
        slow: The sentences about parts of the lists that no compiled kernel runs.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> answer = kernels.fuse(lambda x: x + 1).explain([torch.ones(2).to_sparse()])
        >>> print(answer)
        plain: the function itself, tensor by tensor, because sparse_coo tensors run as torch runs them
    """

    form: str
    lines: tuple[str, ...]
    source: str | None = None
    path: Path | None = None
    slow: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _line(form: type[Form], why: str, count: str, elements: int) -> str:
    threads = _backend.threads(elements)
    text = form.sentence.format(threads=f"{threads} thread{'s' * (threads > 1)}")
    return f"{form.name}: {text}{count}" + ("" if form.compiled else f", because {why}")


def explain_call(fused: Fused, args: Sequence[Any], out: Any, flat: bool) -> Explanation:
    """Return an explanation of a call with these arguments, from the plan that it would run. Nothing is written.

    Args:
        fused: The function.
        args: The arguments.
        out: As in a call.
        flat: As in a call.
    """
    if is_transformed():
        return _explain_plain("torch.compile, a torch.func transform or forward mode sees its operations")
    request = Request(fused, args, out, flat, None)
    plan, state = find_plan(request, fused._plans)
    answer = explain_plan(plan, state)
    needs = refuse_graphs(request, plan) if torch.is_grad_enabled() else None
    return answer if needs is None else replace(answer, lines=(f"refused: {needs}", *answer.lines))


def explain_plan(plan: CallPlan, state: PlanState | None) -> Explanation:
    """Return an explanation of a plan, for lists at these addresses."""
    if plan.count == 0:
        return Explanation("nothing", (f"nothing: {_NOTHING}",))
    if plan.opaque is not None:
        return _explain_plain(plan.opaque)
    if state is not None and state.overlap:
        return _explain_plain("what is written overlaps something else, so the order matters")
    forms = set()
    lines: list[str] = []
    slow: list[str] = []
    source, path = None, None
    for piece in plan.pieces:
        form, why = piece.form.find_running(state)
        forms.add(form.name)
        count = "" if len(piece.indices) == plan.count else f", for {len(piece.indices)} of {plan.count} tensors"
        dtypes = describe_dtypes(form.graph.role_dtypes)
        lines.append(f"{_line(type(form), why, count, piece.starts[-1])} ({dtypes})")
        slow += [lines[-1]] * (not form.compiled)
        if isinstance(form, CForm) and source is None:
            source, path = form.kernel.source, form.kernel.library.source
            lines.append(f"  source {path}")
    return Explanation(forms.pop() if len(forms) == 1 else "mixed", tuple(lines), source, path, tuple(slow))


def _explain_plain(why: str) -> Explanation:
    line = _line(PlainForm, why, "", 0)
    return Explanation("plain", (line,), slow=(line,))


def explain(fused: Fused | None = None, *args: Any, out: Any = None, flat: bool = False, **kwargs: Any) -> Explanation:
    """Return the form that runs, and why: for a call of a fused function, or in general.

    Args:
        fused: A fused function; without it the setting, the compiler and the cache are described.
        *args: The arguments of the call.
        out: As in the call.
        flat: As in the call.
        **kwargs: Arguments by name.

    Returns:
        An `Explanation`; its `source` and `path` show the generated C.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> double = kernels.fuse(lambda x: 2 * x)
        >>> x = torch.ones(3, dtype=torch.int64)
        >>> print(kernels.explain(double, [x]))
        plain: the function itself, tensor by tensor, because values of dtype int64 run as torch runs them (int64)
        >>> kernels.explain().form in ("c", "foreach", "plain")
        True
    """
    if fused is not None:
        return explain_call(fused, fused._arguments(args, kwargs), out, flat)
    setting = _backend.mode()
    if setting in ("foreach", "plain"):
        return Explanation(setting, (f"{setting}: MODULI_KERNELS={setting}",))
    shared = _backend.runtime()
    if isinstance(shared, str):
        return Explanation("foreach", (f"foreach: {shared}",))
    library = shared.library
    return Explanation(
        "c",
        (
            f"c: MODULI_KERNELS={setting}, {torch.get_num_threads()} threads"
            + ("" if library.threaded else " asked for, but built without OpenMP: one is used"),
            f"  compiler {' '.join(_compiler.compiler())} {' '.join(library.flags)}",
            f"  cache {_compiler.directory()}",
            f"  kernels in this process: {len(_backend.list_built())}",
        ),
        library.source.read_text(encoding="utf-8") if library.source.exists() else None,
        library.source,
    )
