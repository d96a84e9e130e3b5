"""A parameter with a low-rank change, W + s A Bᵀ, that is not added up where a product with it can be taken apart.

x (W + s A Bᵀ)ᵀ = x Wᵀ + s (x B) Aᵀ: over many members the first product is one for all of them, and the others are thin. What is
not known to come apart is given the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3, torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class LowRankTensor(Tensor):
    """W + s A Bᵀ of one member, with W and the axes after its first as a matrix.

    Args:
        label: What it is called in reports.
        weight: W, the same for all members.
        a: A, of shape (rows, rank), already multiplied with s.
        b: B, of shape (columns, rank).
        report: Where it is written what was done with the parameter of a name: "shared" or "materialised".
        turned: Whether it stands for the transpose.
        spread: S of a change S * (A Bᵀ), elementwise, the same for all members; None for ones. It is the sum over ranks of
            diag(a) S diag(b), so that x, scaled by b, is multiplied with S, and the result scaled by a.
    """

    label: str
    weight: Tensor
    a: Tensor
    b: Tensor
    report: dict[str, set[str]]
    turned: bool
    spread: Tensor | None

    @staticmethod
    def __new__(
        cls,
        label: str,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        report: dict[str, set[str]],
        turned: bool = False,
        spread: Tensor | None = None,
    ) -> LowRankTensor:
        shape = (weight.shape[1], weight.shape[0]) if turned else weight.shape
        out = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=weight.dtype, device=weight.device)
        out.label, out.weight, out.a, out.b, out.report, out.turned = label, weight, a, b, report, turned
        out.spread = spread
        return out

    def materialise(self) -> Tensor:
        """Return the sum, for what does not come apart."""
        self.report.setdefault(self.label, set()).add("materialised")
        change = (self.a @ self.b.mT).reshape(self.weight.shape)
        full = self.weight + (change if self.spread is None else change * self.spread)
        return full.mT if self.turned else full

    def turn(self) -> LowRankTensor:
        """Return the transpose of a matrix."""
        return LowRankTensor(self.label, self.weight, self.a, self.b, self.report, not self.turned, self.spread)

    def multiply_rows(self, x: Tensor) -> Tensor:
        """Return x times the matrix."""
        self.report.setdefault(self.label, set()).add("shared")
        return x @ (self.weight.mT if self.turned else self.weight) + self.multiply_change(x)

    def multiply_change(self, x: Tensor) -> Tensor:
        """Return x times the change alone."""
        first, second = (self.b, self.a) if self.turned else (self.a, self.b)
        if self.spread is None:
            return (x @ first) @ second.mT
        spread = self.spread.mT if self.turned else self.spread
        ranks = zip(first.unbind(-1), second.unbind(-1), strict=True)
        parts = [((x * before) @ spread) * after for before, after in ranks]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LowRankTensor({self.label!r}, {tuple(self.shape)}, rank={self.a.shape[-1]})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func in _PASSED:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        args, kwargs = _replace(args), {key: _replace(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What comes this far was not called from Python; it sees the sum.
        return func(*_replace(args), **{key: _replace(value) for key, value in (kwargs or {}).items()})


def _replace(value: Any) -> Any:
    """Return arguments with sums in place of what has not been added up."""
    if isinstance(value, LowRankTensor):
        return value.materialise()
    if isinstance(value, list | tuple):
        return type(value)(_replace(each) for each in value)
    return value


_PLAIN: Any = Tensor  # its properties, which type checkers take for their values
# Questions about a tensor that need none of its numbers.
_PASSED = {
    *(getattr(_PLAIN, name).__get__ for name in
      ("shape", "dtype", "device", "layout", "requires_grad", "is_cuda", "ndim", "is_nested", "is_sparse", "grad_fn", "is_leaf")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
}  # fmt: skip


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight, bias = _bind(args, kwargs, "input", "weight", "bias")
    if not isinstance(weight, LowRankTensor) or isinstance(x, LowRankTensor) or weight.turned:
        return NotImplemented
    weight.report.setdefault(weight.label, set()).add("shared")
    return F.linear(x, weight.weight, bias) + weight.turn().multiply_change(x)


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index, weight, _, most = _bind(args, kwargs, "input", "weight", "padding_idx", "max_norm")
    if not isinstance(weight, LowRankTensor) or weight.turned or most is not None:
        return NotImplemented
    weight.report.setdefault(weight.label, set()).add("shared")
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


def _turn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].turn() if args[0].dim() == 2 else NotImplemented


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    swapped = len(args) == 3 and {each % 2 for each in args[1:]} == {0, 1}
    return tensor.turn() if isinstance(tensor, LowRankTensor) and tensor.dim() == 2 and swapped else NotImplemented


def _convolve(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, stride, padding, dilation, groups = _bind(args, kwargs, *names)
    if not isinstance(weight, LowRankTensor) or (groups or 1) != 1 or weight.spread is not None:
        return NotImplemented
    weight.report.setdefault(weight.label, set()).add("shared")
    where = {"stride": stride or 1, "padding": padding or 0, "dilation": dilation or 1}
    shared = func(x, weight.weight, bias, **where)
    # Convolutions with one filter for each rank, whose outputs are mixed into the channels.
    thin = func(x, weight.b.mT.reshape(-1, *weight.weight.shape[1:]), **where)
    space = _CONVOLUTIONS[func]
    mixed = torch.tensordot(weight.a, thin, ([1], [thin.dim() - space - 1]))
    return shared + mixed.movedim(0, mixed.dim() - space - 1)


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Return arguments by name, None for those that were not given."""
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
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
    **dict.fromkeys(_CONVOLUTIONS, _convolve),
}


class FunctionOfMember(nn.Module):
    """A function of a member as a module, so that torch can call it with other parameters.

    Args:
        member: The module whose parameters are replaced in a call.
    """

    def __init__(self, member: nn.Module) -> None:
        super().__init__()
        self.member = member

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call the function with the module and the arguments."""
        return fn(self.member, *args)


def call_low_rank(
    caller: FunctionOfMember,
    fn: Callable[..., Any],
    args: Sequence[Any],
    dims: tuple[Any, ...],
    means: Mapping[str, Tensor],
    factors: Mapping[str, tuple[Tensor, Tensor]],
    vectors: Mapping[str, Tensor],
    spreads: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    report: dict[str, set[str]],
    randomness: str = "different",
) -> Any:
    """Return what a function of each member returns, stacked.

    Args:
        caller: The module of which all members are.
        fn: The function, of a module and the arguments.
        args: The arguments.
        dims: For each argument the axis along which members have slices of their own, or None.
        means: The parameters that have low-rank noise, the same for all members.
        factors: A and B of each of these, with the members along the first axis; A with the scale of the noise.
        vectors: Other parameters, with the members along the first axis.
        spreads: What the noise of matrices is multiplied with, elementwise, the same for all members.
        report: Where it is written what was done with the parameter of a name.
        randomness: As for `torch.vmap`.
    """

    def run(factors: Mapping[str, tuple[Tensor, Tensor]], vectors: Mapping[str, Tensor], *args: Any) -> Any:
        matrices = {
            name: LowRankTensor(name, means[name], a, b, report, spread=spreads.get(name))
            for name, (a, b) in factors.items()
        }
        state = {f"member.{name}": each for name, each in {**vectors, **matrices}.items()}
        return torch.func.functional_call(caller, state, (fn, *args))

    # The other kernels of attention have no rule for batches of members, and torch would loop over them.
    with sdpa_kernel(SDPBackend.MATH):
        return torch.vmap(run, in_dims=(0, 0, *dims), randomness=randomness)(factors, vectors, *args)
