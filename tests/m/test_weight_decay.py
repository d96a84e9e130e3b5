"""Weight decay, coupled, decoupled and relative; probabilities that are schedules."""

import pytest
import torch

import moduli as mo
from m.first_order import close, run
from moduli import m, optim

FUSE = pytest.mark.parametrize("fuse", ["auto", False])
X, U = torch.tensor([2.0, -3.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])


def through(link, u=U, x=X):
    return optim.step_tensors(link, [u.clone()], params=[x])[0]


@FUSE
def test_coupled_and_decoupled_decay_are_torchs(fuse):
    close(
        run(lambda p: [m.WeightDecay(0.1), m.Adam(), m.LR(0.05)], fuse=fuse),
        run(lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.1)),
    )
    close(
        run(lambda p: [m.Adam(), m.WeightDecay(0.1), m.LR(0.05)], fuse=fuse),
        run(lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)),
    )


@pytest.mark.parametrize("ord", [1, 1.5, 2, 3, 4])
def test_every_power_shrinks_weights_of_either_sign(ord):
    expected = U + 0.5 * X.sign() * X.abs() ** (ord - 1) * (X != 0)
    close([through(m.WeightDecay(0.5, ord=ord))], [expected], 1e-6)
    close([through(m.CautiousWeightDecay(0.5, ord=ord))], [torch.where(U * X > 0, expected, U)], 1e-6)


@pytest.mark.parametrize("make", [m.WeightDecay, m.CautiousWeightDecay])
def test_a_negative_decay_is_refused(make):
    with pytest.raises(ValueError, match=f"{make.__name__}: weight_decay"):
        make(-0.1)


def test_relative_decay_uses_the_norm_over_all_parameters():
    x, u = [torch.tensor([1.0, -2.0]), torch.tensor([3.0])], [torch.tensor([3.0, 0.0]), torch.tensor([-6.0])]
    out = optim.step_tensors(m.RelativeWeightDecay(0.5), [t.clone() for t in u], params=x)
    close(out, [a + 0.5 * 3.0 * b for a, b in zip(u, x, strict=True)], 1e-6)
    out = optim.step_tensors(m.RelativeWeightDecay(0.5, cautious=True), [t.clone() for t in u], params=x)
    close(out, [a + 1.5 * b * (a * b > 0) for a, b in zip(u, x, strict=True)], 1e-6)
    out = optim.step_tensors(
        m.RelativeWeightDecay(0.5, norm_input="params", metric="linf"), [t.clone() for t in u], params=x
    )
    close(out, [a + 1.5 * b for a, b in zip(u, x, strict=True)], 1e-6)
    with pytest.raises(ValueError, match="norm_input"):
        m.RelativeWeightDecay(norm_input="loss")


def test_probabilities_can_be_functions_of_the_step():
    ones = torch.ones(50)
    link = m.Dropout(lambda step: 0.0 if step == 0 else 1.0)
    w = torch.nn.Parameter(ones.clone())
    opt = mo.Optimizer([w], link)
    seen = []
    for _ in range(2):
        w.grad = ones.clone()
        opt.step()
        seen.append(w.detach().clone())
    assert torch.equal(seen[0], torch.zeros(50))
    assert torch.equal(seen[1], seen[0])
    v = torch.nn.Parameter(torch.ones(3, 3))
    opt = mo.Optimizer([v], m.PSGDKronWhiten(update_probability=lambda step: float(step == 0), seed=0), m.LR(0.1))
    seen = []
    for k in range(3):
        v.grad = torch.ones(3, 3) * (k + 1)
        opt.step()
        seen.append([factor.clone() for factor in opt.link("PSGDKronWhiten").state[v]["factors"]])
    assert all(map(torch.equal, seen[0], seen[2]))
    with pytest.raises(ValueError, match="from 0 to 1"):
        m.PSGDKronNewton(balance_probability=2.0)
