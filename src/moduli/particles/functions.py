"""Functions of whole models. Each takes particles, products, or parts of particles that `only` selects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moduli.layout import Group

from . import _derive, _pass
from ._derive import Operand
from ._only import Only
from ._product import ParamProduct, unary_lambda_wrapper
from ._species import require
from .base import NytoModuleBase
from .errors import StructureError
from .kernel import Product

__all__ = [
    "norm",
    "dot",
    "cosine",
    "distance",
    "lerp",
    "lerp_",
    "axpy_",
    "sign",
    "sqrt",
    "exp",
    "clamp",
    "where",
    "map",
    "rand",
    "randn",
    "zeros_like",
    "vector",
    "from_vector",
]

T = TypeVar("T")

ON_PRODUCTS = frozenset(
    {
        "norm",
        "dot",
        "cosine",
        "distance",
        "lerp",
        "sign",
        "sqrt",
        "exp",
        "clamp",
        "where",
        "map",
        "zeros_like",
        "vector",
    }
)


def method(product: ParamProduct, name: str) -> Callable[..., Any]:
    """A function of this room as a method of products."""
    function = globals()[name]
    if name == "map":
        return lambda fn, *others: function(fn, product, *others)
    return functools.partial(function, product)


def _operand(x: Any) -> Operand:
    if isinstance(x, Only):
        return Operand(x.module, scope=x.patterns)
    return Operand(require(x))


def _tensors(x: Any) -> list[Tensor]:
    """The values of a model that take part, tensor by tensor."""
    if isinstance(x, Product):
        inner: Any = getattr(x, "product", x)
        return list(inner.params.values())
    which = _operand(x)
    inert = {place for place, config in which.config().items() if not config.operational} if which.scope else set()
    return [tensor for place, tensor in enumerate(_derive.tensors_of(which)) if place not in inert]


def _pair(x: Any, y: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The values of two models of one structure."""
    if isinstance(x, Product) or isinstance(y, Product):
        if not (isinstance(x, Product) and isinstance(y, Product)):
            raise StructureError("cannot combine a product and a module; write module.product() or product.module()")
        left: Any = getattr(x, "product", x)
        return _tensors(left), _tensors(left._same_version(y))
    if isinstance(x, Only) != isinstance(y, Only):
        x, y = (x if isinstance(x, Only) else Only(x, y.patterns)), (y if isinstance(y, Only) else Only(y, x.patterns))
    a, b = _operand(x), _operand(y)
    _derive.matching(a, b)
    return _tensors(x), _tensors(y)


def norm(x: Any, p: float = 2.0) -> Tensor:
    r"""The norm of all parameters taken as one vector, $(\sum_i |x_i|^p)^{1/p}$.

    Args:
        x: A particle, a product, or a part.
        p: The order; `float("inf")` is the largest magnitude.

    Returns:
        A tensor without dimensions.

    Example:
        >>> from moduli.particles import adopt, norm
        >>> net = adopt(nn.Linear(3, 3))
        >>> round(norm(0 * net + 1).item() ** 2, 3)
        12.0
    """
    with _derive.recording():
        parts = [t if t.is_floating_point() or t.is_complex() else t.double() for t in _tensors(x) if t.numel()]
        if not parts:
            return torch.zeros(())
        each = [torch.linalg.vector_norm(t, p) for t in parts]
        kind = functools.reduce(torch.promote_types, (t.dtype for t in each))
        total: Tensor = torch.linalg.vector_norm(torch.stack([t.to(kind) for t in each]), p)
        return total


def dot(x: Any, y: Any) -> Tensor:
    r"""The inner product of two models, $\sum_i \bar x_i y_i$.

    Example:
        >>> from moduli.particles import adopt, dot
        >>> net = 0 * adopt(nn.Linear(3, 3)) + 1
        >>> dot(net, 2 * net).item()
        24.0
    """
    with _derive.recording():
        left, right = _pair(x, y)
        total = torch.zeros((), dtype=torch.float64)
        kind = functools.reduce(torch.promote_types, (t.dtype for t in left), torch.float32)
        for a, b in zip(left, right, strict=True):
            wide = torch.promote_types(a.dtype, torch.float32)
            total = total + torch.linalg.vecdot(a.reshape(-1).to(wide), b.reshape(-1).to(wide))
        return total.to(kind) if not (total.is_complex() and not kind.is_complex) else total


def cosine(x: Any, y: Any) -> Tensor:
    """The cosine of the angle between two models; 0 if one of them is all zeros.

    Example:
        >>> from moduli.particles import adopt, cosine
        >>> net = adopt(nn.Linear(3, 3))
        >>> round(cosine(net, -2 * net).item(), 4)
        -1.0
    """
    with _derive.recording():
        lengths = norm(x) * norm(y)
        inner = dot(x, y)
        return torch.where(
            lengths == 0, torch.zeros_like(inner), inner / torch.where(lengths == 0, torch.ones_like(lengths), lengths)
        )


def distance(x: Any, y: Any, p: float = 2.0) -> Tensor:
    """The norm of the difference of two models.

    Example:
        >>> from moduli.particles import adopt, distance
        >>> net = adopt(nn.Linear(3, 3))
        >>> round(distance(net, net + 1).item() ** 2, 3)
        12.0
    """
    with _derive.recording():
        left, right = _pair(x, y)
        parts = [a - b for a, b in zip(left, right, strict=True) if a.numel()]
        if not parts:
            return torch.zeros(())
        each = [
            torch.linalg.vector_norm(t if t.is_floating_point() or t.is_complex() else t.double(), p) for t in parts
        ]
        kind = functools.reduce(torch.promote_types, (t.dtype for t in each))
        total: Tensor = torch.linalg.vector_norm(torch.stack([t.to(kind) for t in each]), p)
        return total


def _elementwise(x: T, fn: Callable[[Tensor], Tensor]) -> T:
    if isinstance(x, ParamProduct):
        return x.unary_operator(unary_lambda_wrapper(fn))  # type: ignore[return-value]
    if isinstance(x, Product):
        return type(x).from_ParamProduct(_elementwise(x.product, fn))  # type: ignore[attr-defined, no-any-return]
    left = _operand(x)
    plain = _derive.graphing()
    return _derive.derive(  # type: ignore[return-value]
        left, lambda index, group: _pass.unary(group, fn, left.part(index, group), plain), lambda _, held: fn(held)
    )


def sign(x: T) -> T:
    """The sign of every parameter.

    Example:
        >>> from moduli.particles import adopt, sign
        >>> sign(adopt(nn.Linear(1, 1)) * 0 - 3).bias.item()
        -1.0
    """
    return _elementwise(x, torch.sgn)


def sqrt(x: T) -> T:
    """The square root of every parameter.

    Example:
        >>> from moduli.particles import adopt, sqrt
        >>> sqrt(adopt(nn.Linear(1, 1)) * 0 + 9).bias.item()
        3.0
    """
    return _elementwise(x, torch.sqrt)


def exp(x: T) -> T:
    """The exponential of every parameter.

    Example:
        >>> from moduli.particles import adopt, exp
        >>> exp(adopt(nn.Linear(1, 1)) * 0).bias.item()
        1.0
    """
    return _elementwise(x, torch.exp)


def clamp(x: T, min: float | None = None, max: float | None = None) -> T:
    """Every parameter moved into an interval.

    Example:
        >>> from moduli.particles import adopt, clamp
        >>> clamp(adopt(nn.Linear(1, 1)) * 0 + 9, max=2.0).bias.item()
        2.0
    """
    return _elementwise(x, lambda t: torch.clamp(t, min, max))


def lerp(x: T, y: Any, weight: Any) -> T:
    r"""The point between two models, $x + w (y - x)$.

    Args:
        x: A particle or a product; the result is one like it.
        y: Another one of the same structure.
        weight: A number, or a tensor without dimensions.

    Example:
        >>> from moduli.particles import adopt, lerp
        >>> net = adopt(nn.Linear(1, 1)) * 0
        >>> lerp(net, net + 8, 0.25).bias.item()
        2.0
    """
    if isinstance(x, Product):
        return x + weight * (y - x)  # type: ignore[no-any-return]
    left = _operand(x)
    right = Operand(require(y), False)
    _derive.matching(left, right)
    plain = _derive.graphing()

    def compute(index: int, group: Group) -> tuple[Tensor, float]:
        a, b = left.part(index, group), right.part(index, group)
        if plain:
            first = a.plainly()
            return first + weight * (b.plainly() - first), 1.0
        whole = not (group.dtype.is_floating_point or group.dtype.is_complex)
        if whole:
            raise TypeError(
                f"{left.template.layout.entries[group.indices[0]].name!r} holds {group.dtype}, which has no points between; leave "
                "it out with set_param_config(operational=False, name=...)"
            )
        made = a.gathered(group)
        return made.lerp_(b.plainly(), _weight(weight, group)), 1.0

    return _derive.derive(left, compute)  # type: ignore[return-value]


def _weight(weight: Any, group: Group) -> Any:
    return weight.to(group.dtype) if isinstance(weight, Tensor) else weight


def lerp_(x: T, y: Any, weight: float) -> T:
    r"""Move a model towards another in place, $x \leftarrow x + w (y - x)$; its parameters stay the objects they are.

    Example:
        >>> from moduli.particles import adopt, lerp_
        >>> net = adopt(nn.Linear(1, 1)) * 0
        >>> lerp_(net, net + 8, 0.25).bias.item()
        2.0
    """
    return _in_place(x, y, lambda mine, theirs: torch._foreach_lerp_(mine, theirs, weight))


def axpy_(x: T, alpha: float, y: Any) -> T:
    r"""Add a multiple of another model in place, $x \leftarrow x + \alpha y$.

    Example:
        >>> from moduli.particles import adopt, axpy_
        >>> net = adopt(nn.Linear(1, 1)) * 0
        >>> axpy_(net, -0.5, net + 8).bias.item()
        -4.0
    """
    return _in_place(x, y, lambda mine, theirs: torch._foreach_add_(mine, theirs, alpha=alpha))


def _in_place(x: T, y: Any, act: Callable[[list[Tensor], list[Tensor]], Any]) -> T:
    module = require(x.module if isinstance(x, Only) else x)
    _derive.refuse_graph()
    _ = module._parameters
    left = Operand(module, False, x.patterns if isinstance(x, Only) else None)
    right = Operand(require(y), False)
    _derive.matching(left, right)
    inert = {place for place, config in left.config().items() if not config.operational}
    with torch.no_grad():
        values = _derive.tensors_of(right)
        places = [place for place in range(len(values)) if place not in inert and values[place].numel()]
        if places:
            act([left.tensors[i] for i in places], [values[i] for i in places])
    return x


def where(condition: Any, x: T, y: Any) -> T:
    """Choose between two models, parameter by parameter or element by element.

    Args:
        condition: A truth value, a vector of truth values as long as `vector(x)`, or a particle of the same structure
            whose elements count as true where they are not zero.
        x: What is chosen where the condition is true; the result is a particle like it.
        y: What is chosen elsewhere: a particle of the same structure, or a number.

    Example:
        >>> from moduli.particles import adopt, vector, where
        >>> net = adopt(nn.Linear(1, 1)) * 0 + 3
        >>> where(torch.tensor([True, False]), net, -net).bias.item()
        -3.0
    """
    if isinstance(x, Product):
        return where(condition, x.particle(), y.particle() if isinstance(y, Product) else y).product()  # type: ignore[no-any-return]
    left = _operand(x)
    layout = left.template.layout
    right = Operand(require(y), False) if isinstance(y, nn.Module) else None
    if right is not None:
        _derive.matching(left, right)
    chosen: list[Any]
    if isinstance(condition, NytoModuleBase):
        mask = Operand(condition, False)
        _derive.matching(left, mask)
        chosen = [t.reshape(-1) != 0 for t in _derive.tensors_of(mask)]
    elif isinstance(condition, Tensor) and condition.dim() == 1:
        if condition.shape[0] != layout.numel:
            raise StructureError(f"the condition has {condition.shape[0]} elements; the model has {layout.numel}")
        chosen = list(torch.split(condition.bool(), [entry.numel for entry in layout]))
    else:
        chosen = [torch.as_tensor(bool(condition)).expand(entry.numel) for entry in layout]
    plain = _derive.graphing()

    def compute(index: int, group: Group) -> tuple[Tensor, float]:
        mask = torch.cat([chosen[i] for i in group.indices])
        a = left.part(index, group)
        first = a.plainly() if plain else a.gathered(group)
        second = right.part(index, group).plainly() if right is not None else torch.as_tensor(y, dtype=group.dtype)
        return torch.where(mask, first, second), 1.0

    return _derive.derive(left, compute)  # type: ignore[return-value]


def map(fn: Callable[..., Tensor], x: T, *others: Any, named: bool = False) -> T:
    """Apply a function to every parameter.

    Args:
        fn: Called with the parameter of `x` and those of the others; gives a tensor of the same shape.
        x: A particle, a product, or a part; the result is one like it.
        *others: More of them, of the same structure.
        named: Whether to call the function with the dotted name first.

    Example:
        >>> from moduli.particles import adopt, map
        >>> net = adopt(nn.Linear(1, 1))
        >>> map(lambda name, p: p * 0 + len(name), net, named=True).bias.item()
        4.0
    """
    if isinstance(x, ParamProduct):
        names, lists = x.vdata.names, [x._same_version(other) for other in others]
        keys = iter(list(x.params))

        def each(param: Tensor) -> Tensor:
            key = next(keys)
            given = (names[key],) if named else ()
            return fn(*given, param, *(other.params[key] for other in lists))

        return x.unary_operator(lambda param, config: unary_lambda_wrapper(each)(param, config))  # type: ignore[return-value]
    left = _operand(x)
    rights = [_operand(other) for other in others]
    for right in rights:
        _derive.matching(left, right)
    inert = {place for place, config in left.config().items() if not config.operational}

    def compute(index: int, group: Group) -> tuple[Tensor, float]:
        columns = [_derive.tensors_of(each) for each in (left, *rights)]
        made = []
        for place in group.indices:
            entry = left.template.layout.entries[place]
            if place in inert:
                made.append(columns[0][place].reshape(-1))
                continue
            given = (entry.name,) if named else ()
            value = fn(*given, *(column[place] for column in columns))
            if not isinstance(value, Tensor) or value.shape != entry.shape:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise StructureError(f"the function gave {got} for {entry.name!r}, which has shape {entry.shape}")
            made.append(value.reshape(-1))
        return torch.cat(made), 1.0

    return _derive.derive(left, compute)  # type: ignore[return-value]


def _drawn(x: T, draw: Callable[..., Tensor], scale: float, generator: torch.Generator | None) -> T:
    left = _operand(x)

    def compute(index: int, group: Group) -> tuple[Tensor, float]:
        if not (group.dtype.is_floating_point or group.dtype.is_complex):
            name = left.template.layout.entries[group.indices[0]].name
            raise TypeError(
                f"{name!r} holds {group.dtype}, for which nothing can be drawn; leave it out with "
                f"set_param_config(operational=False, name={name!r})"
            )
        made = draw(group.numel, dtype=group.dtype, device=group.device, generator=generator)
        return (made if scale == 1.0 else made.mul_(scale)), 1.0

    return _derive.derive(left, compute)  # type: ignore[return-value]


def rand(x: T, scale: float = 1.0, generator: torch.Generator | None = None) -> T:
    """A particle of the same species with values drawn uniformly from [0, scale).

    Args:
        x: A particle, or a part of one.
        scale: What every value is multiplied with.
        generator: Where the randomness comes from; torch's own by default.

    Example:
        >>> from moduli.particles import adopt, rand
        >>> net = adopt(nn.Linear(2, 1))
        >>> one, two = (rand(net, generator=torch.Generator().manual_seed(0)) for _ in range(2))
        >>> torch.equal(one.weight, two.weight)
        True
    """
    return _drawn(x, torch.rand, scale, generator)


def randn(x: T, scale: float = 1.0, generator: torch.Generator | None = None) -> T:
    """A particle of the same species with values drawn from a normal distribution of mean 0.

    Args:
        x: A particle, or a part of one.
        scale: The standard deviation.
        generator: Where the randomness comes from; torch's own by default.

    Example:
        >>> from moduli.particles import adopt, norm, randn
        >>> norm(randn(adopt(nn.Linear(2, 1)), scale=0.0)).item()
        0.0
    """
    return _drawn(x, torch.randn, scale, generator)


def zeros_like(x: T) -> T:
    """A particle of the same species with all values zero.

    Example:
        >>> from moduli.particles import adopt, zeros_like
        >>> zeros_like(adopt(nn.Linear(2, 1))).bias.item()
        0.0
    """
    if isinstance(x, Product):
        return _elementwise(x, torch.zeros_like)
    return _derive.derive(  # type: ignore[return-value]
        _operand(x), lambda index, group: (group.empty().zero_(), 1.0), lambda _, held: torch.zeros_like(held)
    )


def vector(x: Any, copy: bool = True) -> Tensor:
    """All parameters as one vector, in the order of `named_parameters()`.

    Parameters of several dtypes are converted to one that holds them all.

    Args:
        x: A particle, a product, or a part.
        copy: Whether the vector must be independent. Otherwise the result of an operation gives its own vector, if its
            parameters have one: what is written to it is written to them.

    Example:
        >>> from moduli.particles import adopt, vector
        >>> vector(adopt(nn.Linear(2, 1)) * 0 + 1)
        tensor([1., 1., 1.])
    """
    with _derive.recording():
        if not copy and isinstance(x, NytoModuleBase):
            _ = x._parameters
            which = Operand(x, False)
            groups = which.template.layout.groups
            own = which.part(0, groups[0]).vector if len(groups) == 1 else None
            if own is not None:
                return own
        tensors = _tensors(x)
        kind = functools.reduce(
            torch.promote_types, (t.dtype for t in tensors), tensors[0].dtype if tensors else torch.float32
        )
        if any(t.dtype in (torch.int32, torch.int64) for t in tensors):
            kind = torch.promote_types(kind, torch.float64) if kind.is_floating_point or kind.is_complex else kind
        return torch.cat([t.reshape(-1).to(kind) for t in tensors]) if tensors else torch.zeros(0)


def from_vector(x: T, values: Tensor) -> T:
    """A particle like another, with the values of a vector; `vector` undoes it.

    Args:
        x: The particle that the result is like.
        values: As many values as `vector(x)` has, in its order.

    Raises:
        StructureError: If there are too few or too many.

    Example:
        >>> from moduli.particles import adopt, from_vector, vector
        >>> from_vector(adopt(nn.Linear(2, 1)), torch.arange(3.0)).bias.item()
        2.0
    """
    left = Operand(require(x))
    layout = left.template.layout
    if values.shape != (layout.numel,):
        raise StructureError(
            f"{type(x).__name__} has {layout.numel} parameters in all; the vector given has shape {tuple(values.shape)}"
        )
    parts = torch.split(values, [entry.numel for entry in layout])

    def compute(index: int, group: Group) -> tuple[Tensor, float]:
        joined = torch.cat([parts[i] for i in group.indices])
        if joined.is_complex() and not group.dtype.is_complex:
            joined = joined.real
        return joined.to(group.dtype), 1.0

    return _derive.derive(left, compute)  # type: ignore[return-value]
