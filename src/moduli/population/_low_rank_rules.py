"""Rules for functions of torch with a parameter W + s A Bᵀ, which split a product into terms with W and with the factors.

A rule returns NotImplemented if it does not apply; the sum is then formed for each member.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._low_rank import LowRankTensor, Rule

_PLAIN: Any = Tensor  # its properties, which type checkers take for their values
_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3, torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_TRANSPOSED = {F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3}


# -- products --------------------------------------------------------------------------------------------------------------


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight, bias = _bind(args, kwargs, "input", "weight", "bias")
    if not isinstance(weight, LowRankTensor) or isinstance(x, LowRankTensor) or weight.dim() != 2:
        return NotImplemented
    weight.note_shared()
    shared = F.linear(x, weight.weight.mT if weight.turned else weight.weight, bias)
    return shared + weight.turn().multiply_change(x)


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index, weight, _, most = _bind(args, kwargs, "input", "weight", "padding_idx", "max_norm")
    if not isinstance(weight, LowRankTensor) or weight.turned or most is not None:
        return NotImplemented
    weight.note_shared()
    change = F.embedding(index, weight.a) @ weight.b.mT
    change = change if weight.spread is None else change * F.embedding(index, weight.spread)
    return F.embedding(index, weight.weight) + change


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[:2] if len(args) >= 2 else (None, None)
    if len(args) != 2 or kwargs or (isinstance(left, LowRankTensor) and isinstance(right, LowRankTensor)):
        return NotImplemented
    if isinstance(right, LowRankTensor) and right.dim() == 2:
        return right.multiply_rows(left)
    if isinstance(left, LowRankTensor) and left.dim() == 2 and right.dim() >= 2:
        return left.turn().multiply_rows(right.mT).mT
    return NotImplemented


def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sum over W, and over its factors, which have the letters of W and a new letter for the rank."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    terms = None if kwargs or not isinstance(equation, str) else _read_terms(equation, operands)
    if terms is None:
        return NotImplemented
    letters, output, at, rank = terms
    weight = operands[at]
    weight.note_shared()
    operands[at] = weight.weight.mT if weight.turned else weight.weight
    shared = torch.einsum(equation, *operands)
    others = list(zip(letters[:at] + letters[at + 1 :], operands[:at] + operands[at + 1 :], strict=True))
    named = [*others, *_order_factors(weight, letters[at], rank, "".join(term for term, _ in others), output)]
    spelled = ",".join(term for term, _ in named)
    return shared + torch.einsum(f"{spelled}->{output}", *(each for _, each in named))


def _read_terms(equation: str, operands: list[Any]) -> tuple[list[str], str, int, str] | None:
    """Return the letters of each operand and of the output, the index of W, and an unused letter; None if W can't be split."""
    low = [at for at, each in enumerate(operands) if isinstance(each, LowRankTensor)]
    if len(low) != 1 or len(operands) < 2:
        return None
    terms, arrow, output = equation.replace(" ", "").partition("->")
    letters, weight = terms.split(","), operands[low[0]]
    own = letters[low[0]]
    free = [letter for letter in string.ascii_letters if letter not in equation]
    simple = arrow and own.isalpha() and len(set(own)) == len(own) == weight.dim()
    return (letters, output, low[0], free[0]) if simple and free and weight.spread is None else None


def _order_factors(weight: LowRankTensor, own: str, rank: str, before: str, output: str) -> list[tuple[str, Tensor]]:
    """Return the letters and tensors of A and B; first the one that shares a summed letter with the other operands.

    torch multiplies from left to right, so this order keeps intermediate results thin.
    """
    first, rest = (own[1], own[0]) if weight.turned else (own[0], own[1:])
    factors = [(first + rank, weight.a), (rest + rank, weight.b.reshape(*weight.weight.shape[1:], -1))]
    return sorted(factors, key=lambda each: not any(letter in before and letter not in output for letter in each[0]))


# -- attention -------------------------------------------------------------------------------------------------------------


def _attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's function, whose products with projections are then split one by one."""
    if _ATTENTION is None:
        return NotImplemented
    return _ATTENTION(*args, **kwargs)


def _open_attention() -> Callable[..., Any] | None:
    """Return torch's attention function without its dispatch on `__torch_function__`; None if torch's version differs."""
    function: Any = F.multi_head_attention_forward
    if not isinstance(function, FunctionType) or "has_torch_function" not in function.__globals__:
        return None
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


_ATTENTION = _open_attention()


# -- views -----------------------------------------------------------------------------------------------------------------


def _turn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].turn() if args[0].dim() == 2 else NotImplemented


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    swapped = len(args) == 3 and {each % 2 for each in args[1:]} == {0, 1}
    return tensor.turn() if isinstance(tensor, LowRankTensor) and tensor.dim() == 2 and swapped else NotImplemented


def _find_axis(tensor: Any, axis: Any) -> int | None:
    """Return the normalised axis if `narrow_to` supports it (both of a matrix, else the first), or None."""
    if not isinstance(tensor, LowRankTensor) or not isinstance(axis, int):
        return None
    axis %= tensor.dim()
    return axis if axis == 0 or tensor.dim() == 2 else None


def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, start, length = _bind(args, kwargs, "input", "dim", "start", "length")
    axis = _find_axis(tensor, dim)
    fits = axis is not None and isinstance(start, int) and 0 <= start <= start + length <= tensor.shape[axis]
    return tensor.narrow_to(axis, start, length) if fits else NotImplemented


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes, dim = _bind(args, kwargs, "tensor", "split_size_or_sections", "dim")
    sizes = kwargs.get("split_size", sizes)
    axis = _find_axis(tensor, dim or 0)
    if axis is None or sizes is None:
        return NotImplemented
    whole = tensor.shape[axis]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, max(sizes, 1))]
    if sum(sizes) != whole:
        return NotImplemented
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return tuple(tensor.narrow_to(axis, start, size) for start, size in zip(starts, sizes, strict=True))


def _chunk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, chunks, dim = _bind(args, kwargs, "input", "chunks", "dim")
    axis = _find_axis(tensor, dim or 0)
    if axis is None:
        return NotImplemented
    return _split(func, (tensor, -(-tensor.shape[axis] // chunks), axis), {})


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, where = args
    places = where if isinstance(where, tuple) else (where,)
    if any(not isinstance(place, slice) or place.step not in (None, 1) for place in places):
        return NotImplemented
    for dim, place in enumerate(places):
        if place == slice(None):
            continue
        axis = _find_axis(tensor, dim)
        if axis is None:
            return NotImplemented
        start, stop, _ = place.indices(tensor.shape[axis])
        tensor = tensor.narrow_to(axis, start, max(0, stop - start))
    return tensor


# -- convolutions ----------------------------------------------------------------------------------------------------------


def _convolve(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, stride, padding, dilation, groups = _bind(args, kwargs, *names)
    groups = groups or 1
    # With few outputs in each group, the noise would need as many filters as the layer has.
    if not isinstance(weight, LowRankTensor) or weight.spread is not None or groups * weight.a.shape[-1] >= len(weight):
        return NotImplemented
    weight.note_shared()
    where = {"stride": stride or 1, "padding": padding or 0, "dilation": dilation or 1, "groups": groups}
    shared = func(x, weight.weight, bias, **where)
    # One filter for each rank in each group, whose outputs are then mixed into the channels.
    filters = weight.b.mT.reshape(-1, *weight.weight.shape[1:])
    thin = func(x, torch.cat([filters] * groups), **where)
    return shared + _mix_channels(thin, weight.a.reshape(groups, -1, weight.a.shape[-1]), _CONVOLUTIONS[func])


def _convolve_transposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    x, weight, bias, stride, padding, more, groups, dilation = _bind(args, kwargs, *names)
    groups = groups or 1
    if not isinstance(weight, LowRankTensor) or weight.spread is not None or groups * weight.a.shape[-1] >= len(weight):
        return NotImplemented
    weight.note_shared()
    where = {"stride": stride or 1, "padding": padding or 0, "output_padding": more or 0}
    where |= {"groups": groups, "dilation": dilation or 1}
    shared = func(x, weight.weight, bias, **where)
    # First mix the channels into one for each rank in each group.
    mixed = _mix_channels(x, weight.a.reshape(groups, -1, weight.a.shape[-1]).mT, _TRANSPOSED[func])
    filters = weight.b.mT.reshape(-1, *weight.weight.shape[1:])
    return shared + func(mixed, torch.cat([filters] * groups), **where)


def _mix_channels(x: Tensor, mixing: Tensor, space: int) -> Tensor:
    """Return products over the channels, group by group.

    Args:
        x: The data, whose channels are before the axes of space.
        mixing: For each group a matrix, of shape (channels after, channels before).
        space: How many axes of space there are.
    """
    at = x.dim() - space - 1
    shape = (*x.shape[:at], len(mixing), x.shape[at] // len(mixing), *x.shape[at + 1 :])
    parts = x.reshape(shape).movedim((at, at + 1), (-2, -1))
    out: Tensor = (mixing @ parts.unsqueeze(-1)).squeeze(-1) if len(mixing) > 1 else parts @ mixing[0].mT
    return out.flatten(-2).movedim(-1, at)


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Return arguments by name, None for omitted ones."""
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]


TABLE: dict[Any, Rule] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attend,
    torch.einsum: _einsum,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: lambda func, args, kwargs: _matmul(func, (args[1], args[0]), kwargs),
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.t: _turn,
    Tensor.t: _turn,
    _PLAIN.T.__get__: _turn,
    _PLAIN.mT.__get__: _turn,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    torch.narrow: _narrow,
    Tensor.narrow: _narrow,
    torch.split: _split,
    Tensor.split: _split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    Tensor.__getitem__: _index,
    **dict.fromkeys(_CONVOLUTIONS, _convolve),
    **dict.fromkeys(_TRANSPOSED, _convolve_transposed),
}
