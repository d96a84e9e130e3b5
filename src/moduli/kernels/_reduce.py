"""Reductions over lists: one number from many tensors, accumulated in double; also of tensors that processes hold in pieces."""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .._torch import has_dispatch_mode, is_fake
from ..layout import is_sharded
from . import _backend
from ._backend import KernelError
from ._plan import Lists, has_memory
from ._prepare import explain_opaque
from ._runtime import CODES, KINDS, Runtime
from ._torch_reduce import join_numbers, reduce_on_device, reduce_without_compiler
from ._triton import find_problem, reduce_lists
from ._warm import is_transformed

_TYPES = (torch.Tensor, torch.nn.Parameter)
# Between them neither squares nor their sum have overflowed or lost digits.
_SMALLEST, _LARGEST = 1e-280, 1e300
_DEVICE, _PLACE = operator.attrgetter("device"), operator.attrgetter("device", "layout")
_sum = sum
_PEAKS = ("amax", "largest")


class _Known:
    """What the lists of the last call looked like, without the lists."""

    __slots__ = ("codes", "elements", "firsts", "lists", "shared", "sizes")

    def __init__(self, lists: Sequence[tuple[torch.Tensor, ...]], shared: Runtime, signed: bool) -> None:
        self.shared = shared
        self.lists = Lists(lists, shared, range(len(lists)) if signed else ())
        self.codes = [CODES[tensors[0].dtype] for tensors in lists]
        self.sizes = array("q", [tensor.numel() for tensor in lists[0]])
        self.elements = _sum(self.sizes)
        chunks = [-(-size // Runtime.CHUNK) for size in self.sizes]
        self.firsts = array("q", itertools.accumulate(chunks, initial=0))


# By number of lists and of tensors, and whether signs matter: a program alternates between a few of those.
_known: dict[tuple[int, int, bool], _Known] = {}
_KEPT = 16
_SIGNED = ("sum", "dot", "amax")


def _recognize(kind: str, lists: Sequence[tuple[torch.Tensor, ...]]) -> tuple[_Known, array[int]] | None:
    """What is known of lists that look like those of an earlier call, and where they are; None where C can't take them."""
    setting = _backend.mode()
    if not lists[0] or setting not in ("auto", "c") or is_transformed() or has_dispatch_mode():
        return None
    signed = kind in _SIGNED
    key = (len(lists), len(lists[0]), signed)
    known = _known.get(key)
    found = None if known is None else known.lists.find(lists, None)
    if found is None and all(map(_is_plain, lists)):
        shared = _backend.runtime()
        if not isinstance(shared, Runtime):
            if setting == "c":
                raise KernelError(f"MODULI_KERNELS=c, but reductions can't be compiled: {shared}")
            return None
        if len(_known) >= _KEPT:
            _known.clear()
        known = _known[key] = _Known(lists, shared, signed)
        found = known.lists.find(lists, None)
    return None if known is None or found is None else (known, found[1])


def _run_compiled(kind: str, known: _Known, addresses: array[int], scale: float = 1.0) -> float:
    base, count, lists = addresses.buffer_info()[0], len(known.sizes), len(known.codes)
    partial = array("d", bytes(16 * max(known.firsts[-1], 1)))
    return float(
        known.shared.reduce(
            KINDS[kind],
            known.codes[0],
            known.codes[-1],
            count,
            base,
            base + 8 * count * (lists - 1),
            known.sizes.buffer_info()[0],
            known.firsts.buffer_info()[0],
            scale,
            partial.buffer_info()[0],
            _backend.threads(known.elements),
        )
    )


def _are_elsewhere(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of their numbers can't be read without waiting for a device, or at all."""
    return not {device.type for device in set(map(_DEVICE, tensors))} <= {"cpu", "meta"} or any(
        map(is_fake, tensors[:1])
    )


def _is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a list is of one dtype, and lies on the CPU as it reads."""
    return explain_opaque([tensors]) is None and all(
        tensor.dtype is tensors[0].dtype
        and tensor.dtype in CODES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and has_memory(tensor)
        for tensor in tensors
    )


def _reduce(kind: str, given: Sequence[Sequence[torch.Tensor]], scale: float = 1.0) -> torch.Tensor:
    lists = [tuple(tensors) for tensors in given]
    if over_processes() is not None:
        return _reduce_counted(kind, lists, scale)
    found = _recognize(kind, lists)
    if found is not None:
        return torch.tensor(_run_compiled(kind, *found, scale), dtype=torch.float64, device="cpu")
    if lists[0] and (_are_elsewhere(lists[0]) or _chooses_triton(lists[0][0].device)):
        return _reduce_on_device(kind, lists)
    for tensors in lists:
        _refuse_freed(tensors)
    return reduce_without_compiler(kind, lists, scale)


def _refuse_freed(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors whose storage was resized to nothing, which torch would read."""
    if set(map(_PLACE, tensors)) <= {(torch.device("cpu"), torch.strided)} and set(map(type, tensors)) <= set(_TYPES):
        for i, tensor in enumerate(tensors):
            if not (tensor.data_ptr() or tensor.numel() == 0 or tensor._is_zerotensor()):
                raise RuntimeError(
                    f"tensor {i} of the list has no memory: its storage was resized to 0, and has to be resized back"
                )


def _list_tensors(name: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{name} takes a list of tensors, got one tensor; write {name}([x])")
    found = list(tensors)
    if not torch.is_grad_enabled() and set(map(type, found)) <= set(_TYPES):
        return found
    for i, tensor in enumerate(found):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: element {i} is a {type(tensor).__name__}, not a tensor")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: tensor {i} requires grad and grad mode is on, but a reduction over lists records no graph. "
                "Call it under torch.no_grad(), or use torch's own reductions"
            )
    # An optimizer reduces the pieces that processes hold, see `reducing_over`; what others give is put together.
    return [tensor.full_tensor() if is_sharded(tensor) else tensor for tensor in found]  # type: ignore[attr-defined]


def _are_complex(name: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they are complex; a mixture is refused where a pass over real parts would pair the wrong things."""
    found = set(map(torch.is_complex, tensors))
    if len(found) > 1:
        raise TypeError(f"{name}: some tensors are complex and some are not; convert them to one kind")
    return found == {True}


def sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    r"""The sum of all elements of all tensors, $\sum_i \sum_k x_{ik}$.

    Compensated (Knuth's TwoSum), so that cancellation costs no digits, and with the same bits on every run.

    Args:
        tensors: A list of tensors.

    Returns:
        A 0-d tensor of dtype float64 (complex128 for complex tensors).

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> kernels.sum([torch.tensor([1e16, 1.0]), torch.tensor([-1e16, 1.0], dtype=torch.float32)])
        tensor(2., dtype=torch.float64)

    References:
        T. Ogita, S. M. Rump, S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26 (2005).
    """
    found = _list_tensors("sum", tensors)
    if _are_complex("sum", found):
        parts = [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in found]
        return torch.complex(*(_reduce("sum", [[part[..., k] for part in parts]]) for k in (0, 1)))
    return _reduce("sum", [found])


def dot(xs: Iterable[torch.Tensor], ys: Iterable[torch.Tensor]) -> torch.Tensor:
    r"""The inner product of two lists, $\sum_i \sum_k \overline{x_{ik}}\, y_{ik}$.

    Products and sums are compensated, so that cancellation costs no digits.

    Args:
        xs: A list of tensors; conjugated where it is complex.
        ys: A list of tensors with the same numbers of elements.

    Returns:
        A 0-d tensor of dtype float64 (complex128 for complex tensors).

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> kernels.dot([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])])
        tensor(11., dtype=torch.float64)

    References:
        T. Ogita, S. M. Rump, S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26 (2005).
    """
    first, second = _list_tensors("dot", xs), _list_tensors("dot", ys)
    if len(first) != len(second):
        raise ValueError(f"dot: the lists have {len(first)} and {len(second)} tensors; give lists of one length")
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        if x.numel() != y.numel():
            raise ValueError(
                f"dot: tensor {i} has the shapes {tuple(x.shape)} and {tuple(y.shape)}; they must have the same number "
                "of elements"
            )
    if _are_complex("dot", first + second):
        a = [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in first]
        b = [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in second]

        def part(j: int, k: int) -> torch.Tensor:
            return _reduce("dot", [[x[..., j].reshape(-1) for x in a], [y[..., k].reshape(-1) for y in b]])

        return torch.complex(part(0, 0) + part(1, 1), part(0, 1) - part(1, 0))
    return _reduce("dot", [first, second])


def norm(tensors: Iterable[torch.Tensor], ord: float = 2.0) -> torch.Tensor:
    r"""The norm of all elements of all tensors, $\bigl(\sum_i \sum_k |x_{ik}|^p\bigr)^{1/p}$ for p = 1, 2 or infinity.

    Where squares would overflow or vanish, elements are scaled first.

    Args:
        tensors: A list of tensors.
        ord: 1, 2 or `math.inf`.

    Returns:
        A 0-d tensor of dtype float64.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> kernels.norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        tensor(5., dtype=torch.float64)
    """
    if ord not in (1, 2, math.inf):
        raise ValueError(f"norm: ord is {ord}; it can be 1, 2 or math.inf")
    found = _list_tensors("norm", tensors)
    known = None
    if ord == 2 and _scope.get() is None:
        known = _recognize("squares", [tuple(found)])
        squares = math.nan if known is None else _run_compiled("squares", *known)
        if _SMALLEST < squares < _LARGEST:
            return torch.tensor(math.sqrt(squares), dtype=torch.float64, device="cpu")
    if known is None and _are_complex("norm", found):
        parts = [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in found]
        found = parts if ord == 2 else [tensor.detach().abs() for tensor in found]
    if over_processes() is None and not any(map(torch.numel, found)):
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if ord != 2:
        return _reduce("absolutes" if ord == 1 else "largest", [found])
    if over_processes() is None and (_are_elsewhere(found) or _chooses_triton(found[0].device)):
        return _reduce_on_device("norm", [found])
    total = _reduce("squares", [found])
    if _are_elsewhere([total]) or total.is_meta or _SMALLEST < total < _LARGEST or total != total:
        return total.sqrt()
    largest = float(_reduce("largest", [found]))
    if largest == 0 or not math.isfinite(largest):
        return torch.tensor(largest, dtype=torch.float64, device="cpu")
    # A power of two, so that scaling rounds nothing.
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
    return _reduce("squares", [found], scale).sqrt() / scale


def _reduce_on_device(kind: str, lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """A few launches for all tensors, and nothing is read back; sums are those of torch on this device."""
    devices = list(dict.fromkeys(map(_DEVICE, lists[0])))
    if len(devices) > 1:  # one number of each, brought to the first that is not the host
        numbers = []
        for device in devices:
            part = [
                [t for t, like in zip(tensors, lists[0], strict=True) if like.device == device] for tensors in lists
            ]
            numbers.append(norm(part[0]) if kind == "norm" else _reduce(kind, part))
        return join_numbers(kind, numbers, next(device for device in devices if device.type != "cpu"))
    if _chooses_triton(lists[0][0].device):
        found = reduce_lists("squares" if kind == "norm" else kind, lists, root=kind == "norm")
        if found is not None:
            return found
    return reduce_on_device(kind, lists)


def _chooses_triton(device: torch.device) -> bool:
    watched = "a dispatch mode" if has_dispatch_mode() else None
    return find_problem(device, watched) is None and not is_transformed()


def amax(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    r"""The largest element of all tensors, $\max_{ik} x_{ik}$; NaN if any element is.

    Args:
        tensors: A list of tensors with at least one element between them.

    Returns:
        A 0-d tensor of dtype float64.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> kernels.amax([torch.tensor([1.0, -3.0]), torch.tensor([2.0])])
        tensor(2., dtype=torch.float64)
    """
    found = _list_tensors("amax", tensors)
    if any(tensor.is_complex() for tensor in found):
        raise TypeError("amax: complex numbers have no order; take amax of the absolute values")
    if over_processes() is None and not _sum(tensor.numel() for tensor in found):
        raise ValueError("amax: there are no elements, so there is no largest; give at least one")
    return _reduce("amax", [found])


# -- over processes --------------------------------------------------------------------------------------------------------

# The process group (None for all processes), and for each tensor of a list whether this process counts it.
_scope: ContextVar[tuple[Any, Sequence[bool]] | None] = ContextVar("reducing over processes", default=None)


@contextmanager
def reducing_over(group: Any, counted: Sequence[bool]) -> Iterator[None]:
    """A block in which reductions are over the lists of all processes of a group, each of which holds other pieces.

    Args:
        group: The processes; None for all.
        counted: For each position of the lists whether this process counts its tensor: of a tensor that several have, one
            does.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> torch.distributed.is_initialized()  # otherwise: with kernels.reducing_over(None, [True]): kernels.norm([shard])
        False
    """
    token = _scope.set((group, counted))
    try:
        yield
    finally:
        _scope.reset(token)


def over_processes() -> tuple[Any, Sequence[bool]] | None:
    """The group and the flags of the block around this call, see `reducing_over`; None outside one.

    Example:
        >>> from moduli import kernels
        >>> kernels.over_processes() is None
        True
    """
    return _scope.get()


def _reduce_counted(kind: str, lists: Sequence[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
    """Reduce what this process counts, then over the processes of the block around this call."""
    scope = _scope.get()
    group, counted = scope or (None, ())
    flags = [True] * len(lists[0]) if all(counted) else counted
    if len(flags) != len(lists[0]):
        raise ValueError(
            f"a reduction over {len(lists[0])} tensors, but there are {len(counted)} pieces, of which other processes count "
            "some; reduce lists with one tensor for each parameter"
        )
    held = [i for i, tensor in enumerate(lists[0]) if flags[i] and tensor.numel()]
    token = _scope.set(None)
    try:
        if held:
            found = _reduce(kind, [[tensors[i] for i in held] for tensors in lists], scale).clone()
        else:
            device = lists[0][0].device if lists[0] else None
            found = torch.tensor(-torch.inf if kind == "amax" else 0.0, dtype=torch.float64, device=device)
    finally:
        _scope.reset(token)
    how = torch.distributed.ReduceOp.MAX if kind in _PEAKS else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(found, how, group=group)
    return found
