"""The boundary to torch and the interpreter: every private name that moduli uses, and what it does without it.

This is the only file that names anything private. Each shim is one small function (or a C function under a public name),
and follows the same four rules:

* It binds the private name with `_find`, which gives None where this torch has no such name, so importing never fails.
* Where there is none it does the same by public means; where those can't tell, it gives the answer that is always safe
  ("something may be watching", "it may be shared"), which costs speed and nothing else.
* Its docstring ends with a line that begins "Since": the private names, the first torch known to have them, the fallback.
* `tests/test_torch_boundary.py` has a test of its name that runs with the private name and without it.

With ``MODULI_PRIVATE=0`` in the environment no private name is found, so a program runs on the fallbacks alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

# More than any count: what may be shared is treated as shared.
UNKNOWN: Final = 1 << 30

_HIDDEN: Final = os.environ.get("MODULI_PRIVATE", "1") == "0"


def _find(path: str) -> Any:
    """The object at a dotted path, or None where this torch (or interpreter) has none."""
    if _HIDDEN:
        return None
    first, *names = path.split(".")
    try:
        found: Any = importlib.import_module(first)
        done = first
        for name in names:
            done = f"{done}.{name}"
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(done)
    except ImportError:
        return None
    return found


def require_torch(version: str = torch.__version__) -> None:
    """Refuse a torch that is older than the tests pass with, in a sentence.

    Since torch 2.0: nothing private. Fallback: none.
    """
    if _release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"moduli needs torch {oldest} or newer, and this is torch {version}: pip install 'torch>={oldest}'"
        )


def _release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


OLDEST: Final = (2, 10)

require_torch()


# -- what torch is doing with operations -------------------------------------------------------------------------------


def _in_transform() -> bool:
    """By the documented refusal: a Function without `setup_context` can't be applied inside a transform."""
    try:
        _NoSetup.apply(torch.empty(0))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    return False


class _NoSetup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x


#: Whether a transform of `torch.func` (vmap, grad, jvp, functionalize) runs now, in this thread.
#:
#: Since torch 2.1: `torch._C._are_functorch_transforms_active`. Fallback: an autograd.Function that transforms refuse.
in_transform: Final[Callable[[], bool]] = _find("torch._C._are_functorch_transforms_active") or _in_transform


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a transform's stand-in, which has no numbers of its own to read.

    Since torch 2.0: `torch._C._functorch.is_functorch_wrapped_tensor`. Fallback: its storage can't be reached while a
    transform runs.
    """
    if _is_wrapped is not None:
        return bool(_is_wrapped(tensor))
    if not in_transform():
        return False
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return True
    return False


_is_wrapped: Final = _find("torch._C._functorch.is_functorch_wrapped_tensor")


def transform_level() -> int:
    """How many transforms of `torch.func` are active, one inside the other.

    Since torch 2.0: `torch._C._functorch.peek_interpreter_stack`. Fallback: 0 in none, and in one more than any level.
    """
    if _interpreter is not None:
        top = _interpreter()
        return 0 if top is None else int(top.level())
    return UNKNOWN if in_transform() else 0


_interpreter: Final = _find("torch._C._functorch.peek_interpreter_stack")


def batch_axis(tensor: torch.Tensor, above: int) -> int | None:
    """Which axis a vmap at a level above the given one took from a tensor; None where none did, or it is not known.

    Since torch 2.0: `torch._C._functorch.is_batchedtensor`, `maybe_get_level`, `maybe_get_bdim`. Fallback: None.
    """
    if _functorch is not None and _functorch.is_batchedtensor(tensor) and _functorch.maybe_get_level(tensor) > above:
        return int(_functorch.maybe_get_bdim(tensor))
    return None


_functorch: Final = _find("torch._C._functorch")


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a batch of `torch.vmap`, at any level, so that it has not one value to read.

    Since torch 2.0: `torch._C._functorch.is_batchedtensor` and `get_unwrapped`. Fallback: any tensor of a transform is.
    """
    if _functorch is None:
        return is_wrapped(tensor)
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def call_batched(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that treats leading axes as a batch with tensors of `torch.vmap` as such batches, in no vmap.

    Its result is a tensor with the batch in front, or None for a function that writes in place. Nothing of it is differentiated.

    Since torch 2.0: `torch._C._functorch.maybe_get_level`, `maybe_get_bdim`, `get_unwrapped` and `_add_batch_dim`. Fallback: an
    autograd.Function with a rule for vmap, which takes longer than a small product.
    """
    if _functorch is None:
        return _make_batched(function).apply(*args)  # type: ignore[no-untyped-call]
    levels = [
        _functorch.maybe_get_level(arg) if isinstance(arg, torch.Tensor) and _functorch.is_batchedtensor(arg) else 0
        for arg in args
    ]
    level = max(levels)
    if not level:
        return function(*args)
    axes = [_functorch.maybe_get_bdim(arg) if own == level else None for arg, own in zip(args, levels, strict=True)]
    values = [_functorch.get_unwrapped(arg) if own == level else arg for arg, own in zip(args, levels, strict=True)]
    size = next(value.shape[axis] for value, axis in zip(values, axes, strict=True) if axis is not None)
    result = call_batched(function, *_lead_with_batch(values, axes, size))
    return None if result is None else _functorch._add_batch_dim(result, 0, level)


def map_batched(
    function: Callable[[list[torch.Tensor]], list[torch.Tensor]], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Call a function from tensors to tensors under `torch.vmap` over the first axes; random numbers are the same for all.

    Since torch 2.0: `torch._C._functorch._vmap_increment_nesting`, `_add_batch_dim`, `_remove_batch_dim` and
    `_vmap_decrement_nesting`, which spare `torch.vmap` its taking apart of nested arguments. Fallback: `torch.vmap`.
    """
    global _has_decompositions
    if _functorch is None or not _has_decompositions:
        _has_decompositions = True  # the first call of `torch.vmap` loads them
        return list(torch.vmap(lambda given: function(list(given)), randomness="same")(list(tensors)))
    size = tensors[0].shape[0]
    level = _functorch._vmap_increment_nesting(size, "same")
    try:
        out = function([_functorch._add_batch_dim(tensor, 0, level) for tensor in tensors])
        return [_functorch._remove_batch_dim(tensor, level, size, 0) for tensor in out]
    finally:
        _functorch._vmap_decrement_nesting()


_has_decompositions = False


def _lead_with_batch(values: Sequence[Any], axes: Sequence[int | None], size: int) -> list[Any]:
    """Tensors with their batch as the first axis, repeated where they have none; anything else as it is."""
    return [
        value
        if not isinstance(value, torch.Tensor)
        else value.expand(size, *value.shape)
        if axis is None
        else value.movedim(axis, 0)
        for value, axis in zip(values, axes, strict=True)
    ]


def _make_batched(function: Callable[..., Any]) -> type[torch.autograd.Function]:
    class Batched(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return function(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Nothing is differentiated."""

        @staticmethod
        def vmap(info: Any, axes: Any, *args: Any) -> Any:
            values = _lead_with_batch(args, axes, info.batch_size)
            result = Batched.apply(*values) if in_transform() else function(*values)  # type: ignore[no-untyped-call]
            return result, None if result is None else 0

    return Batched


def _assume_true() -> bool:
    return True


#: Whether a mode sees every operation before it runs (fake tensors, a tracer, a counter of operations).
#:
#: Since torch 2.0: `torch._C._len_torch_dispatch_stack`. Fallback: True.
has_dispatch_mode: Final[Callable[[], int]] = _find("torch._C._len_torch_dispatch_stack") or _assume_true

#: Whether a `torch.overrides.TorchFunctionMode` sees every call of a torch function; a default device is one.
#:
#: Since torch 2.0: `torch._C._len_torch_function_stack`. Fallback: True.
has_function_mode: Final[Callable[[], int]] = _find("torch._C._len_torch_function_stack") or _assume_true

_saved_hooks: Final = _find("torch._C._autograd._top_saved_tensors_default_hooks")
#: Whether `torch.autograd.graph.saved_tensors_hooks` would be given what a graph keeps.
#:
#: Since torch 2.8: `torch._C._autograd._top_saved_tensors_default_hooks`. Fallback: True.
has_saved_tensor_hooks: Final[Callable[[], Any]] = _assume_true if _saved_hooks is None else partial(_saved_hooks, True)


def has_mode_beside(kind: type) -> bool:
    """Whether a `TorchFunctionMode` is active that is neither of this kind nor a default device.

    Since torch 2.2: `torch.overrides._get_current_function_mode_stack`, `torch.utils._device.DeviceContext`.
    Fallback: True.
    """
    if _mode_stack is None or _device_mode is None:
        return True
    return not all(isinstance(mode, (kind, _device_mode)) for mode in _mode_stack())


_mode_stack: Final = _find("torch.overrides._get_current_function_mode_stack")
_device_mode: Final = _find("torch.utils._device.DeviceContext")


def _has_autocast() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")))


#: Whether operations on some kind of device cast their operands.
#:
#: Since torch 2.0: `torch._C._is_any_autocast_enabled`. Fallback: the usual kinds of devices are asked one by one.
has_autocast: Final[Callable[[], bool]] = _find("torch._C._is_any_autocast_enabled") or _has_autocast


def guard_tensors(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors given to it one by one look as these do now.

    Compared are types, dtypes, devices, shapes, strides and `requires_grad`; not what the tensors hold. It may say no
    under another mode than this one, such as inference mode.

    Since torch 2.0: `torch._C._dynamo.guards.TensorGuards`. Fallback: by attributes.
    """
    if _tensor_guards is not None and tensors:
        sizes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
        check: Callable[..., bool] = _tensor_guards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        return check

    def look(tensor: torch.Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad

    looks = list(map(look, tensors))
    return lambda *others: list(map(look, others)) == looks


_tensor_guards: Final = _find("torch._C._dynamo.guards.TensorGuards")


def in_forward_ad() -> bool:
    """Whether a level of `torch.autograd.forward_ad` is open, so that tensors may carry tangents.

    Since torch 2.0: `torch.autograd.forward_ad._current_level`. Fallback: outside of a level no dual tensor can be made.
    """
    if not _HIDDEN and hasattr(forward_ad, "_current_level"):
        return forward_ad._current_level >= 0
    try:
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def is_transformed() -> bool:
    """Whether torch is doing something with operations other than running them: tracing, transforming, forward-mode tangents.

    Since torch 2.1: `torch.compiler.is_compiling`, and what `in_transform` and `in_forward_ad` use. Fallback: theirs.
    """
    return torch.compiler.is_compiling() or in_transform() or in_forward_ad()


def run_outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function as at the top of a program: in no transform or mode, with gradients recorded.

    What it makes may outlive the transform or mode that is active now.

    Since torch 2.0: `torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack` and
    `torch.utils._python_dispatch._disable_current_modes`. Fallback: a thread, where none of them is active.
    """
    if _no_transforms is not None and _no_modes is not None:
        with _no_modes(), _no_transforms(), torch.inference_mode(False):
            return function(*args, **kwargs)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()


_no_transforms: Final = _find("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
_no_modes: Final = _find("torch.utils._python_dispatch._disable_current_modes")


#: Whether hooks are registered that act on the calls of all modules.
#:
#: Since torch 2.0: `torch.nn.modules.module._has_any_global_hook`. Fallback: there may be some.
has_global_hooks: Final[Callable[[], Any]] = _find("torch.nn.modules.module._has_any_global_hook") or (lambda: True)

#: Set the grad mode of this thread; the caller sets it back.
#:
#: Since torch 2.0: `torch._C._set_grad_enabled`. Fallback: `torch.set_grad_enabled`, a context manager that starts at once.
set_grad_enabled: Final[Callable[[bool], Any]] = _find("torch._C._set_grad_enabled") or torch.set_grad_enabled

#: The handler of a signal: a callable for one of Python.
#:
#: Since torch 2.0, Python 3.2: `_signal.getsignal`, which makes no enum of its result. Fallback: `signal.getsignal`.
get_handler: Final[Callable[[int], Any]] = _find("_signal.getsignal") or signal.getsignal

#: Replace the handler of a signal, in the main thread.
#:
#: Since torch 2.0, Python 3.2: `_signal.signal`, a tenth of the time of its wrapper. Fallback: `signal.signal`.
set_handler: Final[Callable[[int, Any], Any]] = _find("_signal.signal") or signal.signal


def is_fake(tensor: object) -> bool:
    """Whether a tensor has a shape and a device but no numbers (`FakeTensorMode`).

    Since torch 2.0: `torch._subclasses.fake_tensor.FakeTensor`, asked for only where a program has loaded it.
    Fallback: the name of the class.
    """
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    module = None if _HIDDEN else sys.modules.get("torch._subclasses.fake_tensor")
    kind = getattr(module, "FakeTensor", None)
    return isinstance(tensor, kind) if kind is not None else type(tensor).__name__ == "FakeTensor"


def open_fake_mode() -> Any:
    """A mode in which operations run without numbers, on shapes and dtypes; None where torch has none.

    Since torch 2.0: `torch._subclasses.fake_tensor.FakeTensorMode`. Fallback: None; callers run with numbers.
    """
    kind = _find("torch._subclasses.fake_tensor.FakeTensorMode")
    return None if kind is None else kind(allow_non_fake_inputs=True)


def open_fake_device(name: str) -> Any:
    """A mode in which tensors on a device of this name have no numbers: reading one raises; None where torch has none.

    Unlike tensors of `FakeTensorMode` on "cuda" in a build without CUDA, they can be indexed and differentiated. The name
    is registered for the rest of the process (torch takes one such name), so processes of their own are for this. Nothing is
    registered for names that torch knows.

    Since torch 2.13: `torch.utils.backend_registration._setup_privateuseone_for_python_backend` and
    `torch._subclasses.fake_tensor.FakeTensorMode`. Fallback: None.
    """
    setup = _find("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
    kind = _find("torch._subclasses.fake_tensor.FakeTensorMode")
    if setup is None or kind is None:
        return None
    if name in ("cuda", "xpu", "mps"):
        return kind()
    if not hasattr(torch, name):  # the module of a device that is registered
        setup(rename=name)

    # Numbers that a program writes down become tensors without a device at hand; copies of tensors are in the same mode.
    return type("FakeDevice", (kind,), {"avoid_device_init": True, "__deepcopy__": lambda mode, memo: mode})()


# -- the memory of tensors ---------------------------------------------------------------------------------------------


def is_flat_shard(param: object) -> bool:
    """Whether a parameter is (a piece of) a flat parameter of FullyShardedDataParallel.

    Since torch 2.1: the attribute `_fsdp_flattened`. Fallback: the class of flat parameters, by which pieces that are shown
    under their own names (`use_orig_params=True`) are not recognised.
    """
    if not _HIDDEN and hasattr(param, "_fsdp_flattened"):
        return True
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(param, module.FlatParameter)


def find_tensor_reader() -> list[int] | None:
    """Return the addresses of the C functions by which compiled code reads tensors and names, or None where there are none.

    They are the interpreter's PyTuple_GetItem, PyObject_Type, Py_DecRef, PyDict_GetItem, PyObject_GetAttr and PyErr_Clear, and
    from DLPack's exchange API (a standard for array libraries) `dltensor_from_py_object_no_sync(object, DLTensor *)`. All of
    them need the GIL; the last one takes no reference.

    Since torch 2.10: `torch.Tensor.__dlpack_c_exchange_api__`, and `ctypes.pythonapi`. Fallback: None; the caller asks
    each tensor for its `data_ptr`, shape and strides.
    """
    capsule, api = _find("torch.Tensor.__dlpack_c_exchange_api__"), _find("ctypes.pythonapi")
    if capsule is None or api is None:
        return None
    unpack = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    try:
        table = unpack(capsule, b"dlpack_exchange_api")
    except ValueError:  # a capsule of another version has another name
        return None
    if table is None:
        return None
    # struct DLPackExchangeAPI: version (two uint32), a pointer to an older table, then the functions.
    major = ctypes.c_uint32.from_address(table).value
    read = ctypes.c_void_p.from_address(table + 8 + 4 * ctypes.sizeof(ctypes.c_void_p)).value
    if major != 1 or not read:
        return None
    functions = (
        *(api.PyTuple_GetItem, api.PyObject_Type, api.Py_DecRef),
        *(api.PyDict_GetItem, api.PyObject_GetAttr, api.PyErr_Clear),
    )
    found = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    return [*(address for address in found if address), read] if all(found) else None


def find_namespace(holder: Any) -> dict[str, Any] | None:
    """Return the dictionary in which a module, a class or an object keeps its attributes; None where it has none.

    A class shows its dictionary as a read-only view only; the collector knows what is behind the view.

    Since Python 3.3: `gc.get_referents` of `types.MappingProxyType`. Fallback: None; the caller looks through the view.
    """
    space = getattr(holder, "__dict__", None)
    if isinstance(space, types.MappingProxyType):
        behind = [] if _HIDDEN else gc.get_referents(space)
        return behind[0] if len(behind) == 1 and type(behind[0]) is dict else None
    return space if type(space) is dict else None


# -- the compiler ------------------------------------------------------------------------------------------------------


def mark_constant(function: F) -> F:
    """Have `torch.compile` call the function while it traces, and keep what it returns as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but it imports the compiler, which takes seconds.

    Since torch 2.0: the attribute `_dynamo_marked_constant`. Fallback: `torch.compiler.assume_constant_result`.
    """
    if _HIDDEN:
        return torch.compiler.assume_constant_result(function)  # type: ignore[no-any-return, no-untyped-call]
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keep_from_tracing(*functions: Any, reason: str | None = None) -> None:
    """Have `torch.compile` run these functions as they are, and all they call; with `fullgraph=True` it gives the reason.

    `torch.compiler.disable` would import the compiler, which takes longer than all of moduli.

    Since torch 2.5: the attribute `_torchdynamo_disable`; since torch 2.7 also
    `torch._C._dynamo.eval_frame.set_code_exec_strategy`, before which what they call is traced, with graph breaks, to the
    same result. Fallback: nothing is marked, and all of it is traced.
    """
    if _HIDDEN:
        return
    frames = _find("torch._C._dynamo.eval_frame")
    for function in functions:
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = reason
        if hasattr(frames, "_FrameExecStrategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def can_hold_constants() -> bool:
    """Whether `torch.compile` of this torch can treat instances of a class as constants, which labels need.

    Since torch 2.13: as `register_constant_type`. Fallback: by the number of the release.
    """
    opaque = _find("torch._library.opaque_object")
    return hasattr(opaque, "MemberType") if opaque is not None else _release(torch.__version__) >= (2, 13)


def register_constant_type(cls: type, members: tuple[str, ...]) -> None:
    """Have `torch.compile` treat instances as values: guarded by equality, the members called while it traces.

    Since torch 2.13: `torch._library.opaque_object.register_opaque_type` (2.11 has it for classes of its own only), under
    the name `register_custom_class` since 2.15. Fallback: the class is traced like any other.
    """
    opaque = _find("torch._library.opaque_object")
    if not hasattr(opaque, "MemberType"):
        return
    treated = dict.fromkeys(members, opaque.MemberType.USE_REAL)
    with contextlib.suppress(TypeError):  # how it is called, and for which classes, has changed before
        if hasattr(opaque, "register_custom_class"):
            opaque.register_custom_class(cls, typ="constant", members=treated)
        else:
            opaque.register_opaque_type(cls, typ="value", members=treated)


# -- autograd and optimizers -------------------------------------------------------------------------------------------


def run_backward(loss: torch.Tensor) -> None:
    """`loss.backward()`; for an ordinary loss on the CPU without the checks of arguments that are not given.

    Since torch 2.2: `torch.autograd.graph._engine_run_backward`. Fallback: `torch.autograd.backward`.
    """
    dtype = loss.dtype
    usual = type(loss) is torch.Tensor and loss.is_cpu and loss.dim() == 0 and dtype in (torch.float32, torch.float64)
    if not usual or _engine is None or in_transform():
        torch.autograd.backward(loss)
        return
    one = _ones.get(dtype)
    if one is None or one._version:  # a hook may have changed it in place
        one = _ones[dtype] = torch.ones((), dtype=dtype)
    _engine((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_engine: Final = _find("torch.autograd.graph._engine_run_backward")
_ones: Final[dict[torch.dtype, torch.Tensor]] = {}


def is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything would notice if `step` did not go through torch's wrapper: a hook or a profiler.

    Since torch 2.0: `torch.optim.optimizer._global_optimizer_pre_hooks` and `_global_optimizer_post_hooks`,
    `torch._C._autograd._profiler_enabled`. Fallback: True.
    """
    if _pre_hooks is None or _post_hooks is None or _profiling is None:
        return True
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _pre_hooks or _post_hooks or _profiling())


_pre_hooks: Final = _find("torch.optim.optimizer._global_optimizer_pre_hooks")
_post_hooks: Final = _find("torch.optim.optimizer._global_optimizer_post_hooks")
_profiling: Final = _find("torch._C._autograd._profiler_enabled")


# -- nested containers -------------------------------------------------------------------------------------------------


class _Containers:
    """Lists, tuples, named tuples and dictionaries taken apart and put together, for a torch without its pytrees."""

    @classmethod
    def tree_flatten(cls, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
        """The leaves in order, and what `tree_unflatten` needs to put others in their places."""
        if not isinstance(tree, dict | list | tuple) or (is_leaf is not None and is_leaf(tree)):
            return [tree], None
        keys, held = (list(tree), tree.values()) if isinstance(tree, dict) else (None, tree)
        parts = [cls.tree_flatten(each, is_leaf) for each in held]
        return [leaf for leaves, _ in parts for leaf in leaves], (type(tree), keys, [spec for _, spec in parts])

    @classmethod
    def tree_unflatten(cls, leaves: Any, spec: Any) -> Any:
        """The containers with these leaves."""
        rest = iter(leaves)
        if spec is None:
            return next(rest)
        kind, keys, parts = spec
        made = [cls.tree_unflatten(rest, part) for part in parts]
        if keys is not None:
            return kind(zip(keys, made, strict=True))
        return kind(*made) if hasattr(kind, "_fields") else kind(made)

    @classmethod
    def tree_leaves(cls, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
        """The leaves in order."""
        return cls.tree_flatten(tree, is_leaf)[0]

    @classmethod
    def tree_map_only(cls, kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
        """The containers with the function of every leaf of a type, and the others as they are."""
        leaves, spec = cls.tree_flatten(tree)
        return cls.tree_unflatten([function(each) if isinstance(each, kind) else each for each in leaves], spec)

    @classmethod
    def register_pytree_node(cls, kind: type, *functions: Any, **more: Any) -> None:
        """Nothing: there is no table to enter a type into."""


#: What takes nested containers apart and puts them together, and the table in which labelled tensors are entered.
#:
#: Since torch 2.0: the module `torch.utils._pytree`. Fallback: a class with the same functions for lists, tuples, named tuples
#: and dictionaries.
pytree: Final[Any] = _find("torch.utils._pytree") or _Containers


def register_collate(cls: type, function: Callable[..., Any]) -> None:
    """Have a DataLoader make one object of a batch of these by `function(batch, *, collate_fn_map)`.

    Since torch 2.0: `torch.utils.data._utils.collate.default_collate_fn_map`. Fallback: `default_collate` refuses the class,
    and a `collate_fn` has to be given.
    """
    table = _find("torch.utils.data._utils.collate.default_collate_fn_map")
    if table is not None:
        table[cls] = function


# -- who else holds it -------------------------------------------------------------------------------------------------


def _assume_shared(held: Any) -> int:
    return UNKNOWN


#: How many references there are to an object, that of the call included.
#:
#: Since CPython 3.11: `sys.getrefcount`, an implementation detail. Fallback: more than any count.
count_references: Final[Callable[[Any], int]] = _find("sys.getrefcount") or _assume_shared


def count_storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors and storages share the memory of a tensor, counted as torch counts; compare with a fresh one.

    Since torch 2.1: `torch._C._storage_Use_Count`. Fallback: more than any count.
    """
    if _uses is None:
        return UNKNOWN
    return int(_uses(tensor.untyped_storage()._cdata))


_uses: Final = _find("torch._C._storage_Use_Count")


def find_storage(tensor: torch.Tensor) -> int:
    """A number that tensors have in common if they share their memory, also where there is none, as of empty tensors.

    Since torch 2.1: `UntypedStorage._cdata`. Fallback: the address, which is 0 for every empty storage.
    """
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() if _storage is None else _storage.__get__(storage))


_storage: Final = _find("torch.UntypedStorage._cdata")
