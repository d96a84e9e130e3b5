"""Factories: axes as requested, and the values and options of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moduli.device import Device
from moduli.labels import BROADCAST, Space, Tensor
from moduli.labels import _factories as make
from moduli.labels import _like as like
from moduli.labels._factories import tensor

RGB = ["r", "g", "b"]

# -- tensor ------------------------------------------------------------------------------------------------------------


def test_axes_are_given_by_names_labels_or_both() -> None:
    x = torch.zeros(2, 3)
    assert tensor(x, "batch channel").dims == (Space(2, "batch"), Space(3, "channel"))
    assert tensor(x, ("batch", None)).dims == (Space(2, "batch"), Space(3))
    assert tensor(x, batch=None, channel=RGB).dims == (Space(2, "batch"), Space(RGB, "channel"))
    assert tensor(x, "batch channel", channel=RGB).dims == (Space(2, "batch"), Space(RGB, "channel"))
    assert tensor(x, batch=2, channel=Space(RGB, "colour")).names == ("batch", "channel")
    assert tensor(x).dims == (Space(2), Space(3))
    assert tensor(x[:1], y=BROADCAST, x=range(3)).dims == (BROADCAST.rename("y"), Space(range(3), "x"))
    assert tensor(1.5).dims == ()


@given(st.lists(st.integers(0, 3), max_size=3), st.randoms(use_true_random=False))
def test_sizes_must_equal_those_of_the_data(shape: list[int], random: object) -> None:
    names = ["i", "j", "k"][: len(shape)]
    x = torch.zeros(shape)
    spaces = {name: [f"{name}{at}" for at in range(size)] for name, size in zip(names, shape, strict=True)}
    assert tensor(x, **spaces).shape == x.shape
    for name, size in zip(names, shape, strict=True):
        with pytest.raises(ValueError, match=rf"axis '{name}' of the data has size {size} .*has {size + 1}"):
            tensor(x, **{**spaces, name: size + 1})


def test_data_may_be_tensors_arrays_or_numbers() -> None:
    x = torch.zeros(3)
    assert tensor(x, "x").data is x
    assert tensor(x, "x", dtype=torch.float32, device="cpu").data is x
    assert tensor(x, "x", dtype=torch.float64).dtype == torch.float64
    array = np.ones((2, 2))[::-1]
    labelled = tensor(array, "i j")
    assert labelled.dtype == torch.float64
    array[0, 0] = 7.0
    assert labelled.data[0, 0] == 1.0
    assert tensor([1, 2]).dtype == torch.int64
    assert tensor(np.float64(2.0)).shape == ()
    with pytest.raises(TypeError, match="labelled already"):
        tensor(tensor([1.0]))


def test_requires_grad_raises_instead_of_detaching() -> None:
    x = torch.ones(2)
    leaf = tensor(x, "x", requires_grad=True)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert not x.requires_grad
    parameter = torch.ones(2, requires_grad=True)
    assert tensor(parameter, "x", requires_grad=True).data is parameter
    assert tensor(parameter * 2, "x").data.grad_fn is not None
    with pytest.raises(ValueError, match="graph"):
        tensor(parameter * 2, "x", requires_grad=True)
    assert tensor(torch.ones(2), requires_grad=True, dtype=torch.float64).is_leaf
    assert tensor([1.0], requires_grad=True).requires_grad


def test_booleans_and_floats_are_not_accepted_as_sizes() -> None:
    x = torch.zeros(1)
    assert tensor(x, x=1).dims == (Space(1, "x"),)
    assert like.eye(1).dims == (Space(1), Space(1))
    for wrong in (True, 1.0, np.True_, 1 + 0j):
        with pytest.raises(TypeError, match="(an axis|a Space) is (given by|made from)"):
            tensor(x, x=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="(an axis|a Space) is (given by|made from)"):
            like.eye(wrong)  # type: ignore[arg-type]


def test_labels_may_be_any_sequence() -> None:
    x = torch.zeros(2)
    for labels in (np.array([5, 7]), (5, 7), {5: 0, 7: 1}, iter([5, 7]), torch.tensor([5, 7])):
        assert tensor(x, x=labels).dims == (Space([5, 7], "x"),)  # type: ignore[arg-type]
    assert make.zeros(np.array([5, 7])).dims == (Space([5, 7]),)
    with pytest.raises(TypeError, match="hashable"):
        tensor(x, x=[["a"], ["b"]])  # type: ignore[list-item]


def test_invalid_axes_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"2 axes, but 1 are named: \['batch'\]"):
        tensor(x, "batch")
    with pytest.raises(ValueError, match="batch=None"):
        tensor(x, channel=RGB)
    with pytest.raises(ValueError, match=r"\['colour'\].*\['batch', 'channel'\]"):
        tensor(x, "batch channel", colour=RGB)
    with pytest.raises(ValueError, match="both be named"):
        tensor(x, "batch batch")
    with pytest.raises(ValueError, match="more than once"):
        tensor(x, batch=["a", "a"], channel=RGB)
    for wrong in (True, "rgb", 1.5):
        with pytest.raises(TypeError):
            tensor(x, batch=None, channel=wrong)  # type: ignore[arg-type]


# -- filled ------------------------------------------------------------------------------------------------------------

FILLED = {
    "zeros": (make.zeros, torch.zeros),
    "ones": (make.ones, torch.ones),
    "empty": (make.empty, torch.empty),
    "rand": (make.rand, torch.rand),
    "randn": (make.randn, torch.randn),
    "full": (
        lambda *dims, **options: make.full(dims[0] if len(dims) == 1 else dims, 7.0, **options),
        lambda *shape: torch.full(shape, 7.0),
    ),
}


@pytest.mark.parametrize("name", FILLED)
def test_filled_tensors_have_the_requested_axes_and_values(name: str) -> None:
    ours, theirs = FILLED[name]
    channel = Space(RGB, "channel")
    assert ours(2, 3).dims == (Space(2), Space(3))
    assert ours((2, channel)).dims == (Space(2), channel)
    assert ours(2, RGB).dims == (Space(2), Space(RGB))
    assert ours(batch=2, channel=RGB).dims == (Space(2, "batch"), channel)
    assert ours(2, channel=RGB).dims == (Space(2), channel)
    assert ours(BROADCAST, 2).dims == (BROADCAST, Space(2))
    assert ours().dims == ()
    assert ours(np.int64(2)).shape == (2,)
    t = ours(2, dtype=torch.float64, device=Device("cpu"), requires_grad=True)
    assert (t.dtype, t.requires_grad, t.device) == (torch.float64, True, Device("cpu"))
    assert ours(2, device="meta").data.is_meta
    assert ours(2, device=torch.device("cpu")).dtype == torch.get_default_dtype()
    if name != "empty":
        torch.manual_seed(0)
        result = ours(2, channel=RGB)
        torch.manual_seed(0)
        torch.testing.assert_close(result.data, theirs(2, 3))
    for wrong in (True, "rgb", 1.5, None):
        with pytest.raises(TypeError):
            ours(2, wrong)
    with pytest.raises(ValueError, match="negative"):
        ours(-1)
    with pytest.raises(ValueError, match="both be named"):
        ours(channel, channel=RGB)


def test_a_single_list_is_read_as_dims_or_labels() -> None:
    assert make.zeros([2, 3]).shape == (2, 3)
    assert make.zeros(torch.Size([2, 3])).shape == (2, 3)
    assert make.zeros(["a", "b"]).dims == (Space(["a", "b"]),)
    assert make.zeros([(0, 1), (1, 0)]).dims == (Space([(0, 1), (1, 0)]),)
    assert make.zeros(([1, 5], ["a"])).dims == (Space([1, 5]), Space(["a"]))
    assert make.zeros((["a"], ("b", "c"))).dims == (Space(["a"]), Space(["b", "c"]))
    for wrong in ((True, 2), ("a", "b"), (2, None)):
        with pytest.raises(TypeError, match="(an axis|a Space) is (given by|made from)"):
            make.zeros(wrong)  # type: ignore[arg-type]
    assert make.zeros(range(3)).dims == (Space(range(3)),)
    assert make.full(3, 1).dims == (Space(3),)
    assert make.full(RGB, 1).dims == (Space(RGB),)
    assert make.full((), 1, channel=RGB).dims == (Space(RGB, "channel"),)
    basis = make.zeros(Space(RGB, "row"), Space(2, "column"))
    assert make.zeros(basis.dims[:1]).dims == basis.dims[:1]
    assert make.zeros(basis.dims).dims == basis.dims


@pytest.mark.parametrize("draw", [make.rand, make.randn])
def test_equal_generators_draw_equal_values(draw: object) -> None:
    first, second = (draw(3, generator=torch.Generator().manual_seed(5)).data for _ in range(2))  # type: ignore[operator]
    torch.testing.assert_close(first, second)


# -- eye, arange -------------------------------------------------------------------------------------------------------


@given(st.permutations(RGB), st.lists(st.sampled_from("rgbxyz"), unique=True))
def test_eye_is_one_at_equal_labels(rows: list[str], columns: list[str]) -> None:
    t = like.eye(rows, Space(columns, "column"), dtype=torch.int64)
    assert t.dtype == torch.int64
    assert t.data.tolist() == [[int(r == c) for c in columns] for r in rows]


def test_eye_pairs_positional_axes_by_position() -> None:
    assert like.eye(3).data.equal(torch.eye(3))
    assert like.eye(2, 3).data.equal(torch.eye(2, 3))
    assert like.eye(["a", "b"], 2, requires_grad=True).requires_grad
    assert like.eye(["a", "b"]).dims == (Space(["a", "b"]), Space(["a", "b"]))
    assert like.eye(["a", "b"], ["b", "a"]).dtype == torch.get_default_dtype()
    assert like.eye(["a", "b"], 3).data.equal(torch.eye(2, 3))
    with pytest.raises(ValueError, match="rename"):
        like.eye(Space(2, "row"))
    with pytest.raises(ValueError, match="BROADCAST"):
        like.eye(BROADCAST)
    with pytest.raises(TypeError):
        like.eye(True)


def test_arange_has_a_named_axis_and_the_values_of_torch() -> None:
    assert like.arange(3, name="t").dims == (Space(3, "t"),)
    assert like.arange(1, 7, 2).data.tolist() == [1, 3, 5]
    assert like.arange(0.0, 1.0, 0.5, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match="can't name an axis"):
        like.arange(3, name="a b")


# -- like --------------------------------------------------------------------------------------------------------------

LIKE = {
    "zeros_like": (like.zeros_like, torch.zeros_like, ()),
    "ones_like": (like.ones_like, torch.ones_like, ()),
    "full_like": (like.full_like, torch.full_like, (3.0,)),
    "empty_like": (like.empty_like, torch.empty_like, ()),
    "rand_like": (like.rand_like, torch.rand_like, ()),
    "randn_like": (like.randn_like, torch.randn_like, ()),
}


@pytest.mark.parametrize("name", LIKE)
def test_like_functions_copy_axes_and_dtype(name: str) -> None:
    ours, theirs, args = LIKE[name]
    t = tensor(torch.zeros(2, 3, dtype=torch.float64), "batch channel", channel=RGB)
    for result in (ours(t, *args), theirs(t, *args)):
        assert result.dims == t.dims
        assert result.dtype == torch.float64
    assert ours(t, *args, dtype=torch.float32, requires_grad=True).dtype == torch.float32
    assert theirs(t, *args, device="cpu").dims == t.dims
    assert ours(torch.zeros(2), *args).dims == (Space(2),)
    if name != "empty_like":
        torch.manual_seed(1)
        drawn = ours(t, *args)
        torch.manual_seed(1)
        torch.testing.assert_close(drawn.data, theirs(t.data, *args))


def test_random_like_functions_accept_a_generator() -> None:
    t = make.zeros(channel=RGB, dtype=torch.float64)
    for draw in (like.rand_like, like.randn_like):
        one, two = (draw(t, generator=torch.Generator().manual_seed(3)) for _ in range(2))
        assert one.dims == t.dims
        assert one.dtype == torch.float64
        torch.testing.assert_close(one.data, two.data)
    assert torch.randint_like(t, 5).dims == t.dims


# -- compilation -------------------------------------------------------------------------------------------------------

CHANNEL = Space(RGB, "channel")
COMPILED = {
    "tensor": lambda x: tensor(x, "batch channel", channel=["r", "g", "b"]),
    "names": lambda x: tensor(x, "batch channel"),
    "zeros": lambda x: make.zeros(x.shape[0], CHANNEL, dtype=torch.float64),
    "ones": lambda x: make.ones(batch=x.shape[0], channel=["r", "g", "b"]),
    "full": lambda x: make.full((2, 3), 5.0),
    "rand": lambda x: make.rand(2, 3, device="cpu"),
    "eye": lambda x: like.eye(["a", "b"], ["b", "c", "a"]),
    "arange": lambda x: like.arange(3, name="t"),
    "zeros_like": lambda x: like.zeros_like(tensor(x, "batch channel")),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.compiles_labels
def test_factories_compile_to_one_graph(name: str) -> None:
    function = COMPILED[name]
    x = torch.ones(2, 3)
    result, expected = torch.compile(function, fullgraph=True, backend="eager")(x), function(x)
    assert isinstance(result, Tensor)
    assert result._axes is expected._axes
    if name != "rand":
        torch.testing.assert_close(result.data, expected.data)


@pytest.mark.compiles_labels
def test_a_new_size_does_not_recompile() -> None:
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        traced.append(graph)
        return graph.forward

    run = torch.compile(lambda x: make.zeros(x.shape[0], CHANNEL).data, fullgraph=True, backend=backend, dynamic=True)
    for size in (4, 5, 6, 7):
        assert run(torch.ones(size, 2)).shape == (size, 3)
    assert len(traced) == 1
