"""The foreach form as it runs on a device, computed on the CPU.

On a device all tensors are one group, operations without a foreach function run on one vector, scalars may be tensors, and
intermediate results use memory that is reused between calls.
"""

import threading

import pytest
import torch

from kernels.operations import BINARY, TERNARY, UNARY
from kernels.values import DIVIDING, SPECIAL
from moduli import kernels
from moduli.kernels import _cuts, _fuse, _torch_reduce

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [(5, 3), (), (0,), (1, 2, 3, 2), (33,)]


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "foreach")
    monkeypatch.setattr(_cuts, "is_on_host", lambda device: False)
    monkeypatch.setattr(
        _fuse, "is_fake", lambda tensor: True
    )  # treat scalar tensors as on a device, where they are not read


def make(dtype, seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]


def adamw(p, g, m, v, norm, lr, beta1, beta2, eps, step, decay):
    g = g * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g * (1 - beta2))
    update = m / (1 - beta1**step) / (v.sqrt() * (1 - beta2**step) ** -0.5 + eps)
    p.sub_(lr * torch.where(update.abs() > 0.5, update + decay * p, update.sign()))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_step_equals_the_plain_form(monkeypatch, dtype):
    lists = [make(dtype, seed) for seed in range(4)]
    lists[3] = [tensor.abs_() for tensor in lists[3]]
    others = [[tensor.clone() for tensor in tensors] for tensors in lists]
    fused = kernels.fuse(adamw)
    for step in (1, 2, 3):
        for tensors in (lists, others):
            for tensor in tensors[1]:
                tensor.mul_(-0.5).add_(0.1 * step)
        norm = torch.linalg.vector_norm(torch.stack([t.double().norm() for t in lists[1]]))
        fused(*lists, norm, 1e-2 * step, 0.9, 0.999, 1e-8, step, 0.01)
        assert fused.explain(*lists, norm, 1e-2, 0.9, 0.999, 1e-8, step, 0.01).form == "foreach"
        with monkeypatch.context() as patch:
            patch.setenv("MODULI_KERNELS", "plain")
            kernels.fuse(adamw)(*others, norm.item(), 1e-2 * step, 0.9, 0.999, 1e-8, step, 0.01)
        for mine, theirs in zip(lists, others, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


TABLE = {
    name: (function, roles) for roles, part in enumerate((UNARY, BINARY, TERNARY), 1) for name, function in part.items()
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_every_operation_with_reused_memory(name, dtype, monkeypatch):
    function, roles = TABLE[name]
    dividing = name in DIVIDING or name.startswith("div")
    special = [x for x in SPECIAL if not (dividing and (x != x or abs(x) in (float("inf"), 1e30, 1e-30, 6e-8)))]
    base = torch.tensor(special, dtype=torch.float64).to(dtype)
    if dividing:
        base = torch.where(base == 0, torch.ones_like(base), base)
    fused = kernels.fuse(
        [lambda x: function(x), lambda x, y: function(x, y), lambda x, y, z: function(x, y, z)][roles - 1]
    )
    results = []
    for turn in range(3):
        args = [[base.roll(turn + 5 * k), base.roll(turn + 7 * k)[:4].view(2, 2)] for k in range(roles)]
        results.append((fused(*args), args))
    monkeypatch.setenv("MODULI_KERNELS", "plain")
    for got, args in results:  # compared after all calls, so a result in reused memory would be wrong
        torch.testing.assert_close(got, fused(*args), rtol=TOLERANCE[dtype], atol=1e-30, equal_nan=True)


def test_strided_tensors_in_operations_without_a_foreach_function():
    x = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    y = torch.arange(24.0).flip(0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    fused = kernels.fuse(lambda x, y: torch.where(x > y, x, y) * 2 + x)
    for _ in range(2):
        (got,) = fused([x], [y])
        assert torch.equal(got, torch.maximum(x, y) * 2 + x)


def test_threads_do_not_share_memory_at_one_time():
    fused = kernels.fuse(lambda x, a: torch.tanh(x * a) + x.exp() * a)
    xs = [torch.linspace(-1, 1, 300) for _ in range(20)]
    expected = {a: torch.tanh(xs[0] * a) + xs[0].exp() * a for a in (1.0, 2.0, 3.0)}
    wrong = []

    def work(a):
        for _ in range(30):
            if not torch.allclose(fused(xs, a)[7], expected[a], atol=1e-6):
                wrong.append(a)

    threads = [threading.Thread(target=work, args=(a,)) for a in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["squares", "norm", "absolutes", "largest", "sum", "dot", "amax"])
def test_reductions(kind, dtype):
    for seed in (1, 2):
        xs, ys = make(dtype, seed), make(dtype, seed + 7)
        flat = torch.cat([x.reshape(-1) for x in xs]).double()
        other = torch.cat([y.reshape(-1) for y in ys]).double()
        expected = {
            "squares": (flat * flat).sum(),
            "norm": flat.norm(),
            "absolutes": flat.abs().sum(),
            "largest": flat.abs().max(),
            "sum": flat.sum(),
            "dot": flat @ other,
            "amax": flat.max(),
        }[kind]
        reduced = _torch_reduce.reduce_on_device(kind, [xs, ys] if kind == "dot" else [xs])
        assert reduced.dtype is torch.float64
        torch.testing.assert_close(reduced, expected, rtol=1e-12, atol=1e-12)


def test_a_result_that_is_referenced_is_not_overwritten():
    xs = [torch.ones(4)]
    first = _torch_reduce.reduce_on_device("norm", [xs])
    xs[0].mul_(2)
    second = _torch_reduce.reduce_on_device("norm", [xs])
    assert (first, second) == (2.0, 4.0)
    del first, second
    place = _torch_reduce.reduce_on_device("norm", [xs]).data_ptr()
    assert _torch_reduce.reduce_on_device("norm", [xs]).data_ptr() == place


@pytest.mark.parametrize("kind", ["norm", "squares", "absolutes", "largest", "sum", "amax"])
def test_reductions_of_several_devices_are_joined(kind):
    xs = [torch.linspace(-3, 1, 9), torch.ones(4), torch.full((2,), 2.0)]
    whole = _torch_reduce.reduce_on_device(kind, [xs])
    parts = [_torch_reduce.reduce_on_device(kind, [[x]]) for x in xs]
    torch.testing.assert_close(_torch_reduce.join_numbers(kind, parts, torch.device("cpu")), whole)
    if kind == "norm":
        broken = [torch.tensor(torch.inf), torch.tensor(torch.nan)]
        assert _torch_reduce.join_numbers(kind, broken, torch.device("cpu")).isnan()
