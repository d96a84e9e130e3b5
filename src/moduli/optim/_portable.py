"""Saved state by position of the parameters, in the form that tools of torch take apart and reshard.

Of an optimizer's state, `torch.distributed.checkpoint` and FSDP1 read the entries of "state" by position of the parameter, and the
settings of groups. Tensors with the shape of their parameter are there, so that they are resharded like it; all other state of
links is in one entry of the first group, as bytes.

Checkpoints are read into the existing tensors of an optimizer. An optimizer without any makes a first step with zero gradients,
which moves nothing. Chains that evaluate a closure can't be stepped so: all of their state is bytes.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import make_whole, map_tensors
from ._shown_state import PLACEHOLDER
from .forms.shard_state import join_rows

if TYPE_CHECKING:
    from .optimizer import Optimizer

REST = PLACEHOLDER
SENT = "sent"  # the tensors passed to torch's tools, by parameter
NAMES = "param_names"
TOOL = "torch.distributed.checkpoint.state_dict"


def wants_portable(optimizer: Optimizer) -> bool:
    """Return whether tools of torch may read the state: there are processes, or its checkpoints were imported."""
    if optimizer.population is not None:
        return False
    distributed = torch.distributed
    return TOOL in sys.modules or (distributed.is_available() and distributed.is_initialized())


def make_portable(optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state by positions."""
    params = optimizer.list_params()
    positions = {name: i for i, name in enumerate(packed["shapes"])}
    state: dict[int, dict[str, Any]] = {}
    rest: dict[str, dict[str, Any]] = {}
    sent: dict[str, dict[str, Any]] = {}
    flat = optimizer.shards is not None and optimizer.shards.flat
    resharded = flat or not optimizer._evaluated
    for name, row in packed["state"].items():
        i = positions.get(name)
        for key, value in row.items():
            if resharded and i is not None and isinstance(value, Tensor) and value.shape == params[i].shape:
                state.setdefault(i, {})[key] = value
                sent.setdefault(name, {})[key] = True
            else:
                rest.setdefault(name, {})[key] = map_tensors(value, make_whole)
    if optimizer.shards is not None and flat:
        rest, sent = join_rows(rest, optimizer.shards.group), {}  # each process gets the rows of its local shards
    else:
        for i, param in enumerate(params):
            if param.requires_grad:  # torch raises for a parameter without any tensor
                state.setdefault(i, {REST: torch.zeros(1, device=param.device)})
    buffer = io.BytesIO()
    torch.save({**packed, "state": rest, SENT: sent}, buffer)
    groups = [
        {**group, "params": [positions[name] for name in group["params"]], NAMES: list(group["params"])}
        for group in packed["param_groups"]
    ]
    groups[0][REST] = buffer.getvalue()
    return {"state": state, "param_groups": groups}


def read_portable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state by name, from one by positions or by the names in torch's checkpoints."""
    groups = given["param_groups"]
    carried = next(group[REST] for group in groups if REST in group)
    saved: dict[str, Any] = torch.load(io.BytesIO(carried), weights_only=True)
    names = list(saved["shapes"])
    listed = [key for group in groups for key in group["params"]]

    def find(key: Any) -> Any:
        if isinstance(key, int):
            return names[key]
        return key if key in saved["shapes"] or len(listed) != len(names) else names[listed.index(key)]

    state = {name: dict(row) for name, row in saved["state"].items()}
    for key, row in given["state"].items():
        state.setdefault(find(key), {}).update((field, value) for field, value in row.items() if field != REST)
    sent = saved.pop(SENT, {})
    lost = [f"{name}: {field}" for name, row in sent.items() for field in row if field not in state.get(name, {})]
    if lost:
        raise ValueError(f"the state has no tensor for {', '.join(lost[:5])}; make a step before it is loaded")
    stripped = [{key: value for key, value in group.items() if key not in (REST, NAMES)} for group in groups]
    read = [{**group, "params": [find(key) for key in group["params"]]} for group in stripped]
    return {**saved, "state": state, "param_groups": read}
