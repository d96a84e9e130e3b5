"""Encoding of an optimizer's state as plain data, which `torch.load(weights_only=True)` reads, and decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from .._encoding import KINDS, Decoder, Medium, Path, TaggedKind, encode


class MemberValues(dict[int, Any]):
    """Values of members that can't be stacked, by member number; a member without a value is missing."""


MEMBERS: Final = "$members"
_MEMBERS: Final = TaggedKind(
    MEMBERS,
    lambda value, path, medium: {i: encode(item, path, medium) for i, item in value.items()},
    lambda body, to: MemberValues((i, to.decode(item)) for i, item in body.items()),
)


class StateMedium(Medium):
    """State dicts: plain data with the tensors in place."""

    leaves = frozenset({str, bool, int, float, complex, type(None)})
    keys = frozenset({str, int})
    keeps_tuples = True
    kinds = {**KINDS, MemberValues: _MEMBERS}

    def put(self, tensor: Tensor, path: Path) -> Tensor:
        """Return the tensor itself, without its graph."""
        return tensor.detach()

    def encode_other(self, value: Any, path: Path) -> Any:
        """Encode a value of a derived class as one of its base class."""
        bases: tuple[Any, ...] = (int, float, tuple, list, dict)
        for base in bases:
            if isinstance(value, base):
                return encode(base(value), path, self)
        kind = type(value).__name__
        raise self.make_error(path, f"is a {kind}, which can't be saved; see _extra_pack and _extra_unpack")

    def make_error(self, path: Path, text: str) -> Exception:
        """Return a TypeError that names the path of the value."""
        return TypeError(f"{'.'.join(map(str, path))} {text}")


_MEDIUM: Final = StateMedium()


def encode_value(value: Any, where: str) -> Any:
    """Return plain data for a value; raise TypeError, with its path, if there is none."""
    return encode(value, (where,), _MEDIUM)


def encode_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a row of state as plain data, under the same keys."""
    for key in row:
        if not isinstance(key, str | int):
            raise TypeError(f"{where}: the key {key!r} is no string, and can't be saved")
    return {key: encode(value, (where, key), _MEDIUM) for key, value in row.items()}


def decode_value(value: Any, device: torch.device | None, where: str) -> Any:
    """Return the value of plain data; its tensors are copies on this device (None: on the device that they are on).

    Args:
        value: The plain data.
        device: The device.
        where: The part of the saved state, for errors.
    """

    def copy(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        return copied if device is None or copied.device == device else copied.to(device)

    try:
        return Decoder(copy, StateMedium.kinds).decode(value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the saved {where} stands for no value: {error}") from error


def upgrade_value(value: Any) -> Any:
    """Return plain data of version 0.2 (format 1) in the current encoding."""
    if isinstance(value, list | tuple):
        return type(value)(map(upgrade_value, value))
    if not isinstance(value, dict):
        return value
    kind = value.get("__kind__")
    if kind == "generator":
        return {"$generator": [value["device"], value["state"]]}
    if kind == "deque":
        return {"$deque": [value["maxlen"], upgrade_value(value["items"])]}
    items = {key: upgrade_value(item) for key, item in (value["items"] if kind == "members" else value).items()}
    if kind == "members":
        return {MEMBERS: items}
    marked = any(isinstance(key, str) and key.startswith("$") for key in items)
    return {"$dict": [list(pair) for pair in items.items()]} if marked else items
