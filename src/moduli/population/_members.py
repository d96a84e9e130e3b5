"""Members: modules whose parameters and buffers are views of a population's storage.

A member is an ordinary particle that can be called, trained and saved. Its structure is that of the whole population, so an
edit of it raises: immediately where torch has a hook (assigning a parameter, a child or a buffer anywhere in the tree),
otherwise when the population is used next.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from moduli.layout import diff, find_computed, read, recompute_weights
from moduli.nn import Module as LabelledModule
from moduli.particles import StructureError, pin

T = TypeVar("T", bound=nn.Module)

_REMEDY = (
    "a member shares the structure of its population: edit a copy (`copy.deepcopy(pop[i])`), or edit the modules and "
    "build a new population with Population.from_modules"
)
_MOVING = "convert the whole population with pop.to(...), or a copy of the member (`copy.deepcopy(pop[{}])`)"


# The structure, parameters, addresses and buffers of each live member at the time of its creation.
_held: weakref.WeakKeyDictionary[nn.Module, MemberTensors] = weakref.WeakKeyDictionary()
# The index of the member and the buffers of each module of live members, by id, because a class may not be hashable.
_guards: dict[int, tuple[int, dict[str, Any]]] = {}


class MemberTensors(NamedTuple):
    """The views of its row that a member has, the addresses and dtypes of its parameters, and its structure."""

    parameters: list[Any]
    buffers: list[Any]
    places: list[tuple[int, torch.dtype]]
    structure: Any


class Members(weakref.WeakValueDictionary[int, nn.Module]):
    """The live members of one population by index, each as long as a program references it.

    Attributes:
        leaves: The live parameters of members, by index of the member and position in the layout. An optimizer may reference
            them when the member itself is gone; the next module of that member reuses them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leaves: weakref.WeakValueDictionary[tuple[int, int], nn.Parameter] = weakref.WeakValueDictionary()

    def add(self, index: int, member: nn.Module, parameters: list[Any], buffers: list[Any]) -> None:
        """Register a member.

        Args:
            index: The index of the member.
            member: The module.
            parameters: Its parameters, in the order of the layout.
            buffers: Its buffers.
        """
        _install()
        self.leaves.update(((index, place), parameter) for place, parameter in enumerate(parameters))
        pin(member, f"it is member {index} of a population; {_MOVING.format(index)}")
        for module in member.modules():
            _guards[id(module)] = (index, dict(module._buffers))
            weakref.finalize(module, _guards.pop, id(module), None)
        self[index] = member
        places = [(parameter.data_ptr(), parameter.dtype) for parameter in parameters]
        _held[member] = MemberTensors(parameters, buffers, places, read(member).structure)

    def visit(self) -> Iterator[tuple[int, nn.Module, MemberTensors]]:
        """Iterate over index, module and tensors of each live member."""
        for index, member in list(self.items()):
            yield index, member, _held[member]

    def check(self) -> None:
        """Raise if a live member was edited or moved.

        Raises:
            StructureError: If one was. An edited module is removed from the members first.
        """
        for index, member, before in self.visit():
            for parameter, (where, dtype) in zip(before.parameters, before.places, strict=True):
                if parameter.dtype is not dtype or parameter.data_ptr() != where:
                    refuse_moved(index, parameter)
            now = read(member)
            same = [*map(is_, (*now.parameters, *now.buffers), (*before.parameters, *before.buffers))]
            if now.structure is not before.structure or not all(same):
                layout = before.structure.layout
                names = [*layout.names, *(entry.name for entry in layout.buffers)]
                change = diff(layout, now.structure.layout) or f"{names[same.index(False)]!r} was exchanged"
                del self[index]
                for key in [key for key in self.leaves if key[0] == index]:
                    del self.leaves[key]
                for module in member.modules():
                    _guards.pop(id(module), None)
                raise StructureError(
                    f"member {index} was edited, so it is a model of its own now ({change}); {_REMEDY}"
                )

    def mark_touched(self) -> None:
        """Increment the version counters of live members after a change of their values."""
        torch.autograd.graph.increment_version(list(self.leaves.values()))


def refuse_moved(index: int, parameter: Tensor) -> NoReturn:
    """Raise StructureError for a parameter that is no longer a view of the population."""
    raise StructureError(
        f"member {index} was moved out of its population (a parameter is now {parameter.dtype} on {parameter.device}, in "
        f"storage of its own); {_MOVING.format(index)}"
    )


def _refuse(module: nn.Module, name: str, value: Any) -> None:
    guard = _guards.get(id(module))
    if (
        guard is not None
        and (module._modules if isinstance(value, nn.Module) else module._parameters).get(name) is not value
    ):
        raise StructureError(f"{name!r} of member {guard[0]} cannot be assigned: {_REMEDY}")


def _rebind(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """Copy a tensor that is assigned to a buffer of a member into the population, and return the buffer for registration."""
    index, buffers = _guards.get(id(module), (0, None))
    buffer = None if buffers is None else buffers.get(name)
    if buffers is None or (buffer is not None and module._buffers.get(name) is not buffer):
        # Not a member, or the buffer is replaced during a call, as torch.func.functional_call does.
        return None
    if buffer is None or not isinstance(value, Tensor) or value.shape != buffer.shape or value.dtype != buffer.dtype:
        raise StructureError(f"buffer {name!r} of member {index} cannot be assigned: {_REMEDY}")
    with torch.no_grad():
        buffer.copy_(value)
    return buffer


@functools.cache
def _install() -> None:
    _torch_module.register_module_parameter_registration_hook(_refuse)
    _torch_module.register_module_module_registration_hook(_refuse)
    _torch_module.register_module_buffer_registration_hook(_rebind)  # type: ignore[arg-type]


# -- building ----------------------------------------------------------------------------------------------------------


def repeat_buffers(buffers: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return stacked, contiguous copies of one model's buffers, so that every row and slice of them is a view."""
    return {
        name: buffer.detach().expand(count, *buffer.shape).clone(memory_format=torch.contiguous_format)
        for name, buffer in buffers.items()
    }


def tracks_versions(template: nn.Module) -> bool:
    """Whether a model caches derived tensors, which it recomputes when the version of a parameter changes."""
    return any(isinstance(module, LabelledModule) for module in template.modules())


def row_view(matrix: Tensor, row: int, start: int, shape: Sequence[int]) -> Tensor:
    """Return part of a row as a tensor; on the CPU its storage covers only that part, so that saving writes no other rows.

    Args:
        matrix: The matrix of a group.
        row: The row.
        start: The first column.
        shape: The shape of the result.
    """
    count = math.prod(shape)
    if matrix.device.type == "cpu" and not matrix.is_inference():
        plain = matrix.detach()
        brain = plain.dtype is torch.bfloat16
        array = (plain.view(torch.int16) if brain else plain).numpy()
        part = torch.from_numpy(array[row, start : start + count].reshape(tuple(shape)))
        return part.view(torch.bfloat16) if brain else part
    return matrix.data[row].narrow(0, start, count).view(tuple(shape))


def build(
    template: nn.Module, entries: Sequence[Tensor], parameters: Sequence[Any], buffers: dict[str, Tensor]
) -> nn.Module:
    """Return a copy of the template with other parameters and buffers.

    Args:
        template: The module to copy.
        entries: Its parameters, in the order of the layout.
        parameters: The parameters in place of them.
        buffers: The buffers of the copy, by name.
    """
    memo: dict[int, Any] = {id(old): new for old, new in zip(entries, parameters, strict=True)}
    for name, buffer in template.named_buffers():
        memo[id(buffer)] = buffers[name]
    # A weight that a hook computes (pruning) is that of the last call, which may have been vectorised.
    computed = [
        value
        for each in template.modules()
        for name in find_computed(each._forward_pre_hooks)
        if isinstance(value := each.__dict__.get(name), Tensor)
    ]
    memo |= {id(value): torch.empty(0) for value in computed}
    module: nn.Module = copy.deepcopy(template, memo)
    if computed:
        recompute_weights(module)
    return module


def copy_model(module: T) -> T:
    """Return a deep copy of a model.

    Raises:
        StructureError: If an attribute is a tensor computed from parameters, which members could not have separately.
    """
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise StructureError(
                    f"{f'{path}.{name}' if path else name!r} is computed from other parameters and kept as an attribute, as "
                    "pruning and weight_norm do; make it a parameter first (torch.nn.utils.prune.remove, "
                    "torch.nn.utils.remove_weight_norm), or use torch.nn.utils.parametrize"
                )
    return copy.deepcopy(module)
