"""Names of axes: passed by the user, taken from labels, and as labels of a plain module."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from axes.zoo import MODELS, Model, weight

QKV = {"*.qkv.weight": "(qkv=3 head=4 size) model"}


@pytest.fixture
def fused():
    torch.manual_seed(0)
    net, example, _ = MODELS["fused qkv"]()
    return net, example


def test_names_that_are_passed_replace_traced_ones(fused):
    net, example = fused
    ax = mo.axes.trace(net, *example, names=QKV)
    assert ax.of("blocks.0.att.qkv.weight").dims == (
        tuple(f"blocks.0.att.qkv.{name}" for name in ("qkv", "head", "size")),
        ("model",),  # one axis in all blocks, so that its name needs no prefix
    )
    assert ax["model"].free
    assert len(ax["model"].places) > 20
    assert not ax["blocks.0.att.qkv.qkv"].free
    assert mo.axes.check(net, *example, axes=ax) < 1e-5


def test_names_that_are_passed_split_a_traced_axis():
    net, example, _ = MODELS["mlp"]()
    ax = mo.axes.trace(net, *example, names={"0.weight": "(group=4 unit) feature"})
    assert ax.of("2.weight")[1] == ("group", "unit")
    assert ax["feature"].reasons == ("an input",)
    assert mo.axes.check(net, *example, axes=ax) < 1e-5


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"*.qkv.weight": "(qkv=3 head=5 size) model"}, r"axis 0 of 'blocks.0.att.qkv.weight' has size 72, .* size 15"),
        ({"*.qkv.weight": "(qkv=3 head=4 size=7) model"}, r"size 72, which \(qkv=3 head=4 size=7\) of size 84"),
        ({"*.qkv.weight": "(qkv head size) model"}, r"leaves the sizes of \['qkv', 'head', 'size'\] open"),
        ({"*.qkv.weight": "qkv model extra"}, r"'blocks.0.att.qkv.weight' has 2 axes \(72, 24\), and .* names 3"),
        ({"*.qkv.weight": "a a"}, r"two axes 'a', of size 72 and 24"),
        ({"*.qkv.weight": "(a b=2"}, "parentheses"),
        ({"*.qkv.weight": "a) b"}, "parentheses"),
        ({"*.qkv.weight": "a=x b"}, "'a=x'"),
        ({"*.qvk.weight": "a b"}, "qvk"),
    ],
)
def test_wrong_names_are_refused(fused, names, message):
    net, example = fused
    with pytest.raises(ValueError, match=message):
        mo.axes.trace(net, *example, names=names)


def test_a_repeated_name_is_one_axis():
    net = Model(lambda self, x: x @ self.w @ self.w.T, w=weight(4, 4))
    ax = mo.axes.trace(net, torch.zeros(2, 4), names={"w": "unit unit"})
    assert ax.of("w").dims == (("unit",), ("unit",))


class Layer(mo.Module):
    def __init__(self, source, target):
        super().__init__()
        names = [target.name, source.name]
        self.w = mo.tensor(torch.randn(len(target), len(source)), names, **{target.name: target, source.name: source})
        self.b = mo.tensor(torch.randn(len(target)), [target.name], **{target.name: target})

    def forward(self, x):
        return mo.dot(self.w, x) + self.b


class Labelled(mo.Module):
    def __init__(self):
        super().__init__()
        feature, hidden = mo.Space(["a", "b", "c"], name="feature"), mo.Space(6, name="hidden")
        self.first, self.second = Layer(feature, hidden), Layer(hidden, mo.Space(["x", "y"], name="kind"))

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_labels_name_the_axes_of_a_trace():
    net = Labelled()
    ax = mo.axes.trace(net, mo.tensor(torch.randn(5, 3), "batch feature", feature=["a", "b", "c"]))
    assert ax.of("second.w").dims == (("kind",), ("hidden",))
    assert [axis.name for axis in ax.free] == ["hidden"]
    assert [ax.of(name).role for name in ("first.w", "second.w", "first.b")] == ["input", "output", "vector"]


def test_labelled_modules_need_no_example():
    ax = mo.axes.trace(Labelled())
    assert ax == mo.axes.trace(copy.deepcopy(Labelled()))
    assert ax.of("first.w").dims == (("first.hidden",), ("feature",))
    assert ax.of("first.b").dims == (("first.hidden",),)
    assert ax.of("second.w").dims == (
        ("kind",),
        ("second.hidden",),
    )  # without labels the hidden axes cannot be identified
    assert not ax.free
    assert "trace with an example" in repr(ax)
    assert ax.of("first.w").role == "input"


def test_equal_labels_are_one_axis_across_modules():
    hidden = mo.Space(["u", "v"], name="hidden")
    net = nn.Sequential(Layer(mo.Space(["a", "b"], name="feature"), hidden), Layer(hidden, mo.Space(3, name="kind")))
    ax = mo.axes.trace(net)
    assert ax.of("0.w")[0] == ax.of("1.w")[1] == ("hidden",)


def test_labelled_views_of_a_plain_module(fused):
    net, example = fused
    ax = mo.axes.trace(net, *example, names=QKV)
    view = mo.axes.label(net, ax)
    assert set(view) == {name for name, _ in net.named_parameters()}
    assert len(view) == len(list(net.parameters()))
    weight = view["blocks.0.att.qkv.weight"]
    prefix = "blocks.0.att.qkv."
    assert weight.names == (f"{prefix}qkv", f"{prefix}head", f"{prefix}size", "model")
    whole = weight.sum(f"{prefix}head")
    plain = net.blocks[0].att.qkv.weight.unflatten(0, (3, 4, 6)).sum(1)
    assert torch.equal(whole.data, plain)
    # Both axes of the two matrices pair by name.
    assert mo.dot(view["blocks.0.down.weight"], view["blocks.0.up.weight"]).names == ()
    weight.data.detach().zero_()  # it is a view
    assert not net.blocks[0].att.qkv.weight.any()
    view["head.weight"].sum().data.backward()
    assert net.head.weight.grad is not None


def test_names_of_views_of_concatenations_and_of_repeated_axes():
    torch.manual_seed(0)
    net, example, _ = MODELS["unet"]()
    view = mo.axes.label(net, mo.axes.trace(net, *example))
    assert view["c.weight"].names[:2] == ("c.out", "a.out+b.out")
    net, example, _ = MODELS["rnn"]()
    view = mo.axes.label(net, mo.axes.trace(net, *example))
    first = "cell.weight_ih_l0.out"
    assert view["cell.weight_hh_l0"].names == (first, f"{first}'")
    with pytest.raises(ValueError, match="'0.weight' has shape"):
        mo.axes.label(nn.Sequential(nn.Linear(2, 3)), mo.axes.trace(nn.Sequential(nn.Linear(3, 3)), torch.zeros(1, 3)))


def test_the_error_for_an_unknown_axis_lists_the_free_axes():
    ax = mo.axes.trace(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)), torch.zeros(1, 2))
    with pytest.raises(KeyError, match=r"no axis '0\.0'; its free axes are 0\.out"):
        ax["0.0"]
    with pytest.raises(KeyError, match="did you mean '0.out'"):
        ax["0.ou"]
