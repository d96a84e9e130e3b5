"""Tracing: a Python function is run once on placeholders, and the operations that reach torch are recorded as a graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import run_outside
from ._graph import Graph, Node, Ref
from ._memory import pause_collection
from ._purity import Purity, make_pure

aten = torch.ops.aten
_NAN = float("nan")

# Whole-tensor aliases: the result has the same cell, so a later change in place applies to both.
_ALIASES = {"detach", "alias", "view", "_unsafe_view", "_reshape_alias", "expand", "lift_fresh", "lift"}
# Their values, or the arguments that are.
_FACTORIES: dict[str, Any] = {"zero": 0, "fill": "value", "scalar_tensor": "s"}
for _name, _value in (("zeros", 0), ("ones", 1), ("full", "fill_value")):
    _FACTORIES |= dict.fromkeys((_name, f"new_{_name}", f"{_name}_like"), _value)
# The same values, perhaps in another dtype, and the argument that has them.
_COPIES = {"clone": "self", "_to_copy": "self", "copy": "src"}
# Pointwise, though torch does not tag them so in every version.
_ALSO_POINTWISE = {*_COPIES, "rsub", "log_sigmoid_forward", "floor_divide", "hardswish"}
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


@dataclass(slots=True, eq=False)
class _Cell:
    """The current value of a tensor, as a node. Whole-tensor aliases share one cell."""

    node: int
    role: int | None = None


class _NoReads(TorchFunctionMode):
    """Raises if a placeholder is converted to a Python number: the graph would have the number, not the argument."""

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
    """Records each operation that reaches torch while the function runs."""

    def __init__(self, where: str, shape: tuple[int, ...], salt: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.shape = shape
        self.salt = salt
        self.nodes: list[Node] = []
        self.cells: dict[int, _Cell] = {}
        self.keep: list[torch.Tensor] = []  # an id is only unique while its tensor lives
        self.sentinels: dict[float, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's check for its compiler imports all of it, in 1.5 seconds

    def run(self, fn: Callable[..., Any], marks: Sequence[Any], dtypes: Sequence[torch.dtype]) -> Graph:
        """Return the graph of a function, by a call on placeholders.

        Args:
            fn: The function.
            marks: The marks of its arguments, from `Fused.classify`.
            dtypes: The dtypes of the roles.
        """
        roles = [self._make_role(role, dtype) for role, dtype in enumerate(dtypes)]
        # Beside a floating role a 0-d double promotes as a Python number does; beside integers only the default dtype does.
        floating = any(kind.is_floating_point or kind.is_complex for kind in dtypes)
        number = torch.float64 if floating else torch.get_default_dtype()
        wholes = [mark == "whole" for mark in marks if mark in ("whole", "scalar")]
        scalars = [self._make_scalar(k, torch.int64 if whole else number) for k, whole in enumerate(wholes)]
        cells = [self.cells[id(role)] for role in roles]
        before = [cell.node for cell in cells]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch repeats warnings of fn when fn itself runs
            with self, _NoReads(self.where):
                result = fn(*fill_arguments(marks, roles, scalars))
        changed = {role: cell.node for role, cell in enumerate(cells) if cell.node != before[role]}
        outputs, results = self._place_results(changed, self._list_results(result))
        single = isinstance(result, torch.Tensor)
        sizes = (len(dtypes), len(scalars), outputs, len(changed))
        return Graph(tuple(self.nodes), *sizes, results, single, tuple(dtypes))

    def _place_results(
        self, changed: dict[int, int], values: Sequence[torch.Tensor]
    ) -> tuple[tuple[tuple[int, int | None], ...], tuple[tuple[str, int], ...]]:
        """Return the outputs of the graph (roles that were changed, then new values), and which each returned value is."""
        outputs: list[tuple[int, int | None]] = [(node, role) for role, node in changed.items()]
        results: list[tuple[str, int]] = []
        for value in values:
            cell = self.cells[id(value)]
            if cell.role is not None and cell.role in changed:
                results.append(("role", cell.role))
            else:
                results.append(("output", len(outputs)))
                outputs.append((cell.node, None))
        return tuple(outputs), tuple(results)

    def _make_role(self, role: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.linspace(1.25, 1.75, math.prod(self.shape), dtype=torch.float64, device="cpu") + role / 16
        node = self.add(Node("role", (("position", role),), dtype, dtype, vector=True))
        return self.own(numbers.to(dtype).reshape(self.shape), _Cell(node, role))

    def _make_scalar(self, position: int, dtype: torch.dtype) -> torch.Tensor:
        number = 0.5 + position / 64 if dtype.is_floating_point else 2 + position
        node = self.add(Node("scalar", (("position", position),), dtype, dtype, vector=False))
        return self.own(torch.tensor(number, dtype=dtype, device="cpu"), _Cell(node))

    def _list_results(self, result: Any) -> Sequence[torch.Tensor]:
        """Return the tensors that the function returned; raise if one is not one value per element."""
        results = list_results(result)
        if not isinstance(results, list | tuple) or not all(isinstance(value, torch.Tensor) for value in results):
            kind = type(result).__name__
            raise TypeError(f"{self.where} returned a {kind}; return a tensor, a tuple, or None after changes in place")
        for value in results:
            if id(value) not in self.cells or value.dim() == 0:
                raise NotPointwiseError(f"{self.where} returned shape {tuple(value.shape)}, not one value per element")
        return results

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
        """Return an argument of an operation as it is stored in the graph."""
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
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return self._scalar(args[0])
        bound = _bind(func, args, kwargs)
        if func._schema.is_mutable:
            return self._record_in_place(func, name, bound, args, kwargs)
        tagged = torch.Tag.pointwise in func.tags or name in _ALSO_POINTWISE or name in _ALIASES
        if name in _RANDOM or not (tagged or name in _FACTORIES):
            raise self.refuse(name, _WHY + ". Do this part outside the fused function (reductions: kernels.sum, norm)")
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) and name == "log_sigmoid_forward" else result
        if not isinstance(first, torch.Tensor):
            raise self.refuse(name, "it gives several results; use operations with one")
        self.own(first, self._record(func, name, bound, first))
        return result

    def _scalar(self, tensor: torch.Tensor) -> float | int:
        # torch reads a 0-d tensor where a number is expected (`alpha=lr`); the returned number identifies it.
        node = self.read(tensor, "_local_scalar_dense").index
        dtype = self.nodes[node].dtype
        if self.nodes[node].vector or dtype is torch.bool or dtype.is_complex:
            raise self.refuse("_local_scalar_dense", "it reads one element of a tensor")
        value = self.salt * (1.0 + len(self.sentinels) * 2.0**-20)
        if not dtype.is_floating_point:
            value = int(self.salt * 100) + len(self.sentinels)  # small enough for every integer dtype
        self.sentinels[value] = node
        return value

    def _record_in_place(self, func: Any, name: str, bound: dict[str, Any], args: Any, kwargs: Any) -> Any:
        target, packet = bound.get("self"), getattr(aten, name.removesuffix("_"), None)
        if not name.endswith("_") or packet is None or not isinstance(target, torch.Tensor):
            raise self.refuse(name, "it writes to out= or to a list; return the value instead")
        self.read(target, name)
        with self:
            value = packet(*args, **kwargs)
        node, vector = self.cells[id(value)].node, target.dim() > 0
        if self.nodes[node].dtype != target.dtype or self.nodes[node].vector != vector:
            node = self.add(Node("cast", (("self", Ref(node)),), target.dtype, target.dtype, vector))
        self.cells[id(target)].node = node
        func(*args, **kwargs)
        return target

    def _record(self, func: Any, name: str, bound: dict[str, Any], result: torch.Tensor) -> _Cell:
        source: Any = bound.get("self")
        # A number that the function converts to a tensor, `torch.tensor(0.5)`.
        wrapped = name.startswith("lift") and id(source) not in self.cells and source.dim() == 0
        if name in _ALIASES and not wrapped:
            self.read(source, name)
            if result.shape == source.shape:
                return self.cells[id(source)]
        op, args = ("constant", {"value": source.item()}) if wrapped else _find_meaning(name, bound)
        read = tuple((key, self.read(value, name)) for key, value in args.items())
        if result.dim() > 0 and tuple(result.shape) != self.shape:
            raise self.refuse(name, f"its result has the shape {tuple(result.shape)} instead of {self.shape}")
        compute = _find_compared(bound) if op is name and result.dtype is torch.bool else result.dtype
        node = Node(op, read, result.dtype, compute, result.dim() > 0, func if op is name else None)
        return _Cell(self.add(node))


def _find_meaning(name: str, bound: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an operation of torch and its arguments as the graph has them: a constant, a cast or itself."""
    if name in _FACTORIES:
        value = _FACTORIES[name]
        return "constant", {"value": bound[value] if isinstance(value, str) else value}
    if name in _ALIASES or name in _COPIES:
        return "cast", {"self": bound[_COPIES.get(name, "self")]}
    return name, bound


def _find_compared(bound: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which a comparison compares its operands."""
    operands: list[Any] = [v for v in bound.values() if isinstance(v, torch.Tensor | float) or type(v) is int]
    return torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype


def fill_arguments(marks: Sequence[Any], roles: Iterable[Any], scalars: Iterable[Any]) -> list[Any]:
    """Return the arguments of a function by the marks of `Fused.classify`.

    Args:
        marks: The marks.
        roles: The values of the roles.
        scalars: The values of the scalars.
    """
    every_role, every_scalar = iter(roles), iter(scalars)
    return [
        next(every_role) if mark == "role" else next(every_scalar) if isinstance(mark, str) else mark[1]
        for mark in marks
    ]


def list_results(result: Any) -> Any:
    """Return the results of a function as a list or tuple; a single tensor as a list of one, None as an empty one."""
    return [result] if isinstance(result, torch.Tensor) else [] if result is None else result


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by their names in the schema, with defaults."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.default_value is not None or not argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def trace(
    fn: Callable[..., Any], where: str, marks: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> tuple[Graph, Purity]:
    """Return the graph of `fn` and the values that it read besides its arguments.

    The function runs twice, on placeholders of different shape and values, so that one whose operations depend on the shape, the
    number of elements or a value is detected, and raises instead of being compiled for one case.

    Args:
        fn: The function.
        where: Its name, for errors.
        marks: The marks of its arguments, from `Fused.classify`.
        dtypes: The dtypes of the roles.
    """
    recorders = _Recorder(where, (5,), 1.0 / 3.0), _Recorder(where, (2, 3), 2.0 / 7.0)
    purity = Purity()

    def run() -> list[Graph]:
        # No garbage is collected meanwhile: a finalizer of another library may call torch.
        with (
            pause_collection(),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
        ):
            return [recorder.run(make_pure(fn, purity), marks, dtypes) for recorder in recorders]

    first, second = run_outside(run)
    if first != second:
        raise NotPointwiseError(
            f"{where} does something else for another shape or value of a scalar, so it can't be compiled once. "
            "Keep shapes, sizes and the values of scalars out of Python arithmetic and branches, or pass a bool, "
            "which is a constant"
        )
    return first, purity
