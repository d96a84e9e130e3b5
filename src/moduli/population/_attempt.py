"""What becomes of a call that `torch.vmap` cannot follow, or that runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ._plan import Plan

__all__ = ["attempted"]

Made = TypeVar("Made")

# How torch says that an operation has no batching rule, or asks for the values of a batch.
_UNBATCHED = (
    "vmap:",
    "Batching rule not implemented",
    "Cannot access data pointer of Tensor that doesn't have storage",
)
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def attempted(call: Callable[[Plan], Made], plan: Plan, auto: bool, count: int, refused: Callable[[str], None]) -> Made:
    """Evaluate according to a plan, or in a loop where that turns out to be impossible.

    Args:
        call: Evaluates, and leaves everything as it was if it fails.
        plan: How.
        auto: Whether a loop may take the place of what was planned.
        count: How many members.
        refused: Is told why vectorising was impossible.

    Raises:
        MemoryError: If there is not enough memory.
    """
    state = torch.get_rng_state() if auto and plan.form != "loop" else None
    try:
        try:
            return call(plan)
        except RuntimeError as error:
            if state is None or not _says(error, _UNBATCHED):
                raise
            why = str(error).splitlines()[0].removeprefix("vmap: ")
        # Draw what a loop from the start would have drawn.
        torch.set_rng_state(state)
        reason = f"loop: torch.vmap cannot follow the model ({why})"
        made = call(Plan("loop", 0, reason))
        refused(reason)
        return made
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _says(error, _OUT_OF_MEMORY):
            raise
        size = 1 if plan.form == "loop" else plan.block or count
        remedy = f"give a chunk_size below {size}" if size > 1 else "use smaller batches (chunk_size is 1 already)"
        raise MemoryError(
            f"evaluating {size} of {count} members at a time takes more memory than there is; {remedy}. Nothing was changed"
        ) from error


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    message = str(error)
    return any(phrase in message for phrase in phrases)
