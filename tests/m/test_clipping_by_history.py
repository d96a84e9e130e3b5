"""Clipping and normalisation by running means and by the previous update."""

import pytest
import torch

from m.first_order import close, run
from moduli import m, optim


def through(link, updates):
    """Return the results of a link for a series of updates."""
    params = [torch.zeros_like(tensor) for tensor in updates[0]]
    return [optim.step_tensors(link, [tensor.clone() for tensor in update], params=params) for update in updates]


SERIES = [[torch.tensor([x]), torch.tensor([2 * x, 0.0])] for x in (1.0, 100.0, 0.01, 3.0)]


@pytest.mark.parametrize("tensorwise", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_norms_follow_a_mean_that_grows_slowly(tensorwise, normalize):
    link = (m.NormalizeByEMA if normalize else m.ClipNormByEMA)(beta=0.5, tensorwise=tensorwise, init="update")
    got = through(link, SERIES)
    size = lambda tensors: torch.cat(tensors).norm().item()  # noqa: E731
    groups = [[0], [1]] if tensorwise else [[0, 1]]
    for group in groups:
        mean, last = torch.cat([SERIES[0][i] for i in group]), None
        for update, out in zip(SERIES, got, strict=True):
            flat = torch.cat([update[i] for i in group])
            mean = 0.5 * mean + 0.5 * flat
            if last is not None and mean.norm() > 1.5 * last:
                mean = mean * (1.5 * last / mean.norm())
            last = mean.norm()
            target = last if normalize else torch.minimum(last, flat.norm())
            assert size([out[i] for i in group]) == pytest.approx(target.item(), rel=1e-5)


def test_elements_follow_a_mean():
    got = through(m.ClipValueByEMA(beta=0.5, init="update"), SERIES)
    assert [out[0].item() for out in got] == pytest.approx([1.0, 50.5, 0.01, 3.0])


def test_growth_of_the_norm_is_bounded():
    got = through(m.ClipNormGrowth(mul=2.0, max_decay=4.0), SERIES)
    assert [out[0].item() for out in got] == pytest.approx([1.0, 2.0, 0.01, 1.0])
    got = through(m.ClipNormGrowth(mul=None, add=0.5, max_decay=None), SERIES)
    assert [out[0].item() for out in got] == pytest.approx([1.0, 1.5, 0.01, 0.51])
    got = through(m.ClipNormGrowth(mul=2.0, tensorwise=False), SERIES)
    assert torch.cat(got[1]).norm().item() == pytest.approx(2 * 5**0.5)


@pytest.mark.parametrize("fuse", ["auto", False])
def test_growth_of_each_element_is_bounded(fuse):
    got = through(m.ClipValueGrowth(mul=2.0, max_decay=4.0), SERIES)
    assert [out[0].item() for out in got] == pytest.approx([1.0, 2.0, 0.01, 1.0])
    links = lambda p: [m.ClipValueGrowth(mul=1.01, add=0.1), m.LR(0.05)]  # noqa: E731
    close(run(links, fuse=fuse), run(links, fuse=False))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: m.ClipNormByEMA(max_ema_growth=1.0), "max_ema_growth"),
        (lambda: m.ClipNormByEMA(init=3.0), "ClipNormByEMA: init"),
        (lambda: m.ClipNormGrowth(mul=None), "give add"),
        (lambda: m.ClipValueGrowth(max_decay=0.5), "max_decay"),
        (lambda: m.NormalizeByEMA(beta=1.0), "NormalizeByEMA: beta"),
    ],
)
def test_wrong_arguments_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
