"""A check whether the state of a pointwise link starts from its update, as `state["previous"] = tensor.clone()` does.

A fused pass needs the states of all its links before it runs. The update that a link gets from the links before it in the pass
does not exist by then, so a state that starts from it has to be made by an unfused step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_fake
from ._hooks import HookArguments

if TYPE_CHECKING:
    from .transform import TensorTransform

# Two updates that no usual function of one number maps to the same value.
_PROBES = (0.25, -3.0)


def starts_from_update(link: TensorTransform, arguments: HookArguments) -> bool:
    """Return whether a state that is still empty starts from the update; one element shows it, since hooks are pointwise.

    Args:
        link: The link.
        arguments: The arguments of its hooks.
    """
    places = {
        id(arguments.settings[i]): i
        for i, row in enumerate(arguments.states)
        if not row and arguments.tensors[i].numel()
    }
    return any(_depends_on_update(link, arguments.pick([i])) for i in places.values())


def _depends_on_update(link: TensorTransform, arguments: HookArguments) -> bool:
    """Return whether the initial state of one parameter differs between two updates.

    Args:
        link: The link.
        arguments: The arguments of its hooks, for this parameter.
    """
    if is_fake(arguments.tensors[0]):  # without values
        return False
    tensor, param = _cut(arguments.tensors[0]), _cut(arguments.params[0])
    grads = None if arguments.grads is None else [_cut(arguments.grads[0])]
    states: list[dict[str, Any]] = []
    for value in _PROBES:
        states.append({})
        one = arguments._replace(
            tensors=[torch.full_like(tensor, value)], params=[param], grads=grads, states=states[-1:]
        )
        with torch.no_grad(), link.shown(one.params, one.states, one.settings):
            link._fill_states(one)
    return not are_equal(*states)


def _cut(tensor: Tensor) -> Tensor:
    """Return the first element of a tensor, with as many axes."""
    return tensor.detach()[(slice(0, 1),) * tensor.dim()]


def are_equal(left: Any, right: Any) -> bool:
    """Return whether two initial states, or values in them, are equal, tensors entry by entry.

    Args:
        left: A state or a value.
        right: Another one.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(are_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(are_equal, left, right))
    return bool(left == right)
