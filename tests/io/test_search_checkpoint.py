"""The file of a search and its journal: damage is refused or changes nothing about the result."""

import os
import random
import warnings

import pytest
import torch
from torch import nn

from moduli.evolve import search
from moduli.io import CheckpointError


def make_net():
    return nn.Linear(2, 1)


def initialise(module):
    with torch.no_grad():
        module.weight.fill_(1.0), module.bias.fill_(1.0)
    return module


def fitness(module):
    return (module(torch.ones(2)) - 3).square() + module.weight.square().sum()


def run_and_interrupt(path):
    """Interrupt a search in the middle of a generation, which leaves a state, and a journal with five values."""
    count = 0

    def failing(module):
        nonlocal count
        count += 1
        if count > 21:
            raise KeyboardInterrupt
        return fitness(module)

    search(initialise(make_net()), failing, population=8, budget=64, checkpoint=path)
    assert os.path.getsize(f"{path}.journal") == 5 * 28


def resume(path):
    module = initialise(make_net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = search(module, fitness, population=8, budget=64, checkpoint=path)
    return result.value, module.weight.tolist()


def test_flipped_bits_are_refused_or_do_not_change_the_result(tmp_path):
    path = tmp_path / "search"
    run_and_interrupt(path)
    files = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    expected = resume(path)
    assert expected == run_uninterrupted()
    rng, refused = random.Random(0), []
    for turn in range(60):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        name = "search.journal" if turn % 2 else "search"
        data = bytearray(files[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(data)
        try:
            assert resume(path) == expected
        except CheckpointError as error:
            refused.append(name in str(error))
    assert all(refused)
    assert len(refused) >= 40  # a damaged last record of the journal counts as cut off and is not refused


def run_uninterrupted():
    module = initialise(make_net())
    return search(module, fitness, population=8, budget=64).value, module.weight.tolist()


@pytest.mark.parametrize("cut", [1, 27, 28, 29, 139])
def test_complete_records_of_a_truncated_journal_are_used(cut, tmp_path):
    path = tmp_path / "search"
    run_and_interrupt(path)
    journal = tmp_path / "search.journal"
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert resume(path) == run_uninterrupted()


def test_search_creates_directories_and_leaves_no_temporary_files(tmp_path):
    path = tmp_path / "new" / "search"
    search(initialise(make_net()), fitness, population=8, budget=24, checkpoint=path)
    assert sorted(os.listdir(tmp_path / "new")) == ["search", "search.journal"]
