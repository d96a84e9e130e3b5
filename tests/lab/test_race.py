"""Races: equal results in one process or several, failing runs as rows, and files that survive any end of a race."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lab import rogues
from moduli import lab
from moduli.lab import RunReason, _worker, problems, race
from moduli.lab._pool import execute_all

FIELD = ["torch.SGD(lr=0.001)", "Adam | LR(0.05)", "Population(6, spread=0.3) | Adam | LR(0.05)"]
COURSES = ["rosenbrock", "noisy-20", "spirals"]


def drop_times(results):
    """Return the runs without their times, which differ between races."""
    timeless = {"seconds", "history"}
    return [
        {**{k: v for k, v in run.items() if k not in timeless}, "values": [(e, v) for e, _, v in run["history"]]}
        for run in results.runs
    ]


@pytest.fixture
def write_file(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture(scope="module")
def expected():
    return race(COURSES, FIELD, seeds=2, budget=60, workers=0)


def test_races_in_one_process_and_in_several_are_bit_identical(expected, write_file):
    state = torch.get_rng_state()
    path = write_file("import torch\ndef bowl(a=torch.ones(3), b=2):\n    return (a**2).sum() + (b - 1) ** 2\n")
    elsewhere = race([*COURSES, f"{path}:bowl"], FIELD, seeds=2, budget=60, workers=2)
    bowl = race([f"{path}:bowl"], FIELD, seeds=2, budget=60, workers=0)
    assert drop_times(elsewhere) == drop_times(expected) + drop_times(bowl)
    assert all(run["digest"] for run in expected.runs)
    assert len({run["digest"] for run in expected.runs}) == len(expected.runs)
    assert torch.equal(state, torch.get_rng_state())


def test_the_order_of_a_race_does_not_matter(expected):
    backwards = race(COURSES[::-1], FIELD[::-1], seeds=[1, 0], budget=60, workers=0)
    key = lambda run: (run["problem"], run["source"], run["seed"])  # noqa: E731
    assert sorted(drop_times(backwards), key=key) == sorted(drop_times(expected), key=key)


def test_evaluations_gradients_and_steps_are_counted(expected):
    for run in expected.runs:
        population = "Population" in run["source"]
        assert run["evaluations"] == 60
        assert run["gradients"] == 60
        assert run["steps"] == (10 if population else 60)
        evaluations = [e for e, _, _ in run["history"]]
        assert evaluations[0] == 0
        assert evaluations[-1] == 60
        values = [v for _, _, v in run["history"]]
        assert values == sorted(values, reverse=True)
        assert run["value"] == values[-1]
        assert ("cloud" in run) == (population and run["problem"] == "rosenbrock")


def test_a_run_equals_a_plain_training_loop():
    """`lab.run` has the value and the last point of a loop over `torch.optim.Adam`."""
    problem = problems.get("rosenbrock")
    model = problem.model(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    record = lab.run(problems.get("rosenbrock"), lab.contender("torch.Adam(lr=0.05)"), 1, budget=40)
    assert record["value"] == min(losses)
    assert record["path"][-1] == [pytest.approx(x, rel=1e-4) for x in model.x.tolist()]


def test_runs_end_with_the_expected_reason():
    sphere = problems.get("sphere-10")
    cases = [
        (rogues.tame, 500, 30, RunReason.REACHED),
        (rogues.tame, 5, 30, RunReason.BUDGET),
        (rogues.diverging, 500, 30, RunReason.DIVERGED),
        (rogues.raising, 500, 30, RunReason.CRASHED),
        (rogues.idle, 500, 30, RunReason.STOPPED),
        (rogues.swallowing, 50, 30, RunReason.BUDGET),
        (rogues.tame, 500, 0.0, RunReason.TIME),
    ]
    for factory, budget, seconds, reason in cases:
        record = lab.run(sphere, lab.contender(factory), 0, budget=budget, seconds=seconds)
        assert record["reason"] == str(reason), factory
        json.dumps(record, allow_nan=False)
        assert RunReason(record["reason"]).failed == (factory in (rogues.diverging, rogues.raising))
    record = lab.run(sphere, lab.contender(rogues.raising), 0, budget=50)
    assert "ZeroDivisionError: by design" in record["detail"]
    assert "rogues.py" in record["traceback"]
    assert record["evaluations"] == 5


def test_failing_runs_are_rows_and_do_not_affect_others():
    field = [
        rogues.tame,
        rogues.raising,
        rogues.hanging,
        rogues.dying,
        rogues.faulting,
        rogues.exiting,
        rogues.stubborn,
    ]
    results = race(["sphere-10"], [*field, rogues.talking], seeds=1, budget=100, seconds=2.0, workers=4)
    rows = {run["contender"]: run for run in results.runs}
    assert rows["tame"]["reason"] == RunReason.REACHED
    assert rows["talking"]["reason"] == RunReason.REACHED
    assert rows["raising"]["reason"] == RunReason.CRASHED
    assert rows["hanging"]["reason"] == rows["stubborn"]["reason"] == RunReason.HUNG
    assert (rows["dying"]["reason"], rows["dying"]["detail"]) == (RunReason.KILLED, "by SIGKILL")
    assert rows["faulting"]["detail"] == "by SIGSEGV"
    assert "rogues.py" in rows["faulting"]["traceback"]
    assert rows["exiting"]["reason"] == RunReason.CRASHED
    assert "code 7" in rows["exiting"]["detail"]
    assert all(row["failed"] == (row["contender"] not in ("tame", "talking")) for row in lab.summary(results))
    assert lab.report(results)


def test_contenders_that_cannot_be_pickled_are_refused_before_the_race():
    with pytest.raises(TypeError, match="workers=0"):
        race(["sphere-10"], [lambda model: torch.optim.SGD(model.parameters())], seeds=1, budget=5, workers=1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"contenders": []}, ValueError, "at least one contender"),
        ({"problems": []}, ValueError, "at least one problem"),
        ({"seeds": 0}, ValueError, "at least one seed"),
        ({"contenders": ["LR(1)", "LR( 1 )"]}, ValueError, "twice"),
        ({"problems": ["sphere"]}, problems.UnknownProblemError, "did you mean"),
        ({"contenders": ["LRR(1)"]}, lab.ChainSyntaxError, "did you mean"),
        ({"contenders": [3]}, TypeError, "a chain or a function"),
        ({"budget": 0}, ValueError, "budget is at least 1"),
        ({"threads": 0}, ValueError, "threads is at least 1"),
    ],
)
def test_wrong_races_are_refused(change, error, message, tmp_path):
    file = tmp_path / "race.jsonl"
    with pytest.raises(error, match=message):
        race(**{"problems": ["sphere-10"], "contenders": ["LR(1)"], "workers": 0, "file": file, **change})
    assert not file.exists()


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_read_and_resumed(tmp_path, expected):
    file = tmp_path / "race.jsonl"
    whole = race(COURSES, FIELD, seeds=2, budget=60, workers=0, file=file)
    assert drop_times(whole) == drop_times(expected)
    assert lab.Results.read(file).runs == whole.runs
    assert whole.complete
    lines = file.read_bytes().splitlines(keepends=True)
    # Truncated in the middle of a line, as by a power failure.
    file.write_bytes(b"".join(lines[:6]) + lines[6][: len(lines[6]) // 2])
    part = lab.Results.read(file)
    assert len(part.runs) == 5
    assert not part.complete
    done = []
    again = race(
        COURSES, FIELD, seeds=2, budget=60, workers=0, file=file, resume=True, listen=lambda *a: done.append(a)
    )
    assert drop_times(again) == drop_times(whole)
    assert sum(event == "end" for event, _, _ in done) == 13
    assert [progress["finished"] for event, _, progress in done if event == "begin"] == list(range(5, 18))
    assert [run["seconds"] for run in again.runs][:5] == [run["seconds"] for run in whole.runs][:5]


def test_the_file_of_another_race_is_not_resumed(tmp_path):
    file = tmp_path / "race.jsonl"
    race(["sphere-10"], ["LR(0.1)"], seeds=1, budget=5, workers=0, file=file)
    before = file.read_bytes()
    with pytest.raises(lab.ResultsError, match="budget 5, this one has 6"):
        race(["sphere-10"], ["LR(0.1)"], seeds=1, budget=6, workers=0, file=file, resume=True)
    assert file.read_bytes() == before
    # More seeds and contenders of the same race are additional runs.
    more = race(["sphere-10"], ["LR(0.1)", "LR(0.2)"], seeds=2, budget=5, workers=0, file=file, resume=True)
    assert len(more.runs) == 4
    before = file.read_bytes()
    for arguments, words in (
        ({"contenders": ["LR(0.1)"]}, r"has a run that this race has not: LR\(0.2\) on sphere-10, seed 0"),
        ({"seeds": 1}, "has a run that this race has not: .*, seed 1"),
        ({"problems": ["sphere-100"]}, "has a run that this race has not: .* on sphere-10,"),
    ):
        same = {"problems": ["sphere-10"], "contenders": ["LR(0.1)", "LR(0.2)"], "seeds": 2, "budget": 5}
        with pytest.raises(lab.ResultsError, match=words):
            race(**{**same, **arguments}, workers=0, file=file, resume=True)
    assert file.read_bytes() == before


def test_runs_on_another_problem_of_the_same_name_are_not_resumed(tmp_path):
    for name, factor in (("first", 1), ("second", 5)):
        (tmp_path / f"{name}.py").write_text(f"def bowl(x=3.0):\n    return {factor} * x**2\n")
    how = {"seeds": 1, "budget": 5, "workers": 0, "file": tmp_path / "race.jsonl"}
    race([f"{tmp_path}/first.py:bowl"], ["LR(0.1)"], **how)
    with pytest.raises(lab.ResultsError, match="holds runs on .*first.py:bowl, this race has .*second.py:bowl"):
        race([f"{tmp_path}/second.py:bowl"], ["LR(0.1)"], **how, resume=True)


@pytest.mark.parametrize(
    "text", ["", "hello\n", '{"kind": "run"}\n', "[1]\n", '{"kind": "race", "format": 99}\n', "{}\n"]
)
def test_files_without_a_race_are_refused(tmp_path, text):
    path = tmp_path / "race.jsonl"
    path.write_text(text)
    with pytest.raises(lab.ResultsError):
        lab.Results.read(path)


PROGRAM = """
import sys
from moduli.lab import race
race([sys.argv[2]], [f"LR(0.00{i})" for i in range(1, 9)], seeds=3, budget=25, workers=2,
     file=sys.argv[1], listen=lambda *a: print(a[0], flush=True))
"""


def test_a_killed_race_has_saved_its_runs_and_leaves_no_process(tmp_path):
    file, sleepy = tmp_path / "race.jsonl", tmp_path / "sleepy.py"
    sleepy.write_text("import time\ndef problem(x=3.0):\n    time.sleep(0.02)\n    return x**2\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file), str(sleepy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    ended = 0
    for line in child.stdout:
        ended += line.strip() == "end"
        if ended == 2:
            break
    servers = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    child.kill()
    child.stdout.close()
    child.wait(600)
    runs = lab.Results.read(file).runs
    assert 2 <= len(runs) < 24
    assert all(run["reason"] == RunReason.BUDGET for run in runs)
    deadline = time.monotonic() + 600
    while any(Path(f"/proc/{pid}").exists() for pid in servers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_dies_is_replaced():
    tasks = [("sphere-10", "LR(1e-6)", seed) for seed in range(3)]
    limits = {"budget": 10**6, "seconds": 2.0, "threads": 1, "target": None}
    reasons, workers = {}, []
    for number, message in execute_all(tasks, limits, 1):
        workers += [message["pid"]] if "pid" in message else []
        if "evaluations" in message and number == 0 and "reason" not in message:
            os.kill(workers[0], signal.SIGKILL)
        if "reason" in message:
            reasons[number] = message["reason"]
    assert reasons == {0: RunReason.KILLED, 1: RunReason.TIME, 2: RunReason.TIME}


# -- problems of the user ---------------------------------------------------------------------------------------------


def test_a_function_with_defaults_is_a_problem(write_file):
    path = write_file(
        "import torch\ndef bowl(a=torch.ones(3), b=2):\n    'A bowl.'\n    return (a**2).sum() + (b - 1) ** 2\n"
    )
    problem = lab.load_problem(f"{path}:bowl")
    assert (problem.dimension, problem.measure(problem.model(0)), problem.summary) == (4, 4.0, "A bowl.")
    results = race(
        [f"{path}:bowl"], ["torch.SGD(lr=0.1)", "Population(3) | Adam | LR(0.1)"], seeds=1, budget=60, workers=0
    )
    assert [run["reason"] for run in results.runs] == ["budget spent"] * 2
    assert results.runs[0]["value"] < 1e-4


def test_a_module_and_its_loss_are_a_problem(write_file):
    path = write_file(
        """
        import torch
        from moduli.lab import Problem

        def problem():
            x = torch.linspace(0, 1, 20)[:, None]
            return torch.nn.Linear(1, 1), lambda net: (net(x) - 3 * x).square().mean()

        class Mine(Problem):
            name = "mine"
            def model(self, seed): return torch.nn.Linear(2, 1)
            def loss(self, model): return model(torch.ones(2)).square().sum()

        instance = Mine()
        factory = lambda: instance
        """.replace("from moduli.lab import Problem", "from moduli.lab.problems import Problem")
    )
    line = lab.load_problem(str(path))
    assert line.dimension == 2
    assert line.measure(line.model(0)) == line.measure(line.model(0)) != line.measure(line.model(1))
    for name in ("Mine", "instance", "factory"):
        assert lab.load_problem(f"{path}:{name}").name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def problem(x): return x", "without a default"),
        ("problem = 3", "a problem is a Problem"),
        ("def problem(): return 3", "a module and a function of it"),
        ("def problem(x='a'): return x", "not a number or a tensor"),
        ("def other(x=1.0): return x", "has no 'problem'; it has other"),
    ],
)
def test_files_without_a_problem_are_refused_with_the_reason(write_file, text, message):
    with pytest.raises(lab.ProblemFileError, match=message):
        lab.load_problem(str(write_file(text)))


def test_a_loss_is_one_number_or_residuals(write_file):
    problem = lab.load_problem(str(write_file("import torch\ndef problem(x=torch.ones(3)): return x * 2\n")))
    assert problem.measure(problem.model(0)) == 6.0  # half the sum of squared residuals
    with pytest.raises(lab.ProblemFileError, match="there is no file"):
        lab.load_problem("nowhere.py:problem")


@pytest.mark.parametrize(("text", "what"), [("x[:0]", "an empty tensor"), ("'x'", "'str'")])
def test_values_that_are_no_losses_or_residuals_are_refused(write_file, text, what):
    problem = lab.load_problem(str(write_file(f"import torch\ndef problem(x=torch.ones(3)): return {text}\n")))
    with pytest.raises(lab.ProblemFileError, match=f"one number as a tensor, .*not {what}"):
        problem.measure(problem.model(0))


def test_a_problem_whose_package_is_missing_is_refused_before_the_race(tmp_path):
    class Far(problems.Problem):
        name, requires = "far", ("there_is_no_such_package.data",)

        def model(self, seed):
            return torch.nn.Linear(1, 1)

        def loss(self, model):
            return model(torch.ones(1)).sum()

    with pytest.raises(ModuleNotFoundError, match="far needs there_is_no_such_package, .* pip install"):
        race([Far()], ["LR(1)"], seeds=1, workers=0, file=tmp_path / "race.jsonl")
    assert not list(tmp_path.iterdir())


def test_the_default_race_has_existing_problems_and_contenders():
    field = lab.default_field()
    assert all(isinstance(entry, lab.Contender) for entry in field)
    assert len({entry.label for entry in field}) == len(field)
    assert len(lab.DEFAULT_PROBLEMS) >= 5
    assert all(math.isfinite(problems.get(name).optimum) for name in lab.DEFAULT_PROBLEMS)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (0, "format", "new"),
        (0, "machine", float("nan")),
        (0, "problems", 3),
        (0, "contenders", [{"label": "x"}]),
        (1, "value", float("inf")),
        (1, "value", "<b>"),
        (1, "steps", []),
        (1, "history", 5),
        (1, "reason", "tired"),
        (1, "seed", {}),
    ],
)
def test_results_that_were_tampered_with_are_refused(line, key, value, tmp_path):
    path = tmp_path / "race.jsonl"
    lab.race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, budget=5, workers=0, file=path)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lab.write_report(lab.Results.read(path), tmp_path / "report.html")
    lines[line][key] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(lab.ResultsError, match=f"line {line + 1} of"):
        lab.Results.read(path)
    del lines[line][key]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(lab.ResultsError, match=f"line {line + 1} of"):
        lab.Results.read(path)


def test_a_function_is_a_problem():
    def bowl(a=torch.ones(3)):
        return (a**2).sum()

    results = lab.race([bowl], ["adam", "lbfgs"], budget=30, seeds=2, workers=0)
    assert {run["problem"] for run in results.runs} == {"bowl"}
    assert len(results.runs) == 4
    assert lab.fit(bowl, "lbfgs").value < 1e-6
    with pytest.raises(lab.ProblemFileError, match="a problem is a Problem, or a function that returns a loss"):
        lab.race([3], ["adam"], workers=0)


def test_a_complex_loss_is_refused(write_file):
    problem = lab.load_problem(str(write_file("def problem(x=1.0): return x * 1j\n")))
    with pytest.raises(lab.ProblemFileError, match="a real number, not torch.complex64"):
        problem.measure(problem.model(0))


@pytest.mark.parametrize("chain", ["Adam | LR(0.1)", "Population(4, spread=0.1) | Adam | LR(0.1)", "lbfgs"])
def test_defaults_with_labels_are_passed_with_them(write_file, chain):
    text = """
import moduli as mo
target = mo.tensor([1.0, 2.0], band=["a", "b"])
def problem(x=mo.tensor([0.0, 0.0], band=["b", "a"])):
    return ((x - target) ** 2).sum() + (x.sel(band="a") - 1) ** 2
"""
    found = lab.fit(lab.load_problem(str(write_file(text))), chain, steps=400)
    assert found.value < 1e-2
    assert found.parameters["x"] == pytest.approx([2.0, 1.0], abs=0.1)


def test_numbers_of_numpy_and_single_names_are_taken(tmp_path):
    plain = lab.race(["sphere-10"], ["LR(0.1)"], seeds=2, budget=20, target=1e-3, workers=0)
    options = {"seeds": np.arange(2), "budget": np.int64(20), "seconds": np.float32(30), "target": np.float64(1e-3)}
    file = tmp_path / "race.jsonl"
    numpys = lab.race("sphere-10", "LR(0.1)", **options, workers=0, threads=np.int64(1), file=file)
    assert [run["value"] for run in numpys.runs] == [run["value"] for run in plain.runs]
    assert lab.Results.read(file).header["seeds"] == [0, 1]
    assert len(lab.race("sphere-10", "LR(0.1)", seeds=np.int64(2), budget=20, workers=0).runs) == 2


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_seconds_that_are_no_limit_are_refused(seconds, tmp_path):
    file = tmp_path / "race.jsonl"
    with pytest.raises(ValueError, match="seconds of a run are a finite number above zero"):
        lab.race(["sphere-10"], ["LR(0.1)"], seconds=seconds, file=file, workers=0)
    assert not file.exists()


@pytest.mark.parametrize("stuck", ["time.sleep(10_000)", "while True: pass"])
def test_chains_that_end_or_hang_their_process_when_they_are_made_stop_no_other_run(write_file, monkeypatch, stuck):
    path = write_file(f"""
        import os, time

        def dying(model):
            os._exit(7)

        def stuck(model):
            {stuck}
    """)
    monkeypatch.setattr(_worker, "WARMUP", 1.0)
    field = [f"'{path}:dying'", f"'{path}:stuck'", "torch.SGD(lr=0.1)"]
    results = race(["sphere-10"], field, seeds=1, budget=100, seconds=3.0, workers=1)
    reasons = [run["reason"] for run in results.runs]
    assert (reasons[0], results.runs[0]["detail"]) == (RunReason.CRASHED, "it ended with code 7")
    assert reasons[1:] == [RunReason.HUNG, RunReason.REACHED]
