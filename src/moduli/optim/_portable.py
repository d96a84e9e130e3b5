"""Saved state by position of the parameters, in the form that tools of torch read and reshard.

`torch.distributed.checkpoint` and FSDP1 read the entries of "state", by position of the parameter, and the settings of groups.
Tensors with the shape of their parameter are saved there, so that they are resharded like the parameter; all other state of links
is in one entry of the first group, as bytes.

Checkpoints are read into the existing tensors of an optimizer. An optimizer without state makes a first step with zero gradients,
which does not move the parameters. Chains that evaluate a closure can't make such a step, so all of their state is saved as bytes.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import make_whole, map_tensors
from ._shown_state import PLACEHOLDER
from .forms.shard_state import join_rows

if TYPE_CHECKING:
    from .optimizer import Optimizer

REST = PLACEHOLDER  # the entry of the first group with the rest of the state
SENT = "sent"  # in the rest: the names of the tensors that torch's tools save, by parameter
NAMES = "param_names"
TOOL = "torch.distributed.checkpoint.state_dict"


def wants_portable(optimizer: Optimizer) -> bool:
    """Return whether tools of torch may read the state: there are processes, or its checkpoints were imported."""
    if optimizer.population is not None:
        return False
    distributed = torch.distributed
    return TOOL in sys.modules or (distributed.is_available() and distributed.is_initialized())


def make_portable(optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state by positions.

    Args:
        optimizer: The optimizer.
        packed: Its state by name.
    """
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
        _fill_missing(state, params)
    buffer = io.BytesIO()
    torch.save({**packed, "state": rest, SENT: sent}, buffer)
    groups = [
        {**group, "params": [positions[name] for name in group["params"]], NAMES: list(group["params"])}
        for group in packed["param_groups"]
    ]
    groups[0][REST] = buffer.getvalue()
    return {"state": state, "param_groups": groups}


def _fill_missing(state: dict[int, dict[str, Any]], params: Sequence[Tensor]) -> None:
    """Add a tensor for each trained parameter that has none in the state; torch would raise for it."""
    for i, param in enumerate(params):
        if param.requires_grad:
            state.setdefault(i, {REST: torch.zeros(1, device=param.device)})


def read_portable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state by name, from one by positions or by the names in torch's checkpoints."""
    groups = given["param_groups"]
    rest = next(group[REST] for group in groups if REST in group)
    saved: dict[str, Any] = torch.load(io.BytesIO(rest), weights_only=True)
    names = list(saved["shapes"])
    keys = [key for group in groups for key in group["params"]]

    def find_name(key: Any) -> Any:
        if isinstance(key, int):
            return names[key]
        return key if key in saved["shapes"] or len(keys) != len(names) else names[keys.index(key)]

    state = {name: dict(row) for name, row in saved["state"].items()}
    for key, row in given["state"].items():
        state.setdefault(find_name(key), {}).update((field, value) for field, value in row.items() if field != REST)
    _check_complete(state, saved.pop(SENT, {}))
    settings = [{key: value for key, value in group.items() if key not in (REST, NAMES)} for group in groups]
    named_groups = [{**group, "params": [find_name(key) for key in group["params"]]} for group in settings]
    return {**saved, "state": state, "param_groups": named_groups}


def _check_complete(state: Mapping[str, Mapping[str, Any]], sent: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError if the state lacks tensors that were sent to torch's tools."""
    lost = [f"{name}: {field}" for name, row in sent.items() for field in row if field not in state.get(name, {})]
    if lost:
        raise ValueError(f"the state has no tensor for {', '.join(lost[:5])}; make a step before it is loaded")
