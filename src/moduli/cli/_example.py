"""A parser for the arguments of a forward in a command; nothing in them is run."""

import ast
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAKERS = ("arange", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
"""The functions of torch that an example may call, with numbers."""


class ExampleError(ValueError):
    """An example that can't be read."""


def read_example(text: str) -> tuple[Any, ...]:
    """Return the arguments of a forward: tensors of a file (safetensors, .npy), or `torch.zeros(1, 784)` and its like.

    Args:
        text: The name of a file, a call of one of `MAKERS` with numbers, or several of them with commas between.

    Raises:
        ExampleError: If it is none of these.

    Example:
        >>> [each.shape for each in read_example("torch.zeros(1, 784), torch.randint(10, (2, 3))")]
        [torch.Size([1, 784]), torch.Size([2, 3])]
    """
    if Path(text).is_file():
        return _read_file(Path(text))
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ExampleError(f"{text!r} is no file and can't be read; write torch.zeros(1, 784)") from error
    parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    torch.manual_seed(0)
    return tuple(_make_tensor(part) for part in parts)


def _read_file(path: Path) -> tuple[Any, ...]:
    """Return the array of a .npy file, or the tensors of a safetensors file."""
    if path.suffix == ".npy":
        import numpy as np

        return (torch.from_numpy(np.load(path, allow_pickle=False)),)
    from .. import io

    return tuple(io.TensorFiles(path).values())


def _make_tensor(node: ast.expr) -> Tensor:
    """Return the tensor of a call of one of `MAKERS`; raise ExampleError for anything else."""
    is_call = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    )
    if not is_call or node.func.value.id != "torch" or node.func.attr not in MAKERS:  # type: ignore[attr-defined]
        raise ExampleError(
            f"{ast.unparse(node)} is not known; an example is a file, or torch.NAME(numbers) with {', '.join(MAKERS)}"
        )
    call: Any = node
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        options = {each.arg: _read_option(each.value) for each in call.keywords}
        tensor: Tensor = getattr(torch, call.func.attr)(*args, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ExampleError(f"{ast.unparse(node)}: {error}") from error
    return tensor


def _read_option(node: ast.expr) -> Any:
    """Return a number, or a dtype as `torch.float64`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        dtype = getattr(torch, node.attr, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return ast.literal_eval(node)
