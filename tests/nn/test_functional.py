"""Dispatch on two types: order, invalidation, unions and abstract bases, and calls of modules."""

import abc
import gc
import numbers
import typing
import weakref
from collections.abc import Sequence, Sized

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moduli.nn import Functional, Module


def action(name):
    def act(functional, obj, **kwargs):
        return (name, kwargs) if kwargs else name

    return act


class Base:
    pass


class Derived(Base):
    pass


def pair():
    class F(Functional):
        pass

    class G(F):
        pass

    return F, G


def test_registration_returns_the_function_unchanged_and_keywords_are_forwarded():
    f, _ = pair()
    function = action("a")
    assert f.register(Base)(function) is function
    assert f()(Base(), scale=2) == ("a", {"scale": 2})
    assert f().invoke(Base(), scale=2) == ("a", {"scale": 2})


def test_registrations_on_a_superclass_are_inherited_unless_overridden():
    f, g = pair()
    f.register(Base)(action("f"))
    assert g()(Base()) == "f"
    g.register(Base)(action("g"))
    assert (g()(Base()), f()(Base())) == ("g", "f")


def test_the_class_of_the_object_takes_precedence_over_the_functional():
    f, g = pair()
    g.register(Base)(action("base on g"))
    f.register(Derived)(action("derived on f"))
    assert g()(Derived()) == "derived on f"
    assert g()(Base()) == "base on g"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=8), st.integers(0, 4), st.integers(0, 2))
def test_resolution_is_the_first_registration_along_both_orders(registrations, obj_at, functional_at):
    objects = [type("O0", (), {})]
    for at in range(1, 4):
        objects.append(type(f"O{at}", (objects[-1],), {}))
    objects.append(type("O4", (objects[1],), {}))
    functionals = [type("F0", (Functional,), {})]
    for at in range(1, 3):
        functionals.append(type(f"F{at}", (functionals[-1],), {}))
    table = {}
    for o, f in registrations:
        functionals[f].register(objects[o])(action((o, f)))
        table[objects[o], functionals[f]] = (o, f)
        # Resolving between registrations must not leave a stale result in the cache.
        functionals[functional_at]().allows(objects[obj_at]())
    expected = next(
        (table[o, f] for o in objects[obj_at].__mro__ for f in functionals[functional_at].__mro__ if (o, f) in table),
        None,
    )
    functional, obj = functionals[functional_at](), objects[obj_at]()
    assert functional.allows(obj) == (expected is not None)
    if expected is None:
        with pytest.raises(NotImplementedError):
            functional(obj)
    else:
        assert functional(obj) == expected


def test_a_registration_on_a_base_invalidates_results_cached_for_subclasses():
    f, g = pair()
    f.register(Base)(action("old"))
    assert g()(Derived()) == "old"
    f.register(Derived)(action("new"))
    assert g()(Derived()) == "new"
    f.register(Derived)(action("newer"))
    assert g()(Derived()) == "newer"


def test_cached_misses_are_dropped_on_registration():
    f, _ = pair()
    assert not f().allows(Base())
    assert not f().allows(Base())
    f.register(Base)(action("now"))
    assert f().allows(Base())


def test_no_registration_names_both_classes_and_the_registered_types():
    f, _ = pair()
    f.register(int | str)(action("n"))
    with pytest.raises(
        NotImplementedError, match=r"F has no action on Base; registered types: int, str.*@F.register\(Base\)"
    ):
        f()(Base())


@pytest.mark.parametrize("union", [int | str, typing.Union[int, str], typing.Optional[int]])  # noqa: UP007, UP045
def test_unions_register_each_member(union):
    f, _ = pair()
    f.register(union)(action("u"))
    assert f()(3) == "u"
    assert f.get_applicable_types() == typing.get_args(union)


def test_abstract_base_classes_match_their_virtual_subclasses():
    f, _ = pair()
    f.register(numbers.Number)(action("number"))
    assert f()(3) == f()(2.5) == f()(True) == "number"
    assert not f().allows("3")


def test_a_concrete_class_comes_before_an_abstract_one_and_object_after_it():
    f, _ = pair()
    f.register(object)(action("object"))
    f.register(Sized)(action("sized"))
    assert (f()([1]), f()(1)) == ("sized", "object")
    f.register(list)(action("list"))
    assert f()([1]) == "list"


def test_the_more_derived_of_two_abstract_classes_is_used():
    f, _ = pair()
    f.register(Sized)(action("sized"))
    f.register(Sequence)(action("sequence"))
    assert f()([1]) == "sequence"
    assert f()({1}) == "sized"


def test_unrelated_abstract_classes_raise_an_error_of_ambiguity():
    P, Q = abc.ABCMeta("P", (), {}), abc.ABCMeta("Q", (), {})

    class Both:
        pass

    P.register(Both)
    Q.register(Both)
    f, _ = pair()
    f.register(P)(action("p"))
    f.register(Q)(action("q"))
    with pytest.raises(TypeError, match="P.* or .*Q"):
        f()(Both())
    f.register(Both)(action("both"))
    assert f()(Both()) == "both"


def test_registering_with_an_abstract_class_later_is_noticed():
    P = abc.ABCMeta("P", (), {})

    f, _ = pair()
    f.register(P)(action("p"))
    assert not f().allows(Base())
    P.register(Derived)
    assert f().allows(Derived())
    assert not f().allows(Base())


@typing.runtime_checkable
class Named(typing.Protocol):
    name: str


class Unchecked(typing.Protocol):
    def run(self) -> None: ...


@pytest.mark.parametrize(
    "bad", [list[int], 3, "int", typing.Any, typing.TypeVar("T"), None, int | list[str], Named, Unchecked]
)
def test_unusable_types_are_refused_at_registration(bad):
    f, _ = pair()
    with pytest.raises(TypeError, match="cannot register"):
        f.register(bad)
    assert f.get_applicable_types() == ()


def test_only_functions_can_be_registered():
    f, _ = pair()
    with pytest.raises(TypeError, match="decorates a function"):
        f.register(int)(3)
    assert not f().allows(1)


def test_applicable_types_are_listed_from_class_instance_and_by_argument():
    f, g = pair()
    f.register(Base)(action("f"))
    g.register(int)(action("g"))
    assert f.get_applicable_types() == f().get_applicable_types() == g.get_applicable_types(f) == (Base,)
    assert g.get_applicable_types() == f.get_applicable_types(g) == (int,)
    with pytest.raises(TypeError, match="subclass of Functional"):
        f.get_applicable_types(int)


@pytest.mark.parametrize("base", [Functional, Module])
def test_temporary_subclasses_are_garbage_collected(base):
    def temporary():
        class F(base):
            pass

        class Obj:
            pass

        def act(functional: F, obj: Obj):
            return "ok"

        F.register(Obj)(act)
        F.register(torch.Tensor)(act)
        F.register(int)(act)
        assert F()(Obj()) == "ok"
        assert F()(3) == "ok"
        return weakref.ref(F), weakref.ref(Obj)

    references = temporary()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_object_types_that_were_dispatched_on_are_garbage_collected():
    class F(Functional):
        pass

    F.register(Base)(action("base"))

    def temporary():
        class Obj(Base):
            pass

        assert F()(Obj()) == "base"
        return weakref.ref(Obj)

    reference = temporary()
    gc.collect()
    assert reference() is None
    assert F()(Base()) == "base"


# -- modules -----------------------------------------------------------------------------------------------------------


class Text(str):
    pass


def module_class():
    class Act(Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, times=1):
            return x * times

    @Act.register(Text)
    def _(act, text, end=""):
        return text.upper() + end

    @Act.register(torch.Tensor)
    def _(act, x):
        return act.forward(x) * act.w

    return Act


def test_a_registered_type_dispatches_even_though_forward_exists_and_others_go_to_forward():
    act = module_class()()
    assert act(Text("a"), end="!") == "A!"
    assert act("a", times=2) == "aa"
    assert act.invoke(Text("a")) == "A"
    with pytest.raises(NotImplementedError, match="Act has no action on str"):
        act.invoke("a")


def test_forward_called_directly_does_not_dispatch():
    act = module_class()()
    assert act.forward(Text("a"), times=2) == "aa"
    assert act(torch.tensor(3.0)).item() == 6.0


def test_without_forward_and_registration_the_error_names_both_classes():
    class Empty(Module):
        pass

    with pytest.raises(
        NotImplementedError, match=r"Empty has no action on int; no type is registered yet.*Empty\.forward"
    ):
        Empty()(3)

    @Empty.register(str)
    def _(empty, text):
        return text

    with pytest.raises(NotImplementedError, match="registered types: str"):
        Empty()(3)
    assert Empty()("x") == "x"


def test_subclasses_may_override_forward_and_call_super():
    act = module_class()

    class Sub(act):
        def forward(self, x, times=1):
            return super().forward(x, times) + x

    assert Sub()("a") == "aa"
    assert Sub()(Text("a")) == "A"
    assert Sub()(torch.tensor(3.0)).item() == 12.0


def test_classes_derived_before_the_registration_dispatch_too():
    class First(Module):
        def forward(self, x):
            return "first"

    class Second(First):
        def forward(self, x):
            return "second"

    First.register(int)(action("int"))
    assert (Second()(1), Second()("x"), First()("x")) == ("int", "second", "first")


def test_a_forward_inherited_from_a_plain_module_still_dispatches():
    class Plain(nn.Module):
        def forward(self, x):
            return "plain"

    class Act(Module):
        pass

    Act.register(int)(action("int"))

    class Both(Plain, Act):
        pass

    assert (Both()(1), Both()("x"), Plain()(1)) == ("int", "plain", "plain")


@pytest.mark.parametrize("value", [Text("a"), "a"], ids=["dispatched", "forward"])
def test_forward_hooks_run_for_actions_and_for_forward(value):
    act, events = module_class()(), []
    act.register_forward_pre_hook(lambda module, args: events.append(("pre", module is act, args)))
    act.register_forward_hook(lambda module, args, result: events.append(("post", result)) or result + "?")
    expected = act.invoke(value) if isinstance(value, Text) else act.forward(value)
    assert act(value) == expected + "?"
    assert events == [("pre", True, (value,)), ("post", expected)]


def test_a_pre_hook_that_changes_the_argument_changes_the_dispatch():
    act = module_class()()
    act.register_forward_pre_hook(lambda module, args: (Text(args[0]),))
    assert act("a") == "A"


def test_global_module_hooks_run():
    act, results = module_class()(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, result: results.append(result))
    try:
        act(Text("a"))
    finally:
        handle.remove()
    assert results == ["A"]


def test_backward_hooks_run():
    act, gradients = module_class()(), []
    act.register_full_backward_hook(lambda module, inputs, outputs: gradients.append(outputs[0].item()))
    x = torch.tensor(3.0, requires_grad=True)
    act(x).backward()
    assert gradients == [1.0]
    assert x.grad.item() == 2.0


def test_nested_calls_under_hooks_each_dispatch_once():
    act = module_class()

    class Outer(act):
        def __init__(self):
            super().__init__()
            self.inner = act()

    @Outer.register(Text)
    def _(outer, text):
        return outer.inner(text) + outer.forward(text)

    outer = Outer()
    for module in outer.modules():
        module.register_forward_hook(lambda module, args, result: None)
    assert outer(Text("a")) == "Aa"


def test_compiling_a_module_in_place_compiles_its_actions():
    act, graphs = module_class()(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    act.compile(backend=backend, fullgraph=True)
    assert act(torch.tensor(3.0)).item() == 6.0
    assert len(graphs) == 1


def test_compiled_equals_eager_with_and_without_hooks():
    torch._dynamo.reset()
    act = module_class()()
    compiled = torch.compile(act, backend="eager", fullgraph=True)
    assert compiled(torch.tensor(3.0)).item() == act(torch.tensor(3.0)).item() == 6.0
    torch._dynamo.reset()
    act.register_forward_hook(lambda module, args, result: result + 1)
    compiled = torch.compile(act, backend="eager", fullgraph=True)
    assert compiled(torch.tensor(3.0)).item() == act(torch.tensor(3.0)).item() == 7.0


def test_actions_are_dispatched_inside_sequential():
    assert nn.Sequential(module_class()(), nn.Identity())(Text("a")) == "A"


def test_classes_without_actions_keep_the_call_of_torch():
    class Plain(Module):
        def forward(self, x):
            return x

    written = Plain.__dict__["forward"]
    assert Plain._call_impl is nn.Module._call_impl
    assert Plain()(3) == 3
    assert Plain.__dict__["forward"] is written
