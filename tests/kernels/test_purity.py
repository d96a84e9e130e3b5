"""Values that a fused function reads besides its arguments are compared at each call, or the function runs unfused."""

import ctypes
import functools
import operator
import os
import sys
import types
import weakref
from collections import ChainMap, UserDict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moduli import kernels
from moduli.kernels import _backend

SETTINGS = {"rate": 1.0, "deep": {"list": [1.0]}}
FACTOR = 1.0
CONFIG = types.ModuleType("config")
CONFIG.rate = 1.0


class Holder:
    rate = 1.0


class Slotted:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 1.0


@dataclass
class Data:
    rate: float = 1.0


Pair = namedtuple("Pair", "rate other")


class Owner:
    """An object that stores a number in every kind of attribute."""

    rate = 1.0
    shared = 1.0

    def __init__(self):
        self.own = 1.0
        self.data = Data()
        self.slotted = Slotted()
        self.space = types.SimpleNamespace(rate=1.0)
        self.listed = [1.0, 2.0]
        self.queue = deque([1.0])
        self.pair = Pair(1.0, 2.0)
        self.array = np.ones(3)
        self.chosen = functools.partial(self._scale, by=1.0)
        self.text = "plus"

    @staticmethod
    def _scale(x, by):
        return x * by

    @property
    def derived(self):
        return self.own * 2

    def __getattr__(self, name):
        if name == "dynamic":
            return self.space.rate
        raise AttributeError(name)


def helper(x):
    return x * FACTOR


def outer():
    rate = 1.0

    def inner(x):
        return x * rate

    def change(value):
        nonlocal rate
        rate = value

    return (lambda x: inner(x) + 1), change


class Attributed(dict):
    rate = 1.0


def find_data():
    return OWNER.data


def find_pair():
    return OWNER.data, 1.0


def scale_by_pair(x):
    data, factor = find_pair()
    return x * data.rate * factor


def scale_by_import(x):
    import config

    return x * config.rate


def scale_by_name(x):
    from config import rate

    return x * rate


@functools.lru_cache
def find_once():
    return SPACE


sys.modules["config"] = CONFIG
SPACE = Data()
WRAPPED, LAYERED, ATTRIBUTED = UserDict(rate=1.0), ChainMap({}, {"rate": 1.0}), Attributed()
REFERENCE, NUMBER = weakref.ref(SPACE), ctypes.c_double(1.0)
GET_RATE, GET_ITEM = operator.attrgetter("rate"), operator.itemgetter("rate")
OWNER = Owner()
CLOSURE, CHANGE = outer()


def set_text(value):
    OWNER.text = "plus" if value == 1.0 else "minus"


def set_shadow(value):
    """Hide an attribute of the class by one of the object, or remove that."""
    if value == 1.0:
        OWNER.__dict__.pop("shared", None)
    else:
        OWNER.shared = value


def set_environment(value):
    """Set an environment variable that is not set at first, or remove it."""
    if value == 1.0:
        os.environ.pop("MODULI_TEST_RATE", None)
    else:
        os.environ["MODULI_TEST_RATE"] = str(value)


CASES = {
    "attribute": (lambda x: x * OWNER.own, lambda v: setattr(OWNER, "own", v)),
    "attribute by name": (lambda x: x * getattr(OWNER, "own"), lambda v: setattr(OWNER, "own", v)),  # noqa: B009
    "attribute of its dict": (lambda x: x * OWNER.__dict__["own"], lambda v: OWNER.__dict__.update(own=v)),
    "dict": (lambda x: x * SETTINGS["rate"], lambda v: SETTINGS.update(rate=v)),
    "nested": (lambda x: x * SETTINGS["deep"]["list"][0], lambda v: SETTINGS["deep"]["list"].__setitem__(0, v)),
    "class": (lambda x: x * Holder.rate, lambda v: setattr(Holder, "rate", v)),
    "class through an object": (lambda x: x * OWNER.rate, lambda v: setattr(Owner, "rate", v)),
    "hidden class attribute": (lambda x: x * OWNER.shared, set_shadow),
    "global of a helper": (helper, lambda v: globals().__setitem__("FACTOR", v)),
    "helper": (lambda x: helper(x) + 1, lambda v: globals().__setitem__("FACTOR", v)),
    "closure": (CLOSURE, CHANGE),
    "module": (lambda x: x * CONFIG.rate, lambda v: setattr(CONFIG, "rate", v)),
    "dataclass": (lambda x: x * OWNER.data.rate, lambda v: setattr(OWNER.data, "rate", v)),
    "replaced object": (lambda x: x * OWNER.data.rate, lambda v: setattr(OWNER, "data", Data(v))),
    "slot": (lambda x: x * OWNER.slotted.rate, lambda v: setattr(OWNER.slotted, "rate", v)),
    "namespace": (lambda x: x * OWNER.space.rate, lambda v: setattr(OWNER.space, "rate", v)),
    "list": (lambda x: x * OWNER.listed[0], lambda v: OWNER.listed.__setitem__(0, v)),
    "length": (lambda x: x * len(OWNER.listed), lambda v: OWNER.listed.__setitem__(slice(2, None), [0] * int(v))),
    "queue": (lambda x: x * OWNER.queue[0], lambda v: OWNER.queue.__setitem__(0, v)),
    "named tuple": (lambda x: x * OWNER.pair.rate, lambda v: setattr(OWNER, "pair", Pair(v, 2.0))),
    "array": (lambda x: x * float(OWNER.array[0]), lambda v: OWNER.array.__setitem__(0, v)),
    "partial": (lambda x: OWNER.chosen(x), lambda v: setattr(OWNER, "chosen", functools.partial(Owner._scale, by=v))),
    "property": (lambda x: x * OWNER.derived, lambda v: setattr(OWNER, "own", v)),
    "computed attribute": (lambda x: x * OWNER.dynamic, lambda v: setattr(OWNER.space, "rate", v)),
    "branch": (lambda x: x + 1 if OWNER.text == "plus" else x - 1, set_text),
    "method": (lambda x: OWNER._scale(x, OWNER.own), lambda v: setattr(OWNER, "own", v)),
    "bound method": (types.MethodType(lambda self, x: x * self.own, OWNER), lambda v: setattr(OWNER, "own", v)),
    "replaced function": (lambda x: replaced(x), lambda v: globals().__setitem__("replaced", lambda x: x * v)),
    "attribute of a returned object": (lambda x: x * find_data().rate, lambda v: setattr(OWNER.data, "rate", v)),
    "attribute in a returned tuple": (scale_by_pair, lambda v: setattr(OWNER.data, "rate", v)),
    "imported module": (scale_by_import, lambda v: setattr(CONFIG, "rate", v)),
    "imported name": (scale_by_name, lambda v: setattr(CONFIG, "rate", v)),
    "wrapped dict": (lambda x: x * WRAPPED["rate"], lambda v: WRAPPED.update(rate=v)),
    "layered dict": (lambda x: x * LAYERED["rate"], lambda v: LAYERED.maps[1].update(rate=v)),
    "attribute of a dict": (lambda x: x * ATTRIBUTED.rate, lambda v: setattr(ATTRIBUTED, "rate", v)),
    "environment": (lambda x: x * float(os.environ.get("MODULI_TEST_RATE", "1")), set_environment),
    "environment by its function": (lambda x: x * float(os.getenv("MODULI_TEST_RATE", "1")), set_environment),
    "weak reference": (lambda x: x * REFERENCE().rate, lambda v: setattr(SPACE, "rate", v)),
    "attribute of a class in C": (lambda x: x * NUMBER.value, lambda v: setattr(NUMBER, "value", v)),
    "attrgetter": (lambda x: x * GET_RATE(SPACE), lambda v: setattr(SPACE, "rate", v)),
    "itemgetter": (lambda x: x * GET_ITEM(SETTINGS), lambda v: SETTINGS.update(rate=v)),
    "cached function": (lambda x: x * find_once().rate, lambda v: setattr(SPACE, "rate", v)),
    "default": (lambda x: with_default(x), lambda v: setattr(with_default, "__defaults__", (v,))),
}


def replaced(x):
    return x * 1.0


def with_default(x, by=1.0):
    return x * by


@pytest.mark.parametrize("name", sorted(CASES))
def test_changed_values_are_used(backend, name):
    fn, change = CASES[name]
    fused = kernels.fuse(fn)
    x = torch.arange(1.0, 4.0)
    try:
        for value in (1.0, 2.0, 1.0, 3.0):
            change(value)
            for _ in range(2):
                assert torch.equal(fused([x])[0], fn(x)), value
    finally:
        change(1.0)


def test_the_default_dtype_is_compared_too(backend):
    fused = kernels.fuse(lambda x: x * torch.full((), 1 / 3) + torch.ones_like(x, dtype=torch.get_default_dtype()))
    x = torch.ones(3)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert fused([x])[0].dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


class Scaled:
    """A pure function that reads its attributes."""

    def __init__(self):
        self.own = 1.0
        self.bounds = (1.0, 2.0)

    def __call__(self, x, s):
        y = x * self.own + (1 - self.own**2) * s
        return y.clamp(min=-self.bounds[0]), self.fill(x).add(x, alpha=self.own)

    def fill(self, x):
        return torch.full_like(x, self.own)


def test_a_changed_attribute_uses_the_same_kernel(monkeypatch):
    """An attribute is a scalar argument of the kernel, whatever the function computes from it."""
    monkeypatch.setenv("MODULI_KERNELS", "c")
    kernels.reset()
    owner = Scaled()
    fused = kernels.fuse(owner)
    x = torch.linspace(-2, 2, 30)
    for value in (0.25, -1.5, 3.0, 0.0, 7.5, 0.125, -0.5, 0.25):
        owner.own = value
        owner.bounds = (abs(value) + 0.5, 2.0)
        for ours, theirs in zip(fused([x], 0.5), owner(x, 0.5), strict=True):
            torch.testing.assert_close(ours[0], theirs)
        assert fused.explain([x], 0.5).form == "c"
    assert len(_backend.list_built()) == 1


class Repeated:
    def __init__(self):
        self.times = 1

    def __call__(self, x):
        return sum((x for _ in range(self.times)), x)


def test_a_function_that_changes_at_every_call_is_no_longer_compiled(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    owner = Repeated()
    fused = kernels.fuse(owner)
    x = torch.ones(3)
    for value in range(1, 12):
        owner.times = value
        assert torch.equal(fused([x])[0], x * (value + 1))
    answer = fused.explain([x])
    assert answer.form == "foreach"
    assert "Repeated.times" in str(answer)
    assert "changes from call to call" in str(answer)


# Values from modules, classes, functions, closures and constants are compared; other objects make a function impure.
COMPARED = {
    *("class", "global of a helper", "helper", "closure", "module", "replaced function", "imported module"),
    *("imported name", "default", "bound method"),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_only_pure_functions_are_compiled(monkeypatch, name):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    answer = kernels.fuse(CASES[name][0]).explain([torch.ones(3)])
    assert answer.form == ("c" if name in COMPARED else "plain"), str(answer)
    if name not in COMPARED:
        assert "what changes in it is not compared" in str(answer) or "is not known" in str(answer)


rates = {"own": 2.0}  # the name of an attribute, and of an unrelated global


class Attributes:
    def __init__(self):
        self.rates = 3.0

    def __call__(self, x):
        return x * self.rates


def test_names_of_attributes_are_not_taken_for_globals(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    fused = kernels.fuse(Attributes())
    assert fused([torch.ones(2)])[0].tolist() == [3.0, 3.0]
    assert fused.explain([torch.ones(2)]).form == "c"


class Writer:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * self.calls


def test_a_function_that_writes_its_attributes_runs_plain(backend):
    owner = Writer()
    fused = kernels.fuse(owner)
    x = torch.ones(3)
    for count in range(1, 4):
        owner.calls = 10 * count
        assert torch.equal(fused([x])[0], x * (10 * count + 1))
        assert owner.calls == 10 * count + 1
    assert "writes Writer.calls" in str(fused.explain([x]))


class Base:
    rate = 1.0

    def scale(self, x):
        return x * self.rate

    @property
    def twice(self):
        return 2 * self.rate

    @classmethod
    def make(cls):
        return cls.rate

    def __call__(self, x):
        return self.scale(x)


class Derived(Base):
    def scale(self, x):
        return super().scale(x) * self.twice * self.make() + isinstance(self, Base)


def test_methods_properties_and_super_are_traced(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    owner = Derived()
    fused = kernels.fuse(owner)
    x = torch.arange(1.0, 4.0)
    for holder, value in ((owner, 3.0), (Base, 2.0), (Derived, 5.0), (owner, 0.5)):
        holder.rate = value
        torch.testing.assert_close(fused([x])[0], owner(x))
        assert fused.explain([x]).form == "c"
    Base.rate = 1.0
    del Derived.rate


def test_attributes_that_are_not_read_are_not_compared(backend):
    """An attribute that the function does not read does not make it be traced again."""

    class Counted:
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            return x * 2

    counted = Counted()
    fused = kernels.fuse(counted)
    for _ in range(5):
        counted.calls += 1
        fused([torch.ones(2)])
    assert sum(map(len, fused._traces.values())) == 1


def test_a_profiler_may_run_beside_the_tracer(backend):
    owner = Owner()
    seen = []
    sys.setprofile(lambda *args: seen.append(args[1]))
    try:
        fused = kernels.fuse(lambda x: x * owner.own)
        first = fused([torch.ones(2)])[0]
        owner.own = 5.0
        second = fused([torch.ones(2)])[0]
    finally:
        sys.setprofile(None)
    assert (first[0], second[0]) == (1.0, 5.0)
    assert seen
