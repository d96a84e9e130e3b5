"""How labelled tensors show themselves: exactly for small ones, briefly for large ones, and never with an error."""

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
def test_one_line(t: Tensor, expected: str) -> None:
    assert repr(t) == expected


def test_a_table() -> None:
    t = Tensor(torch.tensor([[1.0, 0.0], [0.0, -1.5]]), (Space(2, "row"), Space(["a", "long"], "column")))
    assert repr(t) == (
        "Tensor(row: 2, column: ['a', 'long'])\n"
        "        a     long\n"
        "0  1.0000   0.0000\n"
        "1  0.0000  -1.5000"
    )  # fmt: skip


def test_more_axes_use_brackets() -> None:
    t = tensor(torch.arange(8).reshape(2, 2, 2), "i j k")
    assert repr(t) == "Tensor(i: 2, j: 2, k: 2)\n[[[0, 1],\n  [2, 3]],\n\n [[4, 5],\n  [6, 7]]]"


def test_history_is_shown() -> None:
    x = tensor([1.0], "x", requires_grad=True)
    assert "grad_fn=<MulBackward0>" in repr(x * 2)


dtypes = st.sampled_from(
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
)


@given(shape=st.lists(st.integers(0, 40), max_size=4), dtype=dtypes, named=st.booleans(), labels=st.booleans())
def test_always_short(shape: list[int], dtype: torch.dtype, named: bool, labels: bool) -> None:
    dims = [
        Space([("label", i, "x" * 30) for i in range(n)] if labels else n, f"axis{axis}" if named else None)
        for axis, n in enumerate(shape)
    ]
    t = Tensor(torch.ones(shape, dtype=dtype), dims)
    lines = repr(t).split("\n")
    assert len(lines) < 200
    assert all(len(line) <= 120 for line in lines[1:])
    assert html(t).count("<div") == html(t).count("</div>")


def test_long_axes_show_their_ends_and_cost_nothing() -> None:
    t = Tensor(torch.zeros(10**6, 2), (Space(range(10**6), "time"), Space(2, "x")))
    tracemalloc.start()
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        shown = repr(t)
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(calls) < 50_000  # a look at each of the million labels takes more
    assert peak < 5_000_000  # and a list of them, too
    assert "time: range(0, 1000000)" in shown
    assert "999999" in shown
    assert len(shown.split("\n")) == 11


class Odd:
    """A label that can't be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_odd_labels() -> None:
    t = tensor([[1.0, 2.0]], row=["x" * 500], column=[Odd(), "line\nbreak"])
    shown = repr(t)
    assert "<Odd>" in shown
    assert len(shown.split("\n")) == 3
    assert len(shown) < 300


# -- where there are no values -----------------------------------------------------------------------------------------


def test_inside_transforms_and_tracers() -> None:
    seen: list[str] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(repr(tensor(x, "x")))
        seen.append(html(tensor(x, "x")))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    with FakeTensorMode():
        look(torch.ones(3))
    assert all("x: 3" in shown for shown in seen)
    known = tensor([1.0, 2.0], "x")
    torch.func.vmap(lambda x: (seen.append(repr(known)), x)[1])(torch.ones(2))
    assert seen[-1] == "Tensor(x: [1., 2.])"
    torch.fx.experimental.proxy_tensor.make_fx(look)(torch.ones(3))


def test_unfit_axes() -> None:
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
    shown = tensor([[1.0, 2.0]], row=["<script>"], column=["&", "b"])._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "&amp;" in shown
    assert "<table" in shown
    for outside in ("http", "src=", "url("):
        assert outside not in shown


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (20, 30), (2, 2, 2), (0,), (2, 0)])
def test_html_of_every_rank(shape: tuple[int, ...]) -> None:
    shown = html(zeros(*shape))
    assert "Tensor(" in shown
    assert shown.count("<td") <= 81
    assert "<table" not in html(zeros(2, device="meta"))
    assert "<pre" not in html(zeros(2, 2, 2, device="meta"))
