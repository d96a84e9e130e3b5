"""`opt.eval()` replaces parameters by their averages, `opt.train()` restores them; `optim.bind` makes classes for trainers."""

import copy
import pickle

import pytest
import torch

import moduli as mo
from moduli import Optimizer, m, optim, presets

AVERAGING = {
    "schedule-free": lambda: [presets.schedule_free()],
    "mean": lambda: [m.Adam(), m.LR(0.1), m.PolyakAveraging()],
    "running": lambda: [m.Adam(), m.LR(0.1), m.PolyakAveraging(decay=0.8, start=2)],
}


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2).to(dtype)


def step(net, opt, k=0):
    x = torch.linspace(-1, 1, 12).reshape(4, 3).to(net.weight.dtype) + k
    opt.step(mo.closure(lambda: (net(x) - 1).square().mean()))


@pytest.mark.parametrize("fuse", ["auto", False])
def test_averages_are_means_of_the_parameters_after_each_step(fuse):
    net = make_net()
    opt = Optimizer(net, m.LR(0.1), m.PolyakAveraging(), fuse=fuse)
    other = make_net()
    running = Optimizer(other, m.LR(0.1), m.PolyakAveraging(decay=0.8, start=2), fuse=fuse)
    points, expected = [], None
    for k in range(6):
        step(net, opt, k)
        step(other, running, k)
        points.append(net.weight.detach().clone())
        here = other.weight.detach().clone()
        expected = here if k < 3 else 0.8 * expected + 0.2 * here
    torch.testing.assert_close(opt.link("PolyakAveraging").averages([net.weight])[0], torch.stack(points).mean(0))
    torch.testing.assert_close(running.link("PolyakAveraging").averages([other.weight])[0], expected)


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_an_evaluation_in_between_changes_nothing(name, dtype):
    """Evaluate in the middle of a run, save and load there too: parameters stay equal bit for bit."""
    nets = [make_net(dtype) for _ in range(3)]
    opts = [Optimizer(net, *AVERAGING[name]()) for net in nets]
    for k in range(6):
        for i, net in enumerate(nets):
            step(net, opts[i], k)
        if k == 3:
            trained = nets[1].weight.detach().clone()
            for i in (1, 2):
                opts[i].eval()
                opts[i].eval()  # a second call has no effect
            assert not torch.equal(nets[1].weight, trained)
            with pytest.raises(RuntimeError, match=r"call opt.train\(\) before a step"):
                step(nets[1], opts[1], k)
            saved = copy.deepcopy(opts[2].state_dict()), copy.deepcopy(nets[2].state_dict())
            nets[2], again = make_net(dtype), None
            again = Optimizer(nets[2], *AVERAGING[name]())
            nets[2].load_state_dict(saved[1])
            again.load_state_dict(saved[0])
            opts[2] = again
            assert again.evaluating
            for i in (1, 2):
                opts[i].train()
            assert torch.equal(nets[1].weight, trained)
    for net in nets[1:]:
        assert all(map(torch.equal, nets[0].parameters(), net.parameters()))


def test_eval_and_train_without_averages_or_before_a_step_change_nothing():
    net = make_net()
    opt = Optimizer(net, presets.adamw(lr=0.1))
    before = net.weight.detach().clone()
    opt.eval()
    step(net, opt)  # steps are allowed, because nothing was replaced
    opt.train()
    assert not torch.equal(net.weight, before)
    fresh = Optimizer(make_net(), presets.schedule_free())
    fresh.eval()
    fresh.train()


def test_members_of_a_population_are_averaged():
    population = mo.Population.of(make_net(), 3)
    opt = Optimizer(population, m.LR(0.1), m.PolyakAveraging())
    points = []
    for _ in range(3):
        opt.step(mo.closure(lambda: population.losses(lambda f: f(torch.ones(2, 3).double()).square().sum())))
        points.append(population.matrix.clone())
    opt.eval()
    torch.testing.assert_close(population.matrix, torch.stack(points).mean(0))
    opt.train()
    assert torch.equal(population.matrix, points[-1])


# ---------------------------------------------------------------------- classes for trainers


def test_a_bound_class_takes_the_steps_of_its_chain_and_of_torch():
    nets = [make_net(), make_net(), make_net()]
    decayed = [{"params": [net.weight], "weight_decay": 0.1} for net in nets]
    groups = [[group, {"params": [net.bias], "weight_decay": 0.0}] for net, group in zip(nets, decayed, strict=True)]
    opts = [
        optim.bind(presets.adamw)(groups[0], lr=0.05),
        optim.bind(m.Adam(), m.WeightDecay(0.5), m.LR(1.0))(groups[1], lr=0.05),
        torch.optim.AdamW(groups[2], lr=0.05),
    ]
    for k in range(3):
        for net, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            (net(torch.ones(2, 3).double() * (k + 1)) - 1).square().mean().backward()
            opt.step()
    for net in nets[:2]:
        torch.testing.assert_close(net.weight, nets[2].weight)
        torch.testing.assert_close(net.bias, nets[2].bias)
    assert isinstance(opts[0], Optimizer)
    assert type(opts[0]).__name__ == "AdamwOptimizer"


def test_a_bound_class_copies_its_links_and_takes_options():
    cls = optim.bind(m.Adam(), m.LR(1.0), master="float32")
    first, second = cls(make_net(torch.bfloat16)), cls(make_net(torch.bfloat16), betas=(0.5, 0.6))
    assert first.modules[0] is not second.modules[0]
    assert type(first.modules[-1]).__name__ == "MasterWeights"
    assert second.modules[0].defaults["beta1"] == 0.5
    assert first.modules[0].defaults["beta1"] == 0.9


def _split_decay(net, decay):
    """Return groups as the trainer of transformers makes them."""
    return [{"params": [net.weight], "weight_decay": decay}, {"params": [net.bias], "weight_decay": 0.0}]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("preset", [presets.schedule_free, presets.lion, presets.nadam])
def test_a_decay_that_only_groups_set_reaches_a_preset_without_one(preset, decay):
    nets = [make_net(), make_net()]
    bound = optim.bind(preset)(_split_decay(nets[0], decay), lr=0.01)
    plain = Optimizer(
        nets[1], preset(lr=0.01, weight_decay=decay), groups={"bias": {"weight_decay": 0.0}} if decay else {}
    )
    for net, opt in zip(nets, [bound, plain], strict=True):
        for _ in range(3):
            step(net, opt)
    assert torch.equal(nets[0].weight, nets[1].weight)
    assert torch.equal(nets[0].bias, nets[1].bias)


def test_a_bound_class_uses_names_and_layers_of_a_model():
    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))

    nets = [make(), make(), make()]
    groups = [{"params": [nets[0][k].weight for k in range(3)]}, {"params": [nets[0][k].bias for k in (1, 2)]}]
    cls = optim.bind(presets.muon, lr=0.01)
    opts = [
        cls(groups, model=nets[0]),
        cls(nets[1].parameters(), model=nets[1]),
        Optimizer(nets[2], presets.muon(0.01)),
    ]
    assert opts[0].param_groups[1]["param_names"] == ["1.bias", "2.bias"]
    for _ in range(3):
        for net, opt in zip(nets, opts, strict=True):
            opt.step(mo.closure(lambda net=net: (net(torch.arange(5)) - 1).square().mean()))
    for net in nets[:2]:
        assert all(map(torch.equal, net.parameters(), nets[2].parameters()))
    with pytest.raises(ValueError, match="is none of the module"):
        cls(nets[0].parameters(), model=nets[1])


def test_a_decay_of_zero_is_ignored_by_chains_without_decay():
    net = make_net()
    opt = optim.bind(m.Adam(), m.LR(0.1))(_split_decay(net, 0.0))
    step(net, opt)
    with pytest.raises(ValueError, match="sets 'weight_decay', which no link of the chain has"):
        optim.bind(m.Adam(), m.LR(0.1))(_split_decay(net, 0.1))


@pytest.mark.parametrize("chain", [(presets.schedule_free,), (m.ClipNorm(1.0), m.Adam(), m.LR(0.1))])
def test_a_bound_class_and_its_optimizers_are_pickled_as_their_chain(chain):
    cls = optim.bind(*chain, lr=0.02, maximize=True)
    net = make_net()
    opt = cls(net.parameters())
    step(net, opt)
    again = pickle.loads(pickle.dumps(cls))(make_net().parameters())
    assert again.param_groups[0]["lr"] == 0.02
    assert again.maximize
    loaded = pickle.loads(pickle.dumps(opt))
    assert repr(loaded) == repr(opt)
    assert loaded.state_dict()["state"].keys() == opt.state_dict()["state"].keys()


def test_wrong_arguments_of_bind_are_refused():
    with pytest.raises(TypeError, match="takes a preset or links"):
        optim.bind()
    with pytest.raises(TypeError, match="one function that returns links"):
        optim.bind(presets.adamw, m.LR(1.0))
    with pytest.raises(TypeError, match="no link has a setting 'momentum'"):
        optim.bind(m.Adam(), m.LR(1.0))(make_net(), momentum=0.9)
    with pytest.raises(ValueError, match="beta1"):
        optim.bind(m.Adam(), m.LR(1.0))(make_net(), beta1=3.0)
