"""Defects measured in nytorch, each with a test that moduli does not have it."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from moduli import particles
from moduli.compat.nytorch import GetNytoModule, ParticleModule, PMProduct
from moduli.particles import NytoModule, ParamConfig, StructureError, adopt


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(3, 3)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.p = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.layers(self.l1(x)) * self.p.sum()


class Norm(NytoModule):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.bn(x)


class Child(NytoModule):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.set_param_config(operational=False, clone=False)


class Parent(NytoModule):
    def __init__(self):
        super().__init__()
        self.child = Child()
        self.v = nn.Parameter(torch.ones(2))


def have_equal_states(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_particle_module_is_copied_pickled_and_averaged(tmp_path):
    wrapper = ParticleModule(Net())
    for twin in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert have_equal_states(twin, wrapper)
        assert have_equal_states(twin + wrapper, 2 * wrapper)
        assert twin.root_module._particle_kernel is None
    torch.save(wrapper, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=False)
    assert have_equal_states(0.5 * (loaded + wrapper), wrapper)
    average = torch.optim.swa_utils.AveragedModel(wrapper)
    average.update_parameters(wrapper)
    assert have_equal_states(average.module + wrapper, 2 * wrapper)


def test_buffers_belong_to_one_particle():
    a = Norm()
    b, c = a.clone(), a + a
    before = b.bn.running_mean.clone()
    a(torch.randn(8, 3) + 5)
    assert torch.equal(b.bn.running_mean, before)
    assert torch.equal(c.bn.running_mean, before)
    assert int(b.bn.num_batches_tracked) == 0
    assert int(a.bn.num_batches_tracked) == 1
    assert int((a + b).bn.num_batches_tracked) == 1
    spectral = adopt(torch.nn.utils.spectral_norm(nn.Linear(3, 3)))
    x = torch.randn(2, 3)
    spectral.eval()
    expected = spectral(x)
    (0 * spectral)(x)
    assert torch.equal(spectral(x), expected)


def test_a_result_has_the_buffers_at_the_time_of_the_operation():
    a = Norm()
    b = a.clone()
    a(torch.randn(8, 3) + 5)
    assert torch.equal(b.bn.running_mean, torch.zeros(3))


def test_edits_inside_plain_children_are_followed():
    net = Net()
    twin = net.clone()
    net.l1.weight = nn.Parameter(torch.full((3, 3), 7.0))
    assert torch.equal(net.clone().l1.weight, net.l1.weight)
    net *= 0
    assert not net.l1.weight.any()
    net.layers.append(nn.Linear(3, 3))
    assert len(net.clone().layers) == 3
    bias = net.layers[2].bias.detach().clone()
    net += 1
    assert torch.equal(net.layers[2].bias, bias + 1)
    assert len(twin.touch().layers) == 3
    net.set_submodule("layers.0", nn.Linear(3, 3, bias=False))
    assert net.clone().layers[0].bias is None
    assert twin.touch().layers[0].bias is None
    state = {k: torch.full_like(v, 4.0) for k, v in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    assert torch.equal((2 * net).l1.weight, torch.full((3, 3), 8.0))
    net.layers[1].weight = net.l1.weight
    tied = 2 * net
    assert tied.layers[1].weight is tied.l1.weight


def test_copies_have_pruned_and_parametrized_children():
    x = torch.randn(2, 3)
    net = Net()
    prune.l1_unstructured(net.l1, "weight", 0.5)
    assert torch.allclose(net.clone()(x), net(x))
    net = Net()
    parametrizations.weight_norm(net.l1, "weight")
    parametrizations.orthogonal(net.layers[0])
    twin = net.clone()
    assert torch.allclose(twin(x), net(x), atol=1e-6)
    assert type(twin.l1) is type(net.l1)
    assert torch.equal((net + net).l1.parametrizations.weight.original1, 2 * net.l1.parametrizations.weight.original1)


def test_clone_from_changes_neither_target_nor_source():
    class Frozen(Norm):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 2)
            self.set_param_config(operational=False, clone=False, name="embedding")

    a, d = Frozen(), Frozen()
    d(torch.randn(8, 3) + 5)
    before, stats = a.embedding.weight.clone(), a.bn.running_mean.clone()
    c = a.clone_from(d)
    assert torch.equal(a.embedding.weight, before)
    assert torch.equal(a.bn.running_mean, stats)
    assert torch.equal(c.embedding.weight, d.embedding.weight)
    assert torch.equal(c.bn.running_mean, d.bn.running_mean)
    assert c._version_kernel is a._version_kernel


@pytest.mark.parametrize("shared", [False, True])
def test_a_failed_edit_changes_nothing(shared):
    net = Net()
    twin = net.clone() if shared else None
    before = {k: v.clone() for k, v in net.state_dict().items()}
    version = net._version_kernel if shared else None
    for attempt in (
        lambda: net.register_buffer("p", torch.zeros(1)),
        lambda: net.register_parameter("a.b", nn.Parameter(torch.zeros(1))),
        lambda: net.add_module("", nn.Linear(1, 1)),
        lambda: setattr(net, "l1", torch.zeros(2)),
        lambda: net.register_parameter("q", torch.zeros(2)),
        lambda: delattr(net, "nothing"),
    ):
        with pytest.raises((KeyError, TypeError, AttributeError)):
            attempt()
        assert list(net.state_dict()) == list(before)
        if shared:
            assert net._version_kernel is version
            assert have_equal_states(net + twin, 2 * net)
        net += 0


def test_a_relative_with_a_plain_attribute_of_that_name_follows():
    net = Net()
    twin = net.clone()
    twin.mean = "a plain attribute"
    net.register_buffer("mean", torch.ones(2))
    assert torch.equal(twin.touch().mean, torch.ones(2))
    assert have_equal_states(twin + net, net + twin)


def test_assigning_a_product_copies_its_values():
    a, b = Net(), Net()
    b = a.clone_from(b)
    values = b.p.clone()
    weight = a.l1.weight
    a.product_(b.product())
    assert a.l1.weight is weight
    assert torch.equal(a.l1.weight, b.l1.weight)
    with torch.no_grad():
        a.p.add_(100)
    assert torch.equal(b.p, values)


def test_configurations_survive_nesting_edits_detach_and_late_updates():
    net = Parent()
    tripled = 3 * net
    assert tripled.child.w is net.child.w
    assert torch.equal(tripled.v, torch.full((2,), 3.0))
    net.apply_param_config(lambda _, config: setattr(config, "mark", "set"), "v")
    net.register_buffer("b", torch.zeros(1))
    net.extra = nn.Parameter(torch.ones(1))
    config = net._version_kernel.data.config
    assert config[net.get_param_id(net.v)].mark == "set"
    assert config[net.get_param_id(net.child.w)] == ParamConfig(operational=False, clone=False)
    apart = net.detach()
    assert apart._version_kernel.data.config[apart.get_param_id(apart.v)].mark == "set"
    assert (2 * apart).child.w is net.child.w
    late = net.clone()
    net.more = nn.Parameter(torch.ones(1))
    late.set_param_config(operational=False, name="v")
    assert torch.equal((2 * net).v, net.v)
    assert torch.equal((2 * late).v, late.v)
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal((2 * again).v, net.v)
    assert torch.equal((2 * copy.deepcopy(net)).v, net.v)


def test_autograd_detects_in_place_operations():
    class Square(NytoModule):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([3.0]))

    for operand in (10, Square()):
        net = Square()
        y = (net.w**2).sum()
        net *= operand
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    net = Square() + 0
    y = (net.w**2).sum()
    net *= 10
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_product_of_an_old_version_is_refused():
    net = Net()
    product = net.product()
    del net.p
    net.other = nn.Parameter(torch.zeros(2))
    with pytest.raises(StructureError, match="different versions: the left is at version 0, the right at version 2"):
        product + net.product()
    with pytest.raises(StructureError, match="edited since"):
        product.module()
    with pytest.raises(StructureError, match="different versions"):
        net.product_(product)


def test_hooks_of_a_clone_are_separate():
    net = Net()
    twin = net.clone()
    fired = []
    twin.register_forward_hook(lambda *_: fired.append("root"))
    twin.l1.register_forward_hook(lambda *_: fired.append("child"))
    net(torch.zeros(1, 3))
    assert not fired
    third = twin.clone()
    third(torch.zeros(1, 3))
    assert fired == ["child", "root"]
    third.l1.register_forward_hook(lambda *_: fired.append("third"))
    twin(torch.zeros(1, 3))
    assert "third" not in fired


def test_bound_methods_lists_and_compiled_forwards_use_the_new_module():
    class Odd(NytoModule):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(3, 3)
            self.stack = [self.l]
            self.act = self.run

        def run(self, x):
            return self.stack[0](x)

        def forward(self, x):
            return self.act(x)

    net = Odd()
    x = torch.randn(2, 3)
    zero = 0 * net
    assert not zero(x).any()
    assert net(x).any()
    assert zero.stack[0] is zero.l
    plain = Net()
    plain.compile(backend="eager")
    assert not (0 * plain)(x).any()


def test_operations_that_would_change_shapes_are_refused():
    net = adopt(nn.Linear(3, 5, bias=False))
    with pytest.raises(StructureError, match=r"shape \(2, 5, 3\) does not fit 'weight' of shape \(5, 3\)"):
        net + torch.ones(2, 5, 3)
    one = adopt(nn.Linear(1, 5, bias=False))
    with pytest.raises(StructureError, match="does not fit 'weight'"):
        one += torch.ones(5, 4)
    assert one.weight.shape == (5, 1)
    assert torch.equal((net + torch.ones(3)).weight, net.weight + 1)
    assert torch.equal((torch.ones(5, 3) - net).weight, 1 - net.weight)
    with pytest.raises(StructureError, match="does not fit"):
        net.product() + torch.ones(2, 5, 3)


def test_operations_use_converted_parameters():
    net = Net()
    net.clone()
    net.double()
    assert (net + 1).l1.weight.dtype == torch.float64
    net.to("meta")
    assert (net + net).l1.weight.device.type == "meta"
    net.to_empty(device="cpu")
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(2)
    assert (net * 3).p[0].item() == 6
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net.half()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    assert (net * 2).p.dtype == torch.float16


def test_a_module_of_two_particles_is_edited_in_both():
    class Holder(NytoModule):
        def __init__(self, inner):
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.a = inner

    class Inner(NytoModule):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

    inner = Inner()
    one, two = Holder(inner), Holder(inner)
    c1, c2 = one.clone(), two.clone()
    c1.a.new = nn.Parameter(torch.zeros(1))
    assert not hasattr(c1.lin, "new")
    assert torch.equal((c1.a + 1).w, c1.a.w + 1)
    assert hasattr(one.touch().a, "new")
    assert have_equal_states(c2 + 0, c2)


def test_assigned_buffers_stay_persistent_or_not():
    net = NytoModule()
    net.register_buffer("b", torch.zeros(1), persistent=False)
    twin = net.clone()
    net.b = torch.ones(1)
    assert "b" not in net.state_dict()
    assert "b" not in net.clone().state_dict()
    del twin.b
    twin.b = nn.Parameter(torch.ones(1))
    assert "b" not in net.state_dict()
    assert "b" in net.touch().state_dict()


def test_particle_modules_follow_edits_at_the_next_operation():
    pm = ParticleModule(Net())
    pc = pm.clone()
    with GetNytoModule(pm) as module:
        module.extra = nn.Parameter(torch.ones(3))
    total = pc + pm
    assert torch.equal(total.root_module.extra, torch.full((3,), 2.0))


def test_registered_buffers_are_copied_for_relatives():
    net = NytoModule()
    twin = net.clone()
    net.register_buffer("b", torch.zeros(1))
    twin.touch()
    twin.b.add_(1)
    assert not net.b.any()


def test_relatives_get_the_values_at_the_time_of_the_edit():
    net = NytoModule()
    early, late = net.clone(), net.clone()
    net.w = nn.Parameter(torch.ones(1))
    early.touch()
    with torch.no_grad():
        net.w.fill_(99)
    assert early.w.item() == late.touch().w.item() == 1


def test_operations_on_a_submodule_apply_to_it_alone():
    class Sub(NytoModule):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

    class Root(NytoModule):
        def __init__(self):
            super().__init__()
            self.sub = Sub()
            self.q = nn.Parameter(torch.ones(2))

    r = Root()
    r.sub += 10
    assert torch.equal(r.q, torch.ones(2))
    assert torch.equal(r.sub.w, torch.full((2,), 11.0))
    apart = r.sub + 1
    assert apart.is_root
    assert len(list(apart.parameters())) == 1
    removed = r.sub
    del r.sub
    assert removed.is_root
    assert torch.equal((removed * 2).w, 2 * removed.w)
    removed.more = nn.Parameter(torch.zeros(1))
    r = Root()
    with pytest.raises(StructureError):
        r + r.sub


def test_errors_name_the_difference_and_are_raised_with_python_O():
    a, b = NytoModule(), NytoModule()
    a.p, a.q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    b.q, b.p = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(StructureError, match=r"'p' has place 0 on the left and place 1 on the right.*version 0"):
        a + b
    code = (
        "import torch\nfrom torch import nn\nfrom moduli.particles import adopt, StructureError\n"
        "a, b = adopt(nn.Linear(2, 3)), adopt(nn.Linear(3, 2))\n"
        "for act in (lambda: a + b, lambda: a.product() + b.product(), lambda: a.product_(b.product()), lambda: a + a.product()):\n"
        "    try:\n        act()\n    except StructureError as error:\n        print(len(str(error)) > 40)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4


def test_existing_instances_become_particles_and_wrappers_keep_their_state():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    keys = list(net.state_dict())
    assert adopt(net) is net
    assert isinstance(net, nn.Sequential)
    assert list(net.state_dict()) == keys
    assert torch.equal((net * 2)[0].weight, 2 * net[0].weight)

    class Wrapper(ParticleModule):
        pass

    wrapper = Wrapper(Net())
    wrapper.tag = "mine"
    fired = []
    wrapper.register_forward_hook(lambda *_: fired.append(1))
    wrapper.eval()
    result = 0.5 * wrapper + wrapper
    assert type(result) is Wrapper
    assert not result.training
    assert result.tag == "mine"
    assert not result.root_module.training
    result(torch.zeros(1, 3))
    assert fired == [1]


def test_every_operator_and_reduction_exists():
    net = adopt(nn.Linear(2, 2)) * 0 + 7
    for value, expected in (
        (net // 2, 3.0), (net % 4, 3.0), (abs(-net), 7.0), (9 // (net - 5), 4.0), (9 % net, 2.0), (2**net, 128.0),
        (np.float64(2) * net, 14.0), (net * np.array(2.0), 14.0), (np.array(2.0) - net, -5.0), (sum([net, net]), 14.0),
    ):  # fmt: skip
        assert torch.equal(value.weight, torch.full((2, 2), expected)), expected
    generator = torch.Generator().manual_seed(3)
    noise = particles.randn(net, 0.1, generator)
    assert torch.equal(noise.weight, particles.randn(net, 0.1, torch.Generator().manual_seed(3)).weight)
    assert particles.norm(net).item() == pytest.approx(7 * 6**0.5)


def test_reflected_power_works_and_mixed_kinds_raise():
    wrapper = ParticleModule(adopt(nn.Linear(2, 2)) * 0 + 3)
    assert torch.equal((2 ** wrapper.product()).module().root_module.weight, torch.full((2, 2), 8.0))
    net = wrapper.root_module
    with pytest.raises(StructureError, match="wrap both in a ParticleModule"):
        adopt(nn.Linear(2, 2)) + wrapper
    with pytest.raises(StructureError, match=r"write ParticleModule\(other\)"):
        wrapper + adopt(nn.Linear(2, 2))
    with pytest.raises(StructureError, match="wrapped by a ParticleModule"):
        net + 1
    with GetNytoModule(wrapper) as module:
        product = module.product()
    both = product + wrapper.product()
    assert torch.equal(both.module().weight, torch.full((2, 2), 6.0))
    assert isinstance(wrapper.product() + product, PMProduct)
    with pytest.raises(StructureError, match=r"module.product\(\)"):
        product + adopt(nn.Linear(2, 2))
    for wrong in ("text", None, [1], {}):
        with pytest.raises(TypeError):
            adopt(nn.Linear(2, 2)) + wrong
        with pytest.raises(TypeError):
            product * wrong
