"""Virtual tensors: gradients, transforms, copies, reuse and its limits."""

import contextlib
import copy
import gc
import io
import pickle
import random
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize

from moduli.labels import Space, Tensor
from moduli.nn import Module, VirtualTensor, cached, invalidate, virtual
from nn.helpers import labelled


class Skew(Module):
    """An orthogonal weight from a square matrix; counts how often it is computed."""

    def __init__(self, n=3, seed=0):
        super().__init__()
        self.a = nn.Parameter(torch.randn(n, n, generator=torch.Generator().manual_seed(seed)))
        self.counter = [0]

    @virtual
    def weight(self):
        self.counter[0] += 1
        return torch.matrix_exp(self.a - self.a.T)

    def forward(self, x):
        return x @ self.weight


class PlainSkew(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.a = nn.Parameter(torch.randn(n, n, generator=torch.Generator().manual_seed(0)))
        self.counter = [0]

    weight = virtual(Skew.__dict__["weight"].__wrapped__)


def formula(module):
    return torch.matrix_exp(module.a - module.a.T)


owners = pytest.mark.parametrize("owner", [Skew, PlainSkew])


# -- what it is --------------------------------------------------------------------------------------------------------


@owners
def test_the_attribute_is_the_tensor_with_gradients_to_its_source(owner):
    module = owner()
    assert type(module.weight) is torch.Tensor
    module.weight.square().sum().backward()
    got, module.a.grad = module.a.grad, None
    formula(module).square().sum().backward()
    assert torch.allclose(got, module.a.grad)


def test_sources_may_live_in_other_modules():
    class Tied(Module):
        def __init__(self, other):
            super().__init__()
            self.hidden = [other]

        @virtual
        def weight(self):
            return 2 * self.hidden[0].a

    other = Skew()
    module = Tied(other)
    module.weight.sum().backward()
    assert torch.equal(other.a.grad, torch.full((3, 3), 2.0))
    with torch.no_grad(), cached():
        first = module.weight
        assert module.weight is first
        other.a.add_(1)
        assert torch.equal(module.weight, 2 * other.a)
        module.hidden[0] = Skew(seed=1)
        assert torch.equal(module.weight, 2 * module.hidden[0].a)


def test_sources_in_enclosing_variables_are_read_every_time():
    other, owner = nn.Linear(2, 2), nn.Module()

    def materialize(owner, dtype, device):
        return other.weight * 3

    VirtualTensor.create(owner, "v", materialize)
    with torch.no_grad(), cached():
        assert torch.equal(owner.v.value, other.weight * 3)
        other.weight.add_(1)
        assert torch.equal(owner.v.value, other.weight * 3)
        other = nn.Linear(2, 2)
        assert torch.equal(owner.v.value, other.weight * 3)


def test_labelled_sources_and_labelled_results():
    class Mixed(Module):
        def __init__(self):
            super().__init__()
            self.a = labelled(3, names=["x"])

        @virtual
        def doubled(self):
            return self.a * 2.0

    module = Mixed()
    assert module.doubled.names == ("x",)
    module.doubled.sum().backward()
    assert torch.equal(module.a.data.grad, torch.full((3,), 2.0))
    with torch.no_grad(), cached():
        assert module.doubled is module.doubled
        module.a.data.add_(1)
        assert torch.equal(module.doubled.data, module.a.data * 2)
    assert module.export("doubled").dims == module.a.dims


def test_virtual_tensors_may_build_on_each_other():
    class Chain(Skew):
        @virtual
        def squared(self):
            return self.weight @ self.weight

        @virtual
        def shifted(self):
            return self.squared + 1

    module = Chain()
    with torch.no_grad(), cached():
        assert module.shifted is module.shifted
        assert module.squared is module.squared
        assert module.counter[0] == 1
        module.a.add_(1)
        assert torch.allclose(module.shifted, formula(module) @ formula(module) + 1)


def test_it_follows_the_dtype_and_device_of_its_sources():
    module = Skew()
    with torch.no_grad():
        module.weight
        assert module.double().weight.dtype == torch.float64
        assert module.to("meta").weight.is_meta


def test_it_is_not_stored():
    assert list(Skew().state_dict()) == ["a"]
    assert "weight" not in repr(Skew())


@owners
def test_cycles_raise_with_the_path(owner):
    class Loop(owner):
        @virtual
        def p(self):
            return self.q + 1

        @virtual
        def q(self):
            return self.r + 1

        @virtual
        def r(self):
            return self.q + 1

    module = Loop()
    for _ in range(2):
        with pytest.raises(RecursionError, match=r"Loop\.q needs its own value: Loop\.q -> Loop\.r -> Loop\.q"):
            module.p
    assert module.weight is not None


@owners
def test_a_missing_source_is_named(owner):
    module = owner()
    del module.a
    with pytest.raises(RuntimeError, match=r"computing \w+\.weight failed: .*'a'"):
        module.weight


def test_the_result_must_be_a_tensor():
    class Wrong(Module):
        @virtual
        def weight(self):
            return 3

    with pytest.raises(TypeError, match=r"Wrong\.weight must be a tensor.*int"):
        Wrong().weight


def test_it_is_declared_in_the_class_of_a_module():
    class NoModule:
        @virtual
        def weight(self):
            return torch.ones(1)

    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        NoModule().weight
    with pytest.raises(TypeError, match="method"):
        virtual(3)
    assert isinstance(Skew.weight, virtual)
    assert Skew.weight.__wrapped__.__name__ == "weight"


# -- assignment --------------------------------------------------------------------------------------------------------


class Log(Module):
    def __init__(self, values=(1.0, 2.0)):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(values).log())
        self.shift = nn.Parameter(torch.zeros(2))

    @virtual
    def scale(self):
        return self.raw.exp() + self.shift

    @scale.right_inverse
    def scale(self, value):
        return {"raw": value.log(), "shift": torch.zeros_like(value)}


@pytest.mark.parametrize("kind", [torch.tensor, lambda v: nn.Parameter(torch.tensor(v))])
def test_right_inverse_lets_it_be_assigned_in_place(kind):
    module = Log()
    raw = module.raw
    with torch.no_grad():
        module.scale
    module.scale = kind([3.0, 4.0])
    assert module.raw is raw
    assert torch.allclose(module.scale, torch.tensor([3.0, 4.0]))
    assert set(dict(module.named_parameters())) == {"raw", "shift"}


def test_right_inverse_is_all_or_nothing():
    class Bad(Log):
        @Log.scale.right_inverse
        def scale(self, value):
            return {"raw": value.log(), "shift": torch.zeros(5)}

    module = Bad()
    before = module.raw.detach().clone()
    with pytest.raises(ValueError, match=r"'shift' the shape \(5,\).*\(2,\)"):
        module.scale = torch.ones(2)
    assert torch.equal(module.raw, before)
    # The base keeps its own.
    base = Log()
    base.scale = torch.ones(2)
    assert torch.allclose(base.scale, torch.ones(2))


def test_right_inverse_may_set_the_sources_itself_and_have_any_name():
    class Own(Module):
        def __init__(self):
            super().__init__()
            self.a = labelled(2)

        @virtual
        def half(self):
            return self.a / 2.0

        @half.right_inverse
        def _(self, value):
            self.a = value * 2.0

    module = Own()
    module.half = labelled(2, seed=5)
    assert torch.allclose(module.half.data, labelled(2, seed=5).data)


def test_right_inverse_of_labelled_sources_aligns_labels():
    class Aligned(Module):
        def __init__(self):
            super().__init__()
            self.a = Tensor(torch.zeros(2), (Space(["x", "y"]),))

        @virtual
        def same(self):
            return self.a * 1.0

        @same.right_inverse
        def same(self, value):
            return {"a": value}

    module = Aligned()
    module.same = Tensor(torch.tensor([1.0, 2.0]), (Space(["y", "x"]),))
    assert module.a.data.tolist() == [2.0, 1.0]


@owners
def test_without_right_inverse_it_cannot_be_assigned_or_deleted(owner):
    module = owner()
    with pytest.raises(AttributeError, match="derived and cannot be assigned"):
        module.weight = torch.ones(3, 3)
    with pytest.raises(AttributeError, match="derived"):
        del module.weight


@pytest.mark.parametrize("returned", [3, {"raw": 3}, {"training": torch.ones(1)}])
def test_a_right_inverse_that_returns_nonsense_is_told_so(returned):
    class Odd(Module):
        def __init__(self):
            super().__init__()
            self.raw = nn.Parameter(torch.ones(2))

        @virtual
        def v(self):
            return self.raw

        @v.right_inverse
        def v(self, value):
            return returned

    with pytest.raises(TypeError, match=r"right inverse of Odd\.v"):
        Odd().v = torch.ones(2)


# -- transforms --------------------------------------------------------------------------------------------------------


def test_functional_call_and_grad():
    module, x = Skew(), torch.ones(1, 3)
    with torch.no_grad():
        module.weight
        other = torch.randn(3, 3)
        expected = x @ torch.matrix_exp(other - other.T)
        assert torch.allclose(functional_call(module, {"a": other}, (x,)), expected)
        assert torch.allclose(module(x), x @ formula(module))
        assert torch.allclose(functional_call(module, {"a": other}, (x,)), expected)
    gradient = grad(lambda a: functional_call(module, {"a": a}, (x,)).sum())(other)
    twin = Skew()
    with torch.no_grad():
        twin.a.copy_(other)
    twin(x).sum().backward()
    assert torch.allclose(gradient, twin.a.grad, atol=1e-6)


def test_vmap_over_stacked_members():
    members, x = [Skew(seed=seed) for seed in range(4)], torch.ones(1, 3)
    with torch.no_grad():
        expected = torch.stack([member(x) for member in members])
        parameters, buffers = stack_module_state(members)
        for _ in range(2):
            stacked = vmap(lambda p, b: functional_call(members[0], (p, b), (x,)))(parameters, buffers)
            assert torch.allclose(stacked, expected, atol=1e-6)
        # Reading a cached value inside a transform must not leave a transformed one behind.
        vmap(lambda s: members[0].weight * s)(torch.ones(2))
        assert torch.allclose(members[0].weight, formula(members[0]))


def test_forward_mode_tangents_are_not_lost():
    import torch.autograd.forward_ad as fwd

    module = Skew()
    with torch.no_grad():
        module.weight
    tangent = torch.ones(3, 3)
    with fwd.dual_level():
        dual = fwd.make_dual(module.a.detach(), tangent)
        value = functional_call(module, {"a": dual}, (torch.eye(3),))
        assert fwd.unpack_dual(value).tangent is not None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_fullgraph(backend):
    torch._dynamo.reset()
    module, x = Skew(), torch.ones(1, 3)
    with torch.no_grad():
        module.weight
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.allclose(compiled(x), module(x), atol=1e-6)
        with torch.no_grad():
            assert torch.allclose(compiled(x), module(x), atol=1e-6)
            module.a.add_(0.1)


def test_compile_fullgraph_of_virtual_tensor_objects():
    torch._dynamo.reset()
    module = Skew()
    VirtualTensor.create(module, "v", lambda owner, dtype, device: owner.weight * 2)
    compiled = torch.compile(lambda x: torch.matmul(x, module.v) + module.v.value, backend="eager", fullgraph=True)
    x = torch.eye(3)
    assert torch.allclose(compiled(x), 4 * formula(module), atol=1e-6)


def test_compile_fullgraph_of_a_virtual_tensor_with_a_method():
    torch._dynamo.reset()

    class Method(Skew):
        def twice(self, dtype, device):
            return 2 * self.a

    module = Method()
    VirtualTensor.create(module, "v", "twice")
    compiled = torch.compile(lambda x: x * module.v.value, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(torch.ones(3, 3)), 2 * module.a)


def test_export():
    module, x = Skew(), torch.ones(1, 3)
    with torch.no_grad():
        module.weight
    program = torch.export.export(module, (x,))
    assert torch.allclose(program.module()(x), module(x), atol=1e-6)
    assert not program.constants


def test_tracing_records_the_computation():
    module, x = Skew(), torch.ones(1, 3)
    with torch.no_grad():
        module.weight
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(module, (x,))
        module.a.add_(1)
        assert torch.allclose(traced(x), module(x), atol=1e-6)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_parametrized_sources():
    module = Skew()
    with torch.no_grad(), cached():
        module.weight
        parametrize.register_parametrization(module, "a", Double())
        assert torch.allclose(module.weight, formula(module))
        first = module.weight
        assert module.weight is first
        module.parametrizations.a.original.add_(1)
        assert torch.allclose(module.weight, formula(module))
        with parametrize.cached():
            assert torch.allclose(module.weight, formula(module))
    module.weight.sum().backward()
    assert module.parametrizations.a.original.grad is not None


# -- copies ------------------------------------------------------------------------------------------------------------


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@owners
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved, copy.copy])
def test_copies_compute_from_their_own_sources(owner, copier):
    module = owner()
    with torch.no_grad():
        before = module.weight
        twin = copier(module)
        assert torch.allclose(twin.weight, before)
        twin.a = nn.Parameter(torch.zeros(3, 3))
        assert torch.allclose(twin.weight, torch.eye(3))
        if copier is not copy.copy:
            assert torch.allclose(module.weight, before)
        twin.__dict__["_parameters"] = {"a": nn.Parameter(torch.ones(3, 3))}
        assert torch.allclose(twin.weight, formula(twin))
        assert torch.allclose(module.weight, formula(module))


def test_replicas_compute_from_their_own_sources():
    module = Skew()
    with torch.no_grad():
        module.weight
        replica = module._replicate_for_data_parallel()
        replica.a = torch.zeros(3, 3)
        assert torch.allclose(replica.weight, torch.eye(3))
        assert torch.allclose(module.weight, formula(module))


def test_virtual_tensors_of_replicas_read_the_replica():
    class Method(Skew):
        def doubled(self, dtype, device):
            return 2 * self.a

    module = Method()
    VirtualTensor.create(module, "method", "doubled")
    VirtualTensor.create(module, "function", lambda owner, dtype, device: 2 * owner.a)
    # What torch's replicate does for each gpu.
    replica = module._replicate_for_data_parallel()
    replica.a = torch.zeros(3, 3)
    for name in ("method", "function"):
        with cached():
            assert torch.equal(getattr(module, name).value, 2 * module.a)
            assert torch.equal(getattr(replica, name).value, torch.zeros(3, 3))
        assert getattr(replica, name).owner is replica
    del replica
    gc.collect()
    assert torch.equal(module.method.value, 2 * module.a)


@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_virtual_tensors_of_replicas_of_plain_modules_read_the_replica(copier):
    module = nn.Linear(2, 2)
    VirtualTensor.create(module, "doubled", _double)
    module = copier(module)
    replica = nn.Sequential(module)[0]._replicate_for_data_parallel()
    again = replica._replicate_for_data_parallel()
    for number, each in enumerate((replica, again)):
        each.weight = torch.full((2, 2), float(number))
        assert torch.equal(each.doubled.value, 2 * each.weight)
        assert each.doubled.owner is each
    assert torch.equal(module.doubled.value, 2 * module.weight)
    reference = weakref.ref(module)
    del module
    assert reference() is None


def _double(module, dtype, device):
    return 2 * module.weight


def test_a_module_with_a_cached_value_can_be_collected():
    module = Skew()
    with torch.no_grad():
        module.weight
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None


# -- computed when read ------------------------------------------------------------------------------------------------


@owners
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outside_a_scope_every_read_computes(owner, mode):
    module = owner()
    with mode():
        values = [module.weight for _ in range(3)]
    assert len({id(value) for value in values}) == module.counter[0] == 3
    first, second = module.weight.sum(), module.weight.sum()
    first.backward()
    second.backward()


class Configured(Module):
    """Reads what no recorder could follow."""

    settings = types.SimpleNamespace(scale=1.0)

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.config = {"factor": 1.0, "deep": [{"shift": 0.0}]}
        self.child = nn.Identity()
        self.child.gain = 1.0
        self.array = np.ones(4, dtype=np.float32)
        self.closure = 1.0
        self.noise = False

    def compute(self):
        value = self.a * self.config["factor"] * self.child.gain * self.settings.scale * self.closure
        value = value + self.config["deep"][0]["shift"] + torch.tensor(self.array) + len(VARIABLES)
        if self.noise:
            value = value + random.random() + float(np.random.rand()) + torch.rand(4)
        return value

    @virtual
    def value(self):
        return self.compute()


VARIABLES = []
vector = torch.arange(4.0)


def fused_step(module):
    gradient = [torch.ones(4)]
    torch._fused_sgd_(
        [module.a],
        gradient,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def edited_vector(module):
    nn.utils.vector_to_parameters(vector, module.parameters())
    vector.add_(1)


UNSEEN = {
    "configuration": lambda m: m.config.__setitem__("factor", 3.0),
    "deep configuration": lambda m: m.config["deep"][0].__setitem__("shift", 2.0),
    "class attribute": lambda m: setattr(Configured.settings, "scale", Configured.settings.scale + 1),
    "attribute of a child": lambda m: setattr(m.child, "gain", 5.0),
    "array": lambda m: m.array.__setitem__(0, 7.0),
    "global list": lambda m: VARIABLES.append(1),
    "through data": lambda m: m.a.data.add_(1),
    "through numpy": lambda m: m.a.detach().numpy().__iadd__(1),
    "through storage": lambda m: m.a.untyped_storage().copy_(torch.full((4,), 9.0).untyped_storage()),
    "through dlpack": lambda m: torch.from_dlpack(m.a.detach()).add_(1),
    "own dict": lambda m: m.__dict__.__setitem__("closure", 4.0),
    "an edited vector": edited_vector,
    "a fused step": fused_step,
}


@pytest.mark.parametrize("change", UNSEEN)
@pytest.mark.parametrize("scope", [False, True])
def test_what_leaves_no_trace(change, scope):
    module = Configured()
    with torch.no_grad(), cached() if scope else contextlib.nullcontext():
        before = module.value.clone()
        UNSEEN[change](module)
        if scope:
            # What the sentence on `cached` names; an attribute of the owner is seen even so.
            assert torch.equal(module.value, before) == (change not in ("own dict", "an edited vector"))
            invalidate(module)
        assert torch.equal(module.value, module.compute())
        assert not torch.equal(module.value, before)


def test_random_draws_are_made_at_every_read():
    module = Configured()
    module.noise = True
    with torch.no_grad():
        assert not torch.equal(module.value, module.value)
        with cached():
            assert torch.equal(module.value, module.value)


def test_an_overriding_virtual_may_read_the_one_it_overrides():
    class Doubled(Skew):
        @virtual
        def weight(self):
            return 2 * super().weight

    module = Doubled()
    assert torch.allclose(module.weight, 2 * formula(module))
    with cached():
        assert module.weight is module.weight
        assert torch.allclose(module.weight, 2 * formula(module))


# -- reuse -------------------------------------------------------------------------------------------------------------


@owners
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_computed_once(owner, mode):
    module = owner()
    with mode(), cached():
        values = [module.weight for _ in range(3)]
    assert values[0] is values[1] is values[2]
    assert module.counter[0] == 1


def test_values_made_in_inference_mode_serve_outside_and_changes_made_in_it_are_seen():
    module = Skew()
    with cached():
        with torch.inference_mode():
            value = module.weight
            assert module.weight is value
            assert not value.is_inference()
        with torch.no_grad():
            assert torch.equal(module.weight, value)
            value = module.weight
            assert module.weight is value
        with torch.inference_mode():
            value.add_(1)
            assert torch.allclose(module.weight, formula(module))


def test_two_forwards_then_two_backwards():
    module, x = Skew(), torch.ones(1, 3)
    first, second = module(x).sum(), (module(x) ** 2).sum()
    second.backward()
    first.backward()
    got, module.a.grad = module.a.grad, None
    ((x @ formula(module)).sum() + ((x @ formula(module)) ** 2).sum()).backward()
    assert torch.allclose(got, module.a.grad, atol=1e-5)


def test_cached_shares_one_graph_until_backward_or_a_change():
    module = Skew()
    with cached():
        value = module.weight
        assert module.weight is value
        with cached():
            assert module.weight is value
        assert module.weight is value
        value.sum().backward()
        fresh = module.weight
        assert fresh is not value
        fresh.sum().backward()
        with torch.no_grad(), cached():
            assert not module.weight.requires_grad
        third = module.weight
        with torch.no_grad(), cached():
            module.a.add_(1)
        assert module.weight is not third
        assert torch.allclose(module.weight, formula(module))
    assert module.weight is not module.weight


def test_cached_is_of_its_thread():
    module, seen = Skew(), []
    with cached():
        assert module.weight is module.weight
        thread = threading.Thread(target=lambda: seen.append(module.weight is module.weight))
        thread.start()
        thread.join()
    assert seen == [False]


def test_cached_ends_with_its_block_even_on_errors():
    module, seen = Skew(), []

    @cached()
    def fail():
        seen.append(module.weight)
        assert module.weight is seen[0]
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert module.weight is not seen[0]
    assert module.weight is not module.weight


def test_cached_can_decorate_a_function():
    module = Skew()

    @cached()
    def both():
        return module.weight is module.weight

    assert both()
    assert both()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_optimizer_steps_are_seen(kind, options):
    module = Skew()
    optimizer = kind(module.parameters(), lr=0.1, **options)
    for _ in range(2):
        module.weight.square().sum().backward()
        with torch.no_grad(), cached():
            module.weight
            optimizer.step()
            assert torch.allclose(module.weight, formula(module))


def test_steps_of_our_optimizer_are_seen_and_the_hook_goes_with_the_scope():
    from torch.optim import optimizer as torch_optimizer

    import moduli as mo

    module, hooks = Skew(), len(torch_optimizer._global_optimizer_post_hooks)
    optimizer = mo.Optimizer(module, mo.m.Adam(), mo.m.LR(0.1))
    with cached():
        for _ in range(3):
            optimizer.step(mo.closure(lambda: (module.weight[0] ** 2).sum() + (module.a**2).sum()))
            with torch.no_grad():
                assert module.weight is module.weight
                assert torch.allclose(module.weight, formula(module))
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks


CHANGES = {
    "in place": lambda m: m.a.add_(1),
    "through a view": lambda m: m.a[0].add_(1),
    "through detach": lambda m: m.a.detach().add_(1),
    "data replaced": lambda m: setattr(m.a, "data", torch.randn(3, 3)),
    "data transposed": lambda m: setattr(m.a, "data", m.a.data.T),
    "data shrunk": lambda m: setattr(m.a, "data", m.a.data[:2, :2]),
    "data reinterpreted": lambda m: setattr(m.a, "data", m.a.data.view(torch.int32).view(torch.float32).T),
    "init": lambda m: nn.init.normal_(m.a),
    "loaded": lambda m: m.load_state_dict({"a": torch.randn(3, 3)}),
    "assigned by loading": lambda m: m.load_state_dict({"a": torch.randn(3, 3)}, assign=True),
    "reassigned": lambda m: setattr(m, "a", nn.Parameter(torch.randn(3, 3))),
    "swapped": lambda m: torch.utils.swap_tensors(m.a, nn.Parameter(torch.randn(3, 3))),
    "from a vector": lambda m: nn.utils.vector_to_parameters(torch.randn(9), m.parameters()),
    "shared memory": lambda m: m.share_memory(),
    "registry edited": lambda m: m._parameters.__setitem__("a", nn.Parameter(torch.randn(3, 3))),
    "registry replaced": lambda m: m.__dict__.__setitem__("_parameters", {"a": nn.Parameter(torch.randn(3, 3))}),
    "double": lambda m: m.double(),
    "raw write, then invalidate": lambda m: (m.a.data.add_(1), invalidate(m)),
    "numpy write, then invalidate": lambda m: (m.a.detach().numpy().__iadd__(1), invalidate()),
    "value changed": lambda m: m.weight.add_(1),
    "value marked": lambda m: m.weight.requires_grad_(),
}


@owners
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(owner, change):
    module = owner()
    with torch.no_grad(), cached():
        module.weight
        CHANGES[change](module)
        value = module.weight
        assert torch.allclose(value, formula(module))
        assert value.dtype == module.a.dtype
        assert not value.requires_grad
        assert module.weight is value


def test_plain_attributes_and_nested_modules_are_followed():
    class Net(Module):
        def __init__(self):
            super().__init__()
            self.factor = 2.0
            self.parts = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
            self.table = [1.0]

        @virtual
        def total(self):
            return self.factor * sum(part.weight for part in self.parts) * sum(self.table)

    def expected():
        return module.factor * sum(part.weight for part in module.parts) * sum(module.table)

    module = Net()
    with torch.no_grad(), cached():
        for change in (
            lambda: setattr(module, "factor", 3.0),
            lambda: module.parts.append(nn.Linear(2, 2, bias=False)),
            lambda: module.parts.__delitem__(0),
            lambda: module.parts.__setitem__(0, nn.Linear(2, 2, bias=False)),
            lambda: setattr(module.parts[0], "weight", nn.Parameter(torch.ones(2, 2))),
            lambda: module.parts[0].register_parameter("weight", nn.Parameter(torch.zeros(2, 2))),
            lambda: setattr(module, "table", [2.0]),
            lambda: module.parts.pop(0),
        ):
            assert module.total is module.total
            change()
            assert torch.allclose(module.total, expected())


def test_attributes_assigned_in_place_are_seen():
    class Listed(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))
            self.factors = [2.0]

        @virtual
        def weight(self):
            return self.a * sum(self.factors)

    module = Listed()
    with torch.no_grad():
        assert module.weight.tolist() == [2.0, 2.0]
        module.factors += [1.0]
        assert module.weight.tolist() == [3.0, 3.0]


def test_attributes_set_by_compiled_code_are_seen():
    torch._dynamo.reset()

    class Counting(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))
            self.factor = 1.0

        @virtual
        def scaled(self):
            return self.a * self.factor

        def forward(self, x):
            self.factor = self.factor + 1
            return x * self.a

    module = Counting()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad(), cached():
        for _ in range(3):
            assert torch.equal(module.scaled, module.a * module.factor)
            compiled(torch.ones(2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_optimizer_steps_are_seen(backend):
    torch._dynamo.reset()
    module = Skew()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        module.zero_grad()
        module.weight.square().sum().backward()
        (module.a**2).sum().backward()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            module.weight
            step()
            assert torch.allclose(module.weight, formula(module))


def test_compiled_functions_may_be_used_inside():
    torch._dynamo.reset()
    wave = torch.compile(lambda x: x.sin() + 1, backend="eager")

    class Wave(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))

        @virtual
        def value(self):
            return wave(self.a)

    module = Wave()
    with torch.no_grad(), cached():
        for _ in range(3):
            assert torch.allclose(module.value, module.a.sin() + 1)
            module.a.add_(1)


def test_indices_that_follow_from_labels_are_no_sources():
    index = torch.tensor([1, 0])
    index._moduli_constant = True
    holder = types.SimpleNamespace(index=index)

    class Turned(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))

        @virtual
        def value(self):
            return self.a[holder.index]

    module = Turned()
    with torch.no_grad(), cached():
        assert module.value is module.value


UNFIT = {
    "gradient": lambda m: m.a + m.a.grad,
    "changes its source": lambda m: m.a.add_(1).clone(),
    "outside tensor": lambda m: m.a + OUTSIDE,
    "sets an attribute": lambda m: m.a * m.tick(),
}
OUTSIDE = [torch.ones(3, 3)][0]


@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_checked_is_computed_at_every_read(kind):
    class Unfit(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, 3))
            self.a.grad = torch.ones(3, 3)
            self.ticks = 0

        def tick(self):
            self.ticks += 1
            return self.ticks

        @virtual
        def weight(self):
            return function(self) if kind != "outside tensor" else self.a + torch.as_tensor(HIDDEN.tensor)

    function = UNFIT[kind]
    module = Unfit()
    with torch.no_grad(), cached():
        assert module.weight is not module.weight


class HIDDEN:
    tensor = torch.ones(3, 3)


def test_a_gradient_that_appears_is_seen():
    class Reads(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3))

        @virtual
        def v(self):
            return torch.zeros(3) if self.a.grad is None else self.a.grad * 1

        @virtual
        def trained(self):
            return torch.ones(1) if self.a.requires_grad else torch.zeros(1)

    module = Reads()
    with torch.no_grad(), cached():
        assert module.v.sum() == 0
        assert module.trained.item() == 1
        module.a.requires_grad_(False)
        assert module.trained.item() == 0
    module.a.requires_grad_()
    (module.a * 2).sum().backward()
    with torch.no_grad(), cached():
        assert module.v.sum() == 6


def test_autocast_default_dtype_and_default_device_belong_to_the_value():
    class Eye(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, 3))

        @virtual
        def weight(self):
            return self.a @ torch.eye(3)

        @virtual
        def identity(self):
            return torch.eye(self.a.shape[0])

    module = Eye()
    with torch.no_grad(), cached():
        assert module.weight.dtype == module.weight.dtype == torch.float32
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert module.weight.dtype == torch.bfloat16
                assert module.weight is module.weight
            with torch.autocast("cpu", torch.float16):
                assert module.weight.dtype == torch.float16
            assert module.weight.dtype == torch.float32
        assert not module.identity.is_meta
        with torch.device("meta"):
            assert module.identity.is_meta
            assert module.identity is module.identity
        assert not module.identity.is_meta
        torch.set_default_dtype(torch.float64)
        try:
            assert module.identity.dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert module.identity.dtype == torch.float32


def test_modes_that_watch_or_change_operations_see_them_all():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class WatchFunctions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    module = Skew()
    with torch.no_grad(), cached():
        module.weight
        for mode in (Watch, WatchFunctions):
            seen.clear()
            with mode():
                module.weight
            assert seen
        assert torch.allclose(module.weight, formula(module))


def test_saved_tensor_hooks_see_the_graph_they_should():
    module, packed = Skew(), []
    with cached():
        module.weight
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            module.weight.sum().backward()
    assert packed


def test_checkpointing_recomputes_with_gradients():
    from torch.utils.checkpoint import checkpoint

    module, x = Skew(), torch.ones(1, 3)
    checkpoint(module, x, use_reentrant=False).sum().backward()
    got, module.a.grad = module.a.grad, None
    (x @ formula(module)).sum().backward()
    assert torch.allclose(got, module.a.grad)


def test_inference_tensors_as_sources_are_not_trusted():
    with torch.inference_mode():
        module = Skew()
        module.a.copy_(torch.ones(3, 3))
        assert torch.allclose(module.weight, formula(module))
        module.a.copy_(torch.arange(9.0).reshape(3, 3))
        assert torch.allclose(module.weight, formula(module))


def test_threads_do_not_disturb_each_other():
    modules = [Skew(seed=seed) for seed in range(4)]
    wrong = []

    def work(module):
        with torch.no_grad(), cached():
            for _ in range(50):
                if not torch.allclose(module.weight, formula(module), atol=1e-5):
                    wrong.append(module)
                module.a.mul_(0.99)

    threads = [threading.Thread(target=work, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_invalidate_takes_a_module_or_nothing():
    with pytest.raises(TypeError, match="module"):
        invalidate(3)
    invalidate()
    invalidate(nn.Linear(1, 1))


def test_invalidating_a_source_reaches_those_who_derive_from_it():
    class Derives(Module):
        def __init__(self, source):
            super().__init__()
            self.source = source

        @virtual
        def v(self):
            return self.source.a * 2

    source = Skew()
    module = Derives(source)
    with torch.no_grad(), cached():
        module.v
        source.a.data.fill_(4.0)
        invalidate(source)
        assert (module.v == 8).all()


def test_intermediate_results_are_not_kept_alive():
    seen = []

    class Big(Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3))

        @virtual
        def v(self):
            middle = self.a * 2
            seen.append(weakref.ref(middle))
            return middle + 1

    module = Big()
    with torch.no_grad(), cached():
        module.v
        gc.collect()
        assert seen[0]() is None


def test_a_long_scope_does_not_grow():
    from moduli.nn._scope import _local

    module = Skew()
    with cached():
        for _ in range(5):
            module.weight.sum().backward()
            # A module that goes takes its values with it.
            assert Skew().weight is not None
        assert len(_local.scope.entries) == 1
    assert _local.scope is None


def test_labelled_values_are_aligned_and_reused_again_after_a_change():
    class Sum(Module):
        def __init__(self):
            super().__init__()
            self.a = Tensor(torch.arange(2.0), (Space(["x", "y"], name="k"),))
            self.b = Tensor(torch.arange(2.0), (Space(["y", "x"], name="k"),))

        @virtual
        def total(self):
            return self.a + self.b

    module = Sum()
    with torch.no_grad(), cached():
        for _ in range(2):
            assert module.total.data.tolist() == (module.a.data + module.b.data.flip(0)).tolist()
            module.a.data.add_(1)
