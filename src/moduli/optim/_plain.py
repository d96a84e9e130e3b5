"""State as plain data: tensors, numbers, strings, lists and dictionaries, and back."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

_SIMPLE = (bool, int, float, complex, str, type(None))


def encode(value: Any, where: str) -> Any:
    """Plain data for a value; what it can't be made of is refused, with the place."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Generator):
        return {"__kind__": "generator", "device": str(value.device), "state": value.get_state()}
    if isinstance(value, deque):
        return {"__kind__": "deque", "maxlen": value.maxlen, "items": [encode(item, where) for item in value]}
    if isinstance(value, set | frozenset):
        return {"__kind__": "set", "items": [encode(item, where) for item in sorted(value)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"__kind__": type(value).__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, list | tuple):
        items = [encode(item, where) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise TypeError(f"{where}: a dictionary has the key {key!r}; saved state has keys that are strings")
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which can't be saved; keep tensors, numbers, strings, generators, and "
        "lists and dictionaries of those, or override _extra_pack and _extra_unpack"
    )


def decode(value: Any, device: torch.device | None) -> Any:
    """The value again; tensors are copies, on this device."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied if device is None or copied.device == device else copied.to(device)
    if isinstance(value, dict):
        kind = value.get("__kind__")
        if kind == "generator":
            generator = torch.Generator(value["device"])
            generator.set_state(value["state"].cpu())
            return generator
        if kind == "deque":
            return deque([decode(item, device) for item in value["items"]], maxlen=value["maxlen"])
        if kind == "set":
            return {decode(item, device) for item in value["items"]}
        if kind == "dtype":
            return getattr(torch, value["name"])
        if kind == "device":
            return torch.device(value["name"])
        return {key: decode(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if isinstance(value, tuple):
        return tuple(decode(item, device) for item in value)
    return value
