"""Every elementwise function equals torch on data aligned by hand, with the labels of both operands."""

import inspect
import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import moduli as mo
from labels.strategies import (
    DTYPES,
    FLOATS,
    align_all_by_hand,
    align_by_hand,
    as_mapping,
    attempt,
    check,
    dtypes,
    labelled,
    numbers,
    operands,
    reordered,
    seeds,
)
from moduli.labels import _maths
from moduli.labels._elementwise import COMPARISONS, OPERATORS

# torch warns that half precision times complex is experimental.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

few = settings(max_examples=7)
OPERATORS = {
    **{name: getattr(operator, f"__{name}__") for name in OPERATORS},
    **{name: getattr(operator, name) for name in COMPARISONS},
}
# The functions of `moduli` with their arguments, and those that only torch has.
MATHS = {
    name: [*inspect.signature(function).parameters]
    for name, function in vars(_maths).items()
    if inspect.isfunction(function) and hasattr(mo, name)
}
UNARY = [
    *(name for name, parameters in MATHS.items() if parameters == ["t"]),
    *[
        "absolute",
        "arccos",
        "arccosh",
        "arcsin",
        "arcsinh",
        "arctan",
        "arctanh",
        "bitwise_not",
        "deg2rad",
        "digamma",
        "erfc",
        "erfinv",
        "exp2",
        "fix",
        "frac",
    ],
    *[
        "i0",
        "isneginf",
        "isposinf",
        "isreal",
        "lgamma",
        "logit",
        "negative",
        "positive",
        "rad2deg",
        "sgn",
        "signbit",
        "sinc",
        "conj_physical",
    ],
    *["resolve_conj", "resolve_neg", "clone", "detach", "bernoulli"],
]
BINARY = [
    "isclose",
    *(name for name, parameters in MATHS.items() if parameters == ["a", "b", "join", "fill"]),
    *[
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "floor_divide",
        "fmod",
        "float_power",
        "arctan2",
        "fmax",
        "fmin",
        "copysign",
        "nextafter",
    ],
    *[
        "logaddexp2",
        "xlogy",
        "ldexp",
        "heaviside",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "not_equal",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
    ],
    *[
        "logical_xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_left_shift",
        "bitwise_right_shift",
        "gcd",
        "lcm",
        "rsub",
    ],
]
TERNARY = ["where", "clamp", "clip", "addcmul", "addcdiv", "lerp"]
UNARY_F = [
    *[
        "relu",
        "relu6",
        "gelu",
        "silu",
        "mish",
        "softplus",
        "elu",
        "selu",
        "celu",
        "leaky_relu",
        "hardtanh",
        "hardsigmoid",
        "hardswish",
        "logsigmoid",
    ],
    *["softsign", "tanhshrink", "softshrink", "hardshrink", "threshold", "dropout", "alpha_dropout", "tanh", "sigmoid"],
]
NUMBERS = (2, -1, 2.5, True, 1 + 2j, Fraction(1, 2), np.float32(1.5), np.float64(0.1), np.int64(3), np.bool_(True))


def to_python(number):
    """Return a number in a type that torch accepts."""
    return (
        float(number) if isinstance(number, Fraction) else number.item() if isinstance(number, np.generic) else number
    )


def assert_agree(function, raw_function, tensors, raw, dims):
    """Check that a function of labelled tensors equals one of raw data, or that both raise.

    Args:
        function: The function of labelled tensors.
        raw_function: The function of raw data.
        tensors: The labelled tensors.
        raw: The raw data.
        dims: The Spaces of the result.
    """
    expected, raw_error = attempt(raw_function, *raw)
    result, error = attempt(function, *tensors)
    assert (error is None) == (raw_error is None), (error, raw_error)
    if raw_error is None:
        check(result, expected, dims)


# -- functions of one tensor -------------------------------------------------------------------------------------------

RANDOM = {"bernoulli", "dropout", "alpha_dropout"}


@pytest.mark.parametrize("name", [*UNARY, *(f"F.{name}" for name in UNARY_F)])
@few
@given(t=labelled(kinds=("positional", "labelled", "broadcast"), named=False))
def test_torch_functions_of_one_tensor_keep_the_labels(name, t):
    function = getattr(F, name[2:]) if name.startswith("F.") else getattr(torch, name)
    extra = (0.5, 20.0) if name == "F.threshold" else ()
    if name == "bernoulli":
        t = mo.Tensor(
            t.data.abs().clamp(0, 1) if not t.data.is_complex() and t.dtype is not torch.bool else t.data, t.dims
        )
    if name == "imag" and not t.data.is_complex():
        check(torch.imag(t), torch.zeros_like(t.data), t.dims)  # as in NumPy; torch refuses real numbers
        return
    torch.manual_seed(0)
    expected, raw_error = attempt(function, t.data, *extra)
    torch.manual_seed(0)
    result, error = attempt(function, t, *extra)
    assert (error is None) == (raw_error is None), (error, raw_error)
    if raw_error is None:
        check(result, expected, t.dims)


@pytest.mark.parametrize("name", [name for name in UNARY if hasattr(mo, name)])
def test_moduli_functions_and_methods_of_one_tensor_equal_torch(name):
    t = mo.tensor([[0.25, 0.5], [0.75, 1.0]], "y x", x=["a", "b"])
    expected = getattr(torch, name)(t.data) if name != "imag" else torch.zeros(2, 2)
    check(getattr(mo, name)(t), expected, t.dims)
    method = getattr(t, name)
    check(method() if callable(method) else method, expected, t.dims)


@given(t=labelled())
def test_unary_operators_keep_the_labels(t):
    for function in (operator.neg, operator.pos, operator.abs, operator.invert):
        assert_agree(function, function, (t,), (t.data,), t.dims)


# -- functions of two and three ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BINARY)
@few
@given(pair=operands(2))
def test_torch_functions_of_two_tensors_pair_by_label(name, pair):
    raw, dims = align_all_by_hand(*pair)
    function = getattr(torch, name)
    if name == "isclose" and pair[0].dtype != pair[1].dtype:  # torch refuses mixed dtypes, moduli promotes them
        dtype = torch.promote_types(pair[0].dtype, pair[1].dtype)
        raw = [each.to(dtype) for each in raw]
    assert_agree(function, function, pair, raw, dims)


@pytest.mark.parametrize("name", [name for name in BINARY if hasattr(mo, name)])
@few
@given(pair=operands(2))
def test_moduli_functions_and_methods_of_two_tensors_pair_by_label(name, pair):
    raw, dims = align_all_by_hand(*pair)
    if name == "isclose":
        dtype = torch.promote_types(pair[0].dtype, pair[1].dtype)
        raw = [each.to(dtype) for each in raw]
    assert_agree(getattr(mo, name), getattr(torch, name), pair, raw, dims)
    assert_agree(getattr(mo.Tensor, name), getattr(torch, name), pair, raw, dims)


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=12)
@given(pair=operands(2))
def test_binary_operators_pair_by_label(name, pair):
    raw, dims = align_all_by_hand(*pair)
    assert_agree(OPERATORS[name], OPERATORS[name], pair, raw, dims)


@pytest.mark.parametrize("name", TERNARY)
@few
@given(data=st.data())
def test_functions_of_three_tensors_pair_by_label(name, data):
    tensors = data.draw(operands(3, dtypes=st.sampled_from(FLOATS), same_dtype=True))
    function = getattr(torch, name)
    if name == "where":
        tensors = (tensors[0] > 0, *tensors[1:])
    raw, dims = align_all_by_hand(*tensors)
    if name in ("clamp", "clip"):
        assert_agree(function, lambda t, low, high: torch.minimum(torch.maximum(t, low), high), tensors, raw, dims)
        assert_agree(mo.clamp, lambda t, low, high: torch.minimum(torch.maximum(t, low), high), tensors, raw, dims)
        return
    assert_agree(function, function, tensors, raw, dims)
    if hasattr(mo, name):
        assert_agree(getattr(mo, name), function, tensors, raw, dims)


@given(pair=operands(2, dtypes=st.sampled_from(FLOATS)))
def test_options_of_torch_functions_are_passed_on(pair):
    raw, dims = align_all_by_hand(*pair)
    check(torch.add(*pair, alpha=3), torch.add(*raw, alpha=3), dims)
    check(torch.sub(input=pair[0], other=pair[1], alpha=3), torch.sub(*raw, alpha=3), dims)
    check(torch.div(*pair, rounding_mode="floor"), torch.div(*raw, rounding_mode="floor"), dims)


# -- independence of order -----------------------------------------------------------------------------------------------


@given(data=st.data())
def test_reordering_an_operand_does_not_change_the_result(data):
    first, second = data.draw(operands(2, dtypes=st.just(torch.float64)))
    again = data.draw(reordered(first)), data.draw(reordered(second))
    # Positional axes pair by position, so only labelled axes can be reordered.
    mixed = {
        name
        for name in set(first.names) & set(second.names)
        if first.dims[first.names.index(name)].labelled != second.dims[second.names.index(name)].labelled
    }
    all_labelled = all(not (t.dims[t.names.index(n)].positional) for n in mixed for t in (first, second))
    if all_labelled:
        for function in (operator.sub, torch.maximum, operator.lt):
            assert as_mapping(function(*again)) == as_mapping(function(first, second))
    difference = first - second
    assert set(difference.names) == set(first.names) | set(second.names)
    assert as_mapping(second - first) == {key: -value for key, value in as_mapping(difference).items()}


# -- numbers, plain tensors, arrays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: type(n).__name__ + str(n))
@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=2)
@given(t=labelled(ranks=st.integers(0, 2), named=False))
def test_operators_accept_numbers_on_either_side(name, number, t):
    function = OPERATORS[name]
    assert_agree(lambda x: function(x, number), lambda x: function(x, to_python(number)), (t,), (t.data,), t.dims)
    assert_agree(lambda x: function(number, x), lambda x: function(to_python(number), x), (t,), (t.data,), t.dims)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "atan2", "hypot"])
@pytest.mark.parametrize("number", [3, 0.1, Fraction(1, 3), np.float64(0.1)], ids=repr)
def test_numbers_keep_their_precision_in_named_functions(name, number):
    for dtype in (torch.float64, torch.float32, torch.int64):
        t = mo.tensor(numbers((3,), dtype, 5, 1, 4), x=["a", "b", "c"])
        value = to_python(number)
        beside = torch.tensor(value, dtype=torch.result_type(t.data, value))
        if name in ("atan2", "hypot") and dtype is torch.int64 and isinstance(number, int):
            continue  # torch has no such function of integers
        check(getattr(mo, name)(t, number), getattr(torch, name)(t.data, beside), t.dims)
        check(getattr(mo, name)(number, t), getattr(torch, name)(beside, t.data), t.dims)


@pytest.mark.parametrize("kind", ["torch", "numpy", "parameter"])
@settings(max_examples=40)
@given(
    t=labelled(dtypes=st.sampled_from((torch.float32, torch.float64, torch.int64)), named=False),
    seed=seeds,
    cut=st.integers(0, 4),
)
def test_plain_tensors_and_arrays_pair_by_position(kind, t, seed, cut):
    raw = numbers(t.shape[min(cut, t.ndim) :], torch.float64, seed)
    other = {"torch": raw, "numpy": raw.numpy(), "parameter": torch.nn.Parameter(raw)}[kind]
    for function in (operator.add, operator.sub, operator.mul, operator.lt, operator.eq, operator.truediv):
        check(function(t, other), function(t.data, raw), t.dims)
        check(function(other, t), function(raw, t.data), t.dims)
    if kind != "numpy":
        check(torch.atan2(other, t), torch.atan2(raw, t.data), t.dims)


@given(t=labelled(named=False), value=st.sampled_from([2.5, 3, True, 1j]))
def test_tensors_without_axes_count_as_numbers(t, value):
    number = torch.tensor(value)
    for function in (operator.add, operator.sub, operator.mul):
        assert_agree(lambda x: function(x, number), lambda x: function(x, number), (t,), (t.data,), t.dims)
        assert_agree(lambda x: function(number, x), lambda x: function(number, x), (t,), (t.data,), t.dims)
        assert_agree(lambda x: function(x, mo.tensor(number)), lambda x: function(x, number), (t,), (t.data,), t.dims)


@pytest.mark.parametrize("left", DTYPES, ids=str)
@pytest.mark.parametrize("right", DTYPES, ids=str)
def test_dtypes_are_promoted_as_torch_does(left, right):
    a = mo.tensor(numbers((2, 3), left, 1), y=None, x=["a", "b", "c"])
    b = mo.tensor(numbers((3,), right, 2), x=["c", "a", "b"])
    aligned = b.data[torch.tensor([1, 2, 0])]
    check(a * b, a.data * aligned, a.dims)
    check(a + b, a.data + aligned, a.dims)
    assert_agree(lambda x, y: x + y.sum(), lambda x, y: x + y.sum(), (a, b), (a.data, b.data), a.dims)


@given(pair=operands(2, dtypes=dtypes))
def test_equal_and_allclose_are_symmetric(pair):
    a, b = pair
    same = set(a.names) == set(b.names) and a.numel() == b.numel() and as_mapping(a) == as_mapping(b)
    labels = all(
        a.dims[a.names.index(n)].labelled == b.dims[b.names.index(n)].labelled for n in set(a.names) & set(b.names)
    )
    if labels:
        assert mo.equal(a, b) == mo.equal(b, a) == torch.equal(a, b) == same
    assert mo.equal(a, b) == mo.equal(b, a)
    assert mo.equal(a, a)
    assert mo.allclose(a, a)
    assert mo.allclose(a, b) == mo.allclose(b, a)


@given(data=st.data())
def test_where_with_numbers_and_mixed_operands(data):
    t = data.draw(labelled(dtypes=st.sampled_from(FLOATS)))
    other = data.draw(reordered(t))
    aligned = align_by_hand(other, t.names, dict(zip(t.names, t.dims, strict=True)))
    check(mo.where(t > 0, t, 0.5), torch.where(t.data > 0, t.data, 0.5), t.dims)
    check(torch.where(other > 0, 1.0, t).align_to(t.dims), torch.where(aligned > 0, 1.0, t.data), t.dims)
    check(t.clamp(-1, 1), t.data.clamp(-1, 1), t.dims)
    check(t.clamp(max=other), torch.minimum(t.data, aligned), t.dims)
