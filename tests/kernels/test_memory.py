"""Aliases, overlaps, version counters and graphs follow torch's rules."""

import gc

import pytest
import torch

from moduli import kernels


def one_by_one(fn, lists, over):
    """Apply a function in place as a fused call does: tensor by tensor, writing after all results are computed.

    Args:
        fn: The function.
        lists: Lists of its arguments.
        over: The index of the list that is overwritten.
    """
    for i in range(len(lists[0])):
        lists[over][i].copy_(fn(*(tensors[i] for tensors in lists)))


def fn(x, y):
    return x + 2 * y


CASES = {
    "shifted inside one tensor": lambda b: ([b[1:101]], [b[0:100]]),
    "shifted back": lambda b: ([b[0:100]], [b[1:101]]),
    "next tensor reads what the last wrote": lambda b: ([b[0:50], b[50:100]], [b[200:250], b[0:50]]),
    "next tensor writes over the last": lambda b: ([b[0:50], b[25:75]], [b[200:250], b[300:350]]),
    "twice the same": lambda b: ([b[0:50], b[0:50]], [b[200:250], b[200:250]]),
    "exactly itself": lambda b: ([b[0:50], b[60:90]], [b[0:50], b[60:90]]),
    "itself at another place": lambda b: ([b[0:50], b[60:110]], [b[60:110], b[0:50]]),
    "read twice": lambda b: ([b[0:50], b[60:110]], [b[200:250], b[200:250]]),
    "transposed itself": lambda b: ([b[:100].view(10, 10)], [b[:100].view(10, 10).t()]),
    "strided into itself": lambda b: ([b[0:100:2]], [b[1:101:2]]),
    "nothing to overlap": lambda b: ([b[0:0], b[0:50]], [b[10:10], b[60:110]]),
}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("scale", [1, 700])
def test_overlapping_arguments_give_the_result_of_the_plain_function(backend, case, scale):
    base = torch.randn(400 * scale, generator=torch.Generator().manual_seed(0))
    if scale > 1:  # large enough for blocks and threads
        stretched = {
            "shifted inside one tensor": ([1, 70_001], [0, 70_000]),
            "shifted back": ([0, 70_000], [1, 70_001]),
        }
        if case not in stretched:
            return
        (a, b), (c, d) = stretched[case]
        make = lambda t: ([t[a:b]], [t[c:d]])  # noqa: E731
    else:
        make = CASES[case]
    want, got = base.clone(), base.clone()
    one_by_one(fn, make(want), 0)
    fused = kernels.fuse(fn, inplace="x")
    fused(*make(got))
    assert torch.equal(got, want)
    one_by_one(fn, make(want), 0)
    fused(*make(got))  # the second call uses the plan of the first
    assert torch.equal(got, want)


def test_overlap_in_a_later_call_is_detected(backend):
    fused = kernels.fuse(fn, inplace="x")
    base = torch.arange(300.0)
    ok = [base[0:100]], [base[150:250]]
    fused(*ok)
    want, got = base.clone(), base.clone()
    one_by_one(fn, ([want[0:100]], [want[99:199]]), 0)
    fused([got[0:100]], [got[99:199]])
    assert torch.equal(got, want)


@pytest.mark.parametrize("where", ["list", "vector"])
def test_out_may_be_an_argument(backend, where):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    y = torch.randn(100, generator=torch.Generator().manual_seed(1))
    want = (x - y) * (x + y) + x
    fused = kernels.fuse(lambda a, b: (a - b) * (a + b) + a)
    fused([x], [y], out=[x] if where == "list" else x)
    assert torch.equal(x, want)


def test_the_last_of_two_outputs_to_one_tensor_remains(backend):
    x = torch.ones(4)
    place = torch.zeros(4)
    kernels.fuse(lambda a: (a + 1, a + 2))([x], out=([place], [place]))
    assert torch.equal(place, torch.full((4,), 3.0))


def leaf(n=4):
    return torch.ones(n, requires_grad=True)


def test_versions_count_up_as_after_an_operation_in_place(backend):
    plain, shared = torch.ones(4), torch.ones(8)
    view = shared[:4]
    parameter = torch.nn.Parameter(torch.ones(4))
    vector = torch.zeros(4)
    untouched = torch.ones(4)
    versions = [t._version for t in (plain, shared, parameter, vector, untouched)]
    with torch.no_grad():
        kernels.fuse(lambda x, y: x + y, inplace="x")([plain, view, parameter], [untouched] * 3)
        kernels.fuse(lambda x, y: x + y)([untouched], [untouched], out=vector)
    now = [t._version for t in (plain, shared, parameter, vector, untouched)]
    assert [after > before for before, after in zip(versions, now, strict=True)] == [True, True, True, True, False]


def test_autograd_raises_on_misuse(backend):
    weight = leaf()
    saved = torch.full((4,), 2.0)
    loss = (weight * saved).sum()
    kernels.fuse(lambda x: x * 3, inplace="x")([saved])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = weight.exp().sum()
    out = weight.exp()
    total = out.sum()
    with torch.no_grad():
        kernels.fuse(lambda x: x * 3, inplace="x")([out])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_calls_that_would_need_a_graph_are_refused(backend):
    over = kernels.fuse(lambda x, y: x + y, inplace="x")
    p, q = leaf(), torch.ones(4)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        over([p], [q])
    with pytest.raises(RuntimeError, match="records no graph"):
        over([q], [p])
    with pytest.raises(RuntimeError, match="requires grad"):
        over([p * 2], [q])
    with pytest.raises(RuntimeError, match="records no graph"):
        kernels.norm([p])
    with pytest.raises(RuntimeError, match="records no graph"):
        kernels.fuse(lambda x, s: x * s)([q], torch.tensor(2.0, requires_grad=True))
    assert torch.equal(q, torch.ones(4))
    assert torch.equal(p.detach(), torch.ones(4))
    with torch.no_grad():
        over([p], [q])
    assert torch.equal(p.detach(), torch.full((4,), 2.0))
    over([q], [q.clone()])
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        over([q], [torch.ones(4)])
    assert "refused" in str(over.explain([q], [torch.ones(4)]))


def test_inference_tensors_follow_torchs_rules(backend):
    over = kernels.fuse(lambda x, y: x + y, inplace="x")
    with torch.inference_mode():
        inside = torch.ones(3)
        normal = over([inside], [inside.clone()])
        assert torch.equal(normal[0], torch.full((3,), 2.0))
    outside = torch.ones(3)
    with pytest.raises(RuntimeError, match="nference tensor"):
        over([inside], [outside])
    assert torch.equal(inside, torch.full((3,), 2.0))
    with torch.inference_mode():
        over([outside], [outside.clone()])
    assert torch.equal(outside, torch.full((3,), 2.0))


def test_parameters_keep_their_memory(backend):
    net = torch.nn.Linear(4, 3)
    pointers = [p.data_ptr() for p in net.parameters()]
    with torch.no_grad():
        kernels.fuse(lambda p: p * 0.5, inplace="p")(list(net.parameters()))
    assert [p.data_ptr() for p in net.parameters()] == pointers


def test_zeros_without_memory_after_a_plan_for_plain_tensors(backend):
    fused = kernels.fuse(lambda x, y: 2 * x + y)
    ys = [torch.ones(2), torch.ones(3)]
    fused(ys, ys)
    zeros = torch._efficientzerotensor(2)
    assert torch.equal(fused([zeros, ys[1]], ys)[0], torch.ones(2))
    freed = torch.ones(2)
    fused([freed, ys[1]], ys)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        fused([freed, ys[1]], ys)


def test_freed_storage_after_a_plan_for_another_layout(backend):
    fused = kernels.fuse(lambda x: 2 * x)
    other = torch.ones(5).to_mkldnn()
    assert torch.equal(fused([other])[0].to_dense(), torch.full((5,), 2.0))
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"x\[0\] has no memory .* resized to 0 bytes"):
        fused([freed])
    assert torch.equal(fused([torch.ones(5)])[0], torch.full((5,), 2.0))


@pytest.mark.parametrize("reduction", [kernels.sum, kernels.norm, kernels.amax, lambda xs: kernels.dot(xs, xs)])
@pytest.mark.parametrize("planned", [False, True])
def test_reductions_refuse_freed_storage(backend, reduction, planned):
    x = torch.ones(7)
    if planned:
        reduction([torch.ones(3), x])
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="tensor 1 of the list has no memory"):
        reduction([torch.ones(3), x])
    assert float(kernels.sum([torch.empty(0), torch.ones(2)])) == 2  # an empty tensor needs no memory


@pytest.mark.parametrize("planned", [False, True])
def test_a_storage_that_is_too_short_is_not_written(backend, planned):
    fused = kernels.fuse(lambda p, g: p - g, inplace="p")
    p, g = torch.ones(4096), torch.ones(4096)
    if planned:
        fused([p], [g])
    p.untyped_storage().resize_(64)
    with pytest.raises(RuntimeError, match=r"p\[0\] has no memory for its 4096 elements: .* 64 bytes"):
        fused([p], [g])


def test_a_norm_of_meta_tensors_is_a_meta_tensor():
    assert kernels.norm([torch.ones(3, device="meta")]).is_meta


def test_a_pause_of_collection_restores_its_state():
    assert gc.isenabled()
    with kernels.pause_collection():
        with kernels.pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()  # collection was disabled when the inner block began
    assert gc.isenabled()
    with pytest.raises(KeyError), kernels.pause_collection():
        raise KeyError
    assert gc.isenabled()
