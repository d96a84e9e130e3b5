"""Labelled matrices as operators: transposes, adjoints, products, and the check that `eigh` gets a Hermitian matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moduli as mo
from moduli.labels import OwnTransposeError, Space

ORBITALS = ["s", "p", "d"]


def operator(rows=ORBITALS, columns=ORBITALS, dtype=torch.float64, seed=0, batch=()):
    data = torch.randn(*batch, len(rows), len(columns), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    names = [Space(size, f"k{at}") for at, size in enumerate(batch)]
    return mo.Tensor(data, (*names, Space(rows, "orb"), Space(columns, "bra")))


def entries(t):
    """Return every entry by its pair of labels."""
    t = t.permute("orb", "bra")
    return {(row, column): t.data[i, j].item() for i, row in enumerate(t.dims[0]) for j, column in enumerate(t.dims[1])}


@given(st.permutations(ORBITALS), st.permutations(ORBITALS), st.sampled_from([torch.float64, torch.complex128]))
def test_the_adjoint_exchanges_labels_and_keeps_names(rows, columns, dtype):
    h = operator(rows, columns, dtype)
    before, after, plain = entries(h), entries(h.mH), entries(h.mT)
    for (row, column), value in before.items():
        assert after[column, row] == complex(value).conjugate()
        assert plain[column, row] == value
    assert h.mH.names == h.adjoint().names == torch.adjoint(h).names == ("orb", "bra")
    assert mo.equal(h.mH.mH, h)
    symmetric = (h + h.mH) / 2
    assert mo.allclose(symmetric, symmetric.mH)
    values = torch.linalg.eigvalsh(symmetric.sel(orb=ORBITALS, bra=ORBITALS).data)
    assert torch.allclose(mo.eigvalsh(symmetric).data, values)


def test_symmetrised_operators_have_eigenvalues_and_transposes_are_not_added():
    h = mo.tensor([[0.0, 1.0], [3.0, 0.0]], orb=["a", "b"], bra=["a", "b"])
    assert mo.eigvalsh((h + h.mH) / 2).data.tolist() == pytest.approx([-2.0, 2.0])
    assert (h @ h).data.tolist() == [[3.0, 0.0], [0.0, 3.0]]
    with pytest.raises(ValueError, match=r"\(t \+ t\.mH\) / 2"):
        h + h.T


@pytest.mark.parametrize(
    "combine",
    [
        lambda h: h + h.T,
        lambda h: h + h.T.clone(),
        lambda h: h + (2 * h).T,
        lambda h: h / 2 + h.T / 2,
        lambda h: h + operator(seed=1).T,
        lambda h: mo.Tensor(h.data.to("meta"), h.dims) + mo.Tensor(h.data.to("meta"), h.dims).T,
        lambda h: h.clone().add_(h.T),
        lambda h: mo.stack([h, h], "k") * mo.stack([h, h], "k").permute("bra k orb"),
        lambda h: h.T - h,
        lambda h: h == h.transpose("orb", "bra"),
        lambda h: h * h.permute("bra orb"),
        lambda h: torch.maximum(h, h.movedim("orb", 1)),
        lambda h: mo.where(h > 0, h, h.T),
        lambda h: mo.allclose(h, h.T),
        lambda h: torch.nn.functional.mse_loss(h, h.T),
        lambda h: h[:2, :2] + h[:2, :2].T,
        lambda h: torch.func.grad(lambda t: (t + t.T).sum())(h),
        lambda h: mo.vmap(lambda t: t + t.T, over="k")(mo.stack([h, h], "k")),
    ],
)
def test_a_tensor_and_a_reordering_of_itself_are_refused(combine):
    with pytest.raises(OwnTransposeError, match="its own transpose"):
        combine(operator())


def test_the_conjugate_transpose_is_refused_too():
    h = operator(dtype=torch.complex128)
    with pytest.raises(OwnTransposeError):
        h + h.h()


def test_other_tensors_in_another_order_still_pair_by_name():
    h, other = operator(), operator(seed=1)
    assert torch.equal((h + other.T.align_to(h.dims)).data, h.data + other.data)
    # A batch axis may be at any position.
    batch = mo.stack([h, other], "k")
    assert torch.equal((batch + batch.permute("orb bra k")).data, 2 * batch.data)
    # Axes with other labels, or with positions only, pair by their names.
    table = mo.tensor(torch.arange(4.0).reshape(2, 2), x=["a", "b"], y=["c", "d"])
    assert torch.equal((table + table.T).data, 2 * table.data)
    square = mo.tensor(torch.arange(4.0).reshape(2, 2), "row column")
    assert torch.equal((square + square.T.clone()).data, 2 * square.data)
    assert torch.equal((square + square.T).data, 2 * square.data)
    # Without names there is nothing to pair by but position.
    plain = mo.Tensor(h.data, (Space(ORBITALS), Space(ORBITALS)))
    assert torch.equal((plain + plain.T).data, h.data + h.data.T)
    assert mo.zeros(mo.Space(1, "a"), mo.Space(1, "b")).T.names == ("b", "a")


def test_adjoints_of_tensors_that_are_no_operators_raise():
    with pytest.raises(ValueError, match=r"'orb'.*'bra'.*labels"):
        operator(columns=["s", "p", "f"]).mH
    with pytest.raises(ValueError, match="sizes 2 and 3"):
        mo.tensor(torch.ones(2, 3), "a b").mH
    with pytest.raises(ValueError, match="last two axes"):
        mo.ones(3).mH
    rectangular = mo.Tensor(torch.ones(2, 3), (Space(["a", "b"]), Space(3)))
    assert rectangular.mH.dims == (Space(3), Space(["a", "b"]))


@given(st.permutations(ORBITALS), st.permutations(ORBITALS))
def test_products_of_operators(rows, columns):
    a, b = operator(), operator(rows, columns, seed=1)
    product = a @ b
    assert product.names == ("orb", "bra")
    by_hand = a.data @ b.sel(orb=ORBITALS, bra=ORBITALS).data
    assert torch.allclose(product.sel(orb=ORBITALS, bra=ORBITALS).data, by_hand)
    vector = mo.Tensor(torch.arange(3.0, dtype=torch.float64), (Space(rows, "orb"),))
    assert (a @ vector).names == ("orb",)
    assert torch.allclose((a @ vector).data, a.data @ vector.sel(orb=ORBITALS).data)
    states = mo.Tensor(torch.ones(2, 3, dtype=torch.float64), (Space(2, "state"), Space(columns, "bra")))
    assert (states @ a).names == ("state", "bra")


def test_axes_that_do_not_belong_to_one_operator_are_still_refused():
    with pytest.raises(ValueError, match="would sum 'bra'"):
        operator(columns=["s", "p", "f"]) @ operator(rows=["s", "p", "f"])
    a = mo.tensor(torch.ones(3, 3), "row column")
    with pytest.raises(ValueError, match="would sum 'column'"):
        a @ a
    with pytest.raises(ValueError, match="would sum 'bra'"):
        operator() @ mo.Tensor(torch.ones(3, dtype=torch.float64), (Space(ORBITALS, "other"),))


@pytest.mark.parametrize("function", [mo.eigh, mo.eigvalsh, torch.linalg.eigh, torch.linalg.eigvalsh])
def test_matrices_that_are_not_hermitian_are_refused(function):
    h = operator(batch=(2,))
    with pytest.raises(ValueError, match=r"not this|differs from its adjoint by .*check=False"):
        function(h)
    function((h + h.mH) / 2)
    with pytest.raises(ValueError, match="differs from its adjoint"):
        function(operator(dtype=torch.complex128) + operator(dtype=torch.complex128).mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_matrices_that_are_hermitian_up_to_rounding_are_accepted(dtype, n):
    x = torch.randn(n, n, dtype=dtype if dtype.itemsize > 2 else torch.float32)
    gram = mo.tensor((x @ x.mH).to(dtype), "a b")
    assert mo.eigvalsh(gram).shape == (n,)


@pytest.mark.compiles_labels
def test_the_check_is_optional_and_skipped_in_compiled_code_and_transforms():
    h = operator()
    assert torch.allclose(mo.eigvalsh(h, check=False).data, torch.linalg.eigvalsh(h.data))
    assert torch.allclose(mo.eigh(h, UPLO="U", check=False).values.data, torch.linalg.eigh(h.data, UPLO="U")[0])
    assert torch.allclose(h.eigvalsh(check=False).data, torch.linalg.eigvalsh(h.data))
    compiled = torch.compile(mo.eigvalsh, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(h).data, torch.linalg.eigvalsh(h.data))
    batch = mo.stack([h, h], "k")
    assert mo.vmap(mo.eigvalsh, over="k")(batch).shape == (2, 3)
