"""Labelled tensors in batches of a DataLoader, in checkpoints, and as dataclasses."""

import dataclasses
import io
import pprint
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import moduli as mo

A = mo.tensor([[1.0, 2.0], [3.0, 4.0]], batch=["p", "q"], feature=2)
TENSORS = [A, mo.tensor(torch.ones(2, 3), "b out"), mo.zeros(3), mo.tensor(2.0), mo.ones(x=["a", ("b", 1), 2.5])]


def assert_same(a, b):
    assert type(a) is mo.Tensor
    assert a.dims == b.dims
    assert torch.equal(a.data, b.data)


def test_a_batch_of_labelled_tensors_is_stacked():
    samples = [(A + i, {"target": i}) for i in range(4)]
    first, second = DataLoader(samples, batch_size=2)
    assert_same(second[0], mo.stack([A + 2, A + 3]))
    assert second[1]["target"].tolist() == [2, 3]
    assert first[0].sel(batch="q").data.tolist() == [[3.0, 4.0], [4.0, 5.0]]
    with pytest.raises(ValueError):
        torch.utils.data.default_collate([A, mo.tensor([[1.0, 2.0]], batch=["r"], feature=2)])


@pytest.mark.parametrize("index", range(len(TENSORS)))
def test_labelled_tensors_are_loaded_with_weights_only(index):
    file = io.BytesIO()
    torch.save({"t": TENSORS[index]}, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True)["t"], TENSORS[index])


def test_weights_only_loading_works_before_moduli_labels_is_imported(tmp_path):
    torch.save(A, tmp_path / "a.pt")
    program = (
        "import sys, torch, moduli; assert 'moduli.labels' not in sys.modules;"
        f"print(torch.load({str(tmp_path / 'a.pt')!r}, weights_only=True))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert process.stdout.strip() == str(A)


@pytest.mark.parametrize("index", range(len(TENSORS)))
def test_a_labelled_tensor_is_a_dataclass_of_data_and_dims(index):
    t = TENSORS[index]
    assert [field.name for field in dataclasses.fields(t)] == ["data", "dims"]
    assert_same(dataclasses.replace(t), t)
    assert_same(dataclasses.replace(t, data=t.data + 1), t + 1)
    assert pprint.pformat(t) == repr(t)


def test_dataclasses_replace_keeps_the_graph_of_autograd():
    x = torch.ones(2, requires_grad=True)
    dataclasses.replace(mo.tensor(x * 2, "a")).sum().data.backward()
    assert x.grad.tolist() == [2.0, 2.0]
