"""Loading into objects that differ from the saved ones: edits, renames, reordering, and loads that fail without a change."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import moduli as mo
import moduli.io as mio
from moduli.particles import species


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.safetensors"


def make_stepped_optimizer(module, kind=torch.optim.Adam, groups=None, **options):
    optimizer = kind(module.parameters() if groups is None else groups, **options)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def snapshot(module, optimizer):
    named = {id(p): name for name, p in module.named_parameters()}
    state = {named[id(p)]: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    return {name: value.clone() for name, value in module.state_dict().items()}, state


def are_equal(left, right):
    flat = [[*values.values(), *(v for s in state.values() for v in s.values())] for values, state in (left, right)]
    return all(map(torch.equal, *flat))


def make_body():
    return mo.adopt(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))


# -- edits -------------------------------------------------------------------------------------------------------------


def test_an_older_version_is_loaded_by_its_edits_with_its_optimizer(path):
    old = make_body()
    species(old)
    optimizer = make_stepped_optimizer(old)
    mio.save(path, old, optimizer=optimizer)
    new = make_body()
    species(new)
    new.append(nn.Linear(2, 5))
    new.extra = nn.Parameter(torch.ones(3))
    del new[0]  # renumbers the other layers
    new[0].bias = None
    fresh = torch.optim.Adam(new.parameters())
    before = copy.deepcopy(new.state_dict())
    with pytest.raises(mio.CheckpointError, match="only the module has"):
        mio.load(path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 5)), optimizer=fresh)
    result = mio.load(path, new, optimizer=fresh)
    assert "extra" in result.fresh
    moved = {"0.weight": "1.weight"}
    assert set(moved) == set(new.state_dict()) - set(result.fresh)
    for name, value in new.state_dict().items():
        if name not in result.fresh:
            assert torch.equal(value, old.state_dict()[moved[name]])
            parameter = dict(new.named_parameters())[name]
            assert torch.equal(
                fresh.state[parameter]["exp_avg"], optimizer.state[dict(old.named_parameters())[moved[name]]]["exp_avg"]
            )
        else:
            assert torch.equal(value, before[name])
    assert mio.inspect(path).version == 0


def test_edits_of_the_checkpoint_itself_are_not_replayed(path):
    net = make_body()
    species(net)
    net.append(nn.Linear(2, 5))
    mio.save(path, net)
    assert mio.inspect(path).history == ("version 1: module '2' was assigned a Linear",)
    later = make_body()
    species(later)
    later.append(nn.Linear(2, 5))
    mio.load(path, later)
    later.more = nn.Parameter(torch.ones(1))
    assert mio.load(path, later).fresh == ("more",)
    behind = make_body()
    species(behind)
    with pytest.raises(
        mio.CheckpointError, match="newer; make its edits here first: version 1: module '2' was assigned"
    ):
        mio.load(path, behind)
    apart = make_body()
    species(apart)
    apart.more = nn.Parameter(torch.ones(1))
    with pytest.raises(mio.CheckpointError, match="different edits"):
        mio.load(path, apart)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_reordered_and_renamed_layers_load_values_and_optimizer_state_by_name(kind, path):
    options = {"lr": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    old = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = make_stepped_optimizer(old, kind, **options)
    mio.save(path, old, optimizer=optimizer)

    class New(nn.Module):
        def __init__(self):
            super().__init__()
            self.tail, self.head, self.body = nn.Linear(3, 3), nn.Linear(2, 3), nn.Linear(3, 3)

    new = New()
    fresh = kind(new.parameters(), **options)
    names = {"0": "head", "1": "body", "2.weight": "tail.weight", "2.bias": "tail.bias"}
    result = mio.load(path, new, optimizer=fresh, mapping=names)
    assert result.fresh == result.dropped == ()
    for at, name in enumerate(("head", "body", "tail")):
        for key in ("weight", "bias"):
            source, target = getattr(old[at], key), getattr(getattr(new, name), key)
            assert torch.equal(target, source)
            for value, saved in zip(fresh.state[target].values(), optimizer.state[source].values(), strict=True):
                assert torch.equal(value, saved)
    table = {"0": "head", "1": "body", "2": "tail"}
    mio.load(path, new, mapping=lambda name: ".".join([table[name.split(".")[0]], name.split(".")[1]]))
    for bad, match in [
        ({"0": "head", "9": "body"}, "mapping has '9'"),
        ({"0": "x", "1": "x"}, "the same name 'x.weight'"),
        ({"0": "head", "1": None, "2": "tail"}, "only the module has 'body.weight', 'body.bias'"),
        ({"0": "tail", "1": "body", "2": "head"}, "'0.weight' is .* of shape \\(3, 2\\) in the checkpoint"),
    ]:
        with pytest.raises(mio.CheckpointError, match=match):
            mio.load(path, new, optimizer=fresh, mapping=bad)
    loose = mio.load(path, new, optimizer=fresh, mapping={"0": "head", "1": None, "2": "tail"}, strict=False)
    assert loose.fresh == ("body.weight", "body.bias")
    assert loose.dropped == ("1.weight", "1.bias")


def test_settings_of_groups_follow_their_parameters(path):
    def net():
        return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    old, new = net(), net()
    optimizer = make_stepped_optimizer(
        old, groups=[{"params": old["a"].parameters(), "lr": 0.1}, {"params": old["b"].parameters(), "lr": 0.2}]
    )
    mio.save(path, old, optimizer=optimizer)
    fresh = torch.optim.Adam([{"params": list(new["b"].parameters())[::-1]}, {"params": new["a"].parameters()}])
    mio.load(path, new, optimizer=fresh)
    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.1]
    assert torch.equal(fresh.state[new["b"].bias]["exp_avg"], optimizer.state[old["b"].bias]["exp_avg"])
    with pytest.raises(mio.CheckpointError, match="had different settings in the checkpoint"):
        mio.load(path, new, optimizer=torch.optim.Adam(new.parameters()))


def test_an_optimizer_by_itself_is_matched_by_position_and_shape(path):
    old = nn.Linear(2, 3)
    optimizer = make_stepped_optimizer(old)
    mio.save(path, optimizer=optimizer)
    new = nn.Linear(2, 3)
    fresh = torch.optim.Adam(new.parameters())
    mio.load(path, optimizer=fresh)
    assert torch.equal(fresh.state[new.weight]["exp_avg"], optimizer.state[old.weight]["exp_avg"])
    for module in (nn.Linear(3, 2), nn.Linear(2, 3, bias=False)):
        with pytest.raises(mio.CheckpointError, match="it has no state that fits|nothing here takes"):
            mio.load(path, optimizer=torch.optim.Adam(module.parameters()))
    with pytest.raises(mio.CheckpointError, match="is a torch.optim.adam.Adam, and a torch.optim.sgd.SGD"):
        mio.load(path, optimizer=torch.optim.SGD(new.parameters()))
    named = torch.optim.Adam(list(old.named_parameters())[::-1])
    mio.save(path, optimizer=optimizer_named(old))
    mio.load(path, optimizer=named)
    assert "exp_avg" in named.state[old.bias]


def optimizer_named(module):
    optimizer = torch.optim.Adam(module.named_parameters())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_labels_and_configurations_follow_a_mapping(path):
    old, new = mo.Module(), mo.Module()
    old.part = mo.Module()
    old.part.w = mo.Tensor(torch.arange(2.0), (mo.Space(["x", "y"]),))
    old.set_param_config(operational=False, name="part")
    new.other, new.free = mo.Module(), nn.Parameter(torch.ones(1))
    new.other.v = mo.Tensor(torch.zeros(2), (mo.Space(["y", "x"]),))
    mio.save(path, old)
    mio.load(path, new, mapping={"part.tensor:w": "other.tensor:v"}, strict=False)
    assert new.other.v.data.tolist() == [1.0, 0.0]
    assert torch.equal((new + new).other.v.data, new.other.v.data)


class ByName:
    """An optimizer that stores its state by name, as those of moduli do."""

    def __init__(self, names):
        self.state = {
            "links": {"0.Adam": {"params": {name: {"m": torch.zeros(2)} for name in names}}},
            "order": list(names),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if state["order"] != self.state["order"]:
            raise ValueError("other names")
        self.state = copy.deepcopy(state)


def test_state_by_name_is_renamed_by_a_mapping(path):
    source, target = ByName(["0.weight"]), ByName(["head.weight"])
    source.state["links"]["0.Adam"]["params"]["0.weight"]["m"] += 1
    source.param_groups = target.param_groups = []
    net = nn.Sequential(nn.Linear(1, 2, bias=False))
    mio.save(path, net, optimizer=source)
    mio.load(path, nn.ModuleDict({"head": nn.Linear(1, 2, bias=False)}), optimizer=target, mapping={"0": "head"})
    assert target.state["links"]["0.Adam"]["params"]["head.weight"]["m"].tolist() == [1.0, 1.0]


# -- all or nothing ----------------------------------------------------------------------------------------------------


class RefusesThirteen:
    """An object with a state that raises after half of a load if `n` is 13."""

    def __init__(self):
        self.values = {"x": torch.zeros(2), "n": 0}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values["x"].copy_(state["x"])
        if state["n"] == 13:
            raise ValueError("not thirteen")
        self.values["n"] = state["n"]


def everything():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = make_stepped_optimizer(net)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.Generator(), RefusesThirteen()


@pytest.mark.parametrize("refused", ["extra", "module", "population"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_refused_part_undoes_the_loads_of_the_others(refused, path):
    net, optimizer, scheduler, generator, other = everything()
    other.values = {"x": torch.ones(2), "n": 13 if refused == "extra" else 1}
    population = RefusesThirteen()
    population.values = {"x": torch.ones(2), "n": 13 if refused == "population" else 1}
    scheduler.step()
    torch.rand(3, generator=generator)
    extra = {"generator": generator, "other": other}
    mio.save(path, net, optimizer=optimizer, scheduler=scheduler, extra=extra, population=population)
    net, optimizer, scheduler, generator, other = everything()
    population = RefusesThirteen()
    if refused == "module":

        def explode(module, incompatible):
            raise ValueError("boom")

        net.register_load_state_dict_post_hook(explode)
    before = (
        snapshot(net, optimizer),
        copy.deepcopy(scheduler.state_dict()),
        generator.get_state(),
        torch.get_rng_state(),
    )
    with pytest.raises(mio.CheckpointError, match="boom" if refused == "module" else "ValueError: not thirteen"):
        mio.load(
            path, net, optimizer=optimizer, scheduler=scheduler, population=population,
            extra={"generator": generator, "other": other},
        )  # fmt: skip
    assert are_equal(snapshot(net, optimizer), before[0])
    assert scheduler.state_dict() == before[1]
    assert torch.equal(generator.get_state(), before[2])
    assert torch.equal(torch.get_rng_state(), before[3])
    for each in (other, population):
        assert each.values["n"] == 0
        assert each.values["x"].tolist() == [0.0, 0.0]


def test_missing_parts_are_refused(path):
    net = nn.Linear(2, 2)
    mio.save(path, net)
    optimizer = torch.optim.SGD(net.parameters())
    for parts, match in [
        ({"optimizer": optimizer}, "has no optimizer; it has module"),
        ({"extra": {}}, "has no extra"),
        ({"rng": True}, "has no rng"),
    ]:
        with pytest.raises(mio.CheckpointError, match=match):
            mio.load(path, net, **parts)
    mio.save(path, extra={"a": [1]})
    with pytest.raises(mio.CheckpointError, match="has no module; it has extra"):
        mio.load(path, net)
    with pytest.raises(mio.CheckpointError, match="has no module|no module"):
        mio.TensorFile(path)
    for extra, match in [
        ({"b": 1}, "keys"),
        ({"a": [1, 2]}, "keys"),
        ({"a": torch.Generator()}, "is a generator"),
    ]:
        with pytest.raises(mio.CheckpointError, match=match):
            mio.load(path, extra=extra)
    with pytest.raises(FileNotFoundError):
        mio.load(path.with_name("nothing"), net)
    with pytest.raises(AttributeError, match="no attribute 'state_dict'"):
        mio.save(path, optimizer=3)
    mio.save(path, optimizer={"a": optimizer})
    with pytest.raises(mio.CheckpointError, match="None is one without a name"):
        mio.load(path, optimizer=optimizer)
    with pytest.raises(mio.CheckpointError, match=r"has \['a'\] as optimizer"):
        mio.load(path, optimizer={"b": optimizer})


def test_random_states_are_restored_only_with_an_optimizer(path):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    mio.save(path, net, optimizer=optimizer)
    first = torch.rand(3)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    mio.load(path, net)
    assert torch.equal(torch.rand(3), expected)
    mio.load(path, net, optimizer=optimizer)
    assert torch.equal(torch.rand(3), first)
    mio.save(path, net, optimizer=optimizer, rng=False)
    assert mio.read(path).rng is None


class Broken:
    """An object that refuses every state, its own included."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        raise KeyError("never")


@pytest.mark.parametrize("where", ["extra", "scheduler", "population"])
def test_an_undo_that_raises_does_not_stop_the_others(where, path):
    def parts():
        net = nn.Linear(2, 2)
        optimizer = make_stepped_optimizer(net)
        generator = torch.Generator()
        other = (
            {"scheduler": Broken()}
            if where == "scheduler"
            else {"population": Broken()}
            if where == "population"
            else {}
        )
        extra = {"generator": generator, **({"other": Broken()} if where == "extra" else {})}
        return net, generator, {"optimizer": optimizer, "extra": extra, **other}

    net, generator, objects = parts()
    torch.rand(5, generator=generator)
    mio.save(path, net, **objects)
    net, generator, objects = parts()
    before = snapshot(net, objects["optimizer"]), generator.get_state(), torch.get_rng_state()
    with pytest.raises(mio.CheckpointError, match="the Broken refuses its state.*Broken raised KeyError") as caught:
        mio.load(path, net, **objects)
    assert isinstance(caught.value.__cause__, mio.CheckpointError)
    assert are_equal(snapshot(net, objects["optimizer"]), before[0])
    assert torch.equal(generator.get_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_an_interrupt_propagates_when_an_undo_raises(path):
    class Interrupted(Broken):
        def load_state_dict(self, state):
            raise KeyboardInterrupt if not hasattr(self, "n") else KeyError("never")

    net = nn.Linear(2, 2)
    mio.save(path, net, optimizer=make_stepped_optimizer(net), extra={"a": Broken(), "b": Broken()})
    other = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        mio.load(path, net, extra={"a": other})


@pytest.mark.parametrize("modular", [True, False])
def test_the_result_lists_fresh_and_dropped_names_of_the_optimizer(modular, path):
    def make(sizes):
        net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        optimizer = mo.Optimizer(net, mo.m.Adam(), mo.m.LR(0.1)) if modular else torch.optim.Adam(net.parameters())
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(mo.closure(lambda: net(torch.ones(1, 2)).sum())) if modular else optimizer.step()
        return net, optimizer

    net, optimizer = make([2, 3, 1])
    mio.save(path, net, optimizer=optimizer)
    net, optimizer = make([2, 3, 4, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = mio.load(path, net, optimizer=optimizer, strict=False)
    assert set(result.fresh) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert set(result.dropped) == {"1.weight", "1.bias"}
    if modular:
        # An optimizer alone has the same report with strict=False, and raises by default.
        net, optimizer = make([2, 3, 4, 1])
        assert set(mio.load(path, optimizer=optimizer, strict=False).dropped) == {"1.weight", "1.bias"}
        with pytest.raises(mio.CheckpointError, match=r"nothing here takes its state of '1.weight', '1.bias'"):
            mio.load(path, optimizer=optimizer)


def test_links_of_only_one_chain_are_reported(path):
    net = nn.Linear(2, 1)
    optimizer = mo.Optimizer(net, mo.m.ClipNorm(1.0), mo.m.Adam(), mo.m.LR(0.1))
    optimizer.step(mo.closure(lambda: net(torch.ones(1, 2)).sum()))
    mio.save(path, net, optimizer=optimizer)
    other = mo.Optimizer(net, mo.m.ClipNorm(1.0), mo.m.Lion(), mo.m.LR(0.1))
    with pytest.raises(mio.CheckpointError, match="the chains differ"):
        mio.load(path, net, optimizer=other)
    result = mio.load(path, net, optimizer=other, strict=False)
    assert result.fresh == ("link 1.Lion",)
    assert result.dropped == ("link 1.Adam",)


def test_an_optimizer_with_other_names_keeps_its_own_state(tmp_path):
    net = nn.Linear(2, 2)
    opt = mo.Optimizer(net, mo.m.Adam(), mo.m.LR(0.1))
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    mio.save(tmp_path / "net", net, optimizer=opt)
    other = nn.Sequential(nn.Linear(2, 2))
    result = mio.load(tmp_path / "net", other, optimizer=mo.Optimizer(other, mo.m.Adam(), mo.m.LR(0.1)), strict=False)
    assert result.fresh == ("0.weight", "0.bias")
    assert result.dropped == ("weight", "bias")


def test_a_directory_is_refused_with_the_file_to_give(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"give the file that `mo.save` has written"):
        mo.load(tmp_path, nn.Linear(2, 2))
