"""`diff`: None exactly when fingerprints agree, and otherwise a difference with a path and a sentence."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moduli.layout import (
    Difference,
    diff,
    layout_of,
)
from strategies import edit, modules


@given(modules(), modules())
def test_diff_is_none_exactly_when_fingerprints_agree(left, right):
    for a, b in ((left, right), (right, left), (left, copy.deepcopy(left))):
        difference = diff(a, b)
        assert (difference is None) == (layout_of(a).fingerprint == layout_of(b).fingerprint)
        if difference is not None:
            assert repr(difference.path) in str(difference)
            assert difference.left != difference.right


@given(modules(), st.data())
def test_diff_reports_an_edit_exactly_when_the_fingerprint_changes(net, data):
    before = layout_of(net)
    edit(data, net)
    after = layout_of(net)
    assert (diff(before, after) is None) == (before.entries == after.entries or before.fingerprint == after.fingerprint)


def tied(*positions, count=3):
    net = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(count))
    for position in positions[1:]:
        net[position].weight = net[positions[0]].weight
    return net


@pytest.mark.parametrize(
    ("left", "right", "expected", "sentence"),
    [
        (
            nn.Linear(3, 2),
            nn.Linear(3, 2, bias=False),
            Difference("bias", "missing", (2,), None),
            "'bias' is missing on the right; on the left it has shape (2,)",
        ),
        (
            nn.Linear(3, 2, bias=False),
            nn.Linear(3, 2),
            Difference("bias", "missing", None, (2,)),
            "'bias' is missing on the left; on the right it has shape (2,)",
        ),
        (
            nn.Linear(3, 2),
            nn.Linear(4, 2),
            Difference("weight", "shape", (2, 3), (2, 4)),
            "'weight' has shape (2, 3) on the left and (2, 4) on the right",
        ),
        (
            nn.Linear(3, 2),
            nn.Linear(3, 2).double(),
            Difference("weight", "dtype", torch.float32, torch.float64),
            "'weight' has dtype torch.float32 on the left and torch.float64 on the right",
        ),
        (
            tied(0, 2),
            tied(),
            Difference("2.weight", "tie", "0.weight", None),
            "'2.weight' is tied to '0.weight' on the left and a parameter of its own on the right",
        ),
        (
            tied(0, 2),
            tied(1, 2),
            Difference("2.weight", "tie", "0.weight", "1.weight"),
            "'2.weight' is tied to '0.weight' on the left and tied to '1.weight' on the right",
        ),
        (
            {"a": torch.zeros(1), "b": torch.zeros(1)},
            {"b": torch.zeros(1), "a": torch.zeros(1)},
            Difference("a", "order", 0, 1),
            "'a' has place 0 on the left and place 1 on the right",
        ),
    ],
)
def test_differences_have_a_path_a_kind_and_a_sentence(left, right, expected, sentence):
    assert diff(left, right) == expected
    assert diff(layout_of(left), layout_of(right)) == expected
    assert str(expected) == sentence


def test_the_order_of_tied_names_alone_is_a_difference():
    w = torch.zeros(1)
    assert diff({"a": w, "b": w}, {"b": w, "a": w}) == Difference("a", "order", 0, 1)
