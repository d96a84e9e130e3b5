"""Mistakes in hooks are errors that name the link, the hook and the parameter; hooks are checked once, fused or not."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import kernels, m, optim
from moduli.optim import _checks, transform


def make_link(apply=None, update=None, initialize=None, pointwise=True, **options):
    """Return a link whose hooks call functions of (tensor, param, grad, state, setting)."""
    hooks = {"single_tensor_apply": apply, "single_tensor_update": update, "single_tensor_initialize": initialize}

    def wrap(hook):
        return lambda self, tensor, param, grad, loss, state, setting: hook(tensor, param, grad, state, setting)

    def __init__(self):
        optim.TensorTransform.__init__(self, {"limit": 1.0}, **options)

    body = {name: wrap(hook) for name, hook in hooks.items() if hook is not None}
    return type("Mine", (optim.TensorTransform,), {**body, "__init__": __init__, "elementwise": pointwise})()


def pass_on(tensor, param, grad, state, setting):
    return tensor


def use_setting(tensor, param, grad, state, setting):
    return tensor * setting["limits"]


def use_state(tensor, param, grad, state, setting):
    return tensor * state["average"]


APPLY = "Mine.single_tensor_apply, for parameter 'weight'"
MISTAKES = {
    "None": ({"apply": lambda *given: None}, TypeError, rf"{APPLY}.*returned None"),
    "a number": ({"apply": lambda *given: 1.0}, TypeError, rf"{APPLY}.*a float"),
    "transposed": ({"apply": lambda tensor, *rest: tensor.t()}, ValueError, rf"{APPLY}.*shape.*shape"),
    "flat": ({"apply": lambda tensor, *rest: tensor.reshape(-1)}, ValueError, rf"{APPLY}.*\(6,\).*\((3, 2|2, 3)\)"),
    "summed": ({"apply": lambda tensor, *rest: tensor.sum()}, ValueError, rf"{APPLY}.*(shape \(\)|aten.sum)"),
    "double": ({"apply": lambda tensor, *rest: tensor.double()}, TypeError, rf"{APPLY}.*float64.*float32"),
    "truth": ({"apply": lambda tensor, *rest: tensor > 0}, TypeError, rf"{APPLY}.*torch.bool"),
    "no setting": ({"apply": use_setting}, KeyError, rf"{APPLY}.*'limits'.*settings are limit"),
    "no state": ({"apply": use_state}, KeyError, rf"{APPLY}.*'average'.*state has nothing"),
    "no state to update": (
        {"apply": pass_on, "update": use_state},
        KeyError,
        r"Mine.single_tensor_update, for parameter 'weight'.*'average'",
    ),
    "no setting to initialize": (
        {"apply": pass_on, "initialize": use_setting},
        KeyError,
        r"Mine.single_tensor_initialize, for parameter 'weight'.*'limits'",
    ),
    "grad": ({"apply": lambda tensor, param, grad, *rest: tensor * grad}, TypeError, rf"{APPLY}.*uses_grad = True"),
    "of grad": ({"apply": lambda tensor, p, grad, *rest: grad.sign()}, TypeError, rf"{APPLY}.*uses_grad = True"),
}
FORMS = {"fused": (True, "auto"), "unfused": (True, False), "whole": (False, "auto")}


def make_net():
    net = nn.Linear(2, 3)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    return net


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_at_the_first_step(mistake, form):
    options, kind, text = MISTAKES[mistake]
    pointwise, fuse = FORMS[form]
    net = make_net()
    before = [param.detach().clone() for param in net.parameters()]
    opt = mo.Optimizer(net, make_link(pointwise=pointwise, **options), m.LR(0.1), fuse=fuse)
    for _ in range(2):  # the first step fails, and so does the second
        with pytest.raises(kind, match=text):
            opt.step()
    assert all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("mistake", ["None", "transposed", "no state", "double"])
def test_mistakes_are_named_in_pure_steps_and_populations(mistake):
    options, kind, text = MISTAKES[mistake]
    params = [torch.ones(3, 2)]
    links = [make_link(**options), m.LR(0.1)]
    with pytest.raises(kind, match=text.replace("'weight'", "0")):
        optim.functional.step(links, params, params, optim.functional.init(links, params))
    population = mo.Population.from_modules([nn.Linear(2, 3) for _ in range(2)])
    for leaf in population.parameters():
        leaf.grad = torch.ones_like(leaf)
    for pointwise in (True, False):
        opt = mo.Optimizer(population, make_link(pointwise=pointwise, **options), m.LR(0.1))
        with pytest.raises(kind, match=text):
            opt.step()


def test_wrong_counts_and_updates_are_refused():
    class Lists(optim.TensorTransform):
        def __init__(self, act):
            super().__init__({})
            self.act = act

        def multi_tensor_apply(self, tensors, params, grads, loss, states, settings):
            return self.act(tensors)

    class Whole(optim.Module):
        def __init__(self, act):
            super().__init__()
            self.act = act

        def apply(self, objective):
            objective.updates = self.act(objective.get_updates())
            return objective

    for link, kind, text in (
        (
            Lists(lambda tensors: tensors[:1]),
            ValueError,
            "Lists.multi_tensor_apply returned 1 tensors for 2 parameters",
        ),
        (Lists(lambda tensors: None), TypeError, "Lists.multi_tensor_apply returned a NoneType"),
        (Lists(lambda tensors: tensors[0]), TypeError, "Lists.multi_tensor_apply returned a Tensor"),
        (Lists(lambda tensors: tensors[::-1]), ValueError, r"'weight', returned a tensor of shape \(3,\)"),
        (Whole(lambda tensors: tensors[:1]), ValueError, "Whole left an update of 1 tensors for 2 parameters"),
        (Whole(lambda tensors: [t.t().contiguous() for t in tensors]), ValueError, r"Whole left .*\(2, 3\) .*'weight'"),
        (Whole(lambda tensors: [None, *tensors[1:]]), ValueError, "Whole left a NoneType for parameter 'weight'"),
    ):
        net = make_net()
        before = [param.detach().clone() for param in net.parameters()]
        opt = mo.Optimizer(net, link, m.LR(0.1))
        with pytest.raises(kind, match=text):
            opt.step()
        assert all(map(torch.equal, net.parameters(), before))


def test_hooks_are_checked_once_per_set_of_parameters(monkeypatch):
    counted = []
    check = _checks.check_results

    def count(*args):
        counted.append(args)
        check(*args)

    monkeypatch.setattr(transform, "check_results", count)
    for fuse in ("auto", False):
        net = make_net()
        opt = mo.Optimizer(net, make_link(pass_on, pointwise=False), make_link(pass_on), m.LR(0.1), fuse=fuse)
        opt.step()
        first = len(counted)
        assert first
        opt.step()
        assert len(counted) == first
        net.bias.requires_grad_(False)  # other parameters
        opt.step()
        assert len(counted) > first


def test_errors_raised_by_a_hook_are_not_replaced():
    def fail(tensor, param, grad, state, setting):
        raise KeyError("no such table: averages")

    def wrong(tensor, param, grad, state, setting):
        raise TypeError("mine")

    for fuse in ("auto", False):
        with pytest.raises(KeyError, match="^'no such table: averages'$"):
            mo.Optimizer(make_net(), make_link(fail), fuse=fuse).step()
        with pytest.raises(TypeError, match="^mine$"):
            mo.Optimizer(make_net(), make_link(wrong), fuse=fuse).step()
    with pytest.raises(kernels.NotPointwiseError, match="'Mine' uses aten.sum"):
        mo.Optimizer(make_net(), make_link(lambda tensor, *rest: tensor / tensor.sum())).step()


# ---------------------------------------------------------------------- mistakes when a link is made


class Base(optim.TensorTransform):
    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor


class Forgotten(Base):
    def __init__(self):
        self.limit = 1.0


class Late(Base):
    def __init__(self):
        self.set_child("inner", m.LR(0.1))
        super().__init__({})


class LateKeys(Base):
    def __init__(self):
        self.add_projected_keys("grad", "average")
        super().__init__({})


class Replaced(Base):
    def __init__(self):
        super().__init__({})
        self.settings = {"limit": 1.0}


class ReplacedDefaults(Base):
    def __init__(self):
        super().__init__({})
        self.defaults = {"limit": 1.0}


class ReplacedState(Base):
    def __init__(self):
        super().__init__({})
        self.state = {}


class Broken(Base):
    def __init__(self):
        super().__init__({})
        self.limit = self.limits


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Forgotten, r"Forgotten.__init__ has to call super\(\).__init__"),
        (Late, r"Late.__init__ has to call super\(\).__init__ before"),
        (LateKeys, r"LateKeys.__init__ has to call super\(\).__init__ before"),
        (Replaced, r"Replaced.__init__ replaces self.settings.*super\(\).__init__"),
        (ReplacedDefaults, r"ReplacedDefaults.__init__ replaces self.defaults.*super\(\).__init__"),
        (ReplacedState, r"ReplacedState.__init__ sets self.state.*single_tensor_initialize"),
    ],
)
def test_links_without_a_complete_constructor_are_refused_at_once(kind, text):
    with pytest.raises(TypeError, match=text):
        kind()


def test_other_missing_attributes_raise_attribute_error():
    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'limits'"):
        Broken()


def test_groups_of_a_link_are_dictionaries():
    param = nn.Parameter(torch.ones(1))
    for wrong in ([param], param, iter([param]), [("weight", param)]):
        with pytest.raises(TypeError, match=r"LR.set_param_groups takes dictionaries.*'params': \[...\], 'lr'"):
            m.LR(0.1).set_param_groups(wrong)
    assert m.LR(0.1).set_param_groups({"params": param, "lr": 0.5}).settings[param]["lr"] == 0.5
