"""Reductions over lists: one number from many tensors, accumulated in double; also of sharded tensors."""

from __future__ import annotations

import builtins
import itertools
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._torch import has_dispatch_mode, is_fake, is_transformed
from ..layout import is_sharded
from . import _backend
from ._backend import SETTING_KEY, VARIABLES, KernelError
from ._checks import explain_opaque
from ._lists import has_memory
from ._memory import put_bounded
from ._over_processes import Lists, reduce_counted, scope
from ._runtime import CODES, KINDS, READ_ERRORS, Runtime
from ._torch_reduce import join_numbers, reduce_on_device, reduce_without_compiler
from ._triton import find_problem, reduce_lists

# For sums of squares in this range nothing has overflowed or underflowed.
_SMALLEST, _LARGEST = 1e-280, 1e300
_SIGNED = ("sum", "dot", "amax")
_TYPES = (torch.Tensor, torch.nn.Parameter)
_DEVICE, _PLACE = operator.attrgetter("device"), operator.attrgetter("device", "layout")
_NORMS = {1: "absolutes", 2: "norm", math.inf: "largest"}


def sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    r"""Return the sum of all elements of all tensors, $\sum_i \sum_k x_{ik}$.

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
    listed = _list_tensors("sum", tensors)
    result = _try_unchecked("sum", [listed])
    if result is not None:
        return result
    listed = _check_tensors("sum", listed)
    if _are_complex("sum", listed):
        parts = _view_real(listed)
        return torch.complex(*(_reduce("sum", [[part[..., k] for part in parts]]) for k in (0, 1)))
    return _reduce("sum", [listed])


def dot(xs: Iterable[torch.Tensor], ys: Iterable[torch.Tensor]) -> torch.Tensor:
    r"""Return the inner product of two lists, $\sum_i \sum_k \overline{x_{ik}}\, y_{ik}$.

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
    result = _try_unchecked("dot", [first, second])
    if result is not None:
        return result
    first, second = _check_tensors("dot", first), _check_tensors("dot", second)
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        if x.numel() != y.numel():
            raise ValueError(
                f"dot: tensor {i} has the shapes {tuple(x.shape)} and {tuple(y.shape)}; they must have the same number "
                "of elements"
            )
    if _are_complex("dot", first + second):
        a, b = _view_real(first), _view_real(second)

        def part(j: int, k: int) -> torch.Tensor:
            return _reduce("dot", [[x[..., j].reshape(-1) for x in a], [y[..., k].reshape(-1) for y in b]])

        return torch.complex(part(0, 0) + part(1, 1), part(0, 1) - part(1, 0))
    return _reduce("dot", [first, second])


def norm(tensors: Iterable[torch.Tensor], ord: float = 2.0) -> torch.Tensor:
    r"""Return the norm of all elements of all tensors, $\bigl(\sum_i \sum_k |x_{ik}|^p\bigr)^{1/p}$ for p = 1, 2 or infinity.

    If squares would overflow or underflow, elements are scaled first.

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
    if ord not in _NORMS:
        raise ValueError(f"norm: ord is {ord}; it can be 1, 2 or math.inf")
    kind, listed = _NORMS[ord], _list_tensors("norm", tensors)
    result = _try_unchecked(kind, [listed])
    if result is not None:
        return result
    listed = _check_tensors("norm", listed)
    if _are_complex("norm", listed):
        listed = _view_real(listed) if ord == 2 else [tensor.detach().abs() for tensor in listed]
    if scope.get() is None and not any(map(torch.numel, listed)):
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return _reduce(kind, [listed])


def amax(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    r"""Return the largest element of all tensors, $\max_{ik} x_{ik}$; NaN if any element is.

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
    listed = _list_tensors("amax", tensors)
    result = _try_unchecked("amax", [listed])
    if result is not None and result > -math.inf:  # otherwise there may be no elements
        return result
    listed = _check_tensors("amax", listed)
    if any(tensor.is_complex() for tensor in listed):
        raise TypeError("amax: complex numbers have no order; take amax of the absolute values")
    if scope.get() is None and not any(map(torch.numel, listed)):
        raise ValueError("amax: there are no elements, so there is no largest; give at least one")
    return _reduce("amax", [listed])


def _try_unchecked(kind: str, lists: Lists) -> torch.Tensor | None:
    """Reduce by compiled code, whose reader checks the tensors; return None if more checks are needed."""
    return None if torch.is_grad_enabled() or scope.get() is not None else _try_compiled(kind, lists)


def _list_tensors(name: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{name} takes a list of tensors, got one tensor; write {name}([x])")
    return list(tensors)


def _check_tensors(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, sharded ones gathered; raise if they are not tensors or need a graph."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: element {i} is a {type(tensor).__name__}, not a tensor")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: tensor {i} requires grad and grad mode is on, but a reduction over lists records no graph. "
                "Call it under torch.no_grad(), or use torch's own reductions"
            )
    # An optimizer reduces local shards, see `reducing_over`; sharded tensors of other callers are gathered.
    return [tensor.full_tensor() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def _are_complex(name: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are complex; raise TypeError for a mixture, whose real parts would be paired wrongly."""
    kinds = set(map(torch.is_complex, tensors))
    if len(kinds) > 1:
        raise TypeError(f"{name}: some tensors are complex and some are not; convert them to one kind")
    return kinds == {True}


def _view_real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in tensors]


def _reduce(kind: str, lists: Lists, scale: float = 1.0) -> torch.Tensor:
    """Reduce lists that were checked, in the fastest form that takes them."""
    counted = scope.get() is not None
    result = None if counted else _try_compiled(kind, lists, scale)
    if result is not None:
        return result
    if not counted and lists[0] and (_are_elsewhere(lists[0]) or _chooses_triton(lists[0][0].device)):
        return _reduce_on_device(kind, lists)
    if kind == "norm":
        root = _find_root(lambda kind, scale: _reduce(kind, lists, scale))
        return root if isinstance(root, torch.Tensor) else torch.tensor(root, dtype=torch.float64, device="cpu")
    if counted:
        return reduce_counted(_reduce, kind, lists, scale)
    for tensors in lists:
        _refuse_freed(tensors)
    return reduce_without_compiler(kind, lists, scale)


def _refuse_freed(tensors: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError for tensors whose storage was resized to nothing, which torch would read."""
    if set(map(_PLACE, tensors)) <= {(torch.device("cpu"), torch.strided)} and set(map(type, tensors)) <= set(_TYPES):
        for i, tensor in enumerate(tensors):
            if not (tensor.data_ptr() or tensor.numel() == 0 or tensor._is_zerotensor()):
                raise RuntimeError(
                    f"tensor {i} of the list has no memory: its storage was resized to 0, and has to be resized back"
                )


def _reduce_on_device(kind: str, lists: Lists) -> torch.Tensor:
    """Reduce by a few launches for all tensors, without reading back; sums are those of torch on this device."""
    devices = list(dict.fromkeys(map(_DEVICE, lists[0])))
    if len(devices) > 1:  # one number of each, copied to the first that is not the host
        numbers = []
        for device in devices:
            part = [
                [t for t, like in zip(tensors, lists[0], strict=True) if like.device == device] for tensors in lists
            ]
            numbers.append(_reduce(kind, part))
        return join_numbers(kind, numbers, next(device for device in devices if device.type != "cpu"))
    if _chooses_triton(lists[0][0].device):
        result = reduce_lists("squares" if kind == "norm" else kind, lists, root=kind == "norm")
        if result is not None:
            return result
    return reduce_on_device(kind, lists)


def _chooses_triton(device: torch.device) -> bool:
    watched = "a dispatch mode" if has_dispatch_mode() else None
    return find_problem(device, watched) is None and not is_transformed()


# -- compiled --------------------------------------------------------------------------------------------------------------


class CompiledReduction:
    """A compiled reduction of lists with given layouts; it does not reference the lists."""

    __slots__ = ("_arrays", "_blank", "_codes", "_elements", "_partial", "_places", "_runtime", "counts")

    def __init__(self, lists: Sequence[tuple[torch.Tensor, ...]], runtime: Runtime, facts: array[int]) -> None:
        self._runtime = runtime
        self.counts = list(map(len, lists))
        self._codes = [CODES[tensors[0].dtype] for tensors in lists]
        sizes = [tensor.numel() for tensor in lists[0]]
        firsts = list(itertools.accumulate((-(-size // Runtime.CHUNK) for size in sizes), initial=0))
        self._arrays = [array("q", self.counts), facts, array("q", sizes), array("q", firsts)]
        self._places = [each.buffer_info()[0] for each in self._arrays[2:]]
        self._elements = builtins.sum(sizes)
        self._blank, self._partial = bytes(8 * len(sizes) * len(lists)), bytes(16 * max(firsts[-1], 1))

    def try_run(self, kind: str, lists: tuple[tuple[torch.Tensor, ...], ...], scale: float) -> float | None:
        """Return the reduction of lists; None if their layouts differ.

        Args:
            kind: The reduction.
            lists: The lists.
            scale: A factor of the elements.
        """
        runtime, now = self._runtime, array("Q", self._blank)
        lengths, facts, base = self._arrays[0].buffer_info()[0], self._arrays[1].buffer_info()[0], now.buffer_info()[0]
        try:
            if runtime.read(lists, len(lists), lengths, runtime.python, facts, None, base, base) < 0:
                return None
        except READ_ERRORS:
            return None
        if kind in _SIGNED and any(True in map(torch.Tensor.is_neg, tensors) for tensors in lists):
            return None
        return self.run_at(kind, base, scale)

    def run_at(self, kind: str, base: int, scale: float = 1.0) -> float:
        """Return the reduction of lists whose addresses are in a table, one list after the other.

        Args:
            kind: The reduction.
            base: The address of the table.
            scale: A factor of the elements.
        """
        codes, count, partial = self._codes, self.counts[0], array("d", self._partial)
        second, sizes, firsts = base + 8 * count * (len(codes) - 1), *self._places
        threads = 1 if self._elements < 2 * _backend.GRAIN else _backend.threads(self._elements)
        numbers = (scale, partial.buffer_info()[0], threads)
        result = self._runtime.reduce(KINDS[kind], codes[0], codes[-1], count, base, second, sizes, firsts, *numbers)
        return float(result)


# By number of lists and of tensors: a program alternates between a few of those.
_compiled: dict[tuple[int, ...], CompiledReduction] = {}


def _try_compiled(kind: str, tensors: Lists, scale: float = 1.0) -> torch.Tensor | None:
    """Reduce by compiled code; return None if it can't take the lists, or if they have to be checked first."""
    if not tensors[0] or is_transformed() or has_dispatch_mode() or (SETTING_KEY in VARIABLES and not _may_compile()):
        return None
    lists = tuple(map(tuple, tensors))
    key = tuple(map(len, lists))
    reduction = _compiled.get(key)
    result = None if reduction is None else reduction.try_run(kind, lists, scale)
    if result is None and are_plain(lists):
        runtime = _backend.runtime()
        if isinstance(runtime, str):
            if _backend.mode() == "c":
                raise KernelError(f"MODULI_KERNELS=c, but reductions can't be compiled: {runtime}")
            return None
        facts = runtime.facts(lists)
        if facts is not None:
            result = put_bounded(_compiled, key, CompiledReduction(lists, runtime, facts)).try_run(kind, lists, scale)
    return None if result is None else torch.tensor(result, dtype=torch.float64, device="cpu")


def _may_compile() -> bool:
    return _backend.mode() in ("auto", "c")


def are_plain(lists: Sequence[tuple[torch.Tensor, ...]]) -> bool:
    """Return whether lists have tensors of the same sizes, each list of one dtype, contiguous on the CPU."""
    if explain_opaque(lists) is not None or len({tuple(map(torch.numel, tensors)) for tensors in lists}) > 1:
        return False
    return all(
        tensor.dtype is tensors[0].dtype
        and tensor.dtype in CODES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and has_memory(tensor)
        for tensors in lists
        for tensor in tensors
    )


def _find_root(reduce: Callable[[str, float], Any]) -> Any:
    """Return the root of a sum of squares, of scaled elements where squares would overflow or underflow."""
    total = reduce("squares", 1.0)
    if isinstance(total, torch.Tensor) and (_are_elsewhere([total]) or total.is_meta):
        return total.sqrt()
    total = float(total)
    if _SMALLEST < total < _LARGEST or total != total:
        return math.sqrt(total)
    largest = float(reduce("largest", 1.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    # A power of two, so that scaling rounds nothing.
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
    return math.sqrt(float(reduce("squares", scale))) / scale


def _are_elsewhere(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether some values can't be read without waiting for a device, or at all."""
    return not {device.type for device in set(map(_DEVICE, tensors))} <= {"cpu", "meta"} or any(
        map(is_fake, tensors[:1])
    )
