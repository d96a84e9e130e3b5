"""Step sizes."""

import pytest
import torch

from m.first_order import close, formula, run
from moduli import m

FUSE = pytest.mark.parametrize("fuse", ["auto", False])


@FUSE
def test_warmup_rises_and_stays(fuse):
    def update(x, g, memory, t):
        return (0.01 + 0.09 * min((t - 1) / 5, 1.0)) * g

    close(run(lambda p: [m.Warmup(5, start_lr=0.01, end_lr=0.1)], fuse=fuse), run(formula(update)))


def test_warmup_refuses():
    with pytest.raises(ValueError, match="Warmup: steps"):
        m.Warmup(0)


def test_lr_is_plain_descent():
    close(run(lambda p: [m.LR(0.1)]), run(lambda p: torch.optim.SGD(p, 0.1)))
