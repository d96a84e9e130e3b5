"""Buffers, integers, labels, ties, dtypes and structures in every recipe, and the errors for models that do not fit."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from merge.helpers import (
    RECIPES,
    BatchNormNet,
    Described,
    Lazy,
    Node,
    Tied,
    TwoParts,
    assert_same,
    get_tensors,
    raises_merge_error,
    siblings,
    state,
)
from moduli import merge
from moduli.merge import MergeError
from strategies import edit, modules

few = settings(max_examples=40)


def check_all_recipes_raise(models, *parts, **how):
    for recipe in RECIPES.values():
        before = copy.deepcopy([dict(get_tensors(model)) for model in models])
        with raises_merge_error(*parts):
            recipe(models, **how)
        for model, values in zip(models, before, strict=True):
            for name, tensor in get_tensors(model).items():
                torch.testing.assert_close(tensor, values[name], equal_nan=True)


# -- buffers, integers and labels ------------------------------------------------------------------------------------------


def trained_batch_norm():
    models = siblings(BatchNormNet(), 3)
    with torch.no_grad():
        for index, model in enumerate(models):
            model[1].num_batches_tracked.fill_(index + 10)
    return models


def test_batch_norm_statistics_come_from_the_first_unless_merged():
    models = trained_batch_norm()
    for form in (lambda model: model, lambda model: model.state_dict()):
        sources = [form(model) for model in models]
        for recipe in RECIPES.values():
            tensors = get_tensors(recipe(sources))
            assert torch.equal(tensors["1.running_mean"], models[0][1].running_mean)
            assert torch.equal(tensors["1.running_var"], models[0][1].running_var)
            assert tensors["1.num_batches_tracked"] == 10
        merged = get_tensors(merge.linear(sources, buffers="merge"))
        mean = sum(model[1].running_mean for model in models) / 3
        torch.testing.assert_close(merged["1.running_mean"], mean)
        assert merged["1.num_batches_tracked"] == 10
        mixed = get_tensors(merge.linear(sources, buffers={"*.running_mean": "merge", "*.running_var": "first"}))
        torch.testing.assert_close(mixed["1.running_mean"], mean)
        assert torch.equal(mixed["1.running_var"], models[0][1].running_var)


def test_a_merged_variance_is_never_negative():
    a, b, _ = trained_batch_norm()
    with torch.no_grad():
        b[1].running_var.mul_(100)
    for one, other in ((a, b), (a.state_dict(), b.state_dict())):
        with raises_merge_error("'1.running_var' has negative variances", "buffers='first'"):
            merge.lerp(one, other, -1.0, buffers="merge")
        merge.lerp(one, other, -1.0)


def test_buffers_come_from_the_first_unless_a_pattern_selects_them():
    a, b, _ = trained_batch_norm()
    merged = merge.linear([a, b], buffers={"*.running_var": "merge"})
    assert torch.equal(merged[1].running_mean, a[1].running_mean)
    with raises_merge_error("pattern 'running' of buffers matches none of the"):
        merge.linear([a, b], buffers={"running": "first", "*": "merge"})


def test_integers_come_from_the_first_and_must_be_equal():
    a, b = ({"w": torch.ones(2), "ids": torch.arange(3), "on": torch.tensor([True, False])} for _ in range(2))
    for recipe in RECIPES.values():
        merged = recipe([a, b, b])
        assert torch.equal(merged["ids"], a["ids"])
        assert merged["on"].dtype == torch.bool
    b["ids"] = torch.tensor([0, 1, 3])
    for recipe in RECIPES.values():
        with raises_merge_error("'ids' (torch.int64) differs between models[0]", "integers='first'"):
            merge.linear([a, b])
        assert recipe([a, b, b], integers="first")["ids"].tolist() == [0, 1, 2]
    with raises_merge_error(
        "'ids' is torch.int64 of shape (3,) in models[0] and torch.int32 of shape (3,) in models[1]"
    ):
        merge.linear([a, {**b, "ids": b["ids"].int()}])


def test_infinite_constants_are_accepted_where_models_are_equal():
    models = siblings(Tied(), 3)
    assert torch.isinf(models[0].mask).any()
    for recipe in RECIPES.values():
        assert torch.equal(recipe(models, buffers="merge").mask, models[0].mask)


def test_extra_state_and_metadata_are_copied_from_the_first():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": ["text"]}

        def set_extra_state(self, state):
            self.note = state

    states = [Extra(2, 2).state_dict() for _ in range(2)]
    merged = merge.linear(states)
    assert merged["_extra_state"] == {"note": ["text"]}
    assert merged["_extra_state"] is not states[0]["_extra_state"]
    assert merged._metadata == states[0]._metadata
    Extra(2, 2).load_state_dict(merged)


def test_labels_must_agree():
    class Labelled(nn.Linear):
        """A module that writes labels into its metadata, as modules with labelled tensors do."""

        def __init__(self, labels):
            super().__init__(2, 2)
            self._labelled = {"weight": labels}
            self.labels = labels

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination._metadata[prefix[:-1]]["labels"] = {"weight": self.labels}

    def axes(labels):
        return [{"name": "o", "labels": list(labels)}, {"name": "i"}]

    a, b, c, d = (nn.Sequential(Labelled(axes(labels))) for labels in ("xy", "xy", "yx", "xz"))
    merge.linear([a, b])
    expected = (a[0].weight + c[0].weight.flip(0)) / 2
    torch.testing.assert_close(merge.linear([a.state_dict(), c.state_dict()])["0.weight"], expected)
    with raises_merge_error("the labels of '0.weight' are", "only the checkpoint has"):
        merge.linear([a.state_dict(), d.state_dict()])


def test_merging_dtensors_equals_merging_whole_tensors():
    """Tested in one process here, and in two in `tests/optim/test_processes.py`."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        # Layers of one shape, because DTensors have no address by which ties could be detected.
        states = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict() for _ in range(3)]
        placed = [{n: DTensor.from_local(t, mesh, [Replicate()]) for n, t in state.items()} for state in states]
        for recipe in RECIPES.values():
            merged, expected = recipe(placed), recipe(states)
            for name, value in expected.items():
                assert merged[name].placements == (Replicate(),)
                torch.testing.assert_close(merged[name].full_tensor(), value)
    finally:
        torch.distributed.destroy_process_group()


# -- ties and trainability --------------------------------------------------------------------------------------------


def test_tied_parameters_are_merged_once_and_stay_tied():
    models = siblings(Tied(), 3)
    for name, recipe in RECIPES.items():
        merged = recipe(models)
        assert merged.head.weight is merged.embedding.weight
        state = recipe([dict(model.state_dict()) for model in models])
        assert state["head.weight"] is state["embedding.weight"]
        torch.testing.assert_close(state["head.weight"], merged.head.weight.detach())
        if "whole" not in name:  # lazy mappings do not report ties, so the tensor would count twice
            lazy = recipe([Lazy(dict(model.state_dict())) for model in models])
            assert torch.equal(lazy["embedding.weight"], state["embedding.weight"])


def test_parameters_that_share_storage_stay_tied():
    def build():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[1].weight.data = net[0].weight.data
        return net

    models = [build() for _ in range(3)]
    for recipe in RECIPES.values():
        merged = recipe(models)
        assert merged[1].weight.data_ptr() == merged[0].weight.data_ptr()
        assert merged[1].weight is not merged[0].weight
    # Parameters that are tied in some models only are merged separately.
    models[2][1].weight.data = torch.zeros(2, 2)
    merged = merge.linear(models)
    assert merged[1].weight.data_ptr() != merged[0].weight.data_ptr()
    torch.testing.assert_close(merged[1].weight, (models[0][1].weight + models[1][1].weight) / 3)


def test_modules_must_have_equal_ties():
    a, b = Tied(), Tied()
    b.head.weight = nn.Parameter(b.head.weight.detach().clone())
    with raises_merge_error("'head.weight' and 'embedding.weight' are tied in one of models[0] and models[1] only"):
        merge.linear([a, b])
    with raises_merge_error("are tied in one of models[0] and models[1] only"):
        merge.linear([b, a])
    with raises_merge_error("tied"):
        merge.linear([a, copy.deepcopy(b).half()])


def test_frozen_parameters_stay_frozen_and_are_merged():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    a.weight.requires_grad_(False)
    merged = merge.linear([a, b])
    assert not merged.weight.requires_grad
    assert merged.bias.requires_grad
    torch.testing.assert_close(merged.weight, ((a.weight + b.weight) / 2).detach())
    merged(torch.ones(1, 2)).sum().backward()


def test_the_result_has_the_mode_of_the_first_and_no_gradients():
    a, b = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    a(torch.ones(1, 2)).sum().backward()
    a.eval()
    merged = merge.linear([a, b])
    assert merged[0].weight.grad is None
    assert a[0].weight.grad is not None
    assert not merged[1].training


# -- dtypes, shapes, values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64]
)
def test_floating_dtypes_mix_and_the_first_decides_the_dtype(dtype):
    kind = torch.complex128 if dtype.is_complex else torch.float64
    a, b = {"w": torch.tensor([1.0, 2.0]).to(dtype)}, {"w": torch.tensor([3.0, 4.0]).to(kind)}
    for recipe in RECIPES.values():
        assert recipe([a, b, b])["w"].dtype == dtype
        assert recipe([b, a, a])["w"].dtype == kind
    assert merge.linear([a, b])["w"].to(kind).tolist() == [2.0, 3.0]


def test_scalars_and_empty_tensors_are_merged():
    a, b = ({"s": torch.tensor(x), "e": torch.zeros(0, 3), "z": torch.zeros(2, 0)} for x in (1.0, 3.0))
    for recipe in RECIPES.values():
        merged = recipe([a, b, b])
        assert merged["s"].shape == ()
        assert merged["e"].shape == (0, 3)
    assert merge.linear([a, b])["s"] == 2.0
    assert merge.linear([{}, {}]) == {}
    assert isinstance(merge.linear([nn.ReLU(), nn.ReLU()]), nn.ReLU)


def test_results_do_not_depend_on_strides():
    a, b = torch.randn(4, 3), torch.randn(3, 4).t()
    expected = merge.ties({"w": torch.zeros(4, 3)}, [{"w": a}, {"w": b.contiguous()}], 0.5)
    assert_same(merge.ties({"w": torch.zeros(3, 4).t()}, [{"w": a}, {"w": b}], 0.5), expected)
    net = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    merged = merge.linear(siblings(net, 2))
    assert merged.weight.is_contiguous(memory_format=torch.channels_last)
    expanded = {"w": torch.ones(1).expand(4)}
    assert merge.linear([expanded, state(3.0, 3.0, 3.0, 3.0)])["w"].tolist() == [2.0] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value):
    models = [state(1.0, 2.0), state(value, 2.0), state(3.0, 1.0)]
    check_all_recipes_raise(models, "'w' of", "NaN or infinite")
    with raises_merge_error("'w' of base has values"):
        merge.task_arithmetic(models[1], [models[0]], 0.5)
    # A model of weight 0 is not read.
    assert merge.linear(models, [1, 0, 0])["w"].tolist() == [1.0, 2.0]


def test_a_sum_that_would_overflow_is_averaged_without_infinity():
    big = torch.finfo(torch.float32).max / 2
    assert merge.linear([state(big, big, big), state(0.0, 0.0, 0.0)])["w"].tolist() == [big / 2] * 3


def test_a_result_that_overflows_its_dtype_is_refused():
    a, b = state(1.0, dtype=torch.float16), state(60000.0, dtype=torch.float16)
    with raises_merge_error("the merged 'w' does not fit torch.float16: its largest magnitude is 119999"):
        merge.task_arithmetic(a, [b], 2.0)
    with raises_merge_error("the merged 'w' does not fit torch.float32"):
        merge.task_arithmetic(state(0.0), [state(3e38)], 2.0)


# -- structures -------------------------------------------------------------------------------------------------------


def test_the_error_for_different_structures_names_the_first_difference():
    wide, narrow = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(2, 2))
    for models in ([wide, narrow, wide], [wide.state_dict(), narrow.state_dict(), wide.state_dict()]):
        check_all_recipes_raise(
            models, "'0.weight' is torch.float32 of shape (2, 3) in", "torch.float32 of shape (2, 2) in"
        )
    bare = nn.Sequential(nn.Linear(3, 2, bias=False))
    for form in (lambda m: m, lambda m: dict(m.state_dict()), lambda m: Described(dict(m.state_dict()))):
        with raises_merge_error("'0.bias' (torch.float32 of shape (2,) in models[0]) is missing in models[1]"):
            merge.linear([form(wide), form(bare)])
        with raises_merge_error("'0.bias' (torch.float32 of shape (2,) in models[1]) is missing in models[0]"):
            merge.linear([form(bare), form(wide)])
    with raises_merge_error("'0.bias' is missing in models[1]"):
        merge.linear([Lazy(dict(wide.state_dict())), Lazy(dict(bare.state_dict()))])
    with raises_merge_error("'w' is torch.float32", "in models[0] and torch.float32 of shape (2,) in models[1]"):
        merge.linear([Lazy(state(1.0)), Lazy(state(1.0, 2.0))])
    with raises_merge_error("'w' is torch.float32", "torch.complex64"):
        merge.linear([state(1.0), state(1j, dtype=torch.complex64)])
    with raises_merge_error("'w' is torch.float32", "torch.int64"):
        merge.linear([state(1.0), state(1, dtype=torch.int64)])


@few
@given(data=st.data(), net=modules(buffers=False))
def test_an_edited_copy_is_refused_or_has_the_same_structure(data, net):
    other = copy.deepcopy(net)
    edit(data, other)
    shapes = [{name: t.shape for name, t in get_tensors(model).items()} for model in (net, other)]
    try:
        merged = merge.lerp(net, other, 1.0, buffers="merge")
    except MergeError:
        return
    assume(not list(other.buffers()))
    assert shapes[0] == shapes[1]
    for name, tensor in get_tensors(merged).items():
        torch.testing.assert_close(tensor, get_tensors(other)[name].to(tensor.dtype))


@pytest.mark.parametrize("buffers", ["first", "merge"])
def test_a_parameter_and_a_buffer_of_one_name_are_refused(buffers):
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    weight = b._parameters.pop("weight")
    b.register_buffer("weight", weight.detach())
    with raises_merge_error("'weight' is a parameter of models[0] and a buffer of models[1]"):
        merge.linear([a, b], buffers=buffers)
    with raises_merge_error("'weight' is a buffer of models[0] and a parameter of models[1]"):
        merge.linear([b, a], buffers=buffers)


def test_sources_that_are_no_lists_of_models_are_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"models is one model; give a list"):
        merge.linear(net)
    with pytest.raises(TypeError, match=r"models is one model; give a list"):
        merge.ties(net, net.state_dict())
    with raises_merge_error("models holds 0 of the 1 models"):
        merge.soup([])
    with pytest.raises(TypeError, match=r"models\[1\] is list; a model is a torch.nn.Module or a state dict"):
        merge.linear([net, [1.0]])
    with raises_merge_error("'a' of models[0] is str, not a tensor"):
        merge.linear([{"a": "text"}])
    with raises_merge_error("'a' of models[0] has no data (device 'meta')"):
        merge.linear([{"a": torch.empty(2, device="meta")}])
    with raises_merge_error("'a' of models[0] has layout torch.sparse_coo"):
        merge.linear([{"a": torch.eye(2).to_sparse()}])


def test_inputs_do_not_change_when_the_last_name_fails():
    a, b = siblings(TwoParts(), 2)
    with torch.no_grad():
        b.head.bias.fill_(float("nan"))
    before = copy.deepcopy(a)
    with raises_merge_error("'head.bias'"):
        merge.linear([a, b])
    assert_same(a, before)


def test_registration_order_does_not_matter():
    a, b = Node(), Node()
    for net, order in ((a, "xy"), (b, "yx")):
        for name in order:
            net.register_parameter(name, nn.Parameter(torch.full((2,), float(ord(name)))))
    assert_same(merge.linear([a, b]), a)
