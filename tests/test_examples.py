"""Each program in examples/ runs without an error or warning, and prints something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
SECONDS = 600  # generous, for a loaded machine


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_examples_run(program, tmp_path):
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        # One thread each, because tests run in parallel.
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"
