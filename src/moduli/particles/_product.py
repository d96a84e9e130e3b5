"""Products: the parameters of a particle without its modules, and functions of tensors as functions of parameters.

What operators and functions do to a product they do to the module around its parameters.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moduli import particles
from moduli._torch import keep_from_tracing
from moduli.layout import Guard, read

from . import _arithmetic
from ._operand import Operand, pair
from ._record import build, is_composing, record_nothing, refuse_wrapped
from ._species import bring_up, version_of
from .base import NytoModuleBase, ParticleDataImp, ParticleKernelImp, VersionDataImp, locate
from .edits import clone_param
from .errors import StructureError
from .kernel import ParticleKernel, Product
from .mtype import ModuleID, ParamConfig, ParamDict

F = TypeVar("F", bound=Callable[..., Any])


class ParamProduct(Product[Any]):
    """The light form of a module: its parameters by identifier. Products of one version can be combined.

    The functions of `moduli.particles` are methods of it: `x.norm()`, `x.lerp(y, 0.5)`, `x.map(fn)`.

    Attributes:
        kernel: The kernel of the particle it was made from, as it was then.
        module_id: Which module of the particle `module()` returns.
        params: The parameters.
        buffers: The buffers that operations act on, by name; see `buffer_policy`.

    Example:
        >>> from moduli.particles import adopt
        >>> net = adopt(nn.Linear(2, 1))
        >>> x = net.product()
        >>> torch.equal((0.5 * x + 0.5 * x).module().weight, net.weight)
        True
    """

    # The functions of this room that are methods too.
    FUNCTIONS = frozenset((
        "norm", "dot", "cosine", "distance", "lerp", "lerp_", "axpy_", "sign", "sqrt", "exp", "clamp", "where", "map",
        "zeros_like", "vector", "from_vector",
    ))  # fmt: skip

    def __init__(self, kernel: ParticleKernelImp, module_id: ModuleID, params: ParamDict) -> None:
        self.kernel = kernel
        self.module_id = module_id
        self.params = params
        self.buffers: dict[str, Tensor] = {}
        # The kernel may move on; a product belongs to the version it was made at.
        self._version = kernel.version

    def __reduce__(self) -> Any:
        # A copy belongs to a copy of the particle, which is of the same species.
        self._check_current()
        return _restore, (type(self), self.pdata.modules[0], self.module_id, list(self.params.items()), self.buffers)

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
        return self._operate(fn)

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
        self._check_version(other)
        return self._operate(fn, product_to_module(other))

    def _operate(self, fn: Callable[..., Any], *others: nn.Module) -> ParamProduct:
        """Apply a function to every parameter, whatever its configuration, and to the buffers that take part."""
        keys, config, values = self._find_keys(), self.vdata.config, []
        with record_nothing():
            left = Operand(product_to_module(self), whole=True)
            rights = [pair(left, Operand(other))[1].values() for other in others]
            for entry, held, *row in zip(left.entries, left.values(), *rights, strict=True):
                if isinstance(held, nn.Parameter) or id(held) in keys:
                    values.append(_fit(entry.name, held, fn(held, *row, config[keys[id(held)]])))
                else:
                    # A buffer, as functions of parameters take it.
                    given = (nn.Parameter(each, requires_grad=False) for each in (held, *row))
                    value = _fit(entry.name, held, fn(*given, ParamConfig())).detach()
                    values.append(value.clone() if value.data_ptr() == held.data_ptr() else value)
        return self._replace(left.tensors, values, values[len(left.tensors) :])

    def clone(self) -> ParamProduct:
        """A product with copies of the values."""
        return +self  # type: ignore[no-any-return]

    def rand(self, scale: float = 1.0, generator: torch.Generator | None = None) -> ParamProduct:
        """A product with values drawn uniformly from [0, scale)."""
        return particles.rand(self, scale, generator)

    def randn(self, scale: float = 1.0, generator: torch.Generator | None = None) -> ParamProduct:
        """A product with values drawn from a normal distribution of mean 0 and standard deviation `scale`."""
        return particles.randn(self, scale, generator)

    def __getattr__(self, name: str) -> Any:
        if name not in ParamProduct.FUNCTIONS:
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")
        function = getattr(particles, name)
        return (lambda fn, *others: function(fn, self, *others)) if name == "map" else functools.partial(function, self)

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return self._run(functools.partial(_arithmetic.unary, fn), (self,))

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        return self._run(lambda x, y: _arithmetic.binary(fn, x, y, reflected), (self, other))

    def _run(self, fn: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        """What a function of modules makes of the modules around products."""
        named = kwargs or {}
        for arg in (*args, *named.values()):
            if isinstance(arg, nn.Module):
                raise StructureError(
                    f"cannot combine a product and a module ({type(arg).__name__}): write module.product() on the one side "
                    "or product.module() on the other"
                )
            if isinstance(arg, Product):
                self._check_version(arg)
        own = product_to_module(self)

        def unwrap(arg: Any) -> Any:
            return own if arg is self else product_to_module(arg) if isinstance(arg, ParamProduct) else arg

        made = fn(*map(unwrap, args), **{name: unwrap(arg) for name, arg in named.items()})
        if made is own:
            return self
        if not isinstance(made, nn.Module):
            return made
        build(made)
        buffers = dict(made.named_buffers())
        return self._replace(read(own).parameters, read(made).parameters, [buffers[name] for name in self.buffers])

    def _find_keys(self) -> dict[int, int]:
        return {id(param): key for key, param in self.params.items()}

    def _replace(self, own: list[Tensor], values: list[Any], buffers: list[Tensor]) -> ParamProduct:
        """A product with other values, in the order of the parameters of the module."""
        keys = self._find_keys()
        fresh = {keys[id(old)]: new for old, new in zip(own, values, strict=False)}
        made = type(self)(self.kernel, self.module_id, OrderedDict((key, fresh[key]) for key in self.params))
        made.buffers = dict(zip(self.buffers, buffers, strict=True))
        return made

    def _check_current(self) -> None:
        if self._version.next_version is not None:
            raise StructureError(
                f"this product was made at version {self.vdata.number} and its {type(self.pdata.modules[0]).__name__} has "
                "been edited since; make a new product with product()"
            )

    def _check_version(self, product: Any) -> None:
        if not isinstance(product, ParamProduct):
            raise StructureError(
                f"cannot combine a ParamProduct and a {type(product).__name__}; make a product of it first"
            )
        if product._version is not self._version:
            a, b = self.vdata, product.vdata
            related = "of one species" if a.species is b.species else "of different species"
            raise StructureError(
                f"cannot combine products of different versions: the left is at version {a.number}, the right at version "
                f"{b.number}, {related}. Products combine within one version; make new ones with product() after touch(), or "
                "combine the modules, which need only agree in structure"
            )


def _fit(name: str, before: Tensor, value: Any) -> Any:
    """What a function gave for a parameter, as a parameter of the same shape and kind."""
    if not isinstance(value, Tensor):
        raise TypeError(f"the operation gave a {type(value).__name__} for {name!r}; it must give a parameter")
    made = _arithmetic.fit(name, before.shape, before.dtype, value)
    if made is value and (isinstance(value, nn.Parameter) or is_composing()):
        return value
    return nn.Parameter(made, requires_grad=value.requires_grad if made is not value else before.requires_grad)


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
    version, key = version_of(root), module._module_id
    # The modules of a product keep the labels and parameters that the particle has now.
    kept: ParticleKernelImp = ParticleKernel(version, locate(_arithmetic.rebuild(root), version.data))
    below = version.data.get_sub_params(key)
    made = ParamProduct(kept, key, OrderedDict((pid, param) for pid, param in kept.data.params.items() if pid in below))
    which = Operand(module, wrapped=True)
    made.buffers = {which.layout.buffers[place].name: which.buffers[place] for place in which.acting}
    return made


def _restore(
    kind: type[ParamProduct], root: Any, module_id: ModuleID, params: list[Any], buffers: dict[str, Tensor]
) -> ParamProduct:
    version = version_of(root)
    made = kind(ParticleKernel(version, locate(root, version.data)), module_id, OrderedDict(params))
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
    held = product.pdata
    exchanged = {id(held.params[key]): param for key, param in product.params.items()}
    return _arithmetic.rebuild(held.modules[product.module_id], exchanged, product.buffers)


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
    module_to_product(module)._check_version(product)
    left, right = pair(Operand(module, live=True, whole=True), Operand(product_to_module(product)))
    with Guard(deferred=True, grad=False):
        for mine, theirs in zip(left.values(), right.values(), strict=True):
            if mine is not theirs:
                mine.copy_(theirs)


# -- functions -----------------------------------------------------------------------------------------------------------


def take_products(fn: F) -> F:
    """Let a function of particles take products as well, and `torch.compile` run it as it is."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        first: Any = next((arg for arg in args if isinstance(arg, Product)), None)
        with record_nothing():
            return fn(*args, **kwargs) if first is None else first._run(fn, args, kwargs)

    keep_from_tracing(fn, call)
    return call  # type: ignore[return-value]


def unary_lambda_wrapper(
    fn: Callable[[nn.Parameter], Tensor],
) -> Callable[[nn.Parameter, ParamConfig], nn.Parameter]:
    """Make of a function of a tensor one that honours a parameter's configuration.

    Example:
        >>> from moduli.particles import ParamConfig
        >>> double = unary_lambda_wrapper(lambda p: 2 * p)
        >>> one = nn.Parameter(torch.ones(1))
        >>> double(one, ParamConfig()).item(), double(one, ParamConfig(operational=False)).item()
        (2.0, 1.0)
    """
    act = binary_lambda_wrapper(lambda param, _: fn(param))
    return lambda param, config: act(param, param, config)


def binary_lambda_wrapper(
    fn: Callable[[nn.Parameter, nn.Parameter], Tensor],
) -> Callable[[nn.Parameter, nn.Parameter, ParamConfig], nn.Parameter]:
    """Make of a function of two tensors one that honours a parameter's configuration.

    Example:
        >>> from moduli.particles import ParamConfig
        >>> minus = binary_lambda_wrapper(lambda p, q: p - q)
        >>> one = nn.Parameter(torch.ones(1))
        >>> minus(one, one, ParamConfig()).item(), minus(one, one, ParamConfig(operational=False)).item()
        (0.0, 1.0)
    """

    def act(left: nn.Parameter, right: nn.Parameter, config: ParamConfig) -> nn.Parameter:
        if not config.operational:
            return clone_param(left) if config.clone else left
        value = fn(left, right)
        if value.requires_grad or is_composing():
            return value  # type: ignore[return-value]
        flag = left.requires_grad and (value.is_floating_point() or value.is_complex())
        return nn.Parameter(value, requires_grad=flag)

    return act


keep_from_tracing(
    module_to_product, product_to_module, product_assign_to_module, ParamProduct._operate, ParamProduct._run
)
