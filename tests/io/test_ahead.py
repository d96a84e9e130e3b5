"""An iterator that is run in a thread: order, errors, memory, and the end of the thread."""

import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

import moduli.io as mio
from moduli import merge
from moduli.io._ahead import run_ahead


def count_threads():
    return sum(thread.name == "moduli-ahead" for thread in threading.enumerate())


def test_items_come_in_order_and_the_thread_ends():
    with run_ahead(iter(range(100)), 3) as items:
        assert list(items) == list(range(100))
    assert count_threads() == 0


def test_errors_are_raised_where_the_item_would_have_been():
    def fail():
        yield 1
        raise ValueError("no second item")

    with pytest.raises(ValueError, match="no second item"), run_ahead(fail()) as items:
        assert next(items) == 1
        next(items)
    assert count_threads() == 0


@pytest.mark.parametrize("ahead", [1, 2])
def test_whoever_stops_early_stops_the_thread(ahead):
    computed = []

    def compute():
        for at in range(1000):
            computed.append(at)
            yield at

    with pytest.raises(KeyError), run_ahead(compute(), ahead) as items:
        next(items)
        raise KeyError
    assert count_threads() == 0
    assert len(computed) <= ahead + 3


def test_no_more_items_are_alive_than_were_allowed():
    alive, most = weakref.WeakSet(), []

    def compute():
        for _ in range(50):
            item = torch.zeros(1)
            alive.add(item)
            most.append(len(alive))
            yield item
            del item

    with run_ahead(compute(), 1) as items:
        for item in items:
            del item
    assert max(most) <= 4  # one with the caller, one that waits, one being put, one being computed


def test_a_failing_merge_leaves_nothing_behind_and_no_thread(tmp_path):
    good = {f"w{at}": torch.randn(70_000) for at in range(5)}
    bad = {name: value.clone() for name, value in good.items()}
    bad["w3"][69_999] = float("nan")
    for name, model in (("a", good), ("b", {n: v + 1 for n, v in good.items()}), ("c", bad)):
        save_file(model, tmp_path / f"{name}.safetensors")
    with pytest.raises(merge.MergeError, match=r"'w3' of '.*c.safetensors' has values that are NaN"):
        mio.merge_files("lerp", [tmp_path / "a.safetensors", tmp_path / "c.safetensors"], tmp_path / "out", t=0.5)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "c.safetensors"]
    assert count_threads() == 0
    mio.merge_files("lerp", [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "out", t=0.3)
    expected = merge.lerp(good, load_file(tmp_path / "b.safetensors"), 0.3)
    result = load_file(tmp_path / "out")
    assert all(torch.equal(result[name], expected[name]) for name in good)
