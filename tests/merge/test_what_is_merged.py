"""Coefficients, buffers, integers, ties, dtypes, and everything that is refused."""

import copy
import re

import numpy as np
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
    assert_same,
    everything,
    siblings,
)
from moduli import merge
from moduli.merge import MergeError
from strategies import edit, modules

few = settings(max_examples=40)


def refused(*parts):
    return pytest.raises(MergeError, match=".*".join(map(re.escape, parts)))


def w(*values, dtype=torch.float32):
    return {"w": torch.tensor(values, dtype=dtype)}


def all_recipes_refuse(models, *parts, **how):
    for recipe in RECIPES.values():
        before = copy.deepcopy([dict(everything(model)) for model in models])
        with refused(*parts):
            recipe(models, **how)
        for model, was in zip(models, before, strict=True):
            for name, tensor in everything(model).items():
                torch.testing.assert_close(tensor, was[name], equal_nan=True)


# -- coefficients -----------------------------------------------------------------------------------------------------


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)


def test_the_first_pattern_that_matches_wins():
    a, b = siblings(TwoParts(), 2)
    found = merge.lerp(a, b, {"encoder.bias": 1.0, "encoder.*": 0.0, "*": 0.5})
    assert torch.equal(found.encoder.bias, b.encoder.bias)
    assert torch.equal(found.encoder.weight, a.encoder.weight)
    torch.testing.assert_close(found.head.weight, (a.head.weight + b.head.weight) / 2)


def test_patterns_work_wherever_a_coefficient_is_taken():
    base, a, b = siblings(TwoParts(), 3)
    only_head = {"head.*": 1.0, "*": 0.0}
    found = [
        merge.linear([base, a], [{"head.*": 0, "*": 1}, only_head]),
        merge.slerp(base, a, only_head),
        merge.slerp(base, a, only_head, angle="model"),
        merge.task_arithmetic(base, [a], only_head),
        merge.task_arithmetic(base, [a, b], [only_head, 0.0]),
        merge.ties(base, [a], only_head),
        merge.ties(base, [a, b], 1.0, weights=[only_head, 0]),
        merge.ties(base, [a], 1.0, scale=only_head),
        merge.dare(base, [a], only_head),
        merge.dare(base, [a, b], [only_head, 0.0], normalize=False),
        merge.dare(base, [a], 1.0, scale=only_head),
        merge.dare(base, [a, b], 1.0, weights=[only_head, 0], normalize=False),
        merge.fisher([base, a], [{}, {}], [{"head.*": 0, "*": 1}, only_head]),
    ]
    for model in found:
        assert_same(model.encoder, base.encoder, exactly=False)
        assert_same(model.head, a.head, exactly=False)


def test_a_coefficient_may_be_a_function_of_the_name():
    a, b = siblings(TwoParts(), 2)
    found = merge.lerp(a, b, lambda name: 0.25 if name.startswith("head") else 1.0)
    assert_same(found, merge.lerp(a, b, {"head*": 0.25, "*": 1.0}))


def test_coefficients_that_do_not_fit_are_refused():
    a, b = siblings(TwoParts(), 2)
    with refused("t has no number for 'head.weight'", "'encoder.*'", "add one"):
        merge.lerp(a, b, {"encoder.*": 0.5})
    with refused("pattern 'encodr.*' of t matches none of the 4 names", "'encoder.weight'"):
        merge.lerp(a, b, {"encodr.*": 0.5, "*": 0.1})
    with refused("weights[1]['head.*'] is nan"):
        merge.linear([a, b], [1, {"head.*": float("nan"), "*": 1}])
    with refused("t of 'encoder.weight' is nan; it must be finite"):
        merge.lerp(a, b, lambda name: float("nan"))
    with refused("density is 1.5; it must be at least 0 and at most 1"):
        merge.ties(a, [b], 1.5)
    with refused("density[0] is -0.1"):
        merge.dare(a, [b], [-0.1])
    with refused("weights[0] is -1.0; it must be at least 0"):
        merge.fisher([a, b], [{}, {}], [-1.0, 1.0])
    with refused("weights has 1 entries for 2 models"):
        merge.linear([a, b], [1.0])
    with refused("t is an empty mapping"):
        merge.lerp(a, b, {})
    with refused("weights for 'encoder.weight' are [1.0, -1.0] and add up to 0", "normalize=False"):
        merge.linear([a, b], [1, -1])
    with refused("weights for 'encoder.weight'", "add up to 0"):
        merge.dare(a, [b, b], 0.5, weights=[1, -1])
    with refused("the weights for 'encoder.weight' are [0.0, 0.0] and add up to 0"):
        merge.fisher([a, b], [{}, {}], [0, 0])
    with refused("density has numbers by name, but is used for whole models here"):
        merge.ties(a, [b], {"head.*": 0.5, "*": 1.0}, trim="model")
    for wrong in ("0.5", None, torch.ones(2), {"*": "0.5"}, {3: 0.5}):
        with pytest.raises(TypeError, match="must be a number, or a mapping from glob patterns"):
            merge.lerp(a, b, wrong)
    assert_same(merge.lerp(a, b, np.float32(0.5)), merge.lerp(a, b, 0.5))
    assert_same(merge.linear([a, b], np.array([1.0, 3.0]).tolist()), merge.linear([a, b], [1, 3]))


def test_words_that_are_not_choices_are_refused():
    a, b = w(1.0), w(2.0)
    with refused("angle is 'row'"):
        merge.slerp(a, b, 0.5, angle="row")
    with refused("elect is 'max'"):
        merge.ties(a, [b], elect="max")
    with refused("trim is 'row'"):
        merge.ties(a, [b], trim="row")
    with refused("elect is 'max'"):
        merge.dare(a, [b], 0.5, elect="max")
    with refused("then is 'soup'"):
        merge.dare(a, [b], 0.5, then="soup")
    with refused("how is 'best'"):
        merge.soup([a, b], how="best")
    with refused("needs evaluate="):
        merge.soup([a, b], how="greedy")
    with refused("has no use for it"):
        merge.soup([a, b], evaluate=lambda model: 0.0)
    with refused("mode is 'most'"):
        merge.greedy_soup([a, b], lambda model: 0.0, mode="most")
    with refused("evaluate gave NaN for models[0]"):
        merge.greedy_soup([a, b], lambda model: float("nan"))
    with refused("buffers is 'average'"):
        merge.linear([a, b], buffers="average")
    with refused("integers is 'merge'"):
        merge.linear([a, b], integers="merge")


# -- what is not a parameter ------------------------------------------------------------------------------------------


def trained_batch_norm():
    models = siblings(BatchNormNet(), 3)
    with torch.no_grad():
        for index, model in enumerate(models):
            model[1].num_batches_tracked.fill_(index + 10)
    return models


def test_batch_norm_statistics_are_the_firsts_unless_merged():
    models = trained_batch_norm()
    for form in (lambda model: model, lambda model: model.state_dict()):
        given_form = [form(model) for model in models]
        for recipe in RECIPES.values():
            found = everything(recipe(given_form))
            assert torch.equal(found["1.running_mean"], models[0][1].running_mean)
            assert torch.equal(found["1.running_var"], models[0][1].running_var)
            assert found["1.num_batches_tracked"] == 10
        merged = everything(merge.linear(given_form, buffers="merge"))
        mean = sum(model[1].running_mean for model in models) / 3
        torch.testing.assert_close(merged["1.running_mean"], mean)
        assert merged["1.num_batches_tracked"] == 10
        mixed = everything(merge.linear(given_form, buffers={"*.running_mean": "merge", "*.running_var": "first"}))
        torch.testing.assert_close(mixed["1.running_mean"], mean)
        assert torch.equal(mixed["1.running_var"], models[0][1].running_var)


def test_a_merged_variance_is_never_negative():
    a, b, _ = trained_batch_norm()
    with torch.no_grad():
        b[1].running_var.mul_(100)
    for one, other in ((a, b), (a.state_dict(), b.state_dict())):
        with refused("'1.running_var' has negative variances", "buffers='first'"):
            merge.lerp(one, other, -1.0, buffers="merge")
        merge.lerp(one, other, -1.0)


def test_buffers_of_a_module_without_a_policy_are_the_firsts_and_patterns_name_some():
    a, b, _ = trained_batch_norm()
    found = merge.linear([a, b], buffers={"*.running_var": "merge"})
    assert torch.equal(found[1].running_mean, a[1].running_mean)
    with refused("pattern 'running' of buffers matches none of the"):
        merge.linear([a, b], buffers={"running": "first", "*": "merge"})


def test_integers_are_the_firsts_and_must_agree():
    a, b = ({"w": torch.ones(2), "ids": torch.arange(3), "on": torch.tensor([True, False])} for _ in range(2))
    for recipe in RECIPES.values():
        found = recipe([a, b, b])
        assert torch.equal(found["ids"], a["ids"])
        assert found["on"].dtype == torch.bool
    b["ids"] = torch.tensor([0, 1, 3])
    for recipe in RECIPES.values():
        with refused("'ids' (torch.int64) differs between models[0]", "integers='first'"):
            merge.linear([a, b])
        assert recipe([a, b, b], integers="first")["ids"].tolist() == [0, 1, 2]
    with refused("'ids' is torch.int64 of shape (3,) in models[0] and torch.int32 of shape (3,) in models[1]"):
        merge.linear([a, {**b, "ids": b["ids"].int()}])


def test_constants_that_are_infinite_pass_where_models_agree():
    models = siblings(Tied(), 3)
    assert torch.isinf(models[0].mask).any()
    for recipe in RECIPES.values():
        assert torch.equal(recipe(models, buffers="merge").mask, models[0].mask)


def test_extra_state_and_metadata_pass_through():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": ["kept"]}

        def set_extra_state(self, state):
            self.note = state

    states = [Extra(2, 2).state_dict() for _ in range(2)]
    found = merge.linear(states)
    assert found["_extra_state"] == {"note": ["kept"]}
    assert found["_extra_state"] is not states[0]["_extra_state"]
    assert found._metadata == states[0]._metadata
    Extra(2, 2).load_state_dict(found)


def test_labels_must_agree():
    class Labelled(nn.Linear):
        """Writes labels where modules that own labelled tensors do."""

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
    with refused("the labels of '0.weight' are", "only the checkpoint has"):
        merge.linear([a.state_dict(), d.state_dict()])


def test_shards_are_merged_as_whole_tensors_are():
    """In one process; `tests/optim/test_processes.py` has two."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        # Layers of one shape: a DTensor has no address, by which they could be told apart.
        states = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict() for _ in range(3)]
        placed = [{n: DTensor.from_local(t, mesh, [Replicate()]) for n, t in state.items()} for state in states]
        for recipe in RECIPES.values():
            found, expected = recipe(placed), recipe(states)
            for name, value in expected.items():
                assert found[name].placements == (Replicate(),)
                torch.testing.assert_close(found[name].full_tensor(), value)
    finally:
        torch.distributed.destroy_process_group()


# -- ties and trainability --------------------------------------------------------------------------------------------


def test_tied_parameters_are_merged_once_and_stay_tied():
    models = siblings(Tied(), 3)
    for name, recipe in RECIPES.items():
        found = recipe(models)
        assert found.head.weight is found.embedding.weight
        state = recipe([dict(model.state_dict()) for model in models])
        assert state["head.weight"] is state["embedding.weight"]
        torch.testing.assert_close(state["head.weight"], found.head.weight.detach())
        if "whole" not in name:  # which would count the tensor twice: a file does not tell what is tied
            lazy = recipe([Lazy(dict(model.state_dict())) for model in models])
            assert torch.equal(lazy["embedding.weight"], state["embedding.weight"])


def test_parameters_that_share_storage_stay_tied():
    def build():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[1].weight.data = net[0].weight.data
        return net

    models = [build() for _ in range(3)]
    for recipe in RECIPES.values():
        found = recipe(models)
        assert found[1].weight.data_ptr() == found[0].weight.data_ptr()
        assert found[1].weight is not found[0].weight
    # Not tied in every model: two parameters.
    models[2][1].weight.data = torch.zeros(2, 2)
    found = merge.linear(models)
    assert found[1].weight.data_ptr() != found[0].weight.data_ptr()
    torch.testing.assert_close(found[1].weight, (models[0][1].weight + models[1][1].weight) / 3)


def test_ties_must_agree_among_modules():
    a, b = Tied(), Tied()
    b.head.weight = nn.Parameter(b.head.weight.detach().clone())
    with refused("'head.weight' and 'embedding.weight' are tied in one of models[0] and models[1] only"):
        merge.linear([a, b])
    with refused("are tied in one of models[0] and models[1] only"):
        merge.linear([b, a])
    with refused("tied"):
        merge.linear([a, copy.deepcopy(b).half()])


def test_frozen_parameters_stay_frozen_and_are_merged():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    a.weight.requires_grad_(False)
    found = merge.linear([a, b])
    assert not found.weight.requires_grad
    assert found.bias.requires_grad
    torch.testing.assert_close(found.weight, ((a.weight + b.weight) / 2).detach())
    found(torch.ones(1, 2)).sum().backward()


def test_gradients_hooks_and_modes_of_the_first():
    a, b = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    a(torch.ones(1, 2)).sum().backward()
    a.eval()
    found = merge.linear([a, b])
    assert found[0].weight.grad is None
    assert a[0].weight.grad is not None
    assert not found[1].training


# -- dtypes, shapes, values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64]
)
def test_floating_dtypes_mix_and_the_first_decides(dtype):
    kind = torch.complex128 if dtype.is_complex else torch.float64
    a, b = {"w": torch.tensor([1.0, 2.0]).to(dtype)}, {"w": torch.tensor([3.0, 4.0]).to(kind)}
    for recipe in RECIPES.values():
        assert recipe([a, b, b])["w"].dtype == dtype
        assert recipe([b, a, a])["w"].dtype == kind
    assert merge.linear([a, b])["w"].to(kind).tolist() == [2.0, 3.0]


def test_scalars_and_empty_tensors():
    a, b = ({"s": torch.tensor(x), "e": torch.zeros(0, 3), "z": torch.zeros(2, 0)} for x in (1.0, 3.0))
    for recipe in RECIPES.values():
        found = recipe([a, b, b])
        assert found["s"].shape == ()
        assert found["e"].shape == (0, 3)
    assert merge.linear([a, b])["s"] == 2.0
    assert merge.linear([{}, {}]) == {}
    assert isinstance(merge.linear([nn.ReLU(), nn.ReLU()]), nn.ReLU)


def test_strides_do_not_matter():
    a, b = torch.randn(4, 3), torch.randn(3, 4).t()
    expected = merge.ties({"w": torch.zeros(4, 3)}, [{"w": a}, {"w": b.contiguous()}], 0.5)
    assert_same(merge.ties({"w": torch.zeros(3, 4).t()}, [{"w": a}, {"w": b}], 0.5), expected)
    net = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    found = merge.linear(siblings(net, 2))
    assert found.weight.is_contiguous(memory_format=torch.channels_last)
    expanded = {"w": torch.ones(1).expand(4)}
    assert merge.linear([expanded, w(3.0, 3.0, 3.0, 3.0)])["w"].tolist() == [2.0] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value):
    models = [w(1.0, 2.0), w(value, 2.0), w(3.0, 1.0)]
    all_recipes_refuse(models, "'w' of", "NaN or infinite")
    with refused("'w' of base has values"):
        merge.task_arithmetic(models[1], [models[0]], 0.5)
    # A model without weight is not looked at.
    assert merge.linear(models, [1, 0, 0])["w"].tolist() == [1.0, 2.0]


def test_a_sum_that_overflows_is_no_infinity():
    big = torch.finfo(torch.float32).max / 2
    assert merge.linear([w(big, big, big), w(0.0, 0.0, 0.0)])["w"].tolist() == [big / 2] * 3


def test_a_result_that_its_dtype_cannot_hold_is_refused():
    a, b = w(1.0, dtype=torch.float16), w(60000.0, dtype=torch.float16)
    with refused("the merged 'w' does not fit torch.float16: its largest magnitude is 119999"):
        merge.task_arithmetic(a, [b], 2.0)
    with refused("the merged 'w' does not fit torch.float32"):
        merge.task_arithmetic(w(0.0), [w(3e38)], 2.0)


# -- structures -------------------------------------------------------------------------------------------------------


def test_structures_that_differ_name_the_first_difference():
    wide, narrow = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(2, 2))
    for models in ([wide, narrow, wide], [wide.state_dict(), narrow.state_dict(), wide.state_dict()]):
        all_recipes_refuse(models, "'0.weight' is torch.float32 of shape (2, 3) in", "torch.float32 of shape (2, 2) in")
    bare = nn.Sequential(nn.Linear(3, 2, bias=False))
    for form in (lambda m: m, lambda m: dict(m.state_dict()), lambda m: Described(dict(m.state_dict()))):
        with refused("'0.bias' (torch.float32 of shape (2,) in models[0]) is missing in models[1]"):
            merge.linear([form(wide), form(bare)])
        with refused("'0.bias' (torch.float32 of shape (2,) in models[1]) is missing in models[0]"):
            merge.linear([form(bare), form(wide)])
    with refused("'0.bias' is missing in models[1]"):
        merge.linear([Lazy(dict(wide.state_dict())), Lazy(dict(bare.state_dict()))])
    with refused("'w' is torch.float32", "in models[0] and torch.float32 of shape (2,) in models[1]"):
        merge.linear([Lazy(w(1.0)), Lazy(w(1.0, 2.0))])
    with refused("'w' is torch.float32", "torch.complex64"):
        merge.linear([w(1.0), w(1j, dtype=torch.complex64)])
    with refused("'w' is torch.float32", "torch.int64"):
        merge.linear([w(1.0), w(1, dtype=torch.int64)])


@few
@given(data=st.data(), net=modules(buffers=False))
def test_an_edited_sibling_is_refused_or_has_the_same_structure(data, net):
    other = copy.deepcopy(net)
    edit(data, other)
    shapes = [{name: t.shape for name, t in everything(model).items()} for model in (net, other)]
    try:
        found = merge.lerp(net, other, 1.0, buffers="merge")
    except MergeError:
        return
    assume(not list(other.buffers()))
    assert shapes[0] == shapes[1]
    for name, tensor in everything(found).items():
        torch.testing.assert_close(tensor, everything(other)[name].to(tensor.dtype))


def test_what_is_no_list_of_models_is_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"models is one model; give a list"):
        merge.linear(net)
    with pytest.raises(TypeError, match=r"models is one model; give a list"):
        merge.ties(net, net.state_dict())
    with refused("models holds 0 of the 1 models"):
        merge.soup([])
    with pytest.raises(TypeError, match=r"models\[1\] is list; a model is a torch.nn.Module or a state dict"):
        merge.linear([net, [1.0]])
    with refused("'a' of models[0] is str, not a tensor"):
        merge.linear([{"a": "text"}])
    with refused("'a' of models[0] has no data (device 'meta')"):
        merge.linear([{"a": torch.empty(2, device="meta")}])
    with refused("'a' of models[0] has layout torch.sparse_coo"):
        merge.linear([{"a": torch.eye(2).to_sparse()}])


def test_nothing_is_written_when_a_late_name_fails():
    a, b = siblings(TwoParts(), 2)
    with torch.no_grad():
        b.head.bias.fill_(float("nan"))
    before = copy.deepcopy(a)
    with refused("'head.bias'"):
        merge.linear([a, b])
    assert_same(a, before)


def test_registration_order_does_not_matter():
    a, b = Node(), Node()
    for net, order in ((a, "xy"), (b, "yx")):
        for name in order:
            net.register_parameter(name, nn.Parameter(torch.full((2,), float(ord(name)))))
    assert_same(merge.linear([a, b]), a)


def test_steps_and_bounds_that_mean_nothing_are_refused():
    a, b = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
    with refused("steps is 0"):
        merge.karcher([a, b], steps=0)
    with refused("the first must be less than the second"):
        merge.search("lerp", [a, b], lambda model: model["w"].sum(), 12, bounds=(1.0, 0.0))
