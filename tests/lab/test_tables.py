"""Races as tables, curves, tensors and separate figures."""

import csv
import math

import pytest
import torch

from lab import rogues
from moduli import lab

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
