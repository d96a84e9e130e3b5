"""The file of a search and its journal: what was damaged is refused, and never a search with another result."""

import os
import random
import warnings

import pytest
import torch
from torch import nn

from moduli.evolve import search
from moduli.io import CheckpointError


def net():
    return nn.Linear(2, 1)


def start(module):
    with torch.no_grad():
        module.weight.fill_(1.0), module.bias.fill_(1.0)
    return module


def fitness(module):
    return (module(torch.ones(2)) - 3).square() + module.weight.square().sum()


def half_done(path):
    """A search that was ended in the middle of a generation: a state, and a journal with a few values."""
    count = 0

    def failing(module):
        nonlocal count
        count += 1
        if count > 21:
            raise KeyboardInterrupt
        return fitness(module)

    search(start(net()), failing, population=8, budget=64, checkpoint=path)
    assert os.path.getsize(f"{path}.journal") == 5 * 28


def go_on(path):
    module = start(net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = search(module, fitness, population=8, budget=64, checkpoint=path)
    return found.value, module.weight.tolist()


def test_flipped_bits_are_refused_or_change_nothing(tmp_path):
    path = tmp_path / "search"
    half_done(path)
    files = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    expected = go_on(path)
    assert expected == search_whole()
    rng, refused = random.Random(0), []
    for turn in range(60):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        name = "search.journal" if turn % 2 else "search"
        data = bytearray(files[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(data)
        try:
            assert go_on(path) == expected
        except CheckpointError as error:
            refused.append(name in str(error))
    assert all(refused)
    assert len(refused) >= 40  # of the journal, the last record may as well have been cut off


def search_whole():
    module = start(net())
    return search(module, fitness, population=8, budget=64).value, module.weight.tolist()


@pytest.mark.parametrize("cut", [1, 27, 28, 29, 139])
def test_a_journal_that_was_cut_off_is_read_as_far_as_it_goes(cut, tmp_path):
    path = tmp_path / "search"
    half_done(path)
    journal = tmp_path / "search.journal"
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert go_on(path) == search_whole()


def test_no_temporary_files_are_left_and_directories_are_made(tmp_path):
    path = tmp_path / "new" / "search"
    search(start(net()), fitness, population=8, budget=24, checkpoint=path)
    assert sorted(os.listdir(tmp_path / "new")) == ["search", "search.journal"]
