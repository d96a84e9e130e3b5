"""Members on the workers of a cluster step as in one process, also after a worker died."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import moduli as mo
from moduli.particles import StructureError
from population.hosted_work import adam, error, hang, sphere

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
        module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
        module.register_buffer("number", torch.zeros(1, dtype=torch.uint8))
        return module

    pop = mo.Population.of(net, count)
    dict(pop.named_buffers())["number"].copy_(torch.arange(count)[:, None])
    return pop


def test_workers_together_compute_what_one_process_computes(executor):
    x, own = torch.randn(6, 3, dtype=DOUBLE), torch.randn(5, 6, 3, dtype=DOUBLE)
    pop, here = make(), make()
    with pop.host(executor, adam) as hosted:
        assert len(hosted) == 5
        opt = adam(here)
        for kill in (False, True, False):
            if kill:  # a worker that died is replaced, and its members continue from their last state
                import ray

                os.kill(ray.get(hosted._actors[1].__ray_call__.remote(lambda worker: os.getpid())), signal.SIGKILL)
            losses = hosted.step(error, x, steps=2)
            for _ in range(2):
                expected = opt.step(mo.closure(lambda: here.losses(error, x)))
            torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
            # Members 0 and 4, on different workers, are exchanged with their optimizer state.
            hosted.copy(targets=[0, 4, 1], sources=torch.tensor([4, 0, 2]))
            state = opt.state_dict()
            order = torch.tensor([4, 2, 2, 3, 0])
            for rows in state["state"].values():
                for key, value in rows.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        rows[key] = value[order]
            here.load_state_dict({name: value[order] for name, value in here.state_dict().items()})
            opt.load_state_dict(state)
        collected = hosted.collect()
        torch.testing.assert_close(collected.matrix, here.matrix, rtol=1e-12, atol=1e-12)
        for (_, a), (_, b) in zip(collected.named_buffers(), here.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(
                hosted.losses(error, own, in_dims=0), here.losses(error, own, in_dims=0), rtol=1e-12, atol=1e-12
            )
    assert torch.equal(pop.matrix, make().matrix)


def test_wrong_members_and_arguments_are_refused(executor):
    with pytest.raises(StructureError, match="without members"):
        make(0).host(executor)
    with make(3).host(executor) as hosted:
        with pytest.raises(ValueError, match="nothing says how members move"):
            hosted.step(error, torch.ones(6, 3, dtype=DOUBLE))
        with pytest.raises(StructureError, match="dimension 0 must be 3"):  # more slices than members
            hosted.losses(error, torch.ones(5, 6, 3, dtype=DOUBLE), in_dims=0)
        with pytest.raises(ValueError, match="one source for each"):
            hosted.copy([0, 1], [2])
        with pytest.raises(IndexError, match="from 0 to 2"):
            hosted.copy([0], [3])


def test_idle_workers_of_a_search_make_room(executor):
    x, fitness = torch.ones(6, 3, dtype=DOUBLE), torch.tensor([1.0, 4.0, 9.0], dtype=DOUBLE)
    rows = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(executor.map(sphere, rows), fitness)  # from here its workers occupy all processors
    pop = make(4)
    with pop.host(executor, adam) as hosted:
        assert len(hosted._actors) == 2
        torch.testing.assert_close(hosted.losses(error, x), pop.losses(error, x).detach(), rtol=1e-12, atol=1e-12)
        # The workers of the members occupy all processors, so others can't start.
        with pytest.raises(RuntimeError, match="room for none of 2 actors: it did not start them within 2.0 seconds"):
            pop.host(mo.evolve.Ray(2, start_timeout=2.0))
    assert torch.equal(executor.map(sphere, rows), fitness)
    executor.close()


def test_a_worker_that_hangs_is_an_error_and_leaves_its_members(executor):
    limited = mo.evolve.Ray(2, timeout=0.5, retries=0)
    x = torch.ones(6, 3, dtype=DOUBLE)
    pop = make(4)
    with pop.host(limited, adam) as hosted:
        with pytest.raises(
            RuntimeError, match=r"worker 0 had no answer within 1.0 seconds .*members 0 to 1 are as they"
        ):
            hosted.losses(hang, x)
        limited.timeout = 100.0
        torch.testing.assert_close(hosted.losses(error, x), pop.losses(error, x).detach(), rtol=1e-12, atol=1e-12)


LOST = """
import torch, ray, moduli as mo
from ray.cluster_utils import Cluster
from population.hosted_work import adam, error
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=1)
ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
executor = mo.evolve.Ray(2)
with mo.Population.of(torch.nn.Linear, 4, 3, 2).host(executor, adam) as hosted:
    hosted.step(error, torch.ones(6, 3))
    executor.start_timeout = 5.0
    cluster.remove_node(node, allow_graceful=False)
    hosted.step(error, torch.ones(6, 3))
"""


def test_a_lost_node_is_an_error():
    pytest.importorskip("ray", reason="Ray is an extra: pip install moduli[ray]")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", LOST], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "and no other could take its members" in done.stderr, done.stderr[-3000:]
    assert "within 5.0 seconds" in done.stderr
