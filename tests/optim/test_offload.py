"""State that is stored on the host between steps."""

import json

import pytest
import torch

from launching import TESTS, run_python
from moduli import Optimizer, m, presets
from moduli.optim import offload


def test_state_is_on_the_host_between_steps_on_a_device():
    printed = run_python(TESTS / "optim" / "offload_worker.py")
    for name, devices in json.loads(printed).items():
        assert devices == [["cpu"], ["cpu"], ["pretend"]], name


@pytest.mark.parametrize(
    "make", [lambda: presets.adamw(lr=0.1), lambda: presets.muon(lr=0.1), lambda: presets.soap(lr=0.1)]
)
@pytest.mark.parametrize("fuse", ["auto", False])
def test_streamed_state_gives_the_same_parameters(monkeypatch, make, fuse):
    def train(groups):
        generator = torch.Generator().manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        optimizer = Optimizer(net, make(), groups=groups, fuse=fuse)
        for _ in range(4):
            for param in net.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        return [param.detach().clone() for param in net.parameters()]

    expected = train({})
    # Treat the CPU as a device, so that state is fetched and stored with real values, a few elements at a time.
    monkeypatch.setattr("moduli.optim._cohorts.is_host", lambda device: False)
    monkeypatch.setattr("moduli.optim._cohorts.STREAMED", 8)
    monkeypatch.setattr(offload, "copy_to_host", lambda tensor, place: tensor.clone())
    monkeypatch.setattr(
        "moduli.optim._cohorts.fetch_columns",
        lambda columns, params: [[t.clone() for t in column] for column in columns],
    )
    for a, b in zip(train({"*": {"offload": "cpu"}}), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for a, b in zip(train({"0.*": {"offload": "cpu"}}), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_wrong_values_of_offload_are_refused_and_right_ones_are_saved():
    net = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match='offload is \'disk\'; it is "cpu", "pinned"'):
        Optimizer(net, m.Adam(), m.LR(0.1), groups={"*": {"offload": "disk"}})
    optimizer = Optimizer(net, m.Adam(), m.LR(0.1), groups={"weight": {"offload": "pinned"}})
    with pytest.raises(ValueError, match="offload"):
        optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(1)))], "offload": 3})
    assert [group.get("offload") for group in optimizer.state_dict()["param_groups"]] == [None, "pinned"]
