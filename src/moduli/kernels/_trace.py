"""From a Python function to its graph: run it once on stand-ins and write down what torch was asked to do."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import run_outside
from ._graph import Graph, Node, Ref
from ._reads import Reads, Watcher

aten = torch.ops.aten
_NAN = float("nan")

# Whole-tensor aliases: the result is the same cell, so a later change in place is seen through both.
_ALIASES = {"detach", "alias", "view", "_unsafe_view", "_reshape_alias", "expand", "lift_fresh", "lift"}
_FACTORIES = {
    "zeros_like": 0,
    "new_zeros": 0,
    "zeros": 0,
    "ones_like": 1,
    "new_ones": 1,
    "ones": 1,
    "full_like": "fill_value",
    "new_full": "fill_value",
    "full": "fill_value",
    "scalar_tensor": "s",
}
# Pointwise, though torch does not tag them so in every version.
_ALSO_POINTWISE = {"clone", "_to_copy", "rsub", "log_sigmoid_forward", "floor_divide", "hardswish"}
# Tagged pointwise by torch, though one value per element would be drawn from a generator.
_RANDOM = {"bernoulli", "normal", "uniform", "rand_like", "randn_like", "native_dropout", "dropout", "rrelu_with_noise"}
_WHY = "each element of the result must depend on the same element of the arguments only"
_READS = {"__bool__", "__float__", "__int__", "__index__", "__complex__", "item", "tolist", "numpy", "__array__"}


class NotPointwiseError(ValueError):
    """The function does something that is not one value per element, so it can't run in one pass.

    (Not a TypeError: Python's operators take that for "try the other operand" and hide the message.)

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> try:
        ...     kernels.fuse(lambda x: x - x.mean())([torch.ones(3)])
        ... except kernels.NotPointwiseError as error:
        ...     print(str(error).split(":")[0])
        '<lambda>' uses aten.mean, which is not pointwise
    """


class _Cell:
    """What a tensor holds now. Whole-tensor aliases share one cell."""

    __slots__ = ("node", "role")

    def __init__(self, node: int, role: int | None = None) -> None:
        self.node = node
        self.role = role


class _NoReads(TorchFunctionMode):
    """Refuses to turn a stand-in into a Python number: the trace would remember the number, not the argument."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise NotPointwiseError(
                f"{self.where} reads the value of an argument with {name}: what it does would depend on values and "
                "could not be compiled once. Compute with torch operations (`s ** 0.5` for a square root, "
                "`torch.where` for a choice), or pass what decides a branch as a bool, which is a constant"
            )
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down each operation that reaches torch while the function runs."""

    def __init__(self, where: str, shape: tuple[int, ...], salt: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.shape = shape
        self.salt = salt
        self.nodes: list[Node] = []
        self.cells: dict[int, _Cell] = {}
        self.keep: list[torch.Tensor] = []  # an id is only a name while its tensor lives
        self.sentinels: dict[float, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against torch.compile imports all of it, for a second and a half

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def own(self, tensor: torch.Tensor, cell: _Cell) -> torch.Tensor:
        self.keep.append(tensor)
        self.cells[id(tensor)] = cell
        return tensor

    def refuse(self, name: str, why: str) -> NotPointwiseError:
        return NotPointwiseError(f"{self.where} uses aten.{name}, which is not pointwise: {why}")

    def read(self, value: Any, name: str) -> Any:
        """An argument of an operation as the graph knows it."""
        if isinstance(value, torch.Tensor):
            cell = self.cells.get(id(value))
            if cell is None:
                raise NotPointwiseError(
                    f"{self.where} gives aten.{name} a tensor of shape {tuple(value.shape)} that is neither an "
                    "argument nor computed from one. Pass it as an argument: a list of tensors, or a scalar"
                )
            return Ref(cell.node)
        if isinstance(value, float | int) and not isinstance(value, bool):
            if value != value:
                return _NAN  # one object, so that two traces with a NaN compare equal
            return Ref(self.sentinels[value]) if value in self.sentinels else value
        if isinstance(value, list | tuple):
            return tuple(self.read(item, name) for item in value)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return self._scalar(args[0])
        bound = _bind(func, args, kwargs)
        if name in _ALIASES:
            return self._alias(func, name, args, kwargs)
        if name in _FACTORIES:
            return self._factory(func, name, bound, args, kwargs)
        if func._schema.is_mutable:
            return self._record_in_place(func, packet, name, bound, args, kwargs)
        tagged = torch.Tag.pointwise in func.tags
        if name in _RANDOM or not (tagged or name in _ALSO_POINTWISE):
            raise self.refuse(name, _WHY + ". Do this part outside the fused function (reductions: kernels.sum, norm)")
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) and name == "log_sigmoid_forward" else result
        if not isinstance(first, torch.Tensor):
            raise self.refuse(name, "it gives several results; use operations with one")
        self.own(first, _Cell(self._record(func, name, bound, first)))
        return result

    def _scalar(self, tensor: torch.Tensor) -> float | int:
        # torch reads a 0-d tensor given where a number is expected (`alpha=lr`); the number returned is a name for it.
        node = self.read(tensor, "_local_scalar_dense").index
        dtype = self.nodes[node].dtype
        if self.nodes[node].vector or dtype is torch.bool or dtype.is_complex:
            raise self.refuse("_local_scalar_dense", "it reads one element of a tensor")
        value = self.salt * (1.0 + len(self.sentinels) * 2.0**-20)
        if not dtype.is_floating_point:
            value = int(self.salt * 100) + len(self.sentinels)  # small enough for every integer dtype
        self.sentinels[value] = node
        return value

    def _alias(self, func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        source = args[0]
        result: torch.Tensor = func(*args, **kwargs)
        if id(source) not in self.cells and name.startswith("lift") and source.dim() == 0:
            # A number that the function wrapped itself, `torch.tensor(0.5)`.
            node = self.add(Node("constant", (("value", source.item()),), source.dtype, source.dtype, vector=False))
            return self.own(result, _Cell(node))
        ref = self.read(source, name)
        if result.shape == source.shape:
            return self.own(result, self.cells[id(source)])
        if source.dim() == 0 and tuple(result.shape) == self.shape:
            node = self.nodes[ref.index]
            index = self.add(Node("cast", (("self", ref),), node.dtype, node.dtype, vector=True))
            return self.own(result, _Cell(index))
        raise self.refuse(name, f"it changes the shape {tuple(source.shape)} into {tuple(result.shape)}")

    def _factory(self, func: Any, name: str, bound: dict[str, Any], args: Any, kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = func(*args, **kwargs)
        value: Any = _FACTORIES[name]
        if isinstance(value, str):
            value = self.read(bound[value], name)
        vector = result.dim() > 0
        if vector and tuple(result.shape) != self.shape:
            raise self.refuse(name, f"it makes a tensor of shape {tuple(result.shape)}")
        node = Node("constant", (("value", value),), result.dtype, result.dtype, vector)
        return self.own(result, _Cell(self.add(node)))

    def _record_in_place(self, func: Any, packet: Any, name: str, bound: dict[str, Any], args: Any, kwargs: Any) -> Any:
        target = bound.get("self")
        if not name.endswith("_") or target is None or "out" in bound:
            raise self.refuse(name, "it writes to out=; return the value instead")
        self.read(target, name)
        cell = self.cells[id(target)]
        plain = name.removesuffix("_")
        if plain == "copy":
            node = self.read(bound["src"], name).index
        elif plain in ("fill", "zero"):
            value = self.read(bound.get("value", 0), name)
            node = self.add(Node("constant", (("value", value),), target.dtype, target.dtype, target.dim() > 0))
        else:
            functional = getattr(getattr(aten, plain, None), func._overloadname, None)
            if functional is None or plain in _RANDOM:
                raise self.refuse(name, "it has no form that returns its value")
            if torch.Tag.pointwise not in functional.tags and plain not in _ALSO_POINTWISE:
                raise self.refuse(plain, _WHY)
            value = functional(*args, **kwargs)
            node = self._record(functional, plain, _bind(functional, args, kwargs), value)
        if self.nodes[node].dtype != target.dtype or self.nodes[node].vector != (target.dim() > 0):
            args_ = (("self", Ref(node)),)
            node = self.add(Node("cast", args_, target.dtype, target.dtype, vector=target.dim() > 0))
        result = func(*args, **kwargs)
        cell.node = node
        if result is not None and id(result) not in self.cells:
            self.own(result, cell)
        return result

    def _record(self, func: Any, name: str, bound: dict[str, Any], result: torch.Tensor) -> int:
        if result.dim() > 0 and tuple(result.shape) != self.shape:
            raise self.refuse(name, f"its result has the shape {tuple(result.shape)} instead of {self.shape}")
        operands = [value for value in bound.values() if isinstance(value, torch.Tensor | float | int)]
        compute = result.dtype
        if compute is torch.bool:
            compute = _result_type([v for v in operands if not isinstance(v, bool)])
        if name in ("clone", "_to_copy"):
            args: tuple[tuple[str, Any], ...] = (("self", self.read(bound["self"], name)),)
            return self.add(Node("cast", args, result.dtype, result.dtype, result.dim() > 0))
        args = tuple((key, self.read(value, name)) for key, value in bound.items())
        return self.add(Node(name, args, result.dtype, compute, result.dim() > 0, func))


def _result_type(operands: Sequence[Any]) -> torch.dtype:
    if len(operands) == 1:
        return operands[0].dtype if isinstance(operands[0], torch.Tensor) else torch.float64
    dtype = torch.result_type(operands[0], operands[1])
    return dtype if len(operands) == 2 else _result_type([torch.empty(1, dtype=dtype, device="cpu"), *operands[2:]])


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by their names in the schema, with defaults."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.default_value is not None or not argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def _stand_in(dtype: torch.dtype, shape: tuple[int, ...], position: int) -> torch.Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.ones(shape, dtype=dtype, device="cpu")
    values = torch.linspace(0.25, 0.75, math.prod(shape), dtype=torch.float64, device="cpu") + position / 16
    return values.to(dtype).reshape(shape)


def _trace_once(
    fn: Callable[..., Any],
    where: str,
    marks: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    shape: tuple[int, ...],
    salt: float,
    watcher: Watcher,
) -> Graph:
    recorder = _Recorder(where, shape, salt)
    values: list[Any] = []
    cells: list[_Cell] = []
    scalars = 0
    # Beside a floating role a 0-d double promotes as a Python number does; beside integers only the default dtype does.
    floating = any(kind.is_floating_point or kind.is_complex for kind in dtypes)
    for mark in marks:
        if mark == "role":
            role, dtype = len(cells), dtypes[len(cells)]
            cells.append(_Cell(recorder.add(Node("role", (("position", role),), dtype, dtype, vector=True)), role))
            values.append(recorder.own(_stand_in(dtype, shape, role), cells[-1]))
        elif isinstance(mark, str):
            whole = mark == "whole"
            kind = torch.int64 if whole else torch.float64 if floating else torch.get_default_dtype()
            value = torch.tensor(2 + scalars if whole else 0.5 + scalars / 64, dtype=kind, device="cpu")
            node = recorder.add(Node("scalar", (("position", scalars),), kind, kind, vector=False))
            values.append(recorder.own(value, _Cell(node)))
            scalars += 1
        else:
            values.append(mark[1])
    first = [cell.node for cell in cells]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of deprecated calls in fn once more when fn itself runs
        with recorder, _NoReads(where):
            result = watcher.run(lambda: fn(*values))
    mutated = tuple((role, cell.node) for role, cell in enumerate(cells) if cell.node != first[role])
    single = isinstance(result, torch.Tensor)
    results: Any = [result] if single else [] if result is None else result
    if not isinstance(results, list | tuple) or not all(isinstance(value, torch.Tensor) for value in results):
        given = type(result).__name__
        raise TypeError(f"{where} returned a {given}; return a tensor or a tuple, or None after changes in place")
    returned, same = [], []
    for value in results:
        cell = recorder.cells.get(id(value))
        if cell is None or value.dim() == 0:
            raise NotPointwiseError(
                f"{where} returned a tensor of shape {tuple(value.shape)} that is not one value per element"
            )
        returned.append(cell.node)
        is_role = cell.role is not None and cell.node != first[cell.role]
        same.append(cell.role if is_role else None)
    nodes = tuple(recorder.nodes)
    return Graph(nodes, len(dtypes), scalars, tuple(returned), tuple(same), mutated, single, tuple(dtypes))


def trace(
    fn: Callable[..., Any], where: str, marks: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> tuple[Graph, Reads]:
    """The graph of `fn`, whose arguments are marked as `Fused.classify` does, and what it read besides them.

    The function runs twice, on stand-ins of different shape and values: a function whose operations depend on the shape, the
    number of elements or a value is thereby found out and refused, instead of being compiled for one of the cases.
    """
    if sys.getprofile() is None:
        return run_outside(_trace, fn, where, marks, dtypes)
    # A profiler is at work, and what the function reads is seen by one: a thread of its own has none.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_trace, fn, where, marks, dtypes).result()


def _trace(
    fn: Callable[..., Any], where: str, marks: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> tuple[Graph, Reads]:
    watchers = Watcher(), Watcher()
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        first = _trace_once(fn, where, marks, dtypes, (5,), 1.0 / 3.0, watchers[0])
        second = _trace_once(fn, where, marks, dtypes, (2, 3), 2.0 / 7.0, watchers[1])
    if first != second:
        raise NotPointwiseError(
            f"{where} does something else for another shape or value of a scalar, so it can't be compiled once. "
            "Keep shapes, sizes and the values of scalars out of Python arithmetic and branches, or pass a bool, "
            "which is a constant"
        )
    return first, Reads(fn, *watchers)
