"""An optimizer steps a population as one matrix; state is still addressed by parameter."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

import moduli as mo
from m.stacked import Stacked
from moduli import m, presets

DOUBLE = torch.float64


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def swarm(count=5, seed=0):
    torch.manual_seed(seed)
    return mo.Population.from_modules([net() for _ in range(count)])


def data():
    return torch.linspace(-1, 1, 18, dtype=DOUBLE).reshape(6, 3), torch.ones(6, 2, dtype=DOUBLE)


def closure(pop, loss=None):
    x, y = data()
    return mo.closure(lambda: pop.losses(loss or (lambda f: (f(x) - y).square().mean())))


def loop(make, steps, edit=None, loss=None, count=5):
    """Return the parameters of all members after steps of separate optimizers.

    Args:
        make: A function that returns links.
        steps: The number of steps.
        edit: A function of the member and the step, called before each step.
        loss: The loss of a member.
        count: The number of members.
    """
    x, y = data()
    rows = []
    for i in range(count):
        net = copy.deepcopy(swarm(count)[i])
        opt = mo.Optimizer(net, *make())
        for k in range(steps):
            if edit is not None:
                edit(net, k)
            opt.step(mo.closure(lambda net=net: (loss or (lambda f: (f(x) - y).square().mean()))(net)))
        rows.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return torch.stack(rows)


def list_operations(step):
    """Return the names of the torch operations that a step dispatches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    return [event.name for event in seen.events() if event.name.startswith("aten::")]


def test_links_are_called_with_one_matrix():
    seen = []

    class Look(mo.optim.TensorTransform):
        elementwise = True

        def multi_tensor_apply(self, tensors, params, grads, loss, states, settings):
            seen.append([(tuple(t.shape), p.data_ptr()) for t, p in zip(tensors, params, strict=True)])
            return tensors

    pop = swarm()
    mo.Optimizer(pop, Look(), m.LR(0.1)).step(closure(pop))
    assert seen == [[((5, 26), pop.matrix.data_ptr())]]


def test_state_is_addressed_by_parameter_and_by_name():
    pop = swarm()
    opt = mo.Optimizer(pop, m.Adam(), m.LR(0.1))
    for _ in range(2):
        opt.step(closure(pop))
    adam, weight = opt.link("Adam"), dict(pop.named_parameters())["2.weight"]
    assert adam.state["2.weight"]["exp_avg"].shape == weight.shape
    assert torch.equal(adam.state[weight]["exp_avg"], adam.state["2.weight"]["exp_avg"])
    assert adam.state[weight]["step"] == 2
    adam.state["2.weight"]["exp_avg"].zero_()  # writes go to the matrix
    (block,) = opt.rows.blocks
    assert adam.state[block.tensor]["exp_avg"][:, 16:24].abs().sum() == 0
    assert adam.state[block.tensor]["exp_avg"][:, :16].abs().sum() > 0
    with pytest.raises(TypeError, match="does not support item assignment"):
        adam.state["2.weight"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(KeyError):
        adam.state["no such parameter"]


def test_a_step_sets_the_gradients_of_the_leaves():
    pop, plain = swarm(), swarm()
    mo.Optimizer(pop, m.LR(0.1)).step(closure(pop))
    x, y = data()
    plain.losses(lambda f: (f(x) - y).square().mean()).sum().backward()
    for leaf, other in zip(pop.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-14)


def adam():
    return [m.ClipNorm(0.5), m.Adam(), m.WeightDecay(0.1), m.LR(0.05)]


def test_gradients_without_a_closure():
    pop, x, y = swarm(), *data()
    opt = mo.Optimizer(pop, *adam())
    for _ in range(3):
        opt.zero_grad()
        pop.losses(lambda f: (f(x) - y).square().mean()).sum().backward()
        opt.step()
    torch.testing.assert_close(pop.matrix, loop(adam, 3), rtol=1e-10, atol=1e-10)


def test_a_closure_that_calls_backward_is_differentiated_once():
    """The closure keeps the graph, so a second backward would not fail but double the gradients."""
    pop, x, y = swarm(), *data()
    opt = mo.Optimizer(pop, *adam())

    def evaluate():
        opt.zero_grad()
        losses = pop.losses(lambda f: (f(x) - y).square().mean())
        losses.sum().backward(retain_graph=True)
        return losses

    for _ in range(3):
        opt.step(evaluate)
    torch.testing.assert_close(pop.matrix, loop(adam, 3), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("calls_backward", [False, True])
def test_members_ascend_by_their_own_gradients(calls_backward):
    x, y = data()
    pops = {sign: swarm() for sign in (1, -1)}
    for sign, pop in pops.items():
        opt = mo.Optimizer(pop, *adam(), maximize=sign < 0)

        def evaluate(pop=pop, opt=opt, sign=sign):
            opt.zero_grad()
            losses = pop.losses(lambda f: sign * (f(x) - y).square().mean())
            losses.sum().backward()
            return losses

        for _ in range(3):
            closed = mo.closure(lambda pop=pop, sign=sign: pop.losses(lambda f: sign * (f(x) - y).square().mean()))
            opt.step(evaluate if calls_backward else closed)
    torch.testing.assert_close(pops[-1].matrix, pops[1].matrix, rtol=1e-12, atol=1e-12)
    for down, up in zip(pops[1].parameters(), pops[-1].parameters(), strict=True):
        torch.testing.assert_close(
            up.grad, -down.grad, rtol=1e-12, atol=1e-14
        )  # `.grad` has the gradients of the user's loss


def test_gradients_of_leaves_and_of_calls_add_up():
    pop, x = swarm(), data()[0]
    leaf = dict(pop.named_parameters())["0.bias"]
    mo.Optimizer(pop, m.LR(0.1)).step(
        mo.closure(lambda: pop.losses(lambda f: f(x).square().mean()) + leaf.square().sum(1))
    )
    expected = loop(
        lambda: [m.LR(0.1)],
        1,
        loss=lambda f: f(x).square().mean() + next(f[0].parameters()).sum() * 0 + f[0].bias.square().sum(),
    )
    torch.testing.assert_close(pop.matrix, expected, rtol=1e-10, atol=1e-10)


def test_frozen_and_thawed_parameters_have_separate_step_counts():
    def edit_population(k):
        pop.requires_grad_(k not in (1, 2), "2.*")

    def edit(net, k):
        net[2].requires_grad_(k not in (1, 2))

    pop = swarm()
    opt = mo.Optimizer(pop, *adam())
    for k in range(6):
        edit_population(k)
        opt.step(closure(pop))
    torch.testing.assert_close(pop.matrix, loop(adam, 6, edit), rtol=1e-10, atol=1e-10)
    assert opt.link("Adam").state["0.weight"]["step"] == 6
    assert opt.link("Adam").state["2.weight"]["step"] == 4


def test_parameters_that_the_loss_does_not_reach_are_left_alone():
    x, _ = data()
    step = {"k": 0}

    def loss(f):
        hidden = f[1](f[0](x))
        return (hidden if step["k"] in (0, 3) else f[2](hidden)).square().mean()

    pop = swarm()
    opt = mo.Optimizer(pop, *adam())
    for k in range(5):
        step["k"] = k
        opt.step(closure(pop, loss))
    rows = []
    for i in range(5):
        member = copy.deepcopy(swarm()[i])
        one = mo.Optimizer(member, *adam())
        for k in range(5):
            step["k"] = k
            one.step(mo.closure(lambda member=member: loss(member)))
        rows.append(torch.cat([p.detach().reshape(-1) for p in member.parameters()]))
    torch.testing.assert_close(pop.matrix, torch.stack(rows), rtol=1e-10, atol=1e-10)
    assert opt.num_evaluations == 5
    assert opt.link("Adam").state["2.bias"]["step"] == 3


def test_groups_have_different_settings():
    pop = swarm()
    opt = mo.Optimizer(pop, *adam())
    biases = [leaf for name, leaf in pop.named_parameters() if name.endswith("bias")]
    opt.link("WeightDecay").set_param_groups([{"params": biases, "weight_decay": 0.0}])
    for _ in range(4):
        opt.step(closure(pop))
    x, y = data()
    rows = []
    for i in range(5):
        member = copy.deepcopy(swarm()[i])
        one = mo.Optimizer(member, *adam())
        ours = [p for name, p in member.named_parameters() if name.endswith("bias")]
        one.link("WeightDecay").set_param_groups([{"params": ours, "weight_decay": 0.0}])
        for _ in range(4):
            one.step(mo.closure(lambda member=member: (member(x) - y).square().mean()))
        rows.append(torch.cat([p.detach().reshape(-1) for p in member.parameters()]))
    torch.testing.assert_close(pop.matrix, torch.stack(rows), rtol=1e-10, atol=1e-10)
    assert "parameters stacked over members" in opt.explain()


def test_line_searches_leave_frozen_parameters():
    pop = swarm().requires_grad_(False, "0.bias")
    opt = mo.Optimizer(pop, m.Backtracking())
    start = pop.matrix.clone()
    before = opt.step(closure(pop))
    after = closure(pop)(backward=False)
    assert bool((after < before).all())
    assert torch.equal(pop.matrix[:, 12:16], start[:, 12:16])


def test_a_failing_step_leaves_the_parameters():
    class Fail(mo.optim.Module):
        members = True

        def apply(self, objective):
            objective.move_to([p + 1 for p in objective.params])
            raise RuntimeError("no")

    for frozen in ((), ("0.bias",)):
        pop = swarm()
        if frozen:
            pop.requires_grad_(False, *frozen)
        start = pop.matrix.clone()
        with pytest.raises(RuntimeError, match="no"):
            mo.Optimizer(pop, m.LR(0.1), Fail()).step(closure(pop))
        assert torch.equal(pop.matrix, start)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deepcopy", "pickle"]
)
def test_copies_step_alike(how):
    pop = swarm()
    opt = mo.Optimizer(pop, *adam())
    for _ in range(2):
        opt.step(closure(pop))
    other = how(opt)
    for each in (opt, other):
        each.step(closure(each.population))
    assert other.population is not pop
    assert torch.equal(pop.matrix, other.population.matrix)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 80), nn.Tanh(), nn.Linear(80, 64), nn.Linear(64, 2)).double()


def test_states_in_eight_bits_are_those_of_each_member():
    """States of 4096 elements or more are quantised, here member by member."""
    x, y = data()
    pop = mo.Population.of(wide, 2)
    nets = [copy.deepcopy(each) for each in pop]
    opt = mo.Optimizer(pop, m.Quantized(m.Adam()), m.LR(0.01))
    own = [mo.Optimizer(each, m.Quantized(m.Adam()), m.LR(0.01)) for each in nets]
    for _ in range(3):
        opt.step(closure(pop))
        for each, one in zip(nets, own, strict=True):
            one.step(mo.closure(lambda each=each: (each(x) - y).square().mean()))
    expected = torch.stack([torch.cat([p.detach().reshape(-1) for p in each.parameters()]) for each in nets])
    torch.testing.assert_close(pop.matrix, expected, rtol=1e-10, atol=1e-12)
    assert "member by member" in opt.explain()


@pytest.mark.parametrize("link", [m.GGT, m.FullMatrixAdagrad, lambda: m.GaLore(m.Adam())])
def test_state_of_unvectorised_links_is_saved(link):
    pop = swarm()
    opt = mo.Optimizer(pop, link(), m.LR(0.01))
    for _ in range(3):
        opt.step(closure(pop))
    other = pop.clone()
    resumed = mo.Optimizer(other, link(), m.LR(0.01))
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each in (opt, resumed):
        each.step(closure(each.population))
    assert torch.equal(pop.matrix, other.matrix)


def test_checkpoints_by_parameter_load():
    """State dicts have one entry of shape (N, *shape) per parameter."""
    pop, singles, x, y = swarm(), [], *data()
    for i in range(5):
        member = copy.deepcopy(pop[i])
        singles.append((member, mo.Optimizer(member, *adam())))
    for member, one in singles:
        for _ in range(3):
            one.step(mo.closure(lambda member=member: (member(x) - y).square().mean()))
    trained = mo.Population.from_modules([member for member, _ in singles])
    opt = mo.Optimizer(trained, *adam())
    saved = opt.state_dict()
    dicts = [one.state_dict() for _, one in singles]
    for name, row in dicts[0]["state"].items():
        saved["state"][name] = {
            key: torch.stack([each["state"][name][key] for each in dicts]) if isinstance(value, torch.Tensor) else value
            for key, value in row.items()
        }
    opt.load_state_dict({**saved, "current_step": 3})
    opt.step(closure(trained))
    for member, one in singles:
        one.step(mo.closure(lambda member=member: (member(x) - y).square().mean()))
    expected = torch.stack([torch.cat([p.detach().reshape(-1) for p in member.parameters()]) for member, _ in singles])
    torch.testing.assert_close(trained.matrix, expected, rtol=1e-12, atol=1e-12)
    again = opt.state_dict()
    assert again["state"]["0.weight"]["1.Adam/exp_avg"].shape == (5, 4, 3)


LINKS = {
    "Adam": lambda n: [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.1), m.LR(0.1)],
    "rates": lambda n: [m.Adam(), m.LR(torch.full((n,), 0.1, dtype=DOUBLE))],
    "stacked": lambda n: [m.HeavyBall(0.9), m.Split("weight", m.LR(0.1), m.LR(0.2)), m.RMSprop()],
    "PSO": lambda n: [m.Adam(), m.LR(0.1), m.PSO(seed=0)],
    "backtracking": lambda n: [m.HeavyBall(0.9), m.Backtracking(maxiter=1)],
    "LBFGS": lambda n: [m.LBFGS(history_size=2), m.LR(0.1)],
    "DE": lambda n: [m.DE(seed=0)],
}


@pytest.mark.parametrize("name", LINKS)
def test_operations_do_not_depend_on_the_number_of_members(name):
    counts = []
    for n in (8, 32):
        population = Stacked(n)
        opt = mo.Optimizer(population.population, *LINKS[name](n))
        for _ in range(2):
            opt.step(mo.closure(population.losses))
        counts.append(Counter(list_operations(lambda: opt.step(mo.closure(population.losses)))))
    assert counts[0] == counts[1]


ARITHMETIC = {
    "aten::mul",
    "aten::mul_",
    "aten::add",
    "aten::add_",
    "aten::addcdiv_",
    "aten::addcmul_",
    "aten::lerp_",
    "aten::sqrt",
}


@pytest.mark.parametrize("per_member", [False, True])
def test_explain_agrees_with_the_dispatched_operations(per_member):
    population = Stacked(6, torch.float32)
    rate = torch.full((6,), 0.1) if per_member else 0.1
    opt = mo.Optimizer(population.population, m.Adam(), m.LR(rate))
    for param in population.params.values():
        param.grad = torch.ones_like(param)
    for _ in range(2):
        opt.step()
    names = [name for name in list_operations(opt.step) if name in ARITHMETIC]
    text = opt.explain()
    assert "1 matrix of 6 x 10" in text
    if per_member:
        assert (
            "LR      needs the gradient; on its own, over 1 matrix of 6 x 10: a number differs between members" in text
        )
        assert names == ["aten::mul"]
    else:
        assert text.count("one pass") == 1
        assert "one by one" not in text
        if mo.kernels.explain().form == "c":
            assert names == []


def test_gradients_that_are_zeroed_in_place_are_dense():
    population = Stacked(6, torch.float32).population
    opt = mo.Optimizer(population, m.Adam(), m.LR(0.1))
    for _ in range(2):
        loss = mo.closure(lambda f: sum(p.square().sum() for p in f.parameters()))
        opt.step(loss)
        opt.zero_grad(set_to_none=False)
        leaves = list(population.parameters())
        assert all(not leaf.grad.any() and leaf.grad.is_contiguous() for leaf in leaves)


def test_a_split_by_the_modules_of_parameters_is_that_of_one_model():
    """A filter is called with the module of a parameter, in a population that of the template, so embeddings are excluded."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.hidden = torch.nn.Embedding(5, 8), torch.nn.Linear(8, 8)

        def forward(self, at):
            return self.hidden(self.words(at)).tanh()

    torch.manual_seed(0)
    net, at = Words(), torch.randint(0, 5, (12,))
    population = mo.Population.of(net, 2)
    together = mo.Optimizer(population, presets.muon(lr=0.02))
    alone = mo.Optimizer(net, presets.muon(lr=0.02))
    for _ in range(3):
        together.step(mo.closure(lambda: population.losses(lambda f: f(at).square().mean())))
        alone.step(mo.closure(lambda: net(at).square().mean()))
    for name, value in net.state_dict().items():
        torch.testing.assert_close(population[1].state_dict()[name], value, rtol=1e-5, atol=1e-6)
