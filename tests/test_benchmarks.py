"""The code of the benchmarks: turns of candidates, and a page that keeps sections that were not measured again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launching import load_program

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name):
    return load_program(BENCHMARKS / f"{name}.py")


@pytest.fixture
def program():
    return load("run")


@pytest.fixture
def run(program, tmp_path, monkeypatch):
    """Return a function that runs the command on a directory with two small benchmarks."""
    for name, value in (("first", 1.5), ("second", 12345.0)):
        (tmp_path / f"{name}.py").write_text(
            f'"""The {name} claim.\n\nIn a few | words.\n"""\n'
            "def table():\n"
            f'    return [{{"name": "a | b", "value": {value}, "bar": 2.0, "unit": "us", "ok": {value} <= 2.0}},\n'
            '            {"name": "free", "value": 0.5, "bar": None, "unit": "x", "ok": True},\n'
            '            {"name": "text", "value": 7.0, "bar": "at least 6 x", "unit": "x", "ok": True}]\n'
        )
    (tmp_path / "_helper.py").write_text("raise RuntimeError('helpers are not benchmarks')")
    (tmp_path / "tool.py").write_text("")
    monkeypatch.setattr(program, "HERE", tmp_path)
    before = set(sys.modules)
    yield lambda *args: program.main([*args, "--page", str(tmp_path / "page.md")])
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_page_keeps_sections_that_are_not_measured_again(run, tmp_path, capsys):
    assert run() == 0
    page = (tmp_path / "page.md").read_text()
    assert "## The first claim\n\nIn a few | words.\n" in page
    assert "| a \\| b | 1.5 us | 2 us | met |" in page
    assert "| a \\| b | 12,345 us | 2 us | **missed** |" in page
    assert "| free | 0.5 x |  |  |" in page
    assert "| text | 7 x | at least 6 x | met |" in page
    assert torch.__version__ in page
    assert "The second claim" in capsys.readouterr().out

    first = tmp_path / "first.py"
    first.write_text(first.read_text().replace("The first claim", "The newer claim"))
    assert run("first") == 0
    newer = (tmp_path / "page.md").read_text()
    assert newer == page.replace("The first claim", "The newer claim")


def test_a_quick_run_takes_fewer_turns_and_writes_no_page(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MODULI_BENCH_QUICK", "")  # restored after the run sets it
    assert run("--quick", "first") == 0
    assert not (tmp_path / "page.md").exists()
    calls = []
    load("_timing").interleaved({"a": lambda: calls.append(1)}, rounds=40, number=1)
    assert len(calls) == 5


def test_a_missed_bar_fails_when_asked(run):
    assert run("--strict") == 1
    assert run("first", "--strict") == 0


def test_unknown_benchmarks_and_missing_peers_are_named(run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("third")
    assert "no benchmark is called third; there are: first, second, tool" in capsys.readouterr().err
    (tmp_path / "third.py").write_text("import a_peer_nobody_has")
    assert run("third") == 1
    assert "a_peer_nobody_has is not installed" in capsys.readouterr().out


def test_candidates_take_turns_on_one_thread():
    interleaved = load("_timing").interleaved
    threads, calls = torch.get_num_threads(), []
    candidates = {name: lambda name=name: calls.append((name, torch.get_num_threads())) for name in "abc"}
    times = interleaved(candidates, rounds=3, number=2)
    assert list(times) == ["a", "b", "c"]
    assert all(time >= 0 for time in times.values())
    assert "".join(name for name, _ in calls[::2]) == "abccbabca"
    assert {count for _, count in calls} == {1}
    assert torch.get_num_threads() == threads


def test_the_number_of_calls_fills_the_given_time():
    calls = []
    interleaved = load("_timing").interleaved
    assert interleaved({"a": lambda: calls.append(1)}, rounds=2, seconds=1e-4)["a"] < 1e-3
    assert len(calls) > 20


def test_every_row_of_the_readme_points_to_its_section():
    root = BENCHMARKS.parent
    rows = re.findall(r"^\|.*\[`(\w+)`\]\(docs/benchmarks\.md#(\w+)\) \|$", (root / "README.md").read_text(), re.M)
    page = (root / "docs" / "benchmarks.md").read_text()
    assert len(rows) >= 10
    assert all(name == linked and f'<a id="{linked}"></a>' in page for name, linked in rows)


def test_several_runs_show_their_median_and_range(run, tmp_path):
    (tmp_path / "first.py").write_text(
        '"""Counts."""\nruns = []\n'
        "def table():\n"
        "    runs.append(1)\n"
        '    return [{"name": "a", "value": [3.0, 1.0, 2.0][len(runs) - 1], "bar": 2.5, "unit": "x", "ok": len(runs) > 1}]\n'
    )
    assert run("first", "--repeat", "3", "--strict") == 0
    assert "| a | 2 x (1 to 3) | 2.5 x | met |" in (tmp_path / "page.md").read_text()


def test_rows_of_one_name_with_several_peers_keep_their_own_runs():
    program = load("run")
    rows, again = (
        [
            {"name": "time", "value": of[peer], "bar": None, "unit": f"of {peer}", "ok": True}
            for peer in ("torch", "scipy")
        ]
        for of in ({"torch": 1.0, "scipy": 3.0}, {"torch": 1.5, "scipy": 3.5})
    )
    assert [row["values"] for row in program.add_runs(rows, [again])] == [[1.0, 1.5], [3.0, 3.5]]
    program.add_capability(rows, "default", again)
    assert [row["others"] for row in rows] == [{"default": 1.5}, {"default": 3.5}]


def test_a_failure_on_another_processor_is_reported_and_leaves_the_rows(run, program, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise subprocess.CalledProcessError(1, "run.py", stderr="no such kernel")

    monkeypatch.setattr(program, "run_elsewhere", fail)
    assert run("first", "--capability", "default") == 1
    assert "no such kernel" in capsys.readouterr().out
    assert "| a \\| b | 1.5 us | 2 us | met |\n" in (tmp_path / "page.md").read_text()


def test_other_capabilities_are_columns(run, tmp_path, monkeypatch):
    program = load("run")
    rows = [{"name": "a", "value": 1.0, "bar": None, "unit": "x", "ok": True}]
    program.add_capability(rows, "default", [{"name": "a", "value": 2.5, "unit": "x"}])
    program.add_capability(rows, "avx2", [])
    text = program.section(sys.modules[__name__], rows)
    assert "| what | measured | bar | | default | avx2 |" in text
    assert "| a | 1 x |  |  | 2.5 x |  |" in text
    (tmp_path / "first.py").write_text(
        '"""Returns its processor."""\nimport os\n'
        "def table():\n"
        '    value = 2.0 if os.environ.get("ATEN_CPU_CAPABILITY") == "default" else 1.0\n'
        '    return [{"name": "a", "value": value, "bar": None, "unit": "x", "ok": True}]\n'
    )
    code = (BENCHMARKS / "run.py").read_text()
    (tmp_path / "run.py").write_text(code)
    monkeypatch.setattr(program, "__file__", str(tmp_path / "run.py"))
    (row,) = program.run_elsewhere(tmp_path / "first.py", "default", quick=False)
    assert row["value"] == 2.0


@pytest.fixture
def ratios():
    return load_program(BENCHMARKS.parent / "tools" / "readme_table.py")


def test_the_table_of_the_readme_is_that_of_the_page(ratios):
    table = ratios.make_table(ratios.PAGE.read_text())
    readme = ratios.README.read_text()
    assert table in readme, "run tools/readme_table.py --write"
    assert ratios.replace_table(readme, table) == readme
    assert table.count("(slower") >= 2  # rows that moduli loses are in the table


def test_rows_are_read_with_their_ranges(ratios, monkeypatch):
    page = (
        "<!-- one -->\n| what | measured | bar | |\n|---|---:|---:|---|\n"
        "| a \\| b | 0.5 x (0.45 to 0.62) | 1 x | met |\n| c | 2 of torch |  |  |\n| c | 4 of scipy |  |  |\n"
    )
    rows = ratios.read_page(page)
    assert ratios.find_ratio(rows, "one", "a | b") == (0.5, "0.45 to 0.62")
    assert ratios.find_ratio(rows, "one", "c: of scipy") == (4.0, "")
    assert ratios.find_ratio(rows, "one", "a | b // c") == (0.25, "")
    with pytest.raises(LookupError, match="no row 'd' in its section 'one'"):
        ratios.find_ratio(rows, "one", "d")
    lines = (ratios.Line("w", "p", "one", ("a | b",)), ratios.Line("w", "p", "one", ("a | b", "c: of torch")))
    monkeypatch.setattr(ratios, "LINES", lines)
    assert "| w | p | 0.45 to 0.62 | [`one`]" in ratios.make_table(page)
    assert "| w | p | 0.45 to 0.62 / 2 (slower) |" in ratios.make_table(page)
    with pytest.raises(LookupError, match="no table"):
        ratios.replace_table("nothing", "x")
