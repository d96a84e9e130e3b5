"""`map_tensors`: every tensor in every nested container is mapped."""

from collections import deque

import torch

from moduli.layout import (
    map_tensors,
)


def test_tensors_inside_of_every_container_are_replaced():
    tensor = torch.ones(2)
    value = {
        "list": [tensor, 3],
        "deque": deque([tensor, (tensor, "text")], maxlen=5),
        "dict": {"inner": tensor},
        "none": None,
    }
    mapped = map_tensors(value, torch.neg, lambda other: f"<{other}>")
    assert [type(mapped[key]) for key in value] == [list, deque, dict, str]
    assert mapped["deque"].maxlen == 5
    assert type(mapped["deque"][1]) is tuple
    replaced = [mapped["list"][0], mapped["deque"][0], mapped["deque"][1][0], mapped["dict"]["inner"]]
    assert all(torch.equal(each, -tensor) for each in replaced)
    assert (mapped["list"][1], mapped["deque"][1][1], mapped["none"]) == ("<3>", "<text>", "<None>")
    assert map_tensors(value, torch.neg)["list"][1] == 3
    assert torch.equal(tensor, torch.ones(2))
    assert value["list"][0] is tensor
