"""Gradients, function transforms, copies and threads: labels are kept, or the operation raises."""

import copy
import gc
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import moduli as mo
from labels.strategies import check, labelled
from moduli.labels import _axes
from moduli.labels._tensor import wrap

F64 = torch.float64


def random_tensor(shape, names, seed=0, **labels):
    return mo.tensor(torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)), names, **labels)


X = random_tensor((3, 4), "row col", 1, row=list("abc"))
Y = random_tensor((4, 3), "col row", 2, row=list("cab"))
SQUARE = random_tensor((3, 3), "row col", 3, row=list("abc"), col=list("bca"))
W = random_tensor((2, 4), "out col", 4, out=["p", "q"])

DIFFERENTIABLE = {
    "reordering add": lambda x, y: x + y,
    "division": lambda x, y: x / (y * y + 1),
    "where": lambda x, y: mo.where(x > 0, x, y),
    "matmul": lambda x, y: mo.matmul(x, y.rename(row="r")),
    "matmul, labels": lambda x, y: mo.matmul(x.T, y.T.rename(col="c")),
    "einsum": lambda x, y: mo.einsum("row col, row col -> col", x, y),
    "dot": lambda x, y: mo.dot(x, y, over="row"),
    "softmax": lambda x, y: x.softmax("row") * y,
    "normalised": lambda x, y: (x - x.mean("row", keepdim=True)) / (1 + y.norm(dim="row")),
    "outer join": lambda x, y: mo.add(x, y.relabel(row=list("cbz")), join="outer", fill=2.0),
    "inner join": lambda x, y: mo.mul(x, y.relabel(row=list("cbz")), join="inner"),
    "left join": lambda x, y: mo.mul(x, y.relabel(row=list("cbz")), join="left", fill=1.0),
    "indexing": lambda x, y: x[mo.Space(["c", "a"])] * y.sel(row=["a", "c"]) + x[[-1, 0]],
    "masks": lambda x, y: x[(y > 0)],
    "cat": lambda x, y: mo.cat([x, y.relabel(row=list("xyz"))], "row"),
    "stack": lambda x, y: mo.stack([x, y], "n"),
    "flatten": lambda x, y: (x + y).flatten(name="f").unflatten("f", X.dims),
    "index_add": lambda x, y: x.index_add("row", None, y),
    "diagonal": lambda x, y: mo.matmul(x, x.T.rename("col r")).diagonal() + y.sum("col"),
    "extremes": lambda x, y: x.amax("row") + y.max("row").values,
    "align": lambda x, y: y.align_to(X.dims) * x,
    "solve": lambda x, y: mo.solve(mo.add_identity(mo.matmul(x, x.T.rename("col r")), 3.0), y.T),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_operations_pass_gradcheck(name):
    function = DIFFERENTIABLE[name]

    def plain(x, y):
        return function(wrap(x, X._axes), wrap(y, Y._axes)).data

    inputs = (X.data.clone().requires_grad_(), Y.data.clone().requires_grad_())
    assert torch.autograd.gradcheck(plain, inputs)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_have_the_labels_of_their_tensor(name):
    x, y = X.attach(), Y.attach()
    DIFFERENTIABLE[name](x, y).sum().backward()
    assert x.grad.dims == X.dims
    assert y.grad is None if name == "masks" else y.grad.dims == Y.dims
    gradient = torch.func.grad(lambda x: DIFFERENTIABLE[name](x, Y).sum())(X)
    check(gradient, x.grad.data, X.dims)


def test_backward_aligns_its_gradient():
    x = X.attach()
    (x * 2).backward(Y)
    check(x.grad, 2 * Y.align_to(X.dims).data, X.dims)
    half = mo.tensor([1.0, 2.0], "x").to(torch.float16).attach()
    (half * 2).sum().backward()
    assert half.grad.dtype is torch.float16


# -- torch.func --------------------------------------------------------------------------------------------------------


def parameters():
    return {
        "w": mo.tensor(torch.randn(2, 3, dtype=torch.float64), out=["p", "q"], k=["a", "b", "c"]),
        "b": mo.tensor(torch.randn(2, dtype=torch.float64), out=["p", "q"]),
        "plain": torch.randn(2, dtype=torch.float64),
    }


def model(p):
    x = mo.tensor(torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64), k=["c", "a", "b"])
    return mo.tanh(mo.dot(p["w"], x, over="k")) * p["b"] + p["plain"]


def raw_model(p):
    return torch.tanh(p["w"] @ torch.tensor([-1.0, 2.0, 1.0], dtype=torch.float64)) * p["b"] + p["plain"]


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("jacobian", [torch.func.jacrev, torch.func.jacfwd])
def test_jacobians_by_dicts_have_the_axes_of_output_and_input(jacobian, total):
    p = parameters()
    raw = {name: value.data for name, value in p.items()}
    function = (lambda p: (model(p) ** 2).sum()) if total else model
    result = jacobian(function)(p)
    expected = jacobian((lambda p: (raw_model(p) ** 2).sum()) if total else raw_model)(raw)
    assert list(result) == list(p)
    for name in p:
        torch.testing.assert_close(result[name].data, expected[name])
        assert repr(result[name])
    if total:
        assert result["w"].dims == p["w"].dims
        assert result["b"].dims == p["b"].dims
    else:
        # A name can occur once, so the axis "out" of the input loses its name and keeps its labels.
        assert result["w"].names == ("out", None, "k")
        assert result["w"].dims[1].labels == ("p", "q")
        assert result["plain"].names == ("out", None)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize(
    "hessian",
    [
        torch.func.hessian,
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
        lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    ],
)
def test_hessians_by_dicts_are_dicts_of_dicts(hessian, total):
    p = parameters()
    raw = {name: value.data for name, value in p.items()}
    result = hessian((lambda p: (model(p) ** 2).sum()) if total else model)(p)
    expected = hessian((lambda p: (raw_model(p) ** 2).sum()) if total else raw_model)(raw)
    for first in p:
        for second in p:
            torch.testing.assert_close(result[first][second].data, expected[first][second])
            assert repr(result[first][second])
    assert result["w"]["b"].names == (("out", "k", None) if total else ("out", None, "k", None))


def test_outputs_in_containers_have_a_jacobian_each():
    p = parameters()
    result = torch.func.jacrev(lambda p: {"y": model(p), "pair": (model(p).sum(), p["b"] * 2)})(p)
    assert result["y"]["w"].names == ("out", None, "k")
    assert result["pair"][0]["w"].names == ("out", "k")
    torch.testing.assert_close(result["pair"][1]["b"].data, 2 * torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("jacobian", [torch.func.jacrev, torch.func.jacfwd])
def test_jacobians_have_the_axes_of_output_and_input(jacobian):
    def function(x):
        return mo.dot(W, x, over="col") * x.sum("col").exp()

    result = jacobian(function)(X)
    raw = jacobian(lambda x: (W.data @ x.T) * x.sum(1).exp())(X.data)
    out = function(X)
    assert result.dims == (*out.dims, X.dims[0].rename(None), X.dims[1])
    torch.testing.assert_close(result.data, raw)


def test_grad_of_several_and_value():
    params = {"w": W, "b": random_tensor((2,), "out", 5, out=["q", "p"])}

    def loss(params, x):
        return ((mo.einsum("out col, row col -> row out", params["w"], x) + params["b"]) ** 2).mean()

    gradients, value = torch.func.grad_and_value(loss)(params, X)
    assert {k: g.dims for k, g in gradients.items()} == {k: p.dims for k, p in params.items()}
    leaves = {k: p.attach() for k, p in params.items()}
    expected = loss(leaves, X)
    expected.backward()
    assert value.item() == pytest.approx(expected.item())
    for key, leaf in leaves.items():
        check(gradients[key], leaf.grad.data, leaf.dims)
    per_row = mo.vmap(lambda x: torch.func.grad(loss)(params, x.unsqueeze(0, "row")), over="row")(X)
    check(per_row["w"].mean("row"), gradients["w"].data, W.dims)


def test_the_hessian_has_the_axes_of_the_input_twice():
    got = torch.func.hessian(lambda x: (x**3).sum())(X[0])
    check(got, torch.diag(6 * X.data[0]), [X.dims[1], X.dims[1].rename(None)])


# -- vmap --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [X, SQUARE, SQUARE.rename([None, None])], ids=["oblong", "square", "unnamed"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_torch_vmap_maps_over_the_given_axis(t, axis):
    dims = []

    def inner(line):
        dims.append(line.dims)
        return (line * 2).data

    result = torch.vmap(inner, in_dims=axis)(t)
    at = axis % 2
    assert dims == [(t.dims[1 - at],)]
    torch.testing.assert_close(result, t.data.movedim(at, 0) * 2)


def test_nested_torch_vmap_works_and_labelled_results_refuse_operations():
    cube = random_tensor((3, 3, 3), "x y z", x=list("abc"), y=list("abc"), z=list("abc"))
    names = []

    def inner(line):
        names.append(line.names)
        return line.sum(line.names[0])

    result = torch.vmap(torch.vmap(inner, in_dims=1), in_dims=1)(cube)
    assert names == [("x",)]
    torch.testing.assert_close(result, cube.data.permute(1, 2, 0).sum(2))
    with pytest.raises(ValueError, match="no longer fits"):
        torch.vmap(lambda line: line * 2)(X).names


@settings(max_examples=40)
@given(data=st.data(), t=labelled(st.integers(1, 4), st.integers(1, 3), st.just(torch.float64)))
def test_vmap_maps_over_a_named_axis(data, t):
    over = data.draw(st.sampled_from(t.names))
    at = t.names.index(over)
    rest = t.dims[:at] + t.dims[at + 1 :]

    def inner(part):
        assert tuple(part.shape) == tuple(map(len, rest))
        assert part.ndim == 0 or part.dims == rest
        return part * 2 + 1

    chunk = data.draw(st.sampled_from([None, 1, 2]))
    check(mo.vmap(inner, over=over, chunk_size=chunk)(t), t.data.movedim(at, 0) * 2 + 1, [t.dims[at], *rest])


def test_vmap_aligns_broadcasts_and_returns_trees():
    def inner(x, y, scale, *, plain):
        return {"sum": (x + y) * scale, "pair": (x.sum(), plain[0] * y)}

    scale = random_tensor((1, 4), "row col", 7).relabel("row", mo.BROADCAST)
    result = mo.vmap(inner, over="row")(X, Y, scale, plain=[2.0])
    aligned = Y.align_to(X.dims)
    check(result["sum"], (X.data + aligned.data) * scale.data, X.dims)
    check(result["pair"][0], X.data.sum(1), X.dims[:1])
    check(result["pair"][1], 2 * aligned.data, X.dims)
    constant = mo.vmap(lambda x: W, over="row")(X)
    check(constant, W.data.expand(3, 2, 4), [X.dims[0], *W.dims])
    with pytest.raises(ValueError, match=r"axis 'row' differ.*\['a'\].*\['z'\]"):
        mo.vmap(lambda x, y: x, over="row")(X, Y.relabel(row=list("czb")))
    with pytest.raises(ValueError, match="sizes of paired axes differ"):
        mo.vmap(lambda x, y: x, over="col")(X, Y[:2])


def test_vmap_nests_and_accepts_functions_that_reorder():
    double = mo.vmap(mo.vmap(lambda x, y: x * y, over="col"), over="row")
    check(double(X, Y), X.data * Y.align_to(X.dims).data, X.dims)
    mixed = mo.vmap(lambda x: mo.matmul(SQUARE, x.rename(["col"]).relabel(col=list("abc"))), over="k")(
        random_tensor((3, 2), "z k", 9)
    )
    assert mixed.names == ("k", "row")
    random = mo.vmap(lambda x: x + mo.randn_like(x), over="row", randomness="different")(X)
    assert random.dims == X.dims


def test_operations_on_labels_work_inside_vmap():
    inside = {
        "sel": lambda x: x.sel(z="b") * 2,
        "space": lambda x: x[mo.Space(["c", "a"])],
        "list": lambda x: x[[-1, 0]],
        "one_hot": lambda x: x.argmax("z", keepdim=True).one_hot(3, name="k"),
        "join": lambda x: mo.add(x, mo.ones(z=["a", "q"], dtype=F64), join="outer", fill=0.0),
        "cat": lambda x: mo.cat([x, x.relabel(z=list("xyz"))], "z"),
        "sort": lambda x: x.sort("z").values,
        "diag": lambda x: x.diag_embed("w").diagonal(),
        "index_add": lambda x: x.index_add("z", None, mo.ones(z=["b"], dtype=F64)),
    }
    t = random_tensor((2, 3), "n z", 11, z=list("abc"))
    for name, function in inside.items():
        expected = mo.stack([as_labelled(function(t[i])) for i in range(2)], "n")
        result = mo.vmap(function, over="n")(t)
        assert result.dims == expected.dims, name
        torch.testing.assert_close(result.data, expected.data)


def as_labelled(value):
    return value if isinstance(value, mo.Tensor) else mo.tensor(value)


# -- trees, copies -----------------------------------------------------------------------------------------------------


def test_tensors_are_pytrees():
    tree = {"x": X, "rest": [Y, (W,)]}
    doubled = pytree.tree_map(lambda leaf: leaf * 2, tree)
    check(doubled["rest"][1][0], W.data * 2, W.dims)
    leaves, spec = pytree.tree_flatten(tree)
    assert all(type(leaf) is torch.Tensor for leaf in leaves)
    check(pytree.tree_unflatten(leaves, spec)["x"], X.data, X.dims)
    check(pytree.tree_map(lambda leaf: leaf[:, :2], X), X.data[:, :2], [X.dims[0], mo.Space(2, "col")])
    assert pytree.tree_map(str, X)._data == str(X.data)  # leaves may be any objects
    with pytest.raises(ValueError, match="no longer fits"):
        pytree.tree_map(lambda leaf: leaf[:2], X).names
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"x": X})[0]]
    assert paths == ["['x'].data"]


@given(t=labelled(named=False, kinds=("positional", "labelled", "broadcast")))
def test_copies_keep_labels_and_share_axes(t):
    for again in (copy.deepcopy(t), copy.copy(t), pickle.loads(pickle.dumps(t)), t.clone(), t.detach()):
        check(again, t.data, t.dims)
        assert again._axes is t._axes
    assert copy.deepcopy(t).data.data_ptr() != t.data.data_ptr() or not t.numel()
    twice = copy.deepcopy([t, t])
    assert twice[0] is twice[1]


def test_saved_tensors_keep_labels_and_requires_grad():
    file = io.BytesIO()
    torch.save(X.data, file)
    file.seek(0)
    check(mo.Tensor(torch.load(file, weights_only=True), X.dims), X.data, X.dims)
    file = io.BytesIO()
    torch.save({"x": X}, file)
    file.seek(0)
    check(torch.load(file, weights_only=False)["x"], X.data, X.dims)
    leaf = copy.deepcopy(X.attach())
    assert leaf.requires_grad
    assert leaf.is_leaf


# -- cached plans across modes ---------------------------------------------------------------------


def make_operands(tag):
    labels = [(tag, i) for i in range(3)]
    a = mo.tensor(torch.arange(3.0), x=labels)
    return a, mo.tensor(torch.arange(3.0), x=labels[::-1]), torch.tensor([2.0, 2.0, 2.0])


def test_a_plan_cached_in_inference_mode_is_differentiable():
    a, b, total = make_operands("inference")
    with torch.inference_mode():
        assert torch.equal((a + b).data, total)
        mo.add(a, b.relabel(x=[0, 1, 2]), join="outer")
    leaf = b.attach()
    (a + leaf).sum().backward()
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0]
    other = b.relabel(x=[0, 1, 2]).attach()
    mo.add(a, other, join="outer").sum().backward()
    assert other.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_plan_cached_with_fake_tensors_has_real_tensors():
    a, b, total = make_operands("fake")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [wrap(mode.from_tensor(t.data), t._axes) for t in (a, b)]
        assert (fake[0] + fake[1]).shape == (3,)
    assert torch.equal((a + b).data, total)


@pytest.mark.parametrize("kind", ["grad", "vmap", "jacrev", "functional"])
def test_a_plan_cached_in_a_transform_has_plain_tensors(kind):
    a, b, total = make_operands(kind)
    if kind == "grad":
        torch.func.grad(lambda t: (a + t).sum())(b)
    elif kind == "vmap":
        torch.vmap(lambda s: (a + b * s).data)(torch.ones(2))
        mo.vmap(lambda t: t + b, over="n")(mo.stack([a, a], "n"))
    elif kind == "jacrev":
        torch.func.jacrev(lambda t: a + t)(b)
    else:
        torch.func.functionalize(lambda t: (a + wrap(t, b._axes)).data)(b.data)
    assert torch.equal((a + b).data, total)
    assert type((a + b).data) is torch.Tensor
    leaf = b.attach()
    (a + leaf).sum().backward()
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0]


def test_caches_do_not_grow_with_new_labels():
    plain = mo.zeros(3)
    gc.collect()
    before = len(_axes._table)
    for i in range(10_000):
        t = mo.tensor(torch.zeros(3), x=[(i, 0), (i, 1), (i, 2)])
        u = t[[0, 1]] if i % 10 == 0 else t
        if i % 50 == 0:
            plain + u if u.shape[0] == 3 else u * 2
    gc.collect()
    assert len(_axes._table) - before < 2500
    assert len(_axes.SCALAR._plans) <= _axes._MOST_PLANS
    assert len(plain._axes._plans) <= _axes._MOST_PLANS + 1


def test_operations_in_several_threads_are_correct():
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for round in range(60):
            labels = [f"{round}-{i}" for i in range(4)]
            order = torch.randperm(4, generator=generator)
            a = mo.tensor(torch.arange(4.0), x=labels)
            b = mo.tensor(torch.arange(4.0)[order], x=[labels[i] for i in order])
            if (a - b).abs().sum().item() or (a - b)._axes is not a._axes:
                return False
            c = mo.tensor(torch.ones(2, 4), "y x", x=labels)
            if mo.dot(c, b, over="x").tolist() != [6.0, 6.0] or c.rename(y="z").names != ("z", "x"):
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
