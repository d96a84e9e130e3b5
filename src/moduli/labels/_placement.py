"""Where the numbers live and how gradients see them: dtype, device, copies, leaves, backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..device import Device
from ._pairing import align_to_fixed
from ._tensor import RULES, Tensor, as_tensor, finish, method, wrap


@method
def to(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the tensor with another dtype or on another device, as torch's ``to``.

    Args:
        t: The tensor.
        args: A dtype, a device (also a `Device`), or a tensor to be like.
        kwargs: ``dtype``, ``device``, ``copy``, ``non_blocking``, ``memory_format``.

    Example:
        >>> import torch, moduli as mo
        >>> mo.zeros(2).to(torch.float64).dtype
        torch.float64
    """
    plain = [_unwrap(each) for each in args]
    return finish(t._data.to(*plain, **{key: _unwrap(value) for key, value in kwargs.items()}), t._axes)


def _unwrap(value: Any) -> Any:
    if isinstance(value, Device):
        return value.torch_device()
    if isinstance(value, str) and value.startswith("gpu"):
        return Device.new(value).torch_device()
    return value._data if isinstance(value, Tensor) else value


@method
def detach(t: Tensor) -> Tensor:
    """Return the same numbers without gradient history; they share memory.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(2).attach().detach().requires_grad
        False
    """
    return finish(t._data.detach(), t._axes)


@method
def clone(t: Tensor) -> Tensor:
    """Return a copy, through which gradients flow.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> t = mo.zeros(2)
        >>> t.clone().data.data_ptr() == t.data.data_ptr()
        False
    """
    return finish(t._data.clone(), t._axes)


@method
def attach(t: Tensor) -> Tensor:
    """Return a new leaf: a copy of the numbers that records gradients.

    Args:
        t: The tensor; its numbers are real or complex floating-point numbers.

    Raises:
        TypeError: If the dtype can't have gradients.

    Example:
        >>> import moduli as mo
        >>> t = mo.zeros(2).attach()
        >>> t.requires_grad, t.is_leaf
        (True, True)
    """
    if not (t._data.is_floating_point() or t._data.is_complex()):
        raise TypeError(f"a tensor of {t._data.dtype} can't have gradients; convert it with .to(torch.float32) first")
    return wrap(t._data.detach().clone().requires_grad_(), t._axes)


@method
def requires_grad_(t: Tensor, requires_grad: bool = True) -> Tensor:
    """Start or stop recording gradients for this tensor, in place.

    Args:
        t: The tensor.
        requires_grad: Whether to record.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(2).requires_grad_().requires_grad
        True
    """
    t._data.requires_grad_(requires_grad)
    return t


@method
def backward(t: Tensor, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False) -> None:
    """Compute the gradients of the leaves, as torch's ``backward``.

    Args:
        t: The tensor; without a gradient it has one element.
        gradient: The gradient with respect to this tensor; its labels are aligned.
        retain_graph: Keep the graph for another call.
        create_graph: Make the gradients differentiable.

    Example:
        >>> import moduli as mo
        >>> x = mo.tensor([1.0, 2.0], x=["a", "b"], requires_grad=True)
        >>> (2 * x).backward(mo.tensor([1.0, 10.0], x=["b", "a"]))
        >>> x.grad
        Tensor(x: a=20., b=2.)
    """
    if gradient is not None:
        gradient = as_tensor(gradient)
        gradient = align_to_fixed(t._axes, gradient._axes, gradient._data, "a gradient", t._data).expand(t._data.shape)
    torch.autograd.backward(t._data, gradient, retain_graph, create_graph)


@method
def item(t: Tensor) -> Any:
    """Return the only element as a Python number.

    Args:
        t: A tensor with one element.

    Raises:
        ValueError: If there are more elements, or none.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([2.5], "x").item()
        2.5
    """
    if t._data.numel() != 1:
        raise ValueError(
            f"item() is for one element, and this tensor of shape {tuple(t._data.shape)} has {t._data.numel()}"
        )
    return t._data.item()


@method
def tolist(t: Tensor) -> Any:
    """Return the elements as nested lists of Python numbers.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], "x").tolist()
        [1.0, 2.0]
    """
    return t._data.tolist()


@method
def numpy(t: Tensor) -> np.ndarray[Any, Any]:
    """Return the elements as a NumPy array that shares memory, as torch's ``numpy``.

    Args:
        t: The tensor, on the CPU and without gradients.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], "x").numpy()
        array([1., 2.], dtype=float32)
    """
    return t._data.numpy()


@method
def numel(t: Tensor) -> int:
    """Return the number of elements.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.zeros(2, 3).numel()
        6
    """
    return t._data.numel()


@method
def size(t: Tensor, dim: int | str | None = None) -> Any:
    """Return the size of an axis, by name or position; the whole shape without an argument.

    Args:
        t: The tensor.
        dim: The axis.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0]], "row column").size("column")
        2
    """
    return t._data.shape if dim is None else t._data.shape[t._axes.axis(dim)]


def _converter(name: str, dtype: torch.dtype) -> Any:
    def convert(t: Tensor) -> Tensor:
        return finish(t._data.to(dtype), t._axes)

    convert.__name__ = convert.__qualname__ = name
    convert.__doc__ = f"The tensor as `{dtype}`."
    return method(convert)


for _name in ("float", "double", "half", "bfloat16", "long", "int", "bool", "cfloat", "cdouble"):
    _converter(_name, getattr(torch, _name))

RULES.update({torch.numel: numel, torch.Tensor.numel: numel, torch.Tensor.to: to, torch.Tensor.item: item})
RULES[torch.is_complex] = lambda input: input._data.is_complex()
RULES[torch.is_floating_point] = lambda input: input._data.is_floating_point()
