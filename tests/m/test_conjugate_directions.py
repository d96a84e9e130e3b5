"""Conjugate directions of random gradients equal the formulas of Hager and Zhang (2006), with downhill directions."""

import pytest
import torch

from moduli import m, optim

D = torch.float64


def _hager_zhang(g, last, y, d):
    dy = d @ y
    return max((y - 2 * d * (y @ y) / dy) @ g / dy, -1 / (d.norm() * min(0.01, last.norm())))


BETAS = {
    "FletcherReeves": lambda g, last, y, d: (g @ g) / (last @ last),
    "PolakRibiere": lambda g, last, y, d: (g @ y) / (last @ last),
    "HestenesStiefel": lambda g, last, y, d: (g @ y) / (d @ y),
    "DaiYuan": lambda g, last, y, d: (g @ g) / (d @ y),
    "LiuStorey": lambda g, last, y, d: -(g @ y) / (d @ last),
    "ConjugateDescent": lambda g, last, y, d: -(g @ g) / (d @ last),
    "DYHS": lambda g, last, y, d: max(0.0, min((g @ y) / (d @ y), (g @ g) / (d @ y))),
    "HagerZhang": _hager_zhang,
}


@pytest.mark.parametrize("name", list(BETAS))
def test_directions_of_random_gradients(name):
    generator = torch.Generator().manual_seed(3)
    settings = {"clip_beta": False} if name == "PolakRibiere" else {}
    link, w = getattr(m, name)(restart_interval=None, **settings), torch.zeros(4, dtype=D)
    last = d = None
    followed = 0
    for _ in range(12):
        g = torch.randn(4, dtype=D, generator=generator)
        (out,) = optim.step_tensors(link, [g.clone()], [w])
        if last is None:
            d = -g
        else:
            beta = BETAS[name](g, last, g - last, d)
            d = -g + beta * d if (-g + beta * d) @ g < 0 else -g
            followed += bool((d + g).abs().max() > 1e-3)
        torch.testing.assert_close(-out, d, rtol=1e-10, atol=1e-12)
        last = g
    assert followed >= 3


def test_a_direction_starts_afresh_after_the_interval():
    generator = torch.Generator().manual_seed(0)
    link, w = m.FletcherReeves(restart_interval=3), torch.zeros(4, dtype=D)
    fresh = []
    for _ in range(10):
        g = torch.randn(4, dtype=D, generator=generator)
        g = g + 3 * torch.ones(4, dtype=D)  # similar enough for every direction to point downhill
        (out,) = optim.step_tensors(link, [g.clone()], [w])
        fresh.append(torch.equal(out, g))
    assert fresh == [i % 3 == 0 for i in range(10)]
