"""Members: modules whose parameters and buffers are views of a population's storage.

A member is an ordinary particle that can be called, trained and saved. Its structure is that of the whole population,
so an edit of it is refused: at once where torch announces it (assigning a parameter, a child or a buffer anywhere in the
tree), otherwise when the population is used next.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from moduli.nn import Module as LabelledModule
from moduli.particles import StructureError

_REMEDY = (
    "a member shares the structure of its population: edit a copy (`copy.deepcopy(pop[i])`), or edit the modules and "
    "build a new population with Population.from_modules"
)


class Guard:
    """What one module of a member holds, to tell whether it still does and to put it back if it does not."""

    __slots__ = ("buffers", "children", "held", "index", "parameters", "path")

    def __init__(self, module: nn.Module, index: int, path: str) -> None:
        self.index = index
        self.path = path
        self.parameters: dict[str, Any] = dict(module._parameters)
        self.buffers: dict[str, Any] = dict(module._buffers)
        self.children: dict[str, Any] = dict(module._modules)
        # The registries themselves, which do not lead back to the module.
        live: tuple[Any, ...] = module._parameters, module._buffers, module._modules
        known = self.parameters, self.buffers, self.children
        self.held = [(now, then) for now, then in zip(live, known, strict=True) if now]

    def restore(self) -> None:
        """Put back what an edit took away or exchanged."""
        for held, known in self.held:
            if not _same(held, known):
                held.clear()
                held.update(known)

    def edited(self) -> str | None:
        """The first name that was edited, or None."""
        for held, known in self.held:
            if not _same(held, known):
                changed = [key for key in {**held, **known} if held.get(key) is not known.get(key)]
                return f"{self.path}.{changed[0]}" if self.path else changed[0]
        return None


def _same(held: dict[str, Any], known: dict[str, Any]) -> bool:
    try:
        # Comparing dicts asks for identity first, in C; only what differs is compared further, which tensors refuse.
        return held == known
    except (RuntimeError, ValueError, TypeError):
        return False


# The guard of each module of each live member.
_guards: weakref.WeakKeyDictionary[nn.Module, Guard] = weakref.WeakKeyDictionary()
# Of each live member the guards, the parameters and the buffers.
_held: weakref.WeakKeyDictionary[nn.Module, tuple[list[Guard], list[Any], list[Any]]] = weakref.WeakKeyDictionary()
_installed = False


class Members:
    """The live members of one population, each at most once."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._alive)

    def get(self, index: int) -> nn.Module | None:
        """The member of that number, if a program still holds it."""
        return self._alive.get(index)

    def add(self, index: int, member: nn.Module, parameters: list[Any], buffers: list[Any]) -> None:
        """Remember a member as long as a program holds it."""
        _install()
        guards = {module: Guard(module, index, path) for path, module in member.named_modules()}
        _guards.update(guards)
        self._alive[index] = member
        _held[member] = list(guards.values()), parameters, buffers

    def items(self) -> Iterator[tuple[int, nn.Module, list[Any], list[Any]]]:
        """Index, module, parameters and buffers of each live member."""
        for index, member in list(self._alive.items()):
            _, parameters, buffers = _held[member]
            yield index, member, parameters, buffers

    def check(self) -> None:
        """Check that no live member was edited or moved.

        Raises:
            StructureError: If one was; an edit is undone.
        """
        for index, member, parameters, _ in self.items():
            guards = _held[member][0]
            for parameter, where, dtype in parameters:
                if parameter.dtype is not dtype or parameter.data_ptr() != where:
                    raise StructureError(
                        f"member {index} was moved out of its population (a parameter is now {parameter.dtype} on "
                        f"{parameter.device}, in storage of its own); convert the whole population with pop.to(...), or a "
                        f"copy of the member (`copy.deepcopy(pop[{index}])`)"
                    )
            for guard in guards:
                name = guard.edited()
                if name is not None:
                    for each in guards:
                        each.restore()
                    raise StructureError(f"member {index} was edited at {name!r}, which was undone; {_REMEDY}")

    def mark_touched(self) -> None:
        """Let autograd and caches of live members know that their values changed."""
        for _, _, parameters, _ in self.items():
            torch.autograd.graph.increment_version([parameter for parameter, _, _ in parameters])


def _refuse(module: nn.Module, name: str, value: Any) -> None:
    if not _guards or (guard := _guards.get(module)) is None:
        return
    held = guard.children.get(name) if isinstance(value, nn.Module) else guard.parameters.get(name)
    if held is value and held is not None:
        return
    guard.restore()
    raise StructureError(f"{name!r} of member {guard.index} cannot be assigned: {_REMEDY}")


def _rebind(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """A buffer that is assigned anew keeps its place in the population: the values are copied there."""
    if not _guards or (guard := _guards.get(module)) is None:
        return None
    known: Any = guard.buffers.get(name)
    if known is None:
        guard.restore()
        raise StructureError(f"buffer {name!r} of member {guard.index} cannot be added: {_REMEDY}")
    here: Any = module._buffers.get(name)
    if value is known or here is not known:
        # The buffer is exchanged for the time of a call, as torch.func.functional_call does.
        return None
    if not isinstance(value, Tensor) or value.shape != known.shape or value.dtype != known.dtype:
        guard.restore()
        got = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise StructureError(
            f"buffer {name!r} of member {guard.index} is {tuple(known.shape)}, {known.dtype}; it cannot become {got}: {_REMEDY}"
        )
    with torch.no_grad():
        known.copy_(value)
    return known  # type: ignore[no-any-return]


def _install() -> None:
    global _installed
    if not _installed:
        _torch_module.register_module_parameter_registration_hook(_refuse)
        _torch_module.register_module_module_registration_hook(_refuse)
        _torch_module.register_module_buffer_registration_hook(_rebind)  # type: ignore[arg-type]
        _installed = True


# -- building ----------------------------------------------------------------------------------------------------------


def repeat_buffers(module: nn.Module, count: int) -> dict[str, Tensor]:
    """Copies of a module's buffers for each of some members, of whom a part or one is a view whatever the strides were."""
    return {
        name: held.detach().expand(count, *held.shape).clone(memory_format=torch.contiguous_format)
        for name, held in module.named_buffers()
    }


def tracks_versions(template: nn.Module) -> bool:
    """Whether a model derives tensors that it keeps while the versions of its parameters stay what they are."""
    return any(isinstance(module, LabelledModule) for module in template.modules())


def row_view(matrix: Tensor, row: int, start: int, shape: Sequence[int]) -> Tensor:
    """Part of a row as a tensor with a storage of its own, where torch can make one, that covers the part only.

    So saving a member does not write the whole population.
    """
    count = 1
    for size in shape:
        count *= size
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
    """A module like the template around given parameters and buffers."""
    memo: dict[int, Any] = {id(old): new for old, new in zip(entries, parameters, strict=True)}
    for name, held in template.named_buffers():
        memo[id(held)] = buffers[name]
    made: nn.Module = copy.deepcopy(template, memo)
    return made
