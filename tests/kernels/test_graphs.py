"""Random functions over random lists: every form equals the plain function, tensor by tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.operations import BINARY, TERNARY, UNARY
from moduli import kernels

OPERATIONS = {**{n: (1, f) for n, f in UNARY.items()}, **{n: (2, f) for n, f in BINARY.items()}}
OPERATIONS |= {n: (3, f) for n, f in TERNARY.items()}
LEAVES = ["a", "b", "c", "s", "t", 0.5, 2.0, -1.25]
SIZES = [0, 1, 2, 7, 16, 33, 1000, 70_001]


@st.composite
def programs(draw):
    """Draw a list of steps (name, operands, scale); an operand is a leaf or an earlier step."""
    steps = []
    for position in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(OPERATIONS)))
        tensors = LEAVES[:3] + list(range(position))
        operands = [draw(st.sampled_from(tensors)) for _ in range(OPERATIONS[name][0])]
        scale = draw(st.sampled_from([None, "s", "t", 0.5, 2.0]))
        steps.append((name, operands, scale))
    return steps


def as_function(steps):
    def fn(a, b, c, s, t):
        values = {"a": a, "b": b, "c": c, "s": s, "t": t, 0.5: 0.5, 2.0: 2.0}
        results = []
        for name, operands, scale in steps:
            args = [results[o] if isinstance(o, int) else values[o] for o in operands]
            kind = torch.result_type(args[0], args[-1])
            value = OPERATIONS[name][1](*(arg.to(kind) for arg in args))
            results.append(value if scale is None else value * values[scale] + a)
        return results[-1], results[0]

    return fn


class Perturbed(TorchDispatchMode):
    """A mode that perturbs every intermediate result by a few units in the last place, to measure the conditioning."""

    def __init__(self, seed, size):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.size = size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and func._schema.name != "aten::detach":
            signs = torch.randint(-1, 2, result.shape, generator=self.generator).to(result.dtype)
            result = result * (1 + signs * self.size)
        return result


def assert_same(fn, got, lists, scalars, dtypes):
    for i in range(len(lists[0])):
        args = [tensors[i] for tensors in lists]
        wide = [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in args]
        want = fn(*wide, *scalars)
        coarse = any(x.dtype is not torch.float64 for x in args)
        perturbed = []
        for seed in range(4):
            with Perturbed(seed, 2.0**-21 if coarse else 2.0**-49):
                perturbed.append(fn(*wide, *scalars))
        for position, target in enumerate(want):
            ours = got[position][i]
            target = target.to(ours.dtype).double()
            moved = torch.stack([(run[position].to(ours.dtype).double() - target).abs() for run in perturbed])
            # Elements that a perturbation turns into NaN, infinity or another branch are not compared.
            unsure = torch.stack(
                [
                    ~torch.isclose(run[position].to(ours.dtype).double(), target, rtol=1e-3, equal_nan=True)
                    for run in perturbed
                ]
            ).any(0)
            eps = torch.finfo(ours.dtype).eps if ours.dtype.is_floating_point else 0.0
            rtol = max(1e-12 if ours.dtype is torch.float64 and not coarse else 1e-5, 2 * eps)
            allowed = rtol * target.abs() + 8 * moved.nan_to_num(0.0).amax(0) + 1e-30
            difference = (ours.double() - target).abs()
            same = (difference <= allowed) | (ours.double() == target) | (ours.isnan() & target.isnan())
            assert bool((same | unsure).all()), (position, ours[~(same | unsure)][:3], target[~(same | unsure)][:3])


def lists_of(seed, sizes, dtypes, special):
    generator = torch.Generator().manual_seed(seed)
    lists = []
    for dtype in dtypes:
        tensors = []
        for size in sizes:
            tensor = (torch.randn(size, generator=generator, dtype=torch.float64) * 2).to(dtype)
            if special and size > 4:
                tensor[::5] = torch.tensor(special[len(lists) % len(special)], dtype=dtype)
            tensors.append(tensor)
        lists.append(tensors)
    return lists


@settings(max_examples=25)
@given(
    steps=programs(),
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    dtypes=st.tuples(*[st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])] * 3),
    special=st.sampled_from([[], [float("nan")], [float("inf"), 0.0], [-float("inf")]]),
)
def check_random_graphs(steps, seed, sizes, dtypes, special):
    fn = as_function(steps)
    lists = lists_of(seed, sizes, dtypes, special)
    scalars = (0.75, -1.5)
    got = kernels.fuse(fn)(*lists, *scalars)
    assert_same(fn, got, lists, scalars, dtypes)


def test_every_form_is_the_plain_function(backend):
    check_random_graphs()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(backend, threads):
    steps = [("mul", ["a", "b"], "s"), ("exp", [0], 0.5), ("add", [1, "c"], "t")]
    fn = as_function(steps)
    lists = lists_of(0, [200_003, 0, 5, 65_536, 1], [torch.float64] * 3, [])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = kernels.fuse(fn)(*lists, 0.5, 0.25)
    finally:
        torch.set_num_threads(before)
    assert_same(fn, got, lists, (0.5, 0.25), [torch.float64] * 3)


def test_a_huge_tensor_beside_tiny_ones(backend):
    lists = [[torch.full((n,), float(k)) for n in (1, 3_000_001, 2)] for k in (1, 2)]
    for ours in kernels.fuse(lambda a, b, s: a + s * b)(*lists, 2.0):
        assert torch.equal(ours, torch.full_like(ours, 5.0))


def test_unaligned_offsets(backend):
    base = torch.randn(4099, generator=torch.Generator().manual_seed(0))
    xs = [base[1:1000], base[1003:2001], base[2003:4098]]
    for ours, x in zip(kernels.fuse(lambda a: a * a - 1)(xs), xs, strict=True):
        assert torch.equal(ours, x * x - 1)
