"""A new user's first hour: race, fit, interrupt, resume, inspect, merge two sharded models, wrong names.

In a terminal of 80 x 24, in a pipe, without colours, and in the locale C: the same answers, and nothing but text in pipes.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from cli.terminal import Terminal
from moduli import io

WAVE = """
import torch
x = torch.linspace(0, 6, 50, dtype=torch.float64)
y = 2 * torch.sin(x + 0.3) + 0.05 * torch.sin(37 * x)

def problem(amplitude=0.5, phase=0.0):
    return amplitude * torch.sin(x + phase) - y
"""

SLOW = """
import time
def problem(x=3.0):
    time.sleep(0.02)
    return (x - 1) ** 2
"""

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def sharded(folder, value):
    folder.mkdir()
    names = [f"model.layers.{at}.weight" for at in range(4)]
    for at in (0, 1):
        save_file(
            {name: torch.full((2, 2), value) for name in names[2 * at : 2 * at + 2]}, folder / f"part-{at}.safetensors"
        )
    index = {"weight_map": {name: f"part-{at // 2}.safetensors" for at, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


class Piped:
    """The command as another program sees it."""

    def __init__(self, folder, **variables):
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}

    def __call__(self, *arguments):
        words = [sys.executable, "-m", "moduli_command", *arguments]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, timeout=600, check=False
        )
        return done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")


class InTerminal:
    """The command as a person sees it."""

    def __init__(self, folder, **variables):
        self.folder, self.variables = folder, variables

    def __call__(self, *arguments):
        shown = Terminal(*arguments, cwd=self.folder, columns=80, **self.variables)
        try:
            code = shown.wait(seconds=600)
        finally:
            shown.close()
        text = ESCAPES.sub("", shown.text).replace("\r\n", "\n")
        return code, text, text


def hour(call, folder):
    """Everything that was printed."""
    (folder / "wave.py").write_text(WAVE)
    (folder / "slow.py").write_text(SLOW)
    sharded(folder / "base", 0.0), sharded(folder / "math", 4.0)
    pages = []

    def said(code, *arguments):
        found, out, err = call(*arguments)
        assert found == code, (arguments, out, err)
        assert "Traceback" not in out + err, err
        pages.append(out + err)
        return out, err

    out, _ = said(0, "race", "wave.py:problem", "--with", "lbfgs", "--with", "Adam | LR(0.1)", "--seeds", "2", "--budget", "40",
                  "--workers", "0", "--target", "0.1", "--table", "runs.csv")  # fmt: skip
    assert "2/2" in out
    assert (folder / "race.html").exists()
    assert (folder / "runs.csv").read_text().count("\n") == 5
    said(0, "race", "wave.py:problem", "--with", "lbfgs", "--with", "Adam | LR(0.1)", "--seeds", "3", "--budget", "40",
         "--workers", "0", "--target", "0.1", "--resume")  # fmt: skip
    out, _ = said(0, "fit", "wave.py:problem", "--out", "wave.safetensors", "--steps", "30")
    assert re.search(r"amplitude = (2\.0|1\.99)\d* ± 0\.00\d", out), out
    _, err = said(2, "fit", "wave.py:problem", "--out", "wave.safetensors")
    assert "--resume" in err
    assert "--overwrite" in err
    out, _ = said(0, "fit", "wave.py:problem", "--out", "wave.safetensors", "--steps", "40", "--resume")
    assert "amplitude" in out
    out, _ = said(0, "inspect", "wave.safetensors", "--verify")
    assert "checksums verified" in out
    assert "fit.parameters.amplitude" in out
    assert "arg_amplitude" in out
    said(
        0,
        "merge",
        "lerp",
        "base",
        "math",
        "-o",
        "merged",
        "--set",
        "t=layers.0-1:0.25,layers.2-3:0.5",
        "--shard-size",
        "40B",
    )
    merged = io.TensorFiles(folder / "merged")
    assert [float(merged[name].mean()) for name in merged] == [1.0, 1.0, 2.0, 2.0]
    assert sorted(os.listdir(folder / "merged"))[0] == "config.json"
    out, _ = said(0, "inspect", "merged")
    assert "4 tensors in 2 files" in out or "4 tensors in 4 files" in out
    assert not [name for name in os.listdir(folder) if name.endswith(".part")]
    return pages


def test_wrong_names_in_a_terminal(tmp_path):
    (tmp_path / "wave.py").write_text(WAVE)
    sharded(tmp_path / "base", 0.0), sharded(tmp_path / "math", 4.0)
    call = InTerminal(tmp_path)
    for arguments, message in [
        (["race", "rosenbrok"], "rosenbrock"),
        (["race", "rosenbrock", "--with", "Adma | LR(1)"], "Adma"),
        (["race", "wave.py:problem", "-o", "base"], "is a directory"),
        (["race", "wave.py:problem", "-o", "."], "'.' is a directory"),
        (["fit", "wave.py:probelm"], "has no 'probelm'"),
        (["merge", "tiles", "base", "math", "-o", "x"], "'tiles' is not a recipe"),
        (["merge", "lerp", "base", "maths", "-o", "x", "--set", "t=0.5"], "'maths' does not exist"),
        (["links", "xyzzyx"], "nothing is called"),
        (["inspect", "wave.safetensor"], "does not exist"),
    ]:
        code, text, _ = call(*arguments)
        assert (code, message in " ".join(text.split()), "Traceback" in text) == (2, True, False), text
    assert sorted(os.listdir(tmp_path)) == ["base", "math", "wave.py"]


@pytest.mark.parametrize("variables", [{}, {"LC_ALL": "C", "PYTHONUTF8": "1", "NO_COLOR": "1"}])
def test_in_a_terminal_of_80_columns(variables, tmp_path):
    pages = hour(InTerminal(tmp_path, **variables), tmp_path)
    lines = [line.split("\r")[-1] for line in pages[0].split("\n")]
    at = next(place for place, line in enumerate(lines) if line.split()[:2] == ["problem", "optimizer"])
    table = lines[at : at + 3]
    assert [line.split()[-2:] for line in table[1:2]] == [["the", "target"]]
    assert all(len(line) <= 80 and line == line.rstrip() for line in table)


def test_in_a_pipe_in_the_locale_c(tmp_path):
    """A real process, so only what differs there: what is printed can be encoded, and is nothing but text."""
    call = Piped(tmp_path, LC_ALL="C", LANG="C", NO_COLOR="1")
    (tmp_path / "wave.py").write_text(WAVE)
    code, out, err = call(
        "race", "wave.py:problem", "--with", "lbfgs", "--seeds", "1", "--budget", "10", "--workers", "0"
    )
    assert (code, "Traceback" in err) == (0, False), err
    assert "\x1b" not in out + err
    assert all(line == line.rstrip() and len(line) <= 100 for line in out.splitlines())


def test_in_a_locale_of_ascii(tmp_path):
    call = Piped(tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    (tmp_path / "wave.py").write_text(WAVE.replace("amplitude", "größe"), encoding="utf-8")
    code, out, err = call("fit", "wave.py:problem", "--steps", "20")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert re.search(r"gr\\xf6\\xdfe = .* \+- 0\.00\d", out), out


def test_a_fit_that_is_interrupted_is_resumed(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["fit", "slow.py:problem", "--with", "LR(0.01)", "--out", "slow.safetensors"]
    shown = Terminal(*words, "--steps", "100000", cwd=tmp_path, columns=80)
    try:
        shown.read(until="steps/s", seconds=600)
        shown.key(b"\x03")
        assert shown.wait(seconds=600) == 130
    finally:
        shown.close()
    assert "--resume" in shown.text
    steps = io.read(tmp_path / "slow.safetensors").extra["fit"]["steps"]
    code, text, _ = InTerminal(tmp_path)(*words, "--steps", str(steps + 5), "--resume")
    assert code == 0
    assert f"{steps + 5} steps" in text
