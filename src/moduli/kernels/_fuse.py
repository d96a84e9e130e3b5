"""`fuse`: a pointwise function as one pass over lists of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._torch import is_fake
from . import _backend, _call
from ._bound import Bound
from ._forms import Form
from ._graph import Graph, lift_numbers
from ._plan import Plans
from ._purity import Purity
from ._trace import NotPointwiseError, trace

_RESERVED = {"out", "flat", "offsets"}
_KEPT_TRACES = 4
_STATIC = (bool, str, type(None), torch.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A graph, the numbers in it (further scalars of its kernel), the values read to trace it, and its forms."""

    graph: Graph
    numbers: tuple[float, ...]
    reads: Purity
    unstable: str | None  # why it is not compiled again: a value that it reads changes too often
    forms: dict[tuple[Any, ...], Form]


class Fused:
    """A pointwise function that runs over lists of tensors in one pass. Created by `fuse`.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> axpy = kernels.fuse(lambda x, y, a: a * x + y)
        >>> axpy([torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.ones(3)], 2.0)
        [tensor([2., 2.]), tensor([3., 3., 3.])]
    """

    def __init__(
        self, fn: Callable[..., Any], inplace: tuple[str | None, ...], private: frozenset[str] = frozenset()
    ) -> None:
        self.fn = fn
        self.inplace = inplace
        self.private = private
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._signature = inspect.signature(fn)
        self.names: list[str] = []
        for name, parameter in self._signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(
                    f"{self.where} has the parameter {parameter}; a fused function names each role and scalar: "
                    "write ordinary positional parameters"
                )
            if name in _RESERVED:
                raise ValueError(f"{self.where} has a parameter {name!r}, which a fused call uses itself; rename it")
            self.names.append(name)
        for which, roles in (("inplace", inplace), ("private", sorted(private))):
            for each in roles:
                if each is not None and each not in self.names:
                    raise ValueError(f"{which} names {each!r}, but {self.where} takes {', '.join(self.names)}")
        named = [name for name in inplace if name is not None]
        if len(set(named)) != len(named):
            raise ValueError(f"inplace={inplace} names a role twice; two results can't be written to one place")
        # Replaced as a whole, never changed: threads may share the function, and a lock would not survive a fork.
        self._traces: dict[tuple[Any, ...], tuple[Trace, ...]] = {}
        self._plans = Plans()

    def __repr__(self) -> str:
        over = f", inplace={self.inplace}" if self.inplace else ""
        return f"fuse({self.name}({', '.join(self.names)}){over})"

    def __getstate__(self) -> dict[str, Any]:
        return {"fn": self.fn, "inplace": self.inplace, "private": self.private}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["fn"], state["inplace"], state["private"])  # type: ignore[misc]

    @property
    def where(self) -> str:
        """The name of the function in errors."""
        return repr(self.name)

    def __call__(
        self,
        *args: Any,
        out: Any = None,
        flat: bool = False,
        offsets: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        r"""Run the function over lists: $y_{ik} = f(x^1_{ik}, x^2_{ik}, \dots; s)$ for each tensor i and element k.

        Args:
            *args: One argument per parameter of the function: a list of tensors (a role), a number or 0-d tensor (a
                scalar, free to change at every call), or a bool, None or string (a constant: another value is
                another kernel).
            out: Existing storage for the result: a list of tensors or one vector; a tuple of those where the function
                has several results that are not in place (None in it: new storage).
            flat: Whether each new result is one vector instead of a list of tensors.
            offsets: Where each tensor begins in the vectors; one after the other by default.
            **kwargs: Arguments by name.

        Returns:
            For each value that the function returns a list of tensors (the given list, if it was written in place) or
            a vector; a tuple where it returns several, None where it returns none.

        Raises:
            NotPointwiseError: The function is not pointwise.
            ValueError: Lists differ in length or numbers of elements, or do not fit `out`.
            RuntimeError: A tensor needs a graph (grad mode is on and it requires grad).

        Example:
            >>> import torch
            >>> from moduli import kernels
            >>> between = kernels.fuse(lambda a, b, c, t: a + t * (b - c))
            >>> xs = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
            >>> between(xs, xs, [torch.zeros(2), torch.ones(1)], 0.5, flat=True)
            tensor([1.5000, 3.0000, 4.0000])
        """
        if kwargs or len(args) != len(self.names):
            args = self._arguments(args, kwargs)
        return _call.call(self, args, out, flat, offsets, self._plans)

    def bind(
        self,
        *args: Any,
        out: Any = None,
        flat: bool = False,
        offsets: Sequence[int] | None = None,
        norms: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Bound:
        """Return a call with these arguments bound; it takes the others, in order.

        The bound call references the lists and stores its own plans for them, so several of them do not affect each
        other. It detects changes inside the lists: swapped `.data`, new tensors, other shapes. If all roles that are bound
        here are private, these tensors are checked once: a caller that changes them has to bind again.

        Args:
            *args: The first arguments.
            out: As in a call.
            flat: As in a call.
            offsets: As in a call.
            norms: Scalars that are the Euclidean norm of a role, computed at each call: `{"size": "g"}`.
            **kwargs: More arguments by name.

        Example:
            >>> import torch
            >>> from moduli import kernels
            >>> weights, grads = [torch.ones(3)], [torch.ones(3)]
            >>> descend = kernels.fuse(lambda p, g, lr: p - lr * g, inplace="p").bind(weights, grads)
            >>> descend(0.25); descend(lr=0.25)
            [tensor([0.7500, 0.7500, 0.7500])]
            [tensor([0.5000, 0.5000, 0.5000])]
        """
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        return Bound(self, dict(bound), out, flat, offsets, norms or {})

    def explain(self, *args: Any, out: Any = None, flat: bool = False, **kwargs: Any) -> Any:
        """Return the form that runs for these arguments, and why; nothing is written. See `kernels.explain`.

        Example:
            >>> import torch
            >>> from moduli import kernels
            >>> double = kernels.fuse(lambda x: 2 * x)
            >>> double.explain([torch.ones(3, dtype=torch.int64)]).form
            'plain'
        """
        from ._explain import explain

        return explain(self, *args, out=out, flat=flat, **kwargs)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.where}: {error}; its parameters are {', '.join(self.names)}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def classify(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any], list[Any]]:
        """Return the mark of each argument, roles as lists, and scalars. A `whole` scalar is an int, for integer roles."""
        marks: list[Any] = []
        roles: list[Any] = []
        scalars: list[Any] = []
        for position, value in enumerate(args):
            kind = type(value)
            if kind is not list and kind is not float and kind is not int:
                if isinstance(value, _STATIC):
                    marks.append(("constant", value))
                    continue
                value = self._convert_unusual(position, value)
            if type(value) is list:
                marks.append("role")
                roles.append(value)
            else:
                marks.append("whole" if isinstance(value, int) else "scalar")
                scalars.append(value)
        return tuple(marks), roles, scalars

    def _convert_unusual(self, position: int, value: Any) -> Any:
        """Return an argument as a list, a number or a 0-d tensor on a device."""
        name = self.names[position]
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 and not value.dtype.is_complex:
                if value.requires_grad and torch.is_grad_enabled():
                    raise RuntimeError(
                        f"scalar {name!r} of {self.where} requires grad and grad mode is on, but a fused pass records "
                        "no graph; call it under torch.no_grad(), or call the function itself"
                    )
                value = value.detach()
                here = value.device.type == "cpu" and not is_fake(value) and _backend.mode() != "triton"
                return value.item() if here else value
            raise TypeError(
                f"{name!r} of {self.where} is a tensor of shape {tuple(value.shape)}; give a list of tensors, "
                f"[{name}], or a number"
            )
        if isinstance(value, float | int) or (hasattr(value, "__float__") and getattr(value, "ndim", 1) == 0):
            return float(value)
        if isinstance(value, Iterable) and not isinstance(value, dict):
            return list(value)
        raise TypeError(
            f"{name!r} of {self.where} is a {type(value).__name__}; give a list of tensors, a number, a 0-d tensor, "
            "or a bool, None or string as a constant"
        )

    def trace(self, marks: tuple[Any, ...], dtypes: tuple[torch.dtype, ...]) -> Trace:
        """Return the graph for these dtypes, and for the current values that the function reads."""
        if any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
            marks = tuple("scalar" if mark == "whole" else mark for mark in marks)
        earlier = self._traces.get((marks, dtypes), ())
        changed = None
        for each in earlier:
            changed = each.reads.find_change()
            if changed is None:
                return each
        graph, reads = trace(self.fn, self.where, marks, dtypes)
        graph, numbers = lift_numbers(self._place(graph, marks))
        alike = next((each for each in earlier if each.graph == graph), None)
        unstable = None
        if alike is None and len(earlier) >= _KEPT_TRACES:
            unstable = f"{changed}, which it reads, changes from call to call"
        result = Trace(graph, numbers, reads, unstable, {} if alike is None else alike.forms)
        if reads.problem is None:
            self._traces[marks, dtypes] = (result, *earlier)[: _KEPT_TRACES + 1]
        return result

    def _place(self, graph: Graph, marks: tuple[Any, ...]) -> Graph:
        """Return the graph with the roles that returned values overwrite."""
        count = len(graph.results)
        if self.inplace and len(self.inplace) != count:
            raise ValueError(
                f"{self.where} returns {count} values and inplace={self.inplace} names {len(self.inplace)}; "
                "give one name per value, None for a value that goes to new storage"
            )
        if not graph.outputs:
            raise NotPointwiseError(f"{self.where} returns nothing and changes none of its arguments")
        outputs, roles = list(graph.outputs), self.name_roles(marks)
        for name, (kind, at) in zip(self.inplace, graph.results, strict=False):
            if name is None:
                continue
            if name not in roles:
                raise ValueError(f"inplace names {name!r} of {self.where}, which was given as a scalar; give a list")
            role = roles.index(name)
            changed = at if kind == "role" else role
            if (kind, at) != ("role", role) and any(changed == other for _, other in graph.outputs):
                raise ValueError(
                    f"{self.where} changes {roles[changed]!r} itself, and what it returns is to overwrite "
                    f"{name!r}; do one of the two"
                )
            if kind == "output":
                outputs[at] = (outputs[at][0], role)
        return replace(graph, outputs=tuple(outputs))

    def name_roles(self, marks: Sequence[Any]) -> list[str]:
        """Return the names of the roles, in order."""
        return [name for name, mark in zip(self.names, marks, strict=True) if mark == "role"]


def fuse(
    fn: Callable[..., Any], *, inplace: str | Sequence[str | None] | None = None, private: Iterable[str] = ()
) -> Fused:
    """Return a pointwise function of tensors as one pass over lists of tensors.

    The function is ordinary Python over torch tensors, one per role, and scalars. It may return new values, or change
    its arguments in place (`p.add_(g, alpha=-lr)`), or both. It is traced once for each combination of dtypes and
    compiled; it must not depend on shapes or values in any other way than element by element.

    Args:
        fn: The function.
        inplace: For each returned value the name of the role it overwrites, or None for new storage.
        private: Names of roles whose tensors only the caller uses, such as moments of an optimizer: no graph of
            autograd refers to them, and no other code creates them. Their versions are not incremented, and they are not checked
            at every call for views that torch negates lazily. Both cost more than the arithmetic if
            tensors are small.

    Returns:
        The fused function, called with a list of tensors for each role.

    Raises:
        TypeError: The function takes `*args`, `**kwargs` or keyword-only arguments.
        ValueError: `inplace` names no parameter, or one twice.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> def momentum(p, g, m, lr, beta):
        ...     m = beta * m + g
        ...     return p - lr * m, m
        >>> step = kernels.fuse(momentum, inplace=("p", "m"))
        >>> params, grads, moments = [torch.ones(2)], [torch.ones(2)], [torch.zeros(2)]
        >>> _ = step(params, grads, moments, 0.5, 0.9)
        >>> params, moments
        ([tensor([0.5000, 0.5000])], [tensor([1., 1.])])
    """
    if not callable(fn):
        raise TypeError(f"fuse takes a function, got a {type(fn).__name__}")
    _backend.mode()
    names = () if inplace is None else (inplace,) if isinstance(inplace, str) else tuple(inplace)
    return Fused(fn, names, frozenset(private))
