"""One call for many tensors: those of one shape, with equal settings and state of one structure, are stacked.

A function of one matrix is run for all matrices of its kind under `torch.vmap`, so that the number of operations does not grow with
the number of matrices. State is stored as rows of the stacks: the next call restacks it without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import in_transform, is_fake, map_batched
from ._settings import same
from ._vectorize import OutOfPlace

__all__ = ["map_alike"]

Item = Sequence[Any]
"""The tensors of one call; None where there is none."""

# The largest number of elements in a stack on an accelerator. Copies of all matrices of a large model would not fit into memory
# beside it, and one matrix of this size uses the whole device.
STACK_LIMIT = 2**24
# The same on the CPU: about the size of a core's cache, because each operation passes over the whole stack.
HOST_STACK_LIMIT = 2**18
# On the CPU fewer or larger tensors are not stacked: a stacked call dispatches some hundred further operations, which takes longer
# than it saves for few tensors, and for large ones there is little to save.
HOST_LEAST = 16
HOST_LARGEST = 2**14


def map_alike(
    function: Callable[[int, Item, dict[str, Any]], Any],
    items: Sequence[Item],
    states: Sequence[dict[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    kinds: Sequence[Any] | None = None,
) -> list[Any]:
    """Return the results of a function for each item, with one call for all items that are alike.

    Items are alike whose tensors have the same shapes, dtypes and devices, whose settings and kinds are equal, and whose state has
    one structure: the same keys and shapes, and the same values where they are no tensors. A function of several such items runs
    under `torch.vmap`: it must not branch on the values of a tensor. Random numbers are drawn once for all of them. On the CPU
    only 16 or more tensors of less than 16,384 numbers share a call: to stack fewer or larger ones costs more than it saves.

    Args:
        function: Called with the position of an item (of the first, if it is called for several), its tensors and its state,
            which it may change. Returns a tensor, None, or nested data of tensors.
        items: The tensors of each item; a function of several gets copies.
        states: The state of each item.
        settings: The settings of each item; tensors among them are compared by identity.
        kinds: Further values that have to be equal.

    Returns:
        The results, in the order of the items. Those of a stack are its rows.

    Example:
        >>> import torch
        >>> from moduli.optim import map_alike
        >>> calls = []
        >>> def square(i, tensors, state):
        ...     calls.append(i)
        ...     return tensors[0] @ tensors[0]
        >>> items = [(torch.eye(3),)] + [(torch.eye(2) * k,) for k in range(20)]
        >>> out = map_alike(square, items, [{} for _ in items], [{}] * len(items))
        >>> calls, out[4]
        ([0, 1], tensor([[9., 0.],
                [0., 9.]]))
    """
    if len(items) == 1:
        return [function(0, items[0], states[0])]
    results: list[Any] = [None] * len(items)
    rows = list(map(_flatten, states))
    for places in _group(items, rows, settings, kinds or [None] * len(items)):
        if len(places) == 1:
            i = places[0]
            results[i] = function(i, items[i], states[i])
        else:
            stacked = _call_stacked(
                function, places, [items[i] for i in places], [states[i] for i in places], [rows[i] for i in places]
            )
            for i, result in zip(places, stacked, strict=True):
                results[i] = result
    return results


class _Items(tuple[Any, ...]):
    """The structure of a dictionary: its keys and the structures of its values, in order."""


class _Flattened(NamedTuple):
    """Nested data as its tensors and its structure, which is equal for data that differs only in its tensors."""

    tensors: list[Tensor]
    structure: Any

    def matches(self, other: _Flattened) -> bool:
        """Return whether the data differs only in the values of its tensors."""
        return self.structure == other.structure and all(
            one.shape == two.shape and one.dtype == two.dtype
            for one, two in zip(self.tensors, other.tensors, strict=True)
        )


def _flatten(value: Any) -> _Flattened:
    """Return nested dictionaries and lists as tensors and structure."""
    tensors: list[Tensor] = []

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Tensor
        if isinstance(value, dict):
            return _Items([(key, visit(each)) for key, each in value.items()])
        return [visit(each) for each in value] if isinstance(value, list) else value

    return _Flattened(tensors, visit(value))


def _unflatten(tensors: Iterable[Tensor], structure: Any) -> Any:
    """Return the nested data with this structure and these tensors."""
    remaining = iter(tensors)

    def visit(structure: Any) -> Any:
        if structure is Tensor:
            return next(remaining)
        if isinstance(structure, _Items):
            return {key: visit(each) for key, each in structure}
        return [visit(each) for each in structure] if isinstance(structure, list) else structure

    return visit(structure)


def _group(
    items: Sequence[Item], rows: Sequence[_Flattened], settings: Sequence[Mapping[str, Any]], kinds: Sequence[Any]
) -> list[list[int]]:
    """Return the positions of items, grouped by shared calls."""
    groups_by_shape: dict[Any, list[list[int]]] = {}
    for i, item in enumerate(items):
        key = tuple(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in item)
        groups = groups_by_shape.setdefault(key, [])
        for places in groups:
            first = places[0]
            if same(settings[i], settings[first]) and kinds[i] == kinds[first] and rows[i].matches(rows[first]):
                places.append(i)
                break
        else:
            groups.append([i])
    stacks = []
    for groups in groups_by_shape.values():
        for places in groups:
            length = _limit_stack(items[places[0]], len(places))
            stacks += [places[start : start + length] for start in range(0, len(places), length)]
    return stacks


def _limit_stack(item: Item, count: int) -> int:
    """Return the largest number of items like this one in a stack, if there are `count` of them."""
    largest = max((tensor for tensor in item if tensor is not None), key=Tensor.numel, default=None)
    size = 0 if largest is None else largest.numel()
    if largest is None or not size:
        return 1
    if largest.device.type == "cpu":
        return HOST_STACK_LIMIT // size if count >= HOST_LEAST and size < HOST_LARGEST else 1
    return max(STACK_LIMIT // size, 1)


def _call_stacked(
    function: Callable[[int, Item, dict[str, Any]], Any],
    places: Sequence[int],
    items: Sequence[Item],
    states: Sequence[dict[str, Any]],
    rows: Sequence[_Flattened],
) -> list[Any]:
    """Call a function once for several items, write the new states, and return the results, each as rows of a stack.

    Args:
        function: The function.
        places: The positions of the items.
        items: Their tensors.
        states: Their states.
        rows: These states, flattened.
    """
    # Copies, which the function may write into: the tensors may be gradients.
    stacks = {k: torch.stack(column) for k, column in enumerate(zip(*items, strict=True)) if column[0] is not None}
    columns = [join_rows(column) for column in zip(*(row.tensors for row in rows), strict=True)]
    call = _StackedCall(function, places[0], (len(items[0]), list(stacks)), rows[0].structure)
    out = map_batched(call.run, [*stacks.values(), *(stack for stack, _ in columns)])
    results, new_stacks = out[: call.result_count], out[call.result_count :]
    if new_stacks or any(copied for _, copied in columns) or call.state_structure != call.structure:
        call.write_states(states, [stack for stack, _ in columns], new_stacks)
    # Results that do not depend on the batch are expanded views, but links write into updates.
    unbound = [result.contiguous().unbind() for result in results]
    return [_unflatten([rows_of[k] for rows_of in unbound], call.result_structure) for k in range(len(places))]


class _StackedCall:
    """A call of a function for several items: a function of tensors alone, which `torch.vmap` can batch.

    Args:
        function: The function.
        place: The position of the first item.
        item: The length of an item, and the positions of its tensors; the others are None.
        structure: The structure of the states.

    Attributes:
        result_count: The number of tensors in the result; the attributes are set by the call.
        result_structure: The structure of the result.
        state_structure: The structure of the new state.
        origins: For each tensor of the new state the position of the input tensor that it is, or None for a new tensor.
    """

    result_count: int
    result_structure: Any
    state_structure: Any
    origins: list[int | None]

    def __init__(
        self,
        function: Callable[[int, Item, dict[str, Any]], Any],
        place: int,
        item: tuple[int, Sequence[int]],
        structure: Any,
    ) -> None:
        self.function, self.place, self.structure = function, place, structure
        self._length, self._positions = item

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the result, and those of the new state that are no tensors of the old one."""
        count = len(self._positions)
        own, leaves = dict(zip(self._positions, tensors[:count], strict=True)), tensors[count:]
        state = _unflatten(leaves, self.structure)
        with OutOfPlace():
            result = self.function(self.place, [own.get(k) for k in range(self._length)], state)
        results, self.result_structure = _flatten(result)
        after, self.state_structure = _flatten(state)
        positions = {id(leaf): k for k, leaf in enumerate(leaves)}
        # A tensor that was written in place is the input, whose stack has the new values.
        self.origins = [positions.get(id(leaf)) for leaf in after]
        self.result_count = len(results)
        return [*results, *(leaf for leaf, origin in zip(after, self.origins, strict=True) if origin is None)]

    def write_states(
        self, states: Sequence[dict[str, Any]], columns: Sequence[Tensor], new_stacks: Sequence[Tensor]
    ) -> None:
        """Write the new state of each item, as rows of stacks.

        Args:
            states: The states of the items.
            columns: The stacks of their tensors.
            new_stacks: The stacks of new tensors.
        """
        fresh = iter(new_stacks)
        parts = [(next(fresh).contiguous() if origin is None else columns[origin]).unbind() for origin in self.origins]
        for k, state in enumerate(states):
            row = _unflatten([part[k] for part in parts], self.state_structure)
            for key in state.keys() - row.keys():
                del state[key]
            state.update(row)


def join_rows(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return tensors of one shape stacked, and whether that is a copy; rows of one tensor are stacked as a view."""
    first, count = tensors[0], len(tensors)
    if not (in_transform() or is_fake(first) or torch.is_grad_enabled()) and all(map(Tensor.is_contiguous, tensors)):
        size = first.numel()
        start, step = first.data_ptr(), size * first.element_size()
        # All addresses are inside the storage of the first, so that no other storage can have them.
        inside = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size() >= count * step
        if inside and [tensor.data_ptr() for tensor in tensors] == list(range(start, start + count * step, step or 1)):
            return first.as_strided((count, *first.shape), (size, *first.stride())), False
    return torch.stack(list(tensors)), True
