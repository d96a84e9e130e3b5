"""Writing values into labelled attributes: the parameter stays the same object, and only its values change."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles
from moduli.labels import Space, Tensor
from moduli.nn import Module, TensorDict, TensorList, nograd_tensors, tie

CHANNEL, REVERSED = Space(["r", "g", "b"], name="c"), Space(["b", "g", "r"], name="c")


@nograd_tensors("shift")
class Net(Module):
    def __init__(self):
        super().__init__()
        self.w = Tensor(torch.tensor([1.0, 2.0, 3.0], requires_grad=True), (CHANNEL,))
        self.shift = Tensor(torch.zeros(3), (CHANNEL,))


def reversed_channel(*values):
    return Tensor(torch.tensor(values), (REVERSED,))


def multiply_in_place(net):
    net.w *= 0.5


def subtract_in_place(net):
    net.w -= 0.5 * net.w


def divide_in_place(net):
    net.w /= 2


def raise_to_a_power(net):
    net.w **= 1
    net.w *= Tensor(torch.full((3,), 0.5), (CHANNEL,))


def assign_product(net):
    net.w = net.w * 0.5


def assign_plain_tensor(net):
    net.w = Tensor(torch.tensor([0.5, 1.0, 1.5]), (CHANNEL,))


def assign_slice(net):
    net.w[...] = reversed_channel(1.5, 1.0, 0.5)


def subtract_by_label(net):
    net.w -= reversed_channel(1.5, 1.0, 0.5)


WRITES = {
    "*=": multiply_in_place,
    "-=": subtract_in_place,
    "/=": divide_in_place,
    "**=": raise_to_a_power,
    "by label": subtract_by_label,
    "assign": assign_product,
    "assign without gradient": assign_plain_tensor,
    "slice": assign_slice,
    "mul_": lambda net: net.w.mul_(0.5),
    "div_": lambda net: net.w.div_(2.0),
    "add_": lambda net: net.w.add_(reversed_channel(3.0, 2.0, 1.0), alpha=-0.5),
    "sub_": lambda net: net.w.sub_(net.w, alpha=0.5),
    "copy_": lambda net: net.w.copy_(reversed_channel(1.5, 1.0, 0.5)),
    "zero_": lambda net: net.w.zero_().add_(reversed_channel(1.5, 1.0, 0.5)),
    "fill_": lambda net: net.w.fill_(0.5).mul_(reversed_channel(3.0, 2.0, 1.0)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [Net, lambda: particles.adopt(Net())])
def test_a_write_keeps_the_parameter(write, make):
    net = make()
    parameter, optimizer = net.get_parameter("w"), torch.optim.SGD(net.parameters(), lr=1.0)
    with torch.no_grad():
        WRITES[write](net)
    assert net.get_parameter("w") is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.tolist() == [0.5, 1.0, 1.5]
    assert net.w.dims == (CHANNEL,)
    net.w.sum().backward()
    optimizer.step()
    assert net.w.data.tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_not_recorded_as_an_edit(write):
    net = particles.adopt(Net())
    twin = net.clone()
    with torch.no_grad():
        WRITES[write](net)
    assert particles.history(net) == []
    assert (net + twin).w.data.tolist() == [1.5, 3.0, 4.5]
    assert twin.w.data.tolist() == [1.0, 2.0, 3.0]


def test_a_write_to_a_member_changes_its_row_of_the_population():
    pop = mo.Population.of(Net(), 2)
    pop[1].w = pop[1].w * 2
    assert pop.matrix.tolist() == [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]


def test_buffers_and_containers_are_written_too():
    net = Net()
    net.list, net.dict = TensorList([net.w]), TensorDict({"a": net.w})
    before = [net.get_buffer("shift"), net.list[0].data, net.dict["a"].data]
    net.shift = net.shift + 1
    net.shift += 1
    with torch.no_grad():
        net.list[0] *= 2
        net.dict["a"] *= 2
    after = [net.get_buffer("shift"), net.list[0].data, net.dict["a"].data]
    assert all(x is y for x, y in zip(before, after, strict=True))
    assert [each.tolist() for each in after] == [[2.0] * 3, [2.0, 4.0, 6.0], [2.0, 4.0, 6.0]]


def test_swapping_entries_of_a_tensor_list_swaps_their_values():
    values = TensorList([mo.tensor([1.0], "x"), mo.tensor([2.0], "x")])
    values[0], values[1] = values[1], values[0]
    assert [each.item() for each in values] == [2.0, 1.0]


OTHER_TENSORS = {
    "labels": lambda: reversed_channel(1.0, 2.0, 3.0),
    "dtype": lambda: Tensor(torch.ones(3, dtype=torch.float64), (CHANNEL,)),
    "shape": lambda: Tensor(torch.ones(2), (Space(["r", "g"], name="c"),)),
    "name": lambda: Tensor(torch.ones(3), (Space(["r", "g", "b"], name="d"),)),
}


@pytest.mark.parametrize("other", OTHER_TENSORS)
def test_assigning_other_labels_dtype_shape_or_name_is_an_edit(other):
    net = particles.adopt(Net())
    net.clone()
    parameter, value = net.get_parameter("w"), OTHER_TENSORS[other]()
    net.w = value
    assert net.get_parameter("w") is not parameter
    assert net.w.dims == value.dims
    assert net.w.dtype == value.dtype
    assert not net.w.requires_grad
    assert len(particles.history(net)) == 1


def test_assigning_another_size_of_a_positional_axis_replaces_the_parameter():
    module = Module()
    module.w = mo.tensor([1.0, 2.0], "x")
    parameter = module.get_parameter("w")
    module.w = mo.tensor([3.0, 4.0], "x")
    assert module.get_parameter("w") is parameter
    module.w = mo.tensor([3.0, 4.0, 5.0], "x")
    assert module.w.shape == (3,)


def test_assigning_copies_and_never_aliases():
    net, value = Net(), Tensor(torch.ones(3), (CHANNEL,))
    net.w = value
    value.data.zero_()
    assert net.w.data.tolist() == [1.0, 1.0, 1.0]


def test_a_leaf_that_requires_gradients_refuses_in_place_writes_as_torch_does():
    net = Net()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        net.w *= 0.5
    assert net.w.data.tolist() == [1.0, 2.0, 3.0]


def test_values_that_do_not_fit_are_refused_and_nothing_changes():
    net = Net()
    with torch.no_grad():
        with pytest.raises(ValueError, match="labels of axis 'c' differ"):
            net.w += Tensor(torch.ones(3), (Space(["r", "g", "k"], name="c"),))
        with pytest.raises(KeyError, match="does not fit"):
            net.w += mo.tensor([1.0, 2.0], "other")
    assert net.w.data.tolist() == [1.0, 2.0, 3.0]


def test_a_tie_ends_when_a_name_is_assigned_but_not_by_a_write_in_place():
    net = Net()
    tie(net, "v", to="w")
    with torch.no_grad():
        net.v *= 2
    assert net.v.data is not None
    assert net.w.data.tolist() == [2.0, 4.0, 6.0]
    twin = copy.deepcopy(net)
    twin.v = twin.v * 2
    assert twin.w.data.tolist() == [2.0, 4.0, 6.0]
    assert twin.v.data.tolist() == [4.0, 8.0, 12.0]
    parameter = twin.get_parameter("v")
    twin.v = twin.v * 2
    assert twin.get_parameter("v") is parameter


def test_parametrized_attributes_are_written_through_their_right_inverse():
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

        def right_inverse(self, x):
            return x / 2

    net = Net()
    nn.utils.parametrize.register_parametrization(net, "tensor:w", Double())
    original = net.parametrizations["tensor:w"].original
    with torch.no_grad():
        net.w *= 2
    assert net.w.data.tolist() == [2.0, 4.0, 6.0]
    assert net.parametrizations["tensor:w"].original is original


# -- registration by torch's own methods and containers --------------------------------------------------------------------


def test_register_buffer_refuses_a_labelled_tensor_and_names_nograd_tensors():
    net = Net()
    with pytest.raises(TypeError, match=r"'q' as a buffer of Net.*nograd_tensors\('q'\)"):
        net.register_buffer("q", net.w)
    net.double().register_buffer("plain", torch.ones(1))
    assert "q" not in dict(net.named_buffers())


@pytest.mark.parametrize("make", [lambda t: nn.ParameterDict({"a": t}), lambda t: nn.ParameterList([t])])
def test_containers_of_torch_with_labelled_tensors_are_refused(make):
    net, container = Net(), make(Net().w)
    with pytest.raises(TypeError, match="moduli.nn.Tensor(Dict|List)"):
        net.held = container
    assert "held" not in net._modules
    net.held = make(nn.Parameter(torch.ones(1)))


def test_a_parameter_of_a_labelled_tensor_is_refused_with_an_explanation():
    with pytest.raises(TypeError, match="assigned to an attribute of a moduli.Module"):
        nn.Parameter(Net().w)
    assert Tensor(torch.ones(3), (CHANNEL,)).requires_grad_().requires_grad


class Lazy(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(2)


def test_an_uninitialised_layer_is_loaded():
    source, target = Lazy(), Lazy()
    source.head(torch.ones(1, 3))
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.head.weight, source.head.weight)


def test_a_failed_load_leaves_an_uninitialised_layer_uninitialised():
    source, target = Lazy(), Lazy()
    source.head(torch.ones(1, 3))
    state = source.state_dict()
    state["buffer:shift"] = torch.ones(7)
    with pytest.raises(RuntimeError, match="shift"):
        target.load_state_dict(state)
    assert isinstance(target.head.weight, nn.UninitializedParameter)
    target.head(torch.ones(1, 5))
    assert target.head.weight.shape == (2, 5)
