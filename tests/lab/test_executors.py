"""Races whose runs are computed by an executor: of `concurrent.futures`, or Ray."""

import concurrent.futures
import json
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest

from lab import rogues
from moduli import lab
from moduli.evolve import Ray

ROOT = Path(__file__).resolve().parents[2]
FIELD = ["Adam | LR(0.05)", "torch.SGD(lr=0.001)"]
RACES = {
    "as written": {"problems": ["rosenbrock", "noisy-20"], "seeds": 2, "budget": 40},
    "tuned": {"problems": ["rosenbrock"], "seeds": 2, "budget": 40, "tune": 4},
}


def drop_times(results):
    return [{k: v for k, v in run.items() if k not in ("seconds", "history")} for run in results.runs]


@pytest.fixture(scope="module")
def expected():
    return {name: drop_times(lab.race(contenders=FIELD, workers=0, **how)) for name, how in RACES.items()}


@pytest.fixture(scope="module")
def pool():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        yield executor


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install moduli[ray]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        environment = {"env_vars": {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"}}
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            runtime_env=environment,
        )  # fmt: skip
        yield Ray(2)
        ray.shutdown()


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("kind", ["pool", "cluster"])
def test_races_with_an_executor_equal_races_in_this_process(name, kind, expected, request):
    executor = request.getfixturevalue(kind)
    assert drop_times(lab.race(contenders=FIELD, executor=executor, **RACES[name])) == expected[name]


def test_a_killed_process_of_ray_is_reported_as_crashed(cluster):
    results = lab.race(["sphere-10"], [rogues.tame, rogues.dying], seeds=1, budget=60, executor=cluster)
    rows = {run["contender"]: run for run in results.runs}
    assert rows["dying"]["reason"] == lab.RunReason.CRASHED
    assert rows["tame"]["reason"] != lab.RunReason.CRASHED


def test_a_killed_process_of_an_executor_is_reported_as_crashed():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        results = lab.race(["sphere-10"], [rogues.tame, rogues.dying], seeds=1, budget=60, executor=executor)
    rows = {run["contender"]: run for run in results.runs}
    assert rows["dying"]["reason"] == lab.RunReason.CRASHED
    assert "BrokenProcessPool" in rows["dying"]["detail"]
    json.dumps(results.to_json(), allow_nan=False)


def test_executors_of_threads_are_refused():
    with concurrent.futures.ThreadPoolExecutor(1) as executor, pytest.raises(TypeError, match="runs need processes"):
        lab.race(["sphere-10"], ["LR(0.1)"], seeds=1, budget=5, executor=executor)
    with pytest.raises(TypeError, match="executor is a int"):
        lab.race(["sphere-10"], ["LR(0.1)"], seeds=1, budget=5, executor=2)
