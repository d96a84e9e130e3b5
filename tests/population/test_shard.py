"""Members over two and four processes step as in one, and their checkpoints load in any number of processes."""

import copy
import itertools
import json

import pytest
import torch

from launching import launch
from population import shard_worker as worker


@pytest.fixture(scope="module")
def alone():
    """Return for each chain the losses, members and checkpoint of one process, and the members after two more steps."""
    runs = {}
    for name in worker.CHAINS:
        pop = worker.population()
        losses, opt = worker.train(pop, name)
        matrix = pop.matrix.clone()
        saved = {
            "population": {key: value.clone() for key, value in pop.state_dict().items()},
            "optimizer": copy.deepcopy(opt.state_dict()),
            "random": torch.get_rng_state(),
        }
        for _ in range(2):
            opt.step(worker.closure(pop))
        runs[name] = {"losses": torch.stack(losses), "matrix": matrix, "saved": saved, "later": pop.matrix.clone()}
    return runs


def run(size, tmp_path, saved):
    torch.save({name: each["saved"] for name, each in saved.items()}, tmp_path / "saved.pt")
    files = [tmp_path / f"out{rank}.pt" for rank in range(size)]
    launch("population/shard_worker.py", size, lambda rank: (tmp_path / "store", files[rank], tmp_path / "saved.pt"))
    return [torch.load(file, weights_only=True) for file in files]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("size", [2, 4])
def test_processes_together_compute_what_one_does(size, tmp_path, alone):
    results = run(size, tmp_path, alone)
    for name, expected in alone.items():
        for each in results:
            for key in ("losses", "matrix"):
                torch.testing.assert_close(each[name][key], expected[key], rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")
            torch.testing.assert_close(each[name]["resumed"], expected["later"], rtol=1e-10, atol=1e-12, msg=name)
        assert sum(each[name]["here"] for each in results) == worker.COUNT
        # One process loads the checkpoint of several.
        pop = worker.population()
        worker.train(pop, name, steps=2, saved=results[0][name]["state"])
        torch.testing.assert_close(pop.matrix, expected["later"], rtol=1e-10, atol=1e-12, msg=name)
    # As documented, gradient links send nothing; a swarm sends fitness and one row; population-based training sends fitness,
    # rates, and a quarter of the rows (parameters, buffers and two moments).
    most, parameters, buffers = -(-worker.COUNT // size), 34, 9
    for each in results:
        assert [each[name]["sent"] for name in ("adam", "rates", "search")] == [0, 0, 0]
        # A search runs in every process: its first members are exchanged once, then fitness alone.
        for name in ("evolution", "genetic", "entropy"):
            assert each[name]["sent"] <= most * parameters + 2 * worker.STEPS * most
        assert each["swarm"]["sent"] == worker.STEPS * (most + parameters)
        assert each["training"]["sent"] == worker.STEPS // 2 * (2 * most + 3 * parameters + buffers)
    drawn = [each.matrix for each in worker.vary(worker.population())]
    for each in results:
        for one, many in zip(drawn, each["drawn"], strict=True):
            torch.testing.assert_close(many, one, rtol=1e-10, atol=1e-12)
        assert each["numbers"].flatten().tolist() == list(reversed(range(worker.COUNT)))
        errors = each["refused"]
        assert all("other processes hold some" in errors[key] for key in ("choice", "centre", "apart"))
        assert "pop.shard(mesh)" in errors["mean"]
        assert "lr has 5 numbers" in errors["five"]
        assert "already" in errors["twice"]
        assert "at least one to each" in errors["few"]
        assert "one dimension" in errors["square"]
        assert "the state is of 3 members" in errors["members"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_every_link_on_two_processes_is_as_on_one(tmp_path, pytestconfig):
    every = 1 if pytestconfig.getoption("--all") else 12
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    launch("population/law_worker.py", 2, lambda rank: (tmp_path / "store", files[rank], every))
    for file in files:
        results = json.loads(file.read_text())
        assert not results["failed"]
        assert len(results["passed"]) > 200 / every


@pytest.mark.parametrize("width", [4, 7])
def test_random_words_are_those_of_one_process(width):
    from types import SimpleNamespace

    from moduli.m.population._pso import Draws

    def drawn(shard, count):
        draws = Draws(torch.zeros(count, width), torch.Generator().manual_seed(3), shard)
        return draws.words(), draws.words()

    whole = drawn(None, 7)
    starts = [0, 3, 5, 7]
    parts = [drawn(SimpleNamespace(start=a, stop=b, total=7), b - a) for a, b in itertools.pairwise(starts)]
    for each, *split in zip(whole, *parts, strict=True):
        assert torch.equal(each, torch.cat(split))
    assert not torch.equal(*whole)
