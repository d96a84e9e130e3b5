"""`rollback`: an earlier version's structure and tensors are restored, for the model and for its relatives."""

import contextlib
import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import moduli as mo
from moduli import m, particles
from moduli.layout import layout_of
from moduli.particles import StructureError, _past, _rollback, _species, adopt, keep_removed, rollback
from moduli.particles._record import record_of


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.seq = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.inner = mo.Module()
        self.inner.v = nn.Parameter(torch.zeros(2))
        self.w = nn.Parameter(torch.ones(3))
        self.gain = mo.tensor([1.0, 2.0], c=["r", "g"]).attach()
        self.register_buffer("count", torch.zeros(1))


def snapshot(net):
    """Return modules, parameters and buffers by name and identity, in order, and labels."""
    return (
        [(path, id(module), type(module)) for path, module in net.named_modules(remove_duplicate=False)],
        [(name, id(param)) for name, param in net.named_parameters(remove_duplicate=False)],
        [(name, id(buffer)) for name, buffer in net.named_buffers(remove_duplicate=False)],
        [sorted(module._non_persistent_buffers_set) for module in net.modules()],
        [dict(vars(module).get("_labelled", {})) for module in net.modules()],
    )


def read_values(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def edit_at_random(net, rng, k):
    size = 2 + rng.randrange(3)
    edits = [
        lambda: setattr(net, "body", nn.Linear(3, size)),
        lambda: setattr(net, "w", nn.Parameter(torch.full((size,), float(k)))),
        lambda: setattr(net, "w", None),
        lambda: setattr(net.inner, f"p{k % 3}", nn.Parameter(torch.full((size,), float(k)))),
        lambda: net.register_buffer("count", torch.full((size,), float(k)), persistent=bool(k % 2)),
        lambda: setattr(net, "gain", mo.tensor(torch.rand(size), c=rng.sample("abcdefg", size)).attach()),
        lambda: setattr(net, f"extra{k % 4}", nn.Sequential(nn.Linear(2, size), nn.BatchNorm1d(size))),
        lambda: setattr(net, "twin", net.body),
        lambda: net.seq.append(nn.Linear(2, 2)),
        lambda: net.seq.__setitem__(0, nn.Linear(3, size)),
        lambda: net.seq.insert(0, nn.Linear(2, 2)),
        lambda: setattr(net, "inner", copy.deepcopy(net.inner)),
    ]
    if "extra1" in net._modules:
        edits.append(lambda: delattr(net, "extra1"))
    if len(net.seq) > 2:
        edits.append(lambda: net.seq.__delitem__(2))
    rng.choice(edits)()


@pytest.mark.parametrize("seed", range(16))
def test_a_rollback_restores_structure_and_identity_of_tensors(seed):
    rng = random.Random(seed)
    net = keep_removed(Net(), 100)
    eager = 0 * net + 7
    states = {0: (snapshot(net), snapshot(eager), read_values(eager))}
    for k in range(14):
        edit_at_random(net, rng, k)
        eager.touch()
        number = net.history.version
        assert particles.species(eager).version == number
        states[number] = snapshot(net), snapshot(eager), read_values(eager)
        if rng.random() < 0.4:
            target = rng.choice(list(states))
            rollback(net, target)
            net_before, eager_before, values = states[target]
            assert snapshot(net) == net_before
            eager.touch()
            assert [row[::2] for row in snapshot(eager)[0]] == [row[::2] for row in eager_before[0]]
            assert list(eager.state_dict()) == list(values)
            for name, value in eager.state_dict().items():
                assert torch.equal(value, values[name]), name
            # Operations and later edits work on the restored versions.
            assert torch.equal((net + eager).body.weight, net.body.weight + eager.body.weight)
            states[net.history.version] = snapshot(net), snapshot(eager), read_values(eager)


@pytest.mark.parametrize("seed", range(8))
def test_a_late_relative_gets_its_own_values_back(seed):
    rng = random.Random(seed)
    net = keep_removed(Net(), 100)
    late = 0 * net + 7
    values = read_values(late)
    for k in range(8):
        edit_at_random(net, rng, k)
        net.clone()
    rollback(net, 0)
    late.touch()
    assert list(late.state_dict()) == list(values)
    for name, value in late.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_values_of_remaining_tensors_are_not_rolled_back():
    net = Net()
    before = net.history.version
    net.body = nn.Linear(3, 5)
    with torch.no_grad():
        net.w.fill_(9)
    net.seq.append(nn.ReLU())
    net.load_state_dict({"seq.0.bias": torch.full((3,), 9.0)}, assign=True, strict=False)
    rollback(net, before)
    assert net.w.tolist() == net.seq[0].bias.tolist() == [9, 9, 9]
    assert len(net.seq) == 2
    assert net.body.out_features == 3


def test_a_rollback_is_an_edit_that_can_be_rolled_back():
    net = Net()
    first = net.history.version
    old, net.body = net.body, nn.Linear(3, 5)
    new = net.body
    second = net.history.version
    assert rollback(net, first).body is old
    assert rollback(net, second).body is new
    assert [edit.what.split(":")[0] for edit in net.history] == [
        "module 'body' was assigned a Linear",
        "rolled back to version 0",
        "rolled back to version 1",
    ]
    assert rollback(net, net.history.version) is net
    assert len(net.history) == 3


def test_additions_are_undone_one_by_one():
    net = Net()
    twin = net.clone()
    for k in range(5):
        setattr(net, f"head{k}", nn.Linear(3, 1))
    assert net.history.version == 5
    rollback(net, 2)
    assert [name for name in net._modules if name.startswith("head")] == ["head0", "head1"]
    assert [name for name in twin.touch()._modules if name.startswith("head")] == ["head0", "head1"]
    # An addition, and an edit of a plain module that was detected together with it.
    net.more = nn.Linear(1, 1)
    net.seq.append(nn.ReLU())
    assert [edit.where for edit in net.history[-2:]] == [("more",), ("seq.2",)]
    number = net.history.version
    rollback(net, number - 1)
    assert hasattr(net, "more")
    assert len(net.seq) == 2
    rollback(net, number - 2)
    assert not hasattr(net, "more")


def test_rolling_back_a_child_rolls_back_its_particle():
    net = Net()
    before = net.inner.history.version
    net.inner.extra = nn.Parameter(torch.zeros(1))
    assert net.history.version == net.inner.history.version == before + 1
    assert rollback(net.inner, before) is net.inner
    assert not hasattr(net.inner, "extra")


def test_rollback_of_adopted_modules_stops_at_pruning():
    net = adopt(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    start, x = net.history.version, torch.randn(3, 2)
    expected = net(x)
    weight = net[0].weight
    prune.l1_unstructured(net[0], "weight", 0.5)
    pruned = net.touch().history.version
    net[2] = nn.Linear(2, 4)
    net.append(nn.Tanh())
    assert net(x).shape == (3, 4)
    rollback(net, pruned)
    assert len(net[0]._forward_pre_hooks) == 1
    # Pruning renames a parameter inside a plain layer, which cannot be undone: the tensor has another name now.
    with pytest.raises(
        StructureError, match="'weight' of a Linear in this Sequential was replaced inside of a plain module"
    ):
        rollback(net, start)
    assert net[0].weight_orig is weight
    assert net(x).shape == expected.shape


def test_optimizers_keep_the_state_of_remaining_parameters():
    torch.manual_seed(0)
    net = Net()
    before = net.history.version
    optimizer = mo.Optimizer(net, m.Adam(), m.LR(1e-2))
    x = torch.randn(8, 3)

    def closure(backward=True):
        loss = net.seq[0](net.body(x)).square().mean() + net.w.square().sum()
        if backward:
            optimizer.zero_grad()
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    state = {name: value for name, value in optimizer.state[net.w].items() if isinstance(value, torch.Tensor)}
    assert state
    saved = {name: value.clone() for name, value in state.items()}
    net.body = nn.Linear(3, 3)
    net.bad = nn.Linear(2, 2)
    optimizer.step(closure)
    saved = {name: optimizer.state[net.w][name].clone() for name in saved}
    rollback(net, before)
    optimizer.zero_grad()
    grouped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert grouped == {id(param) for param in net.parameters()}
    for name, value in saved.items():
        assert torch.equal(optimizer.state[net.w][name], value)
    weight = net.body.weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(net.body.weight, weight)
    assert "the module was edited" in str(optimizer.explain())


def test_keep_removed_limits_the_stored_edits():
    net = Net()
    keep_removed(net, 3)
    twin = net.clone()
    references = []
    for k in range(20):
        references.append(weakref.ref(net.body.weight))
        net.body = nn.Linear(3, 3 + k % 2)
        twin.touch()
    gc.collect()
    assert sum(reference() is not None for reference in references) == 3
    assert max(len(record_of(each).past) for each in (net, twin)) == 3
    number = net.history.version
    with pytest.raises(StructureError, match=rf"cannot go back to version {number - 4}: .* since version {number - 3}"):
        rollback(net, number - 4)
    keep_removed(net, 0)
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_many_replacements_beside_a_late_relative_store_few_values():
    net = Net()
    late = net.clone()
    _ = late.w
    references = []
    for k in range(300):
        net.body = nn.Linear(3, 3 + k % 3)
        net.gain = mo.tensor(torch.rand(2), c=["r", "g"] if k % 2 else ["g", "x"]).attach()
        references += [weakref.ref(param) for param in (*net.body.parameters(), *net.parameters())]
    gc.collect()
    alive_ids = {id(ref()) for ref in references if ref() is not None}
    assert len(alive_ids) <= 3 * 8 + len(list(net.parameters()))
    assert len(net.history) == 600


def test_rolled_back_particles_are_freed_without_the_garbage_collector(without_gc):
    net = Net()
    twin = net.clone()
    _ = twin.w
    net.body, net.inner = nn.Linear(3, 5), mo.Module()
    net.seq[0] = nn.Linear(3, 9)
    twin.touch()
    rollback(net, 0)
    twin.touch()
    references = [weakref.ref(each) for particle in (net, twin) for each in particle.modules()]
    del net, twin
    assert not any(reference() is not None for reference in references)


def test_invalid_versions_are_refused_and_nothing_changes():
    net = Net()
    twin = net.clone()
    for wrong in (-1, 1, True, "0", 1.0):
        with pytest.raises(ValueError, match="is not a version of this Net: they are 0 to 0"):
            rollback(net, wrong)
    with pytest.raises(TypeError, match="is not a particle; write moduli.adopt"):
        rollback(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="at least 0"):
        keep_removed(net, -1)
    for _ in range(3):
        net.body = nn.Linear(3, 3)
    late = net.clone()
    before = snapshot(late)
    with pytest.raises(StructureError, match="call particles.rollback on the relative that made the edits"):
        rollback(late, 0)
    assert snapshot(late) == before
    # A relative that followed several edits at once can only undo all of them.
    twin.touch()
    with pytest.raises(StructureError, match=r"can go to 0(, 2)? or 3"):
        rollback(twin, 1)
    rollback(twin, 0)
    assert net.touch().history.version == 4


def test_copies_follow_a_rollback():
    net = Net()
    assert net.history.version == 0  # creates the species
    net.body = nn.Linear(3, 5)
    others = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net + 0]
    rollback(net, 0)
    for other in others:
        assert other.touch().body.out_features == 3
        assert layout_of(other).fingerprint == layout_of(net).fingerprint


class Injected(Exception):
    pass


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (_rollback, "compare"),
        (_rollback, "read"),
        (_rollback, "_note_returning"),
        (_past.Plan, "write"),
        (_species, "list_steps"),
        (_species, "adopt_children"),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_a_failed_rollback_changes_nothing(monkeypatch, where, name, after):
    net = Net()
    twin = net.clone()
    net.body, net.w = nn.Linear(3, 5), None
    net.seq[0] = nn.Linear(3, 4)
    twin.touch()
    before, number, past = snapshot(net), net.history.version, record_of(net).past
    original = getattr(where, name)

    def broken(*args, **kwargs):
        if after:
            original(*args, **kwargs)
        raise Injected

    with monkeypatch.context() as patch:
        patch.setattr(where, name, broken)
        with contextlib.suppress(Injected):
            rollback(net, 0)
    assert snapshot(net) == before
    assert net.history.version == number
    assert record_of(net).past == past
    rollback(net, 0)
    twin.touch()
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in net.named_parameters()]


class Wide(mo.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def test_growth_is_rolled_back_with_the_size_attributes_of_layers():
    torch.manual_seed(0)
    net, x = Wide().eval(), torch.randn(5, 3)
    teacher = particles.map(lambda p: torch.randn_like(p), net)
    outputs, before = (net(x), teacher(x)), snapshot(net)
    particles.grow(net, {"first.out": 7}, example=x)
    assert torch.allclose(teacher.touch()(x), outputs[1], atol=1e-5)
    particles.grow(net, {"first.out": 9}, example=x)
    teacher.touch()
    rollback(net, 1)
    assert (net.first.out_features, net.norm.num_features, net.last.in_features) == (7, 7, 7)
    rollback(net, 0)
    assert snapshot(net) == before
    assert (net.first.out_features, net.norm.num_features, net.last.in_features) == (4, 4, 4)
    assert torch.equal(net(x), outputs[0])
    assert torch.equal(teacher.touch()(x), outputs[1])
    particles.shrink(net, {"first.out": [1, 3]}, example=x)
    teacher.touch()
    rollback(net, 4)
    assert torch.equal(net(x), outputs[0])
    assert torch.equal(teacher.touch()(x), outputs[1])


@pytest.mark.parametrize("seed", range(12))
def test_a_late_relative_equals_one_that_follows_growth_and_assignments(seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    net, x = Wide().eval(), torch.randn(5, 3)
    eager = particles.map(lambda p: torch.randn_like(p), net).eval()
    late, complete = eager.clone(), [0]
    for _ in range(6):
        kind, size = rng.randrange(4), net.first.out_features + rng.randrange(1, 3)
        if kind == 0:
            particles.grow(net, {"first.out": size}, example=x, noise=0.0)
        elif kind == 1:
            net.first, net.norm, net.last = nn.Linear(3, size), nn.BatchNorm1d(size).eval(), nn.Linear(size, 2)
        elif kind == 2:
            rollback(net, rng.choice([each for each in complete if each >= net.history.version - 8]))
        elif size > 5:
            particles.shrink(net, {"first.out": rng.sample(range(size - 2), 3)}, example=x)
        eager.touch()
        complete.append(net.history.version)
    late.touch()
    assert list(late.state_dict()) == list(eager.state_dict())
    rolled = any("rolled back" in edit.what for edit in net.history)
    for name, value in late.state_dict().items():
        assert value.shape == eager.state_dict()[name].shape
        # A rollback restores a particle's own former values, which a particle that was not at that version lacks.
        assert rolled or torch.allclose(value, eager.state_dict()[name]), name
    assert torch.isfinite((late + eager)(x)).all()


class Recurrent(mo.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.last, self.heads = nn.LSTM(3, 4), nn.Linear(4, 2), 2

    def forward(self, x):
        return self.last(self.rnn(x)[0])


def test_recurrent_layers_are_rolled_back_and_plain_attributes_are_not():
    torch.manual_seed(0)
    net, x = Recurrent(), torch.randn(5, 1, 3)
    teacher = particles.map(lambda p: torch.randn_like(p), net)
    outputs, before = (net(x), teacher(x)), net.history.version
    net.rnn, net.last = nn.LSTM(3, 6), nn.Linear(6, 2)
    teacher.touch()
    rollback(net, before)
    assert torch.equal(net(x), outputs[0])
    assert torch.equal(teacher.touch()(x), outputs[1])
    inner = [nn.Parameter(torch.zeros(16, 3)), nn.Parameter(torch.zeros(16, 4))]
    net.rnn.weight_ih_l0, net.rnn.weight_hh_l0 = inner  # other values, which are no edit
    assert not torch.equal(net(x), outputs[0])
    with torch.no_grad():
        inner[0].fill_(1)
    net.extra = nn.Linear(1, 1)
    expected = net(x)
    rollback(net, net.history.version - 1)
    assert torch.equal(net(x), expected)
    net.heads = 3  # a plain attribute is not part of the structure
    net.extra = nn.Linear(1, 1)
    assert rollback(net, net.history.version - 1).heads == 3


def test_insertion_and_removal_of_layers_are_rolled_back():
    torch.manual_seed(0)
    net, x = adopt(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), torch.randn(5, 3)
    teacher = particles.map(lambda p: torch.randn_like(p), net)
    outputs = net(x), teacher(x)
    particles.insert(net, "2", nn.Sequential(nn.Linear(4, 4), nn.ReLU()), example=x)
    assert len(teacher.touch()) == 4
    particles.remove(net, "1")
    teacher.touch()
    rollback(net, 0)
    assert torch.equal(net(x), outputs[0])
    assert torch.equal(teacher.touch()(x), outputs[1])
