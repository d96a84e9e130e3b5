"""Fits: resumed equals uninterrupted, bit for bit, and what was fitted can be read by anyone."""

import math
import os
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from lab import rogues
from moduli import io, lab
from moduli.lab import Ended, as_problem, fit, problems

CHAINS = ["torch.Adam(lr=0.05)", "Adam | LR(0.05)", "Population(4, spread=0.1) | Adam | LR(0.05)"]


def values(path):
    return dict(load_file(path))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["rosenbrock", "noisy-20", "spirals"])
def test_resumed_is_uninterrupted(tmp_path, chain, name):
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    one = fit(problems.get(name), chain, steps=30, out=whole)
    for steps in (7, 8, 30):
        torch.manual_seed(123)  # what happens between two sittings does not matter
        last = fit(problems.get(name), chain, steps=steps, out=parts, resume=True)
        assert last.steps == steps
    assert (last.value, last.start, last.evaluations) == (one.value, one.start, one.evaluations)
    a, b = values(whole), values(parts)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a if not key.startswith("rng"))
    assert last.value < last.start


def test_a_fit_reaches_its_target_and_says_so():
    result = fit(as_problem(lambda x=3.0: (x - 1) ** 2), "torch.SGD(lr=0.1)", steps=10**6, target=1e-6)
    assert result.reason is Ended.TARGET
    assert result.value <= 1e-6
    assert result.model.arg_x.item() == pytest.approx(1, abs=1e-2)


def test_other_ends():
    bowl = as_problem(lambda x=3.0: (x - 1) ** 2)
    assert fit(bowl, "torch.SGD(lr=0.1)", steps=10**9, seconds=0.2).reason is Ended.TIME
    wild = fit(bowl, "torch.SGD(lr=1e30)", steps=50)
    assert wild.reason is Ended.DIVERGED
    assert not wild.reason.success
    assert fit(bowl, lab.contender(rogues.idle), steps=10**6).reason is Ended.STOPPED
    assert fit(bowl, "LR(0.1) | TerminateAfterNSteps(5)", steps=50).steps == 5
    assert fit(bowl, "LR(0.1)", steps=0).value == 4.0


def test_ctrl_c_ends_after_the_step_and_keeps_it(tmp_path):
    path = tmp_path / "fit.safetensors"
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    result = fit(problems.get("rosenbrock"), "torch.SGD(lr=1e-5)", steps=10**9, out=path)
    assert result.reason is Ended.INTERRUPTED
    assert io.read(path).extra["fit"]["steps"] == result.steps > 0
    more = fit(problems.get("rosenbrock"), "torch.SGD(lr=1e-5)", steps=result.steps + 5, out=path, resume=True)
    assert more.steps == result.steps + 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_checkpoints_on_the_way(tmp_path):
    path, sizes = tmp_path / "fit.safetensors", []
    fit(problems.get("rosenbrock"), "torch.SGD(lr=1e-5)", steps=10**9, seconds=0.6, out=path, every=0.1,
        listen=lambda now: sizes.append(path.exists()))  # fmt: skip
    assert not sizes[0]
    assert sizes[-1]


def test_what_does_not_fit_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "fit.safetensors"
    fit(problems.get("rosenbrock"), "torch.Adam(lr=0.05)", steps=3, out=path)
    before = path.read_bytes()
    with pytest.raises(io.CheckpointError, match="cannot be resumed with"):
        fit(problems.get("rosenbrock"), "Adam | LR(0.05)", steps=6, out=path, resume=True)
    with pytest.raises(io.CheckpointError):
        fit(problems.get("sphere-10"), "torch.Adam(lr=0.05)", steps=6, out=path, resume=True)
    assert path.read_bytes() == before
    io.save(path, {"w": torch.ones(2)})
    with pytest.raises(io.CheckpointError, match="not written by a fit"):
        fit(problems.get("rosenbrock"), "torch.Adam(lr=0.05)", steps=6, out=path, resume=True)


def test_listeners_hear_numbers():
    heard = []
    fit(problems.get("bands"), "Adam | LR(0.05)", steps=20, listen=heard.append)
    assert heard[-1]["steps"] == heard[-1]["evaluations"] == 20
    assert all(math.isfinite(now["loss"]) for now in heard)
    assert lab.fit is fit
