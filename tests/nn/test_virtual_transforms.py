"""Virtual tensors under function transforms, compilation, export and tracing."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize

from moduli.nn import Module, VirtualTensor, cached, virtual
from nn.helpers import Skew, formula


def test_functional_call_and_grad_use_the_substituted_source():
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


def test_vmap_over_stacked_members_computes_each_value():
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


def test_forward_mode_tangents_pass_through_the_value():
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


def test_exported_programs_compute_the_value():
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


def test_parametrized_sources_are_traced():
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


def test_attributes_set_by_compiled_code_are_read():
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
def test_values_are_recomputed_after_compiled_optimizer_steps(backend):
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


def test_values_are_cached_per_autocast_default_dtype_and_default_device():
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


def test_modes_intercept_every_operation_of_a_cached_value():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    class WatchFunctions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    module = Skew()
    with torch.no_grad(), cached():
        module.weight
        for mode in (Watch, WatchFunctions):
            calls.clear()
            with mode():
                module.weight
            assert calls
        assert torch.allclose(module.weight, formula(module))


def test_saved_tensor_hooks_apply_to_a_cached_value():
    module, packed = Skew(), []
    with cached():
        module.weight
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            module.weight.sum().backward()
    assert packed
