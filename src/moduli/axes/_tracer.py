"""`Tracer`: records the operations of one forward, and applies their rules, which pair the axes of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import pytree
from ._atoms import INPUT, UNREAD, Atoms, Dim

Origins = frozenset[tuple[str, int]]
"""The axes (parameter, position) from which an axis of a value comes."""
NOWHERE: Origins = frozenset()


class Constant:
    """The state of memory in which all entries are equal until it is written; views share it."""

    def __init__(self) -> None:
        self.written = False


@dataclasses.dataclass(frozen=True)
class Traced:
    """The axes of one tensor of the forward, which rules take instead of the tensor.

    Attributes:
        shape: The shape of the tensor.
        dims: Its axes.
        origins: For each axis, the axes of parameters from which it comes, if the tensor depends on parameters only.
        varies: Whether the tensor depends on the inputs.
        points: The axis into which the tensor's entries are indices, for results such as the indices of `topk`.
        selected: Whether the tensor has entries of parameters selected by computed indices: it is a weight, although it varies.
        constant: Set while all entries of the tensor, and of the tensors that share its memory, are equal.
    """

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    origins: tuple[Origins, ...]
    varies: bool = False
    points: Dim | None = None
    selected: bool = False
    constant: Constant | None = None

    def pick(self, order: Iterable[int | None]) -> Traced:
        """Return these axes in another order; None for a new axis of size one."""
        order = list(order)
        return dataclasses.replace(
            self,
            shape=tuple(1 if axis is None else self.shape[axis] for axis in order),
            dims=tuple(() if axis is None else self.dims[axis] for axis in order),
            origins=tuple(NOWHERE if axis is None else self.origins[axis] for axis in order),
        )

    def change(self, axis: int, dim: Dim, size: int) -> Traced:
        """Return these axes with one of them replaced.

        Args:
            axis: Its position.
            dim: The new axis.
            size: The size of the new axis.
        """
        shape, dims = list(self.shape), list(self.dims)
        shape[axis], dims[axis] = size, dim
        return dataclasses.replace(self, shape=tuple(shape), dims=tuple(dims))

    @property
    def is_constant(self) -> bool:
        """Whether all entries are equal."""
        return self.constant is not None and not self.constant.written


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""The rule of each operation, by name: "aten::mm"."""


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of operations, which declares the axes of their tensors that are the same.

    The rule is called with a `RuleCall` and the arguments of the operation, every tensor replaced by its `Traced` axes. It unifies
    axes (`call.same`), fixes those that can't be permuted (`call.fix`), and returns the axes of the result: a tuple of axes or a
    `Traced`; a list of these for several results.

    Args:
        *operations: Operations (`torch.ops.mylib.scale`) or their names ("mylib::scale"). A rule applies to all overloads and
            to the in-place form.

    Returns:
        The decorator.

    Example:
        >>> import torch, moduli as mo
        >>> @torch.library.custom_op("docs::scale", mutates_args=())
        ... def scale(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ...     return x * factor
        >>> @scale.register_fake
        ... def _(x, factor):
        ...     return torch.empty_like(x)
        >>> @mo.axes.rule("docs::scale")
        ... def scale_axes(call, x, factor):
        ...     call.same(x.dims[-1], factor.dims[0])
        ...     return x.dims
    """

    def register(function: Rule) -> Rule:
        RULES.update((_name_operation(operation), function) for operation in operations)
        return function

    return register


def _name_operation(operation: Any) -> str:
    if isinstance(operation, str):
        return operation
    name = operation.name() if hasattr(operation, "name") and callable(operation.name) else None
    if name is None:  # an overload packet, whose first overload has the name
        overloads = getattr(operation, "overloads", None)
        if overloads is None:
            raise TypeError(f"axes.rule: {operation!r} is no operation; give torch.ops.lib.name or 'lib::name'")
        name = getattr(operation, overloads()[0]).name()
    return str(name).split(".")[0]


class RuleCall:
    """One operation of the forward, as passed to its rule.

    Attributes:
        operation: Its name.
        shapes: The shapes of its results.
        atoms: All axes of the model.
    """

    def __init__(self, tracer: Tracer, operation: str, shapes: list[tuple[int, ...]]) -> None:
        self.operation, self.shapes, self.atoms = operation, shapes, tracer.atoms
        self._tracer = tracer

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.shapes[0]

    def same(self, left: Dim, right: Dim) -> Dim:
        """Unify two axes, entry by entry, and return the axis."""
        self.atoms.unify(left, right)
        return left if left else right

    def fix(self, dim: Dim, reason: str | None = None) -> None:
        """Fix an axis, which then can't be permuted, with a reason."""
        self.atoms.fix(dim, reason or f"{self.operation} depends on the order")

    def new(self, size: int, reason: str | None = None) -> Dim:
        """Return a new axis, fixed if there is a reason."""
        return self.atoms.new(size, *([] if reason is None else [reason]))

    def contract(self, left: Traced, i: int, right: Traced, j: int) -> None:
        """Unify two axes that are summed over in a product; an axis of a parameter among them is the input of its layer.

        Args:
            left: One operand.
            i: Its axis.
            right: The other operand.
            j: Its axis.
        """
        self.same(left.dims[i], right.dims[j])
        for weight, axis, other in ((left, i, right), (right, j, left)):
            if other.varies:
                self.use(weight, axis, "in")

    def use(self, weight: Traced, axis: int, what: str) -> None:
        """Record the use of an axis of a parameter in its layer.

        Args:
            weight: The parameter, or a tensor computed from it.
            axis: The axis.
            what: Its use: "in", "out", "index", "batch" or "kernel".
        """
        for origin in sorted(weight.origins[axis]):
            if self._tracer.uses.setdefault(origin, what) != what:
                self._tracer.reused.add(origin[0])

    def use_rest(self, weight: Traced, *others: int) -> None:
        """Record that all axes of a parameter except these are outputs of its layer."""
        for axis in range(len(weight.dims)):
            if axis - len(weight.dims) not in others and axis not in others:
                self.use(weight, axis, "out")


class _Operation(NamedTuple):
    """One operation that has run."""

    name: str
    pointwise: bool
    args: Any
    kwargs: Any
    outputs: list[Tensor]
    shapes: list[tuple[int, ...]]

    @property
    def in_place(self) -> bool:
        return self.name.endswith("_") and not self.name.endswith("__")


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations while they run; `replay` pairs the axes of their tensors.

    Attributes:
        atoms: All axes.
        uses: The use of each axis (parameter, position) in its layer.
        reused: Parameters with two uses, such as an embedding that is also a head.
        unknown: Operations without a rule, and how often each ran.
        touched: Parameters and buffers that an operation has read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.atoms = Atoms()
        self.uses: dict[tuple[str, int], str] = {}
        self.reused: set[str] = set()
        self.unknown: dict[str, int] = {}
        self.touched: set[str] = set()
        # By `id`; the tensor is stored too, so that its id is not reused.
        self._values: dict[int, tuple[Tensor, Traced]] = {}
        self._tape: list[_Operation] = []

    def enter_parameter(self, name: str, tensor: Tensor) -> Traced:
        """Give a parameter or buffer new axes."""
        origins = tuple(frozenset({(name, axis)}) for axis in range(tensor.dim()))
        return self._store(tensor, Traced(tuple(tensor.shape), self._make_dims(tensor), origins))

    def enter_input(self, tensor: Tensor) -> Traced:
        """Give an input fixed axes."""
        traced = self._make_fixed(tensor, INPUT)
        return self._store(tensor, dataclasses.replace(traced, varies=True))

    def fix_output(self, tensor: Tensor, reason: str) -> None:
        """Fix the axes of an output."""
        traced = self.read(tensor)
        for dim in (*traced.dims, *([] if traced.points is None else [traced.points])):
            self.atoms.fix(dim, reason)

    def read(self, tensor: Tensor) -> Traced:
        """Return the axes of a tensor; fixed ones for a tensor that no recorded operation made."""
        entry = self._values.get(id(tensor))
        if entry is None:
            return self._store(tensor, self._make_fixed(tensor, "a constant of the forward"))
        self.touched.update(name for origins in entry[1].origins for name, _ in origins)
        return entry[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if not name.startswith("prim::"):
            outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            pointwise = torch.Tag.pointwise in func.tags
            self._tape.append(
                _Operation(name, pointwise, args, kwargs or {}, outputs, [tuple(o.shape) for o in outputs])
            )
        return result

    def replay(self, outputs: Sequence[Tensor]) -> None:
        """Apply the rules, in order, of the operations that the outputs depend on."""
        needed = set(map(id, outputs))
        wanted = []
        for operation in reversed(self._tape):
            if operation.in_place or any(id(output) in needed for output in operation.outputs):
                needed.update(id(leaf) for leaf in pytree.tree_leaves((operation.args, operation.kwargs)))
                wanted.append(operation)
        for operation in reversed(wanted):
            self._apply(operation)

    def _apply(self, operation: _Operation) -> None:
        name, pointwise, args, kwargs, outputs, shapes = operation
        in_place = operation.in_place
        function = RULES.get(name) or (RULES.get(name[:-1]) if in_place else None)
        if function is None and pointwise:
            function = RULES["pointwise"]
        views = getattr(function, "views", False)

        def read(tensor: Tensor) -> Traced:
            traced = self.read(tensor)
            if traced.is_constant and not views and not (in_place and tensor is args[0]):
                # Equal entries have no identity: two operations that read them do not pair their axes.
                return dataclasses.replace(traced, dims=self._make_dims(tensor))
            return traced

        arguments, keywords = pytree.tree_map_only(Tensor, read, (args, kwargs))
        operands = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, Traced)]
        if function is None:
            self.unknown[name] = self.unknown.get(name, 0) + 1
            results = self._fix_operands(name, operands, outputs)
        else:
            self._fix_points(function, name, operands)
            call = RuleCall(self, name, shapes)
            results = self._complete(function(call, *arguments, **keywords), operands, outputs, views)
        if in_place and not views and operands:
            self._write(operands[0], results)
        for output, traced in zip(outputs, results, strict=True):
            self._store(output, traced)

    def _fix_points(self, function: Rule, name: str, operands: Sequence[Traced]) -> None:
        """Fix the axes into which indices point, unless the rule handles them (`keep_points`)."""
        for operand in () if getattr(function, "reads_points", False) else operands:
            if operand.points is not None:
                self.atoms.fix(operand.points, f"{name} computes with its indices")

    def _write(self, target: Traced, results: list[Traced]) -> None:
        """Pair the axes of a tensor that is written to with those of the result."""
        if target.constant is not None:
            target.constant.written = True
        if results and results[0].shape == target.shape:
            for ours, theirs in zip(target.dims, results[0].dims, strict=True):
                self.atoms.unify(ours, theirs)

    def _fix_operands(self, name: str, operands: Sequence[Traced], outputs: Sequence[Tensor]) -> list[Traced]:
        reason = f"{name} has no rule"
        for operand in operands:
            for dim in (*operand.dims, *([] if operand.points is None else [operand.points])):
                self.atoms.fix(dim, reason)
        varies = any(operand.varies for operand in operands)
        return [dataclasses.replace(self._make_fixed(output, reason), varies=varies) for output in outputs]

    def _complete(
        self, answer: Any, operands: Sequence[Traced], outputs: Sequence[Tensor], views: bool
    ) -> list[Traced]:
        """Return one `Traced` for each result of an operation, from the answer of its rule; missing ones are fixed."""
        answers = answer if isinstance(answer, list) else [answer]
        varies = any(operand.varies for operand in operands)
        results = []
        for position, output in enumerate(outputs):
            each = answers[position] if position < len(answers) else None
            if each is None:
                each = self._make_fixed(output, "a result that its rule leaves out")
            elif not isinstance(each, Traced):
                each = Traced(tuple(output.shape), tuple(each), (NOWHERE,) * output.dim())
            constant = (
                each.constant if views or each.constant not in [operand.constant for operand in operands] else None
            )
            results.append(dataclasses.replace(each, varies=varies and not each.selected, constant=constant))
        return results

    def _store(self, tensor: Tensor, traced: Traced) -> Traced:
        if traced.varies:
            traced = dataclasses.replace(traced, origins=(NOWHERE,) * len(traced.dims))
        self._values[id(tensor)] = (tensor, traced)
        return traced

    def _make_dims(self, tensor: Tensor) -> tuple[Dim, ...]:
        return tuple(self.atoms.new(size) for size in tensor.shape)

    def _make_fixed(self, tensor: Tensor, reason: str) -> Traced:
        dims = tuple(self.atoms.new(size, reason) for size in tensor.shape)
        return Traced(tuple(tensor.shape), dims, (NOWHERE,) * tensor.dim())

    def finish(self, parameters: dict[str, Traced]) -> None:
        """Fix the axes of parameters that the forward did not read."""
        for name, traced in parameters.items():
            for dim in traced.dims:
                if name in self.touched:
                    self.atoms.fix_unread(dim)
                else:
                    self.atoms.fix(dim, UNREAD)
