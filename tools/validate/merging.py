"""Sections on merging: recipes beside mergekit, and barriers between strangers before and after alignment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

from _section import BENCHMARKS, ROOT, Section, capture, is_installed, load, tabulate


def check_recipes() -> Section:
    """Return the section on every method of mergekit on the same checkpoints, compared by the tests of this repository."""
    about = (
        "Each method of mergekit writes a merged checkpoint of small models, and so do the recipes here; every tensor is compared. "
        "These are the tests of `tests/io/test_mergekit.py`, which also say the tolerances: rounding of the dtype. Methods that "
        "draw random numbers are compared where none are drawn."
    )
    command = "python -m pytest tests/io/test_mergekit.py"
    title = "Merge recipes beside mergekit"
    if not is_installed("mergekit") or not is_installed("pytest"):
        lost = ["mergekit is not installed: nothing was compared"]
        return Section(title, about, command, "mergekit is not installed.", lost, ("mergekit",))
    report = ROOT / "site" / "mergekit.xml"
    report.parent.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
    }
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "tests/io/test_mergekit.py",
    ]
    subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False)
    rows, lost = [], []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        state = "**differs**" if bad else "not run" if case.find("skipped") is not None else "equal"
        rows.append((f"`{case.get('name')}`", state))
        if bad:
            lost.append(f"{case.get('name')} differs")
    return Section(title, about, command, tabulate(("comparison", ""), rows), lost, ("torch", "mergekit"))


def check_barriers() -> Section:
    """Return the section on barriers between networks from different seeds, before and after alignment."""
    align = load(BENCHMARKS / "align.py")
    with capture() as printed:
        for width in (32, 128, 512):
            align.compare(f"MLP of width {width}", lambda width=width: align.make_mlp(width))
        align.compare("residual network of 16 channels", lambda: align.ResidualNet(16))
    rows, lost, heads = [], [], []
    for line in printed.getvalue().splitlines():
        name, _, rest = line.partition(": ")
        values = dict(re.findall(r"(\w[\w ]*(?:, repaired)?) (-?\d+\.\d{4})", rest))
        heads = list(values)
        rows.append((name, *values.values()))
        if min(float(v) for k, v in values.items() if k != "naive") >= float(values["naive"]):
            lost.append(f"{name}: no alignment lowers the barrier")
        if float(values["by weights"]) > 0.5 * float(values["naive"]):
            lost.append(f"{name}: by weights, {values['by weights']} of {values['naive']} remain")
    about = (
        "Two networks are trained on scikit-learn's digits from two seeds; the barrier is the loss at the midpoint above the mean "
        "of the ends, on the training data. One pair of seeds: barriers vary by some tenths of themselves. A row counts as lost "
        "where more than half of the barrier remains after matching weights."
    )
    body = tabulate(("networks", *heads), rows)
    return Section(
        "Barriers before and after alignment",
        about,
        "python benchmarks/align.py",
        body,
        lost,
        ("torch", "scikit-learn"),
    )
