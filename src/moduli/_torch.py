"""The boundary to torch and the interpreter: every private name that moduli uses, and what it does without it.

This is the only file that names anything private. Each shim is one small function (or a C function under a public name),
and follows the same four rules:

* It binds the private name with `_find`, which gives None where this torch has no such name, so importing never fails.
* Where there is none it does the same by public means; where those can't tell, it gives the answer that is always safe
  ("something may be watching", "somebody else may hold it"), which costs speed and nothing else.
* Its docstring ends with a line that begins "Since": the private names, the first torch known to have them, the fallback.
* `tests/test_torch_boundary.py` has a test of its name that runs with the private name and without it.

With ``MODULI_PRIVATE=0`` in the environment no private name is found, so a program runs on the fallbacks alone.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch

__all__ = [
    "count_references",
    "count_storage_uses",
    "has_dispatch_mode",
    "has_function_mode",
    "has_saved_tensor_hooks",
    "in_transform",
    "is_wrapped",
    "mark_constant",
    "run_outside",
    "set_grad_enabled",
]

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


in_transform: Final[Callable[[], bool]] = _find("torch._C._are_functorch_transforms_active") or _in_transform
"""Whether a transform of `torch.func` (vmap, grad, jvp, functionalize) runs now, in this thread.

Since torch 2.1: `torch._C._are_functorch_transforms_active`. Fallback: an autograd.Function that transforms refuse.
"""


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


def has_dispatch_mode() -> bool:
    """Whether a mode sees every operation before it runs (fake tensors, a tracer, a counter of operations).

    Since torch 2.0: `torch._C._len_torch_dispatch_stack`. Fallback: True.
    """
    return _dispatch_modes is None or _dispatch_modes() > 0


_dispatch_modes: Final = _find("torch._C._len_torch_dispatch_stack")


def has_function_mode() -> bool:
    """Whether a `torch.overrides.TorchFunctionMode` sees every call of a torch function; a default device is one.

    Since torch 2.0: `torch._C._len_torch_function_stack`. Fallback: True.
    """
    return _function_modes is None or _function_modes() > 0


_function_modes: Final = _find("torch._C._len_torch_function_stack")


def has_saved_tensor_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` would be given what a graph keeps.

    Since torch 2.8: `torch._C._autograd._top_saved_tensors_default_hooks`. Fallback: True.
    """
    return _saved_hooks is None or _saved_hooks(True) is not None


_saved_hooks: Final = _find("torch._C._autograd._top_saved_tensors_default_hooks")


def run_outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function as at the top of a program: in no transform or mode, with gradients recorded.

    What it makes may outlive the transform or mode that is active now.

    Since torch 2.0: `torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack` and
    `torch.utils._python_dispatch._disable_current_modes`. Fallback: a thread, where none of them is active.
    """
    if _no_transforms is not None and _no_modes is not None:
        with _no_modes(), _no_transforms(), torch.inference_mode(False):
            return function(*args, **kwargs)
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, function(*args, **kwargs)))
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that asked
            outcome.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    worked, result = outcome[0]
    if not worked:
        raise result
    return result  # type: ignore[no-any-return]


_no_transforms: Final = _find("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
_no_modes: Final = _find("torch.utils._python_dispatch._disable_current_modes")


set_grad_enabled: Final[Callable[[bool], Any]] = _find("torch._C._set_grad_enabled") or torch.set_grad_enabled
"""Set the grad mode of this thread; the caller sets it back.

Since torch 2.0: `torch._C._set_grad_enabled`. Fallback: `torch.set_grad_enabled`, a context manager that starts at once.
"""


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


# -- who else holds it -------------------------------------------------------------------------------------------------


def _many(held: Any) -> int:
    return UNKNOWN


count_references: Final[Callable[[Any], int]] = _find("sys.getrefcount") or _many
"""How many references there are to an object, that of the call included.

Since CPython 3.11: `sys.getrefcount`, an implementation detail. Fallback: more than any count.
"""


def count_storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors and storages share the memory of a tensor, counted as torch counts; compare with a fresh one.

    Since torch 2.1: `torch._C._storage_Use_Count`. Fallback: more than any count.
    """
    if _uses is None:
        return UNKNOWN
    return int(_uses(tensor.untyped_storage()._cdata))


_uses: Final = _find("torch._C._storage_Use_Count")
