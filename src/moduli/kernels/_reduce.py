"""Reductions over lists: one number from many tensors, accumulated in double; also of tensors that processes hold in pieces."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .._torch import has_dispatch_mode
from ..layout import is_sharded
from ._c_reduce import Lists, are_elsewhere, find_root, try_compiled
from ._torch_reduce import join_numbers, reduce_on_device, reduce_without_compiler
from ._triton import find_problem, reduce_lists
from ._warm import is_transformed

_TYPES = (torch.Tensor, torch.nn.Parameter)
_DEVICE, _PLACE = operator.attrgetter("device"), operator.attrgetter("device", "layout")
_PEAKS = ("amax", "largest")
_NORMS = {1: "absolutes", 2: "norm", math.inf: "largest"}


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
    if ord not in _NORMS:
        raise ValueError(f"norm: ord is {ord}; it can be 1, 2 or math.inf")
    kind, listed = _NORMS[ord], _list_tensors("norm", tensors)
    result = _try_unchecked(kind, [listed])
    if result is not None:
        return result
    listed = _check_tensors("norm", listed)
    if _are_complex("norm", listed):
        listed = _view_real(listed) if ord == 2 else [tensor.detach().abs() for tensor in listed]
    if over_processes() is None and not any(map(torch.numel, listed)):
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return _reduce(kind, [listed])


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
    listed = _list_tensors("amax", tensors)
    result = _try_unchecked("amax", [listed])
    if result is not None and result > -math.inf:  # otherwise there may be no elements
        return result
    listed = _check_tensors("amax", listed)
    if any(tensor.is_complex() for tensor in listed):
        raise TypeError("amax: complex numbers have no order; take amax of the absolute values")
    if over_processes() is None and not any(map(torch.numel, listed)):
        raise ValueError("amax: there are no elements, so there is no largest; give at least one")
    return _reduce("amax", [listed])


def _try_unchecked(kind: str, lists: Lists) -> torch.Tensor | None:
    """Reduce by compiled code, whose reader checks the tensors; None where there is more to check."""
    return None if torch.is_grad_enabled() or over_processes() is not None else try_compiled(kind, lists)


def _list_tensors(name: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{name} takes a list of tensors, got one tensor; write {name}([x])")
    return list(tensors)


def _check_tensors(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, sharded ones gathered; raise where they are not tensors or need a graph."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: element {i} is a {type(tensor).__name__}, not a tensor")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: tensor {i} requires grad and grad mode is on, but a reduction over lists records no graph. "
                "Call it under torch.no_grad(), or use torch's own reductions"
            )
    # An optimizer reduces the pieces that processes hold, see `reducing_over`; what others give is put together.
    return [tensor.full_tensor() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def _are_complex(name: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they are complex; a mixture is refused where a pass over real parts would pair the wrong things."""
    kinds = set(map(torch.is_complex, tensors))
    if len(kinds) > 1:
        raise TypeError(f"{name}: some tensors are complex and some are not; convert them to one kind")
    return kinds == {True}


def _view_real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in tensors]


def _reduce(kind: str, lists: Lists, scale: float = 1.0) -> torch.Tensor:
    """Reduce lists that were checked, in the fastest form that takes them."""
    counted = over_processes() is not None
    result = None if counted else try_compiled(kind, lists, scale)
    if result is not None:
        return result
    if not counted and lists[0] and (are_elsewhere(lists[0]) or _chooses_triton(lists[0][0].device)):
        return _reduce_on_device(kind, lists)
    if kind == "norm":
        root = find_root(lambda kind, scale: _reduce(kind, lists, scale))
        return root if isinstance(root, torch.Tensor) else torch.tensor(root, dtype=torch.float64, device="cpu")
    if counted:
        return _reduce_counted(kind, lists, scale)
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


def _reduce_on_device(kind: str, lists: Lists) -> torch.Tensor:
    """A few launches for all tensors, and nothing is read back; sums are those of torch on this device."""
    devices = list(dict.fromkeys(map(_DEVICE, lists[0])))
    if len(devices) > 1:  # one number of each, brought to the first that is not the host
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


def _reduce_counted(kind: str, lists: Lists, scale: float) -> torch.Tensor:
    """Reduce what this process counts, then over the processes of the block around this call."""
    scope = _scope.get()
    group, counted = scope or (None, ())
    flags = [True] * len(lists[0]) if all(counted) else counted
    if len(flags) != len(lists[0]):
        raise ValueError(
            f"a reduction over {len(lists[0])} tensors, but there are {len(counted)} pieces, of which other processes count "
            "some; reduce lists with one tensor for each parameter"
        )
    chosen = [i for i, tensor in enumerate(lists[0]) if flags[i] and tensor.numel()]
    token = _scope.set(None)
    try:
        if chosen:
            result = _reduce(kind, [[tensors[i] for i in chosen] for tensors in lists], scale).clone()
        else:
            device = lists[0][0].device if lists[0] else None
            result = torch.tensor(-torch.inf if kind == "amax" else 0.0, dtype=torch.float64, device=device)
    finally:
        _scope.reset(token)
    how = torch.distributed.ReduceOp.MAX if kind in _PEAKS else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(result, how, group=group)
    return result
