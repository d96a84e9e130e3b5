"""Layouts: equal to torch's own listing, never stale, stable across processes, and honest about differences."""

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import weakref
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import moduli as mo
from moduli.layout import (
    Difference,
    Entry,
    Layout,
    LayoutError,
    TreeWatch,
    addresses,
    diff,
    layout_and_tensors,
    layout_of,
    map_tensors,
    read,
)
from strategies import ALL_DTYPES, Node, edit, modules, parameters


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def check_against_torch(net):
    """The layout, spelled out from torch's own listings."""
    layout, live = layout_and_tensors(net)
    listed = list(net.named_parameters())
    assert layout.names == tuple(name for name, _ in listed)
    assert [id(t) for t in live] == [id(p) for _, p in listed]
    every = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    filled, start = {}, 0
    for entry, (name, parameter) in zip(layout, listed, strict=True):
        key = (parameter.dtype, parameter.device)
        offset = filled.get(key, 0)
        assert entry.names == tuple(every[id(parameter)])
        assert (entry.shape, entry.dtype, entry.device) == (parameter.shape, parameter.dtype, parameter.device)
        assert (entry.offset, entry.start, entry.numel) == (offset, start, parameter.numel())
        assert layout.groups[entry.group].dtype is entry.dtype
        assert all(layout[n] is entry and n in layout for n in entry.names)
        filled[key] = offset + parameter.numel()
        start += parameter.numel()
        assert layout[name] is entry
    assert layout.numel == start == sum(group.numel for group in layout.groups)
    assert [(g.dtype, g.device, g.numel) for g in layout.groups] == [(*k, n) for k, n in filled.items()]
    saved = net.state_dict(keep_vars=True)
    assert [b.name for b in layout.buffers] == [name for name, _ in net.named_buffers()]
    for entry, (name, buffer) in zip(layout.buffers, net.named_buffers(), strict=True):
        assert (entry.shape, entry.dtype, entry.device) == (buffer.shape, buffer.dtype, buffer.device)
        assert entry.persistent == (name in saved)
        assert entry.numel == buffer.numel()
    return layout


# -- the layout is torch's --------------------------------------------------------------------------------------------


@given(modules(ALL_DTYPES))
def test_a_layout_is_what_torch_lists(net):
    layout = check_against_torch(net)
    assert layout_of(net) is layout


@given(modules(ALL_DTYPES))
def test_copies_have_the_very_same_layout(net):
    assert layout_of(copy.deepcopy(net)) is layout_of(net)
    assert layout_of(pickle.loads(pickle.dumps(net))) is layout_of(net)


@given(modules())
def test_the_layout_of_a_listing_is_the_layout_of_the_module(net):
    layout = layout_of(net)
    pairs = list(net.named_parameters(remove_duplicate=False))
    assert layout_of(pairs).entries == layout.entries
    assert layout_of(dict(pairs)).entries == layout.entries
    assert layout_of(net.named_parameters(remove_duplicate=False)).fingerprint == layout.fingerprint
    assert [e.shape for e in layout_of(net.parameters())] == [e.shape for e in layout]


@settings(max_examples=150)
@given(modules(), st.data())
def test_no_edit_goes_unnoticed(net, data):
    layout_of(net)
    for _ in range(data.draw(st.integers(1, 4))):
        edit(data, net)
        layout = check_against_torch(net)
        # A copy has no memory, so its layout is freshly read.
        assert layout_of(copy.deepcopy(net)) is layout


def check_watch(watch, net):
    """What a watch returns is what is read; return whether it returns anything."""
    seen, live = watch.read(net), read(net)
    if seen is not None:
        assert seen.structure is live.structure
        for ours, theirs in zip(seen[1:], live[1:], strict=True):
            assert list(map(id, ours)) == list(map(id, theirs))
    return seen is not None


@settings(max_examples=150)
@given(modules(), st.data())
def test_a_watch_holds_exactly_as_long_as_the_reading(net, data):
    watch = TreeWatch.of(net, read(net))
    assert check_watch(watch, net)
    for _ in range(data.draw(st.integers(1, 4))):
        edit(data, net)
        check_watch(watch, net)


@given(modules(ALL_DTYPES))
def test_pack_and_views_are_inverse(net):
    layout, live = layout_and_tensors(net)
    vectors = layout.pack([t.detach() for t in live])
    assert [(v.dtype, v.numel()) for v in vectors] == [(g.dtype, g.numel) for g in layout.groups]
    for view, tensor in zip(layout.views(vectors), live, strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(view, tensor)
    out = [group.empty() for group in layout.groups]
    assert all(a is b for a, b in zip(layout.pack(live, out=out), out, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(out, vectors, strict=True))


def _graded(layout, vectors):
    with torch.enable_grad():
        return layout.views(vectors)


@given(modules(), st.integers(0, 3))
def test_views_of_a_stack_are_stacks_of_views(net, count):
    layout = layout_of(net)
    stacks = [group.empty(count).zero_() for group in layout.groups]
    for entry, view in zip(layout, layout.views(stacks), strict=True):
        assert view.shape == (count, *entry.shape)
        view.fill_(entry.start)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(layout.views(stacks), _graded(layout, stacks), strict=True))
        assert [v.data_ptr() for v in layout.views(stacks)] == [v.data_ptr() for v in _graded(layout, stacks)]
    for row in range(count):
        for entry, view in zip(layout, layout.views([s[row] for s in stacks]), strict=True):
            assert torch.equal(view, torch.full(entry.shape, entry.start, dtype=entry.dtype))


@given(modules(), modules())
def test_diff_is_none_exactly_when_fingerprints_agree(left, right):
    for a, b in ((left, right), (right, left), (left, copy.deepcopy(left))):
        difference = diff(a, b)
        assert (difference is None) == (layout_of(a).fingerprint == layout_of(b).fingerprint)
        if difference is not None:
            assert repr(difference.path) in str(difference)
            assert difference.left != difference.right


@given(modules(), st.data())
def test_diff_sees_what_an_edit_did(net, data):
    before = layout_of(net)
    edit(data, net)
    after = layout_of(net)
    assert (diff(before, after) is None) == (before.entries == after.entries or before.fingerprint == after.fingerprint)


# -- each edit by name ------------------------------------------------------------------------------------------------


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


def tie_equal_scalars(net):
    net[3]._parameters["b"] = net[3]._parameters["a"]


def reorder(net):
    net[0]._parameters["weight"] = net[0]._parameters.pop("weight")


def exchange_for_a_copy(net):
    net[3] = copy.deepcopy(net[3])


WATCHED = {
    "equal parameters of one element are tied": tie_equal_scalars,
    "a parameter of one element is replaced by an equal one": lambda net: setattr(
        net[3], "b", nn.Parameter(torch.ones(1))
    ),
    "parameters change places": reorder,
    "a child is replaced by a copy": exchange_for_a_copy,
    "the class changes": lambda net: setattr(net[2], "__class__", nn.ReLU),
    "the attributes of a child are replaced": lambda net: net[0].__setattr__("__dict__", vars(nn.Linear(3, 4))),
    "a buffer is no longer saved": lambda net: net[1]._non_persistent_buffers_set.add("running_mean"),
}


@pytest.mark.parametrize("kind", WATCHED)
def test_a_watch_notices(kind):
    net = mlp()
    net[3].a, net[3].b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    watch = TreeWatch.of(net, read(net))
    assert check_watch(watch, net)
    WATCHED[kind](net)
    assert not check_watch(watch, net)


def test_a_watch_notices_other_labels():
    net = mo.Module()
    net.w = mo.tensor([1.0, 2.0], c=["r", "g"])
    watch = TreeWatch.of(net, read(net))
    assert check_watch(watch, net)
    other = mo.Module()
    other.w = mo.tensor([1.0, 2.0], c=["x", "y"])
    vars(net)["_labelled"] = vars(other)["_labelled"]
    assert not check_watch(watch, net)


def test_a_watch_keeps_no_root_alive():
    net = mlp()
    watch, gone = TreeWatch.of(net, read(net)), weakref.ref(net)
    del net
    assert gone() is None
    assert watch is not None


def test_rearranging_the_same_tensors_is_noticed():
    """Two tensors move between parameters and buffers of three modules, with empty modules of the same names around."""
    tensors = {"x": nn.Parameter(torch.zeros(2)), "y": nn.Parameter(torch.zeros(2))}
    places = [(where, kind) for where in ("", "c", "d") for kind in ("_parameters", "_buffers")]
    configurations = list(itertools.product(places, places, (None, "x", "y")))

    def arrange(net, configuration):
        *homes, empty = configuration
        children = {where: nn.Module() for where, _ in homes if where}
        if empty is not None:
            children[empty] = nn.Module()
        net.__dict__.update(_parameters={}, _buffers={}, _modules=children)
        for (name, tensor), (where, kind) in zip(tensors.items(), homes, strict=True):
            (children[where] if where else net).__dict__[kind][name] = tensor
        return net

    expected = {configuration: layout_of(arrange(nn.Module(), configuration)) for configuration in configurations}
    net = nn.Module()
    for before, after in itertools.product(configurations, configurations):
        assert layout_of(arrange(net, before)) is expected[before]
        assert layout_of(arrange(net, after)) is expected[after]


def test_what_is_not_structure_changes_nothing():
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


def test_a_reused_id_is_no_trap():
    net = Node()
    for size in range(1, 30):
        net.register_parameter("w", nn.Parameter(torch.zeros(size)))
        assert layout_of(net)["w"].shape == (size,)
        del net.w


def test_swapped_storage_shows_in_the_addresses():
    net = mlp()
    before = addresses(net)
    assert addresses(net) == before
    net[0].bias.data = net[0].bias.data.clone()
    assert [a == b for a, b in zip(before, addresses(net), strict=True)] == [True, False, True, True, True, True]
    assert set(addresses(mlp().to("meta"))) == {0}


# -- the memory keeps nothing alive -----------------------------------------------------------------------------------


def test_a_dropped_module_is_freed_at_once():
    gc.disable()
    try:
        net = mlp()
        layout_of(net)
        ghosts = [weakref.ref(net), weakref.ref(net[0]), weakref.ref(net[1].running_mean)]
        del net
        assert [ghost() for ghost in ghosts] == [None, None, None]
    finally:
        gc.enable()


def test_a_removed_child_is_freed_at_once():
    gc.disable()
    try:
        net = mlp()
        layout_of(net)
        ghost = weakref.ref(net[0])
        del net[0]
        assert ghost() is None
    finally:
        gc.enable()


def test_a_module_that_its_own_hooks_refer_to_is_collected():
    net = mlp()
    net[0].register_forward_hook(lambda *_, owner=net: None)
    net[0].weight.register_hook(lambda grad, owner=net: grad)
    layout_of(net)
    ghost = weakref.ref(net)
    del net
    gc.collect()
    assert ghost() is None


def test_parameters_are_not_weakly_referenced():
    net = mlp()
    layout_of(net)
    addresses(net)
    assert [weakref.getweakrefcount(p) for p in net.parameters()] == [0] * 6


def test_unused_layouts_are_freed():
    ghost = weakref.ref(layout_of([torch.zeros(11, 13)]))
    gc.collect()
    assert ghost() is None


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


# -- what modules there are -------------------------------------------------------------------------------------------


def test_nothing_at_all():
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
def test_modules_of_torch(make):
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


def test_dicts_that_are_made_when_asked_for():
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


def test_a_function_call_with_other_parameters_sees_those():
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append(layout_of(self)["weight"].dtype)
            return super().forward(x)

    net = Net(2, 2)
    outside = layout_of(net)
    torch.func.functional_call(net, {k: v.double() for k, v in net.named_parameters()}, torch.zeros(1, 2).double())
    stacked = {k: torch.stack([v, v]) for k, v in net.named_parameters()}
    torch.vmap(lambda p: torch.func.functional_call(net, p, torch.zeros(1, 2)))(stacked)
    assert seen == [torch.float64, torch.float32]
    assert layout_of(net) is outside


def test_views_under_function_transforms():
    layout = layout_of(nn.Linear(3, 2))
    assert torch.func.grad(lambda v: sum((x**2).sum() for x in layout.views(v)))(torch.ones(8)).tolist() == [2.0] * 8
    assert torch.vmap(lambda v: layout.views(v)[0])(torch.ones(5, 8)).shape == (5, 2, 3)


def test_devices_and_dtypes_have_groups_of_their_own():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2).half(), nn.Linear(2, 2)])
    layout = check_against_torch(net)
    assert [g.indices for g in layout.groups] == [(0, 1, 6, 7), (2, 3), (4, 5)]
    assert layout.fingerprint == layout_of(copy.deepcopy(net).to("meta")).fingerprint


def test_duplicates_in_a_list_are_ties():
    a, b = torch.zeros(2), torch.zeros(2)
    assert [e.names for e in layout_of([a, b, a])] == [("0", "2"), ("1",)]


@given(st.lists(parameters(ALL_DTYPES), max_size=4))
def test_lists_are_named_by_position(tensors):
    layout, live = layout_and_tensors(iter(tensors))
    assert layout.names == tuple(str(i) for i in range(len(tensors)))
    assert all(a is b for a, b in zip(live, tensors, strict=True))


# -- fingerprints and copies ------------------------------------------------------------------------------------------

FINGERPRINT = """
import torch
from moduli.layout import layout_of
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
net[3].weight = net[2].weight
net[2].double()
print(layout_of(net).fingerprint)
"""


def test_fingerprints_are_stable_across_processes():
    prints = set()
    for seed in ("0", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        prints.add(done.stdout.strip())
    # Written down, so that a change of the digest, which would orphan stored fingerprints, is a decision.
    assert prints == {"f821b40e494c476dc260bea8fcd0c35a0f1168e00d26135dbc2518b59df7f001"}


def test_the_fingerprint_is_about_parameters_only():
    plain, normed = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
    assert layout_of(plain) is not layout_of(normed)
    assert layout_of(plain).fingerprint == layout_of(normed).fingerprint
    assert diff(plain, normed) is None


def test_copies_of_a_layout_are_the_layout():
    layout = layout_of(mlp())
    for twin in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert twin is layout
    done = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; print(pickle.load(sys.stdin.buffer).fingerprint)"],
        input=pickle.dumps(layout),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == layout.fingerprint


def test_an_entry_never_changes():
    with pytest.raises(AttributeError):
        layout_of(mlp()).entries[0].name = "other"


# -- differences ------------------------------------------------------------------------------------------------------


def tied(*positions, count=3):
    net = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(count))
    for position in positions[1:]:
        net[position].weight = net[positions[0]].weight
    return net


@pytest.mark.parametrize(
    ("left", "right", "expected", "sentence"),
    [
        (
            nn.Linear(3, 2),
            nn.Linear(3, 2, bias=False),
            Difference("bias", "missing", (2,), None),
            "'bias' is missing on the right; on the left it has shape (2,)",
        ),
        (
            nn.Linear(3, 2, bias=False),
            nn.Linear(3, 2),
            Difference("bias", "missing", None, (2,)),
            "'bias' is missing on the left; on the right it has shape (2,)",
        ),
        (
            nn.Linear(3, 2),
            nn.Linear(4, 2),
            Difference("weight", "shape", (2, 3), (2, 4)),
            "'weight' has shape (2, 3) on the left and (2, 4) on the right",
        ),
        (
            nn.Linear(3, 2),
            nn.Linear(3, 2).double(),
            Difference("weight", "dtype", torch.float32, torch.float64),
            "'weight' has dtype torch.float32 on the left and torch.float64 on the right",
        ),
        (
            tied(0, 2),
            tied(),
            Difference("2.weight", "tie", "0.weight", None),
            "'2.weight' is tied to '0.weight' on the left and a parameter of its own on the right",
        ),
        (
            tied(0, 2),
            tied(1, 2),
            Difference("2.weight", "tie", "0.weight", "1.weight"),
            "'2.weight' is tied to '0.weight' on the left and tied to '1.weight' on the right",
        ),
        (
            {"a": torch.zeros(1), "b": torch.zeros(1)},
            {"b": torch.zeros(1), "a": torch.zeros(1)},
            Difference("a", "order", 0, 1),
            "'a' has place 0 on the left and place 1 on the right",
        ),
    ],
)
def test_differences_are_named(left, right, expected, sentence):
    assert diff(left, right) == expected
    assert diff(layout_of(left), layout_of(right)) == expected
    assert str(expected) == sentence


def test_the_order_of_tied_names_alone_is_a_difference():
    w = torch.zeros(1)
    assert diff({"a": w, "b": w}, {"b": w, "a": w}) == Difference("a", "order", 0, 1)


# -- mistakes ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(3), "put it in a list"),
        ("weight", "got str"),
        (3, "got int"),
        ([torch.zeros(1), 3], "item 1 is a int"),
        ([("w", 3)], "item 0 is a tuple"),
        ({1: torch.zeros(1)}, "item 0 is a tuple"),
        ([nn.Linear(1, 1)], "item 0 is a Linear"),
        (None, "got NoneType"),
    ],
)
def test_what_has_no_layout_is_refused(source, message):
    with pytest.raises(TypeError, match=message):
        layout_of(source)


def test_names_must_be_distinct():
    with pytest.raises(LayoutError, match="two parameters are called 'w'"):
        layout_of([("w", torch.zeros(1)), ("w", torch.zeros(1))])


def test_tensors_that_do_not_fit_are_refused():
    layout = layout_of(nn.Linear(3, 2))
    good = [torch.zeros(2, 3), torch.zeros(2)]
    with pytest.raises(LayoutError, match="2 parameters; 1 tensors"):
        layout.pack(good[:1])
    with pytest.raises(LayoutError, match=r"'bias' is float32 of shape \(2,\) in this layout.*\(1,\)"):
        layout.pack([good[0], torch.zeros(1)])
    with pytest.raises(LayoutError, match=r"'weight' is float32.*float64"):
        layout.pack([good[0].double(), good[1]])
    with pytest.raises(LayoutError, match="one vector of 8 elements"):
        layout.pack(good, out=torch.zeros(4, 8))
    for vectors in (torch.zeros(7), torch.zeros(()), torch.zeros(8).double()):
        with pytest.raises(LayoutError, match="must end in a dimension of 8"):
            layout.views(vectors)
    with pytest.raises(LayoutError, match=r"\(1: torch.float32 on cpu\); got 2"):
        layout.views([torch.zeros(8), torch.zeros(8)])


def test_packing_carries_gradients_unless_it_writes():
    net = nn.Linear(3, 2)
    layout, live = layout_and_tensors(net)
    (vector,) = layout.pack(live)
    vector.sum().backward()
    assert net.weight.grad.sum() == 6
    out = torch.zeros(8)
    layout.pack(live, out=out)
    assert not out.requires_grad
    assert torch.equal(out, vector)


def test_views_can_be_changed_in_place_under_autograd():
    layout = layout_of(nn.Linear(3, 2))
    scale = torch.ones((), requires_grad=True)
    vector = torch.ones(8)
    layout.views(vector)[0].mul_(scale)
    vector.sum().backward()
    assert scale.grad == 6


def test_unknown_names_list_the_known_ones():
    with pytest.raises(KeyError, match=r"no parameter is called 'wieght'; the first ones are \['weight', 'bias'\]"):
        layout_of(nn.Linear(1, 1))["wieght"]
    with pytest.raises(KeyError, match=r"'7'\]"):
        layout_of([torch.zeros(1) for _ in range(9)])["x"]
    with pytest.raises(KeyError, match=r"are \[\]"):
        Layout()["x"]


def test_entries_are_values():
    entry = layout_of(nn.Linear(1, 1))["weight"]
    assert entry == Entry("weight", (1, 1), torch.float32, torch.device("cpu"), 1, 0, 0, 0)
    assert pickle.loads(pickle.dumps(entry)) == entry


# ---------------------------------------------------------------- nested values


def test_tensors_inside_of_every_container_are_replaced():
    held = torch.ones(2)
    value = {"list": [held, 3], "deque": deque([held, (held, "text")], maxlen=5), "dict": {"inner": held}, "none": None}
    made = map_tensors(value, torch.neg, lambda other: f"<{other}>")
    assert [type(made[key]) for key in value] == [list, deque, dict, str]
    assert made["deque"].maxlen == 5
    assert type(made["deque"][1]) is tuple
    replaced = [made["list"][0], made["deque"][0], made["deque"][1][0], made["dict"]["inner"]]
    assert all(torch.equal(tensor, -held) for tensor in replaced)
    assert (made["list"][1], made["deque"][1][1], made["none"]) == ("<3>", "<text>", "<None>")
    assert map_tensors(value, torch.neg)["list"][1] == 3
    assert torch.equal(held, torch.ones(2))
    assert value["list"][0] is held


class EditedWhileRead(dict):
    """Parameters that another thread adds to, after its names or its values were read."""

    def __init__(self, held, after):
        super().__init__(held)
        self.after = after

    def _edit(self, now):
        if self.after == now and "late" not in self:
            self["late"] = nn.Parameter(torch.zeros(7))

    def keys(self):
        names = list(super().keys())
        self._edit("keys")
        return names

    def values(self):
        held = list(super().values())
        self._edit("values")
        return held


@pytest.mark.parametrize(("after", "expected"), [("values", ("weight", "bias")), ("keys", ("weight", "bias", "late"))])
def test_a_reading_is_one_look_whatever_another_thread_edits(after, expected):
    # Sizes that no other test has: the structure must not be known.
    net = nn.Linear(17, 23)
    net.__dict__["_parameters"] = EditedWhileRead(net._parameters, after)
    seen = read(net)
    assert seen.structure.layout.names == expected
    assert [tuple(p.shape) for p in seen.parameters] == [e.shape for e in seen.structure.layout]
    assert read(net).structure.layout.names == ("weight", "bias", "late")


def test_a_layout_never_changes():
    layout = layout_of(mlp())
    for name in ("entries", "numel", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(layout, name, 1)
