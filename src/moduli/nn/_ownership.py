"""Assigning, reading, replacing and deleting the labelled tensors of a module, each of them atomically."""

import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from moduli.labels import Axes, Tensor, wrap, wrap_like
from moduli.layout import TENSOR_BUFFER_PREFIX, TENSOR_PARAM_PREFIX, Guard, is_sharded

from ._virtual import virtual

_MISSING: Final = object()


def own(module: nn.Module, name: str, value: Tensor, fresh: bool = False) -> None:
    """Copy a labelled tensor into a module under the name of an attribute, or pass it to the descriptor of that name.

    Args:
        module: The module.
        name: The public name.
        value: The labelled tensor.
        fresh: Whether to register a new tensor even where the values of the old one could be updated.
    """
    cls = type(module)
    check_initialised(module, name)
    declared = _find_declared(cls, name)
    if declared is not _MISSING:
        _check_free(module, name, declared)
        object.__setattr__(module, name, value)
    else:
        buffer = name in cls.__nograd_tensors__  # type: ignore[attr-defined]
        keep(module, name, value, buffer, fresh)
        if buffer:
            cls._assigned_nograd.add(name)  # type: ignore[attr-defined]


def keep(module: nn.Module, name: str, value: Tensor, buffer: bool, fresh: bool = False) -> None:
    """Copy a labelled tensor into the registered tensor of that name, or register a copy instead of whatever had the name.

    Args:
        module: The module.
        name: The public name.
        value: The labelled tensor.
        buffer: Whether to register it as a buffer.
        fresh: Whether to register a new tensor even where the values of the old one could be updated.
    """
    check_name(name)
    key = (TENSOR_BUFFER_PREFIX if buffer else TENSOR_PARAM_PREFIX) + name
    stored = _find_updatable(module, name, key, value)
    if stored is not None and stored is value.data:
        return  # written in place already
    if stored is not None and not fresh:
        with torch.no_grad():
            stored.copy_(value.data)
        return
    _store(module, name, key, value.data)
    state = module.__dict__
    # Marks that other libraries put on axes belong to one tensor, not to the module's attribute.
    state["_labelled"][name] = (key, value._axes.drop_marks())
    if name in state.get("_tied", ()):
        state["_tied"] = state["_tied"] - {name}
    _remember_class(state, name, value)
    for registry in (state["_parameters"], state["_buffers"], state["_modules"], state):
        registry.pop(name, None)
    state["_non_persistent_buffers_set"].discard(name)


def _store(module: nn.Module, name: str, key: str, source: torch.Tensor) -> None:
    """Register a copy of the data of an owned tensor, or assign it through the parametrization that computes the tensor."""
    target = device_of(module)
    # A meta tensor has no data to move.
    same = source.device == target or source.is_meta
    data = source.detach().clone() if same else source.detach().to(target)
    record = module.__dict__["_labelled"].get(name)
    if record is not None and not is_stored(module, record[0]) and hasattr(module, record[0]):
        _check_computed(module, name, record[0], key)
        with torch.no_grad():
            setattr(module, key, data)
    elif key.startswith(TENSOR_BUFFER_PREFIX):
        module.register_buffer(key, data)
    else:
        module.register_parameter(key, nn.Parameter(data, requires_grad=source.requires_grad))
    if record is not None and record[0] != key and is_stored(module, record[0]):
        nn.Module.__delattr__(module, record[0])


def read(module: nn.Module, name: str, key: str, axes: Axes) -> Tensor:
    """Return a labelled view of an owned tensor that is a buffer, is computed, or is of a user's class.

    Args:
        module: The module.
        name: The public name.
        key: The registered name.
        axes: The axes of the tensor.

    Raises:
        AttributeError: If its storage was removed.
    """
    state = module.__dict__
    data = state["_parameters"].get(key)
    if data is None:
        data = state["_buffers"].get(key)
    if data is None:
        # Parametrizations and pruning turn the registered name into an attribute that computes the tensor.
        data = getattr(module, key, None)
    if data is None:
        raise AttributeError(
            f"{type(module).__name__!r} object has no attribute {name!r}: its storage {key!r} was removed"
        )
    model = state.get("_models", {}).get(name)
    return wrap(data, axes) if model is None else wrap_like(model, data, axes)


def updates_value(module: nn.Module, name: str, value: Tensor) -> bool:
    """Return whether assigning a labelled tensor only changes the values of the tensor of that name.

    Args:
        module: The module.
        name: The public name of the attribute.
        value: The tensor to be assigned.

    Example:
        >>> import moduli as mo
        >>> net = mo.Module()
        >>> net.w = mo.tensor([1.0, 2.0], c=["r", "g"])
        >>> [mo.nn.updates_value(net, "w", mo.tensor([3.0, 4.0], c=labels)) for labels in (["r", "g"], ["g", "r"])]
        [True, False]
    """
    buffer = name in type(module).__nograd_tensors__  # type: ignore[attr-defined]
    key = (TENSOR_BUFFER_PREFIX if buffer else TENSOR_PARAM_PREFIX) + name
    return _find_updatable(module, name, key, value) is not None


def _find_updatable(module: nn.Module, name: str, key: str, value: Tensor) -> torch.Tensor | None:
    """Return the stored tensor that a value is written into: one of the same axes, shape, dtype and class; else None.

    Assigning to a name that `tie` shares registers a new tensor instead, which ends the tie.
    """
    state = module.__dict__
    record = state.get("_labelled", {}).get(name)
    if record is None or record[0] != key or record[1] is not value._axes.drop_marks():
        return None
    stored = state["_parameters"].get(key)
    if stored is None:
        stored = state["_buffers"].get(key)
    data = value.data
    if stored is None or (stored.shape, stored.dtype, stored.is_meta) != (data.shape, data.dtype, data.is_meta):
        return None
    if data is not stored and name in state.get("_tied", ()):
        return None
    model = state.get("_models", {}).get(name)
    # A tensor of a user's class has attributes beside its data, which are stored only when a new tensor is registered.
    same_class = type(value) is Tensor if model is None else type(value) is type(model) and data is stored
    return stored if same_class and (data is stored or not (is_sharded(stored) or is_sharded(data))) else None


def register(module: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    """Assign a child or a plain parameter.

    Args:
        module: The module.
        name: The name of the attribute.
        value: The child, which is moved to the module's device, or the parameter.
    """
    _refuse_labelled_entries(name, value)
    declared = _find_declared(type(module), name)
    if isinstance(declared, virtual):
        object.__setattr__(module, name, value)
        return
    if declared is not _MISSING:
        _check_free(module, name, declared)
    if isinstance(value, nn.Module) and "_device" in module.__dict__:
        device = device_of(module)
        if any(tensor.device != device and not tensor.is_meta for tensor in tensors_of(value)):
            value.to(device)
    replace(module, name, value)


def _refuse_labelled_entries(name: str, value: Any) -> None:
    """Raise TypeError if one of torch's containers holds labelled tensors, which it would not register."""
    if isinstance(value, nn.ParameterDict | nn.ParameterList):
        ours = "TensorDict" if isinstance(value, nn.ParameterDict) else "TensorList"
        for entry in value.values() if isinstance(value, nn.ParameterDict) else value:
            if isinstance(entry, Tensor):
                raise TypeError(
                    f"{name!r} is a {type(value).__name__} with a labelled tensor, which torch does not make a parameter; use "
                    f"moduli.nn.{ours}"
                )


def replace(module: nn.Module, name: str, value: Any) -> None:
    """Assign an attribute as torch does, dropping whatever was registered under the name; all or nothing.

    Args:
        module: The module.
        name: The name of the attribute.
        value: The new value.
    """
    state = module.__dict__
    with Guard() as guard:
        guard.mappings(*(registry for registry in (state, *state.values()) if isinstance(registry, (dict, set))))
        if name in state.get("_labelled", ()):
            drop(module, name)
        nn.Module.__setattr__(module, name, value)


def drop(module: nn.Module, name: str) -> None:
    """Remove an owned tensor."""
    labelled = module.__dict__["_labelled"]
    key = labelled[name][0]
    if is_stored(module, key):
        nn.Module.__delattr__(module, key)
    elif hasattr(module, key):
        _check_computed(module, name, key, None)
    del labelled[name]
    module.__dict__.get("_models", {}).pop(name, None)


def _remember_class(state: dict[str, Any], name: str, value: Tensor) -> None:
    """Store an empty tensor of a user's class, from which reading the attribute makes tensors of that class."""
    if type(value) is not Tensor:
        state.setdefault("_models", {})[name] = wrap_like(value, torch.empty(0), value._axes)
    elif "_models" in state:
        state["_models"].pop(name, None)


def check_initialised(module: nn.Module, name: str) -> None:
    """Raise AttributeError if the module's `__init__` has not run yet."""
    if "_labelled" not in module.__dict__:
        raise AttributeError(
            f"cannot assign {name!r} before {type(module).__name__} is initialised; call super().__init__() first, of a "
            "class derived from moduli.nn.Module"
        )


def check_name(name: str) -> None:
    """Raise KeyError for a name under which torch could not register a tensor."""
    if not name or "." in name:
        raise KeyError(f"the name of a tensor is not empty and has no '.' in it, unlike {name!r}")
    if name.startswith((TENSOR_PARAM_PREFIX, TENSOR_BUFFER_PREFIX)):
        raise KeyError(f"{name!r} is the registered name of a tensor; assign the tensor to its public name")


def _find_declared(cls: type, name: str) -> Any:
    """Return the class attribute of a name; `_MISSING` if there is none, or it may be overridden by assignment."""
    declared = getattr(cls, name, _MISSING)
    return _MISSING if getattr(type(declared), "gives_way", False) else declared


def _check_free(module: nn.Module, name: str, declared: Any) -> None:
    """Raise AttributeError for a name that the class defines, unless that definition has a setter."""
    if hasattr(type(declared), "__set__") and not (isinstance(declared, property) and declared.fset is None):
        return
    where = next(klass for klass in type(module).__mro__ if name in klass.__dict__)
    raise AttributeError(
        f"cannot assign to {type(module).__name__}.{name}: {where.__module__}.{where.__qualname__} defines {name!r} as "
        f"a {type(declared).__name__}, which would hide what is assigned. Choose another name"
    )


def _check_computed(module: nn.Module, name: str, key: str, replacement: str | None) -> None:
    if replacement != key or not nn.utils.parametrize.is_parametrized(module, key):
        raise RuntimeError(
            f"{type(module).__name__}.{name} is computed from other parameters and cannot be replaced or deleted; first call "
            f"torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove, with {key!r}"
        )


# -- the contents of a module -----------------------------------------------------------------------------------------


def is_stored(module: nn.Module, key: str) -> bool:
    """Whether a registered name has its own storage, rather than being computed or removed."""
    return key in module._parameters or key in module._buffers


def list_owned_names(module: nn.Module) -> list[str]:
    """Return the public names of the owned tensors that can be read."""
    labelled = module.__dict__.get("_labelled", {})
    return [name for name, (key, _) in labelled.items() if is_stored(module, key) or hasattr(module, key)]


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Iterate over every parameter and buffer of a module tree."""
    for each in module.modules():
        for registry in (each._parameters, each._buffers):
            for tensor in registry.values():
                if tensor is not None:
                    yield tensor


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's tensors, or the one it was last moved to if it has none."""
    for tensor in tensors_of(module):
        return tensor.device
    return module.__dict__["_device"].torch_device()  # type: ignore[no-any-return]


def find_registered_target(module: nn.Module, target: str) -> str:
    """Return the registered dotted name of a tensor, whose name may end in the public name of an owned tensor."""
    path, _, name = target.rpartition(".")
    labelled = module.get_submodule(path).__dict__.get("_labelled", {})
    if name not in labelled:
        return target
    key: str = labelled[name][0]
    return f"{path}.{key}" if path else key


def describe(module: nn.Module, name: str) -> str:
    """Return one line about an owned tensor: its axes, dtype and whether it is a parameter or buffer."""
    # Not `getattr`: the key of a container may be the name of one of its methods.
    tensor: Any = module.__getattr__(name)
    axes = ", ".join(f"{'_' if space.name is None else space.name}={len(space)}" for space in tensor.dims)
    if module.__dict__["_labelled"][name][0].startswith(TENSOR_BUFFER_PREFIX):
        kind = "buffer"
    else:
        kind = "parameter" if tensor.requires_grad else "parameter without gradient"
    return f"Tensor({axes}), {str(tensor.dtype).removeprefix('torch.')} {kind}"


def warn_unassigned(module: Any) -> None:
    """Warn, once per class, of names declared by `nograd_tensors` that nothing was assigned to."""
    cls = type(module)
    names = cls.__nograd_tensors__
    if not names:
        return
    present = {*module._labelled, *module._modules, *module._parameters, *module._buffers, *module.__dict__}
    unassigned = sorted(name for name in names - present - cls._assigned_nograd if not hasattr(cls, name))
    if unassigned:
        cls._assigned_nograd.update(unassigned)
        warnings.warn(
            f"{cls.__name__} declares {', '.join(map(repr, unassigned))} with nograd_tensors but never assigned it; "
            "is the name misspelt?",
            stacklevel=3,
        )
