"""Links on plain tensors, call after call: the same as an optimizer's steps."""

import torch

import moduli as mo
from moduli import m, optim


def test_links_given_as_a_list_remember_their_counts():
    given = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = mo.Optimizer([w], m.Adam(), m.LR(0.1))
    links, stand_in = [m.Adam(), m.LR(0.1)], torch.zeros(3, dtype=torch.float64)
    for gradient in given:
        before = w.detach().clone()
        w.grad = gradient.clone()
        opt.step()
        found = optim.functional.step_tensors(links, [gradient.clone()], [stand_in])[0]
        torch.testing.assert_close(found, before - w.detach(), rtol=1e-9, atol=1e-14)
