"""The maximal update parametrization, and weight decay of matrices, by the axes of a model."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from axes.zoo import MODELS, Model, weight
from moduli import m, presets


def make_mlp(width, inputs=5, outputs=3):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )
    return net.double(), torch.randn(7, inputs, dtype=torch.float64), torch.randn(7, outputs, dtype=torch.float64)


def find_scales(net, ax, **how):
    """Return the factor of each parameter's update, by name."""
    ones = {name: torch.ones_like(param) for name, param in net.named_parameters()}
    net = copy.deepcopy(net)
    opt = mo.Optimizer(net, m.MuP(ax, **how), m.LR(1.0))
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    for name, param in net.named_parameters():
        param.grad = ones[name]
    opt.step()
    return {name: float((before[name] - param.detach()).mean()) for name, param in net.named_parameters()}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # Table 3: input matrices and biases, hidden matrices, output matrices; here 256 is four times the base.
        ("adam", {"0.weight": 1, "0.bias": 1, "2.weight": 1 / 4, "2.bias": 1, "4.weight": 1 / 4, "4.bias": 1}),
        ("sgd", {"0.weight": 4, "0.bias": 4, "2.weight": 1, "2.bias": 4, "4.weight": 1 / 4, "4.bias": 1}),
    ],
)
def test_factors_are_those_of_table_3(rule, expected):
    net, x, _ = make_mlp(256)
    base, _, _ = make_mlp(64)
    ax = mo.axes.trace(net, x)
    assert find_scales(net, ax, base=64, rule=rule) == pytest.approx(expected)
    assert find_scales(net, ax, base=mo.axes.trace(base, x), rule=rule) == pytest.approx(expected)
    assert set(find_scales(base, mo.axes.trace(base, x), base=64, rule=rule).values()) == {1.0}


def test_the_width_of_several_axes_is_their_product():
    torch.manual_seed(0)
    net, example, _ = MODELS["fused qkv"]()
    scales = find_scales(net, mo.axes.trace(net, *example), base=12)
    assert scales["blocks.0.att.o.weight"] == pytest.approx(12 / 24)  # four heads of size six
    assert scales["blocks.0.down.weight"] == pytest.approx(12 / 40)
    assert scales["embed.weight"] == scales["blocks.0.n1.weight"] == pytest.approx(1)
    assert scales["head.weight"] == pytest.approx(1 / 2)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_training_is_that_of_table_8(rule):
    """The reference follows table 8, with a multiplier after the output matrix instead of a smaller start and step."""
    net, x, y = make_mlp(128)
    ratio = 128 / 32
    ax = mo.axes.trace(net, x)
    ax.initialise_mup(net, base=32, generator=torch.Generator().manual_seed(1))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[4].weight.mul_(ratio)
    adam = [m.Adam(eps=0.0)] if rule == "adam" else []
    opt = mo.Optimizer(net, *adam, m.MuP(ax, base=32, rule=rule), m.LR(0.01))
    lrs = {
        "adam": {"0.weight": 1, "0.bias": 1, "2.weight": 1 / ratio, "2.bias": 1, "4.weight": 1, "4.bias": 1},
        "sgd": {"0.weight": ratio, "0.bias": ratio, "2.weight": 1, "2.bias": ratio, "4.weight": ratio, "4.bias": 1},
    }[rule]
    groups = [{"params": [param], "lr": 0.01 * lrs[name]} for name, param in other.named_parameters()]
    theirs = torch.optim.Adam(groups, eps=0.0) if rule == "adam" else torch.optim.SGD(groups)
    for _ in range(5):
        opt.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        opt.step()
        theirs.zero_grad()
        hidden = other[:4](x)
        ((hidden @ other[4].weight.T / ratio + other[4].bias - y) ** 2).mean().backward()
        theirs.step()
    for name, param in net.named_parameters():
        expected = dict(other.named_parameters())[name].detach() / (ratio if name == "4.weight" else 1)
        torch.testing.assert_close(param.detach(), expected, atol=1e-10, rtol=1e-8)


def test_starts_are_those_of_table_3():
    net = nn.Sequential(nn.Linear(50, 512), nn.LayerNorm(512), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 40))
    ax = mo.axes.trace(net, torch.zeros(1, 50))
    scale = net[1].weight.detach().clone()
    ax.initialise_mup(net, base=64, generator=torch.Generator().manual_seed(0))
    assert net[0].weight.std().item() == pytest.approx(50**-0.5, rel=0.03)
    assert net[2].weight.std().item() == pytest.approx(512**-0.5, rel=0.03)
    assert net[4].weight.std().item() == pytest.approx(64**0.5 / 256, rel=0.03)
    assert torch.equal(net[1].weight, scale)
    assert not any(layer.bias.any() for layer in (net[0], net[2], net[4]))
    first = net[0].weight.detach().clone()
    ax.initialise_mup(net, base=64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net[0].weight, first)


def test_embeddings_have_rows_of_variance_one_and_tied_ones_are_refused():
    net = nn.Sequential(nn.Embedding(300, 100), nn.Linear(100, 5))
    ax = mo.axes.trace(net, torch.zeros(3, dtype=torch.int64))
    ax.initialise_mup(net)
    assert net[0].weight.std().item() == pytest.approx(1, rel=0.03)
    net, example, _ = MODELS["tied"]()
    ax = mo.axes.trace(net, *example)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="'embed.weight' is an embedding and a head"):
        ax.initialise_mup(net)
    with pytest.raises(ValueError, match="'embed.weight' is an embedding and a head"):
        mo.Optimizer(net, m.Adam(), m.MuP(ax), m.LR(0.1))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_wrong_arguments_are_refused():
    net, x, _ = make_mlp(8)
    ax = mo.axes.trace(net, x)
    with pytest.raises(ValueError, match="has to know the axes"):
        mo.Optimizer(net, m.MuP(base=4), m.LR(0.1))
    with pytest.raises(ValueError, match="base is 0"):
        m.MuP(ax, base=0)
    with pytest.raises(TypeError, match="give the width"):
        m.MuP(ax, base=(64,))
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(4, 5\), and the axes are of \(8, 5\)"):
        ax.initialise_mup(make_mlp(4)[0])


def test_mup_uses_the_axes_of_the_optimizer():
    net, x, _ = make_mlp(16)
    ax = mo.axes.trace(net, x)
    opt = mo.Optimizer(net, m.MuP(base=4), m.LR(1.0), axes=ax)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    before = net[2].weight.detach().clone()
    opt.step()
    assert (before - net[2].weight.detach()).mean().item() == pytest.approx(1 / 4)


def test_added_groups_are_scaled():
    net, x, _ = make_mlp(16)
    ax = mo.axes.trace(net, x)
    for param in net[4].parameters():
        param.requires_grad_(False)
    opt = mo.Optimizer(
        [(name, param) for name, param in net.named_parameters() if name[0] != "4"], m.MuP(ax, base=4), m.LR(1.0)
    )
    opt.add_param_group({"params": [("4.weight", net[4].weight), ("4.bias", net[4].bias)]})
    for param in net.parameters():
        param.requires_grad_(True)
        param.grad = torch.ones_like(param)
    before = net[4].weight.detach().clone()
    opt.step()
    assert (before - net[4].weight.detach()).mean().item() == pytest.approx(1 / 4)


def test_members_of_a_population_are_scaled_alike():
    nets = [make_mlp(16)[0] for _ in range(3)]
    x = make_mlp(16)[1]
    ax = mo.axes.trace(nets[0], x)
    population = mo.Population.from_modules(nets)
    opt = mo.Optimizer(population, m.Adam(), m.MuP(ax, base=4), m.LR(0.1))
    opt.step(mo.closure(lambda: population(x).square().mean((1, 2))))
    own = mo.Optimizer(nets[0], m.Adam(), m.MuP(ax, base=4), m.LR(0.1))
    own.step(mo.closure(lambda: nets[0](x).square().mean()))
    for stacked, param in zip(population.parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(stacked[0].detach(), param.detach())


def find_decayed(net, opt):
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    opt.step()
    return {name for name, param in net.named_parameters() if not torch.equal(before[name], param)}


def test_only_matrices_decay():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    nn.init.normal_(net[1].bias)
    matrices = {"0.weight", "2.weight"}
    assert find_decayed(net, mo.Optimizer(net, m.WeightDecay(0.1, only="matrices"), m.LR(0.1))) == matrices
    assert find_decayed(net, mo.Optimizer(net, *presets.adamw(0.1, decay="matrices"))) == matrices
    assert len(find_decayed(net, mo.Optimizer(net, *presets.adamw(0.1)))) == 6
    population = mo.Population.from_modules([net, net])
    assert find_decayed(population, mo.Optimizer(population, *presets.adamw(0.1, decay="matrices"))) == matrices


def test_with_axes_only_matrices_of_products_decay():
    def run(self, x):
        hidden = torch.einsum("bd,edh->ebh", x, self.up) + self.shift[:, None]
        return torch.einsum("ebh,ehd->bd", hidden.relu(), self.down)

    torch.manual_seed(0)
    net = Model(run, up=weight(3, 4, 5), shift=weight(3, 5), down=weight(3, 5, 4))
    ax = mo.axes.trace(net, torch.zeros(2, 4))
    link = m.WeightDecay(0.1, only="matrices")
    assert find_decayed(net, mo.Optimizer(net, link, m.LR(0.1), axes=ax)) == {"up", "down"}
    assert find_decayed(net, mo.Optimizer(net, m.WeightDecay(0.1, only="matrices"), m.LR(0.1))) == {
        "up",
        "shift",
        "down",
    }
    with pytest.raises(ValueError, match="only"):
        m.WeightDecay(0.1, only="vectors")


def test_muon_chooses_hidden_matrices_by_role():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    ax = mo.axes.trace(net, torch.zeros(1, 4))
    opt = mo.Optimizer(net, *presets.muon(axes=ax))
    x = torch.randn(5, 4)
    opt.step(mo.closure(lambda: net(x).square().mean()))
    adam = opt.modules[0].children["false"]
    assert {name for name, param in net.named_parameters() if adam.state[param]} == {
        name for name, param in net.named_parameters() if name != "2.weight"
    }


def test_muon_of_heads_takes_the_axes_from_its_preset():
    torch.manual_seed(0)
    net, (ids,), _ = MODELS["fused qkv"]()
    ax = mo.axes.trace(net, ids)
    losses = []
    opt = mo.Optimizer(net, *presets.muon(0.01, axes=ax, batch="head"))
    for _ in range(15):
        loss = opt.step(mo.closure(lambda: nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())))
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
