"""The boundary to torch and the interpreter: every private name that moduli uses, and what it does without it.

This is the only file that names anything private. Each shim is one small function (or a C function under a public name),
and follows the same four rules:

* It binds the private name with `_find`, which gives None where this torch has no such name, so importing never fails.
* Without the private name it does the same by public means. If those can't decide, it returns the answer that is always safe
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

# An unknown count, larger than any real one: callers then treat the object as shared.
UNKNOWN: Final = 1 << 30

_HIDDEN: Final = os.environ.get("MODULI_PRIVATE", "1") == "0"


def _find(path: str) -> Any:
    """Return the object at a dotted path, or None if this torch (or interpreter) has none."""
    if _HIDDEN:
        return None
    first, *names = path.split(".")
    try:
        value: Any = importlib.import_module(first)
        dotted = first
        for name in names:
            dotted = f"{dotted}.{name}"
            value = getattr(value, name) if hasattr(value, name) else importlib.import_module(dotted)
    except ImportError:
        return None
    return value


def require_torch(version: str = torch.__version__) -> None:
    """Raise ImportError if torch is older than `OLDEST`, the first release that the tests pass with.

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


# -- transforms, modes and tracing -------------------------------------------------------------------------------------


def _in_transform() -> bool:
    """Return whether a transform runs: inside of one, applying a Function without `setup_context` raises, as documented."""
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
#: Since torch 2.1: `torch._C._are_functorch_transforms_active`. Fallback: an autograd.Function that raises in transforms.
in_transform: Final[Callable[[], bool]] = _find("torch._C._are_functorch_transforms_active") or _in_transform


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper of a transform, whose values can't be read.

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
    """Return how many transforms of `torch.func` are active, one inside the other.

    Since torch 2.0: `torch._C._functorch.peek_interpreter_stack`. Fallback: 0 outside
    of transforms, and `UNKNOWN` inside of one.
    """
    if _interpreter is not None:
        top = _interpreter()
        return 0 if top is None else int(top.level())
    return UNKNOWN if in_transform() else 0


_interpreter: Final = _find("torch._C._functorch.peek_interpreter_stack")


def batch_axis(tensor: torch.Tensor, above: int) -> int | None:
    """Return the axis of a tensor that a vmap at a level above `above` maps over; None if there is none, or it is unknown.

    Since torch 2.0: `torch._C._functorch.is_batchedtensor`, `maybe_get_level`, `maybe_get_bdim`. Fallback: None.
    """
    if _functorch is not None and _functorch.is_batchedtensor(tensor) and _functorch.maybe_get_level(tensor) > above:
        return int(_functorch.maybe_get_bdim(tensor))
    return None


_functorch: Final = _find("torch._C._functorch")


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` maps over a tensor at any level, so that it has a value for each member and none to read.

    Since torch 2.0: `torch._C._functorch.is_batchedtensor` and `get_unwrapped`. Fallback: True for any
    tensor of a transform.
    """
    if _functorch is None:
        return is_wrapped(tensor)
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def call_batched(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that treats leading axes as a batch, with the mapped axes of `torch.vmap` moved to the front.

    The function itself runs in no vmap, and is not differentiated. It returns a tensor with the batch axis in front, or None if it
    writes in place.

    Args:
        function: The function; it accepts any number of leading batch axes.
        *args: Its arguments. Tensors that a vmap maps over are unwrapped, the others expanded along the batch axis.

    Returns:
        The result as a tensor of the same vmap levels, or None.

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
    axes = [_functorch.maybe_get_bdim(arg) if depth == level else None for arg, depth in zip(args, levels, strict=True)]
    values = [_functorch.get_unwrapped(arg) if depth == level else arg for arg, depth in zip(args, levels, strict=True)]
    size = next(value.shape[axis] for value, axis in zip(values, axes, strict=True) if axis is not None)
    result = call_batched(function, *_lead_with_batch(values, axes, size))
    return None if result is None else _functorch._add_batch_dim(result, 0, level)


def map_batched(
    function: Callable[[list[torch.Tensor]], list[torch.Tensor]], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Call a function from tensors to tensors under `torch.vmap` over the first axes; all members share random numbers.

    Since torch 2.0: `torch._C._functorch._vmap_increment_nesting`, `_add_batch_dim`, `_remove_batch_dim` and
    `_vmap_decrement_nesting`, which skip the flattening of nested arguments by `torch.vmap`. Fallback: `torch.vmap`.
    """
    global _has_decompositions
    if _functorch is None or not _has_decompositions:
        _has_decompositions = True  # the first call of `torch.vmap` loads the decompositions
        return list(torch.vmap(lambda batch: function(list(batch)), randomness="same")(list(tensors)))
    size = tensors[0].shape[0]
    level = _functorch._vmap_increment_nesting(size, "same")
    try:
        out = function([_functorch._add_batch_dim(tensor, 0, level) for tensor in tensors])
        return [_functorch._remove_batch_dim(tensor, level, size, 0) for tensor in out]
    finally:
        _functorch._vmap_decrement_nesting()


_has_decompositions = False


def _lead_with_batch(values: Sequence[Any], axes: Sequence[int | None], size: int) -> list[Any]:
    """Return tensors with their batch axis first, expanded if they have none, and other values unmodified."""
    return [
        value
        if not isinstance(value, torch.Tensor)
        else value.expand(size, *value.shape)
        if axis is None
        else value.movedim(axis, 0)
        for value, axis in zip(values, axes, strict=True)
    ]


def _make_batched(function: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Return an autograd.Function whose rule for vmap calls `function` with the batch axes in front."""

    class Batched(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return function(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Store nothing: there is no backward."""

        @staticmethod
        def vmap(info: Any, axes: Any, *args: Any) -> Any:
            values = _lead_with_batch(args, axes, info.batch_size)
            result = Batched.apply(*values) if in_transform() else function(*values)  # type: ignore[no-untyped-call]
            return result, None if result is None else 0

    return Batched


def _assume_true() -> bool:
    return True


#: Whether a dispatch mode intercepts operations (fake tensors, a tracer, a counter of operations).
#:
#: Since torch 2.0: `torch._C._len_torch_dispatch_stack`. Fallback: True.
has_dispatch_mode: Final[Callable[[], int]] = _find("torch._C._len_torch_dispatch_stack") or _assume_true

#: Whether a `torch.overrides.TorchFunctionMode` intercepts calls of torch functions; a default device is one.
#:
#: Since torch 2.0: `torch._C._len_torch_function_stack`. Fallback: True.
has_function_mode: Final[Callable[[], int]] = _find("torch._C._len_torch_function_stack") or _assume_true

_saved_hooks: Final = _find("torch._C._autograd._top_saved_tensors_default_hooks")
#: Whether `torch.autograd.graph.saved_tensors_hooks` are active, which receive the tensors that a graph saves.
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
#: Since torch 2.0: `torch._C._is_any_autocast_enabled`. Fallback: the usual kinds of devices are checked one by one.
has_autocast: Final[Callable[[], bool]] = _find("torch._C._is_any_autocast_enabled") or _has_autocast


def guard_tensors(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that compares the tensors passed to it, as separate arguments, with the metadata that these have now.

    It compares types, dtypes, devices, shapes, strides and `requires_grad`, not values. It may return False under another
    mode than the present one, such as inference mode.

    Since torch 2.0: `torch._C._dynamo.guards.TensorGuards`. Fallback: by attributes.
    """
    if _tensor_guards is not None and tensors:
        sizes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
        check: Callable[..., bool] = _tensor_guards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        return check

    def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad

    descriptions = list(map(describe, tensors))
    return lambda *others: list(map(describe, others)) == descriptions


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
    """Whether operations do more than run: they are traced or transformed, or tensors may carry forward-mode tangents.

    Since torch 2.1: `torch.compiler.is_compiling`, and what `in_transform` and `in_forward_ad` use. Fallback: theirs.
    """
    return torch.compiler.is_compiling() or in_transform() or in_forward_ad()


def run_outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function outside of all active transforms and modes, with gradients recorded, and return its result.

    Use it for objects that outlive the transform or mode that is active now.

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

#: Return the handler of a signal; it is a callable if it was set in Python.
#:
#: Since torch 2.0, Python 3.2: `_signal.getsignal`, which does not convert its result to an enum. Fallback: `signal.getsignal`.
get_handler: Final[Callable[[int], Any]] = _find("_signal.getsignal") or signal.getsignal

#: Replace the handler of a signal, in the main thread.
#:
#: Since torch 2.0, Python 3.2: `_signal.signal`, a tenth of the time of its wrapper. Fallback: `signal.signal`.
set_handler: Final[Callable[[int, Any], Any]] = _find("_signal.signal") or signal.signal


def is_fake(tensor: object) -> bool:
    """Whether a tensor has a shape and a device but no data (`FakeTensorMode`).

    Since torch 2.0: `torch._subclasses.fake_tensor.FakeTensor`, looked up only if a program has imported it.
    Fallback: the name of the class.
    """
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    module = None if _HIDDEN else sys.modules.get("torch._subclasses.fake_tensor")
    kind = getattr(module, "FakeTensor", None)
    return isinstance(tensor, kind) if kind is not None else type(tensor).__name__ == "FakeTensor"


def open_fake_mode() -> Any:
    """Return a mode in which operations run on shapes and dtypes only, without data; None if torch has none.

    Since torch 2.0: `torch._subclasses.fake_tensor.FakeTensorMode`. Fallback: None; callers run on data.
    """
    kind = _find("torch._subclasses.fake_tensor.FakeTensorMode")
    return None if kind is None else kind(allow_non_fake_inputs=True)


def open_fake_device(name: str) -> Any:
    """Return a mode in which tensors on a device of this name have no data, so that reading raises; None if torch has none.

    Unlike tensors of `FakeTensorMode` on "cuda" in a build without CUDA, they can be indexed and differentiated. The name
    is registered for the rest of the process, and torch accepts only one such name: use a separate process. Names of devices
    that torch has are not registered.

    Since torch 2.13: `torch.utils.backend_registration._setup_privateuseone_for_python_backend` and
    `torch._subclasses.fake_tensor.FakeTensorMode`. Fallback: None.
    """
    setup = _find("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
    kind = _find("torch._subclasses.fake_tensor.FakeTensorMode")
    if setup is None or kind is None:
        return None
    if name in ("cuda", "xpu", "mps"):
        return kind()
    if not hasattr(torch, name):  # registering a device adds its module to `torch`
        setup(rename=name)

    # Literals become tensors without initialising the device, and a deep copy of a tensor stays in the same mode.
    return type("FakeDevice", (kind,), {"avoid_device_init": True, "__deepcopy__": lambda mode, memo: mode})()


# -- the memory of tensors ---------------------------------------------------------------------------------------------


def is_flat_shard(param: object) -> bool:
    """Whether a parameter is a flat parameter of FullyShardedDataParallel, or a shard of one.

    Since torch 2.1: the attribute `_fsdp_flattened`. Fallback: the class of flat parameters, which does not
    include the original parameters that `use_orig_params=True` exposes.
    """
    if not _HIDDEN and hasattr(param, "_fsdp_flattened"):
        return True
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(param, module.FlatParameter)


def find_tensor_reader() -> list[int] | None:
    """Return the addresses of the C functions by which compiled code reads tensors and names, or None if there are none.

    They are the interpreter's PyTuple_GetItem, PyObject_Type, Py_DecRef, PyDict_GetItem, PyObject_GetAttr and PyErr_Clear, and
    from DLPack's exchange API (a standard for array libraries) `dltensor_from_py_object_no_sync(object, DLTensor *)`. All of
    them need the GIL; the last one takes no reference.

    Since torch 2.10: `torch.Tensor.__dlpack_c_exchange_api__`, and `ctypes.pythonapi`. Fallback: None; the caller reads
    `data_ptr`, shape and strides of each tensor.
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
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    return [*(address for address in addresses if address), read] if all(addresses) else None


def find_namespace(holder: Any) -> dict[str, Any] | None:
    """Return the dictionary in which a module, a class or an object stores its attributes; None if it has none.

    A class exposes its dictionary as a read-only view; the garbage collector returns the dictionary that the view refers to.

    Since Python 3.3: `gc.get_referents` of `types.MappingProxyType`. Fallback: None; the caller reads the view.
    """
    space = getattr(holder, "__dict__", None)
    if isinstance(space, types.MappingProxyType):
        referents = [] if _HIDDEN else gc.get_referents(space)
        return referents[0] if len(referents) == 1 and type(referents[0]) is dict else None
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
    """Exclude these functions, and all that they call, from `torch.compile`.

    `torch.compiler.disable` would import the compiler, which takes longer than all of moduli.

    Args:
        *functions: The functions.
        reason: The reason that the error of `fullgraph=True` gives.

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
    member_types = dict.fromkeys(members, opaque.MemberType.USE_REAL)
    with contextlib.suppress(TypeError):  # its signature, and the classes that it accepts, have changed before
        if hasattr(opaque, "register_custom_class"):
            opaque.register_custom_class(cls, typ="constant", members=member_types)
        else:
            opaque.register_opaque_type(cls, typ="value", members=member_types)


# -- autograd and optimizers -------------------------------------------------------------------------------------------


def run_backward(loss: torch.Tensor) -> None:
    """Run `loss.backward()`; for an ordinary loss on the CPU without its checks of optional arguments.

    Since torch 2.2: `torch.autograd.graph._engine_run_backward`. Fallback: `torch.autograd.backward`.
    """
    dtype = loss.dtype
    is_plain = (
        type(loss) is torch.Tensor and loss.is_cpu and loss.dim() == 0 and dtype in (torch.float32, torch.float64)
    )
    if not is_plain or _engine is None or in_transform():
        torch.autograd.backward(loss)
        return
    one = _ones.get(dtype)
    if one is None or one._version:  # a hook may have changed it in place
        one = _ones[dtype] = torch.ones((), dtype=dtype)
    _engine((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_engine: Final = _find("torch.autograd.graph._engine_run_backward")
_ones: Final[dict[torch.dtype, torch.Tensor]] = {}


def is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook or a profiler observes the optimizer, so that `step` must go through torch's wrapper.

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
    """The functions of `torch.utils._pytree` for lists, tuples, named tuples and dictionaries, for a torch without them."""

    @classmethod
    def tree_flatten(cls, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
        """Return the leaves in order, and the structure from which `tree_unflatten` rebuilds the containers."""
        if not isinstance(tree, dict | list | tuple) or (is_leaf is not None and is_leaf(tree)):
            return [tree], None
        keys, items = (list(tree), tree.values()) if isinstance(tree, dict) else (None, tree)
        parts = [cls.tree_flatten(each, is_leaf) for each in items]
        return [leaf for leaves, _ in parts for leaf in leaves], (type(tree), keys, [spec for _, spec in parts])

    @classmethod
    def tree_unflatten(cls, leaves: Any, spec: Any) -> Any:
        """Return containers of the structure `spec` with these leaves."""
        rest = iter(leaves)
        if spec is None:
            return next(rest)
        kind, keys, parts = spec
        items = [cls.tree_unflatten(rest, part) for part in parts]
        if keys is not None:
            return kind(zip(keys, items, strict=True))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)

    @classmethod
    def tree_leaves(cls, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
        """Return the leaves in order."""
        return cls.tree_flatten(tree, is_leaf)[0]

    @classmethod
    def tree_map_only(cls, kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
        """Apply a function to the leaves of a type.

        Args:
            kind: The type, or a tuple of types.
            function: The function.
            tree: The containers.

        Returns:
            New containers, in which the other leaves are unmodified.
        """
        leaves, spec = cls.tree_flatten(tree)
        return cls.tree_unflatten([function(each) if isinstance(each, kind) else each for each in leaves], spec)

    @classmethod
    def register_pytree_node(cls, kind: type, *functions: Any, **more: Any) -> None:
        """Do nothing: other types than these containers are leaves."""


#: The module that flattens and rebuilds nested containers, with the registry to which labelled tensors are added.
#:
#: Since torch 2.0: the module `torch.utils._pytree`. Fallback: a class with the same functions for lists, tuples, named tuples
#: and dictionaries.
pytree: Final[Any] = _find("torch.utils._pytree") or _Containers


def register_collate(cls: type, function: Callable[..., Any]) -> None:
    """Have DataLoaders collate a batch of instances of `cls` by `function(batch, *, collate_fn_map)`.

    Since torch 2.0: `torch.utils.data._utils.collate.default_collate_fn_map`. Fallback: `default_collate` raises for the
    class, and a DataLoader needs a `collate_fn`.
    """
    table = _find("torch.utils.data._utils.collate.default_collate_fn_map")
    if table is not None:
        table[cls] = function


# -- reference counts --------------------------------------------------------------------------------------------------


def _assume_shared(value: Any) -> int:
    return UNKNOWN


#: Return the number of references to an object, including that of the call.
#:
#: Since CPython 3.11: `sys.getrefcount`, an implementation detail. Fallback: `UNKNOWN`.
count_references: Final[Callable[[Any], int]] = _find("sys.getrefcount") or _assume_shared


def count_storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and storages refer to the storage of a tensor; compare it with the count of a new tensor.

    Since torch 2.1: `torch._C._storage_Use_Count`. Fallback: `UNKNOWN`.
    """
    if _uses is None:
        return UNKNOWN
    return int(_uses(tensor.untyped_storage()._cdata))


_uses: Final = _find("torch._C._storage_Use_Count")


def find_storage(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors with one storage, including empty tensors, whose storage has no memory.

    Since torch 2.1: `UntypedStorage._cdata`. Fallback: the address, which is 0 for every empty storage.
    """
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() if _storage is None else _storage.__get__(storage))


_storage: Final = _find("torch.UntypedStorage._cdata")
