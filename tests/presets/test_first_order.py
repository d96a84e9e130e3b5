"""Presets equal the optimizers they are named after."""

import pytest
import torch

import moduli as mo
from m.first_order import close, formula, run
from moduli import presets

SAME = {
    "sgd": (lambda: presets.sgd(0.05, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1)),
    "momentum": (
        lambda: presets.momentum(0.05, momentum=0.8, dampening=0.1, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, dampening=0.1, weight_decay=0.1),
    ),
    "nesterov": (
        lambda: presets.nesterov(0.05, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (lambda: presets.adam(0.05, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.1)),
    "adamw": (lambda: presets.adamw(0.05, amsgrad=True), lambda p: torch.optim.AdamW(p, 0.05, amsgrad=True)),
    "rmsprop": (
        lambda: presets.rmsprop(0.05, momentum=0.5, centered=True, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, 0.05, momentum=0.5, centered=True, weight_decay=0.1),
    ),
    "rprop": (lambda: presets.rprop(0.05), lambda p: torch.optim.Rprop(p, 0.05)),
    "adagrad": (
        lambda: presets.adagrad(0.05, lr_decay=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1, weight_decay=0.1),
    ),
    "radam": (lambda: presets.radam(0.05, weight_decay=0.1), lambda p: torch.optim.RAdam(p, 0.05, weight_decay=0.1)),
    "adamax": (lambda: presets.adamax(0.05, weight_decay=0.1), lambda p: torch.optim.Adamax(p, 0.05, weight_decay=0.1)),
    "adadelta": (
        lambda: presets.adadelta(0.5, weight_decay=0.1),
        lambda p: torch.optim.Adadelta(p, 0.5, weight_decay=0.1),
    ),
}
# Required arguments of presets.
ARGUMENTS = {"muonclip": lambda net: {"pairs": [(net[0].weight, net[2].weight)], "logits": lambda: [torch.ones(2)]}}


@pytest.mark.parametrize("name", SAME)
def test_presets_step_as_torch(name):
    ours, theirs = SAME[name]
    close(run(lambda p: ours()), run(theirs))


@pytest.mark.parametrize("name", presets.__all__)
def test_every_preset_lowers_the_loss_with_its_defaults(name):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    x, y = torch.randn(32, 4), torch.randn(32, 2)
    loss = mo.closure(lambda: (net(x) - y).square().mean())
    residuals = mo.closure(lambda: (net(x) - y).reshape(-1))
    opt = mo.Optimizer(net, getattr(presets, name)(**ARGUMENTS.get(name, lambda net: {})(net)))
    needs = frozenset().union(*(link.all_needs() for link in opt.modules))
    start = loss(backward=False).item()
    for _ in range(40):
        opt.step(residuals if mo.optim.Need.RESIDUALS in needs else loss)
    assert loss(backward=False).item() < start


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adam():
    matrix, bias = run(lambda p: presets.muon(0.05, weight_decay=0.1), shapes=((4, 4), (5,)))
    _, adam = run(lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1), shapes=((4, 4), (5,)))
    close([bias], [adam])
    # torch iterates in bfloat16, so they agree to a few digits
    (theirs,) = run(
        lambda p: torch.optim.Muon(p, 0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        shapes=((4, 4),),
        dtype=torch.float32,
        steps=1,
    )
    (ours,) = run(lambda p: presets.muon(0.05, weight_decay=0.1), shapes=((4, 4),), dtype=torch.float32, steps=1)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-3)
    assert torch.isfinite(matrix).all()


def test_nadam_and_laprop_and_lamb_are_their_papers():
    # torch stores the product of momenta in float32
    close(
        run(lambda p: presets.nadam(0.05, weight_decay=0.1)),
        run(lambda p: torch.optim.NAdam(p, 0.05, weight_decay=0.1)),
        1e-8,
    )

    def laprop(x, g, memory, t):
        memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
        memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-15)
        return 0.05 * (memory["m"] / (1 - 0.9**t) + 0.1 * x)

    close(run(lambda p: presets.laprop(0.05, weight_decay=0.1)), run(formula(laprop)))

    def lamb(x, g, memory, t):
        memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
        memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
        u = memory["m"] / (1 - 0.9**t) / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + 0.1 * x
        return 0.05 * u * x.norm() / u.norm()

    close(run(lambda p: presets.lamb(0.05, weight_decay=0.1)), run(formula(lamb)))


def test_scion_steps_within_its_balls():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    opt = mo.Optimizer(net, presets.scion(0.1, radius=2.0, head_radius=3.0))
    for _ in range(60):
        opt.step(mo.closure(lambda: -net[0].weight.sum() - net[0].bias.sum()))
    # A constrained method ends on the boundary; the gradient of ones has rank one.
    values = torch.linalg.svdvals(net[0].weight.detach())
    assert values[0] <= 2.0 * (4 / 6) ** 0.5 * 1.2
    torch.testing.assert_close(net[0].bias.detach(), torch.full((4,), 3.0), rtol=1e-2, atol=1e-2)


def test_soap_does_not_decay_in_the_step_that_it_skips():
    w = torch.nn.Parameter(torch.ones(3, 4))
    opt = mo.Optimizer([w], presets.soap(0.1, weight_decay=0.5))
    w.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    opt.step()
    assert torch.equal(w, torch.ones(3, 4))
    w.grad = torch.zeros(3, 4)
    opt.step()
    torch.testing.assert_close(w.detach(), torch.full((3, 4), 0.95))
