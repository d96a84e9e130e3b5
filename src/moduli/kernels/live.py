"""Live models: seeing at once that nothing in them changed, and sums of what they hold. For the other rooms of moduli.

Whoever keeps something that was worked out from a model (its structure, where its values are) must see at every use that
it still holds, without asking a hundred modules and tensors one by one. Three tools:

* `watch(tensors)` remembers what tensors look like: type, dtype, device, shape, strides, `requires_grad`;
* `guard(...)` remembers modules, their dicts and their tensors, and tells in one compiled call that none of them
  changed. It exists where a C compiler does and where the interpreter counts changes of dicts, otherwise it is None;
* a `Sum` of two models reads them where they are and writes one vector.

These names are stable for the rooms of this library; they are not part of its front door.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _backend
from ._live import Native, native
from ._watch import Watch, watch

__all__ = ["Guard", "Sum", "Watch", "guard", "watch"]

_CODES = {torch.float64: 0, torch.float32: 1}


def _nothing() -> None:
    return None


class Guard:
    """Tells whether a model changed since the guard was made.

    A model is unchanged when its modules have the classes and the dicts they had, nothing was written to these dicts or
    to the dicts in them, and every tensor looks as it did and is where it was. The guard holds everything but the root.

    Example:
        >>> import torch
        >>> from moduli.kernels import live
        >>> net = torch.nn.Linear(2, 1)
        >>> watching = live.guard(net, [net], list(net.parameters()))
        >>> watching is None or watching.same(net.__dict__)
        True
        >>> net.bias.requires_grad_(False).requires_grad
        False
        >>> watching is not None and watching.same(net.__dict__)
        False
    """

    __slots__ = ("__weakref__", "_address", "_check", "_keep", "_lists", "job", "pointers")

    def __init__(self, shared: Native, root: nn.Module, modules: Sequence[nn.Module], tensors: list[Tensor]) -> None:
        below = [module for module in modules if module is not root]
        states = [module.__dict__ for module in below]
        dicts = list(states)
        for module in (root, *below):
            dicts += [held for held in module.__dict__.values() if isinstance(held, dict)]
        self._check = shared.guard
        empties = [module._non_persistent_buffers_set for module in (root, *below)]
        facts, shapes, pointers = array("Q"), array("q"), array("Q")
        for tensor in tensors:
            keys = torch._C._dispatch_keys(tensor).raw_repr()
            code, flag = shared.dtype_of(tensor), tensor.requires_grad
            facts.extend((id(type(tensor)), keys, code, tensor.dim(), 0, tensor.data_ptr(), flag))
            shapes.extend(tensor.shape)
            pointers.append(tensor.data_ptr())
        kinds = array("Q", [id(type(module)) for module in below])
        places = array("Q", [id(state) for state in states])
        tags = array("Q", [shared.changes(held) for held in (root.__dict__, *dicts)])
        lists: tuple[list[Any], ...] = (below, dicts, empties, list(tensors))
        tables = (kinds, places, tags, facts, shapes)
        addresses = [*map(len, lists), *map(id, lists), *(table.buffer_info()[0] for table in tables)]
        self._lists, self.pointers = lists, pointers
        self.job = array("Q", [shared.api.buffer_info()[0], *addresses])
        self._keep = (shared, tables)
        self._address = self.job.buffer_info()[0]

    def same(self, own: dict[str, Any], flags: bool = True) -> bool:
        """Whether nothing changed.

        Args:
            own: The `__dict__` of the root, to which the guard has no reference.
            flags: Whether `requires_grad` matters.
        """
        return self._check(own, self._address, flags) == 1  # type: ignore[no-any-return]


def guard(root: nn.Module, modules: Sequence[nn.Module], tensors: list[Tensor]) -> Guard | None:
    """A guard of a model, where there can be one.

    Args:
        root: The module at the top.
        modules: All its modules, each once, the root first.
        tensors: Its tensors, contiguous ones on the CPU.

    Returns:
        The guard, or None without a compiler, on an interpreter that does not count changes of dicts, with tensors of
        another kind, or with buffers that are not saved.
    """
    shared = native()
    usual = all(t.is_contiguous() and t.device.type == "cpu" and not t.is_inference() for t in tensors)
    usual = usual and not any(module._non_persistent_buffers_set for module in modules)
    return Guard(shared, root, modules, tensors) if shared is not None and usual else None


class Sum:
    """The sum s x + t y of two models of the same sizes, each a vector or tensors where they are, into a vector.

    Where s or t is one, nothing is multiplied, so that sums and differences round once, as torch's do.

    It does not keep the models alive: it can be called as long as `fits` says so.

    Args:
        sizes: The numbers of elements of the tensors.
        dtype: float32 or float64, of everything.
        x: The guard of a model whose tensors are x, or None for a vector.
        y: The same for y.

    Example:
        >>> import torch
        >>> from moduli.kernels import live
        >>> x, y, out = torch.arange(4.0), torch.ones(4), torch.empty(4)
        >>> add = live.Sum.of([4], torch.float32, None, None)
        >>> if add is None: out = x + 2 * y
        ... else: add(x.data_ptr(), y.data_ptr(), 1.0, 2.0, out)
        >>> out.tolist()
        [2.0, 3.0, 4.0, 5.0]
    """

    __slots__ = ("_address", "_guarded", "_keep", "_run", "_total", "_x", "_y", "blank")

    def __init__(self, shared: Native, sizes: Sequence[int], code: int, x: Guard | None, y: Guard | None) -> None:
        counts = array("q", sizes)
        self._total = sum(sizes)
        guards = [each for each in (x, y) if each is not None]
        tables = [0 if each is None else each.pointers.buffer_info()[0] for each in (x, y)]
        tables += [0 if each is None else each.job.buffer_info()[0] for each in (x, y)]
        job = array("Q", [code, len(sizes), self._total, counts.buffer_info()[0], *tables])
        self._keep = (shared, counts, job, [(each.pointers, each.job) for each in guards])
        self._x: Any = _nothing if x is None else weakref.ref(x)
        self._y: Any = _nothing if y is None else weakref.ref(y)
        # A tensor of the right kind, to make the vector of.
        self.blank = torch.empty(0, dtype=torch.float64 if code == 0 else torch.float32, device="cpu")
        self._address = job.buffer_info()[0]
        self._run, self._guarded = shared.blend, shared.guarded

    @classmethod
    def of(cls, sizes: Sequence[int], dtype: torch.dtype, x: Guard | None, y: Guard | None) -> Sum | None:
        """The sum, where it can be compiled and the dtype is one of its own."""
        shared = native()
        return None if shared is None or dtype not in _CODES else cls(shared, sizes, _CODES[dtype], x, y)

    def fits(self, x: Guard | None, y: Guard | None) -> bool:
        """Whether it is the sum of these."""
        return self._x() is x and self._y() is y

    def __call__(self, x: int, y: int, s: float, t: float, out: Tensor) -> None:
        """Compute, after the guards were asked.

        Args:
            x: The address of the vector x; anything where x is a model.
            y: The same for y; 0 where y is no model either, for s x alone.
            s: The number x is multiplied with.
            t: The number y is multiplied with.
            out: Where the sum goes: a contiguous vector, which may be the vector x or y itself.
        """
        self._run(self._address, x, y, s, t, out.data_ptr(), _backend.threads(self._total))

    def guarded(self, own_x: Any, own_y: Any, x: int, y: int, s: float, t: float, out: Tensor) -> bool:
        """Ask the guards and compute, in one call without other threads: for small models.

        Args:
            own_x: The `__dict__` of the root of x, where x is a model.
            own_y: The same for y.
            x: As above.
            y: As above.
            s: As above.
            t: As above.
            out: As above.

        Returns:
            Whether the models are what they were; otherwise nothing was written.
        """
        return self._guarded(self._address, own_x, own_y, x, y, s, t, out.data_ptr()) == 1  # type: ignore[no-any-return]
