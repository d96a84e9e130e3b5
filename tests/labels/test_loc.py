"""`loc`: reading and writing by label, compared with positions."""

import numpy as np
import pytest
import torch

import moduli as mo

T = mo.tensor(torch.arange(12.0).reshape(3, 4), row=["a", "b", "c"], column=[10, 20, 30, 40])

KEYS = {
    "one": ("a", (0,)),
    "several": (["c", "a"], ([2, 0],)),
    "slice": (slice("b", "c"), (slice(1, 3),)),
    "two": (("b", slice(20, 30)), (1, slice(1, 3))),
    "dots": ((..., 40), (slice(None), 3)),
    "mapping": ({"column": [40, 10]}, (slice(None), [3, 0])),
    "mask": (np.array([True, False, True]), (torch.tensor([True, False, True]),)),
    "mask and label": ((np.array([True, False, True]), 20), ([0, 2], 1)),
}


@pytest.mark.parametrize(("key", "positions"), KEYS.values(), ids=KEYS)
def test_loc_equals_indexing_by_position(key, positions):
    assert mo.equal(T.loc[key], T[positions])
    by_label, by_position = T.clone(), T.clone()
    by_label.loc[key] = T[positions] * 10
    by_position[positions] = T[positions] * 10
    assert torch.equal(by_label.data, by_position.data)
    by_label.loc[key] = -1.0
    assert (by_label.loc[key] == -1.0).all()
    assert (by_label.data == -1.0).sum() == T[positions].numel()


def test_written_values_pair_by_label_and_both_tensors_get_gradients():
    leaf = torch.zeros(3, 4, requires_grad=True)
    value = mo.tensor([1.0, 2.0], row=["c", "a"]).attach()
    t = mo.Tensor(leaf, T.dims) * 1
    t.loc[["a", "c"], 20] = value
    assert t.loc[:, 20].tolist() == [2.0, 0.0, 1.0]
    (t * T).sum().backward()
    assert value.grad.tolist() == [9.0, 1.0]
    assert leaf.grad[0, 1] == leaf.grad[2, 1] == 0
    assert leaf.grad[1, 1] == 5.0
    with pytest.raises(RuntimeError, match="leaf"):
        T.attach().loc["a"] = 0.0
    with pytest.raises(ValueError, match="labels of axis 'row' differ"):
        T.clone().loc[["a", "b"], 20] = value


def test_entries_are_assigned_by_axis_name_and_position():
    t = T.clone()
    t[{"column": 0, "row": slice(1, None)}] = mo.tensor([5.0, 7.0], row=["c", "b"])
    assert t.isel(column=0).tolist() == [0.0, 7.0, 5.0]
    assert mo.equal(t[{"column": [0]}], t.isel(column=[0]))
    t.loc[t > 6] = 0.0
    assert t.amax().item() == 6.0


@pytest.mark.compiles_labels
def test_writing_compiles_to_one_graph_and_works_under_transforms():
    def write(t):
        t = t.clone()
        t.loc["b"] = t.loc["a"] * 2
        t[{"column": 0}] = 0.0
        return t

    torch._dynamo.reset()
    assert mo.equal(torch.compile(write, fullgraph=True, backend="eager")(T), write(T))
    many = mo.stack([T, T + 1], "n")
    assert mo.equal(mo.vmap(write, over="n")(many), mo.stack([write(T), write(T + 1)], "n"))
    gradient = torch.func.grad(lambda t: write(t).sum())(T)
    assert gradient.loc[:, 20].tolist() == [3.0, 0.0, 1.0]


def test_unknown_labels_and_axes_are_refused():
    for key, match in (
        (("a", 10, 3), "more axes than there are"),
        ("z", "no label 'z'"),
        ((..., ...), "more than one"),
    ):
        with pytest.raises(IndexError, match=match):
            T.loc[key]


def test_written_values_are_converted_only_without_truncation():
    t = mo.zeros(x=["a", "b", "c"], dtype=torch.float64)
    t.loc[["a", "b"]] = mo.tensor([1.0, 2.0], x=["b", "a"])  # single precision
    t.loc["c"] = torch.tensor(3)
    assert t.tolist() == [2.0, 1.0, 3.0]
    with pytest.raises(TypeError, match="does not fit"):
        t.loc[["a", "b"]] = torch.tensor([1j, 2.0])
    with pytest.raises(TypeError, match="does not fit"):
        mo.tensor([1, 2], x=["a", "b"]).loc[["a"]] = torch.tensor([1.5])


def test_entries_are_written_to_other_entries_of_the_same_tensor():
    t = T.clone()
    t.loc["a"] = t.loc["c"]
    t[{"column": [0, 1]}] = t.isel(column=[1, 0]).relabel(column=[10, 20])
    assert t.tolist() == [[9.0, 8.0, 10.0, 11.0], [5.0, 4.0, 6.0, 7.0], [9.0, 8.0, 10.0, 11.0]]
