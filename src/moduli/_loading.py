"""What `torch.load(weights_only=True)` may call to make labelled tensors: functions that check what they are given."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_MADE_BY = ("_space._restore", "_space._restore_dates", "_axes.intern", "_tensor.wrap")


def allow_labels() -> None:
    """Tell torch about these functions; the room they are in is imported when the first of them is called."""
    torch.serialization.add_safe_globals([(_import_on_call(path), f"{__package__}.labels.{path}") for path in _MADE_BY])


def _import_on_call(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")

    def call(*args: Any) -> Any:
        return getattr(import_module(f"{__package__}.labels.{module}"), name)(*args)

    return call
