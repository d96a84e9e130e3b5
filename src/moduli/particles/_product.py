"""Products: the parameters of a particle without its modules, which operators and functions accept like modules.

An operation on a product makes an unbuilt module around the parameters, operates on that, and takes the result's parameters.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moduli import particles
from moduli._torch import keep_from_tracing
from moduli.layout import Guard, Reading, Structure, read

from . import _arithmetic
from ._arithmetic import make_shell
from ._config import find_acting, keep_buffer, policies_of
from ._modes import is_composing, record_nothing
from ._operand import Operand, pair
from ._operators import InPlaceOperators, Operators
from ._record import Pending, build, record_of, refuse_wrapped, take_result
from ._skeleton import State, capture
from ._species import bring_up, give_version, version_of
from ._version import Version
from .base import NytoModuleBase, kernel_of
from .errors import StructureError
from .mtype import ParamConfig

F = TypeVar("F", bound=Callable[..., Any])


class ParamProduct(Operators):
    """The light form of a module: its parameters by identifier. Products of one version can be combined.

    The functions of `moduli.particles` are methods of it: `x.norm()`, `x.lerp(y, 0.5)`, `x.map(fn)`.

    Attributes:
        kernel: The kernel of the particle from which it was made.
        module_id: The identifier of the module of the particle that `module()` returns.
        params: The parameters.
        buffers: The buffers that operations act on, by name; see `buffer_policy`.

    Example:
        >>> from moduli.particles import adopt
        >>> net = adopt(nn.Linear(2, 1))
        >>> x = net.product()
        >>> torch.equal((0.5 * x + 0.5 * x).module().weight, net.weight)
        True
    """

    # The functions of `moduli.particles` that are methods too.
    FUNCTIONS = frozenset((
        "norm", "dot", "cosine", "distance", "lerp", "lerp_", "axpy_", "sign", "sqrt", "exp", "clamp", "where", "map",
        "zeros_like", "vector", "from_vector",
    ))  # fmt: skip

    def __init__(self, kernel: Any, module_id: int, params: OrderedDict[int, nn.Parameter]) -> None:
        self.kernel = kernel
        self.module_id = module_id
        self.params = params
        self.buffers: dict[str, Tensor] = {}
        # The kernel follows edits; a product belongs to the version at which it was made.
        self._version: Version = kernel.version
        self._blueprint: _Blueprint | None = None

    def __reduce__(self) -> Any:
        # A copy belongs to a copy of the particle, which is of the same species.
        self._check_current()
        return _restore, (type(self), self.kernel.root, self.module_id, list(self.params.items()), self.buffers)

    @property
    def vdata(self) -> Any:
        """The metadata of the product's version."""
        return self._version.data

    @property
    def pdata(self) -> Any:
        """The data of the particle from which it was made."""
        return self.kernel.data

    def module(self) -> Any:
        """Return the module with these parameters."""
        return product_to_module(self)

    def particle(self) -> Any:
        """Return the module with these parameters."""
        return product_to_module(self)

    def unary_operator(self, fn: Callable[[nn.Parameter, ParamConfig], nn.Parameter]) -> ParamProduct:
        """Apply a function to every parameter and its configuration, without recording gradients.

        Args:
            fn: Returns the parameter of the result. A plain tensor becomes a parameter that requires gradients if the
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
            fn: Called with both parameters and their configuration; returns the parameter of the result.

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
        return self._operate(fn, other)

    def _operate(self, fn: Callable[..., Any], *others: ParamProduct) -> ParamProduct:
        """Apply a function to every parameter, regardless of its configuration, and to the buffers that take part."""
        version, values = self._version, []
        names = dict(zip(version.params, (entry.name for entry in version.structure.layout), strict=True))
        with record_nothing():
            left = Operand(self._make_shell(), whole=True)
            rights = [pair(left, Operand(other._make_shell()))[1].values() for other in others]
            configs = [version.config(names[key]) for key in self._find_blueprint().keys]
            rows = zip(left.entries, left.values(), *rights, strict=True)
            for place, (entry, own, *row) in enumerate(rows):
                if place < len(configs):
                    values.append(_fit(entry.name, own, fn(own, *row, configs[place])))
                else:
                    # The function takes parameters, so buffers are wrapped.
                    operands = (nn.Parameter(each, requires_grad=False) for each in (own, *row))
                    value = _fit(entry.name, own, fn(*operands, ParamConfig())).detach()
                    values.append(value.clone() if value.data_ptr() == own.data_ptr() else value)
        return self._replace(values[: len(configs)], values[len(configs) :])

    def clone(self) -> ParamProduct:
        """Return a product with copies of the values."""
        return +self

    def rand(self, scale: float = 1.0, generator: torch.Generator | None = None) -> ParamProduct:
        """Return a product with values drawn uniformly from [0, scale)."""
        return particles.rand(self, scale, generator)

    def randn(self, scale: float = 1.0, generator: torch.Generator | None = None) -> ParamProduct:
        """Return a product with values drawn from a normal distribution of mean 0 and standard deviation `scale`."""
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
        """Apply a function of modules to modules around products, and return its result as a product."""
        named = kwargs or {}
        for arg in (*args, *named.values()):
            if isinstance(arg, nn.Module):
                raise StructureError(
                    f"cannot combine a product and a module ({type(arg).__name__}): write module.product() on the one side "
                    "or product.module() on the other"
                )
            if isinstance(arg, Operators) and not isinstance(arg, InPlaceOperators):
                self._check_version(arg)
        own = self._make_shell()

        def unwrap(arg: Any) -> Any:
            return own if arg is self else arg._make_shell() if isinstance(arg, ParamProduct) else arg

        result = fn(*map(unwrap, args), **{name: unwrap(arg) for name, arg in named.items()})
        if result is own:
            return self
        if not isinstance(result, nn.Module):
            return result
        parameters, buffers = take_result(result)
        names = [entry.name for entry in self._find_blueprint().structure.layout.buffers]
        by_name = dict(zip(names, buffers, strict=True))
        return self._replace(parameters, [by_name[name] for name in self.buffers])

    def _find_blueprint(self) -> _Blueprint:
        if self._blueprint is None:
            self._check_current()
            self._blueprint = _Blueprint.of(
                read(self.pdata.modules[self.module_id]), read(self.kernel.root), self._version
            )
        return self._blueprint

    def _make_shell(self, copies: bool = False) -> Any:
        """Return an unbuilt module around these parameters.

        Args:
            copies: Whether to give it its own buffers, which operands do not need.
        """
        self._check_current()
        blueprint = self._find_blueprint()
        tensors: list[Any] = [self.params[key] for key in blueprint.keys]
        buffers = list(blueprint.buffers)
        for place, entry in enumerate(blueprint.structure.layout.buffers):
            if entry.name in self.buffers:
                buffers[place] = self.buffers[entry.name]
            elif copies:
                buffers[place] = keep_buffer(entry.name, buffers[place], blueprint.policies[place])
        flags = tuple(param.requires_grad for param in tensors)
        pending = Pending(blueprint.structure, blueprint.states, tensors, flags, buffers, self._version, graph=True)
        return make_shell(pending)

    def _replace(self, parameters: list[Any], buffers: list[Tensor]) -> ParamProduct:
        """Return a product with other values, in the order of the layout."""
        blueprint = self._find_blueprint()
        by_key = dict(zip(blueprint.keys, parameters, strict=True))
        product = type(self)(self.kernel, self.module_id, OrderedDict((key, by_key[key]) for key in self.params))
        product.buffers = dict(zip(self.buffers, buffers, strict=True))
        product._version, product._blueprint = self._version, blueprint
        return product

    def _check_current(self) -> None:
        if self._version.next_version is not None:
            raise StructureError(
                f"this product was made at version {self._version.number} and its {type(self.kernel.root).__name__} has "
                "been edited since; make a new product with product()"
            )

    def _check_version(self, product: Any) -> None:
        if not isinstance(product, ParamProduct):
            raise StructureError(
                f"cannot combine a ParamProduct and a {type(product).__name__}; make a product of it first"
            )
        if product._version is not self._version:
            a, b = self._version, product._version
            related = "of one species" if a.species is b.species else "of different species"
            raise StructureError(
                f"cannot combine products of different versions: the left is at version {a.number}, the right at version "
                f"{b.number}, {related}. Products combine within one version; make new ones with product() after touch(), or "
                "combine the modules, which need only agree in structure"
            )


class _Blueprint(NamedTuple):
    """The structure, attributes and buffers of the module around the parameters of a product, when the product was made."""

    structure: Structure
    states: list[State]
    buffers: list[Tensor]
    policies: list[str]
    # The identifier of each parameter in the order of the layout.
    keys: list[int]

    @classmethod
    def of(cls, reading: Reading, whole: Reading, version: Version) -> _Blueprint:
        numbers = {id(param): key for param, key in zip(whole.parameters, version.params, strict=True)}
        policies = policies_of(reading.structure, [vars(each) for each in reading.modules]) if reading.buffers else []
        states = capture(reading.modules, reading)
        return cls(reading.structure, states, reading.buffers, policies, [numbers[id(p)] for p in reading.parameters])


def _fit(name: str, before: Tensor, value: Any) -> Any:
    """Return the result of a user's function for a parameter as a parameter of the same shape and dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"the operation gave a {type(value).__name__} for {name!r}; it must give a parameter")
    fitted = _arithmetic.fit(name, before.shape, before.dtype, value)
    if fitted is value and (isinstance(value, nn.Parameter) or is_composing()):
        return value
    return nn.Parameter(fitted, requires_grad=value.requires_grad if fitted is not value else before.requires_grad)


def module_to_product(module: NytoModuleBase) -> ParamProduct:
    """Return the product of a module.

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
    reading = bring_up(root)
    version = record_of(root).version or give_version(root, record_of(root), reading)
    own = reading if module is root else read(module)
    blueprint = _Blueprint.of(own, reading, version)
    params: Any = sorted(zip(blueprint.keys, own.parameters, strict=True), key=itemgetter(0))
    product = ParamProduct(kernel_of(root), 0 if module is root else module._module_id, OrderedDict(params))
    product._blueprint = blueprint
    acting = find_acting(blueprint.policies, blueprint.buffers)
    product.buffers = {blueprint.structure.layout.buffers[place].name: blueprint.buffers[place] for place in acting}
    return product


def _restore(
    kind: type[ParamProduct], root: Any, module_id: int, params: list[Any], buffers: dict[str, Tensor]
) -> ParamProduct:
    version_of(root)
    product = kind(kernel_of(root), module_id, OrderedDict(params))
    product.buffers = buffers
    return product


def product_to_module(product: ParamProduct) -> Any:
    """Return the module of a product.

    Raises:
        StructureError: If the particle from which the product was made has been edited since.

    Example:
        >>> from moduli.particles import adopt
        >>> product_to_module(adopt(nn.Linear(2, 1)).product()).weight.shape
        torch.Size([1, 2])
    """
    return product._make_shell(copies=True)


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
    left, right = pair(Operand(module, live=True, whole=True), Operand(product._make_shell()))
    with Guard(deferred=True, grad=False):
        for mine, theirs in zip(left.values(), right.values(), strict=True):
            if mine is not theirs:
                mine.copy_(theirs)


# -- functions -----------------------------------------------------------------------------------------------------------


def take_products(fn: F) -> F:
    """Decorate a function of particles so that it accepts products as well; `torch.compile` runs it untraced."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        first: Any = next((arg for arg in args if isinstance(arg, ParamProduct)), None)
        with record_nothing():
            return fn(*args, **kwargs) if first is None else first._run(fn, args, kwargs)

    keep_from_tracing(fn, call)
    return call  # type: ignore[return-value]


keep_from_tracing(
    module_to_product, product_to_module, product_assign_to_module, ParamProduct._operate, ParamProduct._run
)
