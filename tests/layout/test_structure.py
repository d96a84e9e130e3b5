"""Structures of live modules: never stale, equal to torch's own listing, and with errors for malformed modules."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from layout.helpers import check_against_torch, check_watch, mlp
from moduli.layout import (
    Layout,
    LayoutError,
    TreeWatch,
    addresses,
    diff,
    layout_and_tensors,
    layout_of,
    read,
)
from strategies import Node, edit, modules


@settings(max_examples=150)
@given(modules(), st.data())
def test_no_edit_goes_unnoticed(net, data):
    layout_of(net)
    for _ in range(data.draw(st.integers(1, 4))):
        edit(data, net)
        layout = check_against_torch(net)
        # Nothing is cached for a copy, so its layout is read from scratch.
        assert layout_of(copy.deepcopy(net)) is layout


def late_tie(net):
    net[3].weight = nn.Parameter(net[0].weight.detach().clone())
    layout_of(net)
    net[3].weight = net[0].weight


EDITS_BY_HAND = {
    "edit in a child": lambda net: setattr(net[0], "bias", None),
    "renamed child": lambda net: net._modules.update(tail=net._modules.pop("3")),
    "deletion": lambda net: delattr(net[0], "bias"),
    "append": lambda net: net.append(nn.Linear(2, 2)),
    "set_submodule": lambda net: net.set_submodule("0", nn.Linear(3, 4, bias=False)),
    "swapped parameter": lambda net: setattr(net[3], "bias", nn.Parameter(torch.zeros(5))),
    "late tying": late_tie,
    "half": lambda net: net.half(),
    "one child in double": lambda net: net[3].double(),
    "data of another shape": lambda net: setattr(net[0].bias, "data", torch.zeros(9)),
    "data of the same size": lambda net: setattr(net[0].weight, "data", net[0].weight.data.t()),
    "meta": lambda net: net.to("meta"),
    "new buffer": lambda net: net[0].register_buffer("mask", torch.ones(2)),
    "buffer no longer persistent": lambda net: net[1].register_buffer("running_mean", torch.zeros(4), persistent=False),
    "parameter becomes buffer": lambda net: net[0].register_buffer("bias", net[0]._parameters.pop("bias").data),
    "raw dict surgery": lambda net: net[0]._parameters.update(extra=nn.Parameter(torch.zeros(1))),
    "a dict replaced": lambda net: net[0].__dict__.update(_parameters={}),
    "parametrized": lambda net: nn.utils.parametrizations.orthogonal(net[3], "weight"),
    "pruned": lambda net: prune.random_unstructured(net[0], "weight", amount=0.5),
    "swap_tensors": lambda net: torch.utils.swap_tensors(net[0].bias, nn.Parameter(torch.zeros(4).double())),
}


@pytest.mark.parametrize("kind", EDITS_BY_HAND)
def test_each_kind_of_edit_is_noticed(kind):
    net = mlp()
    if kind == "late tying":
        net[3] = nn.Linear(3, 4)
    before, watch = layout_of(net), TreeWatch.of(net, read(net))
    EDITS_BY_HAND[kind](net)
    assert check_against_torch(net) is not before
    assert not check_watch(watch, net)


def test_every_rearrangement_of_the_same_tensors_is_noticed():
    """Two tensors move between parameters and buffers of three modules, with empty modules of the same names around."""
    tensors = {"x": nn.Parameter(torch.zeros(2)), "y": nn.Parameter(torch.zeros(2))}
    slots_of_modules = [(where, kind) for where in ("", "c", "d") for kind in ("_parameters", "_buffers")]
    configurations = list(itertools.product(slots_of_modules, slots_of_modules, (None, "x", "y")))

    def arrange(net, configuration):
        *slots, empty = configuration
        children = {where: nn.Module() for where, _ in slots if where}
        if empty is not None:
            children[empty] = nn.Module()
        net.__dict__.update(_parameters={}, _buffers={}, _modules=children)
        for (name, tensor), (where, kind) in zip(tensors.items(), slots, strict=True):
            (children[where] if where else net).__dict__[kind][name] = tensor
        return net

    expected = {configuration: layout_of(arrange(nn.Module(), configuration)) for configuration in configurations}
    net = nn.Module()
    for before, after in itertools.product(configurations, configurations):
        assert layout_of(arrange(net, before)) is expected[before]
        assert layout_of(arrange(net, after)) is expected[after]


def test_training_and_loading_do_not_change_the_layout():
    net = mlp()
    before = layout_of(net)
    net(torch.randn(5, 3)).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    net.requires_grad_(False)
    net.eval()
    net.load_state_dict(mlp().state_dict())
    net.load_state_dict(mlp().state_dict(), assign=True)
    net[0] = nn.Linear(3, 4)
    net[1].running_mean = net[1].running_mean + 1
    assert layout_of(net) is before


def test_rebound_tensors_are_the_ones_returned():
    net = mlp()
    layout_of(net)
    net.load_state_dict(mlp().state_dict(), assign=True)
    assert [id(t) for t in layout_and_tensors(net)[1]] == [id(p) for p in net.parameters()]


def test_a_reused_id_does_not_return_an_old_layout():
    net = Node()
    for size in range(1, 30):
        net.register_parameter("w", nn.Parameter(torch.zeros(size)))
        assert layout_of(net)["w"].shape == (size,)
        del net.w


def test_replaced_storage_changes_its_address():
    net = mlp()
    before = addresses(net)
    assert addresses(net) == before
    net[0].bias.data = net[0].bias.data.clone()
    assert [a == b for a, b in zip(before, addresses(net), strict=True)] == [True, False, True, True, True, True]
    assert set(addresses(mlp().to("meta"))) == {0}


def test_a_dropped_module_is_freed_at_once():
    gc.disable()
    try:
        net = mlp()
        layout_of(net)
        references = [weakref.ref(net), weakref.ref(net[0]), weakref.ref(net[1].running_mean)]
        del net
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()


def test_a_removed_child_is_freed_at_once():
    gc.disable()
    try:
        net = mlp()
        layout_of(net)
        reference = weakref.ref(net[0])
        del net[0]
        assert reference() is None
    finally:
        gc.enable()


def test_a_module_in_a_cycle_with_its_hooks_is_collected():
    net = mlp()
    net[0].register_forward_hook(lambda *_, owner=net: None)
    net[0].weight.register_hook(lambda grad, owner=net: grad)
    layout_of(net)
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None


def test_parameters_are_not_weakly_referenced():
    net = mlp()
    layout_of(net)
    addresses(net)
    assert [weakref.getweakrefcount(p) for p in net.parameters()] == [0] * 6


def test_unused_layouts_are_freed():
    reference = weakref.ref(layout_of([torch.zeros(11, 13)]))
    gc.collect()
    assert reference() is None


def test_modules_may_define_equality():
    class Odd(Node):
        __hash__ = None

        def __eq__(self, other):
            raise RuntimeError("never compare modules")

        def __len__(self):
            return 0

    a, b = Odd(), Odd()
    a.w, b.w = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    a.sub = b
    assert layout_of(a).names == ("w", "sub.w")
    assert layout_of(a) is not layout_of(b)
    assert layout_of(a).names == ("w", "sub.w")


def test_a_module_without_parameters_has_the_empty_layout():
    layout = layout_of(nn.Identity())
    assert layout is layout_of([]) is layout_of({}) is Layout()
    assert (len(layout), layout.numel, layout.groups, layout.pack([]), layout.views([])) == (0, 0, (), [], [])
    assert layout
    assert len(layout.fingerprint) == 64


def test_shared_submodules_are_ties():
    shared = nn.Linear(2, 2)
    net = nn.ModuleDict({"left": shared, "right": shared})
    layout = check_against_torch(net)
    assert layout["right.weight"].names == ("left.weight", "right.weight")
    assert repr(layout) == "Layout(2 parameters, 6 elements, 2 ties)"
    assert diff(net, nn.ModuleDict({"left": shared, "right": nn.Linear(2, 2)})).kind == "tie"


def test_shared_buffers_are_ties():
    shared = nn.BatchNorm1d(2, affine=False)
    layout = layout_of(nn.ModuleList([shared, shared]))
    assert layout.buffers[0].ties == ("1.running_mean",)
    assert repr(layout) == "Layout(0 parameters, 0 elements, 3 buffers)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.ParameterList([torch.zeros(2), torch.zeros(3)]),
        lambda: nn.ParameterDict({"x": nn.Parameter(torch.zeros(2)), "y": nn.Parameter(torch.zeros(()))}),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.Linear(3, 3, device="meta"),
        lambda: nn.Embedding(5, 3, dtype=torch.complex64),
    ],
)
def test_built_in_modules_of_torch_have_equal_layouts_when_built_twice(make):
    net = make()
    check_against_torch(net)
    assert layout_of(net) is layout_of(make())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_traced_modules():
    net = mlp()
    layout_of(net)
    for twin in (torch.jit.script(net), torch.fx.symbolic_trace(net)):
        layout, live = layout_and_tensors(twin)
        assert layout is layout_of(net)
        assert layout_of(twin) is layout
        assert [t.data_ptr() for t in live] == [p.data_ptr() for p in net.parameters()]


def test_a_module_that_initialises_itself_lazily_is_read():
    class Shell(nn.Module):
        def __getattr__(self, name):
            if "_parameters" not in self.__dict__:
                nn.Module.__init__(self)
                self.w = nn.Parameter(torch.zeros(3))
                return getattr(self, name)
            return super().__getattr__(name)

    outer = nn.Sequential(nn.Linear(1, 1))
    layout_of(outer)
    outer[0] = object.__new__(Shell)
    assert layout_of(outer).names == ("0.w",)
    assert layout_of(object.__new__(Shell)).names == ("w",)


def test_functional_call_reads_the_substituted_parameters():
    dtypes = []

    class Net(nn.Linear):
        def forward(self, x):
            dtypes.append(layout_of(self)["weight"].dtype)
            return super().forward(x)

    net = Net(2, 2)
    outside = layout_of(net)
    torch.func.functional_call(net, {k: v.double() for k, v in net.named_parameters()}, torch.zeros(1, 2).double())
    stacked = {k: torch.stack([v, v]) for k, v in net.named_parameters()}
    torch.vmap(lambda p: torch.func.functional_call(net, p, torch.zeros(1, 2)))(stacked)
    assert dtypes == [torch.float64, torch.float32]
    assert layout_of(net) is outside


def test_lazy_parameters_are_refused_until_they_have_a_shape():
    net = nn.Sequential(nn.LazyLinear(2))
    for source in (net, list(net.parameters())):
        with pytest.raises(LayoutError, match=r"lazy.*run one forward pass first"):
            layout_of(source)
    net(torch.zeros(1, 3))
    assert layout_of(net)["0.weight"].shape == (2, 3)
    net[0].weight = nn.UninitializedParameter()
    with pytest.raises(LayoutError, match=r"'0\.weight' is lazy"):
        layout_of(net)


def test_a_module_inside_itself_is_refused():
    net = Node()
    net.sub = Node()
    layout_of(net)
    net.sub.back = net
    with pytest.raises(LayoutError, match=r"'sub\.back' \(Node\) contains itself"):
        layout_of(net)
    del net.sub.back
    assert layout_of(net) is Layout()


def test_a_module_that_was_not_initialised_is_refused():
    class Forgetful(nn.Module):
        def __init__(self):
            layout_of(self)

    with pytest.raises(LayoutError, match=r"super\(\).__init__\(\)"):
        Forgetful()


def test_a_module_that_lost_its_dicts_is_refused():
    net = mlp()
    layout_of(net)
    del net[0].__dict__["_parameters"]
    with pytest.raises(LayoutError, match=r"'0' \(Linear\)"):
        layout_of(net)


class EditedWhileRead(dict):
    """A dict of parameters that gains an entry right after its names or its values were read, as by another thread."""

    def __init__(self, parameters, after):
        super().__init__(parameters)
        self.after = after

    def _edit(self, now):
        if self.after == now and "late" not in self:
            self["late"] = nn.Parameter(torch.zeros(7))

    def keys(self):
        names = list(super().keys())
        self._edit("keys")
        return names

    def values(self):
        values = list(super().values())
        self._edit("values")
        return values


@pytest.mark.parametrize(("after", "expected"), [("values", ("weight", "bias")), ("keys", ("weight", "bias", "late"))])
def test_a_reading_is_consistent_while_another_thread_edits(after, expected):
    # Sizes that no other test uses: the structure must not be cached yet.
    net = nn.Linear(17, 23)
    net.__dict__["_parameters"] = EditedWhileRead(net._parameters, after)
    reading = read(net)
    assert reading.structure.layout.names == expected
    assert [tuple(p.shape) for p in reading.parameters] == [e.shape for e in reading.structure.layout]
    assert read(net).structure.layout.names == ("weight", "bias", "late")
