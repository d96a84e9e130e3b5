"""Contracted foreach programs: equal results with as few launches as torch's optimizers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moduli import kernels

CASES = {
    "product by a number": (lambda p, g, s, t: p + s * g, 1),
    "product first": (lambda p, g, s, t: g * s + p, 1),
    "difference": (lambda p, g, s, t: p - s * g, 1),
    "number in the code": (lambda p, g, s, t: p - 0.25 * g, 1),
    "ratio": (lambda p, g, s, t: p + s * (g / p), 1),
    "two numbers before a ratio": (lambda p, g, s, t: p - s * ((t * g) / p), 1),
    "product of two": (lambda p, g, s, t: torch.addcmul(p, g, s * g), 1),
    "decay": (lambda p, g, s, t: p - s * (g + t * p), 2),
    "decay of a ratio": (lambda p, g, s, t: p - s * (g / (g * g) + t * p), 3),
    "decay by a number in the code": (lambda p, g, s, t: p - 0.1 * (g + 0.5 * p), 2),
    "made twice": (lambda p, g, s, t: (p + s * g) * (s * g), 3),
    "used twice": (lambda p, g, s, t: (lambda u: (p + u) * u)(s * g), 3),
    "sum used twice": (lambda p, g, s, t: (lambda u: (p - s * u) * u)(g + t * p), 3),
    "sum of two products": (lambda p, g, s, t: p * s + g * t, 2),
    "integer": (lambda p, g, s, t: p - 2 * (g + 3 * p), 2),
    "rounded between": (lambda p, g, s, t: p + (s * g).half().to(p.dtype), None),
}


class Foreach(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith("_foreach_") and "copy" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("inplace", [None, "p"])
def test_contracted_equals_plain(monkeypatch, name, dtype, inplace):
    monkeypatch.setenv("MODULI_KERNELS", "foreach")
    fn, operations = CASES[name]
    generator = torch.Generator().manual_seed(0)
    ps, gs = ([torch.rand(n, generator=generator).add(0.5).to(dtype) for n in (0, 1, 7, 80_000)] for _ in range(2))
    want = [fn(p.double(), g.double(), 0.3, 0.7) for p, g in zip(ps, gs, strict=True)]
    fused = kernels.fuse(fn, inplace=inplace)
    with torch.no_grad(), Foreach() as seen:
        got = fused([p.clone() for p in ps], gs, 0.3, 0.7)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for g, w in zip(got, want, strict=True):
        assert g.dtype is dtype
        torch.testing.assert_close(
            g.double(), w, rtol=close if operations else 5e-3, atol=close if operations else 5e-3
        )
    if operations is not None and dtype is not torch.bfloat16:  # the small tensors are one group, the large one another
        assert len(seen.names) == 2 * operations, seen.names


def test_scalars_change_without_another_program(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "foreach")
    fused = kernels.fuse(lambda p, g, s, t: p - s * (g + t * p))
    p, g = torch.rand(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    for s, t in ((0.0, 1.0), (1.0, 0.0), (-2.0, 0.5), (1e300, 1e-300), (float("nan"), 1.0)):
        torch.testing.assert_close(fused([p], [g], s, t)[0], p - s * (g + t * p), rtol=1e-12, atol=0, equal_nan=True)
