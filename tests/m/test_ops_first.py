"""Sign, Clip, Identity and Grad."""

import pytest
import torch

import moduli as mo
from m.first_order import close, run
from moduli import m, optim


def test_grad_forgets_what_came_before():
    close(run(lambda p: [m.LR(3.0), m.Sign(), m.Grad(), m.LR(0.1)]), run(lambda p: torch.optim.SGD(p, 0.1)))


def test_grad_does_not_hand_out_the_gradient_itself():
    w = torch.nn.Parameter(torch.ones(2))
    objective = optim.Objective([w], mo.closure(lambda: w.sum()))
    out = optim.step(objective, [m.Grad()])
    out.get_updates()[0].zero_()
    assert objective.get_grads()[0].tolist() == [1.0, 1.0]


def test_identity_takes_anything_and_is_its_own_hessian():
    w = torch.nn.Parameter(torch.ones(2, 2))
    objective = optim.Objective([w], mo.closure(lambda: w.sum()))
    H = m.Identity(1, anything=2).get_H(objective)
    assert torch.equal(H.to_dense(), torch.eye(4))
    assert m.Noop is m.Identity


def test_clip_bounds():
    u = torch.tensor([-2.0, 0.0, 2.0])
    assert optim.step_tensors(m.Clip(min=-1.0), [u.clone()])[0].tolist() == [-1.0, 0.0, 2.0]
    assert optim.step_tensors(m.Clip(max=1.0), [u.clone()])[0].tolist() == [-2.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="Clip: give"):
        m.Clip()
    with pytest.raises(ValueError, match="above max"):
        m.Clip(min=1.0, max=0.0)
