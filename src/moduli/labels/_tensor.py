"""Tensor: torch data plus one Space per axis.

This file holds what a Tensor *is*: its two slots, how it is made, what it reports of itself, and how Python, NumPy, copy
and pickle see it. What can be *done* with it lives in the files beside this one, one idea each; a function marked with
`method` there becomes a method here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from .._torch import in_transform, mark_constant
from ..device import Device, DeviceBounded, DeviceLike
from ._axes import SCALAR, Axes, axes_of, cache_by_axes, make_unnamed
from ._space import Space

if TYPE_CHECKING:
    from ._methods import Methods
else:

    class Methods:
        """Where the functions marked with `method` are declared for type checkers."""

        __slots__ = ()


F = TypeVar("F", bound=Callable[..., Any])

_new: Final = object.__new__


class AmbiguousTruthError(ValueError, RuntimeError):
    """The truth value of a tensor with other than one element was asked for.

    It is a `RuntimeError`, as in torch, and a `ValueError`, as in NumPy.

    Example:
        >>> import moduli as mo
        >>> try:
        ...     bool(mo.zeros(2) == mo.zeros(2))
        ... except RuntimeError as error:
        ...     print(error)
        the truth value of a Tensor with 2 elements is ambiguous; use .all(), .any(), or mo.equal(a, b)
    """


class Tensor(Methods):
    """A `torch.Tensor` together with one `Space` per axis.

    It behaves as torch's tensor does, except that axes know their names and positions know their labels: operands are
    paired by name and by label, never by accident of order or size. Gradients, devices and dtypes are those of the data.

    Args:
        data: The numbers. A torch tensor is kept as it is (no copy); anything else goes through `torch.as_tensor`.
        dims: One Space per axis (a lone Space will do for one axis), whose sizes are those of the data.

    Raises:
        ValueError: If the number of Spaces or one of their sizes does not fit the data, or two have the same name.
        TypeError: If dims holds something else than Spaces.

    Example:
        >>> import torch
        >>> from moduli.labels import Space, Tensor
        >>> t = Tensor(torch.eye(2), (Space(2, name="row"), Space(["a", "b"], name="column")))
        >>> t.names, t.shape
        (('row', 'column'), torch.Size([2, 2]))
        >>> t.sum("row")
        Tensor(column: a=1., b=1.)
    """

    __slots__ = ("__weakref__", "_axes", "_data")

    _data: torch.Tensor
    _axes: Axes

    # NumPy's operators stand back, so that `array * tensor` reaches our reflected operator.
    __array_ufunc__: None = None
    __hash__ = object.__hash__

    def __init__(self, data: Any, dims: Space | Iterable[Space]) -> None:
        if isinstance(data, Tensor):
            raise TypeError("the data is labelled already; use t.data, t.rename(...) or t.relabel(...)")
        if not isinstance(data, torch.Tensor):
            data = torch.as_tensor(data)
        spaces = (dims,) if isinstance(dims, Space) else tuple(dims)
        # Anything may be remembered on some Axes; those of a scalar always exist.
        self._axes = _fit_axes(SCALAR, spaces, tuple(data.shape))
        self._data = data

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The plain torch tensor, with its gradient history; not a copy.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2).data
            tensor([0., 0.])
        """
        return self._data

    @property
    def dims(self) -> tuple[Space, ...]:
        """One Space per axis.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(mo.Space(2, name="row"), mo.Space("ab".split())).dims
            (Space(2, name='row'), Space(['ab']))
        """
        return _dims(self._axes, tuple(self._data.shape))

    @property
    def names(self) -> tuple[str | None, ...]:
        """The name of each axis, None where it has none.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([[1.0]], "row column").names
            ('row', 'column')
        """
        return self._axes.names

    @property
    def shape(self) -> torch.Size:
        """The size of each axis.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2, 3).shape
            torch.Size([2, 3])
        """
        return self._data.shape

    @property
    def sizes(self) -> dict[str | None, int]:
        """The size of each named axis, by name.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([[1.0, 2.0]], "row column").sizes
            {'row': 1, 'column': 2}
        """
        return {n: s for n, s in zip(self._axes.names, self._data.shape, strict=True) if n is not None}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the data.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2).dtype
            torch.float32
        """
        return self._data.dtype

    @property
    def device(self) -> Device:
        """Where the data lives, as a `Device`; it equals the `torch.device` it stands for.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2).device == torch.device("cpu")
            True
        """
        return Device.new(self._data.device)

    @property
    def ndim(self) -> int:
        """The number of axes.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2, 3).ndim
            2
        """
        return self._data.ndim

    @property
    def T(self) -> Tensor:
        """The matrix with its two axes exchanged, as ``transpose(-2, -1)``.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([[1.0, 2.0]], "row column").T.names
            ('column', 'row')
        """
        return self.transpose(-2, -1)

    # -- gradients -------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for the data.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2).attach().requires_grad
            True
        """
        return self._data.requires_grad

    @property
    def _is_param(self) -> bool:
        """Whether torch takes it for a parameter; `nn.Parameter(tensor)` sets it."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        raise TypeError(
            "torch.nn.Parameter takes plain tensors; a labelled tensor that requires gradients becomes a parameter when it is "
            "assigned to an attribute of a moduli.Module, or put into a moduli.nn.TensorList or TensorDict"
        )

    @property
    def grad(self) -> Tensor | None:
        """The gradient with the same axes, or None.

        Example:
            >>> import moduli as mo
            >>> t = mo.tensor([1.0, 2.0], x=["a", "b"], requires_grad=True)
            >>> (t * t).sum().backward()
            >>> t.grad
            Tensor(x: a=2., b=4.)
        """
        grad = self._data.grad
        return None if grad is None else wrap(grad, self._axes)

    @property
    def is_leaf(self) -> bool:
        """Whether the data is a leaf of the gradient graph.

        Example:
            >>> import moduli as mo
            >>> (mo.zeros(2).attach() + 1).is_leaf
            False
        """
        return self._data.is_leaf

    # -- Python's view ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if not self._data.ndim:
            raise TypeError("len() of a tensor without axes")
        return len(self._data)

    def __bool__(self) -> bool:
        count = self._data.numel()
        if count != 1:
            raise AmbiguousTruthError(
                f"the truth value of a Tensor with {count} elements is ambiguous; use .all(), .any(), or mo.equal(a, b)"
            )
        return bool(self._data)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return self._data.__index__()

    def __iter__(self) -> Iterator[Tensor]:
        if not self._data.ndim:
            raise TypeError("can't iterate over a tensor without axes")
        return (self[i] for i in range(len(self._data)))

    def __contains__(self, value: object) -> bool:
        return bool(torch.eq(self._data, value._data if isinstance(value, Tensor) else value).any())  # type: ignore[call-overload]

    def __repr__(self) -> str:
        from ._repr import text

        return text(self)

    def _repr_html_(self) -> str:
        from ._repr import html

        return html(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self._data.ndim else object.__format__(self, spec)

    # -- copies ----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self) is Tensor:
            return wrap, (self._data, self._axes)
        return wrap, (self._data, self._axes, type(self)), getattr(self, "__dict__", None)

    # -- NumPy and torch -------------------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        data = self._data if self._data.device.type == "cpu" else self._data.cpu()
        # A conjugate or negative view has to be computed for NumPy; gradients are refused by torch in its own words.
        array = data.resolve_conj().resolve_neg().numpy()
        # "Only if needed" is `copy=None` since NumPy 2, and `asarray` in all of them.
        return np.asarray(array, dtype=dtype) if copy is None else np.array(array, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if len(types) > 1 and not all(issubclass(kind, (Tensor, torch.Tensor)) for kind in types):
            return NotImplemented  # another kind of tensor may know what to do with ours
        rule = None if is_dynamo_compiling() else RULES.get(func)
        if rule is None:
            rule = SCALAR.run(_find_rule, func)
        if not kwargs:
            return rule(*args)
        options = dict(kwargs)
        refuse_out(func, options)
        return rule(*_normalize_arguments(args, options), **options)

    def to_device(self, device: DeviceLike) -> Tensor:
        """A copy on another device.

        Args:
            device: Where to.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2).to_device(mo.Device("cpu")).device
            Device('cpu')
        """
        return wrap(self._data.to(Device.new(device).torch_device(), copy=True), self._axes)

    def cpu(self) -> Tensor:
        """A copy on the CPU.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2).cpu().device
            Device('cpu')
        """
        return self.to_device(Device("cpu"))

    def gpu(self, index: int | None = None) -> Tensor:
        """A copy on a gpu.

        Args:
            index: Which gpu; None is the one torch currently uses.

        Raises:
            RuntimeError: If this machine has no such gpu.

        Example:
            >>> import moduli as mo
            >>> if torch.cuda.is_available():
            ...     print(mo.zeros(2).gpu().device.name)
        """
        if index is None and torch.cuda.is_available():
            index = torch.cuda.current_device()
        return self.to_device(Device("gpu", index))


# A virtual subclass: a metaclass would make every isinstance check of an operand slower.
DeviceBounded.register(Tensor)

RULES: Final[dict[Callable[..., Any], Callable[..., Any]]] = {}
"""What each torch function does to a labelled tensor; filled by the files that know."""


def _normalize_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The arguments in one spelling: torch lets the first be named, and an axis be called dim or axis."""
    if "axis" in kwargs:
        kwargs["dim"] = kwargs.pop("axis")
    if not args and "input" in kwargs:
        return (kwargs.pop("input"),)
    return args


def refuse_out(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Labelled results are made, not written into storage that has no labels."""
    if options.pop("out", None) is not None:
        raise TypeError(
            f"{getattr(function, '__name__', function)} of labelled tensors takes no out=; write into t.data"
        )


def _find_rule(anchor: Axes, func: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a torch function; found at trace time by compiled code, so that it does not guard the whole table."""
    from torch.overrides import resolve_name

    from ._elementwise import derive_rule

    rule = RULES.get(func) or derive_rule(func)
    if rule is None:
        name = resolve_name(func) or getattr(func, "__qualname__", None) or repr(func)
        raise TypeError(
            f"{name} has no rule for labelled tensors, so it can't say what becomes of the axes; "
            "apply it to t.data and label the result with mo.tensor or moduli.Tensor(data, dims)"
        )
    RULES[func] = rule
    return rule


def method(function: F) -> F:
    """Make a function a method of Tensor under its own name; `_methods.py` declares it for type checkers."""
    setattr(Tensor, function.__name__, function)
    return function


def wrap(data: torch.Tensor, axes: Axes, cls: type[Tensor] = Tensor) -> Tensor:
    """A Tensor, perhaps of a user's class, from parts that are known to fit. Nothing is checked, no `__init__` is run."""
    made = _new(cls)
    made._data = data
    made._axes = axes
    return made


def wrap_like(t: Tensor, data: torch.Tensor, axes: Axes) -> Tensor:
    """`wrap` with the class of another Tensor, and what its instances hold besides data and axes."""
    made = wrap(data, axes, type(t))
    if hasattr(t, "__dict__"):
        made.__dict__.update(t.__dict__)
    return made


def finish(data: torch.Tensor, axes: Axes) -> Tensor:
    """`wrap` for results that may have no axes.

    Function transforms (`torch.func.grad`) insist on a plain scalar, and a tensor without axes has no labels to lose:
    inside one, such a result is given as torch's own tensor.
    """
    if axes is SCALAR and _in_transform():
        return data  # type: ignore[return-value]
    made = _new(Tensor)
    made._data = data
    made._axes = axes
    return made


def _in_transform() -> bool:
    return in_transform()


# The transform is known at trace time, and torch.compile can't look into the interpreter stack itself.
mark_constant(_in_transform)


def as_tensor(value: Any) -> Tensor:
    """A Tensor as it is; anything else with positional, unnamed axes."""
    if isinstance(value, Tensor):
        return value
    data = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    return wrap(data, make_unnamed(data.ndim))


@cache_by_axes
def _dims(axes: Axes, shape: tuple[int, ...]) -> tuple[Space, ...]:
    return axes.dims(shape)


@cache_by_axes
def _fit_axes(anchor: Axes, spaces: tuple[Space, ...], shape: tuple[int, ...]) -> Axes:
    """The Axes of Spaces whose number and sizes are those of the data; refuse others."""
    if len(shape) != len(spaces):
        raise ValueError(
            f"data of shape {tuple(shape)} has {len(shape)} axes, but {len(spaces)} spaces were given: {spaces}"
        )
    axes = axes_of(spaces)
    for axis, (size, space) in enumerate(zip(shape, spaces, strict=True)):
        if len(space) != size:
            called = f"axis {axis}" if space.name is None else f"axis {axis} ({space.name!r})"
            raise ValueError(f"{called} of the data has size {size}, but its space has {len(space)} labels: {space!r}")
    return axes
