"""The boundary to torch: every shim gives the same result with the private name and without it.

Every shim has a test named `test_<shim>` with the fixture `shims`: the module as it is, then a second copy in which no
private name exists. Where the fallback can only return the safe result, the test distinguishes them by `shims.known`.
"""

import ast
import ctypes
import importlib.util
import inspect
import pathlib
import re
import signal
import subprocess
import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import moduli._torch


def _without_private_names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("moduli_torch_without", moduli._torch.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODULI_PRIVATE", "0")
        spec.loader.exec_module(module)
    return module


class Shims:
    """The names of the module; `known` is whether private names exist in it, so that results are exact."""

    def __init__(self, module: ModuleType, known: bool) -> None:
        self.module = module
        self.known = known

    def __getattr__(self, name: str) -> object:
        return getattr(self.module, name)


@pytest.fixture(params=["private", "public"])
def shims(request):
    if request.param == "private":
        return Shims(moduli._torch, True)
    return Shims(_without_private_names(), False)


# -- the conventions ---------------------------------------------------------------------------------------------------


def _docstrings() -> dict[str, str]:
    """Return the docstring of each function, and the comment before each assignment, by name."""
    text = pathlib.Path(moduli._torch.__file__).read_text()
    texts = {node.name: ast.get_docstring(node) or "" for node in ast.parse(text).body if hasattr(node, "name")}
    for comment, name in re.findall(r"((?:^#:.*\n)+)(\w+): Final", text, re.MULTILINE):
        texts[name] = comment
    assert "in_transform" in texts
    return texts


@pytest.mark.parametrize("name", [name for name in _docstrings() if not name.startswith("_")])
def test_every_shim_has_a_test_and_says_since_when(name):
    assert f"test_{name}" in globals(), f"tests/test_torch_boundary.py has no test_{name}"
    assert "shims" in inspect.signature(globals()[f"test_{name}"]).parameters
    assert "Since " in _docstrings()[name]
    assert "Fallback: " in _docstrings()[name]


def test_hidden_names_are_not_found():
    assert moduli._torch._find("sys.getrefcount") is sys.getrefcount
    assert moduli._torch._find("torch._C._no_such_name") is None
    assert moduli._torch._find("torch._no_such_module.name") is None
    assert _without_private_names()._find("sys.getrefcount") is None


def test_require_torch(shims):
    shims.require_torch()
    for version in ("2.10.0", "2.15.0+cu132", "2.14.0a0+git1234", "3.0.0"):
        shims.require_torch(version)
    for version in ("2.9.1", "2.7.1", "1.13.0+cpu"):
        with pytest.raises(ImportError, match=re.escape(f"this is torch {version}: pip install 'torch>=2.10'")):
            shims.require_torch(version)


# -- what torch is doing with operations -------------------------------------------------------------------------------


def test_in_transform(shims):
    seen = []

    def look(x):
        seen.append(shims.in_transform())
        return x.sum()

    x = torch.ones(3)
    look(x)
    torch.func.grad(look)(x)
    torch.vmap(look)(x)
    torch.func.jvp(look, (x,), (x,))
    look(x)
    with torch.inference_mode():
        look(x)
    assert seen == [False, True, True, True, False, False]


def test_is_wrapped(shims):
    seen = []
    outside = torch.ones(2)

    def look(x):
        seen.append(shims.is_wrapped(x))
        seen.append(shims.is_wrapped(outside))
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.vmap(look)(torch.ones(2))
    assert seen == [False, False, True, False, True, False]


def test_transform_level(shims):
    seen = []

    def look(x):
        seen.append(shims.transform_level())
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.vmap(torch.func.grad(look))(torch.ones(2, 2))
    unknown = moduli._torch.UNKNOWN
    assert seen == ([0, 1, 2] if shims.known else [0, unknown, unknown])


def test_is_batched(shims):
    seen = []

    def look(x):
        seen.append(shims.is_batched(x))
        return x.sum()

    x = torch.ones(3)
    look(x)
    torch.vmap(look)(x)
    torch.vmap(torch.func.grad(look))(x)
    torch.func.grad(lambda x: torch.vmap(look)(x).sum())(x)
    assert seen == [False, True, True, True]
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    assert seen[4:] == [not shims.known] * 2


def test_batch_axis(shims):
    seen = []

    def look(x):
        seen.extend([shims.batch_axis(x, 0), shims.batch_axis(x, 1)])
        return x.sum()

    look(torch.ones(2, 3))
    torch.vmap(look, 1)(torch.ones(2, 3))
    assert seen == [None, None, 1 if shims.known else None, None]


def test_is_transformed(shims):
    assert not shims.is_transformed()
    seen = []
    torch.vmap(lambda x: seen.append(shims.is_transformed()) or x)(torch.zeros(2))
    with torch.autograd.forward_ad.dual_level():
        seen.append(shims.is_transformed())
    assert seen == [True, True]


def test_has_dispatch_mode(shims):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert bool(shims.has_dispatch_mode()) is not shims.known
    with Watching():
        assert shims.has_dispatch_mode()


def test_has_function_mode(shims):
    assert bool(shims.has_function_mode()) is not shims.known
    with torch.overrides.TorchFunctionMode():
        assert shims.has_function_mode()


def test_has_saved_tensor_hooks(shims):
    if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        assert bool(shims.has_saved_tensor_hooks()) is not shims.known
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert shims.has_saved_tensor_hooks()


def test_has_mode_beside(shims):
    from torch.overrides import TorchFunctionMode

    class Watching(TorchFunctionMode):
        pass

    class Changing(TorchFunctionMode):
        pass

    assert shims.has_mode_beside(Watching) is not shims.known
    with torch.device("meta"), Watching():
        assert shims.has_mode_beside(Watching) is not shims.known
        with Changing():
            assert shims.has_mode_beside(Watching)


@pytest.mark.parametrize("change", ["transpose", "shape", "dtype", "grad"])
def test_guard_tensors(shims, change):
    a, b = torch.ones(2, 2), torch.ones(3)
    check = shims.guard_tensors([a, b])
    assert check(a, b)
    assert check(a + 1, b)
    if change == "transpose":
        a.data = a.data.T
    elif change == "shape":
        a.data = a.data[:1]
    elif change == "dtype":
        a.data = a.data.view(torch.int32)
    else:
        b.requires_grad_()
    assert not check(a, b)
    assert shims.guard_tensors([])()


def test_has_autocast(shims):
    assert not shims.has_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert shims.has_autocast()
        with torch.autocast("cpu", enabled=False):
            assert not shims.has_autocast()


def test_has_global_hooks(shims):
    assert bool(shims.has_global_hooks()) == (not shims.known)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert shims.has_global_hooks()
    finally:
        handle.remove()


def test_run_outside(shims):
    tensors = []

    def make(value):
        assert not moduli._torch.in_transform()
        return torch.tensor([value])

    def inside(x):
        tensors.append(shims.run_outside(make, 2.0))
        return (x * tensors[-1]).sum()

    torch.vmap(inside)(torch.ones(2, 1))
    torch.func.grad(inside)(torch.ones(1))
    with torch.inference_mode():
        tensors.append(shims.run_outside(make, value=2.0))
    for tensor in tensors:
        assert not tensor.is_inference()
        assert not moduli._torch.is_wrapped(tensor)
        assert tensor.tolist() == [2.0]
    with torch.no_grad():
        assert shims.run_outside(torch.is_grad_enabled) is True
    with pytest.raises(ZeroDivisionError):
        shims.run_outside(lambda: 1 / 0)


def test_set_grad_enabled(shims):
    try:
        shims.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
    finally:
        shims.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_get_handler(shims):
    before = shims.get_handler(signal.SIGINT)
    assert before is signal.getsignal(signal.SIGINT) or not callable(before)


def test_set_handler(shims):
    def handler(number, frame):
        pass

    before = shims.get_handler(signal.SIGINT)
    try:
        shims.set_handler(signal.SIGINT, handler)
        assert shims.get_handler(signal.SIGINT) is signal.getsignal(signal.SIGINT) is handler
    finally:
        shims.set_handler(signal.SIGINT, before)


def test_in_forward_ad(shims):
    assert not shims.in_forward_ad()
    with torch.autograd.forward_ad.dual_level():
        assert shims.in_forward_ad()
    assert not shims.in_forward_ad()


def test_is_fake(shims):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert shims.is_fake(torch.empty(2, device="cuda"))
    assert not shims.is_fake(torch.empty(2))
    assert not shims.is_fake(torch.nn.Parameter(torch.empty(2)))
    assert not shims.is_fake(torch.empty(2).as_subclass(type("Own", (torch.Tensor,), {})))


def test_is_flat_shard(shims):
    from torch.distributed.fsdp import FlatParameter

    assert not shims.is_flat_shard(torch.nn.Parameter(torch.empty(2)))
    flat = torch.nn.Parameter(torch.empty(2))
    flat.__class__ = FlatParameter  # FSDP makes these only in a process group
    assert shims.is_flat_shard(flat)


def test_open_fake_mode(shims):
    mode = shims.open_fake_mode()
    if not shims.known:
        assert mode is None
        return
    with mode:
        assert shims.is_fake(torch.zeros(2) @ torch.zeros(2, 3))


def test_open_fake_device(shims):
    if not shims.known:
        assert shims.open_fake_device("pretend") is None
        return
    with shims.open_fake_device("cuda"):
        assert shims.is_fake(torch.empty(2, device="cuda"))
    program = (
        "import os, sys, torch\nfrom moduli._torch import open_fake_device, is_fake\n"
        "for _ in range(2):\n"
        "    with open_fake_device('pretend'):\n"
        "        p = torch.nn.Parameter(torch.empty(3, device='pretend'))\n"
        "        (g,) = torch.autograd.grad((p[:2] * torch.tensor(2.0, device='pretend')).sum(), [p])\n"
        "        assert is_fake(g) and g.device.type == 'pretend'\n"
        "        try:\n            float(g.sum())\n"
        "        except Exception as error:\n            print(type(error).__name__)\n"
        # A thread of the device may still use the interpreter, and aborts if that has ended.
        "sys.stdout.flush()\nos._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split() == ["DataDependentOutputException"] * 2


# -- the memory of tensors ---------------------------------------------------------------------------------------------


def test_find_tensor_reader(shims):
    reader = shims.find_tensor_reader()
    if not shims.known:
        assert reader is None
        return
    assert len(reader) == 7
    described = (ctypes.c_uint64 * 8)()
    tensor = torch.ones(2, 3)[1:]
    ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(reader[-1])(tensor, ctypes.addressof(described))
    assert described[0] == tensor.data_ptr()


def test_find_namespace(shims):
    class Holder:
        rate = 1.0

    space = shims.find_namespace(Holder)
    if shims.known:
        assert space["rate"] == 1.0
        Holder.rate = 2.0
        assert space["rate"] == 2.0
    else:
        assert space is None
    holder = Holder()
    holder.own = 3
    assert shims.find_namespace(holder) == {"own": 3}
    assert shims.find_namespace(object()) is None


# -- the compiler ------------------------------------------------------------------------------------------------------


def test_mark_constant(shims):
    calls = []

    @shims.mark_constant
    def read() -> int:
        calls.append(1)
        return len(calls)

    compiled = torch.compile(lambda x: x + read(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())).item() == compiled(torch.zeros(())).item() == 1


def test_keep_from_tracing(shims):
    def inner(x):
        return x + (1.0 if torch.compiler.is_compiling() else 2.0)

    def untraced(x):
        return inner(x) if torch.compiler.is_compiling() else inner(x) + 10.0

    # The mark is set on the code object, which functions made by the same line share.
    untraced.__code__ = untraced.__code__.replace(co_name=f"untraced_{shims.known}")
    shims.keep_from_tracing(untraced)
    compiled = torch.compile(lambda x: untraced(x * 1.0) * 1.0, backend="eager")
    assert compiled(torch.zeros(())).item() == (12.0 if shims.known else 1.0)


def test_can_hold_constants(shims, monkeypatch):
    newest = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    assert shims.can_hold_constants() is newest
    if not shims.known:
        monkeypatch.setattr(torch, "__version__", "2.12.1")
        assert not shims.can_hold_constants()


@pytest.mark.skipif(not moduli._torch.can_hold_constants(), reason="compiled constants need torch 2.13")
def test_register_constant_type(shims):
    class Named:
        def __init__(self, name):
            self.name = name

        def __eq__(self, other):
            return type(other) is Named and self.name == other.name

        def __hash__(self):
            return hash(self.name)

        def __fx_repr__(self):
            return f"Named({self.name!r})", {"Named": Named}

        def size(self):
            return len(self.name)

    shims.register_constant_type(Named, ("size",))
    compiled = torch.compile(lambda x, named: x + named.size(), backend="eager")
    assert compiled(torch.zeros(()), Named("abc")).item() == 3
    assert compiled(torch.zeros(()), Named("abcd")).item() == 4


# -- autograd and optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_run_backward(shims, dtype):
    x = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    for _ in range(2):
        loss = (x * x).sum()
        # A hook that changes the gradient it is given must not change the next pass.
        loss.register_hook(lambda grad: grad.mul_(2.0) and None)
        shims.run_backward(loss)
    plain = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    for _ in range(2):
        loss = (plain * plain).sum()
        loss.register_hook(lambda grad: grad.mul_(2.0) and None)
        loss.backward()
    assert torch.equal(x.grad, plain.grad)
    with pytest.raises(RuntimeError, match="does not require grad"):
        shims.run_backward(torch.ones((), dtype=dtype))


def test_is_observed(shims):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    assert shims.is_observed(optimizer) is not shims.known
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        hook = register(lambda *args: None)
        assert shims.is_observed(optimizer)
        hook.remove()
    hook = register_optimizer_step_pre_hook(lambda *args: None)
    assert shims.is_observed(optimizer)
    hook.remove()
    assert shims.is_observed(optimizer) is not shims.known


# -- nested containers -------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: object
    second: object


def test_pytree(shims):
    tree = {"a": [1, (torch.ones(2), None)], "b": Pair(2, [[], {"c": 3.0}])}
    leaves, spec = shims.pytree.tree_flatten(tree)
    assert shims.pytree.tree_unflatten(leaves, spec) == tree
    numbered = shims.pytree.tree_unflatten([f"leaf {i}" for i in range(len(leaves))], spec)
    assert isinstance(numbered["b"], Pair)
    assert shims.pytree.tree_leaves(numbered) == [f"leaf {i}" for i in range(len(leaves))]
    whole, spec = shims.pytree.tree_flatten(tree, is_leaf=lambda node: isinstance(node, tuple))
    assert [type(leaf) for leaf in whole] == [int, tuple, Pair]
    assert shims.pytree.tree_unflatten(whole, spec) == tree
    assert shims.pytree.tree_map_only(int, lambda i: -i, tree)["b"] == Pair(-2, [[], {"c": 3.0}])
    shims.pytree.register_pytree_node(type("Fresh", (), {}), lambda x: ([], None), lambda leaves, spec: None)


def test_register_collate(shims):
    class Sample:
        pass

    shims.register_collate(Sample, lambda batch, *, collate_fn_map: len(batch))
    if shims.known:
        assert torch.utils.data.default_collate([Sample(), Sample()]) == 2
    else:
        with pytest.raises(TypeError, match="Sample"):
            torch.utils.data.default_collate([Sample(), Sample()])


# -- references --------------------------------------------------------------------------------------------------------


def test_count_references(shims):
    references = [object()]
    before = shims.count_references(references[0])
    references.append(references[0])
    after = shims.count_references(references[0])
    assert after == (before + 1 if shims.known else moduli._torch.UNKNOWN)


def test_find_storage(shims):
    tensor, empty = torch.zeros(3), torch.zeros(0)
    assert shims.find_storage(tensor) == shims.find_storage(tensor[1:]) != shims.find_storage(tensor.clone())
    assert (shims.find_storage(empty) != shims.find_storage(torch.zeros(0))) == shims.known


def test_count_storage_uses(shims):
    tensor = torch.zeros(3)
    before = shims.count_storage_uses(tensor)
    view = tensor[1:]
    assert shims.count_storage_uses(view) == (before + 1 if shims.known else moduli._torch.UNKNOWN)


def test_call_batched(shims):
    seen = []

    def add(total, x, scale):
        seen.append((tuple(total.shape), tuple(x.shape)))
        return total + x * scale

    def write(total, x):
        total.add_(x)

    with torch.no_grad():
        total, x = torch.zeros(4, 3, 2), torch.ones(3, 4, 2)
        out = torch.vmap(torch.vmap(lambda t, x: shims.call_batched(add, t, x, 2.0)), (0, 1))(total, x)
        assert torch.equal(out, torch.full((4, 3, 2), 2.0))
        assert seen[-1] == ((4, 3, 2), (4, 3, 2))
        torch.vmap(lambda t: shims.call_batched(write, t, torch.ones(3, 2)) or t)(total)
        assert torch.equal(total, torch.ones(4, 3, 2))


def test_map_batched(shims):
    drawn = []

    def function(tensors):
        drawn.append(torch.rand(2))
        tensors[1].add_(1.0)
        return [tensors[0] @ tensors[0], drawn[-1] + tensors[0][0, 0] * 0]

    x, y = torch.eye(2).expand(3, 2, 2) * torch.arange(3.0).reshape(3, 1, 1), torch.zeros(3, 4)
    for _ in range(2):
        product, noise = shims.map_batched(function, [x, y])
        assert torch.equal(product, x @ x)
        assert torch.equal(noise[0], noise[1])
    assert torch.equal(y, torch.full((3, 4), 2.0))
    with pytest.raises(ZeroDivisionError):
        shims.map_batched(lambda tensors: 1 / 0, [x])
    assert not shims.in_transform()
