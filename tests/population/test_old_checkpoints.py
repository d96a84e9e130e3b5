"""Checkpoints written by 0.1 load, and training continues as it did there.

`saved_by_0_1.pt` has for each chain a population and its optimizer after three steps, and the parameters after two more. That
version stored the state of pointwise links per parameter, stacked over members, and that of matrix links per member
(`"0.weight[1]"`, and `"members"` in a link's global state), which is refused.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m

DOUBLE = torch.float64
CHAINS = {
    "adam": lambda: [m.ClipNorm(0.5), m.Adam(), m.WeightDecay(0.1), m.LR(0.05)],
    "rates": lambda: [m.Adam(), m.LR(torch.linspace(0.01, 0.1, 2, dtype=DOUBLE))],
    "soap": lambda: [m.SOAP(), m.LR(0.05)],
    "prodigy": lambda: [m.Prodigy(d0=1e-3), m.LR(1.0)],
    "galore": lambda: [m.GaLore(m.Adam(), rank=2, update_gap=2), m.LR(0.05)],
}


def population():
    torch.manual_seed(0)
    return mo.Population.from_modules(
        [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double() for _ in range(2)]
    )


def train(pop, opt, steps):
    x = torch.linspace(-1, 1, 18, dtype=DOUBLE).reshape(6, 3)
    for _ in range(steps):
        opt.step(mo.closure(lambda: pop.losses(lambda f: (f(x) - 1).square().mean())))


def save(path):
    """Write the file; to be run with 0.1."""
    runs = {}
    for name, links in CHAINS.items():
        pop = population()
        opt = mo.Optimizer(pop, *links())
        train(pop, opt, 3)
        runs[name] = {
            "population": {key: value.clone() for key, value in pop.state_dict().items()},
            "optimizer": opt.state_dict(),
        }
        other = population()
        other.load_state_dict(runs[name]["population"])
        again = mo.Optimizer(other, *links())
        again.load_state_dict(runs[name]["optimizer"])
        train(other, again, 2)
        runs[name]["later"] = other.matrix.clone()
    torch.save(runs, path)


@pytest.mark.parametrize("name", ["soap", "prodigy", "galore"])
def test_state_of_0_1_per_member_is_refused(name):
    saved = torch.load(Path(__file__).with_name("saved_by_0_1.pt"), weights_only=True)[name]
    with pytest.raises(ValueError, match=r"saved state of 0\.bias\[0\] has no parameter here"):
        mo.Optimizer(population(), *CHAINS[name]()).load_state_dict(saved["optimizer"])


@pytest.mark.parametrize("name", ["adam", "rates"])
def test_a_run_of_0_1_resumes(name):
    saved = torch.load(Path(__file__).with_name("saved_by_0_1.pt"), weights_only=True)[name]
    pop = population()
    opt = mo.Optimizer(pop, *CHAINS[name]())
    pop.load_state_dict(saved["population"])
    opt.load_state_dict(saved["optimizer"])
    start = pop.matrix.clone()
    train(pop, opt, 2)
    torch.testing.assert_close(pop.matrix, saved["later"], rtol=1e-12, atol=1e-14)
    assert (pop.matrix - start).abs().max() > 1e-4
    # A run without the state ends elsewhere.
    fresh = population()
    fresh.load_state_dict(saved["population"])
    train(fresh, mo.Optimizer(fresh, *CHAINS[name]()), 2)
    assert (fresh.matrix - saved["later"]).abs().max() > 1e-6
