"""The settings of parameter groups in saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import _groups
from ._settings import same
from .state_encoding import decode_value

if TYPE_CHECKING:
    from .optimizer import Optimizer


def read_options(
    optimizer: Optimizer, saved: Mapping[str, Any], by_name: Mapping[str, Tensor], strict: bool
) -> dict[Tensor, dict[str, Any]]:
    """Return the saved settings of each parameter.

    Args:
        optimizer: The optimizer.
        saved: The saved state.
        by_name: The parameters here by the names that they were saved with.
        strict: Whether settings must be known here, and equal within each group here.

    Raises:
        ValueError: Parameters of one group here were saved with different settings, of which some would be lost.
    """
    links = [link for _, link in optimizer._links]
    out: dict[Tensor, dict[str, Any]] = {}
    for group in saved["param_groups"]:
        decoded = {key: decode_value(value, None, f"setting {key}") for key, value in _groups.options(group).items()}
        options = {key: value for key, value in decoded.items() if strict or _groups.is_known(key, links)}
        _groups.check_keys(options, links)
        out.update({by_name[name]: options for name in group["params"] if name in by_name})
    for i, group in enumerate(optimizer.param_groups if strict else ()):
        first, *others = [param for param in group["params"] if param in out] or [None]
        for param in others:
            one, other = out[first], out[param]
            key = next((key for key in {**one, **other} if not same({key: one.get(key)}, {key: other.get(key)})), None)
            if key is not None:
                a, b = (optimizer.binding.slots.find_name(param) for param in (first, param))
                what = f"{a!r} was saved with {key}={one.get(key)!r} and {b!r} with {other.get(key)!r}"
                raise ValueError(
                    f"{what}, and both are in group {i} here; strict=False takes the settings of the first"
                )
    return out
