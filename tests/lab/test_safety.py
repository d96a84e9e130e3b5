"""Safety of races: results and labels are never executed, and no process or file is left over."""

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from moduli import lab
from moduli.lab import _pool, _worker

EVIL = """
from pathlib import Path
Path("owned").write_text("owned")
from moduli.lab.problems import get
problem = get("rosenbrock")
"""


def test_a_report_of_a_file_runs_no_problem_file_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text(EVIL)
    results = lab.race(["rosenbrock"], ["torch.SGD(lr=0.001)"], seeds=1, budget=5, workers=0, file="race.jsonl")
    lines = [json.loads(each) for each in Path("race.jsonl").read_text().splitlines()]
    lines[0]["problems"][0]["reference"] = "evil.py:problem"
    Path("race.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    lab.write_report(lab.Results.read("race.jsonl"), "race.html")
    lab.write_picture(lab.Results.read("race.jsonl"), "race.svg")
    assert not Path("owned").exists()
    # A race that ran in this process has the map of a problem from a file.
    assert '"map":{"size"' in lab.report(results)


def test_labels_that_look_like_template_fields_are_escaped():
    marks = ["{{js}}", "{{css}}", "{{data}}", "{{title}}", "\\1 \\g<0>", "<script>alert(1)</script>"]
    field = [lab.contender(f"torch.SGD(lr=0.00{at + 1})", label=mark) for at, mark in enumerate(marks)]
    page = lab.report(lab.race(["sphere-10"], field, seeds=1, budget=5, workers=0))
    data = page[page.index('{"command"') :]
    content = json.JSONDecoder().raw_decode(data)[0]
    assert [each["label"] for each in content["contenders"]] == marks
    assert page.count("<script") == lab.report(lab.race(["sphere-10"], field[:1], seeds=1, budget=5, workers=0)).count(
        "<script"
    )


def test_solved_runs_are_counted_only_with_a_known_optimum_or_a_target(tmp_path):
    bowl = lab.as_problem(lambda x=1.0: x**2, "bowl")
    chains = ["torch.SGD(lr=0.5)", "torch.SGD(lr=0.01)"]
    (row, _) = lab.summary(lab.race([bowl], chains, seeds=2, budget=20, workers=0))
    assert (row["median"], row["reached"]) == (0.0, None)
    fast, slow = lab.summary(lab.race([bowl], chains, seeds=2, budget=20, workers=0, target=1e-6))
    assert (fast["reached"], slow["reached"]) == (2, 0)
    assert fast["reasons"] == {"reached the target": 2}
    exact, _ = lab.summary(lab.race(["sphere-10"], chains, seeds=1, budget=20, workers=0))
    assert exact["reached"] == 1
    with pytest.raises(ValueError, match="finite"):
        lab.race([bowl], chains, target=float("nan"), workers=0)


def test_tables_of_runs_are_written_as_csv_and_jsonl(tmp_path):
    results = lab.race(["sphere-10"], ["torch.SGD(lr=0.1)", "Adam | LR(0.1)"], seeds=2, budget=20, workers=0)
    rows = lab.flat_rows(results)
    with open(lab.write_table(results, tmp_path / "deeper" / "runs.csv"), newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["source"], int(row["seed"]), float(row["value"])) for row in read] == [
        (row["source"], row["seed"], row["value"]) for row in rows
    ]
    lines = lab.write_table(results, tmp_path / "runs.jsonl").read_text().splitlines()
    assert [json.loads(each) for each in lines] == rows
    assert all(not isinstance(value, dict | list) for row in rows for value in row.values())
    with pytest.raises(lab.ResultsError, match=r"\.csv or \.jsonl"):
        lab.write_table(results, tmp_path / "runs.parquet")


RACE = """
import sys
from moduli import lab
if __name__ == "__main__":
    lab.race([sys.argv[1]], ["LR(0.001)"], seeds=2, seconds=600, workers=2, file="race.jsonl",
             listen=lambda event, *_: event == "begin" and print("begun", flush=True))
"""

LIMITS = {"budget": 5, "seconds": 0.2, "threads": 1, "target": None}

HANGS = "import time\ndef problem(x=1.0):\n    time.sleep(1000)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_race_that_is_ended_leaves_no_process_and_no_file(number, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "race.py").write_text(RACE)
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path / "tmp")}
    race = subprocess.Popen(
        [sys.executable, "race.py", "hangs.py:problem"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=restore_handlers,
    )
    with race:
        try:
            assert race.stdout.readline() == "begun\n"
            workers = [pid for pid in list_descendants(race.pid) if pid != race.pid]
            assert len(workers) >= 2
            race.send_signal(number)
            assert race.wait(600) == -number
        finally:
            race.kill()
    for pid in workers:
        wait_until(lambda pid=pid: not is_alive(pid))
    assert os.listdir(tmp_path / "tmp") == []
    assert lab.Results.read(tmp_path / "race.jsonl").runs == []


def restore_handlers():
    """Restore the default handlers, because a child of a process started by nohup would ignore these signals."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def list_descendants(pid):
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(one for child in children for one in list_descendants(child))]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done):
    """Wait until a condition holds; fail after ten minutes."""
    deadline = time.monotonic() + 600
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_hangs_on_an_import_is_killed(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("import time\nwhile True: time.sleep(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_worker, "STARTUP", 0.5)
    results = _pool.execute_all([("rosenbrock", "torch.SGD(lr=0.001)", 0)] * 2, LIMITS, 1)
    messages = [message for _, message in results if "reason" in message]
    assert [message["reason"] for message in messages] == ["hung, was killed"] * 2
    assert "did not start within 0.5 seconds" in messages[0]["detail"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_hangs_on_an_import_does_not_survive_its_driver(number, tmp_path):
    (tmp_path / "numpy.py").write_text("import time\nwhile True: time.sleep(1)\n")
    program = """
        import sys
        from moduli.lab import _worker
        _worker.STARTUP = 1.0
        sys.path.insert(0, sys.argv[1])
        print(_worker.RunWorker([], 1.0).process.pid, flush=True)
        while True: pass
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    driver = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    with driver:
        try:
            server = int(driver.stdout.readline())
            driver.send_signal(number)
            driver.wait(600)
        finally:
            driver.kill()
    wait_until(lambda: not is_alive(server))


def test_a_worker_that_hangs_on_importing_its_problem_is_killed(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time\nwhile True: time.sleep(1)\n")
    task = f"{tmp_path / 'hangs.py'}:problem", "torch.SGD(lr=0.001)", 0
    (record,) = [message for _, message in _pool.execute_all([task], LIMITS, 1) if "reason" in message]
    assert record["reason"] == "hung, was killed"
    assert record["detail"].startswith("it slept for")
