"""Arguments, results and errors of fused calls."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from moduli import kernels


def axpy(x, y, a):
    return a * x + y


def sgd(p, g, lr):
    p.add_(g, alpha=-lr)


def adam(p, g, m, v, lr, beta1, beta2, eps, c1, c2):
    m = torch.lerp(m, g, 1 - beta1)
    v = beta2 * v + (1 - beta2) * g * g
    return p - lr / c1 * m / ((v / c2) ** 0.5 + eps), m, v


def tensors(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


SHAPES = [(3, 4), (5,), (), (2, 3, 4), (0,), (1,)]


def test_new_storage_has_the_shapes_of_the_first_role(backend):
    xs, ys = tensors(*SHAPES), tensors(*SHAPES, seed=1)
    got = kernels.fuse(axpy)(xs, ys, 2.0)
    assert [t.shape for t in got] == [x.shape for x in xs]
    for ours, x, y in zip(got, xs, ys, strict=True):
        assert torch.equal(ours, 2.0 * x + y)
    assert len({t.untyped_storage().data_ptr() for t in got if t.numel()}) == len([t for t in got if t.numel()])


def test_shapes_may_differ_when_counts_agree(backend):
    xs, ys = tensors((3, 4), (6,)), tensors((12,), (2, 3), seed=1)
    got = kernels.fuse(axpy)(xs, ys, 2.0)
    for ours, x, y in zip(got, xs, ys, strict=True):
        assert torch.equal(ours.reshape(-1), 2.0 * x.reshape(-1) + y.reshape(-1))


@pytest.mark.parametrize("big", [False, True])
def test_every_form_of_output(backend, big):
    shapes = [(70_000,), (3, 4), (20_000,), (5,)] if big else SHAPES
    xs, ys = tensors(*shapes), tensors(*shapes, seed=1)
    fused = kernels.fuse(axpy)
    want = torch.cat([(2.0 * x + y).reshape(-1) for x, y in zip(xs, ys, strict=True)])
    assert torch.equal(fused(xs, ys, 2.0, flat=True), want)
    vector = torch.empty_like(want)
    assert fused(xs, ys, 2.0, out=vector) is vector
    assert torch.equal(vector, want)
    outputs = [torch.empty_like(x, dtype=torch.float64) for x in xs]
    assert fused(xs, ys, 2.0, out=outputs) is outputs
    assert torch.equal(torch.cat([g.reshape(-1) for g in outputs]), want.double())
    places = [7]
    for x in xs[:-1]:
        places.append(places[-1] + x.numel() + 3)
    padded = torch.full((places[-1] + xs[-1].numel() + 1,), 9.0)
    fused(xs, ys, 2.0, out=padded, offsets=places)
    untouched = torch.ones_like(padded, dtype=torch.bool)
    for x, y, place in zip(xs, ys, places, strict=True):
        assert torch.equal(padded[place : place + x.numel()], (2.0 * x + y).reshape(-1))
        untouched[place : place + x.numel()] = False
    assert bool((padded[untouched] == 9.0).all())
    loose = fused(xs, ys, 2.0, flat=True, offsets=places)
    assert torch.equal(loose[places[0] : places[0] + xs[0].numel()], padded[places[0] : places[0] + xs[0].numel()])


def test_several_results_in_different_forms_of_output(backend):
    xs, ys = tensors(*SHAPES), tensors(*SHAPES, seed=1)
    want = [(x + y, x - y, x * y) for x, y in zip(xs, ys, strict=True)]
    fused = kernels.fuse(lambda x, y: (x + y, x - y, x * y), inplace=(None, "y", None))
    vector = torch.empty(sum(x.numel() for x in xs))
    added, subtracted, multiplied = fused(xs, ys, out=(None, vector))
    assert subtracted is ys
    assert multiplied is vector
    for i, (plus, minus, _) in enumerate(want):
        assert torch.equal(added[i], plus)
        assert torch.equal(ys[i], minus)
    assert torch.equal(vector, torch.cat([w[2].reshape(-1) for w in want]))


def test_functions_may_change_their_arguments_in_place(backend):
    ps, gs = tensors(*SHAPES), tensors(*SHAPES, seed=1)
    want = [p - 0.1 * g for p, g in zip(ps, gs, strict=True)]
    assert kernels.fuse(sgd)(ps, gs, 0.1) is None
    for p, w in zip(ps, want, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-6, atol=1e-7)

    def chained(p, g, lr):
        g = g.mul_(0.5)
        return p.sub_(lr * g), g + p

    ps, gs = tensors(*SHAPES), tensors(*SHAPES, seed=1)
    want = [(p - 0.1 * (0.5 * g), 0.5 * g) for p, g in zip(ps, gs, strict=True)]
    moved, total = kernels.fuse(chained)(ps, gs, 0.1)
    assert moved is ps
    for i, (p, g) in enumerate(want):
        torch.testing.assert_close(ps[i], p)
        torch.testing.assert_close(gs[i], g)
        torch.testing.assert_close(total[i], g + p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adam_is_torchs(backend, dtype):
    shapes = [(30, 40), (7,), (), (20_000,)]
    params = [torch.nn.Parameter(t) for t in tensors(*shapes, dtype=dtype)]
    ours = [torch.nn.Parameter(p.detach().clone()) for p in params]
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    reference = torch.optim.Adam(params, lr=0.01, foreach=False)
    step = kernels.fuse(adam, inplace=("p", "m", "v"))
    for k in range(1, 6):
        for p, g in zip(params, tensors(*shapes, seed=k, dtype=dtype), strict=True):
            p.grad = g
        reference.step()
        with torch.no_grad():
            step(ours, [p.grad for p in params], m, v, 0.01, 0.9, 0.999, 1e-8, 1 - 0.9**k, 1 - 0.999**k)
    for p, q in zip(params, ours, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12 if dtype is torch.float64 else 1e-5, atol=1e-7)


def test_scalars_change_without_a_new_kernel(backend):
    fused = kernels.fuse(axpy)
    xs = tensors((4,))
    before = None
    for a in (1, 2.5, torch.tensor(3.0), torch.tensor(4), -0.0, float("inf"), True + 1):
        got = fused(xs, xs, a)[0]
        torch.testing.assert_close(got, float(a) * xs[0] + xs[0], rtol=1e-6, atol=0)
        (trace,) = next(iter(fused._traces.values()))
        assert before in (None, len(trace.forms))
        before = len(trace.forms)
    assert len(fused._traces) == 1


def test_other_constants_make_another_kernel(backend):
    def step(p, g, nesterov, lr):
        return p - (2.0 if nesterov else 1.0) * lr * g

    fused = kernels.fuse(step)
    xs = [torch.zeros(3)]
    ones = [torch.ones(3)]
    assert fused(xs, ones, True, 0.5)[0][0] == -1.0
    assert fused(xs, ones, False, 0.5)[0][0] == -0.5


FACTOR = 2.0


def test_changed_globals_and_closures_are_read(backend, monkeypatch):
    inner = 3.0

    def fn(x):
        return x * FACTOR + inner

    fused = kernels.fuse(fn)
    assert fused([torch.ones(2)])[0][0] == 5.0
    inner = 4.0
    assert fused([torch.ones(2)])[0][0] == 6.0
    monkeypatch.setitem(fn.__globals__, "FACTOR", 10.0)
    assert fused([torch.ones(2)])[0][0] == 14.0


def test_bound_calls_detect_changed_tensors_and_lists(backend):
    ps, gs = tensors((4,), (2, 3)), tensors((4,), (2, 3), seed=1)
    bound = kernels.fuse(lambda p, g, lr: p - lr * g, inplace="p").bind(ps, gs)
    for change in (
        lambda: None,
        lambda: setattr(ps[0], "data", torch.ones(4)),
        lambda: gs.__setitem__(1, torch.ones(2, 3)),
        lambda: setattr(gs[0], "data", torch.ones(4, dtype=torch.float64)[::1]),
        lambda: setattr(gs[1], "data", torch.ones(3, 2).t()),
        lambda: (setattr(ps[1], "data", torch.ones(6)), setattr(gs[1], "data", torch.ones(6))),
        lambda: ps[0].resize_(2).zero_() if gs[0].resize_(2) is not None else None,
        lambda: (ps.append(torch.ones(1)), gs.append(torch.ones(1))),
    ):
        change()
        want = [p - 0.5 * g for p, g in zip(ps, gs, strict=True)]
        bound(0.5)
        for p, w in zip(ps, want, strict=True):
            torch.testing.assert_close(p, w.to(p.dtype))
    bound(lr=0.0)
    with pytest.raises(TypeError, match="more arguments"):
        bound(0.5, 1.0)


def test_a_view_that_was_transposed_in_place_is_detected(backend):
    p, g = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
    fused = kernels.fuse(lambda p, g: p - g, inplace="p")
    fused([p], [g])
    g.t_()
    want = torch.zeros(6) - g.reshape(-1)
    fused([p], [g])
    assert torch.equal(p.reshape(-1), want)


def test_calls_keep_no_tensor_alive(backend):
    fused = kernels.fuse(axpy)
    x = torch.ones(1000)
    fused([x], [x], 1.0)
    kernels.sum([x])
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_lists_of_every_kind_are_lists(backend):
    net = torch.nn.Linear(3, 2)
    with torch.no_grad():
        got = kernels.fuse(axpy)(net.parameters(), tuple(net.parameters()), 1.0)
    assert torch.equal(got[0], 2 * net.weight.detach())
    assert kernels.fuse(axpy)([], [], 1.0) == []
    assert kernels.fuse(sgd)([], [], 1.0) is None
    assert kernels.fuse(axpy)([], [], 1.0, flat=True).shape == (0,)


def test_mixed_dtypes_promote_as_torch_promotes(backend):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    xs = [tensors((50,), dtype=k)[0] for k in kinds for _ in kinds]
    ys = [tensors((50,), seed=1, dtype=k)[0] for _ in kinds for k in kinds]
    got = kernels.fuse(axpy)(xs, ys, 2.0)
    for ours, x, y in zip(got, xs, ys, strict=True):
        assert ours.dtype is torch.promote_types(x.dtype, y.dtype)
        torch.testing.assert_close(ours, 2.0 * x + y, rtol=2e-2, atol=2e-2)
    flat = kernels.fuse(axpy)(xs, ys, 2.0, flat=True)
    assert flat.dtype is torch.float64
    over = [x.clone() for x in xs]
    kernels.fuse(axpy, inplace="x")(over, ys, 2.0)
    for o, g in zip(over, got, strict=True):
        torch.testing.assert_close(o, g.to(o.dtype))


def test_tensors_that_no_kernel_takes_give_the_same_result(backend):
    fused = kernels.fuse(axpy)
    for x, y in [
        (torch.arange(6), torch.arange(6)),
        (torch.arange(6, dtype=torch.int16), torch.arange(6) > 2),
        (torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)),
        (torch.ones(4, 3).t(), torch.arange(12.0).reshape(3, 4)),
        (torch.arange(20.0)[::2], torch.arange(20.0)[1::2]),
        (torch.ones(1).expand(5), torch.arange(5.0)),
        (torch._neg_view(torch.ones(3)), torch.ones(3)),
        (torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, dtype=torch.complex64)),
        (torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ]:
        got = fused([x, torch.ones(3)], [y, torch.ones(3)], 2.0)
        want = axpy(x, y, 2.0)
        torch.testing.assert_close(got[0].to_dense(), want.to_dense())
        assert torch.equal(got[1], torch.full((3,), 3.0))
    meta = fused([torch.ones(3, device="meta")], [torch.ones(3, device="meta")], 2.0)[0]
    assert meta.device.type == "meta"


def test_integers_promote_by_the_kind_of_number(backend):
    fused = kernels.fuse(lambda x, y, a: torch.add(x, y, alpha=a) * a)
    x = torch.arange(5, dtype=torch.int32)
    assert fused([x], [x], 3)[0].dtype is torch.int32
    assert torch.equal(fused([x], [x], 3)[0], (x + 3 * x) * 3)
    twice = kernels.fuse(lambda x, a: x * a)
    assert torch.equal(twice([x], 2.5)[0], x * 2.5)
    assert twice([x], 2)[0].dtype is torch.int32


def test_subclasses_run_as_they_define_it(backend):
    class Loud(torch.Tensor):
        pass

    x = torch.ones(3).as_subclass(Loud)
    got = kernels.fuse(axpy)([x], [x], 2.0)[0]
    assert isinstance(got, Loud)
    assert torch.equal(got.as_subclass(torch.Tensor), torch.full((3,), 3.0))


def test_only_tensors_without_a_kernel_run_plain(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    xs = [torch.ones(4), torch.ones(10_000)[::2], torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)]
    answer = kernels.explain(kernels.fuse(axpy), xs, xs, 2.0)
    assert answer.form == "mixed"
    assert sum(line.startswith("c: ") for line in answer.lines) == 2
    assert sum(line.startswith("plain: ") for line in answer.lines) == 2
    assert answer.path.read_text() == answer.source
    assert "moduli_run" in answer.source


def test_operations_without_a_c_form_run_one_by_one(backend):
    x = torch.rand(70_000, generator=torch.Generator().manual_seed(0))
    fused = kernels.fuse(lambda a, s: torch.erfinv(a) * s + torch.round(a, decimals=1))
    assert torch.equal(fused([x], 2.0)[0], torch.erfinv(x) * 2.0 + torch.round(x, decimals=1))
    assert fused.explain([x], 2.0).form == ("plain" if backend == "plain" else "foreach")
    assert "erfinv" in str(fused.explain([x], 2.0)) or backend != "c"


def test_a_dispatch_mode_and_transforms_see_the_function(backend):
    fused = kernels.fuse(axpy)
    x = torch.arange(3.0)
    assert torch.equal(torch.func.vmap(lambda a: fused([a], [a], 2.0)[0])(x), 3 * x)
    gradient = torch.func.grad(lambda a: fused([a], [a], 2.0)[0].sum())(x)
    assert torch.equal(gradient, torch.full((3,), 3.0))
    tangent = torch.func.jvp(lambda a: fused([a], [a], 2.0)[0], (x,), (torch.ones(3),))[1]
    assert torch.equal(tangent, torch.full((3,), 3.0))
    over = kernels.fuse(axpy, inplace="x")
    got = torch.func.vmap(lambda a: over([a.clone()], [a], 2.0, flat=True))(x)
    assert torch.equal(got.reshape(-1), 3 * x)
    with pytest.raises(ValueError, match="transform"):
        torch.func.vmap(lambda a: fused([a], [a], 2.0, out=[a]))(x)
    with pytest.raises(TypeError, match="no list"):
        torch.func.vmap(lambda a: fused(a, a, 2.0))(x)


def test_threads_may_share_a_fused_function(backend):
    fused = kernels.fuse(axpy)
    wrong = []

    def work(seed):
        for k in range(20):
            xs = tensors((50_000,), (3,), seed=seed * 100 + k)
            if not torch.equal(fused(xs, xs, 2.0)[0], 2.0 * xs[0] + xs[0]):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_pickle_and_deepcopy(backend):
    fused = kernels.fuse(axpy, inplace="x")
    for other in (pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        xs = [torch.ones(2)]
        other(xs, [torch.ones(2)], 2.0)
        assert torch.equal(xs[0], torch.full((2,), 3.0))
        assert repr(other) == repr(fused) == "fuse(axpy(x, y, a), inplace=('x',))"


REFUSED = {
    "mean": lambda x: x - x.mean(),
    "cumsum": lambda x: x.cumsum(0),
    "t": lambda x: x.t() if x.dim() == 2 else x,
    "rand_like": lambda x: x + torch.rand_like(x),
    "view": lambda x: x.view(-1),
    "sort": lambda x: x.sort(0)[0],
    "add": lambda x: torch.add(x, x, out=x),
    "empty_like": lambda x: torch.empty_like(x) + x,
    "bernoulli_": lambda x: x.bernoulli_(0.5),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_operations_that_are_not_pointwise_are_refused_by_name(backend, name):
    x = torch.ones(3)
    with pytest.raises(kernels.NotPointwiseError, match=name.rstrip("_")):
        kernels.fuse(REFUSED[name])([x])
    assert torch.equal(x, torch.ones(3))


OUTSIDE = torch.ones(())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s: x * x.numel(),
        lambda x, s: x * x.dim(),
        lambda x, s: x if s > 0 else -x,
        lambda x, s: x * float(s),
        lambda x, s: x * s.item(),
        lambda x, s: x[0] * x,
        lambda x, s: x * OUTSIDE,
        lambda x, s: s * 2,
        lambda x, s: None,
    ],
)
def test_functions_of_shapes_or_values_are_refused(backend, fn):
    with pytest.raises(kernels.NotPointwiseError):
        kernels.fuse(fn)([torch.ones(3)], 2.0)


def test_mistakes_are_named_before_anything_is_written(backend):
    x, y = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)]
    over = kernels.fuse(axpy, inplace="x")
    fused = kernels.fuse(axpy)
    for error, words, call in [
        (ValueError, "'y' has 1", lambda: over(x, y[:1], 2.0)),
        (ValueError, r"y\[1\] has the shape", lambda: over(x, [y[0], torch.ones(5)], 2.0)),
        (TypeError, r"y\[1\] is a float", lambda: over(x, [y[0], 2.0], 2.0)),
        (ValueError, "on meta", lambda: over(x, [y[0], torch.ones(2, device="meta")], 2.0)),
        (TypeError, "no list", lambda: over(1.0, 2.0, 3.0)),
        (TypeError, r"\[x\]", lambda: over(x[0], y, 2.0)),
        (TypeError, "missing", lambda: over(x, y)),
        (TypeError, "NoneType|dict", lambda: over(x, y, {})),
        (ValueError, "0 results", lambda: over(x, y, 2.0, out=x)),
        (ValueError, "5 elements|needs 5", lambda: fused(x, y, 2.0, out=torch.empty(4))),
        (ValueError, "one-dimensional", lambda: fused(x, y, 2.0, out=torch.empty(1, 5))),
        (ValueError, "one-dimensional", lambda: fused(x, y, 2.0, out=torch.empty(10)[::2])),
        (ValueError, "one for each", lambda: fused(x, y, 2.0, out=torch.empty(5), offsets=[0])),
        (ValueError, "negative", lambda: fused(x, y, 2.0, out=torch.empty(5), offsets=[0, -1])),
        (ValueError, "needs 6", lambda: fused(x, y, 2.0, out=torch.empty(5), offsets=[0, 4])),
        (ValueError, "overlap", lambda: fused(x, y, 2.0, flat=True, offsets=[0, 1])),
        (ValueError, "places tensors", lambda: fused(x, y, 2.0, offsets=[0, 3])),
        (ValueError, "2 places", lambda: fused(x, y, 2.0, out=(x, y))),
        (TypeError, "out= is a", lambda: fused(x, y, 2.0, out="here")),
        (RuntimeError, "can't be cast", lambda: over([torch.ones(3).long(), x[1]], y, 2.0)),
        (RuntimeError, "single memory location", lambda: over([torch.ones(1).expand(3), x[1]], y, 2.0)),
        (ValueError, "names 'q'", lambda: kernels.fuse(axpy, inplace="q")),
        (ValueError, "twice", lambda: kernels.fuse(axpy, inplace=("x", "x"))),
        (ValueError, "returns 1", lambda: kernels.fuse(axpy, inplace=("x", "y"))(x, y, 1.0)),
        (ValueError, "as a scalar", lambda: kernels.fuse(axpy, inplace="a")(x, y, 1.0)),
        (TypeError, "positional", lambda: kernels.fuse(lambda *xs: xs[0])),
        (ValueError, "rename", lambda: kernels.fuse(lambda out: out)),
        (TypeError, "takes a function", lambda: kernels.fuse(3)),
        (TypeError, "returned a float", lambda: kernels.fuse(lambda x: 1.0)(x)),
        (ValueError, "itself", lambda: kernels.fuse(lambda x: (x.neg_(), x + 1)[1], inplace="x")(x)),
    ]:
        with pytest.raises(error, match=words):
            call()
        assert all(bool((t == 1).all()) for t in x + y), words


def test_an_unknown_setting_is_refused(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, c, triton, foreach, plain"):
        kernels.fuse(axpy)


def test_versions_of_private_roles_do_not_change(backend):
    def step(p, m):
        m.mul_(0.5)
        p.sub_(m)

    p, m = [torch.ones(3)], [torch.ones(3)]
    fused = kernels.fuse(step, private=["m"])
    before, private_version = p[0]._version, m[0]._version
    for _ in range(3):
        fused(p, m)
    if backend == "c":  # the other forms write with torch, which increments versions
        assert m[0]._version == private_version
    assert torch.equal(m[0], torch.full((3,), 0.125))
    assert torch.equal(p[0], torch.full((3,), 0.125))
    assert p[0]._version == before + 3
    with pytest.raises(ValueError, match="private names 'q', but .* takes p, m"):
        kernels.fuse(step, private=["q"])


def rows_of_matrices(seed=0):
    """Return blocks of two matrices (with strided rows, one narrow), a contiguous tensor, and one with unsupported strides."""
    wide, deep = tensors((6, 100), (3, 4, 50), seed=seed)
    return [
        wide[:, :40],
        wide[:, 40:90],
        wide[:, 92:95],
        deep[:, 1:3, :20],
        *tensors((7, 5), seed=seed + 1),
        tensors((1100, 9))[0].t()[::2],
    ]


@pytest.mark.parametrize("inplace", [True, False])
def test_rows_of_a_matrix_need_no_plain_form(backend, inplace):
    """Blocks of one matrix interleave in memory, and are all written by the same call."""
    xs, ys = rows_of_matrices(), rows_of_matrices(seed=5)
    contiguous = [y.clone() for y in ys]
    fused = kernels.fuse(lambda x, y, s: x.sqrt() * s + y * y, inplace="x" if inplace else None)
    for others in (ys, contiguous):
        targets = xs if inplace else [x.clone().as_strided(x.shape, x.stride()) if x.is_contiguous() else x for x in xs]
        want = [x.sqrt() * 2.0 + y * y for x, y in zip(targets, others, strict=True)]
        forms = fused.explain(targets, others, 2.0)
        assert backend == "plain" or f"{backend}: " in str(forms), forms
        assert "1 of 6 tensors are not contiguous" in str(forms)
        got = fused(targets, others, 2.0)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)
        if not inplace:
            assert [t.stride() for t in got] == [t.stride() for t in want]
            assert fused(targets, others, 2.0, flat=True).shape == (sum(x.numel() for x in xs),)


def test_overlapping_rows_are_detected(backend):
    matrix = torch.arange(200.0).reshape(4, 50)
    fused = kernels.fuse(lambda x, y: x + y, inplace="x")
    want = matrix[:, :30] + matrix[:, 20:]
    assert "overlaps" in str(fused.explain([matrix[:, :30]], [matrix[:, 20:]])) or backend == "plain"
    assert torch.equal(fused([matrix[:, :30]], [matrix[:, 20:]])[0], want)


def test_foreach_goes_through_large_tensors_in_blocks_and_small_ones_in_groups(monkeypatch):
    monkeypatch.setattr("moduli.kernels._cuts.BLOCK", 100)
    shapes = [(30, 17), (5,), (), (99,), (2, 3, 4), (0,), (101,), (8, 8)]
    results = {}
    for form in ("foreach", "plain"):
        monkeypatch.setenv("MODULI_KERNELS", form)
        lists = [tensors(*shapes, seed=seed) for seed in range(3)] + [[t.abs() for t in tensors(*shapes, seed=3)]]
        lists = [[t.t().contiguous().t() if t.shape == (30, 17) else t for t in each] for each in lists]
        fused = kernels.fuse(adam, inplace=("p", "m", "v"))
        for step in (1, 2):
            fused(*lists, 0.1, 0.9, 0.999, 1e-8, 1 - 0.9**step, 1 - 0.999**step)
        assert fused.explain(*lists, 0.1, 0.9, 0.999, 1e-8, 0.1, 0.1).form == form
        results[form] = lists
    for ours, theirs in zip(*results.values(), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [[(5,)] * 180, [(3, 4), (5,), (), (2, 50), (0,)] * 20, [(7, 3)] * 3 + [(101,)] * 3])
def test_foreach_stacks_small_tensors_of_one_shape(monkeypatch, shapes, dtype):
    """Stacks of at most 400 elements: the last may be shorter than the others, and dense tensors may be transposed."""
    monkeypatch.setattr("moduli.kernels._cuts.BLOCK", 400)
    monkeypatch.setenv("MODULI_KERNELS", "foreach")
    xs, ys = ([t.to(dtype) for t in tensors(*shapes, seed=seed)] for seed in (0, 1))
    ys = [y.t().contiguous().t() if y.shape == (3, 4) else y for y in ys]
    before, ids, versions = [x.clone() for x in xs], [x.data_ptr() for x in xs], [x._version for x in xs]
    update = kernels.fuse(lambda x, y, s: (x * s + y.abs().sqrt(), x - y), inplace=("x", None))
    _, differences = update(xs, ys, 0.5)
    for x, y, old, difference in zip(xs, ys, before, differences, strict=True):
        assert torch.equal(x, (old.float() * 0.5 + y.float().abs().sqrt()).to(dtype))
        assert torch.equal(difference, old - y)
    assert [x.data_ptr() for x in xs] == ids
    assert all(x._version > version for x, version in zip(xs, versions, strict=True) if x.numel())


def test_returning_a_changed_role_for_another_one_is_refused():
    def change(p, q):
        p.add_(1)
        return p

    with pytest.raises(ValueError, match=r"changes 'p' itself, .* overwrite 'q'; do one"):
        kernels.fuse(change, inplace="q")([torch.ones(2)], [torch.ones(2)])


def test_another_tensor_in_a_bound_private_list_is_detected(backend):
    old, new = torch.ones(3), torch.full((3,), 5.0)
    private, xs = [old], [torch.zeros(3)]
    add = kernels.fuse(lambda x, v: x + v, inplace="x", private=("v",)).bind(v=private)
    add(xs)
    private[0] = new
    add(xs)
    assert torch.equal(xs[0], torch.full((3,), 6.0))


def test_scalar_arithmetic_that_python_refuses_follows_torch(backend):
    fused = kernels.fuse(lambda x, s: x * (1 / s) + s**0.5)
    assert fused([torch.ones(2)], 0.0)[0].tolist() == [float("inf")] * 2
    assert fused([torch.ones(2)], -1.0)[0].isnan().all()
