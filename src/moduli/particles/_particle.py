"""What makes a module a particle: the edits, the operators, and the methods of the seed's interface."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, Self

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from moduli import particles
from moduli._torch import keep_from_tracing
from moduli.kernels import find_temporaries
from moduli.labels import Tensor as LabelledTensor
from moduli.layout import REMOVED, list_registered, refuse_pattern
from moduli.nn import VirtualTensor, updates_value

from . import _arithmetic
from ._anatomy import read_slots
from ._config import CONFIG_KEY, is_selected
from ._edit_list import HistoryAttribute
from ._editing import edit
from ._history import begin_here, independent
from ._operators import InPlaceOperators, Operators
from ._own_values import follow_by
from ._product import ParamProduct, module_to_product, product_assign_to_module
from ._record import build, record_of, refuse_pinned, refuse_wrapped
from ._skeleton import PENDING, RECORD, SLOTS
from ._species import adopt_children, bring_up, identify, settle_journal, touch, version_of
from .base import NytoModuleBase
from .mtype import ParamConfig

_MISSING = object()


class ParticleMethods(NytoModuleBase, InPlaceOperators):
    """The methods of a module that is a particle. `NytoModule` and adopted modules have them."""

    history = HistoryAttribute()

    # -- shells ------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if PENDING in self.__dict__:
            # In a result that was not looked into yet, the registries are missing.
            build(self)
            return getattr(self, name)
        state = self.__dict__
        # Another thread may have built it after the name was looked for, before this.
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
        # A copy of the module must not take the original's memory for its own.
        state[RECORD] = copy.deepcopy(record_of(self))
        return state

    def __del__(self, settle: Callable[[nn.Module], None] = settle_journal) -> None:
        # Relatives follow the edits of a particle that is gone. The name is gone first when the interpreter ends.
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
            found = {name: dict(vars(each)) for name, each in version_of(self).list_configured().items()}
            if found:
                metadata.setdefault(prefix[:-1], {})[CONFIG_KEY] = found

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        record_of(self).watch = None  # it refers to parameters that may be replaced
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if CONFIG_KEY in local_metadata:
            # Parameters without a configuration of their own get the one that is told for their names.
            version = version_of(self)
            for entry in version.structure.layout:
                told = local_metadata[CONFIG_KEY].get(entry.name)
                if told is not None and version.config(entry.name) == ParamConfig():
                    vars(version.config(entry.name)).update(told)
                    version.species.configured = True

    # -- edits -------------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if PENDING in self.__dict__:
            build(self)
        state = self.__dict__
        if "_parameters" not in state or not self._structural(name, value):
            super().__setattr__(name, value)
            return
        act = partial(super().__setattr__, name, value)
        if isinstance(state.get(name), VirtualTensor):
            self._replace_virtual(name, act, value)
        else:
            self._edit(name, act, value)

    def __delattr__(self, name: str) -> None:
        if PENDING in self.__dict__:
            build(self)
        state = self.__dict__
        held = any(name in state.get(key, ()) for key in ("_parameters", "_modules", "_buffers", "_labelled"))
        if not held:
            remove = partial(super().__delattr__, name)
            if isinstance(state.get(name), VirtualTensor):
                self._replace_virtual(name, remove)
            else:
                remove()
            return
        self._edit(name, lambda: super(ParticleMethods, self).__delattr__(name))
        record_of(self).order.pop(name, None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, or an empty place for one; siblings get a copy when they are touched.

        Args:
            name: The name.
            param: The parameter, or None.
        """
        self._edit(name, lambda: super(ParticleMethods, self).register_parameter(name, param), param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child, or an empty place for one; siblings get a copy when they are touched.

        Args:
            name: The name.
            module: The child, or None.
        """
        self._edit(name, lambda: super(ParticleMethods, self).add_module(name, module), module)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer; siblings get a copy when they are touched.

        Args:
            name: The name.
            tensor: The buffer, or None.
            persistent: Whether `state_dict()` holds it.
        """
        self._edit(name, lambda: super(ParticleMethods, self).register_buffer(name, tensor, persistent))

    def _edit_together(self, name: str, act: Callable[[], None]) -> None:
        """Make one edit of all that a function does to this module."""
        self._edit(name, act)

    def _replace_virtual(self, name: str, act: Callable[[], None], value: Any = None) -> None:
        """Replace or delete a virtual tensor, with the buffer that it added: one edit, which relatives follow."""
        reference = self.__dict__[name].attributes.ref
        stays = isinstance(value, VirtualTensor) and value.attributes.ref == reference

        def replace() -> None:
            act()
            if reference in self._buffers and not stays:
                nn.Module.__delattr__(self, reference)

        self._edit(name, replace)

    def _structural(self, name: str, value: Any) -> bool:
        """Whether assigning a value to a name edits the structure, rather than setting a value."""
        if isinstance(value, LabelledTensor):
            return not updates_value(self, name, value)
        if isinstance(value, nn.Parameter | nn.Module | nn.Buffer | VirtualTensor):
            return True
        state = self.__dict__
        if name in state["_parameters"] or name in state["_modules"] or name in state.get("_labelled", ()):
            return True
        held = state["_buffers"].get(name, _MISSING)
        if held is _MISSING:
            return isinstance(state.get(name), VirtualTensor)
        return (held is None) != (value is None)

    def _edit(self, name: str, act: Callable[[], None], value: Any = None) -> None:
        build(self)
        if "_parameters" not in self.__dict__ or record_of(self).busy:
            act()
            return
        record = record_of(self)
        # A module that was never part of an operation has no relatives that could follow its edits.
        root = self if record.root is None else self._particle_root
        before = _list_held(self, name)
        record.busy = True
        try:
            if record_of(root).version is None:
                act()
                record.order.setdefault(name)
                child = self._modules.get(name)
                if child is not None:
                    adopt_children(root, child)
            else:
                edit(self, root, name, act, value)
        finally:
            record.busy = False
        if before:
            REMOVED.mark(before, root)  # for optimizers that were given them by themselves
        elif REMOVED:  # what comes back is no longer removed; the other parameters need not be looked at
            REMOVED.discard(param for _, param in _list_held(self, name))

    # -- the interface -----------------------------------------------------------------------------------------------

    def product(self) -> ParamProduct:
        """The light form of this module, for chains of operations.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> list(net.product().params)
            [0, 1]
        """
        return module_to_product(self)

    def product_(self, product: ParamProduct) -> Self:
        """Copy the values of a product into the parameters of this module, which stay the objects they are.

        Args:
            product: A product of the same version.

        Raises:
            StructureError: If it is of another version.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> net.product_(0 * net.product() + 1) is net, net.bias.item()
            (True, 1.0)
        """
        product_assign_to_module(product, self)
        return self

    def clone(self) -> Self:
        """A particle of the same species with copies of the values.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> twin = net.clone()
            >>> twin.weight is net.weight, torch.equal(twin.weight, net.weight)
            (False, True)
        """
        return +self

    def rand(self) -> Self:
        """A particle of the same species with values drawn uniformly from [0, 1).

        Example:
            >>> from moduli.particles import adopt
            >>> bool((adopt(nn.Linear(2, 1)).rand().weight >= 0).all())
            True
        """
        return particles.rand(self)

    def randn(self) -> Self:
        """A particle of the same species with values drawn from the standard normal distribution.

        Example:
            >>> from moduli.particles import adopt
            >>> adopt(nn.Linear(2, 1)).randn().weight.shape
            torch.Size([1, 2])
        """
        return particles.randn(self)

    def clone_from(self, source: nn.Module) -> Self:
        """A particle of this species with the values of another module, of whatever species.

        Args:
            source: A module with the same names and shapes.

        Example:
            >>> from moduli.particles import adopt
            >>> a, b = adopt(nn.Linear(2, 1)), nn.Linear(2, 1)
            >>> c = a.clone_from(b)
            >>> c._version_kernel is a._version_kernel, torch.equal(c.weight, b.weight)
            (True, True)
        """
        made: Self = _arithmetic.rebuild(self, copies=True)
        made.load_state_dict(source.state_dict())
        return made

    def detach(self) -> Self:
        """A particle of a new species around the very parameters of this one. Gradients are not concerned.

        Example:
            >>> from moduli.particles import adopt
            >>> a = adopt(nn.Linear(2, 1))
            >>> b = a.detach()
            >>> b.weight is a.weight, b._version_kernel is a._version_kernel
            (True, False)
        """
        self._open()
        bring_up(self)
        made: Self = independent(_arithmetic.rebuild(self))
        return made

    def touch(self, on_follow: str | None = None) -> Self:
        """Bring the particle that this module is in to the newest version of its species.

        It receives copies of what edits assigned. Where an edit only changed sizes, it keeps its own values in what the old and
        the new tensors have in common.

        Args:
            on_follow: `"copy"` to take all values that edits assigned, `"keep"` for the rule above; by default, what the
                attribute `on_follow` of the innermost module around a tensor says, and `"keep"` if there is none.

        Raises:
            ValueError: If there is no such way to follow.

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
        """Say how operations treat parameters, in all particles of the species.

        Args:
            operational: Whether they take part in operations; None leaves it as it is.
            clone: Whether those that do not are cloned into the result, rather than shared; None leaves it as it is.
            name: Which: an attribute of this module, a dotted name, or a pattern such as `"encoder.*"`; all by default.

        Raises:
            ValueError: If no parameter has the name.

        Example:
            >>> from moduli.particles import adopt
            >>> net = adopt(nn.Linear(2, 1))
            >>> net.set_param_config(operational=False, name="bias")
            >>> torch.equal((2 * net).bias, net.bias), torch.equal((2 * net).weight, 2 * net.weight)
            (True, True)
        """
        given = {"operational": operational, "clone": clone}
        changes = {key: value for key, value in given.items() if value is not None}
        self.apply_param_config(lambda _, config: config.__dict__.update(changes), name)
        # What will have the name after an edit is configured alike.
        root = self._particle_root
        prefix = next(path for path, each in root.named_modules() if each is self)
        pattern = ".".join(part for part in (prefix, name) if part) or "*"
        version_of(root).species.rules.append((pattern, changes))

    def apply_param_config(self, fn: Callable[[int, ParamConfig], None], name: str | None = None) -> None:
        """Call a function on the configurations of parameters, which it may change and extend.

        Args:
            fn: Called with the identifier of each parameter and its configuration.
            name: Which: an attribute of this module, a dotted name, or a pattern such as `"encoder.*"`; all by default.

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
        """The identifier of a parameter of this particle.

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
        """Return the module at the top of the particle, or raise StructureError if a `ParticleModule` wraps it."""
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


# Some modules have operators of their own: to add an nn.Sequential is to append it. As particles they are values.
for _source in (Operators, InPlaceOperators):
    for _name, _function in vars(_source).items():
        if hasattr(operator, _name.replace("__r", "__")) and callable(_function):
            setattr(ParticleMethods, _name, _function)


# `torch.compile` runs as it is what makes, builds and edits particles, and traces what is done with them.
keep_from_tracing(
    *(vars(ParticleMethods)[name] for name in ("_binary", "_unary", "_inplace", "_edit", "get_param_id")),
    *(vars(ParticleMethods)[name] for name in ("product", "product_", "clone_from", "detach", "touch")),
    *(vars(ParticleMethods)[name] for name in ("set_param_config", "apply_param_config")),
)


def _list_held(module: nn.Module, name: str) -> list[tuple[str, Tensor]]:
    """Return the parameters that an attribute of a module holds, by name."""
    labelled = module.__dict__.get("_labelled", {})
    param, child = module._parameters.get(labelled[name][0] if name in labelled else name), module._modules.get(name)
    inner = () if child is None else list_registered(child)
    return [(f"{name}.{each}", held) for each, held in inner] if param is None else [(name, param)]
