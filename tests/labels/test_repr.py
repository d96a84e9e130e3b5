"""The repr and HTML of labelled tensors: complete for small tensors, abbreviated for large ones, and never an error."""

from __future__ import annotations

import math
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from moduli.labels import BROADCAST, Space, Tensor
from moduli.labels._axes import UnfitAxes
from moduli.labels._factories import tensor, zeros
from moduli.labels._like import arange
from moduli.labels._repr import html, text
from moduli.labels._tensor import wrap


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (tensor([1.0, 1.0], column=["a", "b"]), "Tensor(column: a=1., b=1.)"),
        (tensor([1.41421, 2.82843], x=["a", "b"]), "Tensor(x: a=1.4142, b=2.8284)"),
        (tensor(3.5), "Tensor(3.5)"),
        (tensor(7), "Tensor(7)"),
        (tensor(2.0), "Tensor(2.)"),
        (tensor([1.0, 2.0, 3.0], "x"), "Tensor(x: [1., 2., 3.])"),
        (tensor([1.0, 2.0, 3.0]), "Tensor([1., 2., 3.])"),
        (tensor([1.0, 2.0], dtype=torch.float64), "Tensor([1., 2.], dtype=torch.float64)"),
        (tensor([1.0], "x", requires_grad=True), "Tensor(x: [1.], requires_grad=True)"),
        (tensor([True, False]), "Tensor([True, False])"),
        (tensor([1 + 2j, complex(0, -0.5)]), "Tensor([1.+2.0000j, 0.-0.5000j])"),
        (tensor([1.0, math.nan, math.inf]), "Tensor([1., nan, inf])"),
        (tensor([1.0, 2000.0]), "Tensor([1.0000e+00, 2.0000e+03])"),
        (tensor([], "x"), "Tensor(x: [])"),
        (tensor([], x=[]), "Tensor(x: [])"),
        (zeros(3, 0), "Tensor(3, 0)"),
        (zeros(2, 3, device="meta"), "Tensor(2, 3, device='meta')"),
        (zeros(x=["a"], device="meta"), "Tensor(x: ['a'], device='meta')"),
        (zeros(device="meta"), "Tensor(..., device='meta')"),
        (tensor([1.0], BROADCAST=None), "Tensor(BROADCAST: [1.])"),
        (tensor([1.0], y=BROADCAST), "Tensor(y: BROADCAST: [1.])"),
        (tensor([1.0, 2.0], x=["a b", ("t", 1)]), "Tensor(x: 'a b'=1., ('t', 1)=2.)"),
        (tensor([1, 2]), "Tensor([1, 2])"),
        (arange(12), "Tensor([0, 1, 2, 3, 4, ..., 7, 8, 9, 10, 11])"),
    ],
)
def test_small_tensors_are_printed_on_one_line(t: Tensor, expected: str) -> None:
    assert repr(t) == expected


def test_matrices_are_printed_as_tables() -> None:
    t = Tensor(torch.tensor([[1.0, 0.0], [0.0, -1.5]]), (Space(2, "row"), Space(["a", "long"], "column")))
    assert repr(t) == (
        "Tensor(row: 2, column: ['a', 'long'])\n"
        "        a     long\n"
        "0  1.0000   0.0000\n"
        "1  0.0000  -1.5000"
    )  # fmt: skip


def test_tensors_of_more_axes_are_printed_with_brackets() -> None:
    t = tensor(torch.arange(8).reshape(2, 2, 2), "i j k")
    assert repr(t) == "Tensor(i: 2, j: 2, k: 2)\n[[[0, 1],\n  [2, 3]],\n\n [[4, 5],\n  [6, 7]]]"


def test_grad_fn_is_printed() -> None:
    x = tensor([1.0], "x", requires_grad=True)
    assert "grad_fn=<MulBackward0>" in repr(x * 2)


dtypes = st.sampled_from(
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
)


@given(shape=st.lists(st.integers(0, 40), max_size=4), dtype=dtypes, named=st.booleans(), labels=st.booleans())
def test_the_repr_is_always_short(shape: list[int], dtype: torch.dtype, named: bool, labels: bool) -> None:
    dims = [
        Space([("label", i, "x" * 30) for i in range(n)] if labels else n, f"axis{axis}" if named else None)
        for axis, n in enumerate(shape)
    ]
    t = Tensor(torch.ones(shape, dtype=dtype), dims)
    lines = repr(t).split("\n")
    assert len(lines) < 200
    assert all(len(line) <= 120 for line in lines[1:])
    assert html(t).count("<div") == html(t).count("</div>")


@pytest.mark.parametrize(
    "shape", [(200, 1, 1), (14, 14, 1, 1), (5, 5, 5, 40), (40, 40, 40, 40), (8, 8, 15), (4,) * 6, (2,) * 20]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_tensors_of_many_rows_are_abbreviated(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    t = tensor((torch.arange(math.prod(shape)).reshape(shape) / 3).to(dtype))
    lines = repr(t).split("\n")
    assert len(lines) < 200
    assert all(len(line) <= 120 for line in lines[1:])


def test_abbreviated_brackets_have_the_entries_at_both_ends() -> None:
    t = tensor(torch.arange(900).reshape(100, 3, 3))
    expected = """Tensor(100, 3, 3)
[[[  0,   1,   2],
  [  3,   4,   5],
  [  6,   7,   8]],

 [[  9,  10,  11],
  [ 12,  13,  14],
  [ 15,  16,  17]],

 [[ 18,  19,  20],
  [ 21,  22,  23],
  [ 24,  25,  26]],

 ...,

 [[873, 874, 875],
  [876, 877, 878],
  [879, 880, 881]],

 [[882, 883, 884],
  [885, 886, 887],
  [888, 889, 890]],

 [[891, 892, 893],
  [894, 895, 896],
  [897, 898, 899]]]"""
    assert repr(t) == expected


def test_long_axes_are_abbreviated_without_reading_all_labels() -> None:
    t = Tensor(torch.zeros(10**6, 2), (Space(range(10**6), "time"), Space(2, "x")))
    tracemalloc.start()
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        text = repr(t)
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(calls) < 50_000  # reading each of the million labels takes more
    assert peak < 5_000_000  # a list of them takes more
    assert "time: range(0, 1000000)" in text
    assert "999999" in text
    assert len(text.split("\n")) == 11


class Odd:
    """A label whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_labels_with_long_failing_or_multiline_reprs_are_printed() -> None:
    t = tensor([[1.0, 2.0]], row=["x" * 500], column=[Odd(), "line\nbreak"])
    text = repr(t)
    assert "<Odd>" in text
    assert len(text.split("\n")) == 3
    assert len(text) < 300


# -- where there are no values -----------------------------------------------------------------------------------------


def test_tensors_without_values_in_transforms_are_printed() -> None:
    texts: list[str] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        texts.append(repr(tensor(x, "x")))
        texts.append(html(tensor(x, "x")))
        return x.sum()

    torch.func.vmap(record)(torch.ones(2, 3))
    torch.func.grad(record)(torch.ones(3))
    with FakeTensorMode():
        record(torch.ones(3))
    assert all("x: 3" in each for each in texts)
    concrete = tensor([1.0, 2.0], "x")
    torch.func.vmap(lambda x: (texts.append(repr(concrete)), x)[1])(torch.ones(2))
    assert texts[-1] == "Tensor(x: [1., 2.])"
    torch.fx.experimental.proxy_tensor.make_fx(record)(torch.ones(3))


def test_tensors_that_do_not_fit_their_axes_are_printed() -> None:
    t = tensor(torch.zeros(2, 3), "row column")
    for unfit in (wrap(torch.zeros(3), UnfitAxes.of(t._axes)), wrap(torch.zeros(3), t._axes)):
        assert repr(unfit) == "Tensor(data of shape (3,) that no longer fits the axes (row, column))"
        assert "no longer fits" in html(unfit)
    labelled = tensor([1.0, 2.0], x=["a", "b"])
    assert "no longer fits" in text(wrap(torch.zeros(3), labelled._axes))


def test_sparse_data_has_no_values_to_show() -> None:
    assert repr(wrap(torch.eye(2).to_sparse(), tensor(torch.eye(2), "i j")._axes)).startswith("Tensor(i: 2, j: 2")


# -- HTML --------------------------------------------------------------------------------------------------------------


def test_html_is_escaped_and_self_contained() -> None:
    page = tensor([[1.0, 2.0]], row=["<script>"], column=["&", "b"])._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&amp;" in page
    assert "<table" in page
    for outside in ("http", "src=", "url("):
        assert outside not in page


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (20, 30), (2, 2, 2), (0,), (2, 0)])
def test_html_of_every_rank(shape: tuple[int, ...]) -> None:
    page = html(zeros(*shape))
    assert "Tensor(" in page
    assert page.count("<td") <= 81
    assert "<table" not in html(zeros(2, device="meta"))
    assert "<pre" not in html(zeros(2, 2, 2, device="meta"))
