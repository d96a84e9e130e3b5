"""Members are modules whose parameters are views of the population's storage."""

import copy
import functools
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune

from moduli.particles import StructureError
from moduli.population import Population
from population.helpers import MODELS, Wave, assert_same_members, close, copies, make_modules


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_writes_to_members_and_to_the_matrix_are_shared():
    pop = Population.of(net(), 3)
    member = pop[1]
    assert pop[1] is member
    assert pop[-2] is member
    with torch.no_grad():
        member[0].weight.fill_(2.0)
        pop[0:2][1][2].bias.fill_(5.0)
        dict(pop.named_parameters())["2.weight"][1].fill_(7.0)
    pop.matrix[1, 12:16] = -1.0
    assert (member[0].weight == 2).all()
    assert (member[0].bias == -1).all()
    assert (member[2].bias == 5).all()
    assert (member[2].weight == 7).all()
    member[1].running_mean.fill_(3.0)
    assert (dict(pop.named_buffers())["1.running_mean"][1] == 3).all()
    member(torch.randn(5, 3))
    assert dict(pop.named_buffers())["1.num_batches_tracked"].tolist() == [0, 1, 0]
    optimizer = torch.optim.SGD(member.parameters(), lr=1.0)
    before = pop.matrix.clone()
    member(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    changed = (pop.matrix != before).any(1)
    assert changed.tolist() == [False, True, False]


def test_members_behave_as_modules():
    pop = Population.of(net(), 3, init=0.1)
    member = pop[0]
    assert isinstance(member, nn.Sequential)
    assert list(member.state_dict()) == list(net().state_dict())
    file = io.BytesIO()
    torch.save(member.state_dict(), file)
    assert file.tell() < 8000
    member.load_state_dict(pop[1].state_dict())
    close(pop.matrix[0], pop.matrix[1])
    free = copy.deepcopy(member)
    free[0] = nn.Linear(3, 4)
    loaded = pickle.loads(pickle.dumps(member))
    close(loaded[0].weight, member[0].weight)
    x = torch.randn(5, 3)
    values = {name: p.detach() * 2 for name, p in member.named_parameters()}
    member.eval()
    close(functional_call(member, values, (x,)), functional_call(copy.deepcopy(member), values, (x,)))
    assert isinstance((member + member)[0], nn.Linear)
    # With two graphs at once, an optimizer that changes one member does not invalidate the other.
    one, two = pop[0], pop[1]
    losses = [one(x).sum(), two(x).sum()]
    for each, loss in zip((one, two), losses, strict=True):
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()


def test_edits_of_members_are_refused():
    pop = Population.of(net(), 3)
    member = pop[0]
    with pytest.raises(StructureError, match=r"member 0 cannot be assigned.*copy\.deepcopy"):
        member[0] = nn.Linear(3, 4)
    with pytest.raises(StructureError, match="cannot be assigned"):
        pop[0][0].weight = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(StructureError, match="cannot be assigned"):
        member.extra = nn.Linear(1, 1)
    with pytest.raises(StructureError, match="cannot be assigned"):
        member[0].register_buffer("extra", torch.zeros(1))
    with pytest.raises(StructureError, match="cannot be assigned"):
        member[1].running_mean = torch.zeros(7)
    member[1].running_mean = torch.ones(4)
    assert (dict(pop.named_buffers())["1.running_mean"][0] == 1).all()
    del member[0].bias
    with pytest.raises(StructureError, match=r"member 0 was edited, so it is a model of its own now \(.*'0\.bias'"):
        pop(torch.randn(5, 3))
    assert pop[0] is not member
    pop(torch.randn(5, 3))
    member = pop[0]
    member[0].double()
    with pytest.raises(StructureError, match=r"moved out of its population.*pop\.to"):
        pop + 1
    del member
    gc.collect()
    assert_same_members(pop + 0, copies(pop))


def test_assignments_to_other_modules_do_not_compare_them():
    class Odd(nn.Module):
        __hash__ = None

        def __eq__(self, other):
            raise RuntimeError("never compare modules")

    member = Population.of(nn.Linear(2, 1), 2)[0]
    odd = Odd()
    odd.weight, odd.part = nn.Parameter(torch.zeros(2)), nn.Linear(1, 1)
    odd.register_buffer("seen", torch.zeros(1))
    assert member.weight.shape == (1, 2)


def test_the_population_does_not_keep_members_alive():
    pop = Population.of(net(), 3)
    gc.collect()
    gc.disable()
    try:
        member = pop[0]
        assert len(pop._members) == 1
        del member
        assert not pop._members
    finally:
        gc.enable()


def test_moving_keeps_members_and_leaves():
    pop = Population.of(net(), 3, init=0.1)
    member, leaves, before = pop[1], list(pop.parameters()), pop.matrix.clone()
    assert pop.to(torch.float64) is pop
    assert next(iter(pop.parameters())) is leaves[0]
    assert pop.matrix.dtype is torch.float64
    assert torch.equal(pop.matrix, before.double())
    with torch.no_grad():
        member[0].weight.fill_(2.0)
        leaves[-1].fill_(4.0)
    assert (pop.matrix[1, :12] == 2).all()
    assert (pop.matrix[:, -2:] == 4).all()
    member[1].running_mean.fill_(9)
    assert (dict(pop.named_buffers())["1.running_mean"][1] == 9).all()
    with pytest.raises(StructureError, match="part of another population"):
        pop[1:].to(torch.float32)


def test_indices_slices_and_masks_choose_members():
    pop = Population.of(net(), 5, init=1.0)
    m = pop.matrix
    for index in (slice(1, 4), slice(None, None, 2), torch.tensor([4, 0, 0]), [1, -1], torch.arange(5) > 2):
        assert torch.equal(pop[index].matrix, m[index])
    assert torch.equal(pop[::-1].matrix, m.flip(0))
    part = pop[1:3]
    part += 1
    assert torch.equal(part.matrix, m[1:3])
    chosen = pop[[1, 2]]
    chosen += 1
    assert not torch.equal(chosen.matrix, m[1:3])
    assert len(list(pop)) == 5
    for wrong in (5, -6, [7]):
        with pytest.raises(IndexError, match="of a population of 5"):
            pop[wrong]
    with pytest.raises(IndexError, match="mask of shape"):
        pop[torch.tensor([True])]
    with pytest.raises(TypeError, match="members are chosen by"):
        pop["a"]
    pop[0] = pop[3]
    pop[1:3] = pop[3:]
    assert torch.equal(m[0], m[3])
    assert torch.equal(m[1:3], m[3:])


@pytest.mark.parametrize("name", MODELS)
def test_copies_pickles_and_state_dicts_have_the_members(name):
    nets, x = make_modules(name, 3)
    pop = Population.from_modules(nets)
    for twin in (copy.deepcopy(pop), pickle.loads(pickle.dumps(pop)), pop.clone(), pop[[0, 1, 2]]):
        assert_same_members(twin, nets)
        if name != "buffer":
            close(twin.eval()(x), pop.eval()(x))
        twin += 1
        assert_same_members(pop, nets)
        pop.train()
    other = pop * 0
    other.load_state_dict(pop.state_dict())
    assert_same_members(other, nets)
    assert set(pop.state_dict()) == set(nets[0].state_dict())
    small = pickle.dumps(pop[:1])
    assert len(small) <= len(pickle.dumps(pop))
    before = other.matrices[0].clone()
    with pytest.raises(StructureError, match="missing"):
        other.load_state_dict({})
    with pytest.raises(StructureError, match="members"):
        other.load_state_dict(pop[:2].state_dict())
    assert torch.equal(other.matrices[0], before)


def test_virtual_tensors_of_members_are_never_stale():
    torch.manual_seed(0)
    pop = Population.from_modules([Wave() for _ in range(3)])
    member, x = pop[1], torch.randn(3, dtype=torch.float64)
    for change in (
        lambda: pop.matrix.mul_(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)),
        lambda: pop.__iadd__(1.0),
        lambda: pop.replace([1], Wave()),
        lambda: torch._foreach_add_([p.detach() for p in pop.parameters()], 1.0),
        lambda: torch.optim.SGD(pop.parameters(), lr=1.0).step(
            lambda: pop.losses(lambda f: f(x).sum()).sum().backward()
        ),
    ):
        member(x)
        change()
        close(member(x), copies(pop)[1](x))


def test_members_of_models_whose_buffers_are_not_contiguous():
    """`parametrizations.orthogonal` stores such a buffer."""
    net = nn.Linear(2, 2)
    net.register_buffer("base", torch.arange(6.0).reshape(2, 3).t())
    nets = [copy.deepcopy(net) for _ in range(3)]
    for pop in (Population.of(net, 3), Population.from_modules(nets), 0 * Population.of(net, 3)):
        member = pop[1]
        assert torch.equal(member.base, net.base)
        member.base.fill_(7.0)
        assert [float(each.base.mean()) for each in pop] == [2.5, 7.0, 2.5]


def test_a_wrapper_that_averages_the_gradients_of_one_model_is_refused(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(StructureError, match="give the module inside it"):
            Population.of(nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), 3)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_moves_each_member_by_its_own_gradient():
    torch.manual_seed(0)
    nets, x = make_modules("mlp", 4)
    pop = Population.from_modules(nets)
    joint = torch.optim.Adam(pop.parameters(), lr=0.1)
    single = [torch.optim.Adam(each.parameters(), lr=0.1) for each in nets]
    for _ in range(3):
        joint.zero_grad()
        pop.losses(lambda f: f(x).square().mean()).sum().backward()
        joint.step()
        for each, optimizer in zip(nets, single, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert_same_members(pop, nets)


def test_changes_in_place_are_detected_by_autograd():
    pop = Population.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), 3)
    loss = pop.losses(lambda f: f(torch.ones(2)).square().sum()).sum()
    pop += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_configured_parameters_and_buffer_policies():
    from moduli.particles import adopt, buffer_policy

    base = adopt(net())
    base.set_param_config(operational=False, name="2.weight")
    buffer_policy(base, "operate", "1.running_mean")
    base[1].running_mean.fill_(2.0)
    pop = Population.of(base, 3)
    nets = copies(pop)
    assert_same_members(3 * pop, [3 * each for each in nets])
    assert_same_members(pop + pop, [each + each for each in nets])
    assert_same_members(
        torch.tensor([1.0, 2.0, 3.0]) * (pop - base), [r * (each - base) for r, each in enumerate(nets, 1)]
    )


def test_parameters_of_a_member_are_the_same_while_referenced() -> None:
    pop, x = Population.of(nn.Linear(2, 1), 4), torch.ones(3, 2)
    before = pop.matrix.clone()
    optimizer = torch.optim.SGD(pop[2].parameters(), 0.1)
    pop[2](x).sum().backward()
    optimizer.step()
    moved = (pop.matrix != before).any(dim=1)
    assert moved.tolist() == [False, False, True, False]
    weight = optimizer.param_groups[0]["params"][0]
    pop.to(torch.float64)
    assert weight is pop[2].weight
    assert weight.dtype is torch.float64
    pop *= 2
    assert torch.equal(weight, pop[2].weight)
    version = weight._version
    pop += 1
    assert weight._version > version
    pop.requires_grad_(False)
    assert not weight.requires_grad


def test_a_member_is_not_converted_out_of_its_population() -> None:
    pop = Population.of(nn.Sequential(nn.Linear(2, 1)), 3)
    member = pop[1]
    before = member[0].weight.data_ptr()
    for convert in (member.double, member.half, functools.partial(member.to, "meta")):
        with pytest.raises(StructureError, match=r"member 1 of a population; convert the whole population"):
            convert()
    assert member.float().cpu()[0].weight.data_ptr() == before
    assert copy.deepcopy(member).double()[0].weight.dtype is torch.float64
    assert (2 * member).double()[0].weight.dtype is torch.float64
    assert pop[1] is member
    weight = member[0].weight
    del member
    weight.data = weight.data.clone()
    with pytest.raises(StructureError, match="moved out of its population"):
        _ = pop[1]


def test_a_pruned_model_is_refused_in_a_sentence() -> None:
    pruned = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(pruned[0], "weight", 0.5)
    makers = (
        lambda: Population.of(pruned, 3),
        lambda: Population.from_modules([pruned, pruned]),
        lambda: Population.around(pruned, 4, sigma=0.1),
    )
    for make in makers:
        with pytest.raises(StructureError, match=r"'0\.weight' is computed from other parameters .*prune\.remove"):
            make()
    prune.remove(pruned[0], "weight")
    assert len(Population.of(pruned, 3)) == 3


def test_members_of_a_pruned_model_have_weights_of_their_own() -> None:
    """A pruned model whose weight has no graph is taken; a vectorised call must not stay in what members are made of."""
    torch.manual_seed(0)
    pruned, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    prune.l1_unstructured(pruned[0], "weight", 0.5)
    with torch.no_grad():
        pruned(x)
    pop = Population.of(pruned, 3, init=0.1)
    losses = pop.losses(lambda f: f(x).square().mean())
    for i in range(3):
        member = pop[i]
        assert torch.equal(member[0].weight, member[0].weight_orig * member[0].weight_mask)
        torch.testing.assert_close(member(x).square().mean(), losses[i])
