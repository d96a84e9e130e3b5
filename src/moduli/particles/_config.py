"""Configurations of parameters and policies of buffers: choosing them by name, and keeping them in state dicts.

A parameter or buffer is chosen by a registered name, the public name of a labelled tensor, or a pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from moduli.layout import Structure, check_pattern, match_name

from ._skeleton import POLICY, State

if TYPE_CHECKING:
    from ._operand import Operand


T = TypeVar("T", bound=nn.Module)

CONFIG_KEY = "param_config"
"""Where the metadata of a state dict holds configurations."""


def is_selected(path: str, name: str | None) -> bool:
    """Whether a dotted name is that of an attribute, is below it, or matches it as a pattern."""
    return name is None or path.startswith(f"{name}.") or match_name(path, name)


# -- buffers -------------------------------------------------------------------------------------------------------------
# What becomes of buffers in the results of operations: one rule, applied here. A result has the buffers of the left-most
# particle of the expression: copies of them, or what the policy of each says. A buffer that operations act on takes part like
# a parameter, if both particles say so.

POLICIES = ("copy", "share", "operate", "reset")
"""What arithmetic may do with a buffer."""


def buffer_policy(module: T, policy: str, *patterns: str) -> T:
    """Say what becomes of buffers in the results of operations.

    Args:
        module: A particle, or a module inside one.
        policy: `"copy"` (each particle has its own, as by default), `"share"` (one tensor for all), `"operate"` (the
            buffer takes part in operations like a parameter, unless it holds integers; `norm`, `dot` and `vector` are of
            parameters only) or `"reset"` (zeros; ones for
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
        check_pattern(pattern, names, "buffer", type(module).__name__)
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
                    if match_name(local, pattern):
                        found[place] = policy
    return found


def find_acting(policies: list[str], buffers: list[Tensor]) -> tuple[int, ...]:
    """The places of buffers that take part in operations like parameters: those that hold numbers which can be averaged."""
    return tuple(
        place
        for place, policy in enumerate(policies)
        if policy == "operate" and (buffers[place].is_floating_point() or buffers[place].is_complex())
    )


def keep_buffer(name: str, held: Tensor, policy: str) -> Tensor:
    """What a buffer that takes no part in an operation is in the result.

    Example:
        >>> from moduli.particles import keep_buffer
        >>> keep_buffer("bn.running_var", torch.zeros(2), "reset")
        tensor([1., 1.])
    """
    if policy == "share":
        return held
    if policy == "reset":
        return torch.ones_like(held) if name.endswith("running_var") else torch.zeros_like(held)
    return held.detach().clone()


def result_buffers(left: Operand, acted: Sequence[Tensor] = ()) -> list[Any]:
    """The buffers of a result.

    Args:
        left: The left-most operand.
        acted: What the operation made of the buffers that take part in it; if nothing, they are copied.
    """
    rows = zip(left.layout.buffers, left.buffers, left.policies(), strict=True)
    made: list[Any] = [keep_buffer(entry.name, held, policy) for entry, held, policy in rows]
    for place, value in zip(left.acting, acted, strict=False):
        made[place] = value
    return made
