"""Tuned races: settings from declared ranges, runs stacked into one population, and the choice of the best setting."""

import contextlib
import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import moduli as mo
from moduli import lab, m, merge, optim
from moduli.cli import app
from moduli.lab import contender, problems
from moduli.lab._scores import UNSOLVED, score_run
from moduli.lab._stacked_run import CannotStackError, run_stacked
from moduli.lab._tuning import list_tuned_numbers, make_settings, map_numbers
from moduli.optim import SearchRange, find_search_ranges

FIELD = [
    "ClipNorm(1) | Adam | LR(0.01)",
    "Lion | LR(0.01)",
    "HeavyBall(0.9) | LR(0.1)",
    "torch.SGD(lr=0.1)",
    "LBFGS | StrongWolfe",
]
COURSES = ["rosenbrock", "spirals", "noisy-20"]


@pytest.fixture(scope="module")
def tuned():
    return lab.race(COURSES, FIELD, tune=6, seeds=3, budget=80, workers=0)


# -- ranges -----------------------------------------------------------------------------------------------------------


def test_values_are_evenly_spaced_on_their_scale():
    log, rest = SearchRange(1e-4, 1.0, "log"), SearchRange(0.9, 0.9999, "one_minus")
    assert [log.value_at(at) for at in (0, 0.25, 0.5, 1)] == [1e-4, 1e-3, 1e-2, 1.0]
    assert [rest.value_at(at) for at in (0, 1 / 3, 1)] == [0.9, 0.99, 0.9999]
    assert SearchRange(1.0, 3.0).value_at(0.5) == 2.0


def test_links_declare_ranges_once_and_classes_override_them():
    assert find_search_ranges(m.LR) == {"lr": SearchRange(1e-4, 1.0, "log")}
    assert find_search_ranges(m.Adadelta)["rho"].scale == "one_minus"  # a decay rate in Adadelta, a radius in SAM
    assert find_search_ranges(m.SAM)["rho"].scale == "log"
    assert "weight_decay" not in find_search_ranges(torch.optim.Adam)  # 0 by default

    class Mine(optim.UpdateTransform):
        search_ranges = {"strength": SearchRange(1.0, 2.0)}
        strength: float = 1.5

    class Child(Mine):
        pass

    assert find_search_ranges(Child) == {"strength": SearchRange(1.0, 2.0)}


@pytest.mark.parametrize("name", sorted(name for name in m.__all__ if isinstance(getattr(m, name), type)))
def test_links_accept_all_values_of_their_declared_ranges(name):
    kind = getattr(m, name)
    for key, limits in find_search_ranges(kind).items():
        for at in (0.0, 0.5, 1.0):
            assert limits.low <= limits.value_at(at) <= limits.high
            with contextlib.suppress(TypeError):  # where other arguments have no default
                kind(**{key: limits.value_at(at)})


def test_the_range_of_the_step_size_depends_on_the_previous_link():
    ranges = {
        chain: list_tuned_numbers(contender(chain), {})
        for chain in ("Adam | LR", "Lion | LR", "LR", "adamw", "torch.Adam")
    }
    steps = {
        chain: next(each.range for each in numbers if each.name.endswith("lr")) for chain, numbers in ranges.items()
    }
    assert steps["Adam | LR"] == steps["adamw"] == steps["torch.Adam"] == SearchRange(1e-4, 0.1, "log")
    assert steps["Lion | LR"] == SearchRange(1e-5, 0.01, "log")
    assert steps["LR"] == SearchRange(1e-4, 1.0, "log")


def test_settings_of_different_chains_use_the_same_points():
    one, other = (make_settings(contender(chain), 6, [0, 1, 2]) for chain in ("Lion | LR(1)", "Adam | LR(0.5)"))
    assert [each.seed for each in one] == [0, 0, 1, 1, 2, 2]
    assert [each.values["Lion.beta1"] for each in one] == [each.values["Adam.beta1"] for each in other]
    assert [each.values["LR.lr"] for each in one] != [each.values["LR.lr"] for each in other]
    for each in (*one, *other):
        parsed = lab.parse(each.contender.source)
        assert dict(parsed.links[0].kwargs)["beta1"] == each.values[f"{parsed.links[0].name}.beta1"]
        assert parsed.links[-1].args == (each.values["LR.lr"],)  # in its original position
    assert len({each.contender.source for each in one}) == 6


def test_ranges_are_overridden_and_numbers_are_fixed():
    ranges = {"lr": (0.1, 0.2), "Adam.beta1": 0.5}
    for each in make_settings(contender("Adam | LR"), 4, [0], ranges):
        assert 0.1 <= each.values["LR.lr"] <= 0.2
        assert each.values["Adam.beta1"] == 0.5
        assert "beta1=0.5" in each.contender.source
    nested = make_settings(contender("Alternate(Adam | LR(0.1), Lion | LR(0.1))"), 2, [0])
    assert set(nested[0].values) >= {"LR.lr", "LR.lr#2"}
    assert nested[0].contender.source.count("LR(0.1)") == 0


def build(model, lr=0.1, steps=3):
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_functions_are_tuned_by_their_keywords():
    settings = make_settings(contender(build), 3, [0, 1, 2])
    assert [set(each.values) for each in settings] == [{"build.lr"}] * 3
    optimizer = settings[1].contender.factory(torch.nn.Linear(1, 1))
    assert optimizer.param_groups[0]["lr"] == settings[1].values["build.lr"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": 5, "seeds": 2}, "give a multiple"),
        ({"tune": 0}, "give a multiple"),
        ({"ranges": {"lr": 0.1}}, "give tune="),
        ({"tune": 3, "ranges": {"momentun": 0.1}}, "no contender has a number 'momentun'"),
        ({"tune": 3, "ranges": {"lr": (0.2, 0.1)}}, "the lower first"),
    ],
)
def test_wrong_tunings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lab.race(["sphere-10"], ["LR(0.1)"], workers=0, budget=5, **options)


# -- runs stacked into one population --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", FIELD[:3])
@pytest.mark.parametrize("name", [*COURSES, "bands", "maxq-10"])
def test_stacked_runs_equal_separate_runs(chain, name):
    problem, seeds = problems.get(name), [0, 0, 1, 1]
    settings = make_settings(contender(chain), 4, [0, 1])
    together = run_stacked(problem, [each.contender for each in settings], seeds, budget=14)
    # Rounding errors grow from step to step in single precision, so the tolerance is larger there.
    close = 1e-4 if name == "spirals" else 1e-7
    for record, setting in zip(together, settings, strict=True):
        alone = lab.run(problem, setting.contender, setting.seed, budget=14)
        for key in ("reason", "evaluations", "gradients", "steps"):
            assert record[key] == alone[key]
        assert [row[0] for row in record["history"]] == [row[0] for row in alone["history"]]
        assert [row[2] for row in record["history"]] == pytest.approx([row[2] for row in alone["history"]], rel=close)
        assert record["value"] == pytest.approx(alone["value"], rel=close)
        assert ("path" in record) == ("path" in alone) == (problem.window is not None)
        paths = [[x for point in run.get("path", []) for x in point] for run in (record, alone)]
        assert paths[0] == pytest.approx(paths[1], rel=1e-4)
        json.dumps(record, allow_nan=False)


@pytest.mark.parametrize("chain", ["RMSprop | LR(0.1)", "muon"])
def test_stacked_runs_of_normalising_methods_equal_separate_runs(chain):
    """A gradient that vanishes by symmetry would let rounding errors decide the first normalised step."""
    settings = make_settings(contender(chain), 6, [0, 1, 2])
    field, seeds = [each.contender for each in settings], [each.seed for each in settings]
    problem = problems.get("spirals")
    together = run_stacked(problem, field, seeds, budget=6)
    alone = [lab.run(problem, one, seed, budget=6)["value"] for one, seed in zip(field, seeds, strict=True)]
    assert [each["value"] for each in together] == pytest.approx(alone, rel=1e-4)


def test_stacked_runs_end_separately():
    problem = problems.get("sphere-10")
    field = [contender(f"LR({lr})") for lr in (1e9, 0.1, 1e-6, 0.3)]
    records = run_stacked(problem, field, [0, 0, 0, 1], budget=120)
    assert [each["reason"] for each in records] == [
        lab.run(problem, one, seed, budget=120)["reason"] for one, seed in zip(field, (0, 0, 0, 1), strict=True)
    ]
    assert {each["reason"] for each in records} == {"diverged", "reached the optimum", "budget spent"}


@pytest.mark.parametrize(
    ("chain", "name"),
    [
        ("LBFGS | StrongWolfe", "rosenbrock"),  # several evaluations in a step
        ("CMAES(sigma=0.5)", "rosenbrock"),  # a search around one model
        ("SPSA | LR(1e-4)", "rosenbrock"),  # random, and without gradients
        ("NoiseSign | LR(0.01)", "rosenbrock"),  # random: members draw other numbers than runs
        ("torch.SGD(lr=0.1)", "rosenbrock"),
        ("Population(4) | Adam | LR(0.1)", "rosenbrock"),
    ],
)
def test_chains_that_would_step_differently_in_a_population_are_not_stacked(chain, name):
    with pytest.raises(CannotStackError):
        run_stacked(problems.get(name), [contender(chain)] * 2, [0, 1], budget=20)
    (record, *_) = lab.race([name], [chain], tune=1, seeds=1, budget=20, workers=0).runs
    assert "stacked" not in record


def test_map_numbers_combines_chains_that_differ_only_in_numbers():
    chains = [lab.parse(text) for text in ("Adam | LR(0.1)", "Adam(beta1=0.5) | LR(0.2)")]
    combined = map_numbers(chains, tuple)
    assert combined.links[0].kwargs == (("beta1", (0.9, 0.5)),)
    assert combined.links[1].args == ((0.1, 0.2),)
    assert map_numbers([lab.parse("Adam"), lab.parse("Lion")], tuple) is None
    assert map_numbers([lab.parse("Adam(amsgrad=True)"), lab.parse("Adam")], tuple) is None


def test_a_tuned_race_has_the_same_winners_unstacked_and_in_other_processes(tuned, tmp_path):
    file = tmp_path / "race.jsonl"
    alone = lab.race(COURSES, FIELD, tune=6, seeds=3, budget=80, workers=2, stack=False, file=file)
    assert sum("stacked" in run for run in tuned.runs) == 3 * 3 * 9
    assert not any("stacked" in run for run in alone.runs)
    pick = lambda results: [(row["problem"], row["seed"], row["chain"]) for row in lab.chosen_settings(results)]  # noqa: E731
    assert pick(tuned) == pick(alone)
    assert [row.contender for row in lab.standings(tuned)] == [row.contender for row in lab.standings(alone)]
    assert lab.Results.read(file).runs == alone.runs
    # Stacked runs in other processes are bit-identical to those in this one.
    again = lab.race(["spirals"], FIELD[:2], tune=6, seeds=3, budget=80, workers=2)
    expected = [run["digest"] for run in tuned.runs if run["problem"] == "spirals" and run["contender"] in FIELD[:2]]
    assert [run["digest"] for run in again.runs] == expected


def test_a_tuned_race_is_resumed(tmp_path):
    file = tmp_path / "race.jsonl"
    how = {"tune": 4, "seeds": 2, "budget": 20, "workers": 0, "file": file}
    whole = lab.race(["spirals"], FIELD[:2], **how)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:6]))
    again = lab.race(["spirals"], FIELD[:2], **how, resume=True)
    assert [run["value"] for run in again.runs] == pytest.approx([run["value"] for run in whole.runs], rel=1e-2)
    assert again.complete
    with pytest.raises(lab.ResultsError, match="with tune 4, this one has 6"):
        lab.race(["spirals"], FIELD[:2], **{**how, "tune": 6}, resume=True)


# -- the choice of settings ---------------------------------------------------------------------------------------------------


def test_the_best_setting_of_each_study_counts(tuned):
    goals, winners = lab.find_goals(tuned), lab.choose_winners(tuned)
    assert len(winners.runs) == len(COURSES) * len(FIELD) * 3
    for winner in winners.runs:
        key = [winner[name] for name in ("problem", "source", "seed")]
        study = [run for run in tuned.runs if [run[name] for name in ("problem", "source", "seed")] == key]
        own = [score_run(run, goals[winner["problem"]]) for run in study if run.get("setting") is not None]
        assert score_run(winner, goals[winner["problem"]]) == min(own)
    assert lab.summary(tuned) == lab.summary(winners)
    assert lab.profiles(tuned, 0.1) == lab.profiles(winners, 0.1)
    assert lab.choose_winners(winners) is winners


def test_contenders_without_tuned_numbers_have_one_setting_in_each_study(tuned):
    runs = [run for run in tuned.runs if run["source"] == FIELD[4] and run["problem"] == "rosenbrock"]
    assert [(run["seed"], run.get("setting")) for run in runs] == [
        (0, None),
        (1, None),
        (2, None),
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert [run["value"] for run in runs[:3]] == [run["value"] for run in runs[3:]]


def record(value, history, reason="budget spent"):
    return {"value": value, "history": history, "reason": reason}


def test_scores_rank_solved_runs_before_unsolved_and_crashed_ones():
    quick = record(0.1, [[0, 0, 10.0], [5, 0, 0.9], [9, 0, 0.1]])
    slow = record(0.0, [[0, 0, 10.0], [50, 0, 0.5]])
    close, far = record(2.0, [[0, 0, 10.0], [9, 0, 2.0]]), record(9.0, [[0, 0, 10.0], [9, 0, 9.0]])
    broken = record(None, [], "crashed")
    scores = [score_run(run, 1.0) for run in (quick, slow, close, far, broken)]
    assert scores[:2] == [5.0, 50.0]
    assert scores == sorted(scores)
    assert UNSOLVED < scores[2] < scores[3] < scores[4] == math.inf


def test_sensitivity_and_gains_are_computed_from_the_runs(tuned):
    (line,) = [line for line in lab.sensitivity(tuned, "spirals") if line["label"] == FIELD[0]]
    runs = [run for run in tuned.runs if (run["problem"], run["source"]) == ("spirals", FIELD[0]) and "values" in run]
    assert line["number"] == "LR.lr"
    assert line["x"] == sorted(run["values"]["LR.lr"] for run in runs)
    assert dict(zip(line["x"], line["y"], strict=True)) == {run["values"]["LR.lr"]: run["value"] for run in runs}
    assert [line["label"] for line in lab.sensitivity(tuned, "spirals", "beta1")] == FIELD[:2]
    gains = {(row["problem"], row["source"]): row for row in lab.tuning_gains(tuned)}
    assert len(gains) == len(COURSES) * len(FIELD)
    assert not gains["rosenbrock", FIELD[4]]["helped"]
    values = sorted(
        run["value"]
        for run in lab.choose_winners(tuned).runs
        if (run["problem"], run["source"]) == ("spirals", FIELD[0])
    )
    assert gains["spirals", FIELD[0]]["tuned"] == values[1]


def make_results(table, paces=None):
    """Return a race with one problem per row and one contender per column.

    Args:
        table: For each problem and contender, the evaluations to the goal for each seed.
        paces: The seconds of an evaluation, one for each contender.
    """
    names = [f"p{at}" for at in range(len(table))]
    labels = [f"c{at}" for at in range(len(table[0]))]
    runs = []
    for name, row in zip(names, table, strict=True):
        for label, costs, pace in zip(labels, row, paces or [0] * len(labels), strict=True):
            for seed, cost in enumerate(costs):
                history = [[0, 0, 1.0], [cost, cost * pace, 0.0]] if cost else [[0, 0, 1.0]]
                about = {"problem": name, "contender": label, "source": label, "seed": seed}
                runs.append({**about, **record(history[-1][2], history)})
    header = {
        "problems": [{"name": name, "optimum": 0.0} for name in names],
        "contenders": [{"label": label, "source": label} for label in labels],
        "seeds": list(range(len(table[0][0]))),
    }
    return lab.Results(header, runs)


def test_standings_have_ranks_profiles_and_ties():
    steady = make_results([[[10] * 5, [30] * 5, [50] * 5]] * 3)
    first, second, third = lab.standings(steady, draws=200)
    assert [row.rank for row in (first, second, third)] == [1, 2, 3]
    assert first.rank_interval == (1.0, 1.0)
    assert [row.solved for row in (first, second, third)] == [1, 1, 0]
    assert first.profile == 1
    assert second.profile == pytest.approx(1 - math.log(3) / math.log(4), abs=0.02)
    assert (first.tied, second.tied, third.tied) == ((), (), ())
    noisy = make_results([[[10, 90, 10, 90, 12], [90, 11, 90, 10, 13], [500] * 5]] * 2)
    rows = {row.contender: row for row in lab.standings(noisy, draws=400)}
    assert rows["c0"].tied == ("c1",)
    assert rows["c1"].tied == ("c0",)
    assert rows["c2"].tied == ()
    assert rows["c0"].rank_interval == (1.0, 2.0)
    equal = lab.standings(make_results([[[10] * 3, [10] * 3]]), draws=50)
    assert [row.rank for row in equal] == [1.5, 1.5]
    assert [row.tied for row in equal] == [("c1",), ("c0",)]
    unsolved = lab.standings(make_results([[[10] * 3, [0] * 3]]), draws=50)
    assert [(row.rank, row.solved) for row in unsolved] == [(1, 1), (2, 0)]


def test_races_are_judged_by_seconds_where_that_is_asked():
    results = make_results([[[10] * 3, [30] * 3, [0] * 3]] * 2, paces=[5.0, 1.0, 0.1])
    assert [row.contender for row in lab.standings(results, draws=50)] == ["c0", "c1", "c2"]
    rows = lab.standings(results, draws=50, by="seconds")
    assert [(row.contender, row.rank, row.solved) for row in rows] == [("c1", 1, 1), ("c0", 2, 1), ("c2", 3, 0)]
    assert rows[1].profile == pytest.approx(1 - math.log(50 / 30) / math.log(4), abs=0.02)
    assert lab.profiles(results, 0.05, by="seconds")[0]["x"] == pytest.approx([1.0, 50 / 30])
    with pytest.raises(ValueError, match="by='time'; a race is judged by 'evaluations' or by 'seconds'"):
        lab.standings(results, by="time")


def test_the_report_shows_the_tuning(tuned):
    page = lab.report(tuned)
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["expected"] == data["finished"] == len(tuned.runs)
    assert set(data["tuning"]["sensitivity"]) == set(COURSES)
    assert [row["contender"] for row in data["standings"]] == [row.contender for row in lab.standings(tuned)]
    assert all(len(row["chosen"]) == 3 for row in data["tuning"]["gains"])
    assert all(detail["chain"] for row in data["rows"] for detail in row["details"])
    plain = lab.report(lab.choose_winners(tuned))
    assert '"tuning":null' in plain


# -- other users of the ranges ----------------------------------------------------------------------------------------


def test_population_based_training_uses_declared_ranges():
    def attach(*links, settings):
        optimizer = mo.Optimizer(mo.Population.of(torch.nn.Linear(2, 1), 64), *links, m.PBT(settings, seed=0))
        return optimizer.attrs["hyperparameters"]

    drawn = attach(m.Adam(), m.LR(0.1), settings={"lr.lr": None, "adam.beta2": None})
    limits = {"lr.lr": (1e-4, 0.1), "adam.beta2": (0.9, 0.9999)}
    for name, (low, high) in limits.items():
        assert low <= float(drawn[name].min()) < float(drawn[name].max()) <= high
    wide = attach(m.LR(0.1), settings={"lr.lr": None})
    assert float(wide["lr.lr"].max()) > 0.1
    with pytest.raises(optim.ChainError, match="declares no range for 'clipnorm.max_norm'"):
        attach(m.ClipNorm(1.0), m.LR(0.1), settings={"clipnorm.max_norm": None})


def test_searches_for_coefficients_use_declared_ranges():
    a, b, base = ({"w": torch.full((2,), value)} for value in (1.0, 3.0, 0.0))
    tried = []

    def score(model):
        tried.append(float(model["w"][0]))
        return (model["w"] - 10).square().sum()

    result = merge.search("task_arithmetic", [base, a], score, 60)
    low, high = merge.RANGES["scale"][:2]
    assert low <= min(tried) < max(tried) <= high
    assert result.options["scale"] == pytest.approx([high], abs=0.05)
    assert merge.search("lerp", [a, b], score, 40).options["t"] == pytest.approx(1.0, abs=0.05)
    inside = merge.search("lerp", [a, b], score, 40, bounds=(0.2, 0.4)).options["t"]
    assert inside == pytest.approx(0.4, abs=0.02)


def test_a_range_with_a_scale_is_the_same_when_the_race_is_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"seeds": 1, "budget": 20, "workers": 0, "tune": 3}
    ranges = {"lr": optim.SearchRange(1e-3, 1.0, "linear"), "beta1": np.float32(0.5), "beta2": np.array([0.9, 0.99])}
    first = lab.race(["sphere-10"], ["Adam | LR(0.1)"], ranges=ranges, file="race.jsonl", **options)
    CliRunner().invoke(app, ["race", "--repeat", "race.jsonl", "--workers", "0", "--out", "again.html"])
    again = lab.Results.read("again.jsonl")
    assert again.header["settings"] == first.header["settings"]
    three = lab.race(["sphere-10"], ["Adam | LR(0.1)"], ranges={**ranges, "lr": (1e-3, 1.0, "linear")}, **options)
    assert three.header["settings"] == first.header["settings"]


@pytest.mark.parametrize("given", [(1e-3, 1.0, "cubic"), (1.0, 2.0, 3.0, 4.0), (-1.0, 1.0, "log"), ()])
def test_ranges_with_other_parts_are_refused(given):
    with pytest.raises(ValueError, match="the range of 'lr' is"):
        lab.race(["sphere-10"], ["Adam | LR(0.1)"], seeds=1, tune=1, ranges={"lr": given}, workers=0)
