"""`ParticleMethods`: the operators and public methods of particles."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Self

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from moduli import particles
from moduli._torch import keep_from_tracing
from moduli.kernels import find_temporaries
from moduli.layout import refuse_pattern

from . import _arithmetic
from ._anatomy import read_slots
from ._config import CONFIG_KEY, is_selected
from ._edit_list import HistoryAttribute
from ._history import begin_here, independent
from ._operators import InPlaceOperators, Operators
from ._own_values import follow_by
from ._particle_edits import EditingMethods
from ._product import ParamProduct, module_to_product, product_assign_to_module
from ._record import build, record_of, refuse_pinned, refuse_wrapped
from ._skeleton import PENDING, RECORD, SLOTS
from ._species import adopt_children, bring_up, identify, settle_journal, touch, version_of
from .mtype import ParamConfig

_MISSING = object()


class ParticleMethods(EditingMethods, InPlaceOperators):
    """The methods of a module that is a particle. `NytoModule` and adopted modules have them."""

    history = HistoryAttribute()

    # -- shells ------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if PENDING in self.__dict__:
            # An unbuilt result has no registries.
            build(self)
            return getattr(self, name)
        state = self.__dict__
        # Another thread may have built the module after the lookup of the name failed.
        return state[name] if name in state else super().__getattr__(name)

    def __dir__(self) -> list[str]:
        build(self)
        return list(super().__dir__())  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        build(self)
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        slots = read_slots(self)
        if slots:
            state[SLOTS] = slots
        settle_journal(self)
        # The record refers to the original's modules, so a copy gets a new one.
        state[RECORD] = copy.deepcopy(record_of(self))
        return state

    def __del__(self, settle: Callable[[nn.Module], None] = settle_journal) -> None:
        # Make the version of its additions, which relatives follow. `settle` is a default argument because globals are cleared
        # first when the interpreter ends.
        settle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.pop(SLOTS, {}).items():
            object.__setattr__(self, name, value)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        adopt_children(self)
        record = record_of(self)
        begin_here(self, record)
        if record.version is not None:
            record.version.species.members.add(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        build(self)
        refuse_pinned(self, fn)
        record_of(self).watch = None  # it refers to parameters that may be replaced
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata, version = getattr(destination, "_metadata", None), record_of(self).version
        if metadata is not None and version is not None and version.species.configured and self.is_root:
            configs = {name: dict(vars(each)) for name, each in version_of(self).list_configured().items()}
            if configs:
                metadata.setdefault(prefix[:-1], {})[CONFIG_KEY] = configs

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        record_of(self).watch = None  # it refers to parameters that may be replaced
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if CONFIG_KEY in local_metadata:
            # Parameters with the default configuration get the saved one of their name.
            version = version_of(self)
            for entry in version.structure.layout:
                saved = local_metadata[CONFIG_KEY].get(entry.name)
                if saved is not None and version.config(entry.name) == ParamConfig():
                    vars(version.config(entry.name)).update(saved)
                    version.species.configured = True

    # -- public methods ----------------------------------------------------------------------------------------------

    def product(self) -> ParamProduct:
        """Return the product of this module: its parameters without the modules, for user-written operations.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> list(net.product().params)
            [0, 1]
        """
        return module_to_product(self)

    def product_(self, product: ParamProduct) -> Self:
        """Copy the values of a product into the parameters of this module, which stay the same objects.

        Args:
            product: A product of the same version.

        Raises:
            StructureError: If the product is of another version.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> net.product_(0 * net.product() + 1) is net, net.bias.item()
            (True, 1.0)
        """
        product_assign_to_module(product, self)
        return self

    def clone(self) -> Self:
        """Return a particle of the same species with copies of the values.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> twin = net.clone()
            >>> twin.weight is net.weight, torch.equal(twin.weight, net.weight)
            (False, True)
        """
        return +self

    def rand(self) -> Self:
        """Return a particle of the same species with values drawn uniformly from [0, 1).

        Example:
            >>> from moduli.particles import adopt
            >>> bool((adopt(nn.Linear(2, 1)).rand().weight >= 0).all())
            True
        """
        return particles.rand(self)

    def randn(self) -> Self:
        """Return a particle of the same species with values drawn from the standard normal distribution.

        Example:
            >>> from moduli.particles import adopt
            >>> adopt(nn.Linear(2, 1)).randn().weight.shape
            torch.Size([1, 2])
        """
        return particles.randn(self)

    def clone_from(self, source: nn.Module) -> Self:
        """Return a particle of this species with the values of another module, of any species.

        Args:
            source: A module with the same names and shapes.

        Example:
            >>> from moduli.particles import adopt
            >>> a, b = adopt(nn.Linear(2, 1)), nn.Linear(2, 1)
            >>> c = a.clone_from(b)
            >>> c._version_kernel is a._version_kernel, torch.equal(c.weight, b.weight)
            (True, True)
        """
        particle: Self = _arithmetic.rebuild(self, copies=True)
        particle.load_state_dict(source.state_dict())
        return particle

    def detach(self) -> Self:
        """Return a particle of a new species with the same parameter objects. Gradients are not detached.

        Example:
            >>> from moduli.particles import adopt
            >>> a = adopt(nn.Linear(2, 1))
            >>> b = a.detach()
            >>> b.weight is a.weight, b._version_kernel is a._version_kernel
            (True, False)
        """
        self._open()
        bring_up(self)
        particle: Self = independent(_arithmetic.rebuild(self))
        return particle

    def touch(self, on_follow: str | None = None) -> Self:
        """Bring the particle that this module is in to the newest version of its species.

        It receives copies of the tensors that edits assigned. If an edit only changed sizes, it keeps its own values in the entries
        that the old and the new tensors have in common.

        Args:
            on_follow: `"copy"` to take all values that edits assigned, `"keep"` for the rule above; by default, the
                attribute `on_follow` of the innermost module around a tensor, and `"keep"` if there is none.

        Raises:
            ValueError: If `on_follow` is none of these.

        Example:
            >>> from moduli.particles import NytoModule
            >>> a = NytoModule()
            >>> b = a.clone()
            >>> a.w = nn.Parameter(torch.zeros(2))
            >>> hasattr(b, "w"), hasattr(b.touch(), "w")
            (False, True)
        """
        root = self._open()
        if on_follow is None:
            touch(root)
        else:
            with follow_by(on_follow):
                touch(root)
        if root is not self:
            bring_up(self)
        return self

    def set_param_config(
        self, operational: bool | None = None, clone: bool | None = None, name: str | None = None
    ) -> None:
        """Configure how operations treat parameters, in all particles of the species.

        Args:
            operational: Whether they take part in operations; None for no change.
            clone: Whether those that take no part are cloned into the result, rather than shared; None for no change.
            name: An attribute of this module, a dotted name, or a pattern such as `"encoder.*"`; all parameters by default.

        Raises:
            ValueError: If no parameter has the name.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> net.set_param_config(operational=False, name="bias")
            >>> torch.equal((2 * net).bias, net.bias), torch.equal((2 * net).weight, 2 * net.weight)
            (True, True)
        """
        options = {"operational": operational, "clone": clone}
        changes = {key: value for key, value in options.items() if value is not None}
        self.apply_param_config(lambda _, config: config.__dict__.update(changes), name)
        # The rule also configures parameters that later edits add under the name.
        root = self._particle_root
        prefix = next(path for path, each in root.named_modules() if each is self)
        pattern = ".".join(part for part in (prefix, name) if part) or "*"
        version_of(root).species.rules.append((pattern, changes))

    def apply_param_config(self, fn: Callable[[int, ParamConfig], None], name: str | None = None) -> None:
        """Call a function on the configurations of parameters, which it may change and extend.

        Args:
            fn: Called with the identifier of each parameter and its configuration.
            name: An attribute of this module, a dotted name, or a pattern such as `"encoder.*"`; all parameters by default.

        Raises:
            ValueError: If no parameter has the name.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> net.apply_param_config(lambda key, config: setattr(config, "rate", 0.1), "weight")
            >>> net._version_kernel.data.config[0].rate
            0.1
        """
        root = self._open()
        bring_up(root)
        version, reading = identify(root)
        named = list(self.named_parameters(remove_duplicate=False))
        chosen = {id(param) for path, param in named if is_selected(path, name)}
        if not chosen and name is not None:
            refuse_pattern(name, [path for path, _ in named], "parameters", type(self).__name__)
        version.species.configured = True
        rows = zip(version.params, version.structure.layout, reading.parameters, strict=True)
        for pid, entry, _ in sorted((row for row in rows if id(row[2]) in chosen), key=itemgetter(0)):
            fn(pid, version.config(entry.name))

    def get_param_id(self, target_param: nn.Parameter) -> int:
        """Return the identifier of a parameter of this particle.

        Raises:
            ValueError: If the particle does not have it.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> net.get_param_id(net.bias)
            1
        """
        version, reading = identify(self._open())
        for pid, param in zip(version.params, reading.parameters, strict=True):
            if param is target_param:
                return pid
        raise ValueError(
            f"this parameter of shape {tuple(target_param.shape)} is not one of this {type(self).__name__}"
        )

    def _open(self) -> nn.Module:
        """Return the root of the particle, or raise StructureError if a `ParticleModule` wraps it."""
        record = self.__dict__.get(RECORD)
        if record is not None and record.root is None and not record.wrapped:
            return self
        build(self)
        root = self._particle_root
        refuse_wrapped(self, root)
        return root

    # -- operators ---------------------------------------------------------------------------------------------------

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        if _arithmetic.may_overwrite(self) or _arithmetic.may_overwrite(other):
            return _arithmetic.binary(fn, self, other, reflected, find_temporaries(self, other, reflected))
        return _arithmetic.binary(fn, self, other, reflected)

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return _arithmetic.unary(fn, self)

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Self:
        return self if _arithmetic.change(fn, self, other) else NotImplemented


# Some modules define operators, such as `nn.Sequential.__add__`, which appends. Those of particles must take precedence.
for _source in (Operators, InPlaceOperators):
    for _name, _function in vars(_source).items():
        if hasattr(operator, _name.replace("__r", "__")) and callable(_function):
            setattr(ParticleMethods, _name, _function)


# `torch.compile` runs the functions that make, build and edit particles untraced, and traces their forward passes.
keep_from_tracing(
    EditingMethods._edit,
    *(vars(ParticleMethods)[name] for name in ("_binary", "_unary", "_inplace", "get_param_id")),
    *(vars(ParticleMethods)[name] for name in ("product", "product_", "clone_from", "detach", "touch")),
    *(vars(ParticleMethods)[name] for name in ("set_param_config", "apply_param_config")),
)
