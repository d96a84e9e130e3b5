"""The form for CUDA, ROCm and XPU: a generated kernel, launched once for all tensors of a device.

Under `TRITON_INTERPRET=1` Triton runs kernels on the CPU, program by program, and `MODULI_KERNELS=triton` chooses this form
there too, for tests without an accelerator. On fake tensors nothing is launched, but the launches
are reported to `watch_launches`.
"""

from __future__ import annotations

import importlib.util
import linecache
import math
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .._torch import is_fake
from ._backend import KernelError, mode, warn_once
from ._emit_triton import emit_reduction, emit_triton
from ._foreach import ForeachForm
from ._forms import Form, Outputs, Situation, Work
from ._graph import COMPUTE, Graph
from ._memory import Memory, put_bounded, take_result
from ._operations import NoFormError
from ._plain import PlainForm
from ._scalars import ScalarPart, find_placed
from ._triton_table import Table, choose_block

if TYPE_CHECKING:
    from ._plan import PlanState

_PROGRAMS = 1024
_DEVICES = ("cuda", "xpu")
NOT_INSTALLED = "Triton is not installed"
_lock = threading.Lock()
_built: dict[str, Any] = {}
_watchers: list[list[Launch]] = []
# Kernels that have run, and reductions that can't be compiled.
_compiled: set[int] = set()
_unbuilt: set[tuple[Any, ...]] = set()


class UnbuiltError(RuntimeError):
    """A kernel can't be compiled; nothing was launched."""


def report_unbuilt(problem: UnbuiltError) -> None:
    """Warn once that another form runs instead.

    Raises:
        KernelError: The user asked for this form.
    """
    if mode() == "triton":
        raise KernelError(f"MODULI_KERNELS=triton, but {problem}") from problem
    warn_once("Triton", str(problem))


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a generated kernel: its name, the device, its programs, and the bytes it reads and writes.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> kernels.Launch("Adam", torch.device("cuda"), programs=12, bytes=4096).programs
        12
    """

    name: str
    device: torch.device
    programs: int
    bytes: int


@contextmanager
def watch_launches() -> Iterator[list[Launch]]:
    """Yield a list of the launches of generated kernels in the block. Use a `TorchDispatchMode` for those of torch.

    Example:
        >>> from moduli import kernels
        >>> with kernels.watch_launches() as seen:
        ...     pass
        >>> seen
        []
    """
    launches: list[Launch] = []
    _watchers.append(launches)
    try:
        yield launches
    finally:
        _watchers.remove(launches)


def find_problem(device: torch.device, watched: str | None) -> str | None:
    """Return why no Triton kernel runs on this device; None if one can.

    Args:
        device: The device.
        watched: Why operations have to run one by one; None if they need not.
    """
    setting, kind = mode(), device.type
    if setting == "triton":
        if kind not in ("cpu", "meta", "mps"):
            return None  # fake tensors need no Triton; otherwise a launch without it raises
    elif watched is not None or setting != "auto":
        return watched or f"MODULI_KERNELS={setting}"
    elif kind == "cpu":
        return "the tensors are on the CPU"
    if kind not in (*_DEVICES, "cpu"):
        return f"Triton has no kernels for {kind}"
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    if kind == "cpu" and not _is_interpreted():
        return "the tensors are on the CPU, where Triton runs under TRITON_INTERPRET=1 only"
    return None


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def build(source: str) -> Any:
    """Return the kernel of this source; Triton compiles it, and stores it in its own cache, at the first launch."""
    if importlib.util.find_spec("triton") is None:
        raise KernelError("MODULI_KERNELS=triton, but Triton is not installed; pip install triton, or unset it")
    with _lock:
        kernel = _built.get(source)
        if kernel is None:
            # Triton reads the source of a function, so it is put into Python's cache of source lines.
            name = f"<moduli kernel {len(_built)}>"
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
            space: dict[str, Any] = {"__name__": f"moduli_kernel_{len(_built)}", "lib": _find_library()}
            exec(compile(source, name, "exec"), space)  # generated from a graph: only numbers and names of this package
            kernel = _built[source] = space["kernel"]
        return kernel


def _find_library() -> Any:
    """Return the functions of libdevice; in the interpreter, which has none, those of NumPy."""
    if not _is_interpreted():
        from triton.language.extra import libdevice

        return libdevice
    return _HostLibrary()


class _HostLibrary:
    """NumPy's functions under the names of libdevice, for values of Triton's interpreter."""

    _NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh"}
    _NAMES |= {"atanh": "arctanh", "atan2": "arctan2", "pow": "power"}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ufunc = getattr(np, self._NAMES.get(name, name), None)
        function = ufunc or np.vectorize(getattr(math, name), otypes=[np.float64])

        def run(*args: Any) -> Any:
            import triton.language as tl
            from triton.runtime.interpreter import TensorHandle

            first = max(args, key=lambda each: len(each.shape))
            data = np.asarray(function(*(each.handle.data for each in args))).astype(first.handle.data.dtype)
            return tl.core.tensor(TensorHandle(data, first.handle.dtype), first.type)

        return run


def _launch(name: str, kernel: Any, table: Table, programs: int, size: int, args: Sequence[Any], warps: int) -> None:
    if kernel is not None and programs:
        here = nullcontext() if table.device.type == "cpu" else torch.accelerator.device_index(table.device.index)
        options = {"ALIGNED": table.aligned, "BLOCK": table.block, "num_warps": warps}
        options["enable_fp_fusion"] = False  # each operation rounds as torch's does
        try:
            with here, np.errstate(all="ignore"):
                kernel[(programs,)](table.rows, table.chunks, *args, **options)
        except Exception as error:
            if id(kernel) in _compiled:
                raise
            raise UnbuiltError(f"Triton can't compile a kernel ({type(error).__name__}: {error})") from error
        _compiled.add(id(kernel))
    for watcher in _watchers:
        watcher.append(Launch(name, table.device, programs, size))


class _Source(NamedTuple):
    """A kernel as text, the scalar nodes that the host computes for it, and the scalars given as tensors."""

    text: str
    numbers: ScalarPart
    tensors: list[int]


class TritonKernel:
    """A graph as a Triton kernel, with one source for each choice of scalars that are tensors on the device."""

    def __init__(self, graph: Graph, outputs: Sequence[tuple[int, torch.dtype, int | None]], name: str) -> None:
        self.graph = graph
        self.name = name
        #: Why it can't be compiled; None while it may be.
        self.problem: str | None = None
        self._outputs = [(node, dtype) for node, dtype, _ in outputs]
        self._sources: dict[tuple[bool, ...], _Source] = {}
        self.source((False,) * graph.scalars)  # raises for a graph without a Triton form
        live = [graph.nodes[i] for i in graph.find_needed()]
        wide = any(COMPUTE.get(node.dtype) is torch.float64 and node.vector for node in live)
        read = {dict(node.args)["position"] for node in live if node.op == "role"}
        columns = graph.roles + sum(role is None for _, _, role in outputs)
        self.block, self.warps = choose_block(torch.float64 if wide else torch.float32, columns)
        #: The number of bytes read and written for each element.
        self.width = sum(graph.role_dtypes[role].itemsize for role in read)
        self.width += sum(dtype.itemsize for _, dtype in self._outputs)

    def source(self, tensors: tuple[bool, ...]) -> _Source:
        """Return the kernel for this choice of scalars that are tensors."""
        source = self._sources.get(tensors)
        if source is None:
            placed = find_placed(self.graph, tensors)
            nodes = self.graph.nodes
            numbers = [i for i in self.graph.find_needed() if not nodes[i].vector and i not in placed]
            source = self._sources[tensors] = _Source(
                emit_triton(self.graph, self._outputs, placed),
                ScalarPart(self.graph, numbers),
                [dict(nodes[i].args)["position"] for i in sorted(placed) if nodes[i].op == "scalar"],
            )
        return source

    def make_table(self, device: torch.device, sizes: Sequence[int]) -> Table:
        """Return a table for tensors of these sizes."""
        return Table(device, sizes, self.graph.roles + len(self._outputs), self.block)

    def run(
        self,
        table: Table,
        addresses: Sequence[np.ndarray[Any, Any]] | None,
        scalars: Sequence[Any],
        squares: Sequence[torch.Tensor] = (),
    ) -> bool:
        """Launch the kernel; without addresses the tensors are fake, and the launch is only reported.

        Returns:
            Whether it could be compiled.
        """
        source = self.source(tuple([isinstance(value, torch.Tensor) for value in scalars]))
        numbers = [float(value) for value in source.numbers.evaluate(scalars).values()]
        tensors = [scalars[position] for position in source.tensors]
        with table.lock:
            table.point(addresses)
            try:
                kernel = None if addresses is None else build(source.text)
                size = self.width * table.elements
                _launch(self.name, kernel, table, table.programs, size, [*numbers, *tensors, *squares], self.warps)
            except UnbuiltError as problem:
                report_unbuilt(problem)
                self.problem = str(problem)
        return self.problem is None


class TritonForm(Form):
    """A generated kernel for an accelerator."""

    name = "triton"
    sentence = "a Triton kernel, one launch for all tensors"
    compiled = True

    def __init__(self, graph: Graph, outputs: Outputs, why: str) -> None:
        super().__init__(graph, outputs, "compiled")
        try:
            self.kernel = TritonKernel(graph, outputs, "fused")
        except NoFormError as missing:
            raise NoFormError(f"{missing} has no Triton form") from None
        whole = graph.reads_positions() or graph.count_squares()
        self.fallback = (PlainForm if whole else ForeachForm)(graph, outputs, why)

    @classmethod
    def concerns(cls, situation: Situation) -> bool:
        """Return whether the tensors are on an accelerator, or Triton was requested."""
        return situation.device.type != "cpu" or situation.setting == "triton"

    @classmethod
    def find_problem(cls, graph: Graph, situation: Situation) -> str | None:
        """Return why no Triton kernel runs on the device; None if one can. Warn once if Triton is missing."""
        problem = find_problem(situation.device, situation.stepwise)
        if problem is not None and situation.setting == "triton":
            raise KernelError(f"MODULI_KERNELS=triton, but {problem}")
        if problem == NOT_INSTALLED:
            warn_once("Triton", f"the tensors are on {situation.device.type}, and {problem}")
        return problem

    def run(self, work: Work) -> bool:
        """Launch the kernel; return False if it can't be compiled."""
        if self.kernel.problem is not None:
            return False
        work.count_versions()
        cache = work.piece.cache
        if "table" not in cache:
            cache["table"] = self.kernel.make_table(work.piece.device, work.piece.sizes)
        slots, piece = work.plan.squares, work.piece
        if not slots:
            return self.kernel.run(cache["table"], work.columns, work.scalars)
        squares = torch.zeros(len(piece.sizes), slots, dtype=torch.float64, device=piece.device)
        done = self.kernel.run(cache["table"], work.columns, work.scalars, [squares])
        owner = np.arange(work.plan.count)[work.plan.runs.owner][piece.runs]
        if work.request.squares is not None:
            work.request.squares.index_add_(0, torch.from_numpy(owner).to(piece.device), squares)
        return done

    def find_running(self, state: PlanState | None) -> tuple[Form, str]:
        """Return the foreach form if the kernel can't be compiled."""
        if self.kernel.problem is None or self.fallback is None:
            return self, self.why
        running, why = self.fallback.find_running(state)
        return running, self.kernel.problem if running is self.fallback else why


# ---------------------------------------------------------------------- reductions

_tables: dict[tuple[Any, ...], _Partial] = {}


class _Partial:
    """The table of a reduction, the buffer of its programs' results, and that of the final result."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.partial = torch.empty(_PROGRAMS, dtype=torch.float64, device=table.device)
        self.result: Memory = {}


def reduce_lists(kind: str, lists: Sequence[Sequence[torch.Tensor]], root: bool = False) -> torch.Tensor | None:
    """Return a reduction over lists on one device in two launches; None if it has no Triton form.

    The result is a 0-d tensor of dtype float64 there.

    Args:
        kind: The reduction.
        lists: The lists.
        root: Whether to return the square root.
    """
    dtypes = tuple(tensors[0].dtype for tensors in lists)
    first = lists[0][0]
    kinds = {
        (t.device, t.is_contiguous(), type(t) in (torch.Tensor, torch.nn.Parameter) or is_fake(t))
        for ts in lists
        for t in ts
    }
    if kinds != {(first.device, True, True)} or any(
        t.dtype is not d for ts, d in zip(lists, dtypes, strict=True) for t in ts
    ):
        return None
    if any(dtype not in COMPUTE or dtype is torch.bool for dtype in dtypes) or (kind, dtypes) in _unbuilt:
        return None
    try:
        return _reduce_checked(kind, lists, dtypes, root)
    except UnbuiltError as problem:
        report_unbuilt(problem)
        _unbuilt.add((kind, dtypes))
        return None


def _reduce_checked(
    kind: str, lists: Sequence[Sequence[torch.Tensor]], dtypes: tuple[torch.dtype, ...], root: bool
) -> torch.Tensor:
    first = lists[0][0]
    fake = is_fake(first)
    sizes = array("q", [tensor.numel() for tensor in lists[0]])
    block, warps = choose_block(torch.float64, 2)
    key = (first.device, sizes.tobytes(), len(lists), block, id(getattr(first, "fake_mode", None)))
    with _lock:
        reduction = _tables.get(key)
        if reduction is None:
            reduction = put_bounded(_tables, key, _Partial(Table(first.device, sizes, len(lists), block)))
    table = reduction.table
    kernel = None if fake else build(emit_reduction(kind, dtypes, root))
    with table.lock:
        table.point(None if fake else [np.array([t.data_ptr() for t in tensors], np.uint64) for tensors in lists])
        programs = min(table.programs, _PROGRAMS)
        size = table.elements * sum(dtype.itemsize for dtype in dtypes)
        _launch(kind, kernel, table, programs, size, [reduction.partial, table.programs, programs], warps)
        result, partial = take_result(reduction.result, table.device), reduction.partial.narrow(0, 0, programs)
        if kind in ("largest", "amax"):
            return torch.amax(partial, 0, out=result)
        return torch.linalg.vector_norm(partial, out=result) if root else torch.sum(partial, 0, out=result)
