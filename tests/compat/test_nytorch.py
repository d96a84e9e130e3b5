"""The names and examples of nytorch's documentation: every name imports, and every correct example runs."""

import inspect
from collections import OrderedDict

import pytest
import torch
from torch import nn

from moduli.compat import nytorch
from moduli.compat.nytorch import (
    GetNytoModule,
    ModuleMeta,
    NytoModule,
    ParamProduct,
    ParticleKernel,
    ParticleModule,
    VersionKernel,
    make_modules_ref,
)
from moduli.particles import StructureError

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
def test_every_documented_name_imports(room, names):
    for name in names.split():
        assert getattr(nytorch, name) is getattr(getattr(nytorch, room), name)
        assert name in nytorch.__all__


@pytest.mark.parametrize(("path", "arguments"), ARGUMENTS.items(), ids=list(ARGUMENTS))
def test_constructors_take_the_documented_arguments(path, arguments):
    room, name = path.split(".")
    parameters = list(inspect.signature(getattr(getattr(nytorch, room), name)).parameters)
    assert parameters[: len(arguments.split())] == arguments.split()


def test_the_documented_methods_exist():
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


def test_custom_operators_and_product_apply_to_all_parameters():
    net = Both()
    net.set_param_config(operational=False, name="my_module")
    twin = net.clone_from(Both())
    flags = []
    result = (
        net.product().unary_operator(lambda p, conf: flags.append(conf.operational) or nn.Parameter(p + 1)).module()
    )
    assert flags.count(False) == 2
    assert torch.equal(result.my_module.bias, net.my_module.bias + 1)
    result = net.product().binary_operator(twin.product(), lambda p, q, conf: nn.Parameter(p - q)).module()
    assert torch.equal(result.my_module.weight, net.my_module.weight - twin.my_module.weight)
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
    assert net0.p0 is p[0]
    assert net1.p1 is p[1]
    assert net1.p2 is p[2]


def test_the_documented_updaters_are_replayed_on_relatives():
    from moduli.compat.nytorch import version_updater as v

    net = NytoModule()
    net.register_buffer("b0", torch.zeros(1))
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
