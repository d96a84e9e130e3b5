"""Edits and versions: random edits of random relatives, with exceptions raised at every step of an edit."""

import contextlib
import copy
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

from moduli import particles
from moduli.layout import layout_of, read
from moduli.particles import (
    NytoModule,
    StructureError,
    _compare,
    _editing,
    _record,
    _species,
    adopt,
    edits,
    history,
    independent,
    migrate,
    species,
)
from moduli.particles._version import Numbering, Version

NAMES = ["a", "b", "c"]
# The functions that an edit calls, each of which is made to raise.
STEPS = [
    (_species, "compare"),
    (_species, "adopt_children"),
    (Version, "locate"),
    (_record, "capture"),
    (_species, "read"),
    (_species, "recall"),
    (_editing, "compare"),
    (_editing, "adopt_children"),
    (_editing, "read"),
    (_editing, "recall"),
    (edits, "_copy_to"),
    (edits, "restore"),
    (edits.ParticleEdit, "settle"),
    (edits.ParticleEdit, "run"),
    (edits.ParticleEdit, "sentence"),
    (_compare, "capture"),
    (Numbering, "add_module"),
    (Numbering, "add_param"),
    (Version, "event"),
    (Version, "__init__"),
    (Version, "particle_update"),
]


class Injected(Exception):
    pass


@contextlib.contextmanager
def failing(where, name, countdown):
    """Temporarily make one call of a function raise.

    Args:
        where: The owner of the function.
        name: Its attribute.
        countdown: Call number `countdown // 2` raises, before its work if `countdown` is even and after it otherwise.
    """
    original = getattr(where, name)
    left = [countdown // 2]

    def broken(*args, **kwargs):
        if left[0] == 0 and countdown % 2 == 0:
            raise Injected
        result = original(*args, **kwargs)
        if left[0] == 0:
            raise Injected
        left[0] -= 1
        return result

    setattr(where, name, broken)
    try:
        yield
    finally:
        setattr(where, name, original)


def snapshot(net):
    """Return everything about a model that an edit could change."""
    return (
        [(path, type(m), list(m._parameters), list(m._buffers), list(m._modules)) for path, m in net.named_modules()],
        {name: (id(p), p.detach().clone()) for name, p in net.named_parameters(remove_duplicate=False)},
        {name: (id(b), b.clone()) for name, b in net.named_buffers(remove_duplicate=False)},
        [sorted(m._non_persistent_buffers_set) for m in net.modules()],
    )


def are_equal(a, b):
    return (
        a[0] == b[0]
        and a[3] == b[3]
        and all(
            x.keys() == y.keys() and all(x[n][0] == y[n][0] and torch.equal(x[n][1], y[n][1]) for n in x)
            for x, y in ((a[1], b[1]), (a[2], b[2]))
        )
    )


def structure(net):
    return (
        [(path, type(m)) for path, m in net.named_modules(remove_duplicate=False)],
        [(e.names, e.shape) for e in layout_of(net)],
        [(b.name, b.persistent) for b in layout_of(net).buffers],
    )


class Tree(NytoModule):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.seq = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.child = NytoModule()
        self.child.v = nn.Parameter(torch.zeros(3))


class Siblings(RuleBasedStateMachine):
    """Random edits, sums and failures on up to four relatives."""

    def __init__(self):
        super().__init__()
        self.nets = [Tree()]
        self.nets.append(self.nets[0].clone())

    def edit(self, net, kind, name, size):
        """Make one edit through the public interface.

        Args:
            net: The particle.
            kind: The kind of edit.
            name: The attribute to edit.
            size: The size of new tensors.
        """
        if kind in ("none", "register none", "delete", "buffer"):
            net.touch()
        if kind == "parameter":
            setattr(net, name, nn.Parameter(torch.full((size,), float(size))))
        elif kind == "child parameter":
            setattr(net.child, name, nn.Parameter(torch.full((size,), float(size))))
        elif kind == "module":
            setattr(net, name, nn.Linear(size, 1))
        elif kind == "particle":
            setattr(net, name, Tree())
        elif kind == "none":
            if name in net._modules or name in net._parameters:
                setattr(net, name, None)
        elif kind == "register none":
            if not hasattr(net, name):
                net.register_parameter(name, None)
        elif kind == "delete":
            if hasattr(net, name):
                delattr(net, name)
        elif kind == "buffer":
            if not hasattr(net, name):
                net.register_buffer(name, torch.full((size,), 1.0), persistent=size > 1)
        elif kind == "tie":
            setattr(net, name, net.w)
        elif kind == "share":
            setattr(net, name, net.seq)
        elif kind == "append":
            if len(net.seq) < 5:
                net.seq.append(nn.Linear(2, 2))
        elif kind == "insert":
            if len(net.seq) < 5:
                net.seq.insert(0, nn.Linear(2, 2))
        elif kind == "pop":
            if len(net.seq):
                net.seq.pop(0)
        elif kind == "plain tie":
            for m in net.seq:
                if isinstance(m, nn.Linear):
                    m.bias = net.w
        elif kind == "swap" and len(net.seq):
            net.set_submodule("seq.0", nn.Linear(2, 2, bias=False))

    kinds = st.sampled_from([
        "parameter", "child parameter", "module", "particle", "none", "register none", "delete", "buffer", "tie", "share",
        "append", "insert", "pop", "plain tie", "swap",
    ])  # fmt: skip

    @rule(i=st.integers(0, 5), kind=kinds, name=st.sampled_from(NAMES), size=st.integers(1, 2))
    def edits(self, i, kind, name, size):
        net = self.nets[i % len(self.nets)]
        try:
            self.edit(net, kind, name, size)
        except (TypeError, KeyError):
            # torch refuses to put a module where a parameter is. By then the particle has followed its relatives.
            before = snapshot(net)
            assert are_equal(snapshot(net.touch()), before)
        self.merges_or_refuses(net)

    def merges_or_refuses(self, net):
        """Check that the edits of a particle merge with those of its relatives, or are refused without any change."""
        before, others = snapshot(net), [(other, snapshot(other)) for other in self.nets if other is not net]
        try:
            net.touch()
        except StructureError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert "the edits do not merge" in refused
            assert are_equal(snapshot(net), before)
            for other, snapshot_before in others:
                assert are_equal(snapshot(other), snapshot_before)
            self.nets = [other for other in self.nets if other is not net]
            alone = independent(net)
            assert structure(2 * alone) == structure(alone)
            while len(self.nets) < 2:
                self.nets.append(self.nets[0].clone())

    @rule(i=st.integers(0, 5), j=st.integers(0, 5))
    def follows(self, i, j):
        a, b = self.nets[i % len(self.nets)].touch(), self.nets[j % len(self.nets)].touch()
        assert a._version_kernel is b._version_kernel
        assert a._version_kernel.is_newest
        assert structure(a) == structure(b)
        assert not {id(p) for p in a.parameters()} & {id(p) for p in b.parameters()} or a is b

    @rule(i=st.integers(0, 5), j=st.integers(0, 5))
    def combines(self, i, j):
        a, b = self.nets[i % len(self.nets)], self.nets[j % len(self.nets)]
        total = a + b
        assert structure(total) == structure(a) == structure(b)
        for name, p in total.named_parameters():
            assert torch.equal(p, a.get_parameter(name) + b.get_parameter(name))
        if len(self.nets) < 4:
            self.nets.append(total)

    @rule(i=st.integers(0, 5), j=st.integers(1, 5))
    def forgets(self, i, j):
        if len(self.nets) > 2:
            del self.nets[i % len(self.nets)]

    @rule(
        i=st.integers(0, 5),
        kind=st.sampled_from(
            ["parameter", "child parameter", "module", "particle", "none", "delete", "buffer", "tie", "share"]
        ),
        name=st.sampled_from(NAMES),
        step=st.sampled_from(STEPS),
        countdown=st.integers(0, 5),
    )
    def fails(self, i, kind, name, step, countdown):
        net = self.nets[i % len(self.nets)].touch()
        before, version, sentences = snapshot(net), net._version_kernel, history(net)
        others = [(other, snapshot(other)) for other in self.nets if other is not net]
        with failing(*step, countdown):
            try:
                self.edit(net, kind, name, 2)
            except (Injected, TypeError, KeyError):
                failed = True
            else:
                failed = False
        if failed:
            assert are_equal(snapshot(net), before)
            assert net._version_kernel is version
            assert version.is_newest
            assert history(net) == sentences
        for other, snapshot_before in others:
            assert are_equal(snapshot(other), snapshot_before)

    @rule(i=st.integers(0, 5), step=st.sampled_from(STEPS), countdown=st.integers(0, 5))
    def fails_to_follow(self, i, step, countdown):
        net = self.nets[i % len(self.nets)]
        before = snapshot(net)
        with failing(*step, countdown), contextlib.suppress(Injected):
            net.touch()
            return
        now = snapshot(net)
        version = net._version_kernel
        # Some edits may have been applied before one failed; each is applied entirely or not at all.
        assert are_equal(now, before) or version.data.number <= species(net).version
        assert {e.name for e in layout_of(net)} == set(version.data.names.values())

    @invariant()
    def everyone_can_follow(self):
        for net in self.nets:
            version = net._version_kernel
            assert {e.name for e in layout_of(net)} == set(version.data.names.values())


TestSiblings = Siblings.TestCase
TestSiblings.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def test_old_versions_are_freed(without_gc):
    net = Tree()
    twin = net.clone()
    first = weakref.ref(net._version_kernel)
    net.more = nn.Parameter(torch.zeros(1))
    assert first() is not None
    twin.touch()
    assert first() is None
    dropped = weakref.ref(twin)
    net.again = nn.Parameter(torch.zeros(1))
    del twin
    assert dropped() is None


def test_an_edit_does_not_keep_the_edited_particle_alive(without_gc):
    net = Tree()
    twin = net.clone()
    net.more = nn.Parameter(torch.zeros(1000))
    references = [weakref.ref(m) for m in net.modules()]
    del net
    assert all(ref() is None for ref in references)
    assert twin.touch().more.shape == (1000,)


def test_history_lists_edits_as_sentences():
    net = Tree()
    twin = net.clone()
    net.head = nn.Linear(2, 1)
    net.w = None
    net.register_buffer("mean", torch.zeros(1))
    del net.mean
    net.seq.append(nn.ReLU())
    assert history(net) == [
        "version 1: module 'head' was assigned a Linear",
        "version 2: 'w' became None",
        "version 3: 'mean' was registered as a buffer",
        "version 4: 'mean' was deleted",
        "version 5: module 'seq.2' was assigned a ReLU",
    ]
    assert species(twin) == species(net)
    assert species(twin).version == 5


def test_migrate_loads_older_values_into_a_newer_structure():
    net = Tree()
    twin = net.clone()
    old_state = {k: v.clone() for k, v in twin.state_dict().items()}
    net.head = nn.Linear(2, 1)
    del net.w
    migrated = migrate(old_state, net)
    assert torch.equal(migrated.seq[0].weight, old_state["seq.0.weight"])
    assert torch.equal(migrated.head.weight, net.head.weight)
    assert not hasattr(migrated, "w")
    assert migrated._version_kernel is net._version_kernel
    for wrong in ({**old_state, "other": torch.ones(1)}, {k: v for k, v in old_state.items() if k != "seq.0.bias"}):
        with pytest.raises(StructureError, match="no edit of the species"):
            migrate(wrong, net)
    with pytest.raises(StructureError, match=r"'seq.0.bias' is of shape \(5,\) in the source and of shape \(2,\)"):
        migrate({**old_state, "seq.0.bias": torch.ones(5)}, net)


def test_additions_before_a_relative_exists_make_no_version():
    net = NytoModule()
    for i in range(300):
        setattr(net, f"l{i}", nn.Linear(1, 1))
    assert net._version_kernel.data.number == 0
    assert net.get_param_id(net.l299.bias) == 599


def test_parameter_ids_are_assigned_in_order_and_reused():
    net = NytoModule()
    net.lin = nn.Linear(3, 2)
    net.w = nn.Parameter(torch.zeros(1))
    assert [net.get_param_id(p) for p in (net.lin.weight, net.lin.bias, net.w)] == [0, 1, 2]
    del net.w
    net.v = nn.Parameter(torch.zeros(1))
    assert net.get_param_id(net.v) == 2
    with pytest.raises(ValueError, match="is not one of this"):
        net.get_param_id(net.clone().v)


def test_an_edit_through_a_child_is_an_edit_of_the_particle():
    net = Tree()
    twin = net.clone()
    net.child.extra = nn.Parameter(torch.ones(1))
    assert twin.child.touch().extra.item() == 1
    assert not twin.child.is_root
    assert twin.child._module_id == net.child._module_id


def test_an_unevaluated_result_follows_edits_too():
    net = adopt(nn.Sequential(nn.Linear(2, 2)))
    lazy = net + 1
    net.append(nn.Linear(2, 1))
    assert len(lazy * 2) == 2
    assert len(lazy.touch()) == 2


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step if isinstance(step, str) else step[1])
@pytest.mark.parametrize("kind", ["pop", "append", "module", "parameter", "share", "buffer"])
def test_a_particle_that_fails_to_follow_can_still_follow(step, kind):
    siblings = Siblings()
    siblings.edits(i=0, kind=kind, name="a", size=1)
    siblings.fails_to_follow(i=1, step=step, countdown=0)
    first, second = (net.touch() for net in siblings.nets)
    assert structure(first) == structure(second)


@pytest.mark.parametrize("first", ["append", "insert", "pop", "swap", "plain tie", "share"])
@pytest.mark.parametrize("second", ["append", "insert", "pop", "swap", "plain tie", "share"])
def test_edits_of_the_same_plain_child_merge_or_are_refused(first, second):
    siblings = Siblings()
    one, two = siblings.nets
    siblings.edit(one, first, "a", 1)
    one.touch()
    sentences = history(one)
    siblings.edit(two, second, "a", 1)
    siblings.merges_or_refuses(two)
    siblings.follows(0, 1)
    siblings.combines(0, 1)
    assert list(one.seq._modules) == [str(place) for place in range(len(one.seq))]
    if first == second and first != "share":
        # The edits are equal, so there is nothing to merge.
        assert any(net is two for net in siblings.nets)
        assert history(one) == sentences


def test_edits_in_different_places_merge():
    one = Tree()
    two = one.clone()
    one.seq.append(nn.Linear(2, 2))
    one.touch()
    two.child.add_module("more", nn.Linear(1, 1))
    two.seq[0].register_buffer("mask", torch.ones(2))
    two.touch()
    one.touch()
    assert structure(one) == structure(two)
    assert len(two.seq) == 3
    assert torch.equal(one.seq[0].mask, torch.ones(2))
    assert torch.equal(two.seq[2].weight, one.seq[2].weight)


def test_an_edit_of_what_a_relative_removed_is_refused():
    one = adopt(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()))
    two = one.clone()
    del one[0]
    one.touch()
    two[0].append(nn.Linear(2, 2))
    for _ in range(2):
        with pytest.raises(StructureError, match=r"this Sequential was edited .* after a relative had edited it too"):
            two.touch()
        assert len(two[0]) == 2
    new = migrate({}, one) if not list(one.parameters()) else None
    assert new is not None
    assert len(independent(two) + two) == 2


def count_reads(monkeypatch, act):
    count, read = [0], _species.read
    monkeypatch.setattr(_species, "read", lambda module: (count.__setitem__(0, count[0] + 1), read(module))[1])
    act()
    return count[0]


def test_additions_to_a_model_with_a_relative_read_it_once(monkeypatch):
    net = NytoModule()
    net.first = nn.Linear(2, 2)
    relative = net.clone()
    assert relative.first is not net.first

    def build():
        for place in range(50):
            setattr(net, f"layer{place}", nn.Linear(2, 2))

    assert count_reads(monkeypatch, build) == 0
    values = {name: param.detach().clone() for name, param in net.named_parameters()}
    with torch.no_grad():
        net.layer3.weight.fill_(7.0)
    relative.touch()
    assert dict(relative.named_parameters()).keys() == values.keys()
    assert torch.equal(relative.layer3.weight, values["layer3.weight"])
    assert particles.species(net).version == 50
    assert particles.history(net)[7] == "version 8: module 'layer7' was assigned a Linear"
    assert particles.events_of(net)[7].added == {"layer7.weight", "layer7.bias"}


def test_additions_are_followed_after_the_edited_particle_was_freed(without_gc):
    net = NytoModule()
    relative = net.clone()
    relative.touch()
    net.layer = nn.Linear(2, 2)
    reference = weakref.ref(net)
    del net
    assert reference() is None
    assert hasattr(relative.touch(), "layer")


def test_additions_have_a_version_as_soon_as_one_is_read():
    net = NytoModule()
    relative, kernel, first = net.clone(), net._particle_kernel, net._version_kernel
    net.a = nn.Parameter(torch.zeros(1))
    assert not first.is_newest
    second = kernel.version
    net.b = nn.Parameter(torch.zeros(1))
    assert kernel.version is second.next_version
    net.c = nn.Parameter(torch.zeros(1))
    assert set(dict(copy.deepcopy(net).named_parameters())) == {"a", "b", "c"}
    net.d = nn.Parameter(torch.zeros(1))
    assert set(dict((2 * relative).named_parameters())) == {"a", "b", "c", "d"}


def test_a_failed_addition_changes_nothing():
    net = NytoModule()
    relative = net.clone()
    net.first = nn.Parameter(torch.zeros(1))
    net.plain = 3
    with pytest.raises(KeyError):
        net.add_module("a.b", nn.Linear(1, 1))
    with pytest.raises(KeyError):
        net.register_parameter("plain", nn.Parameter(torch.zeros(1)))
    assert net.plain == 3
    assert particles.history(relative) == ["version 1: parameter 'first' was assigned of shape (1,)"]


def test_additions_whose_version_fails_are_followed_at_the_next_use():
    net = NytoModule()
    relative = net.clone()
    relative.touch()
    net.a = nn.Parameter(torch.zeros(1))
    for where, name in ((_species, "compare"), (edits.ParticleEdit, "settle"), (Version, "event")):
        with failing(where, name, 1), pytest.raises(Injected):
            _ = 2 * relative
        assert not hasattr(relative, "a")
    assert hasattr(2 * relative, "a")
    assert history(net) == ["version 1: parameter 'a' was assigned of shape (1,)"]


def test_a_version_has_the_structure_of_its_particles():
    net = Tree()
    twin = net.clone()
    first = net._version_kernel
    assert first.structure is read(net).structure is read(twin).structure
    net.more = nn.Parameter(torch.zeros(1))
    second = net._version_kernel
    assert second is first.next_version
    assert second.structure is read(net).structure
    twin.touch()
    assert read(twin).structure is second.structure
    # Identifiers of parameters stay the same, whatever their order in the layout.
    before = dict(zip(first.params, (entry.name for entry in first.structure.layout), strict=True))
    after = dict(zip(second.params, (entry.name for entry in second.structure.layout), strict=True))
    assert after == before | {max(before) + 1: "more"}
    assert second.data.names == dict(sorted(after.items()))


def test_a_configuration_follows_its_parameter_through_versions():
    net = adopt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    twin = net.clone()
    net.set_param_config(operational=False, name="1.weight")
    net.insert(0, nn.Linear(2, 2))
    assert torch.equal((3 * net)[2].weight, net[2].weight)
    assert torch.equal((3 * twin)[2].weight, twin[2].weight)
    assert torch.equal((3 * net)[2].bias, 3 * net[2].bias)
