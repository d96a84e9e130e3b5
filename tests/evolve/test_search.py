"""`search` over modules: methods, budgets, errors, interruptions and checkpoints."""

import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from evolve.work import bowl
from moduli.evolve import EvaluationError, EvaluationWarning, Pool, Reason, SearchResult, search
from moduli.evolve._pool import _await_exit_code
from moduli.evolve._search import METHODS, choose_method

ROOT = Path(__file__).resolve().parents[2]


def net():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_improves_a_module(method):
    model = net()
    before = float(bowl(model).detach())
    result = search(model, bowl, method=method, budget=400)
    assert isinstance(result, SearchResult)
    assert result.value < before
    assert result.value == pytest.approx(float(bowl(model).detach()), rel=1e-4, abs=1e-9)
    assert 300 < result.evaluations <= 400 or result.success or result.reason is Reason.CONDITION
    assert len(result.history) == result.steps
    assert all(torch.equal(v, model.get_parameter(k)) for k, v in result.x.items())


def test_only_chosen_parameters_move():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = search(model, lambda m: m(torch.ones(4, 2)).square().sum(), "2.*", budget=100)
    assert set(result.x) == {"2.weight", "2.bias"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("2.")
    assert set(search(model, lambda m: m(torch.ones(4, 2)).sum(), ["0.bias", "2.b*"], budget=20).x) == {
        "0.bias",
        "2.bias",
    }


def test_search_over_ties_mixed_dtypes_and_frozen_parameters():
    model = nn.ModuleDict(
        {"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 1).double()}
    )
    model["b"].weight = model["a"].weight
    model["a"].weight.requires_grad_(False)
    result = search(
        model, lambda m: (m["b"].weight - 1).square().sum() + m["c"].bias.square().sum(), budget=600, method="snes"
    )
    assert model["b"].weight is model["a"].weight
    assert result.value < 1e-2
    assert result.x["c.bias"].dtype == torch.float64
    assert result.x["a.weight"].dtype == torch.float32


def test_a_module_of_one_number_is_searched_over():
    model = nn.Module()
    model.x = nn.Parameter(torch.tensor(3.0))
    result = search(model, lambda m: m.x.square(), budget=200)
    assert result.x["x"].shape == ()
    assert result.value < 1e-3


def test_strided_parameters_are_searched_over_like_others():
    class Strided(nn.Module):
        def __init__(self, strided):
            super().__init__()
            start = torch.linspace(-1, 1, 6).view(2, 3)
            self.w = nn.Parameter(start.t().contiguous().t() if strided else start)

    a, b = Strided(True), Strided(False)
    assert not a.w.is_contiguous()
    fitness = lambda m: (m.w - torch.arange(6.0).view(2, 3)).square().sum()  # noqa: E731
    for method in ("openes", "cmaes", "de"):
        results = [search(each, fitness, budget=130, method=method) for each in (a, b)]
        assert results[0].history == pytest.approx(results[1].history, rel=1e-6)
        assert torch.equal(a.w, b.w)
    assert not a.w.is_contiguous()


def test_the_result_is_not_written_to_when_the_search_continues():
    model = nn.Linear(400, 400)
    result = search(model, lambda m: m(torch.ones(400)).square().mean(), method="openes", population=60, budget=60)
    values = {name: value.clone() for name, value in result.x.items()}
    for _ in range(2):
        result.search.tell(torch.arange(60.0) - 1e6 * result.search.generation)
    assert all(torch.equal(values[name], result.x[name]) for name in values)


def test_vectorised_is_the_loop():
    x = torch.linspace(-1, 1, 8)[:, None].expand(8, 2)
    fitness = lambda model: (model(x) - x.sum(1, keepdim=True)).square().mean()  # noqa: E731
    a, b = net(), net()
    loop = search(a, fitness, budget=200, method="de")
    together = search(b, fitness, budget=200, method="de", vectorised=True)
    assert loop.history == pytest.approx(together.history, rel=1e-4, abs=1e-9)
    with pytest.raises(ValueError, match="leave executor out"):
        search(a, fitness, vectorised=True, executor=Pool(1, start="fork"))


def test_a_pool_gives_the_same_search():
    a, b = net(), net()
    with Pool(2, start="fork") as pool:
        pooled = search(b, bowl, budget=60, executor=pool)
    assert search(a, bowl, budget=60).history == pooled.history
    assert torch.equal(a.weight, b.weight)


def test_low_rank_noise_takes_the_shapes_of_the_module():
    model = nn.Linear(20, 20)
    goal = torch.ones(20)
    result = search(
        model, lambda m: (m(goal) - 1).square().mean(), method="openes", rank=2, budget=2000, lr=0.05, sigma=0.05
    )
    assert result.value < 0.1 * result.history[0]


def test_wrong_arguments_are_refused_and_nothing_moves():
    model = net()
    before = model.weight.clone()
    for options, error in [
        ({"over": "head.*"}, "no parameter called 'head.*'; there are weight, bias"),
        ({"method": "magic"}, "method='magic' is unknown; there are auto, pso"),
    ]:
        with pytest.raises(ValueError, match=error):
            search(model, bowl, **options)
    with pytest.raises(TypeError, match="complex64"):
        search(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), bowl)
    with pytest.raises(ValueError, match="no elements"):
        search(nn.ParameterList([torch.zeros(0)]), bowl)
    with pytest.raises(EvaluationError, match="NameError"):
        search(model, lambda m: nothing)  # noqa: F821
    assert torch.equal(model.weight, before)


def test_callbacks_and_targets_end_a_search():
    assert search(net(), bowl, target=1e-3, budget=10**6).reason is Reason.TARGET
    seen = []
    result = search(net(), bowl, budget=10**6, callback=lambda s: seen.append(s.generation) or len(seen) == 3)
    assert result.reason is Reason.CALLBACK
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("method", ["cmaes", "shade", "pso", "openes", "bipop"])
@pytest.mark.parametrize("when", [1, 9, 30, 44])
def test_ctrl_c_and_resume_is_uninterrupted(method, when, tmp_path):
    calls, path = [], tmp_path / "run.safetensors"

    def fitness(model):
        calls.append(1)
        if len(calls) == when:
            raise KeyboardInterrupt
        return bowl(model) + 0.1 * torch.rand(())

    options = {"method": method, "population": 8, "budget": 48, "checkpoint": path}
    first = search(net(), fitness, **options)
    assert first.reason is Reason.INTERRUPTED
    assert first.success is False
    evaluated = (when - 1) % 8
    calls_before = len(calls)
    if evaluated:
        with pytest.warns(EvaluationWarning, match=f"goes on with {evaluated} of 8 members known"):
            second = search(net(), fitness, **options)
    else:
        second = search(net(), fitness, **options)
    # Only the interrupted member is evaluated a second time.
    assert len(calls) - calls_before == 48 - (when - 1)
    plain = search(net(), lambda m: bowl(m) + 0.1 * torch.rand(()), **{**options, "checkpoint": None})
    assert second.history == plain.history
    assert all(torch.equal(plain.x[k], second.x[k]) for k in plain.x)
    again = search(net(), lambda m: pytest.fail("nothing is left to evaluate"), **options)
    assert again.history == plain.history


def test_checkpoints_of_other_searches_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    search(net(), bowl, budget=20, checkpoint=path)
    with pytest.raises(ValueError, match="holds a search with method cmaes; this one has de"):
        search(net(), bowl, budget=20, checkpoint=path, method="de")
    with pytest.raises(ValueError, match="holds a search with names"):
        search(net(), bowl, "bias", budget=20, checkpoint=path)
    for settings, words in (
        ({"seed": 2}, "seed 0.0; this one has 2.0"),
        ({"sigma": 3}, "sigma none; this one has 3.0"),
        ({"bounds": (-1, torch.ones(3))}, "bounds none; this one has"),
    ):
        with pytest.raises(ValueError, match=f"holds a search with {words}"):
            search(net(), bowl, budget=20, checkpoint=path, **settings)
    bounded = tmp_path / "bounded.safetensors"
    search(net(), bowl, budget=20, checkpoint=bounded, bounds=([-2, -2, -2], 2), target=0.0)
    search(net(), bowl, budget=40, checkpoint=bounded, bounds=(torch.full((3,), -2), 2.0), patience=9, tol=0.0)
    with pytest.raises(ValueError, match="holds a search with bounds .*; this one has none"):
        search(net(), bowl, budget=40, checkpoint=bounded)
    from safetensors.torch import save_file

    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, other)
    with pytest.raises(ValueError, match="not the checkpoint of a search"):
        search(net(), bowl, checkpoint=other)


KILLED = """
import os, sys, time, torch
from moduli.evolve import Pool, search

def fitness(net):
    with open(sys.argv[2], "a") as file:
        file.write(f"{os.getpid()} {net.weight.flatten().tolist()}\\n")
    time.sleep(0.01)
    return (net(torch.ones(2)) - 3).square().sum()

if __name__ == "__main__":
    torch.manual_seed(0)
    pool = Pool(int(sys.argv[3]), start="fork") if sys.argv[3] != "0" else None
    search(torch.nn.Linear(2, 1), fitness, population=8, budget=80, checkpoint=sys.argv[1], executor=pool)
    if pool is not None:
        pool.close()
"""


def wait_until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_driver_loses_nothing(workers, tmp_path):
    path, log = tmp_path / "run.safetensors", tmp_path / "log"
    log.touch()
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(path), str(log), str(workers)]
    driver = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    assert wait_until(lambda: log.read_text().count("\n") >= 20)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    # Workers finish their member after the driver died, and end.
    staff = {int(line.split()[0]) for line in log.read_text().splitlines()} - {driver.pid}
    assert wait_until(lambda: not any(is_running(pid) for pid in staff))
    again = subprocess.run(command, env=env, timeout=600, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    seen = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    # Every member is evaluated once; those interrupted are evaluated twice, with a warning.
    twice = len(seen) - len(set(seen))
    assert len(set(seen)) == 80
    assert twice <= max(workers, 1)
    assert not twice or "those that were under way when the search ended are evaluated again" in again.stderr
    resumed = search(net(), bowl, population=8, budget=80, checkpoint=path)
    assert resumed.history == search(net(), bowl, population=8, budget=80).history


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nan_everywhere_ends_with_a_reason():
    result = search(net(), lambda m: math.nan, budget=10**6)
    assert result.reason is Reason.NOT_FINITE
    assert result.value == math.inf


# ---------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [5, 13, 64, 101, 400])
def test_a_budget_is_never_exceeded(method, budget):
    calls = []
    result = search(net(), lambda m: calls.append(0) or bowl(m), method=method, budget=budget, tol=0.0)
    assert len(calls) == result.evaluations <= budget
    assert result.evaluations > 0


def test_a_budget_below_one_given_generation_is_refused():
    with pytest.raises(ValueError, match="less than one generation"):
        search(net(), bowl, method="pso", population=64, budget=40)
    with pytest.raises(ValueError, match="less than one generation"):
        search(net(), bowl, budget=0)


def test_the_method_is_chosen_by_size():
    assert [choose_method(n) for n in (3, 1000, 1001, 100_000, 100_001)] == [
        "cmaes", "cmaes", "sepcmaes", "sepcmaes", "openes",
    ]  # fmt: skip
    net = torch.nn.Linear(250, 200)
    result = search(net, lambda m: m.weight.square().sum(), budget=100)
    assert type(result.search).__name__ == "CMAES"
    assert result.search.covariance == "separable"


def test_defaults_store_few_vectors_of_the_size_of_the_model():
    for count, vectors in (
        (50_000, 5),
        (200_000, 4),
    ):  # separable CMA-ES stores two paths, a mean, variances and the best
        net = torch.nn.Linear(count, 1, bias=False)
        state = search(net, lambda m: m.weight.square().sum(), budget=64).search.state
        size = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))
        assert size <= 4 * vectors * count + 8_192


@pytest.mark.parametrize("method", ["cmaes", "bipop", "xnes"])
def test_a_covariance_that_does_not_fit_is_refused_with_its_size(method):
    with pytest.raises(ValueError, match=r"50000 x 50000 numbers, which takes 74.5 GB; use 'sepcmaes'"):
        search(torch.nn.Linear(50_000, 1, bias=False), lambda m: 0.0, method=method)


def test_a_fitness_that_always_raises_is_one_error():
    def broken(model):
        raise LookupError("it is not there")

    with (
        warnings.catch_warnings(),
        pytest.raises(EvaluationError, match="(?s)none of 7 members.*member 0 said.*LookupError: it is not there"),
    ):
        warnings.simplefilter("error")
        search(net(), broken)


UNGUARDED = """
import torch
from evolve.work import bowl
from moduli.evolve import Pool, search
with Pool(2, start=START) as pool:
    search(torch.nn.Linear(2, 1), bowl, budget=20, executor=pool)
"""


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_a_program_without_a_guard_ends_with_one_error(tmp_path, start):
    program = tmp_path / "unguarded.py"
    program.write_text(UNGUARDED.replace("START", repr(start)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.strip().endswith('put what it runs under `if __name__ == "__main__":`')
    assert len(done.stderr.splitlines()) < 30


def test_an_exit_code_that_another_thread_collects_is_waited_for():
    class Collected:
        """A process whose exit code another thread collects: it is None until that thread has stored it."""

        asked = 0

        def join(self, timeout):
            pass

        @property
        def exitcode(self):
            self.asked += 1
            return 77 if self.asked > 3 else None

    assert _await_exit_code(Collected()) == 77


ORPHANS = """
import os, sys, torch
from moduli.evolve import Pool
class Hang:
    def __call__(self, row):
        open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
        import time
        time.sleep(3600)
if __name__ == "__main__":
    Pool(2, start="fork").map(Hang(), torch.zeros(2, 2))
"""


def test_workers_end_with_a_driver_that_is_killed(tmp_path):
    program, where = tmp_path / "orphans.py", tmp_path / "pids"
    where.mkdir()
    program.write_text(ORPHANS)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    driver = subprocess.Popen([sys.executable, str(program), str(where)], env=env, stderr=subprocess.DEVNULL)
    assert wait_until(lambda: len(list(where.iterdir())) == 2, 600)
    pids = [int(path.name) for path in where.iterdir()]
    driver.kill()
    driver.wait()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 600)


class SlowToLoad:
    """A fitness that takes an hour to be unpickled, like a module that hangs on import."""

    def __reduce__(self):
        return time.sleep, (3600,)


def test_a_worker_that_hangs_on_import_is_given_up():
    with (
        Pool(1, start="forkserver", timeout=1.0, start_timeout=5.0) as pool,
        pytest.raises(RuntimeError, match="no workers left .not all started within 5.0 seconds"),
    ):
        pool.map(SlowToLoad(), torch.zeros(2, 2))


def test_bounds_and_targets_that_are_no_numbers_are_named():
    with pytest.raises(ValueError, match=r"the lower bound is \[0, None, 1\]; give a number or 3 numbers"):
        search(torch.zeros(3), bowl, bounds=([0, None, 1], 2.0))
    with pytest.raises(ValueError, match="target is nan"):
        search(torch.zeros(3), bowl, target=float("nan"))
