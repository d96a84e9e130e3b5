"""Operations defined here and registered with torch, so that traces record them like torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("moduli", "FRAGMENT")  # type: ignore[no-untyped-call]


def register_pointwise(schema: str, function: Callable[..., torch.Tensor]) -> None:
    """Register a pointwise operation as `torch.ops.moduli.NAME`, with an implementation by torch's own operations.

    Args:
        schema: The signature, as torch writes it.
        function: Its implementation, for any device.
    """
    _LIBRARY.define(schema, tags=(torch.Tag.pointwise,))
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
