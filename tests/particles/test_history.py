"""The history of a species: its value, and the attribute `history` of a particle."""

import time

import pytest
import torch
from torch import nn

import moduli as mo
from moduli.particles import EditHistory, Event, adopt, history, species


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)


def test_history_has_numbers_sentences_names_and_times():
    net = Net()
    assert net.history == ()
    assert str(net.history) == "version 0: no edits"
    start = time.time()
    net.head = nn.Linear(3, 1)
    net.body.bias = None
    del net.head
    edits = net.history
    assert isinstance(edits, EditHistory)
    assert [edit.number for edit in edits] == [1, 2, 3]
    assert [edit.where for edit in edits] == [("head",), ("body.bias",), ("head",)]
    assert [f"version {edit.number}: {edit.what}" for edit in edits] == history(net)
    assert all(start <= edit.when <= time.time() for edit in edits)
    assert edits.version == species(net).version == 3
    lines = str(edits).splitlines()
    assert lines[0].split() == ["version", "when", "where", "what"]
    assert lines[2].split()[0] == "2"
    assert lines[2].endswith("'body.bias' became None")
    assert repr(edits) == str(edits)


def test_relatives_have_one_history():
    net = Net()
    twin = net.clone()
    net.extra = nn.Parameter(torch.zeros(1))
    # Reading the history does not make the relative follow.
    assert twin.history == net.history != ()
    assert not hasattr(twin, "extra")
    assert (2 * net).history == net.history
    assert net.body.weight.shape == (3, 3)


def test_events_with_equal_sentences_are_equal():
    event = Event(1, "'w' was deleted", frozenset(), frozenset({"w"}))
    later = event._replace(when=3.0, where=("w",))
    assert event == later
    assert hash(event) == hash(later)
    assert event != event._replace(number=2)
    assert event != tuple(event)
    assert event.what == event.sentence


@pytest.mark.parametrize(
    "value",
    [nn.Linear(2, 2), nn.Parameter(torch.zeros(2)), [], "text", mo.tensor([1.0], c=["r"]), nn.Buffer(torch.zeros(1))],
    ids=lambda value: type(value).__name__,
)
def test_an_attribute_called_history_takes_precedence(value):
    class Own(mo.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))
            self.history = value

    for net in (Own(), Own().clone(), 2 * Own()):
        assert not isinstance(net.history, EditHistory)
        assert type(net.history) is type(value)
    net = Own()
    twin = net.clone()
    net.other = nn.Parameter(torch.zeros(1))
    assert type(twin.touch().history) is type(value)
    del net.history
    assert isinstance(net.history, EditHistory)


def test_a_method_or_property_called_history_takes_precedence():
    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def history(self):
            return "mine"

    class Property(mo.Module):
        @property
        def history(self):
            return "mine"

    assert adopt(Recorder()).history() == "mine"
    assert adopt(Recorder()).clone().history() == "mine"
    assert Property().history == "mine"
    assert isinstance(adopt(nn.Linear(2, 1)).history, EditHistory)


def test_buffers_parameters_and_modules_may_be_called_history():
    net = Net()
    net.register_buffer("history", torch.zeros(2))
    assert net.history.shape == (2,)
    net = Net()
    net.register_parameter("history", nn.Parameter(torch.zeros(3)))
    assert net.history.shape == (3,)
    net = Net()
    net.add_module("history", nn.ReLU())
    assert isinstance(net.history, nn.ReLU)
