"""Capturable steps pass the same Python numbers to kernels at every step, so a graph of an accelerator can replay them."""

import copy
import json
from unittest import mock

import pytest
import torch

from launching import TESTS, run_python
from moduli import Optimizer, Population, m, presets
from moduli.optim import ChainError, schedules

CHAINS = {
    "adam": lambda: [m.Adam(), m.LR(0.1)],
    "nadam": lambda: [m.NAdam(), m.LR(0.1)],
    "radam": lambda: [m.RAdam(), m.LR(0.1)],
    "lion": lambda: [m.Lion(), m.LR(0.1)],
    "clip": lambda: [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.1), m.LR(schedules.Cosine(0.1, steps=20, warmup=5))],
    "muon": lambda: [presets.muon(lr=schedules.Cosine(0.1, steps=20, warmup=5), weight_decay=0.1)],
    "lamb": lambda: [presets.lamb(lr=0.1)],
    "late decay": lambda: [
        m.Adam(),
        m.WeightDecay(schedules.After(4, 0.1)),
        m.LR(schedules.WSD(0.1, 12, 2, 3, 0.0, "sqrt")),
    ],
}


def train(make, capturable, steps=10, resume=None):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), ())]
    optimizer = Optimizer(params, *make(), capturable=capturable)
    for step in range(steps):
        if step == resume:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = Optimizer(params, *make(), capturable=not capturable)
            optimizer.load_state_dict(saved)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        if step == 3:
            params[1].grad = None  # its step count is then one less
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in params]), optimizer


def test_no_number_of_the_host_changes_between_steps():
    printed = run_python(TESTS / "optim" / "capturable_worker.py")
    for name, steps in json.loads(printed).items():
        assert len(steps) == 4
        assert any(steps[0]), name
        assert all(numbers == steps[0] for numbers in steps), name


@pytest.mark.parametrize("name", CHAINS)
def test_counts_on_the_device_give_the_numbers_of_counts_on_the_host(name):
    expected, host = train(CHAINS[name], capturable=False)
    captured, device = train(CHAINS[name], capturable=True)
    torch.testing.assert_close(captured, expected, rtol=1e-6, atol=1e-7)
    assert "one pass" in device.explain()
    for begun in (True, False):  # state from a capturable optimizer loads into one that is not, and the reverse
        other, _ = train(CHAINS[name], capturable=begun, resume=5)
        torch.testing.assert_close(other, expected, rtol=1e-6, atol=1e-7)
    assert device.current_step == host.current_step == 10


def test_numbers_are_those_of_capturable_adam_of_torch():
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4)) for _ in range(2)]
    ours = Optimizer(params[:1], m.Adam(), m.LR(0.1), capturable=True)
    # torch allows `capturable` on accelerators only; the computation is the same on the CPU.
    with mock.patch("torch.optim.adam._get_capturable_supported_devices", return_value=["cpu"]):
        theirs = torch.optim.Adam(params[1:], 0.1, capturable=True, foreach=False)
        for k in range(8):
            for param in params:
                param.grad = torch.sin(param.detach() * (k + 1))
            ours.step()
            theirs.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-4, atol=1e-5)  # torch counts steps in float32


def test_a_schedule_continues_after_replayed_steps():
    """A replay advances the step count on the device without running Python."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer([param], m.LR(lambda step: step + 1.0), capturable=True)
    param.grad = torch.ones(1)
    optimizer.step()
    optimizer.binding.device_steps.advance()  # as a replay does
    param.grad = torch.ones(1)
    optimizer.step()
    assert param.item() == -4.0  # 1 + 3
    assert optimizer.state_dict()["current_step"] == 3


def test_chains_that_cannot_be_captured_are_refused():
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ChainError, match="lr is a function of the step that can't be computed on a device"):
        Optimizer([param], m.LR(lambda step: min(1.0, step / 10)), capturable=True)
    with pytest.raises(ChainError, match="decides in Python"):
        Optimizer([param], m.LBFGS(), capturable=True)
    with pytest.raises(ChainError, match="trust is a function of the step, which only pointwise links"):
        Optimizer([param], m.TrustRatio(trust=lambda step: 1.0 + step), capturable=True)
    with pytest.raises(ChainError, match="leave out fuse=False"):
        Optimizer([param], m.Adam(), m.LR(0.1), capturable=True, fuse=False)


def test_members_of_a_population_are_counted_on_the_device():
    ends = []
    for capturable in (False, True):
        torch.manual_seed(0)
        population = Population.of(torch.nn.Linear(2, 1), 3)
        optimizer = Optimizer(population, presets.adamw(lr=0.1), capturable=capturable)
        for _ in range(3):
            optimizer.zero_grad()
            population.losses(lambda f: f(torch.ones(4, 2)).square().sum()).sum().backward()
            optimizer.step()
        ends.append(population.matrix.clone())
    torch.testing.assert_close(*ends)
