"""What becomes of buffers in the results of operations: one rule, applied here.

A result has the buffers of the left-most particle of the expression: copies of them, or what the policy of each says. A
buffer that operations act on takes part like a parameter, if both particles say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from moduli.layout import Structure

from ._config import fits, refuse
from ._skeleton import POLICY, State
from .errors import StructureError

if TYPE_CHECKING:
    from ._operand import Operand

__all__ = ["POLICIES", "acts_on", "buffer_policy", "operating", "policies_of", "result_buffers"]

T = TypeVar("T", bound=nn.Module)

POLICIES = ("copy", "share", "operate", "reset")
"""What arithmetic may do with a buffer."""


def buffer_policy(module: T, policy: str, *patterns: str) -> T:
    """Say what becomes of buffers in the results of operations.

    Args:
        module: A particle, or a module inside one.
        policy: `"copy"` (each particle has its own, as by default), `"share"` (one tensor for all), `"operate"` (the
            buffer takes part in operations like a parameter, unless it holds integers) or `"reset"` (zeros; ones for
            `running_var`). Two particles are combined only if they agree which buffers take part.
        *patterns: Names of buffers below the module, or patterns such as `"bn.*"`; all by default.

    Returns:
        The module.

    Raises:
        ValueError: If the policy is unknown or no buffer matches a pattern.

    Example:
        >>> from moduli.particles import adopt, buffer_policy
        >>> net = adopt(nn.BatchNorm1d(2))
        >>> buffer_policy(net, "share", "running_*").clone().running_mean is net.running_mean
        True
    """
    if policy not in POLICIES:
        raise ValueError(f"{policy!r} is not a policy for buffers; choose from {', '.join(POLICIES)}")
    names = [name for name, _ in module.named_buffers()]
    chosen = patterns or ("*",)
    for pattern in chosen:
        if not any(fits(name, [pattern]) for name in names):
            refuse(type(module).__name__, "buffer", pattern, names)
    before: tuple[tuple[str, str], ...] = module.__dict__.get(POLICY, ())
    module.__dict__[POLICY] = (*before, *((pattern, policy) for pattern in chosen))
    return module


def policies_of(structure: Structure, states: Sequence[State]) -> list[str]:
    """The policy of each buffer: the last pattern that matches, of the module nearest to the root."""
    found = ["copy"] * len(structure.layout.buffers)
    declared = [
        (entry.path, state[POLICY]) for entry, state in zip(structure.modules, states, strict=True) if state.get(POLICY)
    ]
    for path, rules in reversed(declared):
        for place, buffer in enumerate(structure.layout.buffers):
            if not path or buffer.name.startswith(path + "."):
                local = buffer.name[len(path) + 1 :] if path else buffer.name
                for pattern, policy in rules:
                    if fits(local, [pattern]):
                        found[place] = policy
    return found


def acts_on(buffer: Tensor) -> bool:
    """Whether a buffer holds numbers that can be averaged."""
    return buffer.is_floating_point() or buffer.is_complex()


def operating(left: Operand, right: Operand | None = None) -> dict[int, Tensor | None]:
    """The places of buffers that take part in an operation like parameters, and what the right operand has there.

    Raises:
        StructureError: If only one of the operands says that a buffer does, or has it.
    """
    if not left.buffers:
        return {}
    ours = left.policies()
    places = {place: None for place, policy in enumerate(ours) if policy == "operate" and acts_on(left.buffers[place])}
    if right is None:
        return dict(places)
    unscoped = ours if left.scope is None else left.policies(scoped=False)
    names = {entry.name: place for place, entry in enumerate(right.layout.buffers)}
    theirs = right.policies(scoped=False)
    found: dict[int, Tensor | None] = {}
    for place, entry in enumerate(left.layout.buffers):
        other = names.get(entry.name)
        policy = unscoped[place]
        if (policy == "operate") != (other is not None and theirs[other] == "operate"):
            if other is None:
                raise StructureError(f"the buffer {entry.name!r} takes part on the left and is missing on the right")
            raise StructureError(
                f"the buffer {entry.name!r} has the policy {policy!r} on the left and {theirs[other]!r} on the right; say "
                "moduli.particles.buffer_policy for both"
            )
        if place in places and other is not None:
            held = right.buffers[other]
            if held.shape != entry.shape:
                raise StructureError(
                    f"the buffer {entry.name!r} has shape {entry.shape} on the left and {tuple(held.shape)} on the right"
                )
            found[place] = held
    return found


def result_buffers(
    left: Operand, act: Callable[..., Tensor] | None = None, others: dict[int, Tensor | None] | None = None
) -> list[Any]:
    """The buffers of a result.

    Args:
        left: The left-most operand.
        act: What the operation does to a buffer that takes part in it, given that of the right operand if there is one.
        others: Which ones do, and what the right operand has there.
    """
    made: list[Any] = []
    policies = left.policies()
    others = {} if others is None else others
    for place, (held, entry) in enumerate(zip(left.buffers, left.layout.buffers, strict=True)):
        if act is not None and place in others:
            other = others[place]
            value = act(held) if other is None else act(held, other)
            made.append((value.clone() if value is held else value).to(held.dtype))
        elif policies[place] == "share":
            made.append(held)
        elif policies[place] == "reset":
            made.append(torch.ones_like(held) if entry.name.endswith("running_var") else torch.zeros_like(held))
        else:
            made.append(held.detach().clone())
    return made
