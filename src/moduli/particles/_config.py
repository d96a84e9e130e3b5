"""Configurations of parameters and policies of buffers, which are set by name.

A name is a registered name, the public name of a labelled tensor, or a pattern.
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
"""The key of configurations in the metadata of a state dict."""


def is_selected(path: str, name: str | None) -> bool:
    """Whether a dotted name equals `name`, is below it, or matches it as a pattern; None selects all."""
    return name is None or path.startswith(f"{name}.") or match_name(path, name)


# -- buffers -------------------------------------------------------------------------------------------------------------
# The result of an operation has the buffers of the left-most particle of the expression, treated according to the policy of
# each. A buffer with the policy "operate" takes part like a parameter; both particles must have that policy.

POLICIES = ("copy", "share", "operate", "reset")
"""The policies that a buffer may have."""


def buffer_policy(module: T, policy: str, *patterns: str) -> T:
    """Set the policy by which results of operations get their buffers.

    Args:
        module: A particle, or a module inside one.
        policy: `"copy"` (the default: the result has a copy), `"share"` (one tensor for all), `"operate"` (the
            buffer takes part in operations like a parameter, unless it holds integers; `norm`, `dot` and `vector` use
            parameters only) or `"reset"` (zeros; ones for
            `running_var`). Two particles are combined only if the same buffers take part in both.
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
    """Return the policy of each buffer: the last pattern that matches, of the module nearest to the root."""
    policies = ["copy"] * len(structure.layout.buffers)
    declared = [
        (entry.path, state[POLICY]) for entry, state in zip(structure.modules, states, strict=True) if state.get(POLICY)
    ]
    for path, rules in reversed(declared):
        for place, buffer in enumerate(structure.layout.buffers):
            if not path or buffer.name.startswith(path + "."):
                local = buffer.name[len(path) + 1 :] if path else buffer.name
                for pattern, policy in rules:
                    if match_name(local, pattern):
                        policies[place] = policy
    return policies


def find_acting(policies: list[str], buffers: list[Tensor]) -> tuple[int, ...]:
    """Return the positions of the buffers that take part in operations: policy "operate", and real or complex numbers."""
    return tuple(
        place
        for place, policy in enumerate(policies)
        if policy == "operate" and (buffers[place].is_floating_point() or buffers[place].is_complex())
    )


def keep_buffer(name: str, buffer: Tensor, policy: str) -> Tensor:
    """Return the buffer of a result for one that takes no part in the operation.

    Args:
        name: Its name.
        buffer: The buffer of the operand.
        policy: Its policy.

    Example:
        >>> from moduli.particles import keep_buffer
        >>> keep_buffer("bn.running_var", torch.zeros(2), "reset")
        tensor([1., 1.])
    """
    if policy == "share":
        return buffer
    if policy == "reset":
        return torch.ones_like(buffer) if name.endswith("running_var") else torch.zeros_like(buffer)
    return buffer.detach().clone()


def result_buffers(left: Operand, acted: Sequence[Tensor] = ()) -> list[Any]:
    """Return the buffers of a result.

    Args:
        left: The left-most operand.
        acted: The results for the buffers that take part in the operation; if empty, they are copied.
    """
    rows = zip(left.layout.buffers, left.buffers, left.policies(), strict=True)
    results: list[Any] = [keep_buffer(entry.name, buffer, policy) for entry, buffer, policy in rows]
    for place, value in zip(left.acting, acted, strict=False):
        results[place] = value
    return results
