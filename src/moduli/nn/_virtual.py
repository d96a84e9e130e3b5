"""The `virtual` decorator: an attribute that is derived, not stored."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from moduli.labels import Tensor

from ._scope import compute, reuse, scopes

T = TypeVar("T")


class virtual(Generic[T]):
    """A tensor attribute computed from other attributes: the decorated method is called, its result *is* the attribute.

    It is computed when it is read, from the current values of its sources: gradients reach the sources, it
    has their dtype and device, and checkpoints do not contain it. The sources may belong to other modules.
    Inside `with cached():` reads share one computation.

    With a `right_inverse` the attribute can be assigned: that method receives the value and sets the sources.

    Args:
        function: The method. It takes `self` and returns a tensor, plain or labelled.

    Example:
        >>> import torch
        >>> from moduli.nn import Module, virtual
        >>> class Positive(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.raw = torch.nn.Parameter(torch.zeros(2))
        ...     @virtual
        ...     def scale(self):
        ...         return self.raw.exp()
        ...     @scale.right_inverse
        ...     def scale(self, value):
        ...         return {"raw": value.log()}
        >>> m = Positive()
        >>> m.scale
        tensor([1., 1.], grad_fn=<ExpBackward0>)
        >>> m.scale = torch.tensor([2.0, 3.0])
        >>> m.raw.exp().tolist() == m.scale.tolist()
        True
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        if not callable(function):
            raise TypeError(f"virtual decorates a method, not {function!r}")
        self._function = function
        self._inverse: Callable[[Any, Any], Mapping[str, Any] | None] | None = None
        self._name: str | None = None
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __set_name__(self, owner: type, name: str) -> None:
        # The same object is named twice if its right_inverse has another name than the method: the first name is used.
        if self._name is None:
            self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: nn.Module, owner: type | None = None) -> T: ...
    def __get__(self, instance: nn.Module | None, owner: type | None = None) -> Self | T:
        if instance is None:
            return self
        if is_dynamo_compiling():
            return self._function(instance)
        name, function = self._name, self._function
        if name is None or not isinstance(instance, nn.Module):
            raise TypeError("a virtual tensor is declared in the body of a class derived from torch.nn.Module")
        if scopes:
            return reuse(instance, self, name, function)  # type: ignore[no-any-return]
        return compute(instance, self, name, function)  # type: ignore[no-any-return]

    def __set__(self, instance: nn.Module, value: Any) -> None:
        inverse = self._inverse
        if inverse is None:
            raise AttributeError(
                f"{type(instance).__name__}.{self._name} is derived and cannot be assigned; assign its sources, or "
                f"define how with @{self._name}.right_inverse"
            )
        with torch.no_grad():
            sources = inverse(instance, value)
            if sources is not None:
                _write(instance, self._name, sources)

    def __delete__(self, instance: nn.Module) -> None:
        raise AttributeError(f"{type(instance).__name__}.{self._name} is derived: there is nothing to delete")

    def right_inverse(self, function: Callable[[Any, Any], Mapping[str, Any] | None]) -> Self:
        """Decorate the method that makes the attribute assignable.

        Args:
            function: Called `(self, value)` without recording gradients. It returns the new values of the sources by
                attribute name, which are then written in place, all or none; or it sets them itself and
                returns None.

        Example:
            >>> import torch
            >>> from moduli.nn import Module, virtual
            >>> class Halved(Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.a = torch.nn.Parameter(torch.ones(2))
            ...     @virtual
            ...     def weight(self):
            ...         return self.a / 2
            ...     @weight.right_inverse
            ...     def weight(self, value):
            ...         return {"a": 2 * value}
            >>> m = Halved()
            >>> m.weight = torch.tensor([1.0, 2.0])
            >>> m.a.tolist()
            [2.0, 4.0]
        """
        # Before `__set_name__` this object belongs to one class body; later, a subclass must not modify its base's object.
        target = self if self._name is None else type(self)(self._function)
        target._inverse = function
        return target


def _write(instance: nn.Module, name: str | None, sources: Mapping[str, Any]) -> None:
    """Write new values into the sources of a virtual tensor: first check all of them, then copy."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    inverse = f"the right inverse of {type(instance).__name__}.{name}"
    if not isinstance(sources, Mapping):
        raise TypeError(
            f"{inverse} returns new values by the names of its sources, or None, not a {type(sources).__name__}"
        )
    for source, value in sources.items():
        target = attrgetter(source)(instance)
        if isinstance(target, Tensor) and isinstance(value, Tensor):
            value = value.align_to(target.dims)
        target, value = (each.data if isinstance(each, Tensor) else each for each in (target, value))
        if not isinstance(target, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{inverse} gives {source!r}, a {type(target).__name__}, a {type(value).__name__}; it takes tensors"
            )
        if target.shape != value.shape:
            raise ValueError(
                f"{inverse} gives {source!r} the shape {tuple(value.shape)}, but it has the shape {tuple(target.shape)}"
            )
        pairs.append((target, value))
    # Values may be views of the sources that are about to be written.
    for target, value in [(target, value.clone()) for target, value in pairs]:
        target.copy_(value)
