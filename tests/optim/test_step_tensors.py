"""Repeated calls of `step_tensors` on plain tensors equal the steps of an optimizer."""

import torch

import moduli as mo
from moduli import m, optim


def test_links_in_a_list_keep_their_step_counts_between_calls():
    gradients = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = mo.Optimizer([w], m.Adam(), m.LR(0.1))
    links, placeholder = [m.Adam(), m.LR(0.1)], torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        before = w.detach().clone()
        w.grad = gradient.clone()
        opt.step()
        update = optim.functional.step_tensors(links, [gradient.clone()], [placeholder])[0]
        torch.testing.assert_close(update, before - w.detach(), rtol=1e-9, atol=1e-14)
