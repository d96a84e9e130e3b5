"""Optimizers of models that grow and shrink: the state of every remaining entry stays with it."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.particles import GrowthError, grow, shrink
from moduli.population import Population

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(1, -1, 16).reshape(8, 2)


def make_net(kind=nn.Sequential):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return mo.adopt(net) if kind is mo.Module else net


def loss_of(net):
    return mo.closure(lambda: ((net(X) - Y) ** 2).mean())


def train(net, opt, steps=3):
    return [float(opt.step(loss_of(net))) for _ in range(steps)]


@pytest.mark.parametrize("kind", [nn.Sequential, mo.Module])
def test_moments_of_old_entries_stay_in_place(kind):
    net = make_net(kind)
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.01))
    losses = train(net, opt)
    before = {name: copy.deepcopy(dict(opt.link("Adam").state[name])) for name, _ in net.named_parameters()}
    grow(net, {"0.out": 7}, example=X)
    grow(net, {"0.out": 10}, example=X)  # two edits without a step in between
    opt.zero_grad()
    assert opt.param_groups[0]["params"] == list(net.parameters())
    after = {name: opt.link("Adam").state[name] for name in before}
    for name, (rows, columns) in {"0.weight": (4, 3), "2.weight": (2, 4)}.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after[name][key][:rows, :columns], before[name][key])
            assert not after[name][key][rows:].any()
            assert not after[name][key][:, columns:].any()
        assert after[name]["step"] == before[name]["step"]
    assert "3 parameters resized, with the state of units that stay (0.weight, 0.bias, 2.weight)" in opt.explain()
    later = train(net, opt)
    assert later[0] < losses[-1] + 1e-5  # the loss does not jump
    assert later[-1] < later[0]
    shrink(net, {"0.out": [0, 9, 2]}, example=X)
    kept_rows = opt.link("Adam").state["0.weight"]["exp_avg"][[0, 9, 2]].clone()
    opt.zero_grad()
    _ = opt.param_groups
    assert torch.equal(opt.link("Adam").state["0.weight"]["exp_avg"], kept_rows)
    train(net, opt)


def test_relatives_and_their_optimizers_follow():
    net = make_net(mo.Module)
    student = net.clone()
    opt = mo.Optimizer(student, m.Adam(), m.LR(0.01))
    train(student, opt)
    moment = opt.link("Adam").state["0.weight"]["exp_avg"].clone()
    grow(net, {"0.out": 8}, example=X)
    student.touch()
    losses = train(student, opt, 1)
    assert opt.link("Adam").state["0.weight"]["exp_avg"].shape == (8, 3)
    assert opt.link("Adam").state["0.weight"]["step"] == 4
    assert moment.shape == (4, 3)
    assert losses[0] < 2


@pytest.mark.parametrize("kind", [nn.Sequential, mo.Module])
def test_bare_parameters_that_were_resized_are_refused(kind):
    net = make_net(kind)
    twin = net.clone() if kind is mo.Module else None
    opt = mo.Optimizer(list(net.parameters()), m.LR(0.1))
    grow(net, {"0.out": 8}, example=X)
    with pytest.raises(mo.optim.ChainError, match="removed parameters"):
        opt.step(loss_of(net))
    del twin


@pytest.mark.parametrize(
    ("name", "links"),
    {
        "rows and columns": lambda: [m.Adafactor(), m.LR(0.01)],
        "kronecker": lambda: [m.Shampoo(), m.LR(0.01)],
        "rotated": lambda: [m.SOAP(), m.LR(0.01)],
        "factors": lambda: [m.PSGDKronWhiten(), m.LR(0.01)],
        "points": lambda: [m.LR(0.1), m.Lookahead(k=2)],
        "schedule free": lambda: [m.LR(0.1), m.ScheduleFree()],
        "unfused": lambda: [m.ClipNorm(1.0), m.HeavyBall(0.9), m.LR(0.01)],
        "orthogonal": lambda: [m.HeavyBall(0.9), m.Orthogonalize(), m.LR(0.01)],
        "average": lambda: [m.Adam(), m.LR(0.01), m.EMA(0.9)],
        "signs": lambda: [m.Rprop()],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("shrunk", [False, True])
def test_training_continues_without_a_jump(name, links, shrunk):
    net = make_net()
    opt = mo.Optimizer(net, *links())
    losses = train(net, opt, 4)
    grow(net, {"0.out": 8}, example=X)
    train(net, opt, 1)
    if shrunk:
        shrink(net, {"0.out": 6}, example=X)
    after = train(net, opt, 6)
    limit = 1.5 * max(losses[0], after[0])
    assert all(loss < limit for loss in after), (losses, after)
    if not (shrunk and name == "rotated"):
        assert "restarted" not in opt.explain()
    else:
        assert "the state of SOAP restarted for 0.weight" in opt.explain()


def test_points_are_resized_like_the_parameters():
    net = make_net()
    opt = mo.Optimizer(net, m.LR(0.0), m.Lookahead(k=5))
    train(net, opt, 1)
    grow(net, {"0.out": 8}, example=X)
    _ = opt.param_groups
    for name, param in net.named_parameters():
        torch.testing.assert_close(opt.link("Lookahead").state[name]["slow"], param.detach())


def test_axes_of_an_optimizer_grow_with_it():
    net = make_net()
    ax = mo.axes.trace(net, X)
    opt = mo.Optimizer(net, m.Adam(), m.MuP(axes=ax, base=4), m.LR(0.01))
    train(net, opt)
    grow(net, {"0.out": 8}, ax, X)
    train(net, opt)
    assert opt.binding.axes["0.out"].size == 8
    assert opt.binding.axes == mo.axes.trace(net, X)


def test_schedulers_scalers_and_groups_continue_after_growth():
    net = make_net()
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1), groups={"2.*": {"lr": 0.2}})
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        if step == 1:
            grow(net, {"0.out": 8}, example=X)
        opt.zero_grad()
        scaler.scale(((net(X) - Y) ** 2).mean()).backward()
        scaler.step(opt)
        scaler.update()
        scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [0.0125, 0.025]
    assert [group["param_names"] for group in opt.param_groups] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert opt.link("Adam").state["2.weight"]["step"] == 3


# ---------------------------------------------------------------------- populations


@pytest.mark.parametrize("kind", [nn.Sequential, mo.Module])
def test_all_members_of_a_population_grow(kind):
    pop = Population.of(make_net(kind), 5, init=0.3, generator=torch.Generator().manual_seed(0))
    before = pop(X)
    other = 2 * pop
    assert grow(pop, {"0.out": 7}, example=X) is pop
    torch.testing.assert_close(pop(X), before, rtol=1e-5, atol=1e-5)
    assert pop.matrix.shape == (5, 7 * 4 + 2 * 8)
    assert pop[3][0].out_features == 7
    assert other[0][0].out_features == 4  # another population
    shrink(pop, {"0.out": 3}, example=X)
    assert pop(X).shape == before.shape
    normed = Population.of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), 3, init=0.3)
    normed.losses(lambda net: net(X).sum())
    normed.eval()
    before = normed(X)
    grow(normed, {"0.out": 6}, example=X)
    assert dict(normed.named_buffers())["1.running_mean"].shape == (3, 6)
    torch.testing.assert_close(normed(X), before, rtol=1e-5, atol=1e-5)


def test_the_optimizer_of_a_population_follows():
    def losses(pop):
        return mo.closure(lambda: pop.losses(lambda net: ((net(X) - Y) ** 2).mean()))

    pop = Population.of(make_net(), 4, init=0.3, generator=torch.Generator().manual_seed(0))
    alone = [copy.deepcopy(pop[i]) for i in range(4)]
    for links in (lambda: [m.Adam(), m.LR(0.01)], lambda: [m.HeavyBall(0.9), m.Shampoo(), m.LR(0.01)]):
        nets, many = [copy.deepcopy(net) for net in alone], Population.from_modules(alone)
        opt, opts = mo.Optimizer(many, *links()), [mo.Optimizer(net, *links()) for net in nets]
        for step in range(6):
            if step == 3:
                grow(many, {"0.out": 7}, example=X, seed=5)
                for net in nets:
                    grow(net, {"0.out": 7}, example=X, seed=5)
            opt.step(losses(many))
            for net, own in zip(nets, opts, strict=True):
                own.step(loss_of(net))
        for name, leaf in many.named_parameters():
            own = torch.stack([dict(net.named_parameters())[name].detach() for net in nets])
            torch.testing.assert_close(leaf.detach(), own, rtol=1e-4, atol=1e-5)
        assert "3 parameters resized" in opt.explain()
        assert "restarted" not in opt.explain()
        shrink(many, {"0.out": 3}, example=X)
        opt.step(losses(many))


def test_bare_parameters_of_a_population_that_grew_are_refused():
    pop = Population.of(make_net(), 3)
    opt = mo.Optimizer(list(pop.parameters()), m.LR(0.1))
    grow(pop, {"0.out": 8}, example=X)
    with pytest.raises(mo.optim.ChainError, match="removed parameters"):
        opt.step(mo.closure(lambda: pop.losses(lambda net: net(X).square().mean()).sum()))


def test_populations_that_cannot_grow_say_why():
    pop = Population.of(make_net(), 4)
    member = pop[1]
    with pytest.raises(mo.particles.StructureError, match="the program holds member 1"):
        grow(pop, {"0.out": 8}, example=X)
    del member
    with pytest.raises(mo.particles.StructureError, match="a part of another population"):
        grow(pop[1:3], {"0.out": 8}, example=X)
    normed = Population.of(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), 3)
    before = normed.matrix.clone()
    with pytest.raises(GrowthError, match="takes statistics"):
        grow(normed, {"0.out": 6}, example=X)
    assert torch.equal(normed.matrix, before)


@pytest.mark.parametrize("link", ["Adam", "Adafactor", "Shampoo", "LBFGS"])
def test_state_follows_units_that_only_change_their_order(link):
    """Reorder units as an alignment does: `particles.shrink(net, merge.match_units(net, to, ax), axes=ax)`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    other = copy.deepcopy(net)
    x, y = torch.randn(16, 4).double(), torch.randn(16, 3).double()
    order = torch.randperm(8)

    def step(model, opt):
        def closure(backward=True):
            loss = (model(x) - y).square().mean()
            if backward:
                opt.zero_grad()
                loss.backward()
            return loss

        opt.step(closure)

    models = [(each, mo.Optimizer(each, getattr(m, link)(), m.LR(1e-2))) for each in (net, other)]
    for model, opt in models * 3:
        step(model, opt)
    before = net(x)
    shrink(net, {"0.out": order.tolist()}, axes=mo.axes.trace(net, x), example=x)
    torch.testing.assert_close(net(x), before)
    for model, opt in models * 2:
        step(model, opt)
    restarts = link == "LBFGS"  # its pairs are vectors over all parameters
    assert ("restart" in str(models[0][1].explain())) == restarts
    if restarts:
        return
    torch.testing.assert_close(net[0].weight, other[0].weight[order], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(net[2].weight, other[2].weight[:, order], rtol=1e-7, atol=1e-9)
