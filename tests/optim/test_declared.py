"""Annotated attributes of a link's class are its arguments, by one rule for every link, wherever its class is defined."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.optim import (
    Across,
    BufferTransform,
    Chainable,
    DeclaredLink,
    ListTransform,
    MatrixTransform,
    Module,
    Need,
    Reformulation,
    TensorTransform,
    Transform,
    UpdateTransform,
    ranges,
)

if TYPE_CHECKING:
    from somewhere import Nothing

D = torch.float64
BASES = {
    "Module": Module,
    "Transform": Transform,
    "TensorTransform": TensorTransform,
    "Reformulation": Reformulation,
    "DeclaredLink": DeclaredLink,
    "UpdateTransform": UpdateTransform,
    "BufferTransform": BufferTransform,
    "MatrixTransform": MatrixTransform,
    "ListTransform": ListTransform,
    "HeavyBall": m.HeavyBall,  # of moduli.m, with declared settings
    "StepSize": m.StepSize,  # of moduli.m, with a constructor
    "Online": m.Online,
    "Chain": mo.optim.Chain,
}
REQUIRED = {"Online": (m.LR(1.0),), "Chain": (m.LR(1.0),)}


def define(base, /, hints, **body):
    """Return a subclass of `base` with annotated attributes."""
    namespace = {"__annotations__": hints, "__module__": __name__, **body}
    if inspect.isabstract(base):
        namespace |= {name: lambda self, objective, *rest: objective for name in base.__abstractmethods__}
    return type(base)("Mine", (base,), namespace)


def descend(link, *more, steps=1, fuse="auto", start=(3.0, 0.1)):
    w = nn.Parameter(torch.tensor(start, dtype=D))
    opt = mo.Optimizer([w], link, *more, fuse=fuse)
    for _ in range(steps):
        opt.step(mo.closure(lambda: (w**2).sum()))
    return w.detach()


class Clamp(UpdateTransform):
    elementwise = True
    ranges = {ranges.positive: ("limit",)}

    limit: float = 1.0

    def transform(self, tensor, state, setting):
        return tensor.clamp(-setting["limit"], setting["limit"])


@pytest.mark.parametrize("fuse", ["auto", False])
def test_an_annotated_attribute_is_a_setting(fuse):
    assert descend(Clamp(), fuse=fuse).tolist() == pytest.approx([2.0, -0.1])
    assert descend(Clamp(limit=0.5), fuse=fuse).tolist() == pytest.approx([2.5, -0.1])
    assert descend(Clamp(limit=lambda step: 1.0 + step), steps=2, fuse=fuse)[0].item() == pytest.approx(0.0)
    a, b = (nn.Parameter(torch.full((1,), 5.0, dtype=D)) for _ in range(2))
    opt = mo.Optimizer([{"params": [a]}, {"params": [b], "limit": 2.0}], Clamp(), fuse=fuse)
    opt.step(mo.closure(lambda: (a**2 + b**2).sum()))
    assert (a.item(), b.item()) == (4.0, 3.0)
    with pytest.raises(ValueError, match="Clamp: limit is 0"):
        Clamp(limit=0)
    with pytest.raises(ValueError, match="Clamp: limit is -1"):
        mo.Optimizer([{"params": [a], "limit": -1.0}], Clamp())
    with pytest.raises(TypeError, match="did you mean 'limit'"):
        Clamp(limits=1.0)


@pytest.mark.parametrize("name", BASES)
def test_one_rule_for_every_base(name):
    required = REQUIRED.get(name, ())
    link = define(BASES[name], {"limit": "float", "mode": "Literal['a', 'b']"}, limit=1.0, mode="a")
    assert inspect.signature(link).parameters["limit"].default == 1.0
    instance = link(*required, limit=2.0)
    assert (instance.defaults["limit"], instance.defaults["mode"]) == (2.0, "a")
    assert link(*required).defaults["limit"] == 1.0
    assert not hasattr(instance, "limit")
    with pytest.raises(ValueError, match="Mine: mode is 'c'; it can be 'a' or 'b'"):
        link(*required, mode="c")
    with pytest.raises(TypeError, match="no setting 'other'|other"):
        link(*required, other=1.0)
    again = copy.deepcopy(instance)
    assert again.defaults == instance.defaults


@pytest.mark.parametrize("name", BASES)
def test_links_become_children_and_named_ones_attributes(name):
    required = REQUIRED.get(name, ())
    hints = {"other": "Chainable | None", "seed": "int"}
    link = define(BASES[name], hints, other=None, seed=0, attributes=("seed",))
    instance = link(*required, other=[m.Clone(), m.LR(1.0)], seed=3)
    assert type(instance.children["other"]).__name__ == "Chain"
    assert instance.seed == 3
    assert "seed" not in instance.defaults
    assert "other" not in instance.defaults
    assert "other" not in link(*required).children


@pytest.mark.parametrize("name", BASES)
def test_without_a_default_an_argument_is_required(name):
    required = REQUIRED.get(name, ())
    link = define(BASES[name], {"limit": "float"})
    assert link(*required, limit=3.0).defaults["limit"] == 3.0
    with pytest.raises(TypeError, match="limit"):
        link(*required)


@pytest.mark.parametrize("name", BASES)
def test_classvars_private_names_and_declarations_of_bases_stay_attributes(name):
    hints = {"kind": "ClassVar[str]", "_cache": "int", "needs": "frozenset[Need]", "members": "bool"}
    link = define(BASES[name], hints, kind="mine", _cache=3, needs=frozenset({Need.LOSS}), members=True)
    instance = link(*REQUIRED.get(name, ()))
    assert (instance.kind, instance._cache, instance.needs, instance.members) == (
        "mine",
        3,
        frozenset({Need.LOSS}),
        True,
    )
    assert not {"kind", "_cache", "needs", "members"} & instance.defaults.keys()
    with pytest.raises(TypeError):
        link(*REQUIRED.get(name, ()), kind="other")


def test_declarations_of_tensor_transforms_with_a_type_are_still_declarations():
    class Typed(TensorTransform):
        elementwise: bool = True
        counts: bool = True
        across: Across = Across.NOTHING

        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            return tensor / state["step"]

    assert (Typed.elementwise, Typed().across) == (True, Across.NOTHING)
    assert Typed().defaults == {}
    assert descend(Typed(), m.LR(0.5), start=(4.0,)).item() == 0.0


@pytest.mark.parametrize("name", ["update", "apply", "step", "get_state", "settings", "state", "defaults", "children"])
def test_names_that_every_link_uses_are_refused(name):
    with pytest.raises(TypeError, match=f"Mine.{name}: .* another name"):
        define(TensorTransform, {name: "float"}, **{name: 1.0})


def test_a_setting_is_not_read_from_the_link():
    class Reads(UpdateTransform):
        elementwise = True
        limit: float = 1.0

        def transform(self, tensor, state, setting):
            return tensor.clamp(-self.limit, self.limit)

    with pytest.raises(
        AttributeError, match=r"it is a setting.*setting\['limit'\] in hooks.*attributes = \('limit',\)"
    ):
        descend(Reads())
    with pytest.raises(AttributeError, match="'Reads' object has no attribute 'limits'$"):
        _ = Reads().limits


def test_errors_inside_properties_are_not_hidden():
    class Broken(Module):
        @property
        def broken(self):
            return self.missing

        def apply(self, objective):
            return objective

    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = Broken().broken


class ByHand(TensorTransform):
    """A link ported from torchzero: its constructor defines its settings."""

    volume: float = 2.0
    mean: torch.Tensor

    def __init__(self, beta=0.9, *, scale=1.0):
        super().__init__({"beta": beta, "scale": scale})

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * setting["scale"] * self.volume


class Louder(ByHand):
    more: float = 3.0
    scale: float = 5.0

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return setting["more"] * super().single_tensor_apply(tensor, param, grad, loss, state, setting)


class Loudest(Louder):
    most: float = 7.0

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return setting["most"] * super().single_tensor_apply(tensor, param, grad, loss, state, setting)


def test_a_constructor_defines_the_settings_of_a_link():
    assert ByHand.volume == ByHand().volume == 2.0
    assert list(inspect.signature(ByHand).parameters) == ["beta", "scale"]
    assert descend(ByHand(), start=(1.0,)).item() == 1 - 2 * 2.0


def test_more_arguments_behind_a_constructor_written_by_hand():
    assert str(inspect.signature(Loudest)).startswith("(beta=0.9, *, ")
    assert Loudest(0.5, most=1.0, more=2.0).defaults == {"beta": 0.5, "scale": 5.0, "more": 2.0, "most": 1.0}
    assert Louder(scale=1.0).defaults == {"beta": 0.9, "scale": 1.0, "more": 3.0}
    assert descend(Loudest(), start=(1.0,)).item() == 1 - 2 * 2.0 * 5 * 3 * 7
    opt = mo.Optimizer([nn.Parameter(torch.ones(1))], Loudest(), m.LR(0.1))
    assert pickle.loads(pickle.dumps(opt)).link("Loudest").defaults == Loudest().defaults
    with pytest.raises(TypeError, match="concat_params can't be added to a constructor that is written by hand"):
        define(ByHand, {"concat_params": "bool"}, concat_params=True)
    with pytest.raises(ValueError, match="NaN"):
        Louder(more=float("nan"))


class Scaled(m.HeavyBall):
    volume: Nothing = 2.0  # the annotation is resolvable by type checkers only
    inner: Chainable | None = None

    def apply(self, objective):
        objective = super().apply(objective)
        return self.scale_update(objective)

    def scale_update(self, objective):
        objective.updates = [
            self.settings[p]["volume"] * u for p, u in zip(objective.params, objective.updates, strict=True)
        ]
        return objective


def test_a_subclass_of_a_catalogue_link_adds_arguments():
    w = nn.Parameter(torch.ones(2, dtype=D))
    w.grad = torch.ones_like(w)
    mo.Optimizer([w], Scaled(), m.LR(0.25)).step()
    assert torch.equal(w.detach(), torch.full((2,), 0.5, dtype=D))
    assert Scaled(volume=3.0, momentum=0.5).defaults["volume"] == 3.0
    assert isinstance(Scaled(inner=m.ClipValue(0.1)).children["inner"], m.ClipValue)


def test_functions_strings_and_bools_are_settings():
    class Chosen(UpdateTransform):
        elementwise = True
        fn: Callable[..., Any] = torch.sign
        name: str = "plain"
        twice: bool = False
        scale: float = 1.0

        def transform(self, tensor, state, setting):
            tensor = setting["fn"](tensor) if setting["name"] == "plain" else tensor
            return setting["scale"] * (2 * tensor if setting["twice"] else tensor)

    for fuse in ("auto", False):
        assert descend(Chosen(), fuse=fuse).tolist() == pytest.approx([2.0, -0.9])
        assert descend(Chosen(fn=torch.neg, twice=True), fuse=fuse).tolist() == pytest.approx([15.0, 0.5])
        assert descend(Chosen(name="other"), fuse=fuse).tolist() == pytest.approx([-3.0, -0.1])
        a, b = (nn.Parameter(torch.ones(1, dtype=D)) for _ in range(2))
        opt = mo.Optimizer([{"params": [a]}, {"params": [b], "twice": True, "fn": torch.neg}], Chosen(), fuse=fuse)
        opt.step(mo.closure(lambda: (a**2 + b**2).sum()))
        assert (a.item(), b.item()) == (0.0, 5.0)
    assert isinstance(Chosen(scale=lambda step: 1.0).defaults["scale"], mo.optim.Schedule)


def test_fields_set_factories_and_what_the_constructor_takes():
    class Fields(UpdateTransform):
        amount: float = field(kw_only=False)
        names: Any = field(default_factory=list)
        attributes = ("names",)

        def transform(self, tensor, state, setting):
            return tensor * setting["amount"]

    class Half(Fields):
        amount: float = field(default=0.5, init=False)

    first, second = Fields(1.0), Fields(amount=2.0)
    assert first.names == []
    assert first.names is not second.names
    assert Half().defaults["amount"] == 0.5
    assert list(inspect.signature(Half).parameters) == ["names"]
    assert Half(names=["a"]).names == ["a"]

    class Again(Half):
        amount: float = 0.25

    assert (Again().defaults["amount"], Again(amount=1.0).defaults["amount"]) == (0.25, 1.0)

    class Behind(ByHand):
        names: Any = field(default_factory=list)
        beta: float = field(default=0.5, init=False)
        attributes = ("names",)

    assert Behind().names == []
    assert Behind().names is not Behind().names
    assert Behind().defaults["beta"] == 0.5
    assert list(inspect.signature(Behind).parameters) == ["scale", "names"]
    with pytest.raises(TypeError, match=r"Mine.names: .*field\(default_factory=list\)"):
        define(UpdateTransform, {"names": "list"}, names=[])


def test_class_attributes_declare_that_a_link_uses_gradient_and_loss():
    class Signs(UpdateTransform):
        elementwise = True
        uses_grad = True

        def transform_at(self, tensor, param, grad, state, setting):
            return grad.sign()

    class ByHandToo(TensorTransform):
        uses_grad = uses_loss = True

        def __init__(self):
            super().__init__({})

        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            return grad * loss

    for fuse in ("auto", False):
        assert descend(m.Mul(0.0), Signs(), start=(2.0,), fuse=fuse).item() == 1.0
        assert descend(m.Mul(0.0), ByHandToo(), start=(2.0,), fuse=fuse).item() == 2 - 4 * 4


def test_a_type_in_an_abstract_base_is_given_a_default_below():
    class Base(UpdateTransform):
        rank: int

    class Below(Base):
        scale: float = 1.0
        rank: int = 2

        def transform(self, tensor, state, setting):
            return tensor

    assert list(inspect.signature(Below).parameters) == ["scale", "rank"]
    assert Below().defaults == {"scale": 1.0, "rank": 2}


@pytest.mark.parametrize("wrong", [{"beta1": 1.5}, {"beta2": -0.1}, {"eps": -1e-8}])
def test_memories_and_eps_out_of_range_are_refused_where_a_link_says_nothing_else(wrong):
    hints = {"beta1": "float", "beta2": "float", "eps": "float"}
    own = define(UpdateTransform, hints, beta1=0.9, beta2=0.99, eps=1e-8)
    for link in (m.Adam, own):
        with pytest.raises(ValueError, match=f"{link.__name__}: {next(iter(wrong))} is"):
            link(**wrong)
        link(beta1=lambda step: 0.9, beta2=torch.tensor(0.99), eps=0.0)


def test_a_class_in_a_function_with_types_defined_there():
    Own = Literal["a"]

    class Local(DeclaredLink):
        kind: Own = "a"
        links: ClassVar[dict[str, Own]] = {}
        count: int = 1

        def apply(self, objective):
            return objective

    assert Local(kind="b").defaults == {
        "kind": "b",
        "count": 1,
    }  # a type that can't be resolved at run time is not checked


def fail_state(self, tensor, *rest):
    return rest[-2]["mean"]


@pytest.mark.parametrize("fuse", ["auto", False])
@pytest.mark.parametrize(
    ("base", "hook", "written", "words"),
    [
        (UpdateTransform, "transform", lambda self, *rest: None, "Mine.transform, .*returned None"),
        (UpdateTransform, "transform_at", lambda self, *rest: None, "Mine.transform_at, .*returned None"),
        (UpdateTransform, "transform", fail_state, "Mine.transform, .*'mean'.*single_tensor_initialize"),
        (BufferTransform, "transform", fail_state, "Mine.transform, .*'mean'.*`mean: float.*made in begin"),
        (BufferTransform, "learn", fail_state, "Mine.learn, .*'mean'.*made in begin"),
        (BufferTransform, "begin", fail_state, "Mine.begin, .*'mean'.*made in begin"),
        (ListTransform, "transform_all", lambda self, *rest: [], "Mine.transform_all returned 0 tensors for 1"),
        (UpdateTransform, "single_tensor_apply", lambda self, *rest: None, "Mine.single_tensor_apply, .*returned None"),
    ],
)
def test_errors_name_the_hook_that_the_author_wrote(base, hook, written, words, fuse):
    link = type(base)(
        "Mine", (base,), {"__module__": __name__, hook: written, "elementwise": base is not ListTransform}
    )
    with pytest.raises((TypeError, KeyError, ValueError), match=words):
        descend(link(), fuse=fuse)
