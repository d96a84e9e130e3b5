"""Races as tables, curves, tensors and separate figures."""

import csv
import dataclasses
import math

import numpy as np
import pytest
import torch

from lab import rogues
from moduli import lab
from moduli.lab import figures
from moduli.lab._report import report_data

FIELD = [
    lab.contender("Adam | LR(0.05)", label="Adam"),
    lab.contender("torch.SGD(lr=0.001)", label="50% & $x_1$ | plain"),
]


@pytest.fixture(scope="module")
def finished():
    return lab.race(["rosenbrock", "noisy-20"], FIELD, seeds=3, budget=60, workers=0)


@pytest.fixture(scope="module")
def tuned():
    return lab.race(["rosenbrock"], FIELD, seeds=3, budget=40, tune=3, workers=0)


def test_the_summary_table_has_medians_and_intervals(finished):
    rows = list(csv.DictReader(lab.summary_table(finished, "csv").splitlines()))
    assert [(row["problem"], row["optimizer"]) for row in rows] == [
        (problem["name"], entry.label) for problem in finished.header["problems"] for entry in FIELD
    ]
    for row in rows:
        runs = [
            run for run in finished.runs if (run["problem"], run["contender"]) == (row["problem"], row["optimizer"])
        ]
        values = sorted(run["value"] for run in runs)
        assert [float(row[key]) for key in ("low", "value", "high")] == values
    for name in ("rosenbrock", "noisy-20"):
        own = [row for row in rows if row["problem"] == name]
        best = min(own, key=lambda row: float(row["value"]))
        assert best["best"] == "True"
        tied = [float(row["low"]) <= float(best["high"]) for row in own]
        assert [row["best"] == "True" for row in own] == tied


def test_tables_in_markdown_and_latex_escape_labels(finished, tmp_path):
    text = lab.summary_table(finished, "md")
    assert "50% & $x_1$ \\| plain" in text
    assert text.count("**") >= 4
    assert len({line.replace("\\|", "").count("|") for line in text.splitlines()}) == 1
    latex = lab.summary_table(finished, "latex")
    assert r"50\% \& \$x\_1\$ \textbar{} plain" in latex
    assert latex.count(r"\textbf{") == text.count("**") // 2
    for line in latex.splitlines():
        assert " & " not in line or line.replace(r"\&", "").count("&") == 6
    assert lab.write_summary(finished, tmp_path / "t.tex").read_text() == latex
    with pytest.raises(lab.ResultsError, match="csv, md, latex, not 'html'"):
        lab.summary_table(finished, "html")
    with pytest.raises(lab.ResultsError, match="ends in"):
        lab.write_summary(finished, tmp_path / "t.html")


def test_failed_runs_have_no_number_in_the_table():
    results = lab.race(["sphere-10"], [rogues.diverging, rogues.raising, rogues.tame], seeds=2, budget=60, workers=0)
    rows = list(csv.DictReader(lab.summary_table(results, "csv").splitlines()))
    assert [row["value"] == "" for row in rows][1:] == [True, False]
    assert rows[2]["best"] == "True"
    assert "| - |" in lab.summary_table(results, "md")


def test_curves_are_written_and_loaded(finished, tuned, tmp_path):
    rows = list(csv.reader(lab.write_curves(finished, tmp_path / "curves.csv").read_text().splitlines()))
    assert rows[0] == ["problem", "contender", "seed", "evaluations", "seconds", "value"]
    assert len(rows) - 1 == sum(len(run["history"]) for run in finished.runs)
    curves = lab.load(finished)
    assert curves.names == ("problem", "contender", "seed", "evaluation")
    assert curves.shape == (2, 2, 3, 61)
    for run in finished.runs:
        own = curves.sel(problem=run["problem"], contender=run["contender"], seed=run["seed"])
        assert float(own.sel(evaluation=60)) == run["value"]
        for count, _, value in run["history"]:
            assert float(own.sel(evaluation=count)) == value
        assert torch.equal(own.data, own.data.cummin(0).values)
    figure = curves.sel(problem="rosenbrock").mean("seed").plot("line", x="evaluation")
    assert len(figure.axes[0].lines) == 2
    assert lab.load(tuned).shape == (1, 2, 3, 41)
    text = lab.write_curves(tuned, tmp_path / "tuned.csv").read_text()
    assert text.startswith("problem,contender,seed,setting,chain,evaluations,seconds,value\n")


def test_a_file_with_missing_runs_and_equal_labels_is_loaded(tmp_path):
    file = tmp_path / "race.jsonl"
    field = [lab.contender(f"LR({lr})", label="same") for lr in (0.1, 0.2)]
    lab.race(["sphere-10"], field, seeds=2, budget=20, workers=0, file=file)
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    curves = lab.load(file)
    assert list(curves.dims[1].labels) == ["LR(0.1)", "LR(0.2)"]
    assert curves.data[0, 1, 1].isnan().all()
    assert not curves.data[0, 0].isnan().any()


def test_a_long_race_has_a_logarithmic_grid():
    results = lab.race(["noisy-20"], ["LR(0.01)"], seeds=1, budget=3000, workers=0)
    curves = lab.load(results)
    grid = list(curves.dims[3].labels)
    assert len(grid) < 450
    assert (grid[0], grid[1], grid[-1]) == (0, 1, 3000)
    assert math.isfinite(float(curves.data[..., -1]))


def test_figures_are_separate_files_with_embedded_fonts(tuned, finished, tmp_path):
    names = [path.name for path in lab.write_figures(tuned, tmp_path / "race.pdf")]
    assert names == ["race-curves-rosenbrock.pdf", "race-sensitivity-rosenbrock.pdf", "race-profile.pdf"]
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert b"/FontFile2" in data  # TrueType, embedded
        assert b"/Type3" not in data
    for path in lab.write_figures(finished, tmp_path / "race.svg"):
        text = path.read_text()
        assert "<text" not in text
        assert "font-family" not in text
    again = lab.write_figures(tuned, tmp_path / "again" / "race.pdf")
    assert [path.read_bytes() for path in again] == [(tmp_path / name).read_bytes() for name in names]
    drawn = lab.figures(tuned)
    lines = drawn["sensitivity-rosenbrock"].axes[0].lines
    assert [len(line.get_xdata()) for line in lines] == [3, 3]


def test_figures_of_a_problem_whose_name_is_no_file(tmp_path):
    class Bowl(lab.problems.Problem):
        name, summary = "bowls/one", "a bowl"

        def model(self, seed):
            return torch.nn.Linear(1, 1)

        def loss(self, model):
            return model(torch.ones(1)).square().sum()

    results = lab.race([Bowl()], ["LR(0.1)"], seeds=1, budget=5, workers=0)
    names = [path.name for path in lab.write_figures(results, tmp_path / "race.svg")]
    assert names == ["race-curves-bowls-one.svg", "race-profile.svg"]


def test_a_crash_has_no_part_in_an_interval_or_a_gain(tuned):
    results = dataclasses.replace(tuned, runs=[])
    results.take({**run, "reason": str(lab.RunReason.CRASHED)} for run in tuned.runs)
    for row in csv.DictReader(lab.summary_table(results, "csv").splitlines()):
        assert (row["value"], row["low"], row["high"]) == ("", "", "")
    assert {(row["written"], row["tuned"]) for row in lab.tuning_gains(results)} == {(None, None)}


def draw_problem(loss, tmp_path):
    class Written(lab.problems.Problem):
        name, summary = "written", "a loss without a known optimum"

        def model(self, seed):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return torch.nn.Linear(1, 1)

        def loss(self, model):
            return loss(model(torch.ones(1)).sum())

    results = lab.race([Written()], ["LR(0.05)", "Adam | LR(0.05)"], seeds=2, budget=9, workers=0)
    lab.write_report(results, tmp_path / "race.html")
    for kind in ("png", "svg", "pdf"):
        lab.write_picture(results, tmp_path / f"race.{kind}")
        assert len(lab.write_figures(results, tmp_path / f"race.{kind}")) == 2
    return results, figures(results)["curves-written"].axes[0]


def test_losses_below_zero_are_drawn_above_the_least(tmp_path):
    results, panel = draw_problem(lambda y: -5 - y.tanh(), tmp_path)
    least = min(value for run in results.runs for *_, value in run["history"])
    start = np.median([run["history"][0][2] for run in results.runs if run["source"] == "LR(0.05)"])
    assert panel.get_ylabel() == "loss above the least value"
    assert panel.lines[0].get_ydata()[0] == pytest.approx(start - least)
    assert report_data(results)["problems"][0]["shift"] == least


def test_losses_that_are_never_numbers_are_drawn(tmp_path):
    _, panel = draw_problem(lambda y: y * torch.nan, tmp_path)
    assert panel.get_ylabel() == "loss"
