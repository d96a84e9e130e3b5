"""Module: a `torch.nn.Module` that owns labelled tensors."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self, TypeVar

import torch
from torch import nn

from moduli.device import Device, DeviceBounded, DeviceLike
from moduli.labels import Axes, Tensor

from . import _ownership as ownership
from ._frozen import FrozenDict
from ._functional import Functional, describe_unregistered, install
from ._load import find_tied_entries, load_all_or_nothing, note_unlabelled, reunite
from ._state import align_state, encode
from ._virtual_tensor import VirtualTensor, replicate

ModuleType = TypeVar("ModuleType", bound=type["Module"])
"""A subclass of `Module`, so that a class decorator is known to return the class it was given."""

_NOTHING: Final[dict[str, Any]] = {}
_LABELS: Final = "labels"
_CPU: Final = Device("cpu")
_new: Final = object.__new__


class Module(Functional, nn.Module, DeviceBounded):
    """A torch module that owns labelled tensors, derives virtual ones, and dispatches calls on the type of the argument.

    Assigning a labelled `Tensor` to an attribute copies it into the module: as a parameter with the tensor's
    `requires_grad`, or as a buffer where `nograd_tensors` declares the name. Reading the attribute gives a labelled
    view of the registered storage at that moment, so it reflects conversions, loading, function transforms, optimizer steps
    and parametrizations. `export` gives independent copies.

    Everything a torch module does works as in torch. Labels are saved in `state_dict()._metadata`; loading puts
    reordered labels in order and raises for other ones. A call runs the action registered for the type of its
    first argument, if there is one, and otherwise `forward`.

    Example:
        >>> import torch
        >>> from moduli.labels import Space, Tensor
        >>> from moduli.nn import Module
        >>> class Gain(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         channel = Space(["r", "g"], name="channel")
        ...         self.gain = Tensor(torch.ones(2, requires_grad=True), (channel,))
        ...     def forward(self, x):
        ...         return x * self.gain
        >>> m = Gain()
        >>> [name for name, _ in m.named_parameters()]
        ['tensor:gain']
        >>> _ = m.double()
        >>> m.gain.names, m.gain.dtype, m.gain.data is m.get_parameter("gain")
        (('channel',), torch.float64, True)
    """

    __nograd_tensors__: frozenset[str] = frozenset()
    """Names of attributes whose tensors are registered as buffers; filled by `nograd_tensors`."""

    # Declared names that were assigned, or whose absence was warned about.
    _assigned_nograd: set[str] = set()

    _labelled: dict[str, tuple[str, Axes]]
    _device: Device

    def __init__(self) -> None:
        nn.Module.__init__(self)
        # Public name -> (registered name, axes). The tensors themselves are only in torch's own registries.
        self.__dict__.update(_labelled={}, _device=_CPU)

    __call__ = nn.Module.__call__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result of a call for which no action is registered; subclasses override it.

        Raises:
            NotImplementedError: Always, unless a subclass defines it.
        """
        raise NotImplementedError(
            describe_unregistered(type(self), type(args[0]) if args else type(None))
            + f", or define {type(self).__name__}.forward"
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # With several bases, attribute lookup would give the names of the first one only.
        names = [base.__dict__.get("__nograd_tensors__", frozenset()) for base in cls.__mro__]
        cls.__nograd_tensors__ = frozenset().union(*names)
        cls._assigned_nograd = set()
        install(cls)

    # -- attributes --------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        record = state.get("_labelled", _NOTHING).get(name)
        if record is not None:
            data = state.get("_parameters", _NOTHING).get(record[0])
            if data is not None and "_models" not in state:
                tensor = _new(Tensor)  # `wrap` without the call
                tensor._data = data
                tensor._axes = record[1]
                return tensor
        elif name in state.get("_modules", ()):
            return state["_modules"][name]
        return self._read_other(name)

    def _read_other(self, name: str) -> Any:
        """Return an attribute that is no labelled parameter, or one of a user's class."""
        record = self.__dict__.get("_labelled", _NOTHING).get(name)
        return nn.Module.__getattr__(self, name) if record is None else ownership.read(self, name, *record)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            ownership.own(self, name, value)
        elif isinstance(value, (nn.Module, nn.Parameter)):
            ownership.register(self, name, value)
        else:
            if isinstance(value, DeviceBounded):
                ownership.check_initialised(self, name)
                value = value.to_device(self.device)
            elif isinstance(value, VirtualTensor) and (value.owner is not self or value.name != name):
                raise ValueError(
                    f"the virtual tensor {value.name!r} of a {type(value.owner).__name__} cannot become {name!r} of another "
                    f"module or name, whose conversions it would not follow; write VirtualTensor.create(module, {name!r}, ...)"
                )
            if name in self.__dict__.get("_labelled", ()):
                ownership.replace(self, name, value)
            else:
                nn.Module.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__.get("_labelled", ()):
            ownership.drop(self, name)
        else:
            nn.Module.__delattr__(self, name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register a plain buffer, as in torch.

        Args:
            name: The name.
            tensor: The buffer, or None.
            persistent: Whether `state_dict()` holds it.

        Raises:
            TypeError: If it is a labelled tensor, which is assigned to an attribute instead.

        Example:
            >>> import torch
            >>> from moduli.nn import Module
            >>> m = Module()
            >>> m.register_buffer("count", torch.zeros(1))
            >>> m.count
            tensor([0.])
        """
        if isinstance(tensor, Tensor):
            raise TypeError(
                f"cannot register the labelled tensor {name!r} as a buffer of {type(self).__name__}: declare the name with "
                f"@nograd_tensors({name!r}) and assign it, self.{name} = tensor"
            )
        nn.Module.register_buffer(self, name, tensor, persistent)

    # -- what is owned -----------------------------------------------------------------------------------------------

    def export(self, name: str) -> Tensor:
        """Return a detached copy of a tensor attribute, independent of the module.

        Args:
            name: The public name of the attribute.

        Raises:
            AttributeError: If the module has no such attribute.
            TypeError: If the attribute is not a labelled tensor.

        Example:
            >>> import torch
            >>> from moduli.labels import Space, Tensor
            >>> from moduli.nn import Module
            >>> m = Module()
            >>> m.w = Tensor(torch.zeros(2, requires_grad=True), (Space(["a", "b"]),))
            >>> m.export("w").requires_grad, m.export("w").dims == m.w.dims
            (False, True)
        """
        # Not `getattr` for owned names: the key of a container may be the name of one of its methods.
        tensor = self.__getattr__(name) if name in self._labelled else getattr(self, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{type(self).__name__}.{name} cannot be exported: it is a {type(tensor).__name__}, not a labelled Tensor"
            )
        return tensor.detach().clone()

    def export_all(self) -> FrozenDict[str, Tensor]:
        """Return detached copies of all labelled tensors of this module and the modules below it, by dotted public name.

        Example:
            >>> import torch
            >>> from moduli.labels import Space, Tensor
            >>> from moduli.nn import Module
            >>> outer, outer.inner = Module(), Module()
            >>> outer.inner.w = outer.b = Tensor(torch.zeros(2), (Space(2),))
            >>> list(outer.export_all())
            ['b', 'inner.w']
        """
        exported = {}
        for prefix, module in self.named_modules():
            if isinstance(module, Module):
                ownership.warn_unassigned(module)
                for name in ownership.list_owned_names(module):
                    exported[f"{prefix}.{name}" if prefix else name] = module.export(name)
        return FrozenDict(exported)

    def freeze(self) -> Self:
        """Stop recording gradients for all parameters of this module and the modules below it.

        Returns:
            This module.

        Example:
            >>> import torch
            >>> from moduli.nn import Module
            >>> m = Module()
            >>> m.inner = torch.nn.Linear(2, 2)
            >>> [p.requires_grad for p in m.freeze().parameters()]
            [False, False]
        """
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        return self

    def unfreeze(self) -> Self:
        """Record gradients for all parameters of this module and the modules below it that can have them.

        Integers and truth values are left alone. To keep a tensor out of training for good, declare it with
        `nograd_tensors`.

        Returns:
            This module.

        Example:
            >>> import torch
            >>> from moduli.nn import Module
            >>> m = Module()
            >>> m.inner = torch.nn.Linear(2, 2)
            >>> [p.requires_grad for p in m.freeze().unfreeze().parameters()]
            [True, True]
        """
        for parameter in self.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)
        return self

    # -- devices -----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device of this module's tensors; of a module without tensors, the one it was last moved to (at first the CPU).

        Example:
            >>> from moduli.nn import Module
            >>> Module().to_device("meta").device
            Device('meta')
        """
        return Device.new(ownership.device_of(self))

    def to_device(self, device: DeviceLike) -> Self:
        """Move this module and everything below it, in place, as `torch.nn.Module.to` does.

        Args:
            device: Where to: a `Device`, a `torch.device`, or text such as `"gpu:1"`.

        Returns:
            This module.

        Raises:
            RuntimeError: If this machine has no such device.

        Example:
            >>> from moduli.device import Device
            >>> from moduli.nn import Module
            >>> m = Module()
            >>> m.to_device(Device("cpu")) is m
            True
        """
        return self.to(Device.new(device).torch_device())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Conversions may give every name its own tensor, although several names shared one.
        shared = find_tied_entries(self)
        nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        reunite(shared)
        device = ownership.device_of(self)
        if next(ownership.tensors_of(self), None) is None:
            # Without tensors, an empty one shows to which device `fn` moves.
            device = fn(torch.empty(0, device=device)).device
        self.__dict__["_device"] = Device.new(device)
        return self

    _replicate_for_data_parallel = replicate

    # -- torch's own views -------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters with their registered names, as in torch.

        Args:
            prefix: Text before every name.
            recurse: Whether to include the modules below this one.
            remove_duplicate: Whether to list a tied parameter once.
        """
        ownership.warn_unassigned(self)
        return nn.Module.named_parameters(self, prefix, recurse, remove_duplicate)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter of a dotted name; an owned tensor has its public and its registered name."""
        return nn.Module.get_parameter(self, ownership.find_registered_target(self, target))

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return the buffer of a dotted name; an owned tensor has its public and its registered name."""
        return nn.Module.get_buffer(self, ownership.find_registered_target(self, target))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, *, labels: str = "warn"
    ) -> Any:
        """Load a state dict, all of it or nothing.

        This does what torch does, and: saved labels are compared with those of this module; tensors with the same labels in
        another order are reordered, and other labels raise; owned tensors may also be passed under their
        public names, as in the checkpoint of an ordinary module or in the result of `export_all`; names that are tied
        in this module stay tied; if loading fails, the module is restored.

        Args:
            state_dict: A result of `state_dict`, or a plain mapping of names to tensors.
            strict: Whether missing and unexpected names are errors.
            assign: Whether to take the tensors of the state dict themselves instead of copying their values.
            labels: The policy for labelled tensors whose labels the state dict lacks, as copies of one do (`dict(sd)`,
                safetensors' `load_file`): `"warn"` loads them by position with one warning, `"ignore"` without,
                `"require"` raises.

        Returns:
            The missing and the unexpected keys.

        Raises:
            RuntimeError: If names, shapes or labels do not fit.

        Example:
            >>> import torch
            >>> from moduli.labels import Space, Tensor
            >>> from moduli.nn import Module
            >>> a, b = Module(), Module()
            >>> a.w = Tensor(torch.tensor([1.0, 2.0]), (Space(["x", "y"]),))
            >>> b.w = Tensor(torch.tensor([0.0, 0.0]), (Space(["y", "x"]),))
            >>> b.load_state_dict(a.state_dict())
            <All keys matched successfully>
            >>> b.w.data.tolist()
            [2.0, 1.0]
        """
        return load_all_or_nothing(
            self, state_dict, lambda: nn.Module.load_state_dict(self, state_dict, strict=strict, assign=assign), labels
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        ownership.warn_unassigned(self)
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        labelled = self.__dict__["_labelled"]
        metadata = getattr(destination, "_metadata", None)
        if labelled and metadata is not None:
            where = prefix + type(self).__name__ if prefix else type(self).__name__
            metadata.setdefault(prefix[:-1], {})[_LABELS] = {
                name: encode(labelled[name][1], f"{where}.{name}") for name in ownership.list_owned_names(self)
            }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        saved = local_metadata.get(_LABELS, {})
        errors, unlabelled = align_state(self.__dict__["_labelled"], state_dict, prefix, saved)
        if errors:
            rest[-1].extend(errors)
            return
        note_unlabelled(unlabelled)
        shared = find_tied_entries(self)
        nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, *rest)
        reunite(shared)

    def __dir__(self) -> list[str]:
        labelled = self.__dict__.get("_labelled", {})
        hidden = {key for key, _ in labelled.values()}
        return sorted({*nn.Module.__dir__(self), *labelled} - hidden)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        extra = self.extra_repr().splitlines()
        parts = [f"({name}): {ownership.describe(self, name)}" for name in ownership.list_owned_names(self)]
        parts += [f"({name}): " + repr(module).replace("\n", "\n  ") for name, module in self._modules.items()]
        if not parts and len(extra) <= 1:
            return f"{self._get_name()}({''.join(extra)})"  # type: ignore[no-untyped-call]
        return f"{self._get_name()}(\n  " + "\n  ".join([*extra, *parts]) + "\n)"  # type: ignore[no-untyped-call]
