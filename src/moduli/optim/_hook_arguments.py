"""What the hooks of a `TensorTransform` are given: lists of tensors, states and settings, in the form that they want."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._groups import same
from ._settings import is_per_member
from ._vectors import as_real, to_vector

if TYPE_CHECKING:
    from .objective import Objective
    from .transform import TensorTransform


# A fused pass computes these in single precision, so the hooks do too: 1e-8 is zero in half of it.
HALVES = (torch.float16, torch.bfloat16)

States = list[dict[str, Any]]
Setting = Mapping[str, Any]


class HookArguments(NamedTuple):
    """The arguments of the `multi_tensor_*` hooks, in their order."""

    tensors: list[Tensor]
    params: list[Tensor]
    grads: list[Tensor] | None
    loss: Tensor | None
    states: States
    settings: Sequence[Setting]


def gather_arguments(
    link: TensorTransform, objective: Objective, states: States, settings: Sequence[Setting], owned: bool
) -> tuple[list[int], HookArguments]:
    """Positions of the parameters that the hooks see (those with a gradient), and the arguments.

    Args:
        link: The link.
        objective: The objective.
        states: Its states, one for each parameter.
        settings: Its settings, one for each parameter.
        owned: Whether the hooks may write into the update.
    """
    loss = objective.get_loss(backward=True) if link.uses_loss else None
    tensors = objective.get_updates() if owned else objective.peek_updates()
    grads = objective.get_grads() if link.uses_grad else None
    params = objective.params
    if link.concat_params:
        link.check_shared(params)
        kept = [0]
        found = HookArguments(
            [to_vector([as_real(tensor) for tensor in tensors])],
            [to_vector([as_real(param) for param in params]).detach()],
            None if grads is None else [to_vector([as_real(grad) for grad in grads])],
            loss,
            [states[0]],
            [settings[0]],
        )
    else:
        kept = [i for i in range(len(params)) if objective.present is None or objective.present[i]]
        chosen = [settings[i] for i in kept]
        if objective.members is not None:
            chosen = [
                _per_member(setting, tensors[i], link.elementwise) for i, setting in zip(kept, chosen, strict=True)
            ]
        real = as_real if link.elementwise else _as_it_is
        found = HookArguments(
            [real(tensors[i]) for i in kept],
            [real(params[i].clone() if objective.differentiable else params[i]) for i in kept],
            None if grads is None else [real(grads[i]) for i in kept],
            loss,
            [states[i] for i in kept],
            chosen,
        )
    return kept, found._replace(settings=_measure(link, objective, found, kept)) if link.measures else found


def show_arguments(link: TensorTransform, objective: Objective, given: HookArguments) -> AbstractContextManager[None]:
    """Hooks are given the parameters themselves, but for a vector of them and for complex numbers as pairs."""
    pairs = link.elementwise and any(map(torch.is_complex, objective.params))
    copied = pairs or link.concat_params or objective.differentiable
    return link.shown(given.params, given.states, given.settings) if copied else nullcontext()


@contextmanager
def widen_state(
    link: TensorTransform, param: Tensor, state: dict[str, Any], setting: Setting
) -> Iterator[tuple[Tensor, Any]]:
    """A parameter and its state in single precision; what the hooks make of the state is rounded back."""
    wide = {key: widen(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    seen = param.float()
    with link.shown([seen], [wide], [setting]):
        yield seen, wide
    for key, value in wide.items():
        held = state.get(key)
        if isinstance(held, Tensor) and held.dtype in HALVES and isinstance(value, Tensor):
            held.copy_(value)
        elif held is not value:
            state[key] = value


def widen(tensor: Tensor | None) -> Tensor | None:
    """A tensor in at least single precision."""
    return tensor.float() if tensor is not None and tensor.dtype in HALVES else tensor


def _measure(link: TensorTransform, objective: Objective, given: HookArguments, kept: list[int]) -> list[Setting]:
    """The settings, with what the link's `measure` finds over all tensors for which they are the same."""
    tensors, params, grads, _, _, settings = given
    out = list(settings)
    left = list(range(len(settings)))
    while left:
        first = settings[left[0]]
        alike = [i for i in left if settings[i] is first or same(settings[i], first)]
        left = [] if len(alike) == len(left) else [i for i in left if i not in set(alike)]
        picked = None if grads is None else [grads[i] for i in alike]
        with objective.counting([kept[i] for i in alike]):
            found = link.measure(
                [tensors[i] for i in alike],
                [params[i] for i in alike],
                picked,
                [first] * len(alike),
                objective.members,
            )
        for i in alike if found else ():
            numbers = found if objective.members is None else _per_member(found or {}, tensors[i], False)
            out[i] = {**settings[i], **(numbers or {})}
    return out


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _per_member(setting: Setting, tensor: Tensor, pairs: bool) -> Setting:
    """One number per member, to multiply a tensor whose first axis is the members (of pairs where it is complex)."""
    if not any(is_per_member(value) for value in setting.values()):
        return setting
    shape = (-1, *([1] * (tensor.dim() - 1 + (pairs and tensor.is_complex()))))
    wide = {torch.float32: torch.float32, torch.complex64: torch.float32}.get(tensor.dtype)
    wide = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else wide
    return {
        # Settings take the precision of the tensor, but are not rounded to half of it.
        key: value.to(tensor.device, wide if value.is_floating_point() else None).reshape(shape)
        if is_per_member(value)
        else value
        for key, value in setting.items()
    }
