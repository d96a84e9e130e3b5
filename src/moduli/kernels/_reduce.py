"""Reductions over lists: one number from many tensors, accumulated in double."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence

import torch

from . import _backend
from ._backend import KernelError
from ._exact import eager
from ._run import transformed
from ._runtime import CODES, KINDS, Runtime
from ._sharded import is_sharded, over_shards
from ._watch import Watch, watch

__all__ = ["amax", "dot", "norm", "sum"]

_TYPES = (torch.Tensor, torch.nn.Parameter)
_sum = sum


class _Known:
    """What the lists of the last call looked like, without the lists."""

    __slots__ = ("codes", "firsts", "partial", "sizes", "watches")

    def __init__(self, lists: Sequence[list[torch.Tensor]], watches: list[Watch]) -> None:
        self.watches = watches
        self.codes = [CODES[tensors[0].dtype] for tensors in lists]
        self.sizes = array("q", [tensor.numel() for tensor in lists[0]])
        chunks = [-(-size // Runtime.CHUNK) for size in self.sizes]
        self.firsts = array("q", itertools.accumulate(chunks, initial=0))


# By number of lists and of tensors: a program alternates between a few of those.
_known: dict[tuple[int, int], _Known] = {}
_KEPT = 16


def _fast(lists: Sequence[list[torch.Tensor]]) -> _Known | None:
    """The facts a compiled reduction needs, or None where it can't take the lists."""
    count = len(lists[0])
    last = _known.get((len(lists), count))
    if (
        count
        and last is not None
        and all(known.same(tensors) for known, tensors in zip(last.watches, lists, strict=True))
    ):
        return last
    for tensors in lists:
        if not tensors or tensors[0].dtype not in CODES:
            return None
        for tensor in tensors:
            if (
                type(tensor) not in _TYPES
                or tensor.dtype is not tensors[0].dtype
                or tensor.layout is not torch.strided
                or tensor.device.type != "cpu"
                or not tensor.is_contiguous()
                or tensor.is_neg()
                or tensor._is_zerotensor()
            ):
                return None
    found = _Known(lists, [watch(tensors) for tensors in lists])
    if len(_known) >= _KEPT:
        _known.clear()
    _known[len(lists), count] = found
    return found


def _reduce(
    kind: str, lists: Sequence[list[torch.Tensor]], scale: float = 1.0, known: _Known | None = None
) -> torch.Tensor:
    setting = _backend.mode()
    if setting != "eager" and not transformed() and not torch.compiler.is_compiling():
        facts = _fast(lists) if known is None else known
        shared = _backend.native() if facts is not None else ""
        if isinstance(shared, Runtime) and facts is not None:
            count = len(lists[0])
            _, pointers = shared.pointers(lists, count, array("Q", bytes(8 * count * len(lists))))
            base = pointers.buffer_info()[0]
            chunks = facts.firsts[-1]
            partial = array("d", bytes(16 * max(chunks, 1)))
            value = shared.reduce(
                KINDS[kind],
                facts.codes[0],
                facts.codes[-1],
                count,
                base,
                base + 8 * count * (len(lists) - 1),
                facts.sizes.buffer_info()[0],
                facts.firsts.buffer_info()[0],
                scale,
                partial.buffer_info()[0],
                _backend.threads(_sum(facts.sizes)),
            )
            return torch.tensor(value, dtype=torch.float64, device="cpu")
        if facts is not None and setting == "c":
            raise KernelError(f"MODULI_KERNELS=c, but reductions can't be compiled: {shared}")
    if any(is_sharded(tensor) for tensor in lists[0]):
        return over_shards(kind, lists, lambda local: _reduce(kind, local, scale))
    return eager(kind, lists, scale)


def _listed(name: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{name} takes a list of tensors, got one tensor; write {name}([x])")
    found = list(tensors)
    for i, tensor in enumerate(found):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: element {i} is a {type(tensor).__name__}, not a tensor")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: tensor {i} requires grad and grad mode is on, but a reduction over lists records no graph. "
                "Call it under torch.no_grad(), or use torch's own reductions"
            )
    return found


def _kinds(name: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they are complex; a mixture is refused where a pass over real parts would pair the wrong things."""
    found = {tensor.is_complex() for tensor in tensors}
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
    found = _listed("sum", tensors)
    if _kinds("sum", found):
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
    first, second = _listed("dot", xs), _listed("dot", ys)
    if len(first) != len(second):
        raise ValueError(f"dot: the lists have {len(first)} and {len(second)} tensors; give lists of one length")
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        if x.numel() != y.numel():
            raise ValueError(
                f"dot: tensor {i} has the shapes {tuple(x.shape)} and {tuple(y.shape)}; they must have the same number "
                "of elements"
            )
    if _kinds("dot", first + second):
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
    known = _seen(tensors) if type(tensors) is list and not torch.is_grad_enabled() else None
    # Of the same kinds as before, so everything that is asked of strangers is known.
    found: list[torch.Tensor] = _checked(tensors, ord) if known is None else list(tensors)
    if not found:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    lists = [found]
    if ord == 1:
        return _reduce("absolutes", lists, known=known)
    if ord != 2:
        return _reduce("largest", lists, known=known)
    squares = _reduce("squares", lists, known=known)
    if 1e-280 < squares < 1e300 or squares != squares:
        return squares.sqrt()
    largest = float(_reduce("largest", lists))
    if largest == 0 or not math.isfinite(largest):
        return torch.tensor(largest, dtype=torch.float64, device="cpu")
    # A power of two, so that scaling rounds nothing.
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
    return _reduce("squares", lists, scale).sqrt() / scale


def _seen(tensors: list[torch.Tensor]) -> _Known | None:
    """What is known of the last list of this length, if this one looks the same and has elements."""
    known = _known.get((1, len(tensors)))
    return known if known is not None and known.firsts[-1] > 0 and known.watches[0].same(tensors) else None


def _checked(tensors: Iterable[torch.Tensor], ord: float) -> list[torch.Tensor]:
    """The tensors as a reduction takes them; none where there are no elements."""
    found = _listed("norm", tensors)
    if _kinds("norm", found):
        if ord != 2:
            found = [tensor.detach().abs() for tensor in found]
        else:
            found = [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in found]
    return found if _sum(tensor.numel() for tensor in found) else []


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
    found = _listed("amax", tensors)
    if any(tensor.is_complex() for tensor in found):
        raise TypeError("amax: complex numbers have no order; take amax of the absolute values")
    if not _sum(tensor.numel() for tensor in found):
        raise ValueError("amax: there are no elements, so there is no largest; give at least one")
    return _reduce("amax", [found])
