"""`ParticleModule`: a module around a particle, for code that wants a plain `nn.Module`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import torch
from torch import nn

from ...particles.base import NytoModuleBase, ParticleKernelImp, record_of
from ...particles.errors import StructureError
from ...particles.kernel import Particle, Product
from ...particles.module import ParamProduct, module_to_product, product_assign_to_module
from ...particles.mtype import ModuleID, ParamConfig, ParamDict
from .utils import copy_module

__all__ = ["ParticleModule", "PMProduct", "GetNytoModule"]

M = TypeVar("M", bound=NytoModuleBase)


class PMProduct(Product["ParticleModule[Any]"]):
    """The light form of a `ParticleModule`: a `ParamProduct` that becomes one again.

    A subclass of `ParticleModule` gets products of its own by overriding `from_ParamProduct` and `particle`.

    Attributes:
        product: The product of the module inside.

    Example:
        >>> import torch
        >>> from moduli.compat.nytorch import ParticleModule
        >>> from moduli.particles import adopt
        >>> wrapper = ParticleModule(adopt(nn.Linear(2, 1)))
        >>> torch.equal((2 * wrapper.product()).module().root_module.weight, 2 * wrapper.root_module.weight)
        True
    """

    product: ParamProduct

    def __init__(self, kernel: ParticleKernelImp, module_id: ModuleID, params: ParamDict) -> None:
        self.product = ParamProduct(kernel, module_id, params)

    @classmethod
    def from_ParamProduct(cls, product: ParamProduct) -> Self:
        """Wrap a product."""
        made = cls(product.kernel, product.module_id, product.params)
        made.product = product
        return made

    def particle(self) -> ParticleModule[Any]:
        """The `ParticleModule` with these parameters."""
        return ParticleModule(self.product.module())

    def module(self) -> ParticleModule[Any]:
        """The `ParticleModule` with these parameters."""
        return self.particle()

    def unary_operator(self, fn: Callable[[nn.Parameter, ParamConfig], nn.Parameter]) -> Self:
        """Apply a function to every parameter and its configuration."""
        return self.from_ParamProduct(self.product.unary_operator(fn))

    def binary_operator(
        self, other: PMProduct, fn: Callable[[nn.Parameter, nn.Parameter, ParamConfig], nn.Parameter]
    ) -> Self:
        """Apply a function to the parameters of two products of one version, pair by pair.

        Raises:
            StructureError: If the products are of different versions.
        """
        return self.from_ParamProduct(self.product.binary_operator(other.product, fn))

    def clone(self) -> Self:
        """A product with copies of the values."""
        return self.from_ParamProduct(self.product.clone())

    def rand(self, scale: float = 1.0, generator: torch.Generator | None = None) -> Self:
        """A product with values drawn uniformly from [0, scale)."""
        return self.from_ParamProduct(self.product.rand(scale, generator))

    def randn(self, scale: float = 1.0, generator: torch.Generator | None = None) -> Self:
        """A product with values drawn from a normal distribution of mean 0 and standard deviation `scale`."""
        return self.from_ParamProduct(self.product.randn(scale, generator))

    __getattr__ = ParamProduct.__getattr__

    def _run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        made = self.product._run(fn, args, kwargs)
        if made is self.product:
            return self
        return self.from_ParamProduct(made) if isinstance(made, ParamProduct) else made

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        made = self.product._binary(fn, other, reflected)
        return NotImplemented if made is NotImplemented else self.from_ParamProduct(made)

    def _unary(self, fn: Callable[[Any], Any]) -> Self:
        return self.from_ParamProduct(self.product._unary(fn))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.product.params)} parameters at version {self.product.vdata.number})"


class ParticleModule(nn.Module, Particle[PMProduct], Generic[M]):
    """A module around the root of a particle.

    While it is wrapped, the module inside has no kernel: it cannot be combined or touched by itself. Operations on
    the wrapper bring it to the newest version of its species first.

    Attributes:
        root_module: The module inside.
        particle_kernel: Its kernel.

    Example:
        >>> import torch
        >>> from moduli.compat.nytorch import ParticleModule
        >>> from moduli.particles import adopt
        >>> wrapper = ParticleModule(adopt(nn.Linear(2, 1)))
        >>> torch.equal((wrapper + wrapper)(torch.ones(2)), 2 * wrapper(torch.ones(2)))
        True
    """

    root_module: M

    def __init__(self, root_module: M) -> None:
        super().__init__()
        if not isinstance(root_module, NytoModuleBase):
            raise StructureError(
                f"a ParticleModule wraps a particle, not a {type(root_module).__name__}; write moduli.adopt(module) first"
            )
        if not root_module.is_root:
            raise StructureError(
                f"this {type(root_module).__name__} is inside another particle; wrap the root, or a detach() of it"
            )
        self.root_module = root_module
        self.clear_kernel_ref()

    @property
    def particle_kernel(self) -> ParticleKernelImp:
        """The kernel of the particle inside."""
        with GetNytoModule(self) as module:
            kernel: Any = module._particle_kernel
        return kernel  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module inside."""
        return self.root_module(*args, **kwargs)

    def clear_kernel_ref(self) -> None:
        """Let the module inside have no kernel."""
        record_of(self._inside()).wrapped = True

    def restore_kernel_ref(self) -> None:
        """Let the module inside have its kernel again, so that it can be touched and combined by itself."""
        record_of(self._inside()).wrapped = False

    def product(self) -> PMProduct:
        """The light form of this module."""
        with GetNytoModule(self) as module:
            return PMProduct.from_ParamProduct(module_to_product(module))

    def product_(self, product: PMProduct) -> Self:
        """Copy the values of a product into the parameters of the module inside."""
        with GetNytoModule(self) as module:
            product_assign_to_module(product.product, module)
        return self

    def clone(self) -> Self:
        """A wrapper around a copy of the module inside."""
        return +self  # type: ignore[no-any-return]

    def rand(self) -> Self:
        """A wrapper around a module with values drawn uniformly from [0, 1)."""
        return self._map(lambda module: module.rand())

    def randn(self) -> Self:
        """A wrapper around a module with values drawn from the standard normal distribution."""
        return self._map(lambda module: module.randn())

    def clone_from(self, source: ParticleModule[Any]) -> Self:
        """A wrapper around a module of this species with the values of another wrapper's."""
        return self._map(lambda module: module.clone_from(source.root_module))

    def touch(self) -> Self:
        """Bring the particle inside to the newest version of its species."""
        with GetNytoModule(self) as module:
            module.touch()  # type: ignore[operator]
        return self

    def _inside(self) -> NytoModuleBase:
        module: Any = self._modules["root_module"]
        # A look at its registries makes a module of a result.
        _ = module._parameters
        return module  # type: ignore[no-any-return]

    def _map(self, fn: Callable[[Any], Any]) -> Self:
        """A wrapper like this one around another module."""
        with GetNytoModule(self) as module:
            made = fn(module)
        if made is NotImplemented:
            return NotImplemented  # type: ignore[no-any-return]
        wrapper = self._rewrap(made)
        wrapper.clear_kernel_ref()
        return wrapper

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return self._map(lambda module: module._unary(fn))

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        if isinstance(other, ParticleModule):
            with GetNytoModule(other) as inner:
                return self._map(lambda module: module._binary(fn, inner, reflected))
        self._check_kind(other)
        return self._map(lambda module: module._binary(fn, other, reflected))

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Self:
        self._check_kind(other)
        inside: Any
        with GetNytoModule(self) as inside:
            if isinstance(other, ParticleModule):
                with GetNytoModule(other) as inner:
                    done = inside._inplace(fn, inner)
            else:
                done = inside._inplace(fn, other)
        return NotImplemented if done is NotImplemented else self

    def _check_kind(self, other: Any) -> None:
        if isinstance(other, Product) or (isinstance(other, nn.Module) and not isinstance(other, ParticleModule)):
            raise StructureError(
                f"cannot combine a ParticleModule and a {type(other).__name__}: write ParticleModule(other), or "
                "wrapper.product() on the one side"
            )

    def _rewrap(self, inside: nn.Module) -> Self:
        """A wrapper like this one, with its mode, hooks and attributes, around another module."""
        made: Any = copy_module(self)
        held = self._modules["root_module"]
        for registry in ("_modules", "_parameters", "_buffers"):
            for name, each in made.__dict__[registry].items():
                made.__dict__[registry][name] = inside if each is held else copy.deepcopy(each)
        return made  # type: ignore[no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.clear_kernel_ref()


class GetNytoModule(Generic[M]):
    """Open a `ParticleModule` for edits: inside the block the module in it has its kernel.

    Example:
        >>> import torch
        >>> from moduli.compat.nytorch import GetNytoModule, NytoModule, ParticleModule
        >>> wrapper = ParticleModule(NytoModule())
        >>> twin = wrapper.clone()
        >>> with GetNytoModule(wrapper) as module:
        ...     module.embed = nn.Embedding(30, 8)
        >>> with GetNytoModule(twin) as module:
        ...     _ = module.touch()
        >>> twin.root_module.embed.weight.shape
        torch.Size([30, 8])
    """

    def __init__(self, particle_module: ParticleModule[M]) -> None:
        if not isinstance(particle_module, ParticleModule):
            raise StructureError(f"GetNytoModule opens a ParticleModule, not a {type(particle_module).__name__}")
        self._module = particle_module
        self._before: list[bool] = []

    def __enter__(self) -> M:
        # Blocks may be nested: the outermost one closes the module.
        self._before.append(record_of(self._module._inside()).wrapped)
        self._module.restore_kernel_ref()
        return self._module.root_module

    def __exit__(self, *exception: object) -> None:
        if self._before.pop():
            self._module.clear_kernel_ref()
