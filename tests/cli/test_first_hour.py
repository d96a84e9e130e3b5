"""A typical first session: race, fit, interrupt, resume, inspect, merge two sharded models, wrong names.

It runs in a terminal of 80 columns, in a pipe, without colours, and in the locale C.
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


def write_shards(folder, value):
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
    """The command in a new process with its output in pipes."""

    def __init__(self, folder, **variables):
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}

    def __call__(self, *arguments):
        words = [sys.executable, "-m", "moduli_command", *arguments]
        process = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, timeout=600, check=False
        )
        return process.returncode, process.stdout.decode("utf-8"), process.stderr.decode("utf-8")


class InTerminal:
    """The command in a terminal of 80 columns."""

    def __init__(self, folder, **variables):
        self.folder, self.variables = folder, variables

    def __call__(self, *arguments):
        command = Terminal(*arguments, cwd=self.folder, columns=80, **self.variables)
        try:
            code = command.wait(seconds=600)
        finally:
            command.close()
        text = ESCAPES.sub("", command.text).replace("\r\n", "\n")
        return code, text, text


def run_session(call, folder):
    """Run all commands of the session with their checks, and return what each printed."""
    (folder / "wave.py").write_text(WAVE)
    (folder / "slow.py").write_text(SLOW)
    write_shards(folder / "base", 0.0), write_shards(folder / "math", 4.0)
    pages = []

    def check(code, *arguments):
        exit_code, out, err = call(*arguments)
        assert exit_code == code, (arguments, out, err)
        assert "Traceback" not in out + err, err
        pages.append(out + err)
        return out, err

    out, _ = check(0, "race", "wave.py:problem", "--with", "lbfgs", "--with", "Adam | LR(0.1)", "--seeds", "2", "--budget", "40",
                   "--workers", "0", "--target", "0.1", "--table", "runs.csv")  # fmt: skip
    assert "2/2" in out
    assert (folder / "race.html").exists()
    assert (folder / "runs.csv").read_text().count("\n") == 5
    check(0, "race", "wave.py:problem", "--with", "lbfgs", "--with", "Adam | LR(0.1)", "--seeds", "3", "--budget", "40",
          "--workers", "0", "--target", "0.1", "--resume")  # fmt: skip
    out, _ = check(0, "fit", "wave.py:problem", "--out", "wave.safetensors", "--steps", "30")
    assert re.search(r"amplitude = (2\.0|1\.99)\d* ± 0\.00\d", out), out
    _, err = check(2, "fit", "wave.py:problem", "--out", "wave.safetensors")
    assert "--resume" in err
    assert "--overwrite" in err
    out, _ = check(0, "fit", "wave.py:problem", "--out", "wave.safetensors", "--steps", "40", "--resume")
    assert "amplitude" in out
    out, _ = check(0, "inspect", "wave.safetensors", "--verify")
    assert "checksums verified" in out
    assert "fit.parameters.amplitude" in out
    assert "arg_amplitude" in out
    check(
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
    out, _ = check(0, "inspect", "merged")
    assert "4 tensors in 2 files" in out
    assert not [name for name in os.listdir(folder) if name.endswith(".part")]
    return pages


def test_wrong_names_are_errors_with_the_name(tmp_path):
    (tmp_path / "wave.py").write_text(WAVE)
    write_shards(tmp_path / "base", 0.0), write_shards(tmp_path / "math", 4.0)
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
def test_the_session_in_a_terminal_of_80_columns(variables, tmp_path):
    pages = run_session(InTerminal(tmp_path, **variables), tmp_path)
    lines = [line.split("\r")[-1] for line in pages[0].split("\n")]
    first = next(index for index, line in enumerate(lines) if line.split()[:2] == ["problem", "optimizer"])
    table = lines[first : first + 3]
    assert [line.split()[-2:] for line in table[1:2]] == [["the", "target"]]
    assert all(len(line) <= 80 and line == line.rstrip() for line in table)


def test_output_of_a_pipe_in_the_locale_c_is_plain_text(tmp_path):
    """A new process is slow, so it runs one command: its output must be encodable and free of escape sequences."""
    call = Piped(tmp_path, LC_ALL="C", LANG="C", NO_COLOR="1")
    (tmp_path / "wave.py").write_text(WAVE)
    code, out, err = call(
        "race", "wave.py:problem", "--with", "lbfgs", "--seeds", "1", "--budget", "10", "--workers", "0"
    )
    assert (code, "Traceback" in err) == (0, False), err
    assert "\x1b" not in out + err
    assert all(line == line.rstrip() and len(line) <= 100 for line in out.splitlines())


def test_output_in_an_ascii_locale_escapes_other_characters(tmp_path):
    call = Piped(tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    (tmp_path / "wave.py").write_text(WAVE.replace("amplitude", "größe"), encoding="utf-8")
    code, out, err = call("fit", "wave.py:problem", "--steps", "20")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert re.search(r"gr\\xf6\\xdfe = .* \+- 0\.00\d", out), out


def test_a_fit_that_is_interrupted_is_resumed(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["fit", "slow.py:problem", "--with", "LR(0.01)", "--out", "slow.safetensors"]
    command = Terminal(*words, "--steps", "100000", cwd=tmp_path, columns=80)
    try:
        command.read(until="steps/s", seconds=600)
        command.key(b"\x03")
        assert command.wait(seconds=600) == 130
    finally:
        command.close()
    assert "--resume" in command.text
    steps = io.read(tmp_path / "slow.safetensors").extra["fit"]["steps"]
    code, text, _ = InTerminal(tmp_path)(*words, "--steps", str(steps + 5), "--resume")
    assert code == 0
    assert f"{steps + 5} steps" in text
