"""The plan of a step: it is reused between equal steps, rebuilt after changes, and cheap to check."""

import sys
from pathlib import Path

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import Optimizer


def make(*links):
    params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in ((8, 8), (3,))]
    return params, Optimizer(params, *links)


def step(params, opt, value=1.0):
    for param in params:
        param.grad = torch.full_like(param, value)
    opt.step()


def chain():
    return m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-2)


@pytest.mark.parametrize("kind", ["chain", "population"])
def test_calls_and_files_of_a_warm_step(monkeypatch, kind):
    """A repeated step makes few calls of functions of the library, defined in few files."""
    monkeypatch.setenv("MODULI_KERNELS", "auto")
    params, opt = make(*chain())
    if kind == "population":
        population = mo.Population.of(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), 4)
        params, opt = list(population.parameters()), Optimizer(population, m.Adam(), m.LR(1e-2))
    for _ in range(4):
        step(params, opt)
    if "(c)" not in opt.explain():
        pytest.skip("there is no compiler")
    for param in params:
        param.grad = torch.ones_like(param)
    files = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(Path(mo.__file__).parent)):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        opt.step()
    finally:
        sys.setprofile(before)
    calls, count = (70, 8) if kind == "chain" else (110, 12)
    assert len(files) <= calls
    assert len(set(files)) <= count


def test_changes_that_make_another_plan():
    params, opt = make(*chain())
    step(params, opt)
    step(params, opt)
    plan = opt._plan
    opt.param_groups[0]["lr"] = 0.5  # another number of the same kind
    step(params, opt)
    assert opt._plan is plan
    changes = {
        "a frozen parameter": lambda: params[1].requires_grad_(False),
        "a setting that becomes a function": lambda: opt.param_groups[0].update({"lr": lambda t: 0.1}),
        "a declaration": lambda: setattr(opt.modules[3], "elementwise", False),
        "state that is handed out": lambda: opt.modules[1].state[params[0]],
        "state that is replaced": lambda: opt.modules[1].state[params[0]].update(step=3),
        "a reset": lambda: opt.reset(),
    }
    for what, change in changes.items():
        plan = opt._plan
        change()
        step(params, opt)
        assert opt._plan is not plan, what


def test_reading_state_again_makes_no_other_plan():
    params, opt = make(*chain())
    step(params, opt)
    step(params, opt)
    row = opt.modules[1].state[params[0]]
    assert opt.state[params[0]]
    step(params, opt)
    plan = opt._plan
    for _ in range(3):
        assert float(row["exp_avg"].abs().sum()) > 0
        assert opt.state[params[0]]
        step(params, opt)
    assert opt._plan is plan


@pytest.mark.parametrize("missing", [0, 1])
def test_a_clipped_chain_with_gradients_missing_at_some_steps(missing):
    """The norm is over the present gradients, and parameters without one are left alone."""
    results = []
    for fuse in ("auto", False):
        params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in ((8, 8), (3,))]
        opt = Optimizer(params, *chain(), fuse=fuse)
        for k in range(6):
            for i, param in enumerate(params):
                param.grad = None if k in (1, 4) and i == missing else torch.full_like(param, 1.0 + k)
            opt.step()
        results.append(params)
        assert opt.modules[1].state[params[missing]]["step"] == 4
    torch.testing.assert_close(*results)
