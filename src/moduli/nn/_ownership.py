"""What a module holds, read when asked; assigning, replacing and deleting it, each of which happens or changes nothing."""

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
    """Copy a labelled tensor into a module under the name of an attribute; arguments as of `keep`."""
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
    """Copy a labelled tensor into the tensor that has the name, or register a copy in place of anything that had the name.

    Args:
        module: The module.
        name: The public name.
        value: The labelled tensor.
        buffer: Whether to register it as a buffer.
        fresh: Whether to register a new tensor even where the values of the old one could be updated.
    """
    check_name(name)
    key = (TENSOR_BUFFER_PREFIX if buffer else TENSOR_PARAM_PREFIX) + name
    held = _find_updatable(module, name, key, value)
    if held is not None and held is value.data:
        return  # written in place already
    if held is not None and not fresh:
        with torch.no_grad():
            held.copy_(value.data)
        return
    state = module.__dict__
    source, target = value.data, device_of(module)
    # A tensor without storage has nothing to move.
    same = source.device == target or source.is_meta
    data = source.detach().clone() if same else source.detach().to(target)
    record = state["_labelled"].get(name)
    if record is not None and not is_stored(module, record[0]) and hasattr(module, record[0]):
        _check_computed(module, name, record[0], key)
        with torch.no_grad():
            setattr(module, key, data)
    elif buffer:
        module.register_buffer(key, data)
    else:
        module.register_parameter(key, nn.Parameter(data, requires_grad=source.requires_grad))
    if record is not None and record[0] != key and is_stored(module, record[0]):
        nn.Module.__delattr__(module, record[0])
    # What another library told of the tensor does not tell apart the tensors of two modules.
    state["_labelled"][name] = (key, value._axes.drop_marks())
    if name in state.get("_tied", ()):
        state["_tied"] = state["_tied"] - {name}
    _remember_class(state, name, value)
    for registry in (state["_parameters"], state["_buffers"], state["_modules"], state):
        registry.pop(name, None)
    state["_non_persistent_buffers_set"].discard(name)


def read(module: nn.Module, name: str, key: str, axes: Axes) -> Tensor:
    """Return a labelled view of an owned tensor that is a buffer, is computed, or is of a user's class.

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
    """Return whether assigning a labelled tensor changes the values of the tensor that has the name, and nothing else.

    Args:
        module: The module.
        name: The public name of the attribute.
        value: What is assigned.

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

    A name that `tie` shares gets a tensor of its own instead, which ends the tie.
    """
    state = module.__dict__
    record = state.get("_labelled", {}).get(name)
    if record is None or record[0] != key or record[1] is not value._axes.drop_marks():
        return None
    held = state["_parameters"].get(key)
    if held is None:
        held = state["_buffers"].get(key)
    data = value.data
    if held is None or (held.shape, held.dtype, held.is_meta) != (data.shape, data.dtype, data.is_meta):
        return None
    if data is not held and name in state.get("_tied", ()):
        return None
    model = state.get("_models", {}).get(name)
    # What a user's class holds beside the data is registered with a new tensor.
    same_class = type(value) is Tensor if model is None else type(value) is type(model) and data is held
    return held if same_class and (data is held or not (is_sharded(held) or is_sharded(data))) else None


def register(module: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    """Assign a child or a plain parameter."""
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
    """Assign, as torch does, what may take the place of something registered; all or nothing."""
    state = module.__dict__
    with Guard() as guard:
        guard.mappings(*(held for held in (state, *state.values()) if isinstance(held, (dict, set))))
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
    """Keep what makes a tensor of a user's class one of that class: reading the attribute gives the like of it."""
    if type(value) is not Tensor:
        state.setdefault("_models", {})[name] = wrap_like(value, torch.empty(0), value._axes)
    elif "_models" in state:
        state["_models"].pop(name, None)


def check_initialised(module: nn.Module, name: str) -> None:
    """Refuse to own anything before there is a place for it."""
    if "_labelled" not in module.__dict__:
        raise AttributeError(
            f"cannot assign {name!r} before {type(module).__name__} is initialised; call super().__init__() first, of a "
            "class derived from moduli.nn.Module"
        )


def check_name(name: str) -> None:
    """Refuse a name under which torch could not register a tensor."""
    if not name or "." in name:
        raise KeyError(f"the name of a tensor is not empty and has no '.' in it, unlike {name!r}")
    if name.startswith((TENSOR_PARAM_PREFIX, TENSOR_BUFFER_PREFIX)):
        raise KeyError(f"{name!r} is the registered name of a tensor; assign the tensor to its public name")


def _find_declared(cls: type, name: str) -> Any:
    """Return what a class defines under a name, but for attributes that give way to what a program assigns."""
    declared = getattr(cls, name, _MISSING)
    return _MISSING if getattr(type(declared), "gives_way", False) else declared


def _check_free(module: nn.Module, name: str, declared: Any) -> None:
    """Refuse a name that the class uses for itself, unless the class says what assigning to it means."""
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


# -- what a module holds ----------------------------------------------------------------------------------------------


def is_stored(module: nn.Module, key: str) -> bool:
    """Whether a registered name has a storage of its own, rather than being computed or gone."""
    return key in module._parameters or key in module._buffers


def list_owned_names(module: nn.Module) -> list[str]:
    """Public names of the owned tensors that can be read."""
    labelled = module.__dict__.get("_labelled", {})
    return [name for name, (key, _) in labelled.items() if is_stored(module, key) or hasattr(module, key)]


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer of a module tree."""
    for each in module.modules():
        for registry in (each._parameters, each._buffers):
            for tensor in registry.values():
                if tensor is not None:
                    yield tensor


def device_of(module: nn.Module) -> torch.device:
    """Where the tensors of a module are, or where it was last moved to if it has none."""
    for tensor in tensors_of(module):
        return tensor.device
    return module.__dict__["_device"].torch_device()  # type: ignore[no-any-return]


def find_registered_target(module: nn.Module, target: str) -> str:
    """The registered name behind a dotted name that may end in the public name of an owned tensor."""
    path, _, name = target.rpartition(".")
    labelled = module.get_submodule(path).__dict__.get("_labelled", {})
    if name not in labelled:
        return target
    key: str = labelled[name][0]
    return f"{path}.{key}" if path else key


def describe(module: nn.Module, name: str) -> str:
    """An owned tensor in one line: its axes, and what it is to the module."""
    # Not by getattr: the key of a container may be the name of one of its methods.
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
    known = {*module._labelled, *module._modules, *module._parameters, *module._buffers, *module.__dict__}
    unassigned = sorted(name for name in names - known - cls._assigned_nograd if not hasattr(cls, name))
    if unassigned:
        cls._assigned_nograd.update(unassigned)
        warnings.warn(
            f"{cls.__name__} declares {', '.join(map(repr, unassigned))} with nograd_tensors but never assigned it; "
            "is the name misspelt?",
            stacklevel=3,
        )
