"""`ParticleModule`: a module around a particle, for code that wants a plain `nn.Module`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from torch import nn

from ...particles.base import record_of
from ...particles.errors import StructureError
from ...particles.module import ParamProduct, product_to_module
from .base import NytoModuleBase, ParticleKernelImp
from .kernel import Particle, Product
from .utils import copy_module

M = TypeVar("M", bound=NytoModuleBase)


class PMProduct(ParamProduct):
    """The light form of a `ParticleModule`: a `ParamProduct` that becomes one again.

    A subclass of `ParticleModule` gets products of its own by overriding `particle`.

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

    @classmethod
    def from_ParamProduct(cls, product: ParamProduct) -> Self:
        """Wrap a product."""
        copied = cls(product.kernel, product.module_id, product.params)
        copied.buffers, copied._version, copied._blueprint = product.buffers, product._version, product._blueprint
        return copied

    @property
    def product(self) -> ParamProduct:
        """The product of the module inside, with the same parameters."""
        inside = ParamProduct(self.kernel, self.module_id, self.params)
        inside.buffers, inside._version, inside._blueprint = self.buffers, self._version, self._blueprint
        return inside

    def particle(self) -> ParticleModule[Any]:
        """Return the `ParticleModule` with these parameters."""
        return ParticleModule(product_to_module(self))

    def module(self) -> ParticleModule[Any]:
        """Return the `ParticleModule` with these parameters."""
        return self.particle()


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
        return self._call(lambda module, _: module._particle_kernel)  # type: ignore[no-any-return]

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
        """Return the light form of this module."""
        return PMProduct.from_ParamProduct(self._call(lambda module, _: module.product()))

    def product_(self, product: PMProduct) -> Self:
        """Copy the values of a product into the parameters of the module inside."""
        self._call(lambda module, _: module.product_(product))
        return self

    def clone(self) -> Self:
        """Return a wrapper around a copy of the module inside."""
        return +self

    def rand(self) -> Self:
        """Return a wrapper around a module with values drawn uniformly from [0, 1)."""
        return self._rewrap(self._call(lambda module, _: module.rand()))  # type: ignore[no-any-return]

    def randn(self) -> Self:
        """Return a wrapper around a module with values drawn from the standard normal distribution."""
        return self._rewrap(self._call(lambda module, _: module.randn()))  # type: ignore[no-any-return]

    def clone_from(self, source: ParticleModule[Any]) -> Self:
        """Return a wrapper around a module of this species with the values of another wrapper's."""
        return self._rewrap(self._call(lambda module, _: module.clone_from(source.root_module)))  # type: ignore[no-any-return]

    def touch(self) -> Self:
        """Change the particle inside to the newest version of its species."""
        self._call(lambda module, _: module.touch())
        return self

    def _inside(self) -> NytoModuleBase:
        module: Any = self._modules["root_module"]
        # A look at its registries makes a module of a result.
        _ = module._parameters
        return module  # type: ignore[no-any-return]

    def _call(self, act: Callable[[Any, Any], Any], other: Any = None) -> Any:
        """Call a function of the module inside and of another operand, that of a wrapper for a wrapper."""
        if isinstance(other, Product) or (isinstance(other, nn.Module) and not isinstance(other, ParticleModule)):
            raise StructureError(
                f"cannot combine a ParticleModule and a {type(other).__name__}: wrap both in a ParticleModule (write "
                "ParticleModule(other)), or take wrapper.product() on the one side"
            )
        with GetNytoModule(self) as module:
            if not isinstance(other, ParticleModule):
                return act(module, other)
            with GetNytoModule(other) as inner:
                return act(module, inner)

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return self._rewrap(self._call(lambda module, _: module._unary(fn)))

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        return self._rewrap(self._call(lambda module, given: module._binary(fn, given, reflected), other))

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Self:
        done = self._call(lambda module, given: module._inplace(fn, given), other)
        return NotImplemented if done is NotImplemented else self

    def _rewrap(self, inside: Any) -> Any:
        """Return a wrapper like this one, with its mode, hooks and attributes, around another module."""
        if inside is NotImplemented:
            return NotImplemented
        twin: Any = copy_module(self)
        root = self._modules["root_module"]
        for registry in ("_modules", "_parameters", "_buffers"):
            for name, each in twin.__dict__[registry].items():
                twin.__dict__[registry][name] = inside if each is root else copy.deepcopy(each)
        twin.clear_kernel_ref()
        return twin

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
