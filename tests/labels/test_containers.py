"""Labelled tensors in what torch does with containers: batches, checkpoints, dataclasses."""

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


def same(a, b):
    assert type(a) is mo.Tensor
    assert a.dims == b.dims
    assert torch.equal(a.data, b.data)


def test_a_batch_of_labelled_tensors_is_stacked():
    samples = [(A + i, {"target": i}) for i in range(4)]
    first, second = DataLoader(samples, batch_size=2)
    same(second[0], mo.stack([A + 2, A + 3]))
    assert second[1]["target"].tolist() == [2, 3]
    assert first[0].sel(batch="q").data.tolist() == [[3.0, 4.0], [4.0, 5.0]]
    with pytest.raises(ValueError):
        torch.utils.data.default_collate([A, mo.tensor([[1.0, 2.0]], batch=["r"], feature=2)])


@pytest.mark.parametrize("index", range(len(TENSORS)))
def test_weights_only_loading(index):
    file = io.BytesIO()
    torch.save({"t": TENSORS[index]}, file)
    file.seek(0)
    same(torch.load(file, weights_only=True)["t"], TENSORS[index])


def test_weights_only_loading_before_the_room_is_used(tmp_path):
    torch.save(A, tmp_path / "a.pt")
    program = (
        "import sys, torch, moduli; assert 'moduli.labels' not in sys.modules;"
        f"print(torch.load({str(tmp_path / 'a.pt')!r}, weights_only=True))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == str(A)


@pytest.mark.parametrize("index", range(len(TENSORS)))
def test_it_is_a_dataclass_of_what_it_is_made_of(index):
    t = TENSORS[index]
    assert [field.name for field in dataclasses.fields(t)] == ["data", "dims"]
    same(dataclasses.replace(t), t)
    same(dataclasses.replace(t, data=t.data + 1), t + 1)
    assert pprint.pformat(t) == repr(t)


def test_a_replaced_part_keeps_its_history():
    x = torch.ones(2, requires_grad=True)
    dataclasses.replace(mo.tensor(x * 2, "a")).sum().data.backward()
    assert x.grad.tolist() == [2.0, 2.0]
