"""Tracing: every free axis may be permuted, and the expected axes are free."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import moduli as mo
from axes.zoo import MODELS, Model, weight


@pytest.mark.parametrize("name", MODELS)
def test_permuting_free_axes_does_not_change_the_output(name):
    torch.manual_seed(0)
    net, example, expected = MODELS[name]()
    ax = mo.axes.trace(net.eval(), *example)
    assert mo.axes.check(net, *example, axes=ax) < 1e-5
    assert ax.unknown == ()
    assert [axis for axis in expected if axis not in ax or not ax[axis].free] == []
    for axis in ax.free:
        assert axis.size > 1
        assert axis.places


@pytest.mark.parametrize("name", ["mlp", "fused qkv", "unet", "lstm"])
def test_tracing_with_real_tensors_gives_the_same_axes(name):
    torch.manual_seed(0)
    net, example, _ = MODELS[name]()
    assert mo.axes.trace(net, *example, fake=False) == mo.axes.trace(net, *example)


@pytest.mark.parametrize("name", ["mlp", "fused qkv", "conv 2d", "lstm, both ways"])
def test_axes_are_immutable_and_compare_by_value(name):
    torch.manual_seed(0)
    net, example, _ = MODELS[name]()
    ax = mo.axes.trace(net, *example)
    assert mo.axes.trace(copy.deepcopy(net), *example) == ax
    assert mo.axes.ModelAxes.from_data(json.loads(json.dumps(ax.to_data()))) == ax
    assert pickle.loads(pickle.dumps(ax)) == ax
    assert hash(copy.deepcopy(ax)) == hash(ax)
    assert ax != mo.axes.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(AttributeError, match="immutable"):
        ax.axes = {}
    with pytest.raises(ValueError, match="format 99"):
        mo.axes.ModelAxes.from_data({"format": 99})


def test_tracing_does_not_change_the_model():
    torch.manual_seed(0)
    net, example, _ = MODELS["conv 2d"]()
    before = copy.deepcopy(net.state_dict())
    mo.axes.trace(net.train(), *example)
    mo.axes.trace(net, *example, fake=False)
    mo.axes.check(net, *example)
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_models_on_meta_are_traced():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    assert [axis.name for axis in mo.axes.trace(net, torch.zeros(1, 4)).free] == ["0.out"]


def test_the_table_and_html_list_all_axes_and_parameters():
    net, example, _ = MODELS["fused qkv"]()
    ax = mo.axes.trace(net, *example)
    html = ax._repr_html_()
    for name in (*ax.parameters, *ax):
        assert name in repr(ax)
        assert name in html
    assert html.count("<tr>") == len(ax) + len(ax.parameters) + 2


def test_fused_queries_keys_and_values_are_segments():
    net, example, _ = MODELS["fused qkv"]()
    rows, columns = mo.axes.trace(net, *example).of("blocks.0.att.qkv.weight")
    head, size, value = (f"blocks.0.att.qkv.{each}" for each in ("head", "out.1", "out.2"))
    assert rows == (mo.axes.Segments(((head, size), (head, size), (head, value))),)
    assert columns == ("embed.out",)


def test_parameters_have_roles():
    torch.manual_seed(0)
    net, example, _ = MODELS["tied"]()
    roles = {name: each.role for name, each in mo.axes.trace(net, *example).parameters.items()}
    assert roles["embed.weight"] == "tied"
    assert roles["position"] == "vector"  # it is added, and multiplied by nothing
    assert roles["up.weight"] == roles["down.weight"] == "hidden"
    assert roles["norm.weight"] == "vector"
    net, example, _ = MODELS["conv 2d"]()
    roles = {name: each.role for name, each in mo.axes.trace(net, *example).parameters.items()}
    assert [roles[f"{name}.weight"] for name in ("a", "b", "c", "up", "out")] == [
        *("input", "hidden", "hidden", "hidden", "output")
    ]
    assert roles["n.running_mean"] == "buffer"


@torch.library.custom_op("moduli_tests::twist", mutates_args=())
def twist(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twist.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operation_without_a_rule_fixes_axes_and_a_rule_frees_them():
    net = Model(lambda self, x: self.b(twist(self.a(x))), a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    ax = mo.axes.trace(net, torch.zeros(4, 3))
    assert ax.unknown == ("moduli_tests::twist",)
    assert ax["a.out"].reasons == ("moduli_tests::twist has no rule",)
    assert "@mo.axes.rule('moduli_tests::twist')" in repr(ax)
    assert ax.of("b.weight").role == "output"  # an axis fixed by an unknown operation still counts as hidden
    mo.axes.rule(torch.ops.moduli_tests.twist)(lambda call, x: x.dims)
    try:
        ax = mo.axes.trace(net, torch.zeros(4, 3))
    finally:
        del mo.axes._tracer.RULES["moduli_tests::twist"]
    assert ax["a.out"].free
    assert ax.unknown == ()
    with pytest.raises(TypeError, match="no operation"):
        mo.axes.rule(3)(lambda call: None)


def test_check_detects_a_wrong_rule():
    net = Model(lambda self, x: self.b(self.a(x).cumsum(-1)), a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    assert not mo.axes.trace(net, torch.zeros(4, 3))["a.out"].free
    right = mo.axes._tracer.RULES["aten::cumsum"]
    mo.axes.rule("aten::cumsum")(lambda call, x, dim: x.dims)
    try:
        with pytest.raises(mo.axes.ModelAxesError, match=r"'a.out' in a.weight, a.bias, b.weight"):
            mo.axes.check(net, torch.randn(4, 3))
    finally:
        mo.axes.rule("aten::cumsum")(right)


def test_data_dependent_control_flow_is_traced_with_real_tensors():
    def run(self, x):
        return self.b(self.a(x)) if x.sum() > 0 else self.c(x)

    net = Model(run, a=nn.Linear(3, 6), b=nn.Linear(6, 2), c=nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="fake=False"):
        mo.axes.trace(net, torch.ones(4, 3))
    ax = mo.axes.trace(net, torch.ones(4, 3), fake=False)
    assert ax["a.out"].free
    assert ax.of("c.weight").role == "fixed"
    assert ax["c.out"].reasons == ("not read with this example",)


def test_axes_of_the_selected_output_are_fixed():
    net = Model(lambda self, x: (self.b(self.a(x)), self.a(x)), a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    assert mo.axes.trace(net, torch.zeros(4, 3))["a.out"].reasons == ("an output",)
    assert mo.axes.trace(net, torch.zeros(4, 3), output=lambda result: result[0])["a.out"].free
    with pytest.raises(ValueError, match="returns no tensor"):
        mo.axes.trace(net, torch.zeros(4, 3), output=lambda result: None)
    with pytest.raises(TypeError, match="no nn.Module"):
        mo.axes.trace(len, torch.zeros(4, 3))


def test_rows_that_are_not_read_are_fixed():
    net = Model(lambda self, x: x + self.table[: x.shape[0]] @ self.mix, table=weight(9, 5), mix=weight(5, 3))
    ax = mo.axes.trace(net, torch.zeros(4, 3))
    assert [(axis.name, axis.size) for axis in ax.free] == [("table.out", 5)]


def test_take_selects_and_repeats_units():
    torch.manual_seed(0)
    net, (x,), _ = MODELS["unet"]()
    ax = mo.axes.trace(net, x)
    tensors = ax.take(dict(net.named_parameters()), {"a.out": torch.tensor([0, 2]), "b.out": torch.tensor([1, 1, 0])})
    assert tensors["a.weight"].shape == (2, 3, 3, 3)
    assert tensors["b.weight"].shape == (3, 2, 3, 3)
    assert tensors["c.weight"].shape == (8, 5, 3, 3)
    picked = net.c.weight[:, [0, 2, 7, 7, 6]]
    assert torch.equal(tensors["c.weight"], picked)
    with pytest.raises(KeyError, match=r"did you mean 'a.out'"):
        ax.take({}, {"a.outt": torch.tensor([0])})
    with pytest.raises(KeyError, match="no parameter or buffer 'nothing'"):
        ax.of("nothing")


def test_tied_parameters_have_the_same_axes():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    ax = mo.axes.trace(Tied(), torch.zeros(2, 3, dtype=torch.int64))
    assert ax.of("head.weight") is ax.of("embed.weight")
    assert ax.of("head.weight")[1] == ("embed.out",)
