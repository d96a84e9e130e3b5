"""Names: at every call site a pattern may use any form of a name, and one that matches nothing is an error."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m, merge, particles
from moduli.layout import UnknownNameError, list_forms, make_rename, match_name, public_name, select, unwrapped_name


class Net(mo.Module):
    """A labelled parameter `coef`, registered as `tensor:coef`, and a plain layer."""

    def __init__(self, value=1.0):
        super().__init__()
        self.coef = mo.tensor([value, value], c=["r", "g"], requires_grad=True)
        self.head = nn.Linear(2, 1)


def particle(value=1.0):
    torch.manual_seed(0)
    return particles.adopt(Net(value))


def only(pattern):
    changed = particles.only(particle(), pattern) * 2
    return [name for name, (x, y) in compare(particle(), changed) if not torch.equal(x, y)]


def population_only(pattern):
    pop = mo.Population.of(particle(), 2)
    return [name for name, (x, y) in compare(pop[0], (pop.only(pattern) * 2)[0]) if not torch.equal(x, y)]


def population_frozen(pattern):
    pop = mo.Population.of(particle(), 2).requires_grad_(False, pattern)
    return [name for name, leaf in pop.named_parameters() if not leaf.requires_grad]


def configured(pattern):
    net = particle()
    net.set_param_config(operational=False, name=pattern)
    names = [name for name, _ in net.named_parameters()]
    return [names[place] for place in particles.inert_parameters(net)]


def merged(pattern):
    a, b = particle(), particle(3.0)
    with torch.no_grad():
        b.head.weight.add_(1), b.head.bias.add_(1)
    mixed = merge.lerp(a, b, {pattern: 1.0, "*": 0.0})
    return [name for name, (x, y) in compare(a, mixed) if not torch.equal(x, y)]


def grouped(pattern):
    net = particle()
    opt = mo.Optimizer(net, m.LR(0.1), groups={pattern: {"lr": 1.0}})
    names = {id(param): name for name, param in net.named_parameters()}
    return [names[id(param)] for group in opt.param_groups if group["lr"] == 1.0 for param in group["params"]]


def added_group(pattern):
    net = particle()
    opt = mo.Optimizer([("other", nn.Parameter(torch.zeros(1)))], m.LR(0.1))
    opt.model = net
    opt.add_param_group({"params": pattern})
    names = {id(param): name for name, param in net.named_parameters()}
    return [names[id(param)] for param in opt.param_groups[1]["params"]]


def split(pattern):
    net = particle()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    opt = mo.Optimizer(net, m.Split(pattern, m.LR(1.0), m.LR(0.0)))
    opt.step(mo.closure(lambda: net.coef.sum().data + net.head(torch.ones(2)).sum()))
    return [name for name, param in net.named_parameters() if not torch.equal(param, before[name])]


def searched(pattern):
    net = particle()
    with torch.no_grad():
        mo.search(net, lambda each: sum(float((p - 5).square().sum()) for p in each.parameters()), pattern, budget=20)
    return [name for name, (x, y) in compare(particle(), net) if not torch.equal(x, y)]


def compare(a, b):
    pairs = zip(a.named_parameters(), b.parameters(), strict=True)
    return [(name, (x, y)) for (name, x), y in pairs]


SITES = {
    "only": only,
    "population.only": population_only,
    "population.requires_grad_": population_frozen,
    "set_param_config": configured,
    "merge": merged,
    "groups": grouped,
    "add_param_group": added_group,
    "Split": split,
    "search": searched,
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("coef", ["tensor:coef"]),
        ("tensor:coef", ["tensor:coef"]),
        ("co*", ["tensor:coef"]),
        ("head.*", ["head.weight", "head.bias"]),
        ("head.[bw]eight", ["head.weight"]),
    ],
)
def test_a_pattern_selects_the_same_parameters_at_every_site(site, pattern, expected):
    assert SITES[site](pattern) == expected


@pytest.mark.parametrize("site", SITES)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(site):
    with pytest.raises(ValueError, match=r"'head\.wieght'.*did you mean 'head\.weight'\?"):
        SITES[site]("head.wieght")


def test_buffers_are_selected_by_public_names_too():
    @mo.nograd_tensors("shift")
    class Shifted(Net):
        def __init__(self):
            super().__init__()
            self.shift = mo.tensor([0.0, 0.0], c=["r", "g"])

    net = particles.buffer_policy(particles.adopt(Shifted()), "operate", "shift")
    assert particles.buffer_policies(net) == {"buffer:shift": "operate"}
    with pytest.raises(ValueError, match=r"has no buffer called 'shfit'; did you mean 'shift'\?"):
        particles.buffer_policy(net, "copy", "shfit")


def test_forms_of_a_name():
    assert list_forms("a.b") == ("a.b",)
    assert list_forms("_orig_mod.a.tensor:w")[-1] == "a.w"
    assert public_name("a.buffer:w") == "a.w"
    assert unwrapped_name("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b") == "a.b"
    assert not match_name("a.weight", "weight")


def test_the_prefix_of_data_parallel_wrappers_is_ignored_only_if_all_names_have_it():
    assert select("weight", ["module.weight", "module.bias"]) == [0]
    assert select("weight", ["module.weight", "weight"]) == [1]
    assert select("module.weight", ["module.weight", "module.bias"]) == [0]


def test_tied_names_ranges_and_the_star_pattern():
    assert select("head.weight", [("embed.weight", "head.weight"), ("bias",)]) == [0]
    assert select("layers.<0-9>.*", ["layers.1.w", "layers.10.w", "layers.9.w"]) == [0, 2]
    assert select("*", []) == []
    with pytest.raises(UnknownNameError, match="no parameter is called 'a'; there are none"):
        select("a", [])
    with pytest.raises(UnknownNameError, match="there are .* and 5 more"):
        select("x", [f"name{i}" for i in range(25)])


def test_renames():
    names = ["0.weight", "0.bias", "1.weight"]
    assert [*map(make_rename({"0": "head", "1": None}, names), names)] == ["head.weight", "head.bias", None]
    assert make_rename({"0": ""}, names)("0.bias") == "bias"
    with pytest.raises(ValueError, match="the same name '0.weight'"):
        make_rename({"1": "0"}, names)
    with pytest.raises(ValueError, match="mapping has '7', which the checkpoint does not"):
        make_rename({"7": "x"}, names)


def test_split_accepts_public_names_and_raises_where_nothing_matches():
    net = mo.Module()
    net.coef = mo.tensor([1.0, 2.0], ch=["r", "g"]).attach()
    net.body = torch.nn.Linear(2, 2)
    opt = mo.Optimizer(net, m.Split("coef", m.LR(1.0), m.LR(0.0)))
    before = net.body.weight.detach().clone()
    opt.step(mo.closure(lambda: net.coef.sum().data + net.body(torch.ones(2)).sum()))
    assert net.coef.tolist() == [0.0, 1.0]
    assert torch.equal(net.body.weight, before)
    with pytest.raises(ValueError, match="'body.wieght'; did you mean 'body.weight'?"):
        mo.Optimizer(net, m.Split("body.wieght", m.LR(1.0)))


def test_presets_raise_where_a_pattern_of_the_user_matches_nothing():
    net = nn.Sequential(nn.Linear(2, 2))
    mo.Optimizer(net, *mo.presets.muon())  # the usual names of embeddings need not occur
    with pytest.raises(ValueError, match=r"'0\.wieght'; did you mean '0\.weight'\?"):
        mo.Optimizer(net, *mo.presets.muon(adam="0.wieght"))
