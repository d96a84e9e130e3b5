"""Stochastic rounding and sums of squares in Triton's interpreter: what the function itself gives."""

import pytest
import torch

from moduli import Optimizer, kernels, m

SHAPES = [(3, 2), (1500,), (4,), (0,), (33,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_draws_alike(dtype):
    generator = torch.Generator().manual_seed(0)
    xs = [
        torch.randn(shape, generator=generator) * scale
        for shape, scale in zip(SHAPES, (1, 1e-6, 1, 1, 1e3), strict=True)
    ]
    xs[2][:2] = torch.tensor([float("inf"), float("nan")])
    salts = [torch.randn(x.shape, generator=generator) for x in xs]
    fused = kernels.fuse(lambda x, salt, seed, step: kernels.round_stochastically(x, salt, seed, step, dtype))
    assert fused.explain(xs, salts, 7, 3).form == "triton"
    for rounded, x, salt in zip(fused(xs, salts, 7, 3), xs, salts, strict=True):
        expected = kernels.round_stochastically(x, salt, 7, 3, dtype)
        torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)


def test_squares_are_added_by_tensor():
    def descend(p, g, lr):
        kernels.record_square(g, 0)
        kernels.record_square(p + 1, 1)
        return p - lr * g

    step = kernels.fuse(descend, inplace="p").bind()
    params, grads = ([torch.randn(shape) for shape in SHAPES] for _ in range(2))
    expected = torch.stack(
        [
            torch.stack([g.double().square().sum(), (p + 1).double().square().sum()])
            for p, g in zip(params, grads, strict=True)
        ]
    )
    step(params, grads, 0.1)
    torch.testing.assert_close(step.squares, expected, rtol=1e-6, atol=1e-9)


def test_watched_steps_of_rounded_parameters():
    ends = {}
    for form in ("triton", "plain"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MODULI_KERNELS", form)
            generator = torch.Generator().manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
            optimizer = Optimizer(params, m.ClipNorm(1.0), m.Adam(), m.LR(1e-3), m.StochasticRounding())
            log = optimizer.watch()
            for _ in range(3):
                for param in params:
                    param.grad = torch.randn(param.shape, generator=generator)
                optimizer.step()
            ends[form] = {key: value for key, value in log().items() if value == value}
    assert ends["triton"] == pytest.approx(ends["plain"], rel=1e-4)
