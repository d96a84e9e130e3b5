"""Settings per group: groups by name, norms per group, and the rates that schedulers change."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m

D = torch.float64


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_of(net):
    x = torch.linspace(-1, 1, 15, dtype=D).reshape(5, 3)
    return net(x).square().mean()


PATTERNS = {"*.bias": {"weight_decay": 0.0}, "2.*": {"lr": 1e-3}}


def test_groups_by_name_are_groups_by_hand():
    net, other = make(), make()
    opt = mo.Optimizer(net, m.Adam(), m.WeightDecay(0.1), m.LR(1e-2), groups=PATTERNS)
    by_hand = mo.Optimizer(
        [
            {"params": [other[0].weight]},
            {"params": [other[0].bias], "weight_decay": 0.0},
            {"params": [other[2].bias], "weight_decay": 0.0, "lr": 1e-3},
            {"params": [other[2].weight], "lr": 1e-3},
        ],
        m.Adam(),
        m.WeightDecay(0.1),
        m.LR(1e-2),
    )
    for _ in range(3):
        opt.step(mo.closure(lambda: loss_of(net)))
        by_hand.step(mo.closure(lambda: loss_of(other)))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [group.get("name") for group in opt.param_groups] == [None, "*.bias", "*.bias & 2.*", "2.*"]


def test_later_patterns_win_and_named_parameters_serve():
    net = make()
    opt = mo.Optimizer(net.named_parameters(), m.LR(1e-2), groups={"*": {"lr": 1.0}, "0.bias": {"lr": 2.0}})
    lr = opt.link("LR")
    assert [lr.settings[p]["lr"] for p in net.parameters()] == [1.0, 2.0, 1.0, 1.0]
    assert len(opt.param_groups) == 2


def test_groups_of_a_population():
    torch.manual_seed(0)
    pop = mo.Population.of(make, 3)
    opt = mo.Optimizer(pop, m.LR(1e-2), groups={"*.bias": {"lr": 0.0}})
    before = {name: p.detach().clone() for name, p in pop.named_parameters()}
    opt.step(mo.closure(loss_of))
    moved = {name: not torch.equal(before[name], p) for name, p in pop.named_parameters()}
    assert moved == {name: not name.endswith("bias") for name in moved}


def test_patterns_that_mean_nothing_are_refused():
    net = make()
    with pytest.raises(ValueError, match=r"no parameter is called '0\.weigth'; did you mean '0\.weight'\?"):
        mo.Optimizer(net, m.LR(1e-2), groups={"0.weigth": {"lr": 1.0}})
    with pytest.raises(ValueError, match="which no link of the chain has; did you mean 'lr'"):
        mo.Optimizer(net, m.LR(1e-2), groups={"*": {"lrr": 1.0}})
    with pytest.raises(ValueError, match="give a dictionary of settings"):
        mo.Optimizer(net, m.LR(1e-2), groups={"*": 0.1})
    with pytest.raises(ValueError, match="give a dictionary of settings"):
        mo.Optimizer(net, m.LR(1e-2), groups={"*": {"params": []}})
    with pytest.raises(ValueError, match="goes by the names of parameters"):
        mo.Optimizer(net.parameters(), m.LR(1e-2), groups={"*": {"lr": 1.0}})


def test_parameters_are_added_by_name():
    net = make()
    opt = mo.Optimizer(net, m.Adam(), m.LR(1e-2))
    net.append(nn.Linear(2, 2).double())
    opt.add_param_group({"params": "3.*", "lr": 1e-4})
    assert [p.shape for p in opt.param_groups[1]["params"]] == [(2, 2), (2,)]
    assert opt.link("LR").settings[net[3].bias]["lr"] == 1e-4
    with pytest.raises(ValueError, match="in a group already"):
        opt.add_param_group({"params": "3.*"})
    with pytest.raises(ValueError, match="given the module"):
        mo.Optimizer(net.parameters(), m.LR(1e-2)).add_param_group({"params": "3.*"})


@pytest.mark.parametrize("fuse", ["auto", False])
def test_a_bound_set_per_group_bounds_the_norm_of_the_group(fuse):
    a, b, c = (nn.Parameter(torch.zeros(2, dtype=D)) for _ in range(3))
    opt = mo.Optimizer([{"params": [a], "max_norm": 1.0}, {"params": [b, c]}], m.ClipNorm(2.0), m.LR(1.0), fuse=fuse)
    for p in (a, b, c):
        p.grad = torch.tensor([3.0, 4.0], dtype=D)
    opt.step()
    assert a.norm().item() == pytest.approx(1.0, rel=1e-6)
    assert torch.cat([b.detach(), c.detach()]).norm().item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("fuse", ["auto", False])
def test_other_settings_per_group_leave_one_norm_over_all(fuse):
    a, b = (nn.Parameter(torch.zeros(2, dtype=D)) for _ in range(2))
    opt = mo.Optimizer([{"params": [a], "lr": 0.5}, {"params": [b]}], m.ClipNorm(1.0), m.LR(1.0), fuse=fuse)
    for p in (a, b):
        p.grad = torch.tensor([3.0, 4.0], dtype=D)
    opt.step()
    expected = 2**-0.5
    assert b.norm().item() == pytest.approx(expected, rel=1e-6)
    assert a.norm().item() == pytest.approx(expected / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("links", "words"),
    [
        (lambda: [m.Adam()], "no link of Adam has a learning rate 'lr' for a scheduler to change; add one: m.LR"),
        (lambda: [m.LR(0.1), m.LR(0.5)], "LR and LR have different learning rates"),
        (lambda: [m.Adam(), m.LR(lambda t: 0.1)], "lr of LR is a function of the step already"),
    ],
    ids=["none", "two", "function"],
)
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=5, cycle_momentum=False),
        lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt),
    ],
    ids=["exponential", "cosine", "one cycle", "plateau"],
)
def test_schedulers_without_a_rate_to_change_say_why(links, words, scheduler):
    opt = mo.Optimizer(make(), *links())
    with pytest.raises(KeyError) as caught:
        scheduler(opt).step(1.0)
    assert words in str(caught.value)


def test_a_scheduler_scales_the_rates_of_all_members():
    torch.manual_seed(0)
    pop = mo.Population.of(make, 3)
    opt = mo.Optimizer(pop, m.LR(torch.tensor([0.1, 0.2, 0.4])))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)
    factors = []
    for _ in range(3):
        before = pop.matrix.clone()
        opt.step(mo.closure(lambda: sum(leaf.flatten(1).sum(1) for leaf in pop.parameters())))
        scheduler.step()
        factors.append((before - pop.matrix)[:, 0])
    shares = torch.tensor([1.0, (1 + 0.5**0.5) / 2, 0.5], dtype=torch.float64)
    torch.testing.assert_close(
        torch.stack(factors), shares[:, None] * torch.tensor([0.1, 0.2, 0.4]), rtol=1e-4, atol=1e-6
    )


def test_wrapped_modules_have_the_names_of_what_they_wrap():
    net = make()
    opt = mo.Optimizer(torch.nn.DataParallel(net), m.LR(1e-2), groups={"0.*": {"lr": 1.0}})
    assert opt.link("LR").settings[net[0].weight]["lr"] == 1.0
    compiled = torch.compile(net)
    opt = mo.Optimizer(compiled, m.LR(1e-2), groups={"0.*": {"lr": 1.0}})
    assert opt.link("LR").settings[net[0].weight]["lr"] == 1.0


def test_parameters_without_memory_are_refused():
    with torch.device("meta"):
        net = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"to_empty\(device='cpu'\)"):
        mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt = mo.Optimizer(net.to_empty(device="cpu"), m.Adam(), m.LR(0.1))
    with pytest.raises(ValueError, match="meta device"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.empty(2, device="meta"))]})
    assert len(opt.param_groups) == 1


def test_parameters_that_join_a_module_have_its_names():
    net = nn.Sequential(nn.Linear(2, 2))
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    net.append(nn.Linear(2, 1))
    opt.add_param_group({"params": net[1].parameters(), "lr": 0.5})
    assert opt.param_groups[1]["param_names"] == ["1.weight", "1.bias"]
    opt.step(mo.closure(lambda: net(torch.ones(1, 2)).sum()))
    fresh = mo.Optimizer(net, m.Adam(), m.LR(0.1), groups={"1.*": {"lr": 0.5}})
    fresh.load_state_dict(opt.state_dict())
    mine, theirs = (each.link("Adam").state[net[1].bias] for each in (fresh, opt))
    assert mine.keys() == theirs.keys() != set()
    assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


@pytest.mark.parametrize(
    ("make_params", "words"),
    [
        (lambda w: [w], r"parameter 0 of the group \(shape \(2,\)\) has no name.*pairs.*assign it to the module"),
        (lambda w: w, "parameter 0 of the group .* has no name"),
        (lambda w: [("a", nn.Parameter(torch.ones(1))), w], "parameter 1 of the group .* has no name"),
        (lambda w: [2.0], "parameters are tensors, .* got a float"),
    ],
)
def test_parameters_without_a_name_beside_named_ones_are_refused(make_params, words):
    opt = mo.Optimizer(nn.Linear(2, 2), m.LR(0.1))
    with pytest.raises((TypeError, ValueError), match=words):
        opt.add_param_group({"params": make_params(nn.Parameter(torch.ones(2)))})
    assert len(opt.param_groups) == 1
    plain = mo.Optimizer([nn.Parameter(torch.ones(2))], m.LR(0.1))
    with pytest.raises(ValueError, match="parameters of the optimizer have no names, and those of the new group have"):
        plain.add_param_group({"params": [("a", nn.Parameter(torch.ones(2)))]})
    assert len(plain.param_groups) == 1
    with pytest.raises(ValueError, match="has no name, and the others have"):
        mo.Optimizer([nn.Parameter(torch.ones(2)), ("a", nn.Parameter(torch.ones(2)))], m.LR(0.1))
