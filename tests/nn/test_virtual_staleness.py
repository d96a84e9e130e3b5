"""Virtual tensors are never stale: random operations, after which every read equals a fresh computation.

The first machine makes the changes that a scope must notice, inside a scope and outside. The second makes arbitrary
changes, outside of scopes.
"""

import contextlib
import copy
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrize

from moduli.labels import Space, Tensor
from moduli.nn import Module, VirtualTensor, cached, invalidate, nograd_tensors, virtual


@nograd_tensors("offset")
class Derived(Module):
    """Virtual tensors over parameters, labelled tensors, buffers, plain attributes, children and other modules."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 2))
        self.b = Tensor(torch.randn(2, 2).requires_grad_(), (Space(2, "row"), Space(["p", "q"], "column")))
        self.offset = Tensor(torch.randn(2, 2), (Space(2, "row"), Space(["p", "q"], "column")))
        self.factor = 2.0
        self.child = nn.Linear(2, 2, bias=False)
        self.others = [nn.Linear(2, 2, bias=False)]

    def formulas(self):
        plain = self.a - self.a.T
        mixed = self.b.data * self.factor + self.offset.data
        return {
            "plain": plain,
            "mixed": mixed,
            "elsewhere": self.child.weight @ self.others[0].weight,
            "chained": plain @ mixed + 1,
            "object": (self.a * 3).to(self.a.dtype),
        }

    @virtual
    def plain(self):
        return self.a - self.a.T

    @virtual
    def mixed(self):
        return (self.b * self.factor + self.offset).data

    @virtual
    def elsewhere(self):
        return self.child.weight @ self.others[0].weight

    @virtual
    def chained(self):
        return self.plain @ self.mixed + 1

    def tripled(self, dtype, device):
        return self.a * 3

    def read(self):
        values = {name: getattr(self, name) for name in ("plain", "mixed", "elsewhere", "chained")}
        return {**values, "object": self.object.value}


class Twice(nn.Module):
    def forward(self, x):
        return x * 2

    def right_inverse(self, x):
        return x / 2


class Reuse(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 99))
    def start(self, seed):
        torch.manual_seed(seed)
        self.module = Derived()
        VirtualTensor.create(self.module, "object", "tripled")
        self.scope = contextlib.ExitStack()

    @rule(open=st.booleans())
    def enter_or_leave_a_scope(self, open):
        self.scope.close()
        if open:
            self.scope.enter_context(cached())

    def teardown(self):
        self.scope.close()

    @rule(name=st.sampled_from(["a", "child.weight"]), how=st.sampled_from(["add", "view", "detach", "init"]))
    def change_in_place(self, name, how):
        parameter = self.module.get_parameter(name) if "a" not in self.parametrized() else self.module.child.weight
        with torch.no_grad():
            {
                "add": lambda: parameter.add_(1),
                "view": lambda: parameter[0].mul_(0.5),
                "detach": lambda: parameter.detach().sub_(0.25),
                "init": lambda: nn.init.normal_(parameter),
            }[how]()

    def parametrized(self):
        return dict(self.module.parametrizations) if parametrize.is_parametrized(self.module) else {}

    @rule(how=st.sampled_from(["replace", "transpose", "raw"]))
    def change_data(self, how):
        weight = self.module.child.weight
        if how == "replace":
            weight.data = torch.randn(2, 2, dtype=weight.dtype)
        elif how == "transpose":
            weight.data = weight.data.T
        else:
            weight.data.add_(1)
            invalidate(self.module.child)

    @rule(which=st.sampled_from(["b", "offset", "child", "other", "factor", "a"]), value=st.integers(-2, 2))
    def assign(self, which, value):
        module, dtype = self.module, self.module.child.weight.dtype
        if which in ("b", "offset"):
            tensor = Tensor(torch.full((2, 2), float(value), dtype=dtype), getattr(module, which).dims)
            setattr(module, which, tensor.attach() if which == "b" else tensor)
        elif which == "child":
            module.child = nn.Linear(2, 2, bias=False, dtype=dtype)
        elif which == "other":
            module.others[0] = nn.Linear(2, 2, bias=False, dtype=dtype)
        elif which == "factor":
            module.factor = float(value)
        elif not self.parametrized():
            module.a = nn.Parameter(torch.randn(2, 2, dtype=dtype))

    @rule(kind=st.sampled_from(["plain", "foreach", "fused"]))
    def step(self, kind):
        parameters = [p for p in (*self.module.parameters(), *self.module.others[0].parameters()) if p.requires_grad]
        if not parameters:
            return
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(parameters, lr=0.1, **({} if kind == "plain" else {kind: True})).step()

    @rule(dtype=st.sampled_from([torch.float32, torch.float64]))
    def convert(self, dtype):
        self.module.to(dtype)
        self.module.others[0].to(dtype)

    @rule(assign=st.booleans())
    def load(self, assign):
        state = {name: value * 0.5 for name, value in self.module.state_dict().items()}
        self.module.load_state_dict(state, assign=assign, labels="ignore")

    @rule(frozen=st.booleans())
    def freeze(self, frozen):
        (self.module.freeze if frozen else self.module.unfreeze)()

    @rule()
    def swap(self):
        weight = self.module.child.weight
        invalidate()  # torch refuses to swap tensors that a shared graph refers to
        torch.utils.swap_tensors(weight, nn.Parameter(torch.randn_like(weight)))

    @rule(how=st.sampled_from([copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]))
    def duplicate(self, how):
        if not self.parametrized():
            original, self.module = self.module, how(self.module)
            with torch.no_grad():
                for parameter in original.parameters():
                    parameter.fill_(77.0)

    @rule()
    def parametrize(self):
        if self.parametrized():
            parametrize.remove_parametrizations(self.module, "a")
        else:
            parametrize.register_parametrization(self.module, "a", Twice())

    @rule(mutate=st.booleans())
    def change_the_value(self, mutate):
        with torch.no_grad():
            value = self.module.chained
            if mutate:
                value.add_(5)

    @rule()
    def call_functionally(self):
        if self.parametrized():
            return
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        other = {f"inner.{name}": value.detach() * 0.5 for name, value in tensors.items()}
        with torch.no_grad():
            read, wanted = functional_call(Holder(self.module), other, ())
            self.same(read, wanted)

    @rule()
    def map_over_members(self):
        if self.parametrized():
            return
        members = [Holder(copy.deepcopy(self.module)) for _ in range(2)]
        with torch.no_grad():
            members[1].inner.a.add_(1)
            state = stack_module_state([member.requires_grad_(False) for member in members])
            read, wanted = vmap(lambda p, b: functional_call(members[0], (p, b), ()))(*state)
            self.same(read, wanted)

    @rule()
    def two_forwards_then_two_backwards(self):
        self.scope.close()  # inside, both would go through one graph
        values = [self.module.read(), self.module.read()]
        for each in values:
            total = sum(value.sum() for value in each.values())
            if total.requires_grad:
                total.backward()

    @rule(change=st.booleans())
    def share_a_graph(self, change):
        with cached():
            first = self.module.read()
            if change:
                with torch.no_grad():
                    self.module.child.weight.add_(1)
            self.same(self.module.read(), self.module.formulas())
            if not change:
                assert all(first[name] is value for name, value in self.module.read().items() if value.requires_grad)
            total = sum(value.sum() for value in self.module.read().values())
            if total.requires_grad:
                total.backward()
            self.same(self.module.read(), self.module.formulas())
        self.module.zero_grad()

    @invariant()
    def reused_equals_recomputed(self):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                for _ in range(2):
                    self.same(self.module.read(), self.module.formulas())

    @staticmethod
    def same(read, wanted):
        for name, value in wanted.items():
            computed = read[name]
            assert torch.allclose(computed.to(value.dtype), value, atol=1e-4), name
            assert computed.requires_grad == value.requires_grad, name
            if name != "object":
                assert computed.dtype == value.dtype, name


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self):
        return self.inner.read(), self.inner.formulas()


# Transposed parameters get gradients of another layout, which torch remarks on once.
TestReuse = pytest.mark.filterwarnings("ignore:grad and param do not obey")(Reuse.TestCase)
TestReuse.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


class Anything(nn.Module):
    """Virtual tensors that read closures, class attributes, arrays, nested containers and random numbers."""

    scale = 1.0
    registry = {"power": 1.0}

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(3.0))
        self.config = {"factor": 2.0, "nested": {"shift": [0.5]}}
        self.plain = nn.Identity()
        self.plain.gain = 1.0
        self.array = np.ones(3, dtype=np.float32)
        offset = 0.25

        def read(owner, dtype, device):
            return owner.compute() + offset

        def move(value):
            nonlocal offset
            offset = value

        self.move, self.offset = move, lambda: offset
        VirtualTensor.create(self, "object", read)

    def compute(self):
        value = self.a * self.config["factor"] * self.plain.gain * type(self).scale * self.registry["power"]
        value = value + self.config["nested"]["shift"][0] + torch.from_numpy(self.array)
        return value + random.random() + float(np.random.rand()) + torch.rand(3)

    @virtual
    def value(self):
        return self.compute()


def reseed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


NUMBERS = st.integers(-3, 3).map(float)


class Change(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.module, self.vector = Anything(), torch.arange(3.0)

    @rule(
        number=NUMBERS, where=st.sampled_from(["factor", "shift", "gain", "scale", "power", "closure", "array", "dict"])
    )
    def change_python(self, number, where):
        module = self.module
        {
            "factor": lambda: module.config.__setitem__("factor", number),
            "shift": lambda: module.config["nested"]["shift"].__setitem__(0, number),
            "gain": lambda: setattr(module.plain, "gain", number),
            "scale": lambda: setattr(Anything, "scale", number),
            "power": lambda: Anything.registry.__setitem__("power", number),
            "closure": lambda: module.move(number),
            "array": lambda: module.array.__setitem__(1, number),
            "dict": lambda: module.__dict__.__setitem__("config", {"factor": number, "nested": {"shift": [number]}}),
        }[where]()

    @rule(
        number=NUMBERS,
        how=st.sampled_from(
            ["data", "numpy", "storage", "dlpack", "vector", "fused", "place", "step", "swap", "shared"]
        ),
    )
    def change_memory(self, number, how):
        a = self.module.a
        with torch.no_grad():
            if how == "data":
                a.data.fill_(number)
            elif how == "numpy":
                a.detach().numpy()[0] = number
            elif how == "storage":
                a.untyped_storage().copy_(torch.full((3,), number).untyped_storage())
            elif how == "dlpack":
                torch.from_dlpack(a.detach()).add_(number)
            elif how == "vector":
                self.vector.add_(number)
                nn.utils.vector_to_parameters(self.vector, [a])
            elif how == "fused":
                a.grad = torch.full((3,), number)
                torch.optim.SGD([a], lr=0.1, fused=True).step()
            elif how == "place":
                a.add_(number)
            elif how == "step":
                a.grad = torch.full((3,), number)
                torch.optim.SGD([a], lr=0.1).step()
            elif how == "swap":
                torch.utils.swap_tensors(a, nn.Parameter(torch.full((3,), number)))
            else:
                self.module.share_memory()

    @rule(seed=st.integers(0, 5))
    def draw(self, seed):
        reseed(seed)

    @invariant()
    def read_equals_computed(self):
        module = self.module
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            for read, wanted in (
                (lambda: module.value, module.compute),
                (lambda: module.object.value, lambda: module.compute() + module.offset()),
            ):
                seed = random.randrange(1000)
                with mode():
                    reseed(seed)
                    values = [read(), read()]
                    reseed(seed)
                    assert all(map(torch.equal, values, [wanted(), wanted()]))

    def teardown(self):
        Anything.scale, Anything.registry["power"] = 1.0, 1.0


TestChange = Change.TestCase
TestChange.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
