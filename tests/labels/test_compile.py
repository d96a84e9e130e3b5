"""torch.compile: every operation in one graph, with the axes and values of eager mode; labels recompile, sizes do not."""

import logging

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import moduli as mo
from moduli import Space

pytestmark = pytest.mark.compiles_labels

A = mo.tensor(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "row col", row=list("abc"))
B = mo.tensor(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), "row col", row=list("cab"))
P = mo.tensor(torch.randn(4, 3, generator=torch.Generator().manual_seed(2)), "col k")
V = mo.tensor(torch.randn(4, generator=torch.Generator().manual_seed(3)), "col")
LAB = mo.tensor(torch.randn(3, 3, generator=torch.Generator().manual_seed(4)), row=list("abc"), col=list("bca"))
SPD = mo.tensor(torch.eye(3)[:, [2, 0, 1]] * 3 + 0.1, r=list("abc"), c=list("cab"))
SOME = Space(["c", "a"])
INDEX = mo.tensor([0, 2], n=["u", "v"])


def write_entries(a):
    t = a.clone()
    t[0] = 1.0
    t[SOME] = 0.5
    return t


def multiply_joined(a):
    with mo.join("outer", fill=1.0):
        return a * B.relabel(row=list("bcd"))


OPERATIONS = {
    # elementwise
    "add": lambda a: a + B, "number": lambda a: 2.0 - a, "alpha": lambda a: torch.add(a, B, alpha=2),
    "plain": lambda a: torch.ones(3, 4) * a, "compare": lambda a: (a > B) & (a < 2), "torch.sin": torch.sin,
    "method": lambda a: a.sin(), "mo.sin": lambda a: mo.sin(a), "mo.add number": lambda a: mo.add(a, 0.5),
    "mo.maximum number": lambda a: mo.maximum(0.25, a), "where": lambda a: torch.where(a > 0, a, B),
    "clamp": lambda a: a.clamp(0.0, 1.0), "clamp by a tensor": lambda a: a.clamp(B), "lerp": lambda a: a.lerp(B, 0.5),
    "isclose": lambda a: a.isclose(B), "isclose to a number": lambda a: a.isclose(0.5),
    "real": lambda a: a.real, "floor": lambda a: 7 // (a * a + 1),
    "outer join": lambda a: mo.add(a, B.relabel(row=list("bcd")), join="outer", fill=0.0), "join scope": multiply_joined,
    "inner join": lambda a: mo.add(a, B.relabel(row=list("bcd")), join="inner"), "F.gelu": F.gelu,
    "loss": lambda a: F.mse_loss(a, B), "linear": lambda a: F.linear(a, P.T),
    # reductions
    "sum": lambda a: a.sum("row"), "sum of all": lambda a: a.sum(), "torch.sum": lambda a: torch.sum(a, 0),
    "mean": lambda a: a.mean("row col", keepdim=True), "std": lambda a: a.std("row"), "norm": lambda a: a.norm(dim="row"),
    "prod": lambda a: a.prod("row"), "amax": lambda a: a.amax("row"), "max": lambda a: a.max("col").values,
    "argmax": lambda a: a.argmax("col"), "argmax of all": lambda a: a.argmax(), "softmax": lambda a: F.softmax(a, dim="col"),
    "cumsum": lambda a: a.cumsum("col"), "sort": lambda a: a.sort("col").values, "topk": lambda a: a.topk(2, "col").values,
    "logsumexp": lambda a: a.logsumexp("col"), "any": lambda a: (a > 0).any("row"), "nothing": lambda a: a.amax(()),
    # shapes
    "permute": lambda a: a.permute("col row"), "T": lambda a: a.T, "h": lambda a: a.h(), "unsqueeze": lambda a: a.unsqueeze(0),
    "squeeze": lambda a: a.unsqueeze(0).squeeze(), "flatten": lambda a: a.flatten(name="f"),
    "unflatten": lambda a: a.flatten(name="f").unflatten("f", [Space(list("abc"), "row"), 4]),
    "rename": lambda a: a.rename(row="r"), "relabel": lambda a: a.relabel(row=list("xyz")), "flip": lambda a: a.flip("row"),
    "roll": lambda a: a.roll(1, "row"), "align_to": lambda a: a.align_to(B.dims), "movedim": lambda a: a.movedim("col", 0),
    "cat": lambda a: mo.cat([a, B.relabel(row=list("xyz"))], "row"), "stack": lambda a: mo.stack([a, B], "n"),
    "torch.stack": lambda a: torch.stack([a, B]), "split": lambda a: a.split(2, "row")[0], "unbind": lambda a: a.unbind("row")[1],
    # products
    "matmul": lambda a: mo.matmul(a, P), "torch.matmul": lambda a: torch.matmul(a, P), "dot": lambda a: mo.dot(a, P, over="col"),
    "einsum names": lambda a: mo.einsum("row col, col k -> row k", a, P), "einsum letters": lambda a: mo.einsum("ij,jk->ik", a, P),
    "outer": lambda a: mo.outer(a[0], V.rename("z")),
    # selection
    "position": lambda a: a[0], "slices": lambda a: a[1:, ::2], "backwards": lambda a: a[::-1], "list": lambda a: a[[2, 0]],
    "negative list": lambda a: a[:, [-1, 0]], "space": lambda a: a[SOME], "none": lambda a: a[None, ..., 0],
    "sel": lambda a: a.sel(row="b"), "sel labels": lambda a: a.sel(row=["c", "a"]), "isel": lambda a: a.isel(col=slice(1, 3)),
    "index tensor": lambda a: a[:, torch.tensor([0, 1])], "labelled index": lambda a: a[INDEX],
    "index tensors": lambda a: a[INDEX, INDEX], "write": write_entries, "one_hot": lambda a: a.argmax("col").one_hot(4, name="k"),
    "diagonal": lambda a: LAB.diagonal() * a[0, 0], "diag_embed": lambda a: a.diag_embed("z"),
    "index_add": lambda a: a.index_add("row", None, B), "index_add positions": lambda a: a.index_add("row", [0, 0], a[:2]),
    # linear algebra
    "eigh": lambda a: mo.eigh(SPD * a[0, 0].abs()).values, "inv": lambda a: mo.inv(SPD) * a[0, 0],
    "solve": lambda a: mo.solve(SPD, a.rename(row="r")), "det": lambda a: mo.det(SPD) * a, "svd": lambda a: mo.svd(a).S,
    "cholesky": lambda a: mo.cholesky(SPD) * a[0, 0], "matrix_exp": lambda a: mo.matrix_exp(LAB) * a[0, 0],
    "qr": lambda a: mo.qr(a).R, "add_identity": lambda a: mo.add_identity(LAB, 2.0), "lowdin": lambda a: mo.lowdin(a),
    # factories
    "zeros": lambda a: mo.zeros(a.dims) + a, "zeros by name": lambda a: mo.zeros(row=list("abc"), col=4) + a,
    "like": lambda a: torch.zeros_like(a) + a, "tensor": lambda a: mo.tensor(a.data, "row col") + 1,
    "Tensor": lambda a: mo.Tensor(a.data, B.dims), "eye": lambda a: mo.eye(Space(list("abc"))) * a[0, 0],
    "to": lambda a: a.to(torch.float64), "detach": lambda a: a.detach(), "clone": lambda a: a.clone(),
    # properties and transforms
    "dims": lambda a: a * len(a.dims), "names": lambda a: a * 2 if a.names[0] == "row" else a, "size": lambda a: a.size("row") * a,
    "vmap": lambda a: mo.vmap(lambda r: r * 2, over="row")(a), "torch.vmap": lambda a: torch.vmap(lambda r: (r * 2).data)(a),
    "grad": lambda a: torch.func.grad(lambda w: (w * w).sum())(a),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, mo.Tensor):
        assert got._axes is expected._axes
        assert got.dims == expected.dims
        got, expected = got.data, expected.data
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_compiles_to_one_graph(name):
    function = OPERATIONS[name]
    assert_same(torch.compile(function, fullgraph=True, backend="eager")(A), function(A))


def test_matmul_operators_and_boolean_masks_have_alternatives_in_one_graph():
    try:  # torch 2.15 is the first version that dispatches on the right operand
        product = torch.compile(lambda a: a @ P, fullgraph=True, backend="eager")(A)
    except torch._dynamo.exc.Unsupported:
        product = torch.compile(lambda a: a @ P, backend="eager")(A)
    assert_same(product, A @ P)
    mask = torch.tensor([True, False, True])
    with pytest.raises(Exception, match=r"[Dd]ata.dependent"):
        torch.compile(lambda a: a[mask], fullgraph=True, backend="eager")(A)
    for function in (mo.matmul, torch.matmul):
        assert_same(torch.compile(lambda a, f=function: f(a, P), fullgraph=True, backend="eager")(A), A @ P)


def test_errors_of_label_logic_are_raised_while_tracing():
    with pytest.raises(Exception, match="the labels of axis 'row' differ"):
        torch.compile(lambda a, b: a + b, fullgraph=True, backend="eager")(A, A.relabel(row=list("xyz")))


def network(x, w):
    h = mo.einsum("batch col, out col -> batch out", x, w).tanh()
    h = (h - h.mean("out", keepdim=True)) * w.sum("col") + x.sel(col="a")
    return h.softmax("out").sum("batch")


def test_sizes_of_positional_axes_do_not_recompile():
    counter = CompileCounter()
    compiled = torch.compile(network, fullgraph=True, backend=counter)
    w = mo.tensor(torch.randn(2, 3), out=["p", "q"], col=["a", "b", "c"])
    for size in (5, 7, 8, 31, 32, 100):
        x = mo.tensor(torch.randn(size, 3), "batch col", col=["c", "b", "a"])
        assert_same(compiled(x, w), network(x, w))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t[[-1, 0]], lambda t: t[-1], lambda t: t[1:] - t[:-1], lambda t: mo.cat([t, t], "batch"),
        lambda t: t.sel(batch=0), lambda t: t[:, Space(["c", "b"])], lambda t: mo.vmap(lambda r: r * 2, over="batch")(t),
        lambda t: mo.zeros(batch=t.size("batch"), col=list("abc")) + t, lambda t: t.index_add("batch", [0, 1], t[:2]),
        lambda t: t.topk(2, "batch").values, lambda t: mo.stack([t, t.flip("batch")], "n"), lambda t: t.isel(batch=[0, 2]),
    ],
)  # fmt: skip
def test_no_operation_depends_on_the_size_of_a_positional_axis(function):
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for size in (5, 7, 9):
        t = mo.tensor(torch.randn(size, 3), "batch col", col=list("abc"))
        assert_same(compiled(t), function(t))
    assert counter.frame_count <= 2


def test_other_labels_recompile_with_correct_results():
    counter = CompileCounter()
    compiled = torch.compile(network, fullgraph=True, backend=counter)
    w = mo.tensor(torch.randn(2, 3), out=["p", "q"], col=["a", "b", "c"])
    orders = [list("abc"), list("cba"), list("bca")]
    for _ in range(2):
        for order in orders:
            x = mo.tensor(torch.randn(4, 3), "batch col", col=order)
            assert_same(compiled(x, w), network(x, w))
    assert counter.frame_count == len(orders)
    with pytest.raises(Exception, match="differ"):
        compiled(mo.tensor(torch.randn(4, 3), "batch col", col=list("abz")), w)


def test_the_join_policy_is_guarded():
    compiled = torch.compile(lambda a, b: a + b, fullgraph=True, backend="eager")
    other = B.relabel(row=list("bcd"))
    for how, labels in (("outer", "abcd"), ("inner", "bc"), ("left", "abc"), ("outer", "abcd")):
        with mo.join(how):
            assert_same(compiled(A, other), A + other)
            assert compiled(A, other).dims[0].labels == tuple(labels)
    assert_same(compiled(A, B), A + B)
    with pytest.raises(Exception, match="differ"):
        compiled(A, other)


def test_labels_survive_graph_breaks():
    def broken(a):
        h = a + B
        torch._dynamo.graph_break()
        return h.sum("row") * 2

    assert_same(torch.compile(broken, backend="eager")(A), broken(A))


@pytest.fixture
def cache_records():
    """Collect the warnings of the compiler's cache about graphs that it cannot cache."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("torch._inductor.codecache")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_several_reorderings_and_gradients_through_the_default_backend(cache_records):
    from torch._inductor import cpu_vec_isa

    # Without vector instructions the C++ that the backend generates for tanh does not compile, because a header is missing.
    if not cpu_vec_isa.pick_vec_isa():
        pytest.skip("torch's default backend has no vector instructions to generate code for")

    def loss(x, w, b):
        return ((mo.einsum("batch col, out col -> batch out", x, w).tanh() + b) ** 2).mean()

    x = mo.tensor(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), "batch col", col=list("abc"))
    w = mo.tensor(torch.randn(2, 3, generator=torch.Generator().manual_seed(1)), out=["p", "q"], col=list("bca"))
    b = mo.tensor([0.5, -1.0], out=["q", "p"])
    eager, compiled = [w.attach(), b.attach()], [w.attach(), b.attach()]
    value = loss(x, *eager)
    value.backward()
    again = torch.compile(loss, fullgraph=True)(x, *compiled)
    again.backward()
    torch.testing.assert_close(again.data, value.data)
    for one, other in zip(compiled, eager, strict=True):
        assert one.grad.dims == other.dims
        torch.testing.assert_close(one.grad.data, other.grad.data)
    assert not [record.getMessage() for record in cache_records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ["add", "join scope", "outer join", "space", "sel labels", "matmul", "write"])
def test_graphs_with_several_plans_are_legal(name):
    """This backend requires the constants of a graph to be distinct."""
    other = mo.tensor(torch.ones(3, 4), "row col", row=list("bca"))

    def function(a):
        return OPERATIONS[name](a) * (a + other).sum() + (B + other).sum()

    assert_same(torch.compile(function, fullgraph=True, backend="aot_eager")(A), function(A))
