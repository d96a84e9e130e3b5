"""Times of runs: sleeping is distinguished from waiting for the processor, and seconds are processor time."""

import os
import time

from lab import rogues
from moduli import lab
from moduli.lab import _process


def test_waiting_for_the_processor_is_not_sleeping(monkeypatch):
    clock, state = [0.0], ["R", 0.0]
    monkeypatch.setattr(_process.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(_process.ProcessWatch, "_read", lambda _: tuple(state))
    watch = _process.ProcessWatch(1, 5.0)

    def after(seconds, status, used):
        clock[0] += seconds
        state[:] = status, state[1] + used
        return watch.has_slept()

    assert not after(100, "R", 0.0)  # ready to run, without getting the processor
    assert not after(4, "S", 0.0)
    assert not after(4, "S", 1.0)  # it used processor time
    assert not after(4, "S", 0.0)
    assert after(4, "S", 0.01)
    state[1] = 0.0
    monkeypatch.setattr(_process.ProcessWatch, "_read", lambda _: ("", None))
    assert not _process.ProcessWatch(1, 5.0).has_slept()


def test_seconds_of_a_run_are_processor_time():
    class Sleepy:
        def __init__(self, model):
            self.inner = rogues.tame(model)

        def step(self, closure):
            time.sleep(0.02)  # as if another program had the processor
            return self.inner.step(closure)

    record = lab.run(lab.problems.get("sphere-10"), lab.contender(Sleepy), 0, budget=20, seconds=0.2)
    assert record["reason"] == lab.RunReason.BUDGET
    assert record["seconds"] < 0.2


def test_the_state_of_a_process_is_read_where_proc_exists():
    if os.path.exists("/proc/self/stat"):
        assert _process.ProcessWatch(os.getpid(), 1.0)._read()[0] in "RSD"
    assert _process.ProcessWatch(2**30, 1.0)._read() == ("", None)
