"""Particles with the rest of torch: memory, files, processes, function transforms, modes and caches."""

import copy
import functools
import gc
import importlib
import io
import operator
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.func import functional_call, vmap

from moduli import particles
from moduli.compat.nytorch import ParticleModule
from moduli.particles import NytoModule, StructureError, adopt, differentiable, norm, vector


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.l1(x)))


class Large(NytoModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(400, 400)
        self.head = nn.Linear(4, 2)


def count_parameters():
    return sum(1 for each in gc.get_objects() if type(each) is nn.Parameter)


@pytest.mark.parametrize("wrap", [lambda net: net, ParticleModule, lambda net: net.product()])
@pytest.mark.parametrize("make", [Net, Large, lambda: adopt(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))])
def test_a_thousand_steps_keep_one_model_alive(make, wrap, without_gc):
    n = wrap(make())
    count = len(list(make().parameters()))
    before = count_parameters()
    modules = sum(1 for each in gc.get_objects() if issubclass(type(each), nn.Module))
    for _ in range(1000 if make is Net else 50):
        n = 0.5 * n + 1
    assert count_parameters() <= before + count
    assert sum(1 for each in gc.get_objects() if issubclass(type(each), nn.Module)) <= modules + 4
    del n
    assert count_parameters() <= before


def test_a_dropped_particle_is_freed_at_once(without_gc):
    net = Net()
    results = (
        net + net,
        2 * net,
        net.clone(),
        net.detach(),
        copy.deepcopy(net),
        net.product().module(),
        ParticleModule(net + 1),
    )
    for each in results:
        list(each.parameters())
        each + each
    references = [weakref.ref(m) for each in results for m in each.modules()]
    del results, each
    assert all(ref() is None for ref in references)
    inner = [weakref.ref(m) for m in net.modules()]
    del net
    assert all(ref() is None for ref in inner)


@pytest.mark.parametrize("run", [lambda fn: fn(), lambda fn: torch._dynamo.run(fn)()], ids=["eager", "dynamo"])
def test_only_temporary_operands_are_overwritten(run):
    def work():
        net, other = Large(), Large()
        named = other * 1 + 0
        values = vector(named)
        for _ in range(3):
            net + named, net - named, net * named
        assert torch.equal(vector(named, copy=False), values)
        operands = [other * 1 + 0]
        net + operands[0]
        assert torch.equal(vector(operands[0], copy=False), values)

    run(work)


def count_saved_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


def test_saving_a_child_writes_only_its_tensors():
    for result in (Large() + 1, Large().clone(), 2 * Large()):
        assert count_saved_bytes(result.head.state_dict()) < 5_000
        assert count_saved_bytes(result.head) < 10_000
        assert len(pickle.dumps(result.head.weight)) < 2_000
        assert count_saved_bytes(result.state_dict()) > 600_000
        assert result.head.weight.untyped_storage().nbytes() == 32


def test_parameters_of_a_result_have_separate_version_counters():
    result = Net() + 1
    y = (result.l1.weight**2).sum()
    with torch.no_grad():
        result.head.weight.mul_(2)
    y.backward()
    assert result.l1.weight.grad is not None


def test_results_of_inference_mode_can_be_trained():
    net = Net()
    with torch.inference_mode():
        combined = 0.5 * net + 1
        drawn = net.randn()
        moved = net.clone()
        moved += 1
    for each in (combined, drawn, moved):
        assert not each.l1.weight.is_inference()
        each(torch.ones(1, 3)).sum().backward()


def test_an_unevaluated_result_is_evaluated_inside_transforms_and_modes():
    result = Net() + 1
    with torch.inference_mode():
        assert not result.l1.weight.is_inference()
    result = Net() + 1
    x = torch.randn(5, 3)
    assert vmap(lambda row: result(row))(x).shape == (5, 2)
    assert type(result.l1.weight) is nn.Parameter
    from torch._subclasses.fake_tensor import FakeTensorMode

    result = Net() + 1
    with FakeTensorMode(allow_non_fake_inputs=True):
        list(result.parameters())
    assert type(result.l1.weight) is nn.Parameter
    assert result(x).shape == (5, 2)


def test_a_child_that_was_read_stays_the_child_of_the_result():
    a, b = Net(), Net()
    result = a + b
    part = result.l1
    assert part is result.l1
    assert result._modules["l1"] is part
    assert result.l1 is part
    torch.testing.assert_close(result.head.weight, a.head.weight + b.head.weight)
    assert [name for name, _ in result.named_parameters()] == [name for name, _ in a.named_parameters()]
    assert all(type(p) is nn.Parameter and p.requires_grad for p in result.parameters())


@pytest.mark.parametrize("act", [lambda combined, net: combined + net, lambda combined, net: 0.5 * combined + net])
def test_changes_of_a_child_are_in_the_next_operation(act):
    a, b = Net(), Net()
    combined = a + b
    combined.l1.weight = nn.Parameter(torch.full((4, 3), 7.0))
    with torch.no_grad():
        combined.l1.bias.fill_(3.0)
    bias = combined.l1.bias
    result = act(combined, 0 * a)
    factor = 1.0 if act(1.0, 0.0) == 1.0 else 0.5
    assert torch.equal(result.l1.weight, torch.full((4, 3), 7.0 * factor))
    assert torch.equal(result.l1.bias, torch.full((4,), 3.0 * factor))
    assert torch.equal(bias, torch.full((4,), 3.0))


def test_a_temporary_operand_whose_parameter_is_referenced_is_not_overwritten():
    a, b, weights = Net(), Net(), []

    def record(result):
        weights.append(result.l1.weight)
        return result

    expected = a.l1.weight + b.l1.weight
    _ = a + record(a + b)
    torch.testing.assert_close(weights[0], expected)


def test_relatives_follow_an_edit_of_a_child_of_a_result():
    a = Net()
    result = a + a
    part = result.l1
    part.register_parameter("scale", nn.Parameter(torch.ones(2)))
    a.touch()
    assert torch.equal(a.l1.scale, torch.ones(2))
    assert result.l1 is part


def test_shared_children_and_references_between_children_are_kept_in_a_result():
    class Shared(NytoModule):
        def __init__(self):
            super().__init__()
            self.x = nn.Sequential(nn.Linear(2, 2))
            self.y = nn.Sequential(self.x[0])
            self.z = nn.Linear(2, 2)
            self.z.friends = [self.x]

    result = Shared() * 2
    assert result.x[0] is result.y[0]
    assert result.z.friends[0] is result.x
    result = Shared() * 2
    assert result.z.friends[0] is result.x


def test_a_partly_evaluated_result_is_copied_with_its_changes():
    class Copying(Net):
        def __deepcopy__(self, memo):
            twin = object.__new__(type(self))
            twin.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
            return twin

    result = Copying() * 2
    result.l1.weight = nn.Parameter(torch.full((4, 3), 7.0))
    twin = copy.deepcopy(result)
    assert torch.equal(twin.l1.weight, torch.full((4, 3), 7.0))
    assert twin.l1 is not result.l1
    torch.testing.assert_close(dict(twin.named_parameters()), dict(result.named_parameters()))


def test_vmap_over_a_factor():
    net = Net()
    x, factors = torch.randn(3), torch.tensor([0.5, 2.0])
    result = vmap(lambda s: (net * s)(x))(factors)
    expected = torch.stack([(net * s.item())(x) for s in factors])
    torch.testing.assert_close(result, expected)


def test_gradients_reach_merge_coefficients():
    a, b, c = Net(), Net(), Net()
    weights = torch.tensor([0.3, 0.7], requires_grad=True)
    with differentiable():
        merged = a + weights[0] * (b - a) + weights[1] * (c - a)
    x = torch.randn(4, 3)
    merged(x).sum().backward()
    params_a = dict(a.named_parameters())
    params_b, params_c = dict(b.named_parameters()), dict(c.named_parameters())
    twin = weights.detach().clone().requires_grad_()
    combined = {
        n: p.detach() + twin[0] * (params_b[n] - p).detach() + twin[1] * (params_c[n] - p).detach()
        for n, p in params_a.items()
    }
    functional_call(a, combined, (x,)).sum().backward()
    torch.testing.assert_close(weights.grad, twin.grad)
    assert a.l1.weight.grad is not None


def test_compiled_forwards_of_particles():
    forward = torch.compile(lambda net, x: net(x), backend="eager", fullgraph=True)
    net = Net()
    x = torch.randn(2, 3)
    for i in range(3):
        result = net + i
        list(result.parameters())
        torch.testing.assert_close(forward(result, x), result(x))


WORKER = """
from torch import nn
from moduli.particles import NytoModule

class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(3, 4)

def work(net):
    return net * 2
"""


def test_a_particle_returned_by_a_worker_combines_with_its_relatives(tmp_path, monkeypatch):
    # In a separate module, because an installed package called "tests" could hide this one in the worker.
    (tmp_path / "particle_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    worker = importlib.import_module("particle_worker")
    net = worker.Net()
    twin = net + 1
    with mp.get_context("spawn").Pool(1) as pool:
        returned = pool.apply_async(worker.work, (net,)).get(timeout=600)
        total = returned + twin
        assert torch.equal(total.l1.weight, 2 * net.l1.weight + twin.l1.weight)
        assert returned._version_kernel is net._version_kernel


def test_results_work_with_save_swap_share_memory_and_half(tmp_path):
    net = Net()
    result = 0.5 * net + 0.5 * net.clone()
    torch.save(result, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    assert torch.equal(vector(loaded + net), vector(result + net))
    other = Net()
    other.load_state_dict(torch.load(save_state(result, tmp_path), weights_only=True))
    assert norm(other - result).item() == 0
    torch.utils.swap_tensors(result.l1.weight, nn.Parameter(torch.zeros(4, 3)))
    assert not (2 * result).l1.weight.any()
    result.share_memory()
    assert torch.equal((result + 0).head.weight, result.head.weight)
    result.requires_grad_(False)
    assert not any(p.requires_grad for p in (result * 2).parameters())
    result.half()
    assert (result + result).l1.weight.dtype == torch.float16
    assert vars(copy.copy(result))["_modules"] is result._modules
    assert "l1" in dir(net + 1)
    assert "Linear" in repr(net + 1)


def save_state(net, tmp_path):
    torch.save(net.state_dict(), tmp_path / "s.pt")
    return tmp_path / "s.pt"


def test_results_have_the_attributes_and_the_mode_of_the_operand():
    class Scaled(Net):
        scale = 2.0

    net = Scaled()
    net.scale = 3.0
    net.eval()
    result = net + 1
    assert result.scale == 3.0
    assert result.training is False
    net.train()
    result = net + 1
    result.scale = 4.0
    assert net.scale == 3.0
    net.note = ["mutable"]
    net.array = np.zeros(2)
    result = net + 1
    assert result.note is net.note
    assert result.array is net.array


def test_results_have_the_attributes_at_the_time_of_the_operation():
    net = Net()
    net + 1
    result = net + 1
    net.l1.extra = "later"
    net.eval()
    assert result.training
    assert not hasattr(result.l1, "extra")
    assert (net + 1).l1.extra == "later"
    net.l1.register_forward_hook(lambda *_: None)
    assert len((net + 1).l1._forward_hooks) == 1


def test_cached_operations_notice_every_kind_of_change():
    net, other = Net(), Net()
    for change in (
        lambda: None,
        lambda: net.l1.weight.data.mul_(2),
        lambda: setattr(net.l1.weight, "data", torch.randn(4, 3)),
        lambda: setattr(net.l1, "weight", nn.Parameter(torch.randn(4, 3))),
        lambda: net.load_state_dict({k: torch.randn_like(v) for k, v in net.state_dict().items()}, assign=True),
        lambda: setattr(net, "l1", nn.Linear(3, 4)),
        lambda: net.l1.requires_grad_(False),
        lambda: net.set_submodule("head", nn.Linear(4, 2)),
        lambda: net.l1.__dict__.update(copy.deepcopy(net.l1).__dict__),
        lambda: setattr(net.l1.weight, "data", net.l1.weight.data.clone().t().contiguous().t()),
    ):
        net + other, other + net, 2.0 * net  # fill the caches
        change()
        expected = {n: (p + dict(other.named_parameters())[n]).detach() for n, p in net.named_parameters()}
        for result in (net + other, other + net):
            for n, p in result.named_parameters():
                assert torch.equal(p, expected[n]), n
        assert torch.equal((2.0 * net).l1.weight, 2 * net.l1.weight)
        assert (net + other).l1.weight.requires_grad == net.l1.weight.requires_grad


def test_deferred_factors_share_no_values_with_their_operand():
    net = Net()
    x = net + 0
    y = 3 * x
    x += 1
    assert torch.equal(y.l1.weight, 3 * net.l1.weight)
    x = net + 0
    y, z = -x, 0.5 * x
    with torch.no_grad():
        x.l1.weight.zero_()
    assert torch.equal(y.l1.weight, -net.l1.weight)
    assert torch.equal(z.l1.weight, 0.5 * net.l1.weight)
    assert torch.equal(((2 * z) * y).l1.bias, -net.l1.bias * net.l1.bias)
    assert torch.equal((z / (0.5 * y)).l1.bias, torch.full((4,), -1.0))


def test_structure_errors_name_the_difference():
    a = Net()
    b = Net()
    b.head = nn.Linear(4, 3)
    with pytest.raises(
        StructureError,
        match=r"cannot combine Net and Net: 'head.weight' has shape \(2, 4\) on the left and \(3, 4\) on the right; the left is "
        r"at version 0, the right is at version 0\. If one is an older version .*touch\(\)",
    ):
        a + b
    with pytest.raises(StructureError, match=r"'l1.weight' has dtype torch.float32 on the left and torch.float64"):
        a += Net().double()
    with pytest.raises(StructureError, match="is on cpu on the left and on meta on the right"):
        a + Net().to("meta")
    a.clone()
    a.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(StructureError, match=r"'extra' is missing on the right.*the left is at version 1"):
        a - Net()
    for wrong in ("text", None, [1.0], object()):
        with pytest.raises(TypeError):
            a * wrong
        with pytest.raises(TypeError):
            a *= wrong
        with pytest.raises(TypeError):
            wrong - a
    assert issubclass(StructureError, ValueError)
    assert issubclass(StructureError, AssertionError)


def test_random_particles_follow_the_seed():
    net = Net()
    torch.manual_seed(5)
    one = net.rand()
    torch.manual_seed(5)
    assert torch.equal(vector(one), vector(net.rand()))
    assert float(vector(one).min()) >= 0
    assert float(vector(one).max()) < 1
    assert not torch.equal(vector(net.randn()), vector(net.randn()))
    assert float(norm(particles.rand(net, 0.0))) == 0


def test_operands_that_anything_refers_to_are_not_overwritten():
    class Wide(NytoModule):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(600, 600))

    a, b, c = Wide(), Wide(), Wide()
    expected = a.w + 0.5 * (b.w - c.w)
    assert torch.equal((a + 0.5 * (b - c)).w, expected)
    assert torch.equal(((a + 0) + 0.5 * (b - c)).w, expected)
    t = b - c
    values = vector(t)

    class Holder:
        x = t

    cell = [b - c]
    holder = {"x": b - c}
    for act in (
        lambda: a + t,
        lambda: operator.add(a, t),
        lambda: a - Holder.x,
        lambda: a + cell[0],
        lambda: a + holder["x"],
        lambda: sum(cell, a),
        lambda: functools.reduce(operator.add, cell, a),
        lambda: list(map(operator.add, [a, a], [t, cell[0]])),
        lambda: (lambda value: a + value)(t),
        lambda: particles.only(a, "w") + particles.only(t, "w"),
        lambda: particles.only(a, "w") + t,
        lambda: (a + 0) - t,
        lambda: [a + each for each in cell],
    ):
        act()
        for operand in (t, cell[0], holder["x"]):
            assert torch.equal(vector(operand + 0), values)


def test_cached_operations_notice_new_children_of_either_operand():
    for side in (0, 1):
        nets = [Net(), Net()]
        nets[0] + nets[1], nets[1] + nets[0]
        nets[side].l1.add_module("inner", nn.Linear(2, 2))
        with pytest.raises(StructureError, match=r"'l1\.inner\.weight' is missing"):
            nets[0] + nets[1]
        nets = [adopt(nn.ParameterList([torch.ones(3)])), adopt(nn.ParameterList([torch.ones(3)]))]
        nets[0] + nets[1], nets[1] + nets[0]
        nets[side].add_module("inner", nn.Linear(2, 2))
        with pytest.raises(StructureError, match=r"'inner\.weight' is missing"):
            nets[0] + nets[1]


def test_cached_operations_equal_uncached_ones_through_random_changes():
    """The reference for each operation is the same operation on deep copies, for which nothing is cached."""
    generator = np.random.default_rng(0)
    nets = [adopt(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))) for _ in range(3)]

    def mutate(net):
        kind = generator.integers(9)
        layer = net[1][0] if generator.integers(2) else net[0]
        with torch.no_grad():
            if kind == 0:
                layer.weight.mul_(2)
            elif kind == 1:
                layer.weight.data = torch.randn(3, 3)
            elif kind == 2:
                layer.bias = nn.Parameter(torch.randn(3))
            elif kind == 3:
                net[1][1] = nn.ReLU() if generator.integers(2) else nn.Tanh()
            elif kind == 4:
                layer.weight.requires_grad_(not layer.weight.requires_grad)
            elif kind == 5:
                layer.weight.data = layer.weight.data.t()
            elif kind == 6:
                layer.note = int(generator.integers(3))
            elif kind == 7:
                net.train(bool(generator.integers(2)))

    for _ in range(150):
        i, j = generator.integers(len(nets), size=2)
        mutate(nets[generator.integers(len(nets))])
        fresh = [copy.deepcopy(nets[i]), copy.deepcopy(nets[j])]
        for result, expected in (
            (nets[i] + nets[j], fresh[0] + fresh[1]),
            (nets[i] - 0.5 * nets[j], fresh[0] - 0.5 * fresh[1]),
        ):
            assert repr(result) == repr(expected)
            for x, y in zip(result.parameters(), expected.parameters(), strict=True):
                assert torch.equal(x, y)
                assert x.requires_grad == y.requires_grad
            assert [m.training for m in result.modules()] == [m.training for m in expected.modules()]
            assert [getattr(m, "note", None) for m in result.modules()] == [
                getattr(m, "note", None) for m in expected.modules()
            ]
        if generator.integers(10) == 0:
            nets[i] = nets[i] + nets[j] * 0.1


def test_cached_operations_notice_replaced_data_among_many_parameters():
    a, b = (adopt(nn.ParameterList([torch.randn(4) for _ in range(40)])) for _ in range(2))
    a + b
    for _ in range(3):
        assert torch.equal(vector(a + b), vector(a) + vector(b))
        a[7].data = torch.randn(4)
        b[31].data = torch.randn(4)
        assert torch.equal(vector(a + b), vector(a) + vector(b))
        assert torch.equal(vector(a - 0.5 * (b - a)), vector(a) - 0.5 * (vector(b) - vector(a)))


def test_threads_may_combine_one_model():
    import threading

    net = adopt(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    failed = []

    def work():
        for _ in range(50):
            result = net + 0.5 * (net - net)
            if not torch.equal(result[0].weight, net[0].weight):
                failed.append(result)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed


def test_labelled_tensors_follow_edits():
    from moduli.labels import Space
    from moduli.labels import Tensor as Labelled

    net = NytoModule()
    twin = 2 * net
    net.gain = Labelled(torch.ones(2, requires_grad=True), (Space(["r", "g"], name="c"),))
    assert twin.touch().gain.names == ("c",)
    assert (twin + net).gain.sel(c="g").data.item() == 2
    del net.gain
    assert not hasattr(twin.touch(), "gain")


def test_a_model_without_parameters_has_arithmetic():
    net = NytoModule()
    result = net + 2 * net
    assert norm(result).item() == 0
    assert vector(result).shape == (0,)
    assert result._version_kernel is net._version_kernel


def test_large_operations_inside_vmap_are_correct():
    net = Large()
    out = vmap(lambda s: (s * net + net).head.bias)(torch.tensor([1.0, 2.0]))
    assert torch.equal(out, torch.stack([2 * net.head.bias, 3 * net.head.bias]))
