"""Errors: each names the axis, both spaces, their difference, and the remedy."""

import re

import pytest
import torch

import moduli as mo
from moduli import BROADCAST, Space, Tensor, UnknownLabelError
from moduli.labels._elementwise import derive_rule
from moduli.labels._tensor import RULES

T = mo.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "row col", row=["a", "b"])
BARE = mo.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

REFUSED = {
    # making
    "wrong size": (lambda: Tensor(torch.zeros(2), [Space(3, "x")]), ValueError, r"axis 0 \('x'\) .* size 2.*Space\(3, name='x'\)"),
    "wrong rank": (lambda: Tensor(torch.zeros(2), []), ValueError, r"shape \(2,\) has 1 axes, but 0 spaces"),
    "wrong dims": (lambda: Tensor(torch.zeros(2), [2]), TypeError, r"number 0 is 2; write Space\(2\)"),
    "same names": (lambda: Tensor(torch.zeros(2, 2), [Space(2, "x"), Space(2, "x")]), ValueError, "both be named 'x'"),
    "labelled twice": (lambda: Tensor(T, T.dims), TypeError, "labelled already"),
    "tensor labelled twice": (lambda: mo.tensor(T, "x y"), TypeError, "labelled already"),
    "tensor size": (lambda: mo.tensor([1.0], x=["a", "b"]), ValueError, r"axis 'x'.*size 1.*has 2: Space\(\['a', 'b'\]"),
    "tensor names": (lambda: mo.tensor([1.0], "x y"), ValueError, r"1 axes, but 2 are named: \['x', 'y'\]"),
    "tensor extra": (lambda: mo.tensor([1.0], "x", y=["a"]), ValueError, r"\['y'\], but the names of the axes are \['x'\]"),
    "duplicate labels": (lambda: mo.tensor([1.0, 2.0], x=["a", "a"]), ValueError, "'a' occurs more than once"),
    "unhashable label": (lambda: mo.tensor([1.0, 2.0], x=["a", []]), TypeError, r"hashable"),
    "norm of an axis": (lambda: T.norm("row"), TypeError, "the first argument is the order; write dim='row' for the axis"),
    # pairing
    "labels differ": (
        lambda: T + mo.zeros(row=["b", "c"], col=3), ValueError,
        r"axis 'row' differ: Space\(\['a', 'b'\], name='row'\) on the left, Space\(\['b', 'c'\], name='row'\) on the "
        r"right; only on the left: \['a'\], only on the right: \['c'\].*mo.join",
    ),
    "labels differ by position": (
        lambda: BARE.relabel(1, list("xyz")) + torch.zeros(3) * mo.zeros(["x", "y", "q"]), ValueError,
        r"axis 1 differ.*\['z'\].*\['q'\]",
    ),
    "sizes differ": (lambda: T + mo.zeros(col=4), ValueError, r"sizes of paired axes differ: 'col': 3 and 4"),
    "one against many": (lambda: T + mo.zeros(col=1), ValueError, "only BROADCAST stretches"),
    "plain sizes differ": (lambda: T + torch.zeros(2), ValueError, r"'col': 3 and 2 in shapes \(2, 3\) and \(2,\)"),
    "names by position": (lambda: T + mo.zeros(3, 3).rename([None, "row"]), ValueError, "different names, 'col' and 'row'"),
    "many labels": (
        lambda: mo.zeros(x=[f"a{i}" for i in range(100)]) + mo.zeros(x=[f"b{i}" for i in range(100)]), ValueError,
        r"only on the left: \['a0', 'a1', 'a2', 'a3', \.\.\., 'a98', 'a99'\]",
    ),
    "a word": (lambda: T + "a", TypeError, "unsupported operand"),
    "a list": (lambda: T + [1.0], TypeError, "unsupported operand"),
    "out": (lambda: torch.add(T, T, out=torch.zeros(2, 3)), TypeError, "takes no out="),
    # axes
    "unknown name": (lambda: T.sum("depth"), KeyError, "no axis named 'depth'; the axes are 'row', 'col'"),
    "unknown name, as ValueError": (lambda: T.sum("depth"), ValueError, "no axis named 'depth'"),
    "no such axis": (lambda: T.sum(2), IndexError, "no axis 2 in a tensor of 2 axes; the axes are 'row', 'col'"),
    "unnamed axes": (lambda: BARE.sum("x"), KeyError, r"the axes are 0 \(unnamed\), 1 \(unnamed\)"),
    "twice": (lambda: T.sum("row row"), ValueError, "an axis is given twice"),
    "twice in two ways": (lambda: T.sum(("row", 0)), ValueError, "an axis is given twice"),
    "an odd axis": (lambda: T.sum(1.5), TypeError, "'float' object cannot be interpreted as an integer"),
    "no axes": (lambda: mo.tensor(1.0).sum("x"), KeyError, "the tensor has no axes"),
    "half a permutation": (lambda: T.permute("row"), ValueError, "every axis once"),
    "rename unknown": (lambda: T.rename(z="x"), KeyError, "no axis named 'z'"),
    "rename twice": (lambda: T.rename(row="col"), ValueError, "both be named 'col'"),
    "rename too many": (lambda: T.rename("a b c"), ValueError, "3 names for 2 axes"),
    "relabel size": (lambda: T.relabel(row=["a"]), ValueError, "axis 'row' has size 2, but 1 labels"),
    "relabel a set": (lambda: T.relabel(row={"a", "b"}), TypeError, "a set has no order"),
    "dot over a position": (lambda: mo.dot(T, T, over=0), TypeError, "by name, not by 0"),
    "relabel a word": (lambda: T.relabel(row="ab"), TypeError, r"Space\(list\('ab'\)\)"),
    "align labels": (lambda: T.align_to([Space(["a", "c"], "row"), Space(3, "col")]), ValueError, r"\['c'\].*\['b'\]"),
    "align names": (lambda: T.align_to([Space(2, "r"), Space(3, "col")]), ValueError, "the names differ"),
    "align size": (lambda: T.align_to([Space(2, "row"), Space(4, "col")]), ValueError, "axis 'col' has size 3"),
    "align to BROADCAST": (lambda: T[:1].align_to([BROADCAST.rename("row"), Space(3, "col")]), ValueError, "'row'.*not BROADCAST"),
    "squeeze": (lambda: T.squeeze("row"), ValueError, "axis 'row' has size 2"),
    "unsqueeze": (lambda: T.unsqueeze(5), IndexError, "no place 5"),
    "flatten BROADCAST": (lambda: T.unsqueeze(0, "z").flatten("z row"), ValueError, "axis 'z' is BROADCAST"),
    "unflatten": (lambda: T.unflatten("col", p=2, q=2), ValueError, "axis 'col' has size 3, which is not the product"),
    "unflatten labels": (lambda: T.unflatten("row", p=2, q=1), ValueError, "axis 'row'.*are not the product"),
    # selection
    "position": (lambda: T[2], IndexError, "index 2 is out of bounds for dimension 0 with size 2; the axes are 'row', 'col'"),
    "position in a tuple": (lambda: T[:, -4], IndexError, "index -4 is out of bounds for dimension 1 with size 3"),
    "position in a list": (lambda: T[:, [0, 3]], IndexError, "axis 'col' has size 3 and no position 3"),
    "position in a tensor": (lambda: T[:, torch.tensor([3])], IndexError, "index 3 is out of bounds.*'col'"),
    "position in a matrix": (lambda: T[:, torch.tensor([[3]])], IndexError, "index 3 is out of bounds.*'col'"),
    "too many": (lambda: T[0, 0, 0], IndexError, "more axes than there are: 3; the axes are 'row', 'col'"),
    "two dots": (lambda: T[..., ...], IndexError, "more than one"),
    "two truths": (lambda: T[True, True], IndexError, "truth value"),
    "a label": (lambda: T["a"], TypeError, r"select by label with t.sel\(axis='a'\)"),
    "a float": (lambda: T[1.0], TypeError, "not 1.0"),
    "a float tensor": (lambda: T[torch.tensor([1.0])], IndexError, "torch.float32 can't be an index"),
    "a step of zero": (lambda: T[::0], ValueError, "step cannot be zero"),
    "label twice": (lambda: T[[0, 0]], ValueError, "label 'a' of axis 'row' more than once"),
    "label twice, counted from the end": (lambda: T[[0, -2]], ValueError, "label 'a' of axis 'row' more than once"),
    "mask": (lambda: T[torch.ones(3, dtype=torch.bool)], IndexError, "mask \\[3\\] at index 0.*'row'"),
    "matrix mask": (lambda: T[torch.ones(2, 2, dtype=torch.bool)], IndexError, r"\(2, 2\) does not fit .* axis 'row'"),
    "mask of another axis": (lambda: T[mo.ones(col=3) > 0], IndexError, r"'col'\) does not fit"),
    "space": (lambda: T[Space(["a", "z"])], UnknownLabelError, "axis 'row', .* has no label 'z'"),
    "space of another name": (lambda: T[Space(["a"], "z")], IndexError, "axis 'row'.*can't be indexed by .* another name"),
    "space beyond": (lambda: T[:, Space([0, 7])], IndexError, "axis 'col' has size 3 and no position 7"),
    "negative space": (lambda: T[:, Space([-1])], IndexError, "axis 'col'.*positional|axis 'col' has no label -1"),
    "sel": (lambda: T.sel(row="z"), KeyError, "axis 'row' has no label 'z'"),
    "sel position": (lambda: T.sel(col=3), KeyError, "axis 'col' has size 3 and no position 3"),
    "sel negative": (lambda: T.sel(col=-1), KeyError, "axis 'col'.*positional|axis 'col' has no label -1"),
    "sel a word as position": (lambda: T.sel(col="z"), KeyError, "axis 'col' has no label 'z'.*positional"),
    "sel positions": (lambda: T.sel(col=[0, 3]), KeyError, "axis 'col' has size 3 and no position 3"),
    "sel unhashable": (lambda: T.sel(row=[["z"]]), TypeError, "labels must be hashable"),
    "sel axis": (lambda: T.sel(depth="z"), KeyError, "no axis named 'depth'"),
    "sel slice": (lambda: T.sel(row=slice(1)), TypeError, "1 can't be compared with the labels of axis 'row'"),
    "isel axis": (lambda: T.isel(depth=0), KeyError, "no axis named 'depth'"),
    "isel position": (lambda: T.isel(row=2), IndexError, "index 2 is out of bounds for dimension 0"),
    # putting together
    "cat nothing": (lambda: mo.cat([]), ValueError, "at least one"),
    "cat labels": (lambda: mo.cat([T, T], "row"), ValueError, "labels of axis 'row' .* 'a' occurs more than once"),
    "cat mixed": (lambda: mo.cat([T, T.relabel("row", None)], "row"), ValueError, "axis 'row' has labels in some"),
    "cat axes": (lambda: mo.cat([T, T.rename(col="c")], "row"), ValueError, "same axes"),
    "cat names": (lambda: mo.cat([T, BARE.rename([None, "row"])], 1), ValueError, "different names, 'col' and 'row'"),
    "stack labels": (lambda: mo.stack([T, T], "n", labels=["a"]), ValueError, "2 tensors were given, but 1 labels"),
    "split": (lambda: T.split([1, 1, 1], "row"), ValueError, "axis 'row' can't be split .* sum exactly to 2"),
    "topk": (lambda: T.topk(4, "col"), ValueError, "k=4 .* the size 3 of axis 'col'"),
    "diagonal": (lambda: T.diagonal(), ValueError, "axis 'row' has size 2 and axis 'col' size 3"),
    "offset diagonal": (lambda: torch.diagonal(T, 1), TypeError, "different labels"),
    "index_add labels": (lambda: T.index_add("row", None, T.relabel(row=["a", "z"])), KeyError, "no label 'z'"),
    "index_add names": (
        lambda: T.rename(["row", None]).index_add(0, [0, 1], T.rename(["q", None])), ValueError,
        "different names, 'row' and 'q'",
    ),
    "one_hot": (lambda: mo.tensor([3], "x").one_hot(3), ValueError, "3 classes, but the numbers run from 3 to 3"),
    "one_hot floats": (lambda: T.one_hot(3), TypeError, "takes integers"),
    # values
    "item": (lambda: T.item(), ValueError, r"shape \(2, 3\) has 6"),
    "truth": (lambda: bool(T), ValueError, "6 elements is ambiguous"),
    "truth of nothing": (lambda: bool(T[:0]), RuntimeError, "0 elements is ambiguous"),
    "len": (lambda: len(mo.tensor(1.0)), TypeError, "without axes"),
    "iteration": (lambda: iter(mo.tensor(1.0)), TypeError, "without axes"),
    "attach": (lambda: mo.tensor([1]).attach(), TypeError, "torch.int64 can't have gradients"),
    "gradient": (lambda: (T.attach() * 2).backward(mo.ones(z=2)), ValueError, "does not fit"),
    "vmap": (lambda: mo.vmap(lambda t: t, over="z")(T), ValueError, "no argument has an axis named 'z'"),
    "softmax": (lambda: torch.nn.functional.softmax(T), TypeError, "needs dim="),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_operations_raise_with_the_expected_message(case):
    act, error, message = REFUSED[case]
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        act()
    # The second call raises too, so no failed plan is cached.
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        act()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: torch.cov(T), "torch.cov"),
        (lambda: torch.fft.fft(T), "fft"),
        (lambda: torch.cdist(T, T), "cdist"),
        (lambda: torch.nn.functional.conv1d(T, T), "conv1d"),
        (lambda: torch.nn.functional.layer_norm(T, (3,)), "layer_norm"),
        (lambda: torch.zeros(2, 3).add_(T), "torch.Tensor.add_"),
        (lambda: torch.zeros(2, 3)[T > 0], "__getitem__"),
        (lambda: torch.nonzero(T), "torch.nonzero"),
        (lambda: torch.gather(T, 0, T), "torch.gather"),
    ],
)
def test_functions_without_a_rule_raise(function, name):
    with pytest.raises(TypeError, match=rf"{name}.* has no rule for labelled tensors.*t\.data"):
        function()


def test_no_function_of_torch_drops_labels():
    """Every overridable function of torch has a rule or raises; none returns a plain tensor by default."""
    from torch.overrides import get_overridable_functions

    plain = [
        function
        for functions in get_overridable_functions().values()
        for function in functions
        if function not in RULES and derive_rule(function) is None
    ]
    assert len(plain) > 100
    for function in plain[::25]:
        with pytest.raises(TypeError, match="has no rule"):
            Tensor.__torch_function__(function, (Tensor,), (T,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (0, mo.zeros(col=4)),
        (0, mo.zeros(row=["a", "b"])),
        (slice(None), mo.zeros(row=["a", "z"], col=3)),
        (slice(None), torch.zeros(2, 2)),
        (slice(None), torch.zeros(1)),
        ((0, 5), 1.0),
        ([0, 5], 1.0),
        ("a", 1.0),
        (Space(["z"]), 1.0),
        (0, "text"),
        (0, [[1.0]]),
        (0, None),
        (torch.ones(3, dtype=torch.bool), 0.0),
    ],
)
def test_a_failed_assignment_changes_nothing(key, value):
    t = T.clone()
    with pytest.raises((ValueError, IndexError, KeyError, TypeError)):
        t[key] = value
    assert torch.equal(t.data, T.data)


def test_unfit_tensors_refuse_label_operations():
    unfit = torch.utils._pytree.tree_map(lambda leaf: leaf[0], T)
    operations = (
        lambda: unfit + T, lambda: T + unfit, lambda: unfit + unfit, lambda: unfit.sum("row"), lambda: unfit.dims,
        lambda: unfit.names, lambda: unfit[0], lambda: unfit.rename("x"), lambda: unfit @ T, lambda: mo.cat([unfit, unfit]),
        lambda: unfit.permute(0), lambda: mo.einsum("i->i", unfit), lambda: unfit.sel(row="a"), lambda: unfit.sort(),
    )  # fmt: skip
    for act in operations:
        with pytest.raises(ValueError, match=r"no longer fits its axes.*'row', 'col'"):
            act()
    assert "no longer fits" in repr(unfit)
    assert torch.equal(unfit.data, T.data[0])


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: a + b,
        lambda a, b: torch.nn.functional.mse_loss(a, b),
        lambda a, b: mo.dot(a, b, over="j"),
        lambda a, b: mo.einsum("i j, i j -> i", a, b),
        lambda a, b: mo.matmul(a, b.T.rename(i="k")),
        lambda a, b: a @ b.T.rename(i="k"),
        lambda a, b: mo.where(a > 0, a, b),
        lambda a, b: mo.stack([a, b], "k"),
    ],
)
def test_errors_of_different_sizes_name_the_axis(combine):
    with pytest.raises(ValueError, match=r"'j'.* 8 .*and 7"):
        combine(mo.tensor(torch.ones(2, 8), "i j"), mo.tensor(torch.ones(2, 7), "i j"))


def test_errors_of_different_sizes_give_the_position_of_an_unnamed_axis():
    with pytest.raises(ValueError, match=r"8 \(axis 1\) and 7 \(axis 0\)"):
        mo.ones(2, 8) + mo.ones(7)
    with pytest.raises(ValueError, match=r"'j': 8 and 7"):
        mo.tensor(torch.ones(2, 8), "i j") @ mo.ones(7)


@pytest.mark.parametrize(
    ("how", "only"), [("outer", r"only on the right: \['d'\]"), ("inner", r"only on the left: \['a', 'b'\]")]
)
def test_labels_that_a_join_would_change_in_place_are_named(how, only):
    tensor, value = mo.tensor([1.0, 2.0, 3.0], x=["a", "b", "c"]), mo.tensor([1.0, 2.0], x=["c", "d"])
    with (
        mo.join(how),
        pytest.raises(ValueError, match=rf"under mo.join\('{how}'\) the labels would become others.*{only}"),
    ):
        tensor += value
    assert tensor.tolist() == [1.0, 2.0, 3.0]
