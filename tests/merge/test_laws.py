"""Laws of every recipe, over random module trees.

Drawing a tree costs more than merging it, so each example is merged with all recipes.
"""

import copy
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from merge.helpers import FLOATING, RECIPES, Described, Lazy, assert_same, get_tensors, is_averaged, siblings
from moduli import merge
from moduli.layout import diff, layout_of
from moduli.merge import make_recipe, stream
from strategies import ALL_DTYPES, modules

few = settings(max_examples=20)
seeds = st.integers(0, 100)
policies = st.sampled_from(["first", "merge"])


@few
@given(net=modules(ALL_DTYPES), seed=seeds, policy=policies)
def test_a_result_is_a_new_model_like_the_first_and_inputs_do_not_change(net, seed, policy):
    models = siblings(net, 3, seed)
    before = copy.deepcopy(models)
    versions = [[t._version for t in get_tensors(model).values()] for model in models]
    input_memory = {t.data_ptr() for model in models for t in get_tensors(model).values() if t.numel()}
    for recipe in RECIPES.values():
        result = recipe(models, buffers=policy)
        assert type(result) is type(net)
        assert diff(result, net) is None
        assert layout_of(result).buffers == layout_of(net).buffers
        assert not input_memory & {t.data_ptr() for t in get_tensors(result).values() if t.numel()}
        for name, parameter in result.named_parameters():
            assert parameter.is_leaf
            assert parameter.grad is None
            assert parameter.requires_grad == net.get_parameter(name).requires_grad
        for name, tensor in get_tensors(result).items():
            if not is_averaged(tensor):
                assert torch.equal(tensor, get_tensors(models[0])[name])
    for model, previous, version in zip(models, before, versions, strict=True):
        assert_same(model, previous)
        assert [t._version for t in get_tensors(model).values()] == version


@few
@given(net=modules(ALL_DTYPES), seed=seeds)
def test_merging_state_dicts_equals_merging_modules(net, seed):
    for module in net.modules():
        module._non_persistent_buffers_set.clear()  # a state dict lacks them, which would change the angle of whole models
    models = siblings(net, 3, seed)
    declared = {name: "first" for name, _ in net.named_buffers()}
    for recipe in RECIPES.values():
        expected = recipe(models, buffers="merge").state_dict()
        merged = recipe([model.state_dict() for model in models], buffers="merge")
        assert_same(merged, expected)
        assert merged._metadata == expected._metadata
        # Modules declare which tensors are buffers; state dicts need patterns to leave them unmerged.
        assert_same(recipe([model.state_dict() for model in models], buffers=declared), recipe(models).state_dict())


@few
@given(net=modules(FLOATING, ties=False), seed=seeds)
def test_results_do_not_depend_on_the_order_of_names_or_on_lazy_reading(net, seed):
    states = [dict(model.state_dict()) for model in siblings(net, 3, seed)]
    for recipe in RECIPES.values():
        result = recipe(states)
        assert_same(recipe([states[0], *(dict(reversed(state.items())) for state in states[1:])]), result)
        backwards = recipe([dict(reversed(state.items())) for state in states])
        assert list(backwards) == list(reversed(result))
        for name, tensor in result.items():
            torch.testing.assert_close(backwards[name], tensor)
        assert_same(recipe([Lazy(state) for state in states]), result)
        assert_same(recipe([Described(state) for state in states]), result)


@few
@given(net=modules(FLOATING), seed=seeds, policy=policies)
def test_merging_equal_models_returns_them_bit_for_bit(net, seed, policy):
    model = siblings(net, 1, seed)[0]
    for recipe in RECIPES.values():
        assert_same(recipe([model, copy.deepcopy(model), copy.deepcopy(model)], buffers=policy), model)


# Recipes whose result depends on the order of the models.
ORDERED = ("dare", "lerp", "slerp", "linear", "nuslerp", "nearswap", "arcee")


@few
@given(net=modules(FLOATING), seed=seeds, order=st.permutations([1, 2, 3]))
def test_symmetric_recipes_do_not_depend_on_the_order_of_the_models(net, seed, order):
    models = siblings(net, 4, seed)
    for name, recipe in RECIPES.items():
        if not name.startswith(ORDERED):
            other = recipe([models[0], *(models[index] for index in order)])
            assert_same(recipe(models), other, exactly=False)


@few
@given(net=modules((torch.float16, torch.bfloat16)), seed=seeds)
def test_half_precision_is_merged_in_float32_and_rounded_once(net, seed):
    models = siblings(net, 3, seed)
    wide = [copy.deepcopy(model).float() for model in models]
    for name, recipe in RECIPES.items():
        rounded = get_tensors(recipe(wide))
        for path, tensor in get_tensors(recipe(models)).items():
            assert torch.equal(tensor, rounded[path].to(tensor.dtype)), (name, path)


@few
@given(net=modules(FLOATING, gaps=False), seed=seeds)
def test_streaming_returns_the_same_tensors_one_at_a_time(net, seed):
    states = [dict(model.state_dict()) for model in siblings(net, 2, seed)]
    recipe = make_recipe("linear", 2, {"weights": [3.0, 1.0]})
    streamed = {name: value for names, value in stream(recipe, states) for name in names}
    expected = merge.linear(states, [3, 1])
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], expected[name]) for name in streamed)


def test_a_stream_reads_lazily_and_does_not_change_the_gradient_mode():
    files = [Described({f"{i}": torch.randn(2) for i in range(3)}) for _ in range(2)]
    values = stream(make_recipe("linear", 2, {}), files)
    assert files[0].reads == []
    next(values)
    assert torch.is_grad_enabled()
    assert set(files[0].reads) == set(files[1].reads) == {"0"}
    assert [names for names, _ in values] == [("1",), ("2",)]


class Meter(TorchDispatchMode):
    """A mode that measures the peak of bytes in large tensors, except the given ones."""

    def __init__(self, ignored):
        super().__init__()
        self.ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= 1000 and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive and key not in self.ignored:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


# Recipes that need memory for seven or three tensors beside the result; ties need seven, all others one.
SEVEN, THREE = ("nuslerp of tasks", "arcee fusion", "nearswap", "ram"), ("dare", "stock", "multislerp")


@pytest.mark.parametrize("name", RECIPES)
def test_memory_beside_the_result_does_not_grow_with_the_models(name):
    def tensors_beside(names, count):
        states = [{f"{i}": torch.randn(1000) for i in range(names)} for _ in range(count)]
        with Meter([tensor for state in states for tensor in state.values()]) as meter:
            result = RECIPES[name](states)
        assert len(result) == names
        return meter.peak / 4000 - names

    baseline = tensors_beside(3, 3)
    if name != "ties of whole vectors":  # its counters are as large as a hundred of these tensors
        assert baseline <= (7 if name in SEVEN or "ties" in name else 3 if name in THREE or "slerp of" in name else 1)
    assert tensors_beside(30, 3) <= baseline + 1
    assert tensors_beside(3, 12) <= baseline + 1


@few
@given(net=modules(FLOATING), seed=seeds)
def test_merging_under_no_grad_gives_the_same_result(net, seed):
    models = siblings(net, 2, seed)
    with torch.no_grad():
        without_grad = merge.linear(models)
    assert_same(without_grad, merge.linear(models))


def test_modules_and_state_dicts_mix_and_the_first_decides_the_kind():
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    module = merge.linear([a, b.state_dict()])
    state = merge.linear([a.state_dict(), b])
    assert isinstance(module, nn.Linear)
    assert_same(state, module.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_merging_in_chunks_equals_merging_whole_tensors(dtype, monkeypatch):
    torch.manual_seed(0)
    models = [{"w": torch.randn(37, 53).to(dtype), "t": torch.randn(29, 31).to(dtype).T} for _ in range(3)]
    merges = [
        lambda: merge.lerp(models[0], models[1], 0.3),
        lambda: merge.linear(models, [1, 2, 0]),
        lambda: merge.task_arithmetic(models[0], models[1:], [0.5, -0.2]),
        lambda: merge.task_vector(models[0], models[1]),
        lambda: merge.lerp(models[0], models[0], 0.4),
    ]
    whole = [make() for make in merges]
    monkeypatch.setattr("moduli.merge._driver._PIECE", 64)
    for make, expected in zip(merges, whole, strict=True):
        merged = make()
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], expected[name]) for name in merged)
    models[1]["w"][30, 3] = float("nan")
    with pytest.raises(merge.MergeError, match=r"'w' of b has values that are NaN"):
        merge.lerp(models[0], models[1], 0.5)
