"""The page that the interface comes from: every name imports, and every example on it that is right runs."""

import inspect
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles
from moduli.compat import nytorch
from moduli.compat.nytorch import (
    GetNytoModule,
    ModuleMeta,
    NytoModule,
    ParamConfig,
    ParamProduct,
    ParticleKernel,
    ParticleModule,
    VersionKernel,
    make_modules_ref,
)
from moduli.particles import StructureError
from moduli.particles._operators import Operators

NAMES = {
    "base": "NytoModuleBase ParticleDataImp VersionDataImp create_new_group",
    "kernel": "Particle ParticleData ParticleKernel ParticleUpdater Product VersionData VersionKernel VersionUpdater",
    "module": "NytoModule ParamProduct binary_lambda_wrapper module_to_product product_assign_to_module product_to_module "
    "unary_lambda_wrapper",
    "mtype": "ModuleMeta ParamConfig ROOT_MODULE_ID ModuleID ParamID Module ParamType ModuleDict ParamDict MetaDict ConfigDict",
    "particle_module": "GetNytoModule PMProduct ParticleModule",
    "particle_updater": "AddModuleParticleUpdater AddParamParticleUpdater DelBufferParticleUpdater DelModuleParticleUpdater "
    "DelParamParticleUpdater RegisterBufferParticleUpdater SetModuleNoneParticleUpdater SetParamNoneParticleUpdater",
    "utils": "clone_param clone_params copy_module copy_modules make_modules_ref",
    "version_updater": "AddModuleVersionUpdater AddParamVersionUpdater DelBufferVersionUpdater DelModuleVersionUpdater "
    "DelParamVersionUpdater RegisterBufferVersionUpdater SetModuleNoneVersionUpdater SetParamNoneVersionUpdater",
}
ARGUMENTS = {
    "particle_updater.AddModuleParticleUpdater": "module_id attr_name add_module_id add_modules add_params remove_modules "
    "remove_params",
    "particle_updater.AddParamParticleUpdater": "module_id attr_name add_param_id remove_modules remove_params add_param",
    "particle_updater.DelBufferParticleUpdater": "module_id attr_name",
    "particle_updater.DelModuleParticleUpdater": "module_id attr_name remove_modules remove_params",
    "particle_updater.DelParamParticleUpdater": "module_id attr_name remove_params",
    "particle_updater.RegisterBufferParticleUpdater": "module_id attr_name value persistent remove_modules remove_params",
    "particle_updater.SetModuleNoneParticleUpdater": "module_id attr_name remove_modules remove_params",
    "particle_updater.SetParamNoneParticleUpdater": "module_id attr_name remove_modules remove_params",
    "version_updater.AddModuleVersionUpdater": "module_id attr_name add_module",
    "version_updater.AddParamVersionUpdater": "module_id attr_name add_param",
    "version_updater.DelBufferVersionUpdater": "module_id attr_name",
    "version_updater.RegisterBufferVersionUpdater": "module_id attr_name value persistent",
    "version_updater.SetParamNoneVersionUpdater": "module_id attr_name",
    "module.ParamProduct": "kernel module_id params",
    "particle_module.PMProduct": "kernel module_id params",
    "particle_module.ParticleModule": "root_module",
    "particle_module.GetNytoModule": "particle_module",
    "mtype.ParamConfig": "operational clone",
    "base.ParticleDataImp": "modules params",
    "kernel.ParticleKernel": "version data",
    "kernel.VersionKernel": "data",
}


class Net(NytoModule):
    def __init__(self, my_tensor=(0.0, 1.0, 2.0)):
        super().__init__()
        self.my_param = nn.Parameter(torch.tensor(my_tensor))


class Both(NytoModule):
    def __init__(self):
        super().__init__()
        self.my_module = nn.Linear(3, 2)
        self.my_param = nn.Parameter(torch.randn(2, 2))


@pytest.mark.parametrize(("room", "names"), NAMES.items(), ids=list(NAMES))
def test_every_name_of_the_page_imports(room, names):
    for name in names.split():
        assert getattr(nytorch, name) is getattr(getattr(nytorch, room), name)
        assert name in nytorch.__all__


@pytest.mark.parametrize(("path", "arguments"), ARGUMENTS.items(), ids=list(ARGUMENTS))
def test_constructors_take_the_documented_arguments(path, arguments):
    room, name = path.split(".")
    given = list(inspect.signature(getattr(getattr(nytorch, room), name)).parameters)
    assert given[: len(arguments.split())] == arguments.split()


def test_the_methods_of_the_page_are_there():
    for name in [
        "add_module",
        "apply_param_config",
        "clone",
        "clone_from",
        "detach",
        "get_param_id",
        "is_root",
        "product",
        "product_",
        "rand",
        "randn",
        "register_buffer",
        "register_parameter",
        "set_param_config",
        "touch",
    ]:
        assert hasattr(NytoModule, name)


def test_particle_operations():
    new_net = 2 * Net()
    assert str(new_net.my_param) == "Parameter containing:\ntensor([0., 2., 4.], requires_grad=True)"


def test_transform_to_a_product():
    assert isinstance(Net().product(), ParamProduct)


def test_version_management():
    net = Net()
    new_net = 2 * net
    new_net.my_param2 = nn.Parameter(torch.tensor([3.0, 4.0]))
    net.touch()
    assert str(net.my_param2) == "Parameter containing:\ntensor([3., 4.], requires_grad=True)"


def test_apply_and_set_param_config():
    def set_operational_false(pid, conf):
        conf.operational = False

    for configure in (
        lambda net: net.apply_param_config(set_operational_false, "my_module"),
        lambda net: net.set_param_config(operational=False, name="my_module"),
    ):
        net = Both()
        configure(net)
        doubled = 2 * net
        assert torch.equal(doubled.my_module.weight, net.my_module.weight)
        assert torch.equal(doubled.my_param, 2 * net.my_param)


def test_clone_from():
    net1, net2 = Net(), Net()
    net3 = net1.clone_from(net2)
    assert net1._version_kernel is not net2._version_kernel
    assert net1._version_kernel is net3._version_kernel
    assert net1.my_param is not net3.my_param


def test_detach_shares_the_parameters_in_a_new_species():
    net1 = Net()
    net2 = net1.detach()
    assert net1._version_kernel is not net2._version_kernel
    assert net1.my_param is net2.my_param


def test_get_param_id():
    net = Both()
    assert net.get_param_id(net.my_param) == 2


def test_touch():
    class Empty(NytoModule):
        pass

    net1 = Empty()
    net2 = net1.clone()
    net1.my_param = nn.Parameter(torch.randn(2, 2))
    assert not hasattr(net2, "my_param")
    net2.touch()
    assert hasattr(net2, "my_param")


def test_binary_and_unary_operators_of_products():
    net1 = Net((0.0, 1.0, 2.0))
    net2 = net1.clone_from(Net((5.0, 4.0, 3.0)))
    new = net1.product().binary_operator(net2.product(), lambda p, q, conf: nn.Parameter(p - q)).module()
    assert str(new.my_param) == "Parameter containing:\ntensor([-5., -3., -1.], requires_grad=True)"
    new = net1.product().unary_operator(lambda p, conf: nn.Parameter(p + 10.0)).module()
    assert str(new.my_param) == "Parameter containing:\ntensor([10., 11., 12.], requires_grad=True)"
    with pytest.raises(AssertionError):
        net1.product().binary_operator(Net().product(), lambda p, q, conf: p)


def test_operators_of_ones_own_and_product_see_parameters_that_take_no_part():
    net = Both()
    net.set_param_config(operational=False, name="my_module")
    twin = net.clone_from(Both())
    seen = []
    made = net.product().unary_operator(lambda p, conf: seen.append(conf.operational) or nn.Parameter(p + 1)).module()
    assert seen.count(False) == 2
    assert torch.equal(made.my_module.bias, net.my_module.bias + 1)
    made = net.product().binary_operator(twin.product(), lambda p, q, conf: nn.Parameter(p - q)).module()
    assert torch.equal(made.my_module.weight, net.my_module.weight - twin.my_module.weight)
    net.product_(twin.product())
    assert torch.equal(net.my_module.weight, twin.my_module.weight)


def test_binary_and_unary_operators_of_wrappers():
    net1 = ParticleModule(Net((0.0, 1.0, 2.0)))
    net2 = net1.clone_from(ParticleModule(Net((5.0, 4.0, 3.0))))
    new = net1.product().binary_operator(net2.product(), lambda p, q, conf: nn.Parameter(p - q)).module()
    assert new.root_module.my_param.tolist() == [-5, -3, -1]
    new = net1.product().unary_operator(lambda p, conf: nn.Parameter(p + 10.0)).module()
    assert new.root_module.my_param.tolist() == [10, 11, 12]
    assert (net1.product() - net2.product()).clone().module().root_module.my_param.tolist() == [-5, -3, -1]


def test_assigning_through_a_wrapper():
    model = ParticleModule(Net())
    clone = model.clone()
    model.restore_kernel_ref()
    model.root_module.data_embed = nn.Embedding(30, 8)
    model.clear_kernel_ref()
    clone.restore_kernel_ref()
    clone.root_module.touch()
    clone.clear_kernel_ref()
    assert torch.equal(clone.root_module.data_embed.weight, model.root_module.data_embed.weight)
    with GetNytoModule(model) as module:
        module.more = nn.Embedding(3, 2)
        with GetNytoModule(model) as inner:
            assert inner is module
        assert module._particle_kernel is not None
    assert model.root_module._particle_kernel is None
    with GetNytoModule(clone) as module:
        assert module.touch().more.weight.shape == (3, 2)
    with pytest.raises(AssertionError):
        nytorch.module_to_product(model.root_module)
    with pytest.raises(AssertionError):
        ParticleModule(nn.Linear(1, 1))
    with pytest.raises(AssertionError):
        GetNytoModule(Net())
    assert isinstance(model.particle_kernel, ParticleKernel)
    assert model.touch().rand().randn().root_module.my_param.shape == (3,)
    model.product_(0 * model.product() + 1)
    assert model.root_module.my_param.tolist() == [1, 1, 1]
    model += model
    model *= 2
    assert model.root_module.my_param.tolist() == [4, 4, 4]


def test_a_submodule_may_not_be_wrapped():
    net = NytoModule()
    net.inner = Net()
    with pytest.raises(StructureError, match="inside another particle"):
        ParticleModule(net.inner)


def test_make_modules_ref():
    net0, net1 = nn.Module(), nn.Module()
    p = [nn.Parameter(torch.randn(n)) for n in (1, 2, 3)]
    metas = OrderedDict([
        (0, ModuleMeta(sub_modules=OrderedDict([("m1", 1)]), sub_params=OrderedDict([("p0", 0)]))),
        (1, ModuleMeta(sub_modules=OrderedDict(), sub_params=OrderedDict([("p1", 1), ("p2", 2)]))),
    ])  # fmt: skip
    make_modules_ref(OrderedDict([(0, net0), (1, net1)]), OrderedDict(enumerate(p)), metas)
    assert net0.m1 is net1
    assert (net0.p0, net1.p1, net1.p2) == tuple(p) or [net0.p0 is p[0], net1.p1 is p[1], net1.p2 is p[2]] == [True] * 3


def test_the_updaters_of_the_page_replay_on_siblings():
    from moduli.compat.nytorch import version_updater as v

    net = NytoModule()
    net.register_buffer("kept", torch.zeros(1))
    twin = net.clone()
    kernel = net._particle_kernel
    w, child, buffer = nn.Parameter(torch.ones(2)), Both(), torch.ones(3)
    kernel.version_update(v.AddParamVersionUpdater(0, "w", w))
    kernel.version_update(v.AddModuleVersionUpdater(0, "child", child))
    kernel.version_update(v.RegisterBufferVersionUpdater(0, "b", buffer, False))
    assert net.w is w
    assert net.child is child
    assert net.b is buffer
    assert net._version_kernel is kernel.version
    twin.touch()
    assert twin._version_kernel is net._version_kernel
    assert twin.w is not w
    assert torch.equal(twin.child.my_param, child.my_param)
    assert "b" not in twin.state_dict()
    kernel.version_update(v.SetParamNoneVersionUpdater(0, "w"))
    kernel.version_update(v.DelBufferVersionUpdater(0, "b"))
    kernel.version_update(v.DelParamVersionUpdater(net.child._module_id, "my_param"))
    kernel.version_update(v.SetModuleNoneVersionUpdater(net.child._module_id, "my_module"))
    assert net.w is None
    assert not hasattr(net, "b")
    twin.touch()
    assert twin.w is None
    assert twin.child.my_module is None
    assert not hasattr(twin.child, "my_param")
    kernel.version_update(v.DelModuleVersionUpdater(0, "child"))
    assert not hasattr(net, "child")
    assert not hasattr(twin.touch(), "child")
    before = net._version_kernel
    for wrong in (v.DelParamVersionUpdater(0, "absent"), v.DelModuleVersionUpdater(7, "absent")):
        with pytest.raises((KeyError, StructureError)):
            kernel.version_update(wrong)
    assert net._version_kernel is before


def test_the_kernel_without_torch():
    from moduli.compat.nytorch import ParticleData, ParticleUpdater, VersionData, VersionUpdater

    class Names(VersionData):
        def __init__(self, names):
            self.names = names

        def copy(self):
            return Names(list(self.names))

        def init_kernel(self, kernel):
            self.kernel = kernel

        def init_particle(self, pdata):
            assert set(pdata.values) == set(self.names)

    class Values(ParticleData):
        def __init__(self, values):
            self.values = values

        def copy(self, vdata):
            return Values(dict(self.values))

        def init_kernel(self, kernel):
            self.kernel = kernel

    class Add(VersionUpdater, ParticleUpdater):
        fails = False
        calls = []

        def __init__(self, name):
            self.name = name

        def set_version_data(self, vdata):
            self.calls.append("version")
            return self

        def set_next_version_data(self, vdata):
            self.calls.append("next")
            return self

        def set_particle_data(self, pdata):
            self.calls.append("particle")
            return self

        def run(self, data):
            self.calls.append("run")
            if isinstance(data, Names):
                return Names([*data.names, self.name]), self
            if self.fails:
                raise RuntimeError
            data.values[self.name] = 0
            return None

    a = ParticleKernel(VersionKernel(Names([])), Values({}))
    b = a.create(Values({}))
    a.version_update(Add("x"))
    assert Add.calls == ["version", "particle", "run", "version", "next", "particle", "run"]
    a.version_update(Add("y"))
    assert b.data.values == {}
    b.particle_update()
    assert b.data.values == {"x": 0, "y": 0}
    assert b.version is a.version
    with pytest.raises(AssertionError):
        a.version.particle_update(a.data)
    c = a.detach()
    assert c.version is not a.version
    assert c.data.values == a.data.values
    Add.fails = True
    version = a.version
    with pytest.raises(RuntimeError):
        a.version_update(Add("z"))
    assert a.version is version
    assert version.is_newest
    assert version.copy().data is version.data


def test_param_config_has_free_attributes():
    config = ParamConfig(operational=False)
    config.mark = [1]
    twin = config.copy()
    assert twin == config
    assert twin.mark is not config.mark
    assert repr(twin) == "ParamConfig(operational=False, clone=True, mark=[1])"
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        config.absent
    assert config != ParamConfig()


def test_config_by_name_pattern_and_child():
    class Deep(NytoModule):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.head = Both()

    net = Deep()
    net.set_param_config(operational=False, name="encoder.*.bias")
    net.head.set_param_config(operational=False, clone=False, name="my_param")
    made = 3 * net
    assert torch.equal(made.encoder[1].bias, net.encoder[1].bias)
    assert made.encoder[1].bias is not net.encoder[1].bias
    assert torch.equal(made.encoder[1].weight, 3 * net.encoder[1].weight)
    assert made.head.my_param is net.head.my_param
    before = net.encoder[0].bias.clone()
    net *= 5
    assert torch.equal(net.encoder[0].bias, before)
    for wrong in ("absent", "head.absent", "enc"):
        with pytest.raises(ValueError, match="no parameters called"):
            net.set_param_config(operational=True, name=wrong)


def test_particle_data_is_created_copied_and_assigned():
    net = Both()
    kernel = net._particle_kernel
    data = kernel.data
    twin = data.create(kernel.version.data, nytorch.clone_params(data.params))
    assert torch.equal(twin.modules[0].my_param, net.my_param)
    assert twin.modules[0].my_param is twin.params[2]
    shallow = data.copy(kernel.version.data)
    assert shallow.modules[0].my_param is net.my_param
    assert shallow.modules[0] is not net
    with pytest.raises(StructureError, match="were given for a particle"):
        data.assign(OrderedDict())
    with pytest.raises(StructureError, match="are taken"):
        data.add_params(OrderedDict([(0, net.my_param)]))
    data.assign(OrderedDict(data.params))
    twin.add_modules(OrderedDict([(9, nn.Linear(1, 1))]))
    twin.remove_modules({9})
    with pytest.raises(StructureError, match="already has parameters"):
        nytorch.create_new_group(net)
    assert kernel.version.data.get_sub_params(0) == {0, 1, 2}
    assert kernel.version.data.get_sub_modules(1) == {1}
    old = kernel.version
    net.extra = nn.Parameter(torch.ones(1))
    edit = nytorch.version_updater.DelParamVersionUpdater(0, "extra")
    with pytest.raises(StructureError, match="already made from this version"):
        old.version_update(edit, data)


def test_configurations_travel_in_checkpoints(tmp_path):
    net = Both()
    net.set_param_config(operational=False, clone=False, name="my_module")
    net.apply_param_config(lambda _, config: setattr(config, "rate", 0.5), "my_param")
    torch.save(net.state_dict(), tmp_path / "s.pt")
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    assert list(state) == ["my_param", "my_module.weight", "my_module.bias"]
    other = Both()
    other.load_state_dict(state)
    assert (2 * other).my_module.weight is other.my_module.weight
    assert other._version_kernel.data.config[2].rate == 0.5
    assert "param_config" not in Both().state_dict()._metadata[""]


def test_particles_and_products_of_ones_own():
    from moduli.compat.nytorch import Particle, Product

    class Number(Product):
        def __init__(self, value):
            self.value = value

        def particle(self):
            return Point(self.value)

        def clone(self):
            return Number(self.value)

        def rand(self):
            return Number(0.5)

        def randn(self):
            return Number(-0.5)

        def _binary(self, fn, other, reflected=False):
            value = other.value if isinstance(other, Number) else other
            return Number(fn(value, self.value) if reflected else fn(self.value, value))

        def _unary(self, fn):
            return Number(fn(self.value))

    class Point(Particle):
        def __init__(self, value):
            self.value = value

        def product(self):
            return Number(self.value)

        def product_(self, product):
            self.value = product.value
            return self

    x = Point(3.0)
    y = 2 * x + x
    assert y.value == 9.0
    assert (-x).value == -3.0
    assert (x.clone().value, x.rand().value, x.randn().value) == (3.0, 0.5, -0.5)
    for act, expected in (
        ("__iadd__", 5.0),
        ("__isub__", 3.0),
        ("__imul__", 6.0),
        ("__itruediv__", 3.0),
        ("__ipow__", 9.0),
    ):
        assert getattr(x, act)(Point(2.0)) is x
        assert x.value == expected
    x %= 5
    x //= 3
    assert x.value == 1.0
    with pytest.raises(TypeError):
        Operators() + 1
    with pytest.raises(TypeError):
        -Operators()


def test_copies_of_modules_share_tensors_but_not_registries():
    net = Both() + 1
    twin = nytorch.copy_module(net)
    assert twin.my_param is net.my_param
    twin.register_forward_hook(lambda *_: None)
    twin.more = nn.Parameter(torch.zeros(1))
    assert not net._forward_hooks
    assert not hasattr(net, "more")
    both = nytorch.copy_modules(OrderedDict([(0, net.my_module)]))
    assert both[0].weight is net.my_module.weight


def test_a_pickle_of_a_forgotten_species_starts_one_again():
    import gc
    import pickle

    net = Both()
    net.set_param_config(operational=False, name="my_param")
    data = pickle.dumps(net)
    del net
    gc.collect()
    one, two = pickle.loads(data), pickle.loads(data)
    assert torch.equal((2 * one).my_param, one.my_param)
    assert one._version_kernel is two._version_kernel
    one.extra = nn.Parameter(torch.ones(1))
    assert two.touch().extra.item() == 1
    assert torch.equal((3 * two).my_param, two.my_param)


def test_parameters_that_take_no_part_in_every_kind_of_model():
    class Rich(Both):
        def __init__(self):
            super().__init__()
            self.layers = [self.my_module]
            self.register_buffer("count", torch.ones(1))

    for make in (Both, Rich):
        net = make()
        net.set_param_config(operational=False, clone=False, name="my_module")
        for one in (net, net + 1):
            made = 3 * one
            assert made.my_module.weight is one.my_module.weight
            assert torch.equal(made.my_param, 3 * one.my_param)
        with particles.differentiable():
            made = torch.tensor(2.0, requires_grad=True) * net
        assert made.my_module.weight is net.my_module.weight
        assert made.my_param.requires_grad
        assert not made.my_param.is_leaf
        product = (2 * net.product() + 1).module()
        assert product.my_module.weight is net.my_module.weight


def test_every_operation_on_every_kind_of_operand():
    import operator

    def make():
        net = NytoModule()
        net.w = nn.Parameter(torch.rand(400, 400) + 1)
        net.c = nn.Parameter(torch.rand(3) + 1)
        return net

    a, b = make(), make()
    for x, y in ((a, b), (a + 0, b), (a, b + 0), (a + 0, 2.0 * b), (0.5 * a, 3.0 * b), (2 * (a + 0), 4 * (b + 0))):
        for fn in (
            operator.add,
            operator.sub,
            operator.mul,
            operator.truediv,
            operator.pow,
            operator.floordiv,
            operator.mod,
        ):
            made = fn(x, y)
            x1, y1 = (+x), (+y)
            torch.testing.assert_close(made.w, fn(x1.w, y1.w), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(made.c, fn(x1.c, y1.c), rtol=1e-4, atol=1e-4)
        for fn in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow):
            torch.testing.assert_close(fn(x, 2).w, fn((+x).w, 2), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(fn(2, x).w, fn(2, (+x).w), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(fn(x, torch.tensor(2.0)).w, fn((+x).w, 2), rtol=1e-4, atol=1e-4)
    c = a.clone()
    c %= 1.5
    c //= 0.25
    c **= torch.tensor(2.0)
    torch.testing.assert_close(c.c, ((a.c % 1.5) // 0.25) ** 2)
    c += torch.ones(1)
    torch.testing.assert_close(c.c, ((a.c % 1.5) // 0.25) ** 2 + 1)


def test_a_product_has_the_kernel_of_its_particle():
    net = NytoModule()
    net.w = nn.Parameter(torch.ones(2))
    net.child = NytoModule()
    net.child.v = nn.Parameter(torch.ones(3))
    product = net.product()
    assert product.kernel is net._particle_kernel
    assert (2 * product + product).kernel is net._particle_kernel
    assert net.child.product().kernel is net._particle_kernel
    assert product.pdata.params[0] is net.w
    wrapper = ParticleModule(net.clone())
    inside = (2 * wrapper.product()).product
    assert type(inside) is ParamProduct
    assert inside.kernel is wrapper.particle_kernel
    assert torch.equal(inside.module().w, 2 * net.w)


def test_a_product_stays_what_it_was_when_it_was_made():
    net = NytoModule()
    net.w = mo.tensor([1.0, 2.0], ch=["r", "g"]).attach()
    product = net.product()
    net.w = mo.tensor([1.0, 2.0], ch=["g", "r"]).attach()
    if net._version_kernel is product._version:
        assert product.module().w.sel(ch="r").item() == 1.0
    else:
        with pytest.raises(StructureError, match="edited since"):
            product.module()


def test_wrapped_functions_give_parameters_outside_of_operations_too():
    from moduli.compat.nytorch import binary_lambda_wrapper, unary_lambda_wrapper

    param, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    for given in (param, frozen):
        for made in (
            unary_lambda_wrapper(lambda p: 2 * p)(given, ParamConfig()),
            binary_lambda_wrapper(lambda p, q: p + q)(given, given, ParamConfig()),
        ):
            assert type(made) is nn.Parameter
            assert made.is_leaf
            assert made.requires_grad is given.requires_grad


def test_packed_weights_are_not_left_out_of_operations():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}, torch.qint8)
    net = mo.adopt(quantized)
    with pytest.raises(StructureError, match="packed weights of a quantized layer"):
        _ = 2 * net


def test_the_class_has_the_name_that_users_write():
    assert mo.Module is NytoModule
    assert (mo.Module.__name__, mo.Module.__qualname__) == ("Module", "Module")
    net = NytoModule()
    for name in ("VersionData", "ParticleData", "Particle", "Product"):
        assert inspect.isabstract(getattr(nytorch, name))
    assert isinstance(net, nytorch.Particle)
    assert isinstance(net.product(), nytorch.Product)
    assert isinstance(net._version_kernel.data, nytorch.VersionData)
    assert isinstance(net._particle_kernel.data, nytorch.ParticleData)


def test_a_kernel_of_modules_refuses_other_edits():
    net = mo.Module()
    with pytest.raises(StructureError, match="eight documented edits"):
        net._particle_kernel.version_update(object())
