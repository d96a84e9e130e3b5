"""Links that are written as functions of the update, what is remembered of it, and settings.

What they remember can pass through links of its own: the `*_tfm` arguments.
A link's settings are collected from its arguments when it is made, and checked by tables of `_checks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..optim import Across, Module, Objective, TensorTransform, as_real, restore_complex
from ..optim.module import ProjectedBuffer

Tensors = list[Tensor]
States = list[dict[str, Any]]
Settings = Sequence[Mapping[str, Any]]

_OPTIONS = ("inner", "concat_params", "update_freq")


class HandOn:
    """A link whose constructor hands its `**settings` on to that of its base, and shows them as arguments of its own."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        own = inspect.signature(cls.__init__)
        mine = {key: p for key, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        base = next(kind for kind in cls.__mro__[1:] if "__init__" in vars(kind))
        if "__init__" in vars(cls) and len(mine) < len(own.parameters) and issubclass(base, HandOn):
            known = inspect.signature(base.__init__).parameters
            shown = {key: p for key, p in known.items() if p.kind is p.KEYWORD_ONLY} | mine
            signature = own.replace(parameters=sorted(shown.values(), key=lambda p: p.kind))
            cls.__init__.__signature__ = signature  # type: ignore[attr-defined]


class UpdateTransform(TensorTransform):
    """A tensor transform that does not need the loss: `transform` is its hook, or `transform_at` with the parameter.

    Args:
        given: The settings; usually the arguments of the link as they are, `locals()`.
        **options: Those of `TensorTransform`; "inner", "concat_params" and "update_freq" are found in `given`, too.

    Attributes:
        ranges: The arguments that a check of `_checks` is for, by check; those of the bases hold, too.
    """

    ranges: ClassVar[Ranges] = {}

    def __init__(self, given: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = check_settings(self, given or {})
        options |= {key: settings.pop(key) for key in _OPTIONS if key in settings}
        super().__init__(settings, **options)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        """Transform one tensor (in place or not) and return it."""
        raise TypeError(f"{type(self).__name__} does not say how to transform the update")

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        """Transform one tensor, given its parameter and, where the link asks for it, the gradient."""
        return self.transform(tensor, state, setting)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        """`transform_at`."""
        return self.transform_at(tensor, param, grad, state, setting)


class BufferTransform(UpdateTransform):
    """An `UpdateTransform` that remembers: `begin` fills the state of a parameter, `learn` changes it.

    Its buffers can pass through links of their own before they are used. Such arguments are named in `tfms`, each with the
    state it is for (the first of these that there is). The links see a copy of the buffer in place of the update, so what is
    remembered is not changed. They learn where this link is applied, as `inner` does.

    Args:
        given: The settings, and the links that are named in `tfms`; usually `locals()`.
        **options: Those of `UpdateTransform`.

    Attributes:
        buffers: States that are tensors like the update and start at zero, each with how it follows a change of the basis
            (see `add_projected_keys`; None for not at all).
        tfms: Arguments that are links, each with the states that it is for.
    """

    buffers: ClassVar[Mapping[str, ProjectedBuffer | None]] = {}
    tfms: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, given: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = dict(given or {})
        children = {key: settings.pop(key) for key in self.tfms}
        super().__init__(settings, **options)
        for key, links in children.items():
            self.set_child(key, links)
        for name, kind in self.buffers.items():
            if kind is not None:
                self.add_projected_keys(kind, name)

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        """Fill the state of one parameter, besides the buffers."""

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        """Learn from one tensor; change `state`, not `tensor`."""

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Zeros for the buffers, then `begin`."""
        for name in self.buffers:
            state[name] = torch.zeros_like(tensor)
        self.begin(tensor, state, setting)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """`learn`."""
        self.learn(tensor, state, setting)

    def get_applied_states(self, objective: Objective, kept: list[int], states: States) -> States:
        """Copies of the states, with what the links make of the buffers."""
        if not any(key in self.children for key in self.tfms):
            return states
        rows = [dict(row) for row in states]
        own = [objective.params[i] for i in kept]
        for key, names in self.tfms.items():
            name = next((name for name in names if name in rows[0]), None)
            if key in self.children and name is not None:
                found = transform_buffers(self, key, [row[name] for row in rows], own, objective)
                for row, buffer in zip(rows, found, strict=True):
                    row[name] = buffer
        return rows


class MatrixTransform(BufferTransform):
    """A `BufferTransform` that treats each tensor as a matrix, whole."""

    members = "batched"
    across = Across.MATRICES
    uses_params = False


class ListTransform(BufferTransform):
    """A `BufferTransform` that learns from all tensors together (`learn_all`), or transforms them so (`transform_all`)."""

    def learn_all(self, tensors: Tensors, states: States, settings: Settings) -> None:
        """Learn from all tensors; change `states`, not `tensors`."""
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            self.learn(tensor, state, setting)

    def transform_all(self, tensors: Tensors, states: States, settings: Settings) -> Sequence[Tensor]:
        """Transform all tensors and return them."""
        return [self.transform(*row) for row in zip(tensors, states, settings, strict=True)]

    def multi_tensor_update(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: Settings,
    ) -> None:
        """`learn_all`."""
        self.learn_all(tensors, states, settings)

    def multi_tensor_apply(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: Settings,
    ) -> Sequence[Tensor]:
        """`transform_all`."""
        return self.transform_all(tensors, states, settings)


def transform_buffers(
    link: Module, key: str, buffers: Sequence[Tensor], params: Sequence[Tensor], objective: Objective
) -> list[Tensor]:
    """What the child makes of copies of these buffers, which stay as they are; without the child, the buffers."""
    if key not in link.children:
        return list(buffers)
    # Pointwise links keep complex numbers as pairs, but a child sees tensors like the parameters.
    given = [
        restore_complex(buffer.clone(), param) if buffer.shape == as_real(param.detach()).shape else buffer.clone()
        for buffer, param in zip(buffers, params, strict=True)
    ]
    shaped = all(tensor.shape == param.shape for tensor, param in zip(given, params, strict=True))
    out = link.inner_step_tensors(key, given, clone=False, params=params if shaped else None, objective=objective)
    return [
        as_real(tensor) if tensor.is_complex() and not buffer.is_complex() else tensor
        for tensor, buffer in zip(out, buffers, strict=True)
    ]


def publish_links(namespace: dict[str, Any]) -> None:
    """Set `__all__` in a family's `globals()`: the links that it defines, which are its classes without an underscore."""
    family = namespace["__name__"]
    links = {name: value for name, value in namespace.items() if isinstance(value, type) and issubclass(value, Module)}
    # Type checkers see no `__all__`, and so all that the family's files define.
    namespace["__all__"] = sorted(name for name, link in links.items() if name[0] != "_" and family in link.__module__)


Ranges = Mapping[Callable[..., None], tuple[str, ...]]
"""The arguments of a link that a check is for, by check."""


def collect_settings(arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The arguments of a constructor by name, but for `others`, which are no settings.

    Args:
        arguments: The constructor's `locals()`, before it has variables of its own.
        *others: Names to leave out.
    """
    return {key: value for key, value in arguments.items() if key not in ("self", "__class__", *others)}


def check_settings(link: Any, arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """`collect_settings`, after the checks in the tables `ranges` of the link and its bases, of those that are given."""
    for kind in type(link).__mro__:
        for check, keys in vars(kind).get("ranges", {}).items():
            check(type(link).__name__, **{key: arguments[key] for key in keys if key in arguments})
    return collect_settings(arguments, *others)
