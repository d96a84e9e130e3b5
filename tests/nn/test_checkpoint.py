"""Checkpoints of modules: labels, plain names, ties, and loads that succeed entirely or change nothing."""

import copy
import dataclasses
import datetime
import enum
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moduli.labels import BROADCAST, Space, Tensor
from moduli.nn import Module, TensorDict, tie
from nn.helpers import CHANNEL, Fit, assert_unchanged, labelled, snapshot


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Site:
    x: int
    y: int


class Opaque:
    pass


def save_and_load(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def module_with(data, *dims):
    module = Module()
    module.w = Tensor(data, dims)
    return module


plain_labels = st.one_of(
    st.text(max_size=3), st.integers(-5, 5), st.booleans(), st.none(), st.floats(allow_nan=False, width=16)
)
labels = st.recursive(
    plain_labels, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=3
)
spaces = st.lists(
    labels | st.sampled_from([*Colour, Site(0, 1), Site(1, 0), datetime.date(2020, 1, 1)]), max_size=6, unique=True
)


@given(spaces, st.randoms(use_true_random=False), st.booleans())
def test_reordered_labels_are_aligned_through_a_file(names, random, assign):
    source = module_with(torch.arange(float(len(names))), Space(names))
    order = list(names)
    random.shuffle(order)
    target = module_with(torch.zeros(len(names)), Space(order))
    target.load_state_dict(save_and_load(source.state_dict()), assign=assign)
    assert target.w.dims == (Space(order),)
    by_label = dict(zip(names, source.w.data.tolist(), strict=True))
    assert [by_label[label] for label in order] == target.w.data.tolist()


@given(st.permutations(["a", "b", "c"]), st.permutations(["row", "column"]))
def test_axes_may_be_in_another_order_too(order, names):
    labels = {"row": ["a", "b", "c"], "column": [0, 5]}
    source = module_with(
        torch.arange(6.0).reshape(3, 2), Space(labels["row"], "row"), Space(labels["column"], "column")
    )
    labels["row"] = order
    dims = tuple(Space(labels[name], name) for name in names)
    target = module_with(torch.zeros(tuple(map(len, dims))), *dims)
    target.load_state_dict(source.state_dict())
    for row in order:
        for column in (0, 5):
            assert target.w.sel(row=row, column=column).item() == source.w.sel(row=row, column=column).item()


def test_metadata_holds_plain_data_and_keys_are_the_hidden_names():
    state = Fit().state_dict()
    assert set(state) == {"tensor:coef", "buffer:basis", "head.weight", "head.bias"}
    assert state._metadata[""]["labels"] == {
        "basis": [{"name": "channel", "labels": ["r", "g", "b"]}, {"name": "x"}],
        "coef": [{"name": "channel", "labels": ["r", "g", "b"]}],
    }
    assert save_and_load(state)._metadata == state._metadata


def test_nested_modules_are_loaded_by_their_own_labels():
    outer, other = nn.Sequential(Fit()), nn.Sequential(Fit(1))
    rotated = Space(["b", "r", "g"], name="channel")
    other[0].coef = Tensor(torch.zeros(3), (rotated,))
    other.load_state_dict(outer.state_dict())
    assert torch.equal(other[0].coef.data, outer[0].coef.data[[2, 0, 1]])
    holder = Module()
    holder.inner, state = other[0], outer.state_dict()
    holder.load_state_dict({name.replace("0.", "inner.", 1): value for name, value in state.items()}, labels="ignore")
    assert torch.equal(holder.inner.coef.data, outer[0].coef.data)


def test_different_labels_are_refused_by_name_and_nothing_is_loaded():
    source, target = Fit(), Fit(1)
    target.coef = Tensor(torch.zeros(3), (Space(["r", "g", "k"], name="channel"),))
    before = snapshot(target)
    with pytest.raises(
        RuntimeError,
        match=r"labels of coef: the labels of axis 'channel' differ: only the module has \['k'\], only the ch",
    ):
        target.load_state_dict(source.state_dict())
    assert_unchanged(before, snapshot(target))


def test_different_axis_names_are_refused():
    target = module_with(torch.zeros(3), Space(3, "colour"))
    with pytest.raises(RuntimeError, match=r"'colour'.*'channel'"):
        target.load_state_dict(module_with(torch.ones(3), Space(3, "channel")).state_dict())


@pytest.mark.parametrize("space", [Space(3), Space(["r", "g", "b"]), Space(3, "channel")])
def test_positional_and_unnamed_axes_pair_with_any_of_that_size(space):
    target = module_with(torch.zeros(3), space)
    target.load_state_dict(module_with(torch.arange(3.0), CHANNEL if space.name else Space(3)).state_dict())
    assert target.w.data.tolist() == [0.0, 1.0, 2.0]


def test_broadcast_axes_are_saved_and_loaded():
    target = module_with(torch.zeros(1, 2), BROADCAST, Space(["x", "y"]))
    target.load_state_dict(
        save_and_load(module_with(torch.arange(2.0)[None], BROADCAST, Space(["y", "x"])).state_dict())
    )
    assert target.w.data.tolist() == [[1.0, 0.0]]


def test_many_differing_labels_are_abbreviated():
    target = module_with(torch.zeros(20), Space(range(100, 120)))
    with pytest.raises(RuntimeError, match=r"0, 1, 2, 3, 4, 5\] and 14 more"):
        target.load_state_dict(module_with(torch.zeros(20), Space(range(20))).state_dict())
    kinds = [Colour.RED, Site(1, 2), (1, "a"), frozenset({1})]
    with pytest.raises(
        RuntimeError, match=r"Colour', 'RED'.*Site\(x=1, y=2\).*'tuple', \(1, 'a'\).*'frozenset', \(1,\)"
    ):
        module_with(torch.zeros(4), Space(["abcd"] + [1, 2, 3])).load_state_dict(
            module_with(torch.zeros(4), Space(kinds)).state_dict()
        )


def test_labels_without_a_repr_of_their_own_are_refused_when_saving():
    module = module_with(torch.zeros(2), Space([Opaque(), Opaque()]))
    with pytest.raises(TypeError, match=r"of Module\.w cannot be saved.*Opaque.*__repr__"):
        module.state_dict()


@pytest.mark.parametrize("lose", [dict, lambda sd: sd.copy(), lambda sd: {k: v.cpu() for k, v in sd.items()}])
@pytest.mark.parametrize("wrap", [lambda fit: fit, nn.Sequential])
def test_a_state_dict_that_lost_its_labels_loads_by_position_with_one_warning(lose, wrap):
    source, target = Fit(), Fit(1)
    outer, state = wrap(target), lose(wrap(source).state_dict())
    with pytest.warns(
        UserWarning, match=r"no labels for '(0\.)?coef' and 1 more, which is loaded by position"
    ) as caught:
        outer.load_state_dict(state)
    assert len(caught) == 1
    assert torch.equal(target.coef.data, source.coef.data)


def test_labels_may_be_ignored_or_required():
    source, target = Fit(), Fit(1)
    before, state = snapshot(target), dict(source.state_dict())
    with pytest.raises(RuntimeError, match="no labels for 'coef'"):
        target.load_state_dict(state, labels="require")
    with pytest.raises(ValueError, match="labels='never'; give 'warn', 'ignore', 'require'"):
        target.load_state_dict(state, labels="never")
    assert_unchanged(before, snapshot(target))
    target.load_state_dict(source.state_dict(), labels="require")
    target.load_state_dict(state, labels="ignore")
    assert torch.equal(target.coef.data, source.coef.data)


def test_a_warning_that_is_an_error_leaves_the_module_as_it_was():
    source, target = Fit(), Fit(1)
    before = snapshot(target)
    with pytest.raises(UserWarning, match="loaded by position"):
        target.load_state_dict(dict(source.state_dict()))
    assert_unchanged(before, snapshot(target))


def test_plain_names_load_unless_the_hidden_name_is_present_too():
    target = Fit()
    state = dict(Fit(1).state_dict())
    state["coef"] = state.pop("tensor:coef") + 1
    target.load_state_dict(state, labels="ignore")
    assert torch.equal(target.coef.data, state["coef"])
    state["tensor:coef"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"coef"'):
        target.load_state_dict(state, labels="ignore")


def test_exports_are_loaded_by_label():
    source, target = Fit(), Fit(1)
    target.coef = Tensor(torch.zeros(3), (Space(["b", "r", "g"], name="channel"),))
    result = target.load_state_dict(source.export_all(), strict=False)
    assert set(result.missing_keys) == {"head.weight", "head.bias"}
    assert torch.equal(target.coef.data, source.coef.data[[2, 0, 1]])


FAILURES = {
    "shape": lambda s: s.__setitem__("head.weight", torch.zeros(5, 5)),
    "missing": lambda s: s.pop("head.bias"),
    "unexpected": lambda s: s.__setitem__("extra", torch.zeros(1)),
    "not a tensor": lambda s: s.__setitem__("head.bias", 3),
    "labels": lambda s: s._metadata[""]["labels"]["coef"][0].__setitem__("labels", ["r", "g", "k"]),
    "meta": lambda s: s.__setitem__("head.bias", torch.zeros(2, device="meta")),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("swap", [False, True])
def test_a_failed_load_leaves_the_module_bit_identical(failure, assign, swap):
    target, state = Fit(), Fit(1).state_dict()
    FAILURES[failure](state)
    before = snapshot(target)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        target.load_state_dict(state, assign=assign)
    except RuntimeError:
        assert_unchanged(before, snapshot(target))
    else:
        # With some flags torch accepts a tensor without data.
        assert failure == "meta"
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_loading_a_matching_state_copies_nothing_for_a_rollback(monkeypatch):
    copies = []
    monkeypatch.setattr("moduli.nn._load._protect", lambda module: copies.append(module))
    target, source = Fit(), Fit(1)
    target.head.register_buffer("scratch", torch.zeros(1), persistent=False)
    target.load_state_dict(source.state_dict())
    target.load_state_dict(dict(source.state_dict()), labels="ignore")
    target.load_state_dict(save_and_load(source.state_dict()), assign=True)
    assert not copies
    opaque = module_with(torch.zeros(2), Space([Opaque(), Opaque()]))
    opaque.load_state_dict({"tensor:w": torch.ones(2)}, labels="ignore")
    assert not copies
    assert opaque.w.data.tolist() == [1.0, 1.0]


def test_a_load_whose_hook_raises_is_undone():
    target = Fit()

    def explode(module, incompatible):
        raise ValueError("boom")

    target.register_load_state_dict_post_hook(explode)
    before = snapshot(target)
    with pytest.raises(ValueError, match="boom"):
        target.load_state_dict(Fit(1).state_dict())
    assert_unchanged(before, snapshot(target))


def test_extra_state_is_restored_after_a_failed_load():
    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.note = "before"

        def get_extra_state(self):
            return self.note

        def set_extra_state(self, state):
            self.note = state

    target, source = Fit(), Fit(1)
    target.extra, source.extra = Extra(), Extra()
    source.extra.note = "after"
    state = source.state_dict()
    target.load_state_dict(state)
    assert target.extra.note == "after"
    target.extra.note = "before"
    state["unexpected"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="unexpected"):
        target.load_state_dict(state)
    assert target.extra.note == "before"


# -- ties --------------------------------------------------------------------------------------------------------------


def tied():
    module = Module()
    module.a = labelled(2)
    module.inner = Module()
    module.inner.c = labelled(3)
    tie(module, "b", to="a")
    tie(module, "inner.d", to="a")
    return module


def assert_names_share_one_tensor(module):
    assert module.a.data is module.b.data
    assert module.a.data is module.inner.d.data
    assert len(list(module.parameters())) == 2


def test_a_tie_is_one_parameter_with_the_gradients_of_all_its_names():
    module = tied()
    assert_names_share_one_tensor(module)
    (module.a.sum() + module.b.sum() * 2 + module.inner.d.sum() * 3).backward()
    assert torch.equal(module.a.data.grad, torch.full((2,), 6.0))
    assert list(module.state_dict()) == ["tensor:a", "tensor:b", "inner.tensor:c", "inner.tensor:d"]


@pytest.mark.parametrize("assign", [False, True])
def test_ties_survive_copies_and_checkpoints(assign):
    module = tied()
    assert_names_share_one_tensor(copy.deepcopy(module))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert_names_share_one_tensor(torch.load(buffer, weights_only=False))
    other = tied()
    other.load_state_dict(save_and_load(module.state_dict()), assign=assign)
    assert_names_share_one_tensor(other)
    assert torch.equal(other.b.data, module.a.data)


def test_a_checkpoint_with_different_values_for_tied_names_is_refused():
    module = tied()
    state = copy.deepcopy(module.state_dict())
    state["tensor:b"] = state["tensor:b"] + 1
    before = snapshot(module)
    with pytest.raises(RuntimeError, match=r"one tensor for 'tensor:a' and 'tensor:b'"):
        module.load_state_dict(state)
    assert_unchanged(before, snapshot(module))


def test_assigning_a_tied_name_ends_its_tie():
    module = tied()
    module.b = labelled(2, seed=4)
    assert module.a.data is not module.b.data
    assert module.a.data is module.inner.d.data


def test_buffers_plain_parameters_and_plain_modules_can_be_tied():
    module = Fit()
    module.other = Fit(1)
    tie(module, "other.basis", to="basis")
    tie(module, "other.head.weight", to="head.weight")
    module.head.register_buffer("table", torch.ones(2))
    tie(module, "other.head.table", to="head.table")
    assert module.other.basis.data is module.basis.data
    assert module.other.head.weight is module.head.weight
    assert module.other.head.table is module.head.table
    module.double()
    assert module.other.basis.data is module.basis.data
    assert module.other.head.table is module.head.table


def test_invalid_ties_are_refused():
    module = Fit()
    before = snapshot(module)
    for name, to, error, match in [
        ("coef", "coef", ValueError, "same name"),
        ("new", "nothing", AttributeError, "no tensor 'nothing'"),
        ("basis", "coef", ValueError, "'basis' is declared"),
        ("new", "basis", ValueError, "'new' is not declared"),
        ("export", "coef", AttributeError, "export"),
        ("nowhere.x", "coef", AttributeError, "nowhere"),
    ]:
        with pytest.raises(error, match=match):
            tie(module, name, to=to)
        assert_unchanged(before, snapshot(module))


def test_containers_are_loaded_by_label():
    a, b = Module(), Module()
    a.t = TensorDict({"w": Tensor(torch.tensor([1.0, 2.0]), (Space(["x", "y"]),))})
    b.t = TensorDict({"w": Tensor(torch.zeros(2), (Space(["y", "x"]),))})
    b.load_state_dict(save_and_load(a.state_dict()))
    assert b.t["w"].data.tolist() == [2.0, 1.0]
