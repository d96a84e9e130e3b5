"""Alignment by labels: wherever two stored tensors are combined, entries pair by label, never by position."""

import copy
import operator
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured

import moduli as mo
from moduli import merge, particles
from moduli.layout import AxesError, Axis, Reorder, align, align_axes, layout_of, read, reorder_state
from moduli.nn import AveragedModel, Module, nograd_tensors
from moduli.particles import StructureError

ORDERS = {"same": ("r", "g", "b"), "reversed": ("b", "g", "r"), "rotated": ("g", "b", "r")}
AXES = {"same axes": "c x", "turned axes": "x c"}


@nograd_tensors("offset")
class Net(Module):
    """One labelled matrix, one labelled buffer that operations apply to, and one plain parameter."""

    def __init__(self, order, axes, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = mo.tensor(torch.rand(3, 2, generator=generator).add(0.5), c=["r", "g", "b"], x=["p", "q"])
        vector = mo.tensor(torch.rand(3, generator=generator).add(0.5), c=["r", "g", "b"])
        channel, x = mo.Space(order, name="c"), mo.Space(["p", "q"], name="x")
        self.w = table.align_to([channel, x] if axes == "c x" else [x, channel]).attach()
        self.offset = vector.align_to([channel])
        self.plain = nn.Parameter(torch.rand(2, generator=generator))


def particle(order="same", axes="same axes", seed=0):
    net = particles.adopt(Net(ORDERS[order], AXES[axes], seed))
    return particles.buffer_policy(net, "operate", "offset")


def by_label(net):
    """Return the values of a model with axes `c` and `x` and labels in the order of `ORDERS["same"]`."""
    channel, x = (mo.Space(each, name=name) for each, name in ((ORDERS["same"], "c"), (("p", "q"), "x")))
    tensors = net.w.align_to([channel, x]).data, net.offset.align_to([channel]).data, net.plain
    return [tensor.detach() for tensor in tensors]


def lerp_(a, b):
    return particles.lerp_(a, b, 0.25)


def fisher_information(net):
    """Return a Fisher information for each parameter, computed from its values and so labelled like them."""
    return {name: param.detach() * 2 + 1 for name, param in net.named_parameters()}


def average(a, b):
    model = AveragedModel(a, use_buffers=True)
    model.update_parameters(a)
    model.update_parameters(b)
    return model.module


MODELS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "iadd": lambda a, b: operator.iadd(a, b),
    "lerp": lambda a, b: particles.lerp(a, b, 0.25),
    "lerp_": lerp_,
    "expression": lambda a, b: a + 0.5 * (b - a),
    "scaled temporary": lambda a, b: a + 2.0 * (b * 1.0),
    "merge": lambda a, b: merge.linear([a, b], weights=[0.25, 0.75]),
    "task arithmetic": lambda a, b: merge.task_arithmetic(a, [b, b], 0.5),
    "slerp": lambda a, b: merge.slerp(a, b, 0.3),
    "fisher": lambda a, b: merge.fisher([a, b], [fisher_information(a), fisher_information(b)]),
    "average": average,
    "load": lambda a, b: (a.load_state_dict(b.state_dict()), a)[1],
    "assigning load": lambda a, b: (a.load_state_dict(b.state_dict(), assign=True), a)[1],
    "migrate": lambda a, b: particles.migrate(b, a),
    "migrate state": lambda a, b: particles.migrate(b.state_dict(), a),
}


def assert_same(result, expected):
    for x, y in zip(by_label(result), by_label(expected), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("operation", MODELS)
def test_models_are_combined_by_label(operation, order, axes):
    act, left, plain = MODELS[operation], particle(), particle(seed=1)
    expected = act(copy.deepcopy(left), plain)
    result = act(left, particle(order, axes, seed=1))
    assert_same(result, expected)
    assert tuple(result.w.dims[0]) == ORDERS["same"]


MEASURES = {
    "dot": particles.dot,
    "cosine": particles.cosine,
    "distance": particles.distance,
}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("measure", MEASURES)
def test_measures_of_models_pair_entries_by_label(measure, order, axes):
    expected = MEASURES[measure](particle(), particle(seed=1))
    torch.testing.assert_close(MEASURES[measure](particle(), particle(order, axes, seed=1)), expected)


def population(order="same", axes="same axes", seed=0, count=3):
    return mo.Population.from_modules([particle(order, axes, seed + 10 * i) for i in range(count)])


def replace_members(a, b):
    a.replace([0, 1, 2], b)
    return a


def assign_members(a, b):
    a[:] = b
    return a


def load_members(a, b):
    a.load_state_dict(b.state_dict())
    return a


def cross_over(kind):
    seeds = torch.arange(3)
    return lambda a, b: a.crossover(b, kind, seeds=seeds)


POPULATIONS = {
    "add": operator.add,
    "reflected": lambda a, b: b.__radd__(a) if isinstance(b, nn.Module) else a - b,
    "iadd": lambda a, b: operator.iadd(a, b),
    "lerp": lambda a, b: a.lerp(b, 0.25),
    "lerp_": lambda a, b: a.lerp_(b, 0.25),
    "axpy_": lambda a, b: a.axpy_(0.5, b),
    "where": lambda a, b: a.where(torch.tensor([True, False, False]), b),
    "replace": replace_members,
    "assign": assign_members,
}
BOTH = POPULATIONS | {
    "map": lambda a, b: a.map(torch.maximum, b),
    "load": load_members,
    **{kind: cross_over(kind) for kind in ("uniform", "one_point", "layer", "arithmetic")},
}
NUMBERS = {name: lambda a, b, name=name: getattr(a, name)(b) for name in ("dot", "cosine", "distance")}


def assert_same_members(results, expected):
    for x, y in zip(results, expected, strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("operation", BOTH)
def test_populations_are_combined_by_label(operation, order, axes):
    expected = BOTH[operation](population(), population(seed=1))
    assert_same_members(BOTH[operation](population(), population(order, axes, seed=1)), expected)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("operation", [name for name in POPULATIONS if name != "reflected"])
def test_populations_and_models_are_combined_by_label(operation, order, axes):
    expected = POPULATIONS[operation](population(), particle(seed=1))
    assert_same_members(POPULATIONS[operation](population(), particle(order, axes, seed=1)), expected)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
def test_buffers_of_a_left_model_pair_with_a_population_by_label(order, axes):
    expected = particle(seed=1) - population()
    assert_same_members(particle(order, axes, seed=1) - population(), expected)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("measure", [*NUMBERS, "distances"])
def test_measures_of_populations_pair_entries_by_label(measure, order, axes):
    act = NUMBERS.get(measure, lambda a, b: a.distances(b))
    torch.testing.assert_close(act(population(), population(order, axes, 1)), act(population(), population(seed=1)))


@pytest.mark.parametrize("order", ORDERS)
def test_members_with_labels_in_different_orders_are_stacked_by_label(order):
    orders = iter(("same", order, "reversed"))
    pop = mo.Population.of(lambda: Net(ORDERS[next(orders)], "c x", 7), 3)
    for member in pop:
        assert_same(member, Net(ORDERS["same"], "c x", 7))


@pytest.mark.parametrize(
    "meet",
    [
        *(lambda a, b, act=act: act(population_of(a), population_of(b)) for act in BOTH.values()),
        *(lambda a, b, act=act: act(population_of(a), b) for name, act in POPULATIONS.items() if name != "reflected"),
        *MODELS.values(),
        *MEASURES.values(),
    ],
)
def test_other_labels_are_refused_and_nothing_changes(meet):
    a, b = particle(), particle()
    b.w = mo.tensor(torch.ones(3, 2), c=["r", "g", "k"], x=["p", "q"])
    before = [tensor.clone() for tensor in (*a.parameters(), *a.buffers())]
    with pytest.raises((ValueError, RuntimeError), match=r"w.*the labels of axis 'c' differ: only .* has \['[bk]'\]"):
        meet(a, b)
    assert all(map(torch.equal, before, (*a.parameters(), *a.buffers())))


def population_of(net):
    return mo.Population.from_modules([net, net, net])


# -- align and align_axes ---------------------------------------------------------------------------------------------------


def test_alignment_is_computed_once_for_a_pair_of_layouts(monkeypatch):
    left, right = layout_of(particle()), layout_of(particle("reversed"))
    first = align(left, right)
    monkeypatch.setattr("moduli.layout._gate._compute", None)
    assert align(left, right) is first
    assert align(left, left) is None


def test_layouts_without_labels_are_not_compared(monkeypatch):
    monkeypatch.setattr("moduli.layout._gate._compute", None)
    plain = layout_of(nn.Linear(2, 2))
    assert align(plain, layout_of(nn.Linear(2, 3))) is None
    assert align(layout_of(particle()), plain) is None
    assert not plain.labelled


def test_labels_are_part_of_a_structure_but_not_of_the_fingerprint():
    a, b = Net(ORDERS["same"], "c x", 0), Net(ORDERS["reversed"], "c x", 0)
    assert read(a).structure is read(Net(ORDERS["same"], "c x", 5)).structure
    assert read(a).structure is not read(b).structure
    assert layout_of(a).fingerprint == layout_of(b).fingerprint
    assert layout_of(a)["tensor:w"].axes == (Axis("c", ("r", "g", "b")), Axis("x", ("p", "q")))


def test_a_range_and_a_tuple_with_equal_labels_need_no_reordering():
    assert align_axes((Axis(None, range(3)),), (Axis(None, (0, 1, 2)),)) is None
    assert align_axes((Axis(None, range(3)),), (Axis(None, (2, 1, 0)),)).index == ((2, 1, 0),)


def test_axes_without_labels_pair_with_any_labels_and_names_must_agree():
    assert align_axes((Axis(None, None),), (Axis("c", ("a", "b")),)) is None
    with pytest.raises(AxesError, match="axis 'a' of here is axis 'b' of there"):
        align_axes((Axis("a", None), Axis(None, None)), (Axis("b", None), Axis(None, None)), ("here", "there"))
    with pytest.raises(AxesError, match=r"\['a'\] in the left and \['b'\] in the right"):
        align_axes((Axis("a", None),), (Axis("b", None),))
    with pytest.raises(AxesError, match="1 axes and the right has 2"):
        align_axes((Axis("a", None),), (Axis("a", None), Axis("b", None)))


def test_state_is_reordered_like_its_parameter():
    reorder = Reorder((1, 0), (None, (2, 0, 1)))
    value = torch.arange(6.0).reshape(3, 2)
    expected = value.T[:, [2, 0, 1]]
    state = {"step": torch.tensor(4.0), "pair": [value, (value + 1,)], "rows": torch.arange(3.0)[:, None], "other": "x"}
    reordered = reorder_state(state, reorder, (3, 2))
    assert torch.equal(reordered["pair"][0], expected)
    assert torch.equal(reordered["pair"][1][0], expected + 1)
    assert reordered["rows"].tolist() == [[2.0, 0.0, 1.0]]
    assert (reordered["step"], reordered["other"]) == (state["step"], "x")
    assert torch.equal(state["pair"][0], value)


# -- the tensors that a pruned or parametrized tensor is computed from ---------------------------------------------------


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


class Low(nn.Module):
    """A parametrization with a parameter of one value per row."""

    def __init__(self, rows):
        super().__init__()
        self.left = nn.Parameter(torch.ones(rows, 1))

    def forward(self, x):
        return x + self.left


def prune(net):
    l1_unstructured(net, "tensor:w", 2)


def parametrize(net):
    nn.utils.parametrize.register_parametrization(net, "tensor:w", Double())


def weight_norm(net):
    nn.utils.parametrizations.weight_norm(net, "tensor:w")


def old_weight_norm(net):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net, "tensor:w")


WRAPS = {"prune": prune, "parametrize": parametrize, "weight_norm": weight_norm, "old weight_norm": old_weight_norm}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("meet", ["load", "add", "population", "merge"])
def test_the_originals_of_a_computed_tensor_are_combined_by_label(wrap, order, meet):
    if wrap == "old weight_norm" and meet in ("population", "merge"):
        pytest.skip("torch can't copy such a module")
    nets = [particle(), particle(order, seed=1), particle(seed=1)]
    for net in nets:
        if meet in ("population", "merge"):
            net.freeze()  # torch can't copy a module with a computed attribute that has a history
        WRAPS[wrap](net)
    left, right, plain = nets
    if meet == "load":
        left.load_state_dict(right.state_dict())
        result, expected = left, plain
    elif meet == "merge":
        result, expected = merge.linear([left, right]), merge.linear([left, plain])
    elif meet == "population":
        result, expected = ((population_of(left) + population_of(each))[0] for each in (right, plain))
    else:
        result, expected = left + right, left + plain
    torch.testing.assert_close(dict(result.state_dict()), dict(expected.state_dict()))


def test_parameters_of_a_parametrization_are_not_reordered():
    left, right, plain = particle(), particle("reversed", seed=1), particle(seed=1)
    for net in (left, right, plain):
        nn.utils.parametrize.register_parametrization(net, "tensor:w", Low(3))
    assert_same(left + right, left + plain)


def test_tensors_that_cannot_be_reordered_are_refused():
    nets = particle(), particle("reversed")
    for net in nets:
        nn.utils.parametrizations.spectral_norm(net, "tensor:w")
    with pytest.raises(StructureError, match=r"0\._[uv]' of shape .* put the labels in one order"):
        nets[0] + nets[1]


def test_an_attribute_called_labelled_on_another_class_is_ignored():
    net = nn.Linear(2, 1)
    net._labelled = [3]
    assert not layout_of(net).labelled


# -- files -------------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.1),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.1),
}


def step(net, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        weights = mo.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], c=["r", "g", "b"], x=["p", "q"])
        (((net.w - weights) ** 2 * weights).sum().data + net.plain.square().sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_is_loaded_by_label(kind, order, axes, tmp_path):
    if kind == "Adafactor" and axes == "turned axes":
        pytest.skip("Adafactor's row and column averages depend on the order of axes")
    source = Net(ORDERS["same"], "c x", 0)
    optimizer = OPTIMIZERS[kind](source)
    step(source, optimizer, 3)
    mo.save(tmp_path / "a.safetensors", source, optimizer=optimizer)
    target = Net(ORDERS[order], AXES[axes], 5)
    other = OPTIMIZERS[kind](target)
    mo.load(tmp_path / "a.safetensors", target, optimizer=other)
    assert_same(target, source)
    step(source, optimizer, 5)
    step(target, other, 5)
    assert_same(target, source)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("order", ORDERS)
def test_populations_are_loaded_by_label(order, axes, tmp_path):
    source, target = population(seed=1), population(order, axes)
    mo.save(tmp_path / "a.safetensors", population=source)
    mo.load(tmp_path / "a.safetensors", population=target)
    assert_same_members(target, source)


def test_loading_a_population_raises_on_other_labels_and_warns_of_missing_ones():
    source, net = population(seed=1), particle()
    net.w = mo.tensor(torch.ones(3, 2), c=["r", "g", "k"], x=["p", "q"])
    target = population_of(net)
    before = target.matrix.clone()
    with pytest.raises(StructureError, match=r"labels of w: the labels of axis 'c' differ"):
        target.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match="no labels for 'w' and 1 more"):
        population().load_state_dict(dict(source.state_dict()))
    with pytest.raises(RuntimeError, match="no labels for 'w'"):
        target.load_state_dict(dict(source.state_dict()), labels="require")
    assert torch.equal(target.matrix, before)
    target.load_state_dict(dict(source.state_dict()), labels="ignore")
    assert torch.equal(target.matrix, source.matrix)


@pytest.mark.parametrize("name", ["prune", "weight_norm", "spectral_norm"])
def test_a_result_computes_its_own_pruned_and_normed_attributes(name):
    """A computed attribute shared with the operand would keep the operand's values and history until the first call."""
    net = mo.adopt(nn.Linear(3, 2))
    if name == "prune":
        l1_unstructured(net, "weight", 2)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(nn.utils, name)(net)
    twin = 2 * net
    read = twin.weight
    twin.eval()
    twin(torch.ones(1, 3))
    torch.testing.assert_close(read, twin.weight)
    read.sum().backward()
    assert all(param.grad is None for param in net.parameters())


class Gain(mo.Module):
    def __init__(self, values, labels, dtype):
        super().__init__()
        self.w = mo.tensor(torch.tensor(values, dtype=dtype), ch=labels).attach()


KINDS = {
    "add": (lambda a, b: a + b, 11),
    "in place": (lambda a, b: operator.iadd(a, b), 11),
    "axpy_": (lambda a, b: particles.axpy_(a, 2, b), 21),
    "expression": (lambda a, b: a + 0.5 * (b - a), 5.5),
    "where": (lambda a, b: particles.where(False, a, b), 10),
    "map": (lambda a, b: particles.map(torch.add, a, b), 11),
    "clone_from": (lambda a, b: a.clone_from(b), 10),
    "merge": (lambda a, b: merge.linear([a, b]), 5.5),
    "load": (lambda a, b: (a.load_state_dict(b.state_dict()), a)[1], 10),
    "population": (lambda a, b: (population_of(a) + population_of(b))[0], 11),
    "average": (average, 5.5),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("kind", KINDS)
def test_entries_pair_by_label_in_every_dtype(kind, dtype):
    """Half precision and complex numbers take other code paths in kernels and merges."""
    act, expected = KINDS[kind]
    a, b = Gain([1.0, 2.0], ["r", "g"], dtype), Gain([20.0, 10.0], ["g", "r"], dtype)
    assert act(a, b).w.sel(ch="r").item() == expected
    with pytest.raises((ValueError, RuntimeError), match="w.*the labels of axis 'ch' differ"):
        act(a, Gain([1.0, 2.0], ["x", "y"], dtype))
