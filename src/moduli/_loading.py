"""The functions that `torch.load(weights_only=True)` may call to build labelled tensors; each checks its arguments."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_CONSTRUCTORS = ("_space._restore", "_space._restore_dates", "_axes.intern", "_tensor.wrap")


def allow_labels() -> None:
    """Add these functions to torch's safe globals; `moduli.labels` is imported when one of them is called."""
    torch.serialization.add_safe_globals(
        [(_import_on_call(path), f"{__package__}.labels.{path}") for path in _CONSTRUCTORS]
    )


def _import_on_call(path: str) -> Callable[..., Any]:
    """Return a function that imports the function at a path in `moduli.labels` and calls it."""
    module, _, name = path.rpartition(".")

    def call(*args: Any) -> Any:
        return getattr(import_module(f"{__package__}.labels.{module}"), name)(*args)

    return call
