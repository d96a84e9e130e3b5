"""What functions do to modules, methods do to products."""

import pytest
import torch
from torch import nn

from moduli.particles import StructureError, adopt, from_vector, lerp_, vector


def net():
    torch.manual_seed(0)
    return adopt(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


def test_from_vector_undoes_vector():
    product = net().product()
    again = product.from_vector(product.vector())
    for one, two in zip(product.module().parameters(), again.module().parameters(), strict=True):
        assert torch.equal(one, two)


def test_from_vector_equals_the_function_on_modules():
    model = net()
    values = torch.arange(vector(model).numel(), dtype=torch.float32)
    assert torch.equal(vector(model.product().from_vector(values).module()), vector(from_vector(model, values)))
    with pytest.raises(StructureError, match="values in all"):
        model.product().from_vector(values[:-1])


def test_random_products_come_from_the_generator_and_are_scaled():
    def drawn(seed, scale):
        return net().product().randn(scale, torch.Generator().manual_seed(seed)).vector()

    assert torch.equal(drawn(1, 1.0), drawn(1, 1.0))
    assert not torch.equal(drawn(1, 1.0), drawn(2, 1.0))
    torch.testing.assert_close(drawn(1, 3.0), 3 * drawn(1, 1.0))
    uniform = net().product().rand(0.5, torch.Generator().manual_seed(0)).vector()
    assert uniform.min() >= 0
    assert uniform.max() < 0.5


def test_in_place_methods_write_into_the_parameters():
    model = net()
    twin = model.clone()
    parameter = model[0].weight
    model.product().lerp_(model.product() * 0 + 2, 0.25)
    lerp_(twin, twin * 0 + 2, 0.25)
    assert model[0].weight is parameter
    torch.testing.assert_close(vector(model), vector(twin))
    before = vector(model)
    model.product().axpy_(3.0, model.product() * 0 + 1)
    torch.testing.assert_close(vector(model), before + 3)


def test_in_place_methods_leave_out_what_operations_leave_out():
    model = net()
    model.set_param_config(operational=False, name="0.weight")
    weight, bias = model[0].weight.clone(), model[0].bias.clone()
    model.product().axpy_(1.0, model.product() * 0 + 1)
    assert torch.equal(model[0].weight, weight)
    assert not torch.equal(model[0].bias, bias)
