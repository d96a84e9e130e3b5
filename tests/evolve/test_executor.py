"""Executors compute what a loop computes, on any number of workers, also if workers fail."""

import math
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from evolve.work import Counted, Faulty, Opaque, noisy, sphere
from moduli.evolve import EvaluationError, EvaluationWarning, InProcess, OpenES, Pool, Ranks, Ray, search
from moduli.evolve._module_fitness import Chosen, ModuleFitness
from moduli.evolve._noise import Noise
from moduli.evolve._workers import Worker, pack

ROOT = Path(__file__).resolve().parents[2]
X = torch.arange(12.0).view(6, 2)


@pytest.fixture(scope="module")
def ray_cluster():
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install moduli[ray]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"}},
        )
        executor = Ray(2)
        yield executor
        executor.close()
        ray.shutdown()


@pytest.fixture(params=["pool 1", "pool 2", "ray"])
def executor(request):
    if request.param == "ray":
        # Shared by all tests, because its actors take seconds to import torch.
        shared = request.getfixturevalue("ray_cluster")

        def configure(timeout=None, retries=1):
            shared.timeout, shared.retries = timeout, retries
            return shared

        yield configure
        return
    opened = []

    def make(**options):
        opened.append(Pool(int(request.param[-1]), start="fork", **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_ray_with_too_few_processors_is_a_smaller_pool_or_an_error(ray_cluster):
    with pytest.warns(EvaluationWarning, match="enough for 2 workers of the 5 asked for"):
        assert Ray(5).workers == 2
    with pytest.raises(ValueError, match="an actor needs 1 GPU, and the Ray cluster has 0"):
        Ray(1, num_gpus=1)
    with pytest.raises(ValueError, match="an actor needs 64 CPU"):
        Ray(num_cpus=64)
    # The actors of another executor occupy all processors.
    ray_cluster.map(sphere, X)
    with pytest.raises(RuntimeError, match="no workers left .*started within"):
        Ray(1, start_timeout=5.0).map(sphere, X)


LOST = """
import sys, time, warnings, torch, ray
from ray.cluster_utils import Cluster
from moduli.evolve import EvaluationWarning, Ray, search
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
others = [cluster.add_node(num_cpus=1, resources={"far": 1}) for _ in range(2)]
ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
def fitness(net):
    time.sleep(0.02)
    return net.weight.square().sum()
def lose(searcher):
    if searcher.generation == 2:
        cluster.remove_node(others[0], allow_graceful=False)
    if searcher.generation == 4 and len(sys.argv) > 1:
        cluster.remove_node(others[1], allow_graceful=False)
options = {"resources": {"far": 1}} if len(sys.argv) > 1 else {}
def net():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)
with warnings.catch_warnings(record=True) as caught, Ray(3 - len(sys.argv[1:]), **options) as executor:
    warnings.simplefilter("always")
    workers = executor.workers
    result = search(net(), fitness, method="openes", population=12, budget=96, executor=executor, callback=lose)
    print(workers, executor.workers, any("goes on with" in str(w.message) for w in caught))
print(result.history == search(net(), fitness, method="openes", population=12, budget=96).history)
"""


@pytest.mark.parametrize("all_lost", [False, True])
def test_a_lost_node_is_a_smaller_pool_or_an_error(all_lost, tmp_path):
    pytest.importorskip("ray", reason="Ray is an extra: pip install moduli[ray]")
    program = tmp_path / "lost.py"
    program.write_text(LOST)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), *(["all"] if all_lost else [])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if all_lost:
        assert done.returncode != 0
        assert "RuntimeError: Ray has no workers left" in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip().splitlines()[-2:] == ["3 2 True", "True"]  # Ray writes to stdout too


def test_workers_are_sent_seeds_instead_of_members(executor, monkeypatch):
    from moduli.evolve import search

    def fitness(net):
        return net.weight[0, :8].square().sum() + net.weight[-1].sum()

    def run(**options):
        torch.manual_seed(0)
        net = torch.nn.Linear(600, 500, bias=False)
        return search(net, fitness, budget=64, population=32, **options)

    rows = []
    monkeypatch.setattr(OpenES, "rows", lambda *args: rows.append(args))
    for options in ({"method": "openes"}, {"method": "openes", "rank": 2}, {"method": "snes"}):
        pool = executor()
        there = run(executor=pool, **options)
        pool.close()
        here = run(**options).history
        # With low rank, members that are evaluated in this process are not stored, so they differ by rounding.
        assert there.history == (pytest.approx(here, rel=1e-5) if "rank" in options else here)
    assert rows == []


def test_a_worker_draws_the_noise_of_mirrored_members_once(monkeypatch):
    net = torch.nn.Linear(600, 500, bias=False)
    chosen, search = Chosen(net, "*"), OpenES(torch.zeros(300_000), population=8)
    worker = Worker(torch.get_num_threads())
    worker.learn(ModuleFitness(net, chosen, lambda net: net.weight.double().square().sum()))
    wanted = [float(row.double().square().sum()) for row in search.ask()]
    drawn, normal = [], Noise._normal
    monkeypatch.setattr(Noise, "_normal", lambda *args: drawn.append(args[2]) or normal(*args))
    packed = pickle.dumps(pack(search.draft()))
    # Member 4 is made again after its mirror image, and its noise is drawn again.
    values = {member: worker.make(pickle.loads(packed), member, 0)[0] for member in (0, 1, 3, 2, 4, 5, 4, 6)}
    assert values == pytest.approx({member: wanted[member] for member in values}, rel=1e-9)
    assert len(drawn) == 5 * search._noise.segments


def faulty(kind, tmp_path, bad=4.0, times=1):
    return Faulty(kind, tmp_path, bad, times)


def test_workers_compute_what_a_loop_computes(executor):
    pool = executor()
    for fitness in (sphere, noisy):
        for dtype in (torch.float32, torch.float64):
            x = X.to(dtype)
            assert torch.equal(pool.map(fitness, x, seed=5), InProcess().map(fitness, x, seed=5))
    assert not torch.equal(pool.map(noisy, X, seed=6), pool.map(noisy, X, seed=5))


def test_an_exception_is_tried_again_elsewhere(executor, tmp_path):
    fitness = faulty("raise", tmp_path)
    with pytest.warns(EvaluationWarning, match="member 2 is evaluated again: ArithmeticError: no such model"):
        values = executor().map(fitness, X)
    assert torch.equal(values, X.double().sum(1))
    assert [fitness.count_calls(float(v)) for v in X[:, 0]] == [1, 1, 2, 1, 1, 1]


def test_a_member_that_always_fails_is_nan_and_named(executor, tmp_path):
    with pytest.warns(EvaluationWarning) as caught:
        values = executor(retries=2).map(faulty("raise", tmp_path, times=99), X)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 3
    assert messages[-1] == "member 2 has no fitness (NaN) (3 attempts): ArithmeticError: no such model"
    assert values.isnan().tolist() == [i == 2 for i in range(6)]


def test_a_killed_worker_is_replaced(executor, tmp_path):
    pool, fitness = executor(), faulty("kill", tmp_path)
    with pytest.warns(EvaluationWarning, match="member 2 is evaluated again: its worker died"):
        values = pool.map(fitness, X)
    assert torch.equal(values, X.double().sum(1))
    assert [fitness.count_calls(float(v)) for v in X[:, 0]] == [1, 1, 2, 1, 1, 1]
    assert torch.equal(pool.map(fitness, X), values)


def test_a_worker_that_hangs_is_given_up(executor, tmp_path):
    pool = executor(timeout=1.0)
    with pytest.warns(EvaluationWarning, match="member 2 is evaluated again: no answer within"):
        values = pool.map(faulty("hang", tmp_path), X)
    assert torch.equal(values, X.double().sum(1))


def test_a_fitness_that_never_works_is_an_error(executor, tmp_path):
    def broken(row):
        raise LookupError("it is not there")

    for each in (executor(), InProcess()):
        with (
            warnings.catch_warnings(),
            pytest.raises(EvaluationError, match="(?s)none of 6 members.*LookupError: it is not there"),
        ):
            warnings.simplefilter("ignore", EvaluationWarning)
            each.map(broken, X)


def test_in_process_one_bad_member_is_nan(tmp_path):
    with pytest.warns(EvaluationWarning, match=r"member 2 has no fitness \(NaN\): ArithmeticError"):
        values = InProcess().map(faulty("raise", tmp_path), X)
    assert values.isnan().tolist() == [i == 2 for i in range(6)]


def test_the_global_generators_do_not_change():
    before = torch.get_rng_state()
    InProcess().map(noisy, X)
    assert torch.equal(before, torch.get_rng_state())


def test_vectorised_blocks_are_one_function():
    whole = InProcess(vectorised=True).map(lambda x: x.sum(1), X)
    assert torch.equal(whole, InProcess(vectorised=True, block=4).map(lambda x: x.sum(1), X))
    with pytest.raises(ValueError, match="one number per member"):
        InProcess(vectorised=True).map(lambda x: x.sum(), X)
    with pytest.raises(EvaluationError, match="one number per member"):
        InProcess().map(lambda row: row, X[:1])


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_pools_start_by_forkserver_and_spawn(start):
    with Pool(1, start=start) as pool:
        assert torch.equal(pool.map(torch.sum, X), X.double().sum(1))
        with pytest.raises(TypeError, match="can't be sent to other processes"):
            pool.map(lambda row: row.sum(), X)


def test_wrong_settings_are_refused():
    for options, error in [
        ({"workers": -1}, "at least 1"),
        ({"timeout": 0.0}, "seconds"),
        ({"retries": -1}, "negative"),
        ({"start": "magic"}, "cannot find context"),
    ]:
        with pytest.raises(ValueError, match=error):
            Pool(**options)
    with pytest.raises(ValueError, match="at least one"):
        InProcess(block=0)
    with pytest.raises(RuntimeError, match="init_process_group"):
        Ranks()


def test_an_interrupted_pool_can_be_used_again(tmp_path):
    def interrupt(member, value):
        raise KeyboardInterrupt

    with Pool(2, start="fork") as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.collect(sphere, lambda a, b: X[a:b], [1] * 6, {}, interrupt)
        assert torch.equal(pool.map(sphere, X), X.double().square().sum(1))


RANKS = """
import sys, torch, torch.distributed as dist
from moduli.evolve import Ranks, search
rank, where, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{where}/meet{seed}", rank=rank, world_size=2)
torch.manual_seed(0)
net = torch.nn.Linear(3, 2)
mine = 0
def fitness(net):
    global mine
    mine += 1
    return (net(torch.ones(3)) - 1).square().sum() + 0.1 * torch.rand(())
sent = []
gather = dist.all_gather_into_tensor
def counted(out, tensor, group=None):
    sent.append(tensor.numel() * tensor.element_size())
    return gather(out, tensor, group=group)
dist.all_gather_into_tensor = counted
result = search(net, fitness, method="openes", executor=Ranks(), seed=seed * rank, budget=63, population=9)
torch.save([[p.detach() for p in net.parameters()], result.history, mine, sent], f"{where}/rank{rank}.pt")
dist.destroy_process_group()
"""


def two_ranks(tmp_path, seed):
    program = tmp_path / "ranks.py"
    program.write_text(textwrap.dedent(RANKS))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    both = [
        subprocess.Popen([*command, str(rank), str(tmp_path), str(seed)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [(p.communicate(timeout=600)[1], p.returncode) for p in both]


def test_two_ranks_exchange_pairs_and_agree_with_one(tmp_path):
    from moduli.evolve import search

    assert [code for _, code in two_ranks(tmp_path, 0)] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    alone = search(
        net,
        lambda net: (net(torch.ones(3)) - 1).square().sum() + 0.1 * torch.rand(()),
        method="openes",
        budget=63,
        population=9,
    )
    for weights, history, _, _ in (first, second):
        assert history == alone.history
        assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert (first[2], second[2]) == (35, 28)
    assert first[3] == [5 * 16] * 7  # one (seed, fitness) pair per member, for a model of any size


LONG = """
import os, sys, torch, torch.distributed as dist
from moduli.evolve import Ranks, search
rank, where, lost = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "lost"
dist.init_process_group("gloo", init_method=f"file://{where}/meet{lost}", rank=rank, world_size=2)
torch.manual_seed(0)
net = torch.nn.Linear(600, 300, bias=False)
calls = 0
def fitness(net):
    global calls
    calls += 1
    if lost and rank == 1 and calls == 50:
        os._exit(9)
    return net.weight[0, :8].square().sum()
result = search(net, fitness, method="openes", optimizer="sgd", executor=Ranks(), budget=192, population=64,
                checkpoint=f"{where}/search.ckpt")
torch.save([net.weight.detach(), result.history, calls], f"{where}/rank{rank}.pt")
dist.destroy_process_group()
"""


def test_a_lost_rank_ends_with_a_checkpoint_that_all_resume_from(tmp_path):
    from moduli.evolve import search

    program = tmp_path / "long.py"
    program.write_text(LONG)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def run(how):
        command = [sys.executable, str(program)]
        both = [
            subprocess.Popen([*command, str(rank), str(tmp_path), how], env=env, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        return [(p.communicate(timeout=600)[1], p.returncode) for p in both]

    (error, code), (_, gone) = run("lost")
    assert code == 1
    assert gone == 9
    assert "a rank was lost" in error.strip().splitlines()[-1]
    assert "start the ranks again" in error
    assert (tmp_path / "search.ckpt").exists()
    assert [code for _, code in run("again")] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    # The journal has rank 0's members of the lost generation, so it evaluates 32 members less than rank 1.
    assert (first[2], second[2]) == (32, 64)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    torch.manual_seed(0)
    net = torch.nn.Linear(600, 300, bias=False)
    alone = search(
        net, lambda net: net.weight[0, :8].square().sum(), method="openes", optimizer="sgd", budget=192, population=64
    )
    # Sums over the noise of 32 directions are reduced, so they equal those of one process up to rounding.
    torch.testing.assert_close(first[0], net.weight.detach(), rtol=1e-5, atol=1e-6)
    assert first[1] == pytest.approx(alone.history, rel=1e-5)


def test_ranks_with_different_searches_are_refused(tmp_path):
    results = two_ranks(tmp_path, 1)
    assert all(code != 0 for _, code in results)
    assert any("do not run the same search" in error for error, _ in results)


def test_a_fitness_of_nan_is_nan_in_process():
    assert math.isnan(InProcess().map(lambda row: math.nan, X[:1])[0])


class Attributes:
    """A fitness whose attributes have the names of methods of fitnesses of modules."""

    def __init__(self):
        self.batch = self.search = self.evaluate_member = torch.ones(3)

    def __call__(self, x):
        return (x * self.batch).sum(-1)


@pytest.mark.parametrize(
    "make", [InProcess, lambda: InProcess(vectorised=True), lambda: Pool(1, start="fork")], ids=["one", "all", "pool"]
)
def test_attributes_of_a_users_fitness_are_not_interpreted(make):
    with make() as executor:
        assert executor.map(Attributes(), torch.eye(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["plain", "killed", "opaque"])
def test_workers_evaluate_their_slices_by_shared_products(kind, executor, tmp_path):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    y = torch.tanh(x[:, :1] - x[:, 1:2])
    method = "snes" if kind == "plain" else "openes"  # with a standard deviation per parameter, and with one for all
    options = {"method": method, "budget": 48, "population": 24, "rank": 1, "seed": 3}
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))

    expected = search(net(), Counted(here, x, y), **options)
    assert len(list(here.iterdir())) == 2  # one call per generation
    fitness = Opaque(there, x, y) if kind == "opaque" else Counted(there, x, y, kill=kind == "killed")
    pool = executor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = search(net(), fitness, executor=pool, **options)
    torch.testing.assert_close(torch.tensor(result.history), torch.tensor(expected.history), rtol=1e-5, atol=1e-7)
    for name, value in expected.x.items():
        torch.testing.assert_close(result.x[name], value, rtol=1e-4, atol=1e-5)
    calls = len(list(there.iterdir()))
    assert any("one by one" in str(each.message) for each in caught) == (kind == "opaque")
    if kind == "plain":
        assert calls == 2 * pool.workers  # one slice per worker
    else:
        assert calls > (
            24 if kind == "opaque" else 12
        )  # members are called one by one, in all slices or in that of the killed worker
