"""Members on the workers of a cluster move as they would here, also where a worker dies."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import moduli as mo
from moduli.particles import StructureError
from population.hosted_work import adam, error

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = torch.float64


@pytest.fixture(scope="module")
def executor():
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install moduli[ray]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"}},
        )
        yield mo.evolve.Ray(2)
        ray.shutdown()


def make(count=5):
    torch.manual_seed(0)

    def net():
        made = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
        made.register_buffer("number", torch.zeros(1, dtype=torch.uint8))
        return made

    pop = mo.Population.of(net, count)
    dict(pop.named_buffers())["number"].copy_(torch.arange(count)[:, None])
    return pop


def test_workers_together_do_what_one_process_does(executor):
    x, own = torch.randn(6, 3, dtype=DOUBLE), torch.randn(5, 6, 3, dtype=DOUBLE)
    pop, here = make(), make()
    with pop.host(executor, adam) as hosted:
        assert len(hosted) == 5
        opt = adam(here)
        for kill in (False, True, False):
            if kill:  # a worker that is gone is replaced, and its members go on from where they were
                import ray

                os.kill(ray.get(hosted._actors[1].__ray_call__.remote(lambda worker: os.getpid())), signal.SIGKILL)
            losses = hosted.step(error, x, steps=2)
            for _ in range(2):
                expected = opt.step(mo.closure(lambda: here.losses(error, x)))
            torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
            # Members 0 and 4 change places, over the two workers, with what the optimizer knows of them.
            hosted.copy(targets=[0, 4, 1], sources=torch.tensor([4, 0, 2]))
            state = opt.state_dict()
            order = torch.tensor([4, 2, 2, 3, 0])
            for rows in state["state"].values():
                for key, value in rows.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        rows[key] = value[order]
            here.load_state_dict({name: value[order] for name, value in here.state_dict().items()})
            opt.load_state_dict(state)
        found = hosted.collect()
        torch.testing.assert_close(found.matrix, here.matrix, rtol=1e-12, atol=1e-12)
        for (_, a), (_, b) in zip(found.named_buffers(), here.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(
                hosted.losses(error, own, in_dims=0), here.losses(error, own, in_dims=0), rtol=1e-12, atol=1e-12
            )
    assert torch.equal(pop.matrix, make().matrix)


def test_what_cannot_be_is_refused(executor):
    with pytest.raises(StructureError, match="without members"):
        make(0).host(executor)
    with make(3).host(executor) as hosted:
        with pytest.raises(ValueError, match="nothing says how members move"):
            hosted.step(error, torch.ones(6, 3, dtype=DOUBLE))
        with pytest.raises(StructureError, match="dimension 0 must be 3"):  # of which the rest would be left out
            hosted.losses(error, torch.ones(5, 6, 3, dtype=DOUBLE), in_dims=0)
        with pytest.raises(ValueError, match="one source for each"):
            hosted.copy([0, 1], [2])
        with pytest.raises(IndexError, match="from 0 to 2"):
            hosted.copy([0], [3])
