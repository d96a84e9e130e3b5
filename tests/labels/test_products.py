"""Products: contractions by name, letter and position equal sums over equal labels, in any order of axes and labels."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moduli as mo
from labels.strategies import (
    COMPLEX,
    FLOATS,
    align_all_by_hand,
    as_mapping,
    check,
    numbers,
    operands,
    reordered,
    seeds,
    spaces,
)

exact = st.sampled_from((torch.float64, torch.int64, torch.complex128))
sizes = st.integers(0, 3)


def compute_product(tensors, result):
    """Return the sum of products for every choice of labels of the result; a BROADCAST axis has every label."""
    spaces = {}
    for t in tensors:
        for space in t.dims:
            if space.name not in spaces or spaces[space.name].broadcast:
                spaces[space.name] = space
    maps = [as_mapping(t) for t in tensors]
    wide = [{space.name for space in t.dims if space.broadcast} for t in tensors]
    values = {}
    for labels in itertools.product(*(list(space) for space in spaces.values())):
        choice = dict(zip(spaces, labels, strict=True))
        value = 1
        for t, mapping, stretched in zip(tensors, maps, wide, strict=True):
            value = value * mapping[frozenset((n, 0 if n in stretched else choice[n]) for n in t.names)]
        key = frozenset((name, choice[name]) for name in result)
        values[key] = values.get(key, 0) + value
    for labels in itertools.product(*(list(spaces[name]) for name in result)):
        values.setdefault(frozenset(zip(result, labels, strict=True)), 0)
    return values


def pairs_by_label(*tensors):
    """Whether no axis is positional in one tensor and labelled in another, which would pair by position."""
    for name in {name for t in tensors for name in t.names}:
        candidates = [t.dims[t.names.index(name)] for t in tensors if name in t.names]
        if len({space.labelled for space in candidates if not space.broadcast}) > 1:
            return False
    return True


@settings(max_examples=80)
@given(data=st.data(), tensors=st.integers(1, 3).flatmap(lambda n: operands(n, dtypes=exact, most=3)))
def test_einsum_by_name_equals_the_sum_over_labels(data, tensors):
    names = list(dict.fromkeys(name for t in tensors for name in t.names))
    result = data.draw(st.permutations(names))[: data.draw(st.integers(0, len(names)))]
    # The names of a term may be in any order.
    terms = [" ".join(data.draw(st.permutations(t.names))) for t in tensors]
    equation = ", ".join(terms) + " -> " + " ".join(result)
    product = mo.einsum(equation, *tensors)
    assert product.names == tuple(result)
    assert as_mapping(product) == compute_product(tensors, result)
    again = [data.draw(reordered(t)) for t in tensors]
    assert as_mapping(mo.einsum(equation, *again)) == as_mapping(product)


@settings(max_examples=60)
@given(data=st.data(), pair=operands(2, dtypes=exact, most=3))
def test_dot_by_name_equals_the_sum_over_labels(data, pair):
    a, b = pair
    shared = [name for name in a.names if name in b.names]
    over = data.draw(st.permutations(shared))[: data.draw(st.integers(0, len(shared)))]
    remaining = [name for name in dict.fromkeys([*a.names, *b.names]) if name not in over]
    argument = over if data.draw(st.booleans()) or not over else " ".join(over)
    result = mo.dot(a, b, over=argument)
    assert result.names == tuple(remaining)
    assert as_mapping(result) == compute_product(pair, remaining)
    if shared:
        rest = [name for name in remaining if name not in shared]
        assert as_mapping(mo.dot(a, b)) == compute_product(pair, rest)


@settings(max_examples=60)
@given(data=st.data(), dtypes=st.tuples(exact, exact))
def test_einsum_by_letter_equals_torch(data, dtypes):
    """Single letters refer to axes by position, whatever the names of the axes are."""
    i, j, k = (data.draw(spaces(None, sizes)) for _ in "ijk")
    a = mo.Tensor(numbers((len(i), len(j)), dtypes[0], data.draw(seeds)), [i.rename("p"), j])
    b = mo.Tensor(numbers((len(j), len(k)), dtypes[1], data.draw(seeds)), [j.rename("q"), k.rename("r")])
    dtype = torch.promote_types(*dtypes)
    x, y = a.data.to(dtype), b.data.to(dtype)
    check(mo.einsum("ij,jk->ik", a, b), x @ y, [a.dims[0], b.dims[1]])
    check(mo.einsum("ij,jk", a, b), x @ y, [a.dims[0], b.dims[1]])
    check(torch.einsum("ij,jk->ki", a, b), (x @ y).mT, [b.dims[1], a.dims[0]])
    check(mo.einsum("ij,jk->", a, b), (x @ y).sum(), [])
    check(mo.einsum("...j,jk->...k", a, b), x @ y, [a.dims[0], b.dims[1]])
    check(mo.einsum("ij->ji", a), a.data.T, a.dims[::-1])


@given(data=st.data(), space=spaces("x", sizes, ("labelled",)))
def test_a_repeated_letter_takes_the_diagonal_by_label(data, space):
    raw = numbers((len(space), len(space)), torch.float64, data.draw(seeds))
    t = mo.Tensor(raw, [space, space.rename("y")])
    shuffled = data.draw(reordered(t))
    diagonal = {frozenset([("x", label)]): raw[i, i].item() for i, label in enumerate(space)}
    assert sorted(map(repr, as_mapping(mo.einsum("ii->i", t)).items())) == sorted(map(repr, diagonal.items()))
    by_label = {next(iter(key))[1]: value for key, value in as_mapping(mo.einsum("ii->i", shuffled)).items()}
    assert by_label == {next(iter(key))[1]: value for key, value in diagonal.items()}
    assert mo.einsum("ii->", shuffled).item() == raw.trace().item()


# -- matrix products ---------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(data=st.data(), dtype=st.sampled_from((*FLOATS, *COMPLEX, torch.int64)))
def test_matmul_equals_the_sum_over_labels(data, dtype):
    batch = [data.draw(spaces(name, sizes)) for name in ("b", "c")]
    row, inner, column = (data.draw(spaces(name, sizes)) for name in ("row", "k", "col"))
    left = [*[s for s in batch if data.draw(st.booleans())], *([row] if data.draw(st.booleans()) else []), inner]
    right = [*[s for s in batch if data.draw(st.booleans())], inner, *([column] if data.draw(st.booleans()) else [])]
    if row not in left:
        left = [inner]
    if column not in right:
        right = [inner]
    a = mo.Tensor(numbers(map(len, left), dtype, data.draw(seeds)), left)
    b = mo.Tensor(numbers(map(len, right), dtype, data.draw(seeds)), right)
    batch_names = [name for name in dict.fromkeys([*a.names, *b.names]) if name not in ("k", "row", "col")]
    names = [*batch_names, *(n for n in ("row", "col") if n in (*a.names, *b.names))]
    expected = compute_product((a, b), names)
    for product in (a @ b, mo.matmul(a, b), torch.matmul(a, b), a.matmul(b)):
        assert product.names == tuple(names)
        assert product.dtype == dtype
        assert as_mapping(product) == expected
    # The product does not depend on the order of labels, of batch axes either.
    for x, y in ((with_shuffled_labels(data, a), b), (a, with_shuffled_labels(data, b))):
        assert as_mapping(x @ y) == expected


def with_shuffled_labels(data, t):
    shuffled, dims = t.data, list(t.dims)
    for axis, space in enumerate(dims):
        if space.labelled:
            order = data.draw(st.permutations(range(len(space))))
            shuffled = shuffled.index_select(axis, torch.tensor(order, dtype=torch.int64))
            dims[axis] = mo.Space([space[i] for i in order], space.name)
    return mo.Tensor(shuffled, dims)


@pytest.mark.parametrize("inner", [mo.Space(3, "k"), mo.Space(["a", "b", "c"], "k")], ids=repr)
def test_broadcast_axes_may_be_contracted_on_either_side(inner):
    a = mo.Tensor(numbers((2, 3), torch.float64, 1), [mo.Space(2, "row"), inner])
    b = mo.Tensor(numbers((3, 4), torch.float64, 2), [inner, mo.Space(4, "col")])
    wide_a, wide_b = a[:, :1].sum("k", keepdim=True), b[:1].sum("k", keepdim=True)
    dims = [a.dims[0], b.dims[1]]
    check(wide_a @ b, wide_a.data.expand(2, 3) @ b.data, dims)
    check(a @ wide_b, a.data @ wide_b.data.expand(3, 4), dims)
    check(wide_a @ wide_b, wide_a.data @ wide_b.data, dims)
    check(mo.dot(wide_a, b, over="k"), wide_a.data.expand(2, 3) @ b.data, dims)
    check(mo.dot(a, wide_b, over="k"), a.data @ wide_b.data.expand(3, 4), dims)
    check(wide_a[0] @ b, wide_a.data[0].expand(3) @ b.data, dims[1:])
    check(a @ wide_b[:, 0], a.data @ wide_b.data[:, 0].expand(3), dims[:1])


def test_products_with_mixed_dtypes_plain_tensors_and_arrays():
    a = mo.tensor([[1, 2], [3, 4]], row=["p", "q"], k=["a", "b"])
    b = torch.tensor([[0.5, 1.0], [1.5, 2.0]], dtype=torch.float64)
    expected = a.data.double() @ b
    for other in (b, b.numpy(), mo.tensor(b)):
        check(a @ other, expected, [a.dims[0], mo.Space(2)])
    check(b @ a, b @ a.data.double(), [mo.Space(2), a.dims[1]])
    check(b.numpy() @ a, b @ a.data.double(), [mo.Space(2), a.dims[1]])
    check(torch.nn.functional.linear(a.double(), b), a.data.double() @ b.T, [a.dims[0], mo.Space(2)])


@given(data=st.data())
def test_outer_products_equal_torch(data):
    x, y = data.draw(spaces("x", sizes)), data.draw(spaces("y", sizes))
    a = mo.Tensor(numbers((len(x),), torch.float32, data.draw(seeds)), x)
    b = mo.Tensor(numbers((len(y),), torch.int64, data.draw(seeds)), y)
    for got in (mo.outer(a, b), torch.outer(a, b), mo.einsum("x, y -> x y", a, b), mo.dot(a, b)):
        check(got, torch.outer(a.data, b.data.float()), [x, y])


@given(pair=operands(2, dtypes=st.just(torch.float64), most=3))
def test_a_product_without_a_sum_is_multiplication(pair):
    raw, dims = align_all_by_hand(*pair)
    names = " ".join(space.name for space in dims)
    terms = ", ".join(" ".join(t.names) for t in pair)
    wide = (raw[0] * raw[1]) if raw else None
    check(mo.einsum(f"{terms} -> {names}", *pair), wide, dims)


def test_the_ellipsis_pairs_axes_as_arithmetic_does():
    a = mo.tensor(numbers((2, 3, 4), torch.float64, 1), "b i k")
    b = mo.tensor(numbers((4, 2), torch.float64, 2), "k b")
    check(mo.einsum("... k, ... k -> ...", a, b), torch.einsum("bik,kb->bi", a.data, b.data), a.dims[:2])
    c = mo.tensor(numbers((5, 3, 4), torch.float64, 3))
    d = mo.tensor(numbers((4, 2), torch.float64, 4))
    check(mo.einsum("...ij,jk->...ik", c, d), c.data @ d.data, [mo.Space(5), mo.Space(3), mo.Space(2)])
    check(mo.einsum("ij...->...", c), c.data.sum((0, 1)), [mo.Space(4)])
    with pytest.raises(ValueError, match="different names"):
        mo.einsum("...k,...k->...", mo.zeros(2, 3).rename(["x", None]), mo.zeros(4, 2, 3).rename([None, "y", None]))


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("ij,jk", "2 terms, but 1 tensors"),
        ("ijk->i", "no axis named 'ijk'"),
        ("i j k->i", "is for 3 axes"),
        ("batch in -> in", "no axis named 'batch'"),
        ("i->i", "is for 1 axes"),
        ("ij->iz", "'z' in the result"),
        ("ij->ii", "twice in the result"),
        ("row -> row", "leaves out an axis"),
        ("row wrong -> row", "no axis named 'wrong'"),
        ("row col", "no '->'"),
        ("...i...->i", "more than one"),
    ],
)
def test_invalid_equations_are_refused(equation, message):
    with pytest.raises(ValueError, match=message):
        mo.einsum(equation, mo.zeros(row=2, col=3))


def test_products_refuse_axes_that_do_not_pair():
    a = mo.zeros(row=["p"], k=["a", "b"])
    with pytest.raises(ValueError, match=r"labels of axis 'k' differ.*\['a'\].*\['c'\]"):
        a @ mo.zeros(k=["b", "c"], col=2)
    with pytest.raises(ValueError, match=r"would sum 'k'.*against 'j'"):
        a @ mo.zeros(j=["a", "b"], col=2)
    with pytest.raises(ValueError, match="differ: 2 .* and 1 "):
        mo.zeros(3, 2) @ mo.zeros(1, 4)
    with pytest.raises(ValueError, match="sizes of paired axes differ"):
        mo.einsum("ij,jk->ik", mo.zeros(3, 2), mo.zeros(1, 4))
    with pytest.raises(ValueError, match="at least one axis"):
        a @ mo.tensor(1.0)
    with pytest.raises(ValueError, match="no axis named 'z'"):
        mo.dot(a, a, over="z")
    with pytest.raises(ValueError, match="both be named 'row'"):
        a @ mo.zeros(k=["a", "b"], row=["p"])


def test_terms_with_repeated_names_raise():
    with pytest.raises(ValueError, match="names an axis twice"):
        mo.einsum("row row -> row", mo.zeros(row=2, column=2))
    with pytest.raises(ValueError, match="put spaces around it"):
        mo.einsum("...i j -> j", mo.zeros(2, 3))
