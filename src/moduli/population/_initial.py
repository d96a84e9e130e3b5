"""What members start as.

A class initialises its members as it does one model: the operations on tensors that its constructor makes are recorded
while one model is built, and replayed for all members at once, with random ones drawing anew for each. A constructor that
draws random numbers from elsewhere (NumPy, Python) cannot be replayed; its members are built one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moduli._torch import pytree
from moduli.layout import layout_and_tensors
from moduli.particles import StructureError, adopt

from ._noise import normal, seeds


def initialise(pop: Any, init: Any, generator: torch.Generator | None) -> None:
    """Fill a population of copies as `Population.of` says."""
    if init is None:
        return
    if callable(init):
        with torch.no_grad():
            for name, leaf in pop.named_parameters():
                init(name, leaf.detach())
        pop._mark_changed()
        return
    if isinstance(init, float | int) and not isinstance(init, bool):
        noise = normal(pop.layout, seeds(len(pop), generator), scale=float(init))
        with torch.no_grad():
            for group, matrix, values in zip(pop.layout.groups, pop._values.matrices, noise, strict=True):
                if group.dtype.is_floating_point or group.dtype.is_complex:
                    matrix.add_(values)
        return
    raise ValueError(f"init={init!r}; give None, a number, or a function of a name and a stacked tensor")


def make_of_class(
    like: Callable[..., Any],
    make: Callable[..., nn.Module],
    count: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    generator: torch.Generator | None,
) -> Any:
    """A population of what a class makes."""
    with _replace_generator(generator):
        outside = _random_states()
        with _DrawRecorder() as recorder:
            first = make(*args, **kwargs)
        if not isinstance(first, nn.Module):
            raise TypeError(f"{getattr(make, '__name__', make)!r} made a {type(first).__name__}, not a torch.nn.Module")
        _, tensors = layout_and_tensors(first)
        replayable = outside == _random_states()
        held = [tensor.detach() for tensor in (*tensors, *first.buffers())]
        made = recorder.replay(held, count) if replayable and count else None
        pop = like(adopt(first), count)
        with torch.no_grad():
            targets = [*pop.layout.views(pop._values.matrices), *pop._buffers.values()]
            if made is not None:
                for target, value in zip(targets, made, strict=True):
                    target.copy_(value)
                return pop
            for index in range(1, count):
                _copy_one(pop, targets, index, make(*args, **kwargs))
    return pop


def _random_states() -> tuple[Any, ...]:
    """Where Python's and NumPy's generators are: a constructor that drew from them can't be replayed by torch."""
    name, key, *place = np.random.get_state(legacy=True)
    return (random.getstate(), name, np.asarray(key).tobytes(), *place)


def _copy_one(pop: Any, targets: list[Tensor], index: int, net: nn.Module) -> None:
    layout, tensors = layout_and_tensors(net)
    if layout.fingerprint != pop.layout.fingerprint:
        raise StructureError(f"member {index} was made with another structure than member 0")
    for target, value in zip(targets, (*tensors, *net.buffers()), strict=True):
        target[index].copy_(value)


@contextmanager
def _replace_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Constructors draw from torch's own generator, which takes the place of the given one for their time."""
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(1 << 62, (), generator=generator, device=generator.device)))
        yield


class _DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation on tensors, with the tensors it took and gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, out))
        return out

    def replay(self, held: list[Tensor], count: int) -> list[Tensor] | None:
        """What tensors would hold for each of `count` members; None if the operations cannot be replayed."""

        def one(blank: Tensor) -> list[Tensor]:
            known: dict[Any, Tensor] = {}
            for func, args, kwargs, out in self.tape:
                called, named = pytree.tree_map_only(Tensor, lambda t: known.get(_place(t), t), (args, kwargs))
                if not any(isinstance(each, Tensor) for each in pytree.tree_leaves((args, kwargs))):
                    # New storage is every member's own, so that random operations may fill it.
                    value = func(*called, **named)
                    made: Any = pytree.tree_map_only(Tensor, lambda t: _own(blank, t), value)
                else:
                    made = func(*called, **named)
                for before, after in zip(pytree.tree_leaves(out), pytree.tree_leaves(made), strict=True):
                    if isinstance(before, Tensor):
                        known[_place(before)] = after
            # A tensor that no operation made is the same for all, as far as torch can tell.
            return [known[_place(t)].clone() if _place(t) in known else _own(blank, t) for t in held]

        try:
            with torch.no_grad():
                return list(torch.vmap(one, randomness="different")(torch.zeros(count)))
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            # Some operation has no batching rule: members are then built one after the other.
            return None


def _own(blank: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a tensor for each member."""
    return tensor + blank.to(tensor.dtype) if tensor.dtype is not torch.bool else tensor ^ blank.to(torch.bool)


def _place(tensor: Tensor) -> Any:
    """What identifies a tensor through the wrappings of parameters: where it lies and how."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
