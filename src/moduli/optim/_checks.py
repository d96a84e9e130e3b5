"""Errors for what links and their hooks get wrong; they name the link, the hook and the parameter.

Results are checked at the first step with a list of parameters only. Errors raised by a hook are explained at every step, which
costs nothing while there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import in_transform

if TYPE_CHECKING:
    from . import Module, Objective
    from ._hooks import HookArguments
    from .transform import TensorTransform

HALVES = (torch.float16, torch.bfloat16)
#: The attributes that the constructors of the base classes set.
BASE_ATTRIBUTES = ("defaults", "settings", "children", "global_state", "rows", "row_writes", "_projected", "_stand_ins")


def check_constructed(link: Module, settings: type) -> None:
    """Raise TypeError if a new link lacks attributes that its base classes set, or has replaced them.

    Args:
        link: The link.
        settings: The class of `link.settings`.
    """
    name, attributes = type(link).__name__, vars(link)
    if any(key not in attributes for key in BASE_ATTRIBUTES):
        raise TypeError(_FORGOTTEN.format(name=name))
    own = attributes["settings"]
    if not isinstance(own, settings) or own.defaults is not attributes["defaults"]:  # type: ignore[attr-defined]
        key = "defaults" if isinstance(own, settings) else "settings"
        what = "its settings for each parameter; give them to super().__init__ and call what is yours otherwise"
        raise TypeError(f"{name}.__init__ replaces self.{key}, where a link has {what}")


_FORGOTTEN = "{name}.__init__ has to call super().__init__ before it sets anything: super().__init__({{'beta': beta}})"


def explain_constructor_error(name: str, error: Exception) -> str | None:
    """Return a message for an AttributeError raised while a link is constructed; None if the error is clear by itself."""
    if not isinstance(error, AttributeError):
        return None
    if error.name in BASE_ATTRIBUTES:
        return _FORGOTTEN.format(name=name)
    if "no setter" in str(error) and "'state'" in str(error):
        what = "which a link has for each parameter already"
        what += "; make state in begin or single_tensor_initialize, or use self.global_state"
        return f"{name}.__init__ sets self.state, {what}"
    return None


def explain_error(
    error: Exception, link: Module, hook: str, param: str, state: Mapping[str, Any], setting: Mapping[str, Any]
) -> Exception | None:
    """Return a clearer error in place of one that a hook raised; None if the error is clear by itself.

    Args:
        error: The error.
        link: The link.
        hook: The name of the hook.
        param: The name of the parameter.
        state: Its state, as passed to the hook.
        setting: Its settings, as passed to the hook.
    """
    where = f"{type(link).__name__}.{name_hook(link, hook)}, for parameter {param}"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        text = _explain_missing(error.args[0], link, state, setting)
        return None if text is None else KeyError(f"{where}: {text}")
    if isinstance(error, RuntimeError):
        if not in_transform() or "vmap" not in str(error):
            return None
        remedy = (
            "`members = False` in its class has it called tensor by tensor, and for members of a population in turn"
        )
        return RuntimeError(f"{where}: it is called once for all tensors of one shape: {error} {remedy}")
    absent = [name for name in ("grad", "loss") if not getattr(link, f"uses_{name}", True)]
    if absent and isinstance(error, TypeError | AttributeError) and "NoneType" in str(error):
        declarations = " or ".join(f"uses_{name} = True" for name in absent)
        what = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} None"
        return TypeError(f"{where}: {error}; {what} unless the class of the link declares {declarations}")
    return None


def _explain_missing(key: str, link: Module, state: Mapping[str, Any], setting: Mapping[str, Any]) -> str | None:
    """Return a message for a name that a hook looked up in its state or settings; None if it is in one of them.

    Args:
        key: The name.
        link: The link.
        state: The state, as passed to the hook.
        setting: The settings, as passed to the hook.
    """
    if key in state or key in setting or " " in key:
        return None
    present = f"the state has {', '.join(state) or 'nothing'}, the settings are {', '.join(setting) or 'none'}"
    beginning = "begin" if hasattr(link, "begin") else "single_tensor_initialize"
    remedy = f"a setting is an attribute of the class, `{key}: float = ...`, and state is made in {beginning}"
    return f"there is neither state nor a setting {key!r} ({present}); {remedy}"


# For each hook the methods that the base classes in `transforms` forward it to.
_FORWARDED = {
    "single_tensor_initialize": ("begin",),
    "single_tensor_update": ("learn",),
    "single_tensor_apply": ("transform", "transform_at"),
    "multi_tensor_update": ("learn_all",),
    "multi_tensor_apply": ("transform_all", "transform", "transform_at"),
}


def name_hook(link: Module, hook: str) -> str:
    """Return the name under which a link's class defines one of its hooks."""
    names = (hook, *_FORWARDED.get(hook, ()))
    return next((name for kind in type(link).__mro__ for name in names if name in vars(kind)), hook)


def check_result(where: str, result: Any, tensor: Tensor) -> None:
    """Raise TypeError or ValueError unless a hook returned a tensor with the shape and dtype of its input.

    Args:
        where: The link, its hook and the parameter, as text.
        result: The value that the hook returned.
        tensor: The input tensor; the result of half precision may be float32.
    """
    if not isinstance(result, Tensor):
        got = "None (a return is missing?)" if result is None else f"a {type(result).__name__}"
        raise TypeError(f"{where} returned {got}; return the transformed tensor")
    if result.shape != tensor.shape:
        what = f"a tensor of shape {tuple(result.shape)}, but was given one of shape {tuple(tensor.shape)}"
        raise ValueError(f"{where} returned {what}; return one number for each of the parameter")
    if result.dtype is not tensor.dtype and not (tensor.dtype in HALVES and result.dtype is torch.float32):
        raise TypeError(
            f"{where} returned {result.dtype}, but was given {tensor.dtype}; return result.to(tensor.dtype)"
        )


def check_results(link: TensorTransform, results: Any, arguments: HookArguments) -> None:
    """Raise an error unless the hooks that transform returned one tensor for each parameter, like its input.

    Args:
        link: The link.
        results: The value that its hook returned.
        arguments: The arguments of the hook.
    """
    hook = "multi_tensor_apply" if link.has_own("multi_tensor_apply") else "single_tensor_apply"
    where = f"{type(link).__name__}.{name_hook(link, hook)}"
    if not isinstance(results, Sequence):
        raise TypeError(f"{where} returned a {type(results).__name__}; return a list, one tensor for each parameter")
    if len(results) != len(arguments.tensors):
        what = f"{len(results)} tensors for {len(arguments.tensors)} parameters"
        raise ValueError(f"{where} returned {what}; return one for each, in their order")
    for i, (result, tensor) in enumerate(zip(results, arguments.tensors, strict=True)):
        check_result(f"{where}, for parameter {name_param(link, arguments, i)},", result, tensor)


def check_pointwise(
    links: Sequence[TensorTransform], settings: Sequence[Mapping[str, Any]], cohort: Any, grads: bool
) -> None:
    """Run the hooks of pointwise links once on tensors of ones, before they are traced, and check their results.

    The traced function can't check them itself, since the check would be an operation of every step.

    Args:
        links: The links of a fused run.
        settings: The settings of each.
        cohort: Parameters of the run that share them, with their states.
        grads: Whether the gradient is passed to hooks.
    """
    first = cohort.params[0]
    precision = torch.float32 if first.dtype in HALVES else first.dtype.to_real()
    name = find_name(links[0], first) or str(cohort.indices[0])

    def make_ones(like: Tensor | None = None) -> Tensor:
        dtype = precision if like is None or like.dtype in HALVES else like.dtype
        return torch.ones(2, 3, dtype=dtype, device=first.device)

    tensor, param = make_ones(), make_ones()
    for link, setting, keys, columns, numbers in zip(
        links, settings, cohort.keys, cohort.states, cohort.numbers, strict=True
    ):
        setting = link.add_dtype(setting, first)
        state = {key: make_ones(column[0]) for key, column in zip(keys, columns, strict=True)} | numbers
        link.advance_numbers(state, setting)
        for hook in ("single_tensor_update", "single_tensor_apply"):
            try:
                with torch.random.fork_rng(devices=[]), link.shown([param], [state], [setting]):
                    result = getattr(link, hook)(tensor, param, make_ones() if grads else None, None, state, setting)
            except (KeyError, TypeError, AttributeError) as error:
                explained = explain_error(error, link, hook, name, state, setting)
                if explained is None:
                    raise
                raise explained from error
        check_result(f"{type(link).__name__}.{name_hook(link, hook)}, for parameter {name},", result, tensor)
        tensor = result


def check_updates(objective: Objective, link: Module) -> None:
    """Raise an error unless the update that a link left is one tensor in the shape of each parameter."""
    updates, params, name = objective.updates, objective.params, type(link).__name__
    if updates is None:
        return
    if len(updates) != len(params):
        what = f"an update of {len(updates)} tensors for {len(params)} parameters"
        raise ValueError(f"{name} left {what}; objective.updates has one for each, in their order")
    update: Any
    for i, (update, param) in enumerate(zip(updates, params, strict=True)):
        if not isinstance(update, Tensor):
            problem = f"a {type(update).__name__}"
        elif update.shape != param.shape:
            problem = f"an update of shape {tuple(update.shape)}"
        else:
            continue
        named = find_name(link, param) or str(i)
        raise ValueError(f"{name} left {problem} for parameter {named}, which has the shape {tuple(param.shape)}")


def name_param(link: Module, arguments: HookArguments, i: int) -> str:
    """Return the name of a parameter that is passed to a hook; its position where it has none.

    Args:
        link: The link.
        arguments: The arguments of the hook.
        i: The position of the parameter among them, which may be a view or a vector of the optimizer's parameters.
    """
    slot = next((slot for slot, row in link.rows.items() if row is arguments.states[i]), None)
    param = arguments.params[i] if slot is None else link.settings.binding.slots.params[slot]
    return find_name(link, param) or str(i)


def find_name(link: Module, param: Tensor) -> str | None:
    """Return the name of a parameter in quotes, or its position in the optimizer; None where the link belongs to none."""
    slots = link.settings.binding.slots
    name = slots.find_name(slots.find_param(param))
    return name if name is None or name.isdigit() else repr(name)
