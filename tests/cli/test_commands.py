"""The `moduli` command: output, exit codes and messages, in a pipe and in a terminal."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import moduli
from cli.terminal import Terminal
from moduli import io, lab
from moduli.cli import app

SMALL = [
    "race",
    "rosenbrock",
    "--with",
    "torch.SGD(lr=0.001)",
    "--with",
    "first: Adam | LR(0.05)",
    "--seeds",
    "2",
    "--budget",
    "40",
]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that runs the command with its output in pipes, in this process to save the start of Python and torch."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        words = [str(word) for word in arguments]
        monkeypatch.setattr(sys, "argv", ["moduli", *words])
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    return call


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def terminal(*arguments, **variables):
        opened.append(Terminal(*arguments, cwd=tmp_path, **variables))
        return opened[-1]

    yield terminal
    for each in opened:
        each.close()


def test_a_race_prints_a_table_and_writes_a_report(call, tmp_path):
    result = call(*SMALL, "--workers", "0", "--picture", "race.svg")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["problem", "optimizer", "final"]
    assert len(lines) == 3
    assert "first" in lines[2]
    assert {file.name for file in tmp_path.iterdir()} == {
        *("race.html", "race.jsonl", "race.svg"),
        *("race-profile.svg", "race-curves-rosenbrock.svg"),  # each figure is a file too
    }
    again = call("race", "--repeat", "race.jsonl", "--out", "again.html", "--json", "--workers", "0")
    assert again.returncode == 0, again.stderr
    digests = [run["digest"] for run in lab.Results.read(tmp_path / "race.jsonl").runs]
    repeated = json.loads(again.stdout)
    assert [run["digest"] for run in repeated["runs"]] == digests
    assert [contender["label"] for contender in repeated["contenders"]] == ["torch.SGD(lr=0.001)", "first"]


def test_json_has_the_documented_keys(call):
    result = call(*SMALL, "--json", "--workers", "0")
    content = json.loads(result.stdout)
    assert sorted(content) == [
        "budget", "command", "complete", "contenders", "format", "kind", "machine", "problems", "runs", "seconds", "seeds",
        "started", "summary", "target", "threads", "versions",
    ]  # fmt: skip
    assert sorted(content["runs"][0]) == [
        "contender", "detail", "digest", "evaluations", "gradients", "history", "kind", "path", "problem", "reason", "seconds",
        "seed", "source", "steps", "traceback", "value",
    ]  # fmt: skip
    assert sorted(content["summary"][0]) == [
        "best", "contender", "evaluations", "failed", "lower", "median", "problem", "reached", "reasons", "runs", "seconds",
        "source", "upper",
    ]  # fmt: skip
    assert content["command"][:2] == ["moduli", "race"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["race", "rosenbrok"], 2, "did you mean 'rosenbrock'"),
        (["race", "rosenbrock", "--with", "LR(1) | Adma"], 2, "LR(1) | Adma\n          ^^^^"),
        (["race", "rosenbrock", "--seeds", "x"], 2, "give a number of seeds"),
        (["race", "rosenbrock", "--seeds", "0"], 2, "at least one seed"),
        (["race", "--repeat", "nowhere.jsonl"], 2, "does not exist"),
        (["race", "rosenbrock", "--budget", "0"], 2, "budget"),
        (["race", "nowhere.py"], 2, "there is no file nowhere.py"),
        (["race", "bad.py"], 1, "ZeroDivisionError: division by zero\n  bad.py, line 2: 1 / 0"),
        (["race", "bad.py:other"], 1, "bad.py:other raised ZeroDivisionError"),
        (["fit", "nowhere.py:problem"], 2, "there is no file nowhere.py"),
        (["fit", "bad.py"], 1, "bad.py, line 2: 1 / 0"),
        (["fit", "unclosed.py"], 1, "SyntaxError"),
        (["fit", "raising.py"], 1, "raising.py raised RuntimeError"),
        (["fit", "raising.py"], 1, "raising.py, line 3: return x @ torch.ones(3)"),
        (["fit", "constant.py"], 1, "does not depend on its arguments"),
        (["fit", "rosenbrock", "--with", "Adma"], 2, "'Adam'"),
        (["fit", "rosenbrock", "--resume"], 2, "--out"),
        (["fit", "rosenbrock", "--with", "torch.SGD(lr=1e9)"], 1, ""),
        (["inspect", "nowhere.safetensors"], 2, "does not exist"),
        (["inspect", "."], 1, "2 safetensors files and no model.safetensors.index.json"),
        (["inspect", "broken.safetensors"], 1, "broken.safetensors"),
        (["merge", "soup", "a.safetensors", "nowhere", "-o", "c"], 2, "does not exist"),
        (["links", "xyzzy"], 2, "nothing is called 'xyzzy'"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_exit_codes_and_messages(call, tmp_path, arguments, code, message):
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header at all")
    io.save(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    (tmp_path / "bad.py").write_text("\n1 / 0\n")
    (tmp_path / "unclosed.py").write_text("def problem(x=(1.0:\n")
    (tmp_path / "raising.py").write_text("import torch\ndef problem(x=torch.ones(2)):\n    return x @ torch.ones(3)\n")
    (tmp_path / "constant.py").write_text("import torch\ndef problem(x=1.0):\n    return torch.ones(())\n")
    result = call(*arguments)
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr


def test_a_fit_is_resumed_and_inspected(call, tmp_path):
    (tmp_path / "wave.py").write_text(
        "import torch\nx = torch.linspace(0, 6, 50)\n"
        "def problem(amplitude=0.5, phase=0.0):\n"
        "    return ((amplitude * torch.sin(x + phase) - 2 * torch.sin(x + 0.3)) ** 2).mean()\n"
    )
    first = call("fit", "wave.py:problem", "--with", "Adam | LR(0.1)", "--steps", "50", "--out", "wave.safetensors")
    assert first.returncode == 0, first.stderr
    assert "all steps done" in first.stdout
    second = call(
        "fit",
        "wave.py:problem",
        "--with",
        "Adam | LR(0.1)",
        "--steps",
        "400",
        "--out",
        "wave.safetensors",
        "--resume",
        "--json",
    )
    content = json.loads(second.stdout)
    assert 50 < content["steps"] < 400
    assert content["reason"] == "converged: the gradient vanishes"
    assert content["value"] < 1e-6
    model = io.read(tmp_path / "wave.safetensors").module
    assert model["arg_amplitude"].item() == pytest.approx(2, abs=1e-2)
    about = call("inspect", "wave.safetensors", "--verify")
    assert "arg_amplitude" in about.stdout
    assert json.loads(call("inspect", "wave.safetensors", "--json").stdout)["parameters"] == 2


def test_merge_writes_a_file_and_refuses_invalid_coefficients(call, tmp_path):
    for name, value in (("a", 0.0), ("b", 4.0)):
        io.save(tmp_path / f"{name}.safetensors", {"w": torch.full((3,), value)})
    result = call("merge", "lerp", "a.safetensors", "b.safetensors", "-o", "c.safetensors", "--set", "t=0.25", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["parameters"] == 3
    assert io.read(tmp_path / "c.safetensors").module["w"].tolist() == [1.0, 1.0, 1.0]
    for wrong in (["--set", "t"], ["--set", "q=1"], ["--set", "t=__import__('os')"]):
        failed = call("merge", "lerp", "a.safetensors", "b.safetensors", "-o", "d.safetensors", *wrong)
        assert failed.returncode == 2
    failed = call("merge", "lerp", "a.safetensors", "b.safetensors", "-o", "d.safetensors", "--set", "t=abc")
    assert failed.returncode == 2
    assert "abc is no number" in failed.stderr
    before = (tmp_path / "a.safetensors").read_bytes()
    failed = call("merge", "lerp", "a.safetensors", "b.safetensors", "-o", "./a.safetensors", "--set", "t=0.25")
    assert failed.returncode == 2
    assert "is one of the models, and would be overwritten" in " ".join(failed.stderr.split())
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert call("merge", "stew", "a.safetensors", "b.safetensors", "-o", "d.safetensors").returncode == 2
    assert not (tmp_path / "d.safetensors").exists()


def test_links_and_race_list_names(call):
    listed = json.loads(call("links", "--json").stdout)
    assert {entry["name"] for entry in listed} >= {"Adam", "LR", "torch.SGD", "Population"}
    one = json.loads(call("links", "LR", "--json").stdout)
    assert one["kind"] == "link"
    assert one["documentation"]
    assert "learning rate" in call("links", "LR").stdout.lower()
    assert call("links", "Adam").stdout.startswith("Adam(*, beta1=0.9, beta2=0.999, eps=1e-08,")
    assert "torch.LBFGS" in call("links", "torch").stdout
    assert call("links", "trust", "region").stdout == call("links", "trust region").stdout != ""
    problems = json.loads(call("race", "--list", "--json").stdout)
    assert [entry["name"] for entry in problems] == lab.problems.names()
    assert "rosenbrock" in call("race", "--list").stdout
    assert call("--version").stdout.startswith("moduli ")
    assert "130" in call("--help").stdout


# -- in a terminal ----------------------------------------------------------------------------------------------------

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]m")

# A problem that is slow without using the processor.
# The evaluations of all processes are counted in a file. After 100 of them, runs wait until there is a file "go", so that a race
# of eight runs of 40 evaluations is neither at its start nor at its end for as long as a test likes, on any machine.
GATED = """
import pathlib, time
count, go = (pathlib.Path(__file__).with_name(name) for name in ("evaluations", "go"))
def problem(x=3.0):
    with count.open("ab") as file:
        file.write(b".")
    while count.stat().st_size > 100 and not go.exists():
        time.sleep(0.01)
    return x**2
"""


def test_python_m_moduli_is_the_command_and_respects_no_color(terminal):
    command = terminal("links", "LR", fresh=True, NO_COLOR="1")
    assert command.wait() == 0
    assert "learning rate" in command.text.lower()
    assert not COLOUR.search(command.text)


def test_output_in_a_terminal_has_colours(terminal):
    command = terminal(*SMALL, "--workers", "0")
    assert command.wait() == 0
    assert COLOUR.search(command.text)
    assert "report: race.html" in command.text


def test_the_table_fits_a_small_terminal(terminal):
    command = terminal(*SMALL, "--workers", "0", columns=80)
    assert command.wait() == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", command.text).splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["problem", "optimizer"])
    table = [line.rstrip() for line in lines[at : at + 3]]
    assert table[1].endswith("budget spent")
    assert "first" in table[2]
    assert max(map(len, table)) <= 80


def test_ctrl_c_in_a_race_saves_finished_runs(terminal, tmp_path):
    (tmp_path / "gated.py").write_text(GATED)
    field = ["--with", "torch.SGD(lr=0.001)", "--with", "torch.SGD(lr=0.002)"]
    arguments = ["race", "gated.py", *field, "--seeds", "4", "--budget", "40"]
    command = terminal(*arguments, "--workers", "2")
    command.read(until=re.compile("[1-7]/8"))
    command.key(b"\x03")
    assert command.wait() == 130
    assert "--resume" in command.text
    assert "Traceback" not in command.text
    runs = lab.Results.read(tmp_path / "race.jsonl").runs
    assert 1 <= len(runs) < 8
    assert (tmp_path / "race.html").exists()
    (tmp_path / "go").touch()
    again = terminal(*arguments, "--workers", "0", "--resume")
    assert again.wait() == 0
    assert f"{len(runs)}/8" in again.text  # the progress bar counts the earlier runs
    done = lab.Results.read(tmp_path / "race.jsonl")
    assert done.complete
    assert [run for run in done.runs if run in runs] == runs


def test_ctrl_c_in_a_fit_saves_and_resumes(terminal, tmp_path):
    arguments = ["fit", "rosenbrock", "--with", "torch.SGD(lr=1e-5)", "--out", "fit.safetensors"]
    command = terminal(*arguments, "--steps", "1000000000")
    command.read(until="steps/s")
    command.key(b"\x03")
    assert command.wait() == 130
    assert "interrupted" in command.text
    steps = io.read(tmp_path / "fit.safetensors").extra["fit"]["steps"]
    assert steps > 0
    again = terminal(*arguments, "--steps", str(steps + 10), "--resume")
    assert again.wait() == 0
    assert f"{steps + 10} steps" in again.text


def test_merge_aligns_models_built_by_a_file(call, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nmake = lambda: torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))\n"
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    order = torch.randperm(6)
    io.save("a.safetensors", net)
    with torch.no_grad():
        net[0].weight.copy_(net[0].weight[order])
        net[0].bias.copy_(net[0].bias[order])
        net[2].weight.copy_(net[2].weight[:, order])
    io.save("b.safetensors", net)
    words = ["merge", "lerp", "a.safetensors", "b.safetensors", "-o", "c.safetensors", "--set", "t=0.5", "--align"]
    result = call(*words, "--module", "net.py:make", "--example", "torch.zeros(1, 4)")
    assert result.returncode == 0, result.stderr
    first, merged = io.TensorFiles("a.safetensors"), io.TensorFiles("c.safetensors")
    assert all(torch.equal(first[name], merged[name]) for name in first)
    for wrong, message in (
        ([], "--align needs --module"),
        (["--module", "net.py:make", "--example", "__import__('os')"], "an example is a file, or torch.NAME(numbers)"),
        (["--module", "net.py:make", "--example", "torch.zeros(1, x)"], "malformed"),
        (["--module", "net", "--example", "torch.zeros(1, 4)"], "write FILE.py:NAME"),
    ):
        failed = call(*words, *wrong)
        assert failed.returncode == 2
        assert message in failed.stderr
    failed = call(*words, "--module", "net.py:build", "--example", "torch.zeros(1, 4)")
    assert failed.returncode == 2
    assert "has no 'build'" in failed.stderr


def test_examples_are_parsed_without_running_code(tmp_path):
    from moduli.cli._example import ExampleError, read_example

    assert [tuple(each.shape) for each in read_example("torch.zeros(1, 3), torch.ones(2, dtype=torch.int64)")] == [
        (1, 3),
        (2,),
    ]
    io.save(tmp_path / "x.safetensors", {"x": torch.ones(2, 3)})
    assert torch.equal(read_example(str(tmp_path / "x.safetensors"))[0], torch.ones(2, 3))
    for text in ("torch.load('x')", "zeros(3)", "torch.zeros(3", "torch.zeros(dtype=torch.nn)", "1 + 1"):
        with pytest.raises(ExampleError):
            read_example(text)


def make_versions(path):
    """Save a model before and after two edits, and return it."""
    net = moduli.adopt(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    assert net.history.version == 0
    io.save(path / "before.safetensors", net)
    net[1] = torch.nn.Linear(2, 3)
    net.append(torch.nn.ReLU())
    io.save(path / "after.safetensors", net)
    return net


def test_inspect_lists_the_edits_of_a_model(call, tmp_path):
    net = make_versions(tmp_path)
    result = call("inspect", "after.safetensors", "--history")
    assert result.returncode == 0
    assert result.stdout.rstrip("\n") == str(net.history)
    rows = json.loads(call("inspect", "after.safetensors", "--history", "--json").stdout)["edits"]
    assert [row["number"] for row in rows] == [1, 2]
    assert [row["where"] for row in rows] == [["1"], ["2"]]
    assert [row["when"] for row in rows] == [edit.when for edit in net.history]
    assert call("inspect", "before.safetensors", "--history").stdout == "version 0: no edits\n"
    assert json.loads(call("inspect", "after.safetensors", "--json").stdout)["edits"] == rows


def test_diff_compares_two_checkpoints(call, tmp_path):
    make_versions(tmp_path)
    result = call("diff", "before.safetensors", "after.safetensors")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "change", "left", "right", "distance", "largest"]
    assert [line.split()[:2] for line in lines[1:3]] == [["1.weight", "shape"], ["1.bias", "shape"]]
    assert lines[-1] == "2 tensors equal"
    rows = json.loads(call("diff", "before.safetensors", "after.safetensors", "--json").stdout)
    assert [row["change"] for row in rows["changes"]] == ["shape", "shape"]
    assert call("diff", "after.safetensors", "after.safetensors").stdout == "no difference: 4 tensors equal\n"
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    assert call("diff", "after.safetensors", "broken.safetensors").returncode == 1
    assert call("diff", "after.safetensors", "nowhere.safetensors").returncode == 2
    torch.save({"1.weight\x1b[2J": torch.zeros(2)}, tmp_path / "odd.pt")
    assert "\x1b" not in call("diff", "after.safetensors", "odd.pt").stdout
