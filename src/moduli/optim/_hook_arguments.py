"""What the hooks of a `TensorTransform` are given: lists of tensors, states and settings, in the form that they want."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._settings import is_per_member, same
from ._vectors import as_real, to_vector

if TYPE_CHECKING:
    from .objective import Objective
    from .transform import TensorTransform


# A fused pass computes these in single precision, so the hooks do too: 1e-8 is zero in half of it.
_HALVES = (torch.float16, torch.bfloat16)

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

    def pick(self, places: Sequence[int]) -> HookArguments:
        """Those of some of the tensors."""
        lists = (self.tensors, self.params, self.grads or [], self.states, self.settings)
        tensors, params, grads, states, settings = ([held[i] for i in places] if held else [] for held in lists)
        return HookArguments(tensors, params, None if self.grads is None else grads, self.loss, states, settings)  # type: ignore[arg-type]


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
        real: Callable[[Tensor], Tensor] = as_real if link.elementwise else lambda tensor: tensor
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


def call_each(link: TensorTransform, hook: Callable[..., Any], given: HookArguments) -> list[Any]:
    """What a `single_tensor_*` hook makes of each tensor. Pointwise hooks see those of half precision in single precision."""
    out = []
    for i, tensor in enumerate(given.tensors):
        param, state, setting = given.params[i], given.states[i], given.settings[i]
        grad = None if given.grads is None else given.grads[i]
        if not link.elementwise or tensor.dtype not in _HALVES:
            out.append(hook(tensor, param, grad, given.loss, state, setting))
            continue
        seen, wide = param.float(), {key: _widen(value) for key, value in state.items()}
        with link.shown([seen], [wide], [setting]):
            found = hook(tensor.float(), seen, _widen(grad), given.loss, wide, setting)
        out.append(found.to(tensor.dtype) if isinstance(found, Tensor) else found)
        for key, value in wide.items():
            held = state.get(key)
            if isinstance(held, Tensor) and held.dtype in _HALVES and isinstance(value, Tensor):
                held.copy_(value)
            elif held is not value:
                state[key] = value
    return out


def _widen(value: Any) -> Any:
    """A tensor in at least single precision; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _measure(link: TensorTransform, objective: Objective, given: HookArguments, kept: list[int]) -> list[Setting]:
    """The settings, with what the link's `measure` finds over all tensors for which they are the same."""
    out = list(given.settings)
    for alike in find_alike(given.settings):
        part = given.pick(alike)
        found = measure(link, objective, [kept[i] for i in alike], out[alike[0]], part.tensors, part.params, part.grads)
        for i in alike if found else ():
            numbers = found if objective.members is None else _per_member(found or {}, given.tensors[i], False)
            out[i] = {**out[i], **(numbers or {})}
    return out


def find_alike(settings: Sequence[Setting]) -> list[list[int]]:
    """The positions of settings, those of equal ones together."""
    out: list[list[int]] = []
    for i, setting in enumerate(settings):
        for alike in out:
            first = settings[alike[0]]
            if setting is first or same(setting, first):
                alike.append(i)
                break
        else:
            out.append([i])
    return out


def measure(
    link: TensorTransform,
    objective: Objective,
    positions: list[int],
    setting: Setting,
    tensors: list[Tensor],
    params: list[Tensor],
    grads: list[Tensor] | None,
) -> dict[str, Any] | None:
    """What the link's `measure` finds over tensors, of the parameters at these positions, with one setting."""
    with objective.counting(positions):
        return link.measure(tensors, params, grads, [setting] * len(tensors), objective.members)


def _per_member(setting: Setting, tensor: Tensor, pairs: bool) -> Setting:
    """One number per member, to multiply a tensor whose first axis is the members (of pairs where it is complex)."""
    if not any(is_per_member(value) for value in setting.values()):
        return setting
    shape = (-1, *([1] * (tensor.dim() - 1 + (pairs and tensor.is_complex()))))
    wide = None if tensor.dtype in _HALVES else tensor.dtype.to_real()
    return {
        # Settings take the precision of the tensor, but are not rounded to half of it.
        key: value.to(tensor.device, wide if value.is_floating_point() else None).reshape(shape)
        if is_per_member(value)
        else value
        for key, value in setting.items()
    }
