"""Presets have the defaults of their reference implementations, or a stated reason; which parameters decay."""

from pathlib import Path

import pytest
import torch

import moduli as mo
from launching import load_program
from moduli import m, presets

defaults = load_program(Path(__file__).parents[2] / "tools" / "preset_defaults.py")


def test_every_preset_has_a_reference_or_is_listed_without_one():
    assert sorted([*defaults.REFERENCES, *defaults.WITHOUT]) == sorted(presets.__all__)


@pytest.mark.parametrize("preset", defaults.REFERENCES)
def test_defaults_are_those_of_the_reference_or_differ_for_a_reason(preset):
    reference, own = defaults.REFERENCES[preset], defaults.list_defaults(preset)
    different = {name for name, (_, value) in reference.defaults.items() if own[name] != value}
    assert different == set(reference.differs)


def test_recorded_defaults_are_those_of_the_installed_packages():
    assert defaults.check_installed() == []


def test_the_page_is_what_the_program_prints():
    assert defaults.PAGE.read_text() == defaults.render_page()


DECAYING = [
    name
    for name in presets.__all__
    if "decay" in defaults.list_defaults(name) and name not in ("adafactor", "muonclip")
]


@pytest.mark.parametrize("preset", DECAYING)
def test_matrices_decay_and_vectors_do_not(preset):
    def move(decay, what):
        noise = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=noise)) for shape in ((4, 4), (4,))]
        seed = {"seed": 0} if "seed" in defaults.list_defaults(preset) else {}
        opt = mo.Optimizer(params, getattr(presets, preset)(lr=0.1, weight_decay=what, decay=decay, **seed))
        for _ in range(4):
            grads = [torch.randn(p.shape, generator=noise) for p in params]

            def closure(backward=True, grads=grads):
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad.clone()
                return torch.tensor(1.0)

            opt.step(closure)
        return [p.detach() for p in params]

    none, every, matrices = move("all", 0.0), move("all", 0.3), move("matrices", 0.3)
    assert not torch.equal(matrices[0], none[0])
    assert not torch.equal(every[1], none[1])
    if preset in ("prodigy", "dadapt"):  # they have one estimate over all parameters, which the decay changes
        assert not torch.equal(matrices[1], every[1])
    else:
        assert torch.equal(matrices[1], none[1])


def test_prodigy_and_lars_do_not_move_vectors_of_zero_gradient():
    for links in (
        [m.Prodigy(weight_decay=0.5, d0=1.0, only="matrices")],
        [m.TrustRatio(weight_decay=0.5, only="matrices")],
    ):
        params = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
        opt = mo.Optimizer(params, *links, m.LR(0.1))
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        assert torch.equal(params[1].detach(), torch.ones(2))
    params = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    for p in params:
        p.grad = torch.zeros_like(p)
    mo.Optimizer(params, m.Prodigy(weight_decay=0.5, d0=1.0, only="matrices"), m.LR(0.1)).step()
    torch.testing.assert_close(params[0].detach(), torch.full((2, 2), 0.95))


def test_soap_leaves_vectors_to_adam():
    (soap, *_) = presets.soap()
    vector = torch.nn.Parameter(torch.ones(4))
    opt = mo.Optimizer([vector], soap, m.LR(0.1))
    for _ in range(2):
        opt.step(mo.closure(lambda: (vector * torch.arange(4.0)).sum()))
    assert soap.state[vector]["axes"] == []
    (rotated, *_) = presets.soap(precondition_1d=True)
    assert rotated.defaults["precondition_1d"]
