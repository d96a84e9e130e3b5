"""How a population is evaluated: a pure function of shapes and layer types, so that runs can be repeated."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

__all__ = ["FORMS", "Plan", "choose", "unbatchable"]

FORMS = ("auto", "vmap", "loop", "chunked", "stacked")
# Layers that torch.vmap has no rule for.
_LOOPED = (nn.RNNBase,)


class Plan(NamedTuple):
    """How to evaluate.

    Attributes:
        form: `"stacked"`, `"vmap"` or `"loop"`.
        block: How many members at a time; 0 for all.
        reason: Why, as a sentence.
    """

    form: str
    block: int
    reason: str


def unbatchable(template: nn.Module) -> str | None:
    """The path and type of the first layer that cannot be vectorised, or None."""
    for path, module in template.named_modules():
        if isinstance(module, _LOOPED):
            return f"{path or 'the model'} ({type(module).__name__})"
    return None


def choose(template: nn.Module, count: int, numel: int, args: Any, form: str, chunk_size: int | None) -> Plan:
    """Choose how to evaluate.

    Raises:
        ValueError: If the form is unknown, or impossible for this model.
    """
    if form not in FORMS:
        raise ValueError(f"vectorize={form!r}; choose from {', '.join(FORMS)}")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size is a positive number of members, not {chunk_size!r}")
    layer = unbatchable(template)
    if layer is not None:
        if form not in ("auto", "loop"):
            raise ValueError(
                f"{layer} has no batching rule, so members must be called one after the other: use vectorize='loop' or 'auto'"
            )
        return Plan("loop", 0, f"loop: {layer} has no batching rule")
    if form == "loop":
        return Plan("loop", 0, "loop: asked for")
    block = min(chunk_size or count, count)
    if form == "chunked" and chunk_size is None:
        block = min(count, 64)
    return Plan("vmap", 0 if block == count else block, "vmap")
