"""Lists of every kind in Triton's interpreter: as `plain`, over empty, 0-d, odd-sized and misaligned tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moduli import kernels
from moduli.kernels._triton_table import Table, choose_block

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def adam(p, g, m, v, norm, lr, beta1, beta2, eps, step, decay):
    g = g * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g * (1 - beta2))
    update = m / (1 - beta1**step) / (v.sqrt() * (1 - beta2**step) ** -0.5 + eps)
    p.sub_(lr * (update + decay * p))


def make(shape, dtype, offset, generator):
    size = int(np.prod(shape))
    return torch.randn(size + offset, dtype=dtype, generator=generator)[offset:].view(shape)


def compare(monkeypatch_context, lists, dtype, norm_on_device=True):
    other = [[t.clone() for t in tensors] for tensors in lists]
    numbers = (1e-2, 0.9, 0.999, 1e-8, 3, 0.01)
    fused = kernels.fuse(adam)
    norm = kernels.norm(lists[1]) if norm_on_device else 1.5
    fused(*lists, norm, *numbers)
    assert fused.explain(*lists, norm, *numbers).form == "triton"
    with monkeypatch_context() as patch:
        patch.setenv("MODULI_KERNELS", "plain")
        expected = kernels.norm(other[1]) if norm_on_device else 1.5
        kernels.fuse(adam)(*other, expected, *numbers)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0) if norm_on_device else None
    for mine, theirs in zip(lists, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_lists_of_every_kind(data):
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8).filter(
            lambda found: any(np.prod(shape) for shape in found)
        )
    )
    offsets = data.draw(st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    lists = [[make(s, dtype, o, generator) for s, o in zip(shapes, offsets, strict=True)] for _ in range(4)]
    lists[3] = [tensor.abs_() for tensor in lists[3]]
    compare(pytest.MonkeyPatch.context, lists, dtype, data.draw(st.booleans()))


@pytest.mark.parametrize("count", [1, 1000])
def test_lists_of_one_and_of_a_thousand(count):
    generator = torch.Generator().manual_seed(0)
    sizes = [(5,), (), (0,), (3, 2), (17,)] if count > 1 else [(2500,)]
    lists = [[make(sizes[i % len(sizes)], torch.float32, 0, generator) for i in range(count)] for _ in range(4)]
    lists[3] = [tensor.abs_() for tensor in lists[3]]
    with kernels.watch_launches() as seen:
        compare(pytest.MonkeyPatch.context, lists, torch.float32)
    assert [launch.name for launch in seen] == ["squares", "fused"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32(dtype):
    x = [torch.linspace(-3, 3, 999).to(dtype)]
    got = kernels.fuse(lambda x: (x + 1e-4) - x)(x)[0]
    expected = ((x[0].float() + 1e-4) - x[0].float()).to(dtype)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-8)
    assert got.abs().max() > 0  # in half precision it would be nothing


@pytest.mark.parametrize("kind", ["norm", "one", "inf", "sum", "dot", "amax"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_reductions(kind, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (), (0,), (700,), (64,)]
    xs, ys = ([make(s, torch.float64, o, generator).to(dtype) for o, s in enumerate(shapes)] for _ in range(2))
    run = {
        "norm": lambda: kernels.norm(xs),
        "one": lambda: kernels.norm(xs, 1),
        "inf": lambda: kernels.norm(xs, float("inf")),
        "sum": lambda: kernels.sum(xs),
        "dot": lambda: kernels.dot(xs, ys),
        "amax": lambda: kernels.amax(xs),
    }[kind]
    with kernels.watch_launches() as seen:
        found = run()
    assert len(seen) == 1  # torch finishes over what the programs found, in one more
    monkeypatch.setenv("MODULI_KERNELS", "plain")
    torch.testing.assert_close(found, run(), rtol=1e-12, atol=1e-12)


def test_a_largest_element_that_is_no_number_is_found():
    assert kernels.amax([torch.tensor([1.0, float("nan"), 3.0]), torch.ones(2)]).isnan()
    assert kernels.norm([torch.tensor([float("inf"), 1.0])], float("inf")) == float("inf")
    assert kernels.amax([torch.tensor([-3.0, -2.0])]) == -2.0


def test_a_result_that_is_held_is_not_overwritten():
    xs = [torch.ones(4)]
    first = kernels.norm(xs)
    xs[0].mul_(2)
    second = kernels.norm(xs)
    assert (first, second) == (2.0, 4.0)
    del first, second
    place = kernels.norm(xs).data_ptr()
    assert kernels.norm(xs).data_ptr() == place


def test_a_table_is_made_once_and_rows_are_copied_where_something_moved():
    fused = kernels.fuse(lambda p, g, lr: p - lr * g, inplace="p")
    params, grads = [torch.ones(9), torch.ones(3)], [torch.ones(9), torch.ones(3)]
    fused(params, grads, 0.5)
    (plan,) = fused._plans.kept
    (piece,) = plan.pieces
    table = piece.cache["table"]
    rows = table.rows
    for _ in range(3):
        fused(params, grads, 0.25)
    assert table.rows is rows
    grads[0] = torch.full((9,), 2.0)  # as zero_grad and backward do
    fused(params, grads, 0.5)
    assert table.rows is not rows
    assert piece.cache["table"] is table
    torch.testing.assert_close(params[0], torch.full((9,), 1 - 0.5 - 0.75 - 1.0))


def test_written_tensors_have_new_versions():
    fused = kernels.fuse(lambda p, g: p - g, inplace="p")
    p, g = torch.ones(3), torch.ones(3)
    before = p._version, g._version
    fused([p], [g])
    assert (p._version > before[0], g._version) == (True, before[1])


def test_new_results_and_vectors():
    between = kernels.fuse(lambda a, b, t: a + t * (b - a))
    xs, ys = [torch.zeros(3), torch.zeros(2, 2)], [torch.ones(3), torch.ones(2, 2)]
    assert torch.equal(between(xs, ys, 0.25, flat=True), torch.full((7,), 0.25))
    assert [t.shape for t in between(xs, ys, 0.25)] == [(3,), (2, 2)]


def test_blocks_follow_rules(monkeypatch):
    assert choose_block(torch.float32, 7) == (1024, 4)
    assert choose_block(torch.float32, 9) == (512, 4)
    assert choose_block(torch.float64, 7) == (512, 4)
    monkeypatch.setenv("MODULI_TRITON_BLOCK", "256")
    assert choose_block(torch.float32, 7) == (256, 4)
    x = [torch.linspace(0, 1, 700)]
    with kernels.watch_launches() as seen:
        assert torch.equal(kernels.fuse(lambda x: x * 2)(x)[0], x[0] * 2)
    assert seen[0].programs == 3
    for wrong in ("100", "32", "many"):
        monkeypatch.setenv("MODULI_TRITON_BLOCK", wrong)
        with pytest.raises(ValueError, match="power of two"):
            choose_block(torch.float32, 7)


def test_chunks_cover_every_element_once():
    table = Table(torch.device("cpu"), [5, 0, 64, 65], 1, 64)
    assert table.programs == 4
    table.point([np.array([16, 32, 48, 64], np.uint64)])
    assert table.chunks.tolist() == [[0, 0], [2, 0], [3, 0], [3, 64]]
    assert table.aligned
    table.point([np.array([16, 1, 48, 68], np.uint64)])
    assert not table.aligned
