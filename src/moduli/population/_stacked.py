"""A tensor that represents one tensor of each member.

A network of linear layers is called once with such tensors in place of its parameters. Products of all members are one
operation, in the form that is measured to be fastest for their sizes (`_measured`). Activations act on all members at once;
other operations are mapped by `torch.vmap`, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moduli._torch import pytree

from ._measured import choose_form


class Stacked(Tensor):
    """One tensor per member, with the shape of the tensor of one member; `physical` has the members in front."""

    physical: Tensor
    randomness: str

    @staticmethod
    def __new__(cls, physical: Tensor, randomness: str) -> Stacked:
        """Wrap a tensor whose first dimension is the members."""
        self: Stacked = Tensor._make_wrapper_subclass(
            cls, physical.shape[1:], dtype=physical.dtype, device=physical.device
        )
        self.physical = physical
        self.randomness = randomness
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stacked({tuple(self.physical.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        if rule is not None:
            return rule(func, args, kwargs or {})
        return _map_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Operations that torch calls from C++, without __torch_function__.
        return _map_function(func, args, kwargs or {})


def _read_attribute(func: Any, args: Any, kwargs: Any) -> Any:
    """Read an attribute of the tensor of one member."""
    x, *rest = args
    return func(x.physical[0], *rest, **kwargs)


def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a function of every element of one tensor."""
    x = args[0]
    if type(x) is not Stacked or any(type(each) is Stacked for each in (*args[1:], *kwargs.values())):
        return _map_function(func, args, kwargs)
    return Stacked(func(x.physical, *args[1:], **kwargs), x.randomness)


def _apply_paired(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an elementwise function of two tensors that broadcast without regard to the members."""
    if len(args) != 2 or kwargs:
        return _map_function(func, args, kwargs)
    x, y = args
    first = x if type(x) is Stacked else y
    for each in args:
        if isinstance(each, Tensor) and (
            each.dim() > first.dim() or (type(each) is Stacked and each.dim() != first.dim())
        ):
            return _map_function(func, args, kwargs)
    p, q = (each.physical if type(each) is Stacked else each for each in args)
    return Stacked(func(p, q), first.randomness)


def _reduce_members(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the sum or the mean of all elements of each member."""
    if len(args) != 1 or kwargs:
        return _map_function(func, args, kwargs)
    x = args[0]
    return Stacked(func(x.physical, tuple(range(1, x.physical.dim()))) if x.dim() else x.physical, x.randomness)


# Default keyword arguments of torch's loss functions.
_PLAIN = {"weight": None, "size_average": None, "reduce": None, "reduction": "mean", "label_smoothing": 0.0}


def _is_plain(kwargs: Any) -> bool:
    return all(key in _PLAIN and _PLAIN[key] == value for key, value in kwargs.items() if key != "ignore_index")


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the cross entropy of each member, for shared classes or for each member's own, by one two-dimensional loss of torch.

    With the rows as the last dimension the softmax is computed for many rows at once.
    """
    x, y = args
    own = type(y) is Stacked
    fits = type(x) is Stacked and (own or type(y) is Tensor) and x.dim() == 2 and y.shape == x.shape[:1]
    if not fits or y.is_floating_point() or not _is_plain(kwargs):
        return _map_function(func, args, kwargs)
    left_out = kwargs.get("ignore_index", -100)
    classes = y.physical if own else y.expand(len(x.physical), -1)
    each = func(x.physical.transpose(1, 2), classes, reduction="none", ignore_index=left_out)
    return Stacked(each.sum(1) / (classes != left_out).sum(1), x.randomness)


def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the layer x W' + b of all members, in the form that is measured to be fastest."""
    x, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    if type(weight) is not Stacked or (bias is not None and type(bias) is not Stacked):
        return _map_function(func, args, kwargs)
    w, b = weight.physical, None if bias is None else bias.physical
    own = type(x) is Stacked
    data = x.physical if own else x
    shape = data.shape[1:] if own else data.shape
    count, out, into = w.shape
    if not shape or shape[-1] != into:
        # torch raises its usual error; reshaping below would not notice.
        return _map_function(func, args, kwargs)
    flat = len(shape) == 2
    forms = _OWN_FORMS if own else _SHARED_FORMS
    rows = data if flat else data.reshape(*((count,) if own else ()), -1, into)
    outputs = forms[choose_form(rows, w, b, forms)](rows, w, b)
    return Stacked(outputs if flat else outputs.reshape(count, *shape[:-1], out), weight.randomness)


def _multiply_left(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return (W x' + b)' of every member, for separate or shared data."""
    columns = (x if x.dim() == 3 else x.expand(len(w), *x.shape)).transpose(1, 2)
    products = torch.bmm(w, columns) if b is None else torch.baddbmm(b.unsqueeze(2), w, columns)
    return products.transpose(1, 2)


def _multiply_right(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return x W' + b of every member, for separate or shared data."""
    rows = x if x.dim() == 3 else x.expand(len(w), *x.shape)
    return torch.bmm(rows, w.transpose(1, 2)) if b is None else torch.baddbmm(b.unsqueeze(1), rows, w.transpose(1, 2))


def _multiply_side_by_side(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return W x' + b of all members, transposed, by one product of (N out, in) with (in, B); the weights are copied."""
    count, out, into = w.shape
    side_by_side = w.reshape(count * out, into)
    products = torch.mm(side_by_side, x.t()) if b is None else torch.addmm(b.reshape(-1, 1), side_by_side, x.t())
    return products.view(count, out, -1).transpose(1, 2)


_OWN_FORMS = {"left": _multiply_left, "right": _multiply_right}
_SHARED_FORMS = {**_OWN_FORMS, "side by side": _multiply_side_by_side}


def _map_function(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply any other function by `torch.vmap`."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if type(leaf) is Stacked]
    randomness = leaves[places[0]].randomness

    def one(*slices: Tensor) -> Any:
        filled = list(leaves)
        for place, each in zip(places, slices, strict=True):
            filled[place] = each
        called, named = pytree.tree_unflatten(filled, spec)
        return func(*called, **named)

    results = torch.vmap(one, 0, 0, randomness)(*(leaves[place].physical for place in places))
    return pytree.tree_map_only(Tensor, lambda each: Stacked(each, randomness), results)


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "requires_grad")
_ABOUT: list[Any] = [
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
]
_POINTWISE: list[Any] = []
for _names, _homes in (
    ("relu tanh sigmoid exp neg abs sin cos square", (torch, Tensor)),
    ("relu gelu silu elu selu celu mish leaky_relu softplus hardtanh relu6 hardswish hardsigmoid logsigmoid", (F,)),
    ("softsign tanhshrink tanh sigmoid", (F,)),
    ("__neg__ __abs__", (Tensor,)),
):
    _POINTWISE += [getattr(home, name) for name in _names.split() for home in _homes]
_PAIRED: list[Any] = [getattr(home, name) for name in ("add", "sub", "mul", "div", "pow") for home in (torch, Tensor)]
_PAIRED += [getattr(Tensor, f"__{name}__") for name in ("add", "radd", "sub", "mul", "rmul", "truediv", "pow")]
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_ABOUT, _read_attribute),
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_PAIRED, _apply_paired),
    **dict.fromkeys((torch.mean, torch.sum, Tensor.mean, Tensor.sum), _reduce_members),
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
}
