"""Parameters, configurations and products as nytorch documents them, for every kind of model."""

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
    NytoModule,
    ParamConfig,
    ParamProduct,
    ParticleModule,
)
from moduli.particles import StructureError
from moduli.particles._operators import Operators


class Both(NytoModule):
    def __init__(self):
        super().__init__()
        self.my_module = nn.Linear(3, 2)
        self.my_param = nn.Parameter(torch.randn(2, 2))


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


def test_configurations_are_set_by_name_pattern_and_child():
    class Deep(NytoModule):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.head = Both()

    net = Deep()
    net.set_param_config(operational=False, name="encoder.*.bias")
    net.head.set_param_config(operational=False, clone=False, name="my_param")
    result = 3 * net
    assert torch.equal(result.encoder[1].bias, net.encoder[1].bias)
    assert result.encoder[1].bias is not net.encoder[1].bias
    assert torch.equal(result.encoder[1].weight, 3 * net.encoder[1].weight)
    assert result.head.my_param is net.head.my_param
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


def test_configurations_are_saved_in_checkpoints(tmp_path):
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


def test_user_defined_particles_and_products_have_all_operators():
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


def test_pickles_of_a_freed_species_share_a_new_one():
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


def test_parameters_that_are_not_operational_are_shared_by_results():
    class Rich(Both):
        def __init__(self):
            super().__init__()
            self.layers = [self.my_module]
            self.register_buffer("count", torch.ones(1))

    for make in (Both, Rich):
        net = make()
        net.set_param_config(operational=False, clone=False, name="my_module")
        for one in (net, net + 1):
            result = 3 * one
            assert result.my_module.weight is one.my_module.weight
            assert torch.equal(result.my_param, 3 * one.my_param)
        with particles.differentiable():
            result = torch.tensor(2.0, requires_grad=True) * net
        assert result.my_module.weight is net.my_module.weight
        assert result.my_param.requires_grad
        assert not result.my_param.is_leaf
        product = (2 * net.product() + 1).module()
        assert product.my_module.weight is net.my_module.weight


def test_operators_of_evaluated_and_unevaluated_operands_agree():
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
            result = fn(x, y)
            x1, y1 = (+x), (+y)
            torch.testing.assert_close(result.w, fn(x1.w, y1.w), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(result.c, fn(x1.c, y1.c), rtol=1e-4, atol=1e-4)
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


def test_a_product_is_refused_after_its_labels_were_reordered():
    net = NytoModule()
    net.w = mo.tensor([1.0, 2.0], ch=["r", "g"]).attach()
    product = net.product()
    net.w = mo.tensor([1.0, 2.0], ch=["g", "r"]).attach()
    with pytest.raises(StructureError, match="edited since"):
        product.module()


def test_wrapped_functions_return_parameters():
    from moduli.compat.nytorch import binary_lambda_wrapper, unary_lambda_wrapper

    param, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    for source in (param, frozen):
        for result in (
            unary_lambda_wrapper(lambda p: 2 * p)(source, ParamConfig()),
            binary_lambda_wrapper(lambda p, q: p + q)(source, source, ParamConfig()),
        ):
            assert type(result) is nn.Parameter
            assert result.is_leaf
            assert result.requires_grad is source.requires_grad


def test_models_with_packed_weights_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}, torch.qint8)
    net = mo.adopt(quantized)
    with pytest.raises(StructureError, match="packed weights of a quantized layer"):
        _ = 2 * net


def test_classes_have_their_public_names_and_are_abstract():
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
