"""Nested values: every tensor in every container is mapped."""

from collections import deque

import torch

from moduli.layout import (
    map_tensors,
)


def test_tensors_inside_of_every_container_are_replaced():
    held = torch.ones(2)
    value = {"list": [held, 3], "deque": deque([held, (held, "text")], maxlen=5), "dict": {"inner": held}, "none": None}
    made = map_tensors(value, torch.neg, lambda other: f"<{other}>")
    assert [type(made[key]) for key in value] == [list, deque, dict, str]
    assert made["deque"].maxlen == 5
    assert type(made["deque"][1]) is tuple
    replaced = [made["list"][0], made["deque"][0], made["deque"][1][0], made["dict"]["inner"]]
    assert all(torch.equal(tensor, -held) for tensor in replaced)
    assert (made["list"][1], made["deque"][1][1], made["none"]) == ("<3>", "<text>", "<None>")
    assert map_tensors(value, torch.neg)["list"][1] == 3
    assert torch.equal(held, torch.ones(2))
    assert value["list"][0] is held
