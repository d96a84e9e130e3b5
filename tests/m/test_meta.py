"""Links that drive other links."""

import copy
import warnings

import pytest
import torch

import moduli as mo
from laws.helpers import is_matrix
from m.first_order import close, run
from moduli import m


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def fit(model, *links, steps=6, **options):
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
    opt = mo.Optimizer(model, *links, **options)
    for _ in range(steps):
        opt.step(mo.closure(lambda: (model(x) - x.sum(1, keepdim=True)).square().mean()))
    return opt


def values(model):
    return [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------------- Split


def test_split_filters_agree():
    """A function, tensors, a module and names select the same parameters."""
    trained = []
    for choose in (
        lambda model: lambda p: p.shape in ((4, 3), (4,)),
        lambda model: list(model[0].parameters()),
        lambda model: model[0],
        lambda model: "0.*",
        lambda model: "0.weight 0.bias",
    ):
        model = net()
        fit(model, m.Split(choose(model), m.Adam(), m.Sign()), m.LR(0.01))
        trained.append(values(model))
    for other in trained[1:]:
        close(other, trained[0], 0)


def test_split_is_two_optimizers():
    model, other = net(), net()
    fit(model, m.Split("*.bias", [m.Adam(), m.LR(0.05)], [m.HeavyBall(0.9), m.LR(0.01)]))
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
    biases = [p for name, p in other.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in other.named_parameters() if not name.endswith("bias")]
    opts = [torch.optim.Adam(biases, 0.05), torch.optim.SGD(rest, 0.01, momentum=0.9)]
    for _ in range(6):
        other.zero_grad()
        (other(x) - x.sum(1, keepdim=True)).square().mean().backward()
        for opt in opts:
            opt.step()
    close(values(model), values(other))


def test_split_with_frozen_parameters():
    model = net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    before = values(model[0])
    fit(model, m.Split("0.*", m.Adam(), m.HeavyBall(0.5)), m.LR(0.05))
    close(values(model[0]), before, 0)


def test_line_search_in_a_part_moves_that_part_and_leaves_the_others_gradient():
    """The evaluations of the search must not accumulate into the gradients that the other part uses."""

    def trial(first):
        model = net()
        opt = fit(model, m.Split("0.*", first, m.LR(0.1)), steps=1)
        return values(model[2]), opt

    searched, opt = trial([m.Identity(), m.StrongWolfe()])
    plain, _ = trial(m.LR(0.0))
    close(searched, plain)
    assert opt.num_evaluations > 1


def test_split_needs_names_for_patterns():
    w = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="give links"):
        m.Split(is_matrix)
    opt = mo.Optimizer([("w", w)], m.Split("w", m.LR(0.5)))
    opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == 0.5


# ---------------------------------------------------------------------- Alternate, Switch


def test_switch_takes_each_chain_for_its_steps():
    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = mo.Optimizer([w], m.Switch(m.Mul(-1.0), m.Mul(-10.0), m.Mul(-100.0), steps=[2, 1]))
    values = []
    for _ in range(5):
        opt.step(mo.closure(lambda: w.sum()))
        values.append(w.item())
    assert values == [1, 2, 12, 112, 212]
    with pytest.raises(ValueError, match="for 2 chains"):
        m.Alternate(m.LR(1.0), m.LR(1.0), steps=[1, 2, 3])
    with pytest.raises(ValueError, match="at least one chain"):
        m.Alternate()


def test_the_turn_of_alternate_is_saved():
    w = torch.nn.Parameter(torch.zeros(1))
    make = lambda: mo.Optimizer([w], m.Alternate(m.Mul(-1.0), m.Mul(-10.0)))  # noqa: E731
    opt = make()
    opt.step(mo.closure(lambda: w.sum()))
    other = make()
    other.load_state_dict(opt.state_dict())
    other.step(mo.closure(lambda: w.sum()))
    assert w.item() == 11.0


# ---------------------------------------------------------------------- several steps


def test_multistep_counts_every_evaluation():
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    count = [0]

    def loss():
        count[0] += 1
        return (w**2).sum()

    opt = mo.Optimizer([w], m.Multistep([m.Adam(), m.LR(0.1)], steps=3))
    for _ in range(2):
        opt.step(mo.closure(loss))
    assert opt.num_evaluations == count[0] == 6
    plain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    adam = torch.optim.Adam([plain], 0.1)
    for _ in range(6):
        adam.zero_grad()
        (plain**2).sum().backward()
        adam.step()
    close([w], [plain])


def test_sequential_takes_turns_within_a_step():
    w = torch.nn.Parameter(torch.zeros(1))
    opt = mo.Optimizer([w], m.Sequential([m.Mul(-1.0), m.Mul(-10.0)], steps=2), m.Mul(0.5))
    opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == 11.0


def test_multistep_of_a_line_search_is_its_steps():
    scale = torch.tensor([1.0, 10.0], dtype=torch.float64)

    def trial(links, steps):
        w = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
        opt = mo.Optimizer([w], *links)
        for _ in range(steps):
            opt.step(mo.closure(lambda: (scale * w**2).sum()))
        return [w.detach()], opt.num_evaluations

    params, count = trial([m.Multistep([m.LBFGS(), m.StrongWolfe()], steps=4)], 1)
    expected, wanted = trial([m.LBFGS(), m.StrongWolfe()], 4)
    close(params, expected)
    assert count == wanted


def test_a_step_that_increased_the_loss_is_negated():
    for backtrack, end in ((False, 1.0), (True, 11.0)):
        w = torch.nn.Parameter(torch.ones(1))
        opt = mo.Optimizer([w], m.LR(5.0), m.NegateOnLossIncrease(backtrack=backtrack))
        opt.step(mo.closure(lambda: (w**2).sum()))
        assert w.item() == end


# ---------------------------------------------------------------------- batches


def test_accumulated_batches_are_one_big_batch():
    x = torch.randn(8, 3, dtype=torch.float64)
    y = x.sum(1, keepdim=True)

    def train(batches, *links, steps):
        model = net()
        opt = mo.Optimizer(model, *links)
        for i in range(steps):
            part = slice((i % batches) * 8 // batches, (i % batches + 1) * 8 // batches)
            opt.step(mo.closure(lambda part=part: (model(x[part]) - y[part]).square().mean()))
        return values(model)

    big = train(1, m.Adam(), m.LR(0.05), steps=3)
    close(train(4, m.GradientAccumulation(4), m.Adam(), m.LR(0.05), steps=12), big)
    total = train(1, m.Mul(4.0), m.HeavyBall(0.5), m.LR(0.01), steps=3)
    close(train(4, m.GradientAccumulation(4, mean=False), m.HeavyBall(0.5), m.LR(0.01), steps=12), total)


def test_accumulation_that_does_not_stop_passes_the_running_mean():
    w = torch.nn.Parameter(torch.zeros(1))
    opt = mo.Optimizer([w], m.GradientAccumulation(2, stop=False))
    moves = []
    for k in (1.0, 3.0, 5.0):
        before = w.item()
        opt.step(mo.closure(lambda k=k: (k * w).sum()))
        moves.append(before - w.item())
    assert moves == [1.0, 2.0, 5.0]


@pytest.mark.parametrize("make", [m.LBFGS, m.BFGS], ids=["LBFGS", "BFGS"])
def test_online_compares_gradients_of_one_batch(make):
    """The minimum of a quadratic moves with the batch; differences of gradients on one batch give its exact curvature."""
    scale = torch.tensor([1.0, 8.0, 30.0], dtype=torch.float64)

    def trial(links, steps=25):
        generator = torch.Generator().manual_seed(0)
        w = torch.nn.Parameter(torch.tensor([2.0, -1.0, 1.0], dtype=torch.float64))
        opt = mo.Optimizer([w], *links)
        for _ in range(steps):
            noise = 0.5 * torch.randn(3, generator=generator, dtype=torch.float64)
            opt.step(mo.closure(lambda noise=noise: (0.5 * scale * w**2 + noise * w).sum()))
        return float((0.5 * scale * w.detach() ** 2).sum()), opt

    online, opt = trial([m.Online(make()), m.LR(0.3)])
    assert opt.num_evaluations == 49
    assert online < 0.5


def test_online_does_not_move_the_parameters():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = mo.Optimizer([w], m.Online(m.EMA(0.5)), m.LR(0.0))
    for _ in range(3):
        opt.step(mo.closure(lambda: (w**2).sum()))
    assert w.tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------- the best point


def test_the_best_loss_is_that_of_the_best_point():
    w = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    opt = mo.Optimizer([w], m.LR(0.9), m.SaveBest())
    for _ in range(4):
        opt.step(mo.closure(lambda: (w - 1).abs().sum() + 0.1))
    opt.attrs["load_best_params"]()
    assert float((w.detach() - 1).abs().sum() + 0.1) == float(opt.attrs["best_loss"])
    twin = copy.deepcopy(opt)
    assert float(twin.attrs["best_loss"]) == float(opt.attrs["best_loss"])


# ---------------------------------------------------------------------- Wrap


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adam, {"lr": 0.05}),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.Rprop, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ],
)
def test_wrapped_is_the_optimizer_itself(cls, options):
    close(run(lambda p: [m.Wrap(cls, **options)]), run(lambda p: cls(p, **options)))


def test_schedulers_and_groups_reach_the_wrapped_optimizer():
    def train(make):
        model = net()
        opt = make(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for _ in range(4):
            opt.zero_grad()
            model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
            opt.step()
            scheduler.step()
        return values(model)

    def groups(model):
        return [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters())}]

    ours = train(lambda model: mo.Optimizer(groups(model), m.Wrap(torch.optim.Adam, lr=0.05)))
    close(ours, train(lambda model: torch.optim.Adam(groups(model), lr=0.05)))


def test_wrap_has_groups_of_its_own_and_resets_before_its_first_step():
    w = torch.nn.Parameter(torch.ones(1))
    link = m.Wrap(torch.optim.SGD, lr=0.25)
    link.reset()
    opt = mo.Optimizer([w], link)
    link.set_param_groups([{"params": [w], "lr": 0.5}])
    opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == 0.5
    with pytest.raises(TypeError, match="takes the class"):
        m.Wrap(torch.optim.SGD([w], 0.1))


def test_added_parameters_keep_the_state_of_the_others():
    a, b = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    opt = mo.Optimizer([("a", a)], m.Wrap(torch.optim.Adam, lr=0.1))
    plain = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    adam = torch.optim.Adam([plain], lr=0.1)
    for i in range(5):
        if i == 2:
            opt.add_param_group({"params": [("b", b)]})
        opt.step(mo.closure(lambda: (a**4).sum() + (b**2).sum()))
        adam.zero_grad()
        (plain**4).sum().backward()
        adam.step()
    close([a], [plain])
    assert not torch.equal(b, torch.ones_like(b))


def test_links_may_follow_a_wrapped_optimizer():
    ours = run(lambda p: [m.Wrap(torch.optim.Adam, lr=1.0), m.ClipValue(0.5), m.LR(0.05)])
    close(ours, run(lambda p: [m.Adam(), m.ClipValue(0.5), m.LR(0.05)]))


def test_wrapped_lbfgs_evaluates_through_the_chain():
    x = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
    opt = mo.Optimizer([x], m.Wrap(torch.optim.LBFGS, line_search_fn="strong_wolfe"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            opt.step(mo.closure(lambda: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2))
    close([x], [torch.ones(2, dtype=torch.float64)], 1e-4)
    with pytest.raises(mo.optim.ClosureError):
        opt.step()


@pytest.mark.parametrize("fuse", ["auto", False])
def test_schedules_behind_accumulation_count_updates(fuse):
    """Schedules count updates, not batches, also after a resume and in unfused links."""
    w = torch.nn.Parameter(torch.zeros(1))

    def make():
        links = [m.GradientAccumulation(2), m.Adam(), m.WeightDecay(lambda step: 0.0), m.LR(lambda step: 10.0**-step)]
        return mo.Optimizer([w], *links, fuse=fuse)

    opt, places = make(), []
    for k in range(8):
        if k == 3:
            saved = opt.state_dict()
            opt = make()
            opt.load_state_dict(saved)
        w.grad = torch.ones(1)
        opt.step()
        places.append(w.item())
    moved = torch.tensor(places).diff(prepend=torch.zeros(1))
    torch.testing.assert_close(moved, -torch.tensor([0, 1.0, 0, 0.1, 0, 0.01, 0, 0.001]), rtol=1e-3, atol=1e-7)
