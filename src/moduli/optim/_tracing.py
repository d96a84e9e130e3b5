"""Keeping torch.compile out of what is compiled already."""

from __future__ import annotations

from typing import Any

__all__ = ["keep_from_tracing"]


def keep_from_tracing(*functions: Any) -> None:
    """Have torch.compile run these as they are, and all they call.

    The decorator that torch offers for this would import the compiler, which takes longer than all of moduli.
    """
    from torch._C._dynamo import eval_frame

    for function in functions:
        function._torchdynamo_disable = True
        # Older versions can't be told about what the function calls; they trace it, with breaks, to the same result.
        if hasattr(eval_frame, "set_code_exec_strategy") and hasattr(eval_frame, "_FrameExecStrategy"):
            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
