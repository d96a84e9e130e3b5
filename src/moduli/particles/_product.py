"""Products: the parameters of a particle without its modules, on which chains of operations are cheap."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moduli import particles
from moduli._torch import keep_from_tracing
from moduli.labels import Axes

from . import _arithmetic
from ._lambda_wrappers import binary_lambda_wrapper, unary_lambda_wrapper
from ._mode import is_composing, record_nothing
from ._operand import Operand, align, read_number
from ._record import build, record_of, refuse_wrapped
from ._species import bring_up, version_of
from .base import NytoModuleBase, ParticleDataImp, ParticleKernelImp, VersionDataImp, locate
from .errors import StructureError
from .kernel import ParticleKernel, Product
from .mtype import ModuleID, ParamConfig, ParamDict


class ParamProduct(Product[Any]):
    """The light form of a module: its parameters by identifier. Products of one version can be combined.

    Attributes:
        kernel: The kernel of the particle it was made from, as it was then.
        module_id: Which module of the particle `module()` returns.
        params: The parameters.
        buffers: The buffers that operations act on, by name; see `buffer_policy`.
        labels: The axes of labelled parameters and buffers, by identifier and name.

    Example:
        >>> from moduli.particles import adopt
        >>> net = adopt(nn.Linear(2, 1))
        >>> x = net.product()
        >>> torch.equal((0.5 * x + 0.5 * x).module().weight, net.weight)
        True
    """

    # The functions of this room that are methods too.
    FUNCTIONS = frozenset((
        "norm", "dot", "cosine", "distance", "lerp", "sign", "sqrt", "exp", "clamp", "where", "map", "zeros_like", "vector",
    ))  # fmt: skip

    kernel: ParticleKernelImp
    module_id: ModuleID
    params: ParamDict
    buffers: dict[str, Tensor]
    labels: dict[int | str, Axes]

    def __init__(self, kernel: ParticleKernelImp, module_id: ModuleID, params: ParamDict) -> None:
        self.kernel = kernel
        self.module_id = module_id
        self.params = params
        self.buffers = {}
        self.labels = {}
        # The kernel may move on; a product belongs to the version it was made at.
        self._version = kernel.version

    def __reduce__(self) -> Any:
        # A copy belongs to a copy of the particle, which is of the same species.
        self._check_current()
        return _restore, (self.pdata.modules[0], self.module_id, list(self.params.items()), self.buffers)

    @property
    def vdata(self) -> VersionDataImp:
        """The metadata of the version."""
        return self._version.data

    @property
    def pdata(self) -> ParticleDataImp:
        """The data of the particle it was made from."""
        return self.kernel.data

    def module(self) -> Any:
        """The module with these parameters."""
        return product_to_module(self)

    def particle(self) -> Any:
        """The module with these parameters."""
        return product_to_module(self)

    def unary_operator(self, fn: Callable[[nn.Parameter, ParamConfig], nn.Parameter]) -> ParamProduct:
        """Apply a function to every parameter and its configuration, without recording gradients.

        Args:
            fn: Gives the parameter of the result. A plain tensor becomes a parameter that requires gradients if the
                operand's did.

        Example:
            >>> from moduli.particles import adopt
            >>> product = adopt(nn.Linear(2, 1)).product()
            >>> new = product.unary_operator(lambda param, config: nn.Parameter(0 * param + 10.0))
            >>> new.module().bias.item()
            10.0
        """
        return self._map(lambda name, config, param: fn(param, config))

    def binary_operator(
        self, other: ParamProduct, fn: Callable[[nn.Parameter, nn.Parameter, ParamConfig], nn.Parameter]
    ) -> ParamProduct:
        """Apply a function to the parameters of two products, pair by pair, without recording gradients.

        Args:
            other: A product of the same version.
            fn: Called with both parameters and their configuration; gives the parameter of the result.

        Raises:
            StructureError: If the products are of different versions.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> x, y = net.product(), net.clone().product()
            >>> new = x.binary_operator(y, lambda p, q, config: nn.Parameter(p - q))
            >>> new.module().bias.item()
            0.0
        """
        return self._map(lambda name, config, param, theirs: fn(param, theirs, config), self._same_version(other))

    def _map(self, fn: Callable[..., Any], *others: ParamProduct) -> ParamProduct:
        """Apply a function of a name, a configuration and values to every parameter, and to the buffers that take part."""
        config, names, every = self.vdata.config, self.vdata.names, (self, *others)
        with record_nothing():
            params = OrderedDict(
                (key, self._fit(key, fn(names[key], config[key], *(each.params[key] for each in every))))
                for key in self.params
            )
            buffers = {
                name: _as_buffer(fn(name, ParamConfig(), *(_as_parameter(each.buffers[name]) for each in every)), held)
                for name, held in self.buffers.items()
            }
        return self._replace_params(params, buffers)

    def clone(self) -> ParamProduct:
        """A product with copies of the values."""
        return self.unary_operator(unary_lambda_wrapper(torch.clone))

    def rand(self, scale: float = 1.0, generator: torch.Generator | None = None) -> ParamProduct:
        """A product with values drawn uniformly from [0, scale)."""
        return self._draw(torch.rand, scale, generator)

    def randn(self, scale: float = 1.0, generator: torch.Generator | None = None) -> ParamProduct:
        """A product with values drawn from a normal distribution of mean 0 and standard deviation `scale`."""
        return self._draw(torch.randn, scale, generator)

    def _draw(self, draw: Callable[..., Tensor], scale: float, generator: torch.Generator | None) -> ParamProduct:
        def draw_like(param: Tensor) -> Tensor:
            return scale * draw(param.shape, dtype=param.dtype, device=param.device, generator=generator)

        return self.unary_operator(unary_lambda_wrapper(draw_like))

    def from_vector(self, values: Tensor) -> ParamProduct:
        """A product with the values of a vector, in the order of `vector()`, which it undoes.

        Args:
            values: As many values as `vector()` has.

        Raises:
            StructureError: If there are too few or too many.

        Example:
            >>> from moduli.particles import adopt
            >>> adopt(nn.Linear(2, 1)).product().from_vector(torch.arange(3.0)).module().bias.item()
            2.0
        """
        sizes = [param.numel() for param in self.params.values()]
        if values.shape != (sum(sizes),):
            raise StructureError(
                f"the product has {sum(sizes)} values in all; the vector given has shape {tuple(values.shape)}"
            )
        parts = dict(zip(self.params, torch.split(values, sizes), strict=True))
        with record_nothing():
            return self._replace_params(
                OrderedDict(
                    (key, self._fit(key, _as_kind(parts[key], param).reshape(param.shape).clone()))
                    for key, param in self.params.items()
                )
            )

    def lerp_(self, other: Any, weight: float) -> ParamProduct:
        """Move every value towards that of another product, in place: x + weight * (other - x).

        Args:
            other: A product of the same version.
            weight: How far; 0 is here, 1 is there.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> _ = net.product().lerp_(net.product() * 0 + 1, 1.0)
            >>> net.bias.item()
            1.0
        """
        return self._in_place(other, lambda mine, theirs: mine.lerp_(theirs, weight))

    def axpy_(self, alpha: float, other: Any) -> ParamProduct:
        """Add alpha times another product, in place.

        Args:
            alpha: A number.
            other: A product of the same version.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> before = net.bias.item()
            >>> _ = net.product().axpy_(2.0, net.product() * 0 + 1)
            >>> round(net.bias.item() - before, 4)
            2.0
        """
        return self._in_place(other, lambda mine, theirs: mine.add_(theirs, alpha=alpha))

    def _in_place(self, other: Any, change: Callable[[Tensor, Tensor], Any]) -> ParamProduct:
        theirs = self._same_version(other)
        config = self.vdata.config
        with torch.no_grad():
            for key, param in self.params.items():
                if config[key].operational:
                    change(param, theirs.params[key])
            for name, held in self.buffers.items():
                change(held, theirs.buffers[name])
        return self

    def __getattr__(self, name: str) -> Any:
        if name in self.FUNCTIONS:
            function = getattr(particles, name)
            return (lambda fn, *others: function(fn, self, *others)) if name == "map" else partial(function, self)
        raise AttributeError(f"a ParamProduct has no attribute {name!r}")

    def _unary(self, fn: Callable[[Any], Any]) -> ParamProduct:
        return self.unary_operator(unary_lambda_wrapper(lambda p: p.clone() if (made := fn(p)) is p else made))

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        if isinstance(other, nn.Module):
            raise StructureError(
                f"cannot combine a {type(self).__name__} and a {type(other).__name__}: write module.product() on the one side "
                "or product.module() on the other"
            )
        if isinstance(other, Product):
            product = self._same_version(other)
            if reflected:
                return product.binary_operator(self, binary_lambda_wrapper(fn))
            return self.binary_operator(product, binary_lambda_wrapper(fn))
        value = read_number(other)
        if value is None:
            return NotImplemented
        return self.unary_operator(unary_lambda_wrapper(lambda p: fn(value, p) if reflected else fn(p, value)))

    def _replace_params(self, params: ParamDict, buffers: dict[str, Tensor] | None = None) -> ParamProduct:
        made = ParamProduct(self.kernel, self.module_id, params)
        made._version = self._version
        made.buffers = self.buffers if buffers is None else buffers
        made.labels = self.labels
        return made

    def _check_current(self) -> None:
        root = self.pdata.modules[0]
        if record_of(root).version is not self._version:
            raise StructureError(
                f"this product was made at version {self.vdata.number} and its {type(root).__name__} has been edited since; "
                "make a new product with product()"
            )

    def _in_order(self, labels: dict[int | str, Axes], like: ParamProduct) -> ParamProduct:
        """The same values, with the axes and labels of some in another order.

        Args:
            labels: The wanted axes.
            like: What has the wanted shapes.
        """
        if labels == self.labels:
            return self
        made = self._replace_params(OrderedDict(self.params), dict(self.buffers))
        tables: tuple[Any, Any] = (made.params, like.params), (made.buffers, like.buffers)
        for held, wanted in tables:
            for key in held.keys() & labels.keys() & self.labels.keys():
                if labels[key] != self.labels[key]:
                    name = self.vdata.names.get(key, key)
                    held[key] = align(name, held[key], self.labels[key], labels[key], wanted[key].shape)
        made.labels = labels
        return made

    def _fit(self, key: int, value: Any) -> nn.Parameter:
        """What an operation gave for a parameter, as a parameter of the same shape and kind."""
        before = self.params[key]
        name = self.vdata.names.get(key, str(key))
        if not isinstance(value, Tensor):
            raise TypeError(f"the operation gave a {type(value).__name__} for {name!r}; it must give a parameter")
        made = _arithmetic.fit(name, before.shape, before.dtype, value)
        if made is not value:
            return nn.Parameter(made, requires_grad=value.requires_grad)
        if isinstance(value, nn.Parameter) or is_composing():
            return value  # type: ignore[return-value]
        return nn.Parameter(value, requires_grad=before.requires_grad)

    def _same_version(self, other: Any) -> ParamProduct:
        inner = getattr(other, "product", None)
        if not isinstance(other, ParamProduct) and isinstance(inner, ParamProduct):
            other = inner
        if not isinstance(other, ParamProduct):
            raise StructureError(
                f"cannot combine a ParamProduct and a {type(other).__name__}; make a product of it first"
            )
        if other._version is not self._version:
            raise StructureError(
                f"cannot combine products of different versions: {_versions(self, other)}. Products combine within one "
                "version; make new ones with product() after touch(), or combine the modules, which need only agree in structure"
            )
        if self.params.keys() != other.params.keys():
            raise StructureError(
                f"cannot combine the product of module {self.module_id} with that of module {other.module_id} of the particle"
            )
        apart = sorted(self.buffers.keys() ^ other.buffers.keys())
        if apart:
            raise StructureError(
                f"the buffer {apart[0]!r} takes part on one side only; say moduli.particles.buffer_policy for both"
            )
        return other._in_order(self.labels, self)


def _versions(left: ParamProduct, right: ParamProduct) -> str:
    a, b = left.vdata, right.vdata
    related = "of one species" if a.species is b.species else "of different species"
    told = f"the left is at version {a.number}, the right at version {b.number}, {related}"
    here = {name: a.shapes.get(pid) for pid, name in a.names.items()}
    there = {name: b.shapes.get(pid) for pid, name in b.names.items()}
    for name in (*here, *there):
        if here.get(name, "absent") != there.get(name, "absent"):
            shown = tuple(
                "missing" if side is None else f"of shape {side}" for side in (here.get(name), there.get(name))
            )
            return f"{told}; {name!r} is {shown[0]} on the left and {shown[1]} on the right"
    return told


def _as_parameter(held: Tensor) -> nn.Parameter:
    """A buffer as functions of parameters take it."""
    return nn.Parameter(held, requires_grad=False)


def _as_buffer(value: Tensor, like: Tensor) -> Tensor:
    """What an operation gave for a buffer, in storage of its own."""
    made = value.detach().to(like.dtype)
    return made.clone() if made.data_ptr() == like.data_ptr() else made


def _as_kind(values: Tensor, like: Tensor) -> Tensor:
    """Values in the dtype of a parameter; a complex vector may hold real ones."""
    return (values.real if values.is_complex() and not like.is_complex() else values).to(like.dtype)


def module_to_product(module: NytoModuleBase) -> ParamProduct:
    """The product of a module.

    Raises:
        StructureError: If the module is wrapped by a `ParticleModule`.

    Example:
        >>> from moduli.particles import adopt
        >>> module_to_product(adopt(nn.Linear(2, 1))).module_id
        0
    """
    build(module)
    root = module._particle_root
    refuse_wrapped(module, root)
    bring_up(root)
    version = version_of(root)
    # The kernel of a product stays at the version of the product.
    kept: ParticleKernelImp = ParticleKernel(version, locate(root, version.data))
    key = module._module_id
    params = kept.data.params
    if key:
        below = version.data.get_sub_params(key)
        params = OrderedDict((pid, param) for pid, param in params.items() if pid in below)
    return _adorn(ParamProduct(kept, key, params))


def _adorn(made: ParamProduct) -> ParamProduct:
    """Note which buffers take part in operations, and the labels as they are now."""
    which = Operand(made.pdata.modules[made.module_id], wrapped=True)
    made.buffers = {which.layout.buffers[place].name: which.buffers[place] for place in which.acting}
    labels = which.find_labelled()
    if labels:
        keys = {id(param): key for key, param in made.pdata.params.items()}
        named = zip(which.layout, which.tensors, strict=True)
        made.labels = {keys[id(held)]: labels[entry.name] for entry, held in named if entry.name in labels}
        made.labels |= {name: labels[name] for name in made.buffers if name in labels}
    return made


def _restore(root: Any, module_id: ModuleID, params: list[Any], buffers: dict[str, Tensor]) -> ParamProduct:
    version = version_of(root)
    made = _adorn(ParamProduct(ParticleKernel(version, locate(root, version.data)), module_id, OrderedDict(params)))
    made.buffers = buffers
    return made


def product_to_module(product: ParamProduct) -> Any:
    """The module of a product.

    Raises:
        StructureError: If the particle that the product was made from has been edited since.

    Example:
        >>> from moduli.particles import adopt
        >>> product_to_module(adopt(nn.Linear(2, 1)).product()).weight.shape
        torch.Size([1, 2])
    """
    product._check_current()
    # Within a version, the particle may have been given other parameters since, and labels in another order.
    root = product.pdata.modules[0]
    live: ParticleKernelImp = ParticleKernel(product._version, locate(root, product.vdata))
    own = _adorn(ParamProduct(live, product.module_id, live.data.params))
    product = product._in_order(own.labels, own)
    exchanged = {id(live.data.params[key]): param for key, param in product.params.items()}
    return _arithmetic.rebuild(live.data.modules[product.module_id], exchanged, product.buffers)


def product_assign_to_module(product: ParamProduct, module: NytoModuleBase) -> None:
    """Copy the values of a product into the parameters of a module.

    Raises:
        StructureError: If they are of different versions, or the module is wrapped by a `ParticleModule`.

    Example:
        >>> from moduli.particles import adopt
        >>> net = adopt(nn.Linear(2, 1))
        >>> product_assign_to_module(0 * net.product() + 1, net)
        >>> net.bias.item()
        1.0
    """
    own = module_to_product(module)
    product = own._same_version(product)
    with torch.no_grad():
        for key, param in product.params.items():
            if own.params[key] is not param:
                own.params[key].copy_(param)
        for name, held in product.buffers.items():
            if own.buffers[name] is not held:
                own.buffers[name].copy_(held)


keep_from_tracing(
    module_to_product,
    product_to_module,
    product_assign_to_module,
    ParamProduct.unary_operator,
    ParamProduct.binary_operator,
    ParamProduct.from_vector,
    ParamProduct._in_place,
)
