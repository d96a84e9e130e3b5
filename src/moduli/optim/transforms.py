"""The bases that links are written from: functions of the update, of state and of settings.

* `DeclaredLink`: a link whose constructor type checkers know, too.
* `UpdateTransform`: a function of one tensor. `BufferTransform`: one with state. `MatrixTransform`: of each tensor as a matrix.
  `ListTransform`: of all tensors together.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import torch
from torch import Tensor

from ._needs import Across
from ._vectors import as_real, restore_complex
from .declared import Ranges, make_constructor
from .matrix_view import MatrixLink
from .module import Module, ProjectedBuffer
from .objective import Objective
from .transform import TensorTransform

__all__ = [
    "BufferTransform",
    "DeclaredLink",
    "ListTransform",
    "MatrixTransform",
    "UpdateTransform",
    "transform_buffers",
]

Tensors = list[Tensor]
"""The tensors that a hook sees, one for each parameter."""
States = list[dict[str, Any]]
"""Their states."""
SettingsList = Sequence[Mapping[str, Any]]
"""Their settings."""


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class DeclaredLink(Module):
    """A link whose constructor type checkers, too, read off the annotated attributes of its class.

    At run time that holds for every link (see `moduli.optim.declared`). This class only marks it, for links whose base
    is `Module`, `Transform` or `Reformulation`: `class Mine(DeclaredLink, Transform)`.

    Example:
        >>> from moduli.optim import DeclaredLink
        >>> class Halve(DeclaredLink):
        ...     attributes = ("most",)
        ...     most: int = 20
        ...     def apply(self, objective):
        ...         objective.updates = [update / 2**self.most for update in objective.get_updates()]
        ...         return objective
        >>> Halve().most, Halve(most=3).most
        (20, 3)

    Attributes:
        ranges: The arguments that a check of `moduli.optim.ranges` is for, by check; those of the bases hold, too.
        attributes: Arguments that become attributes of the link, not settings; those of the bases do, too.
    """

    ranges: ClassVar[Ranges] = {}
    attributes: ClassVar[tuple[str, ...]] = ()

    if not TYPE_CHECKING:
        __init__ = make_constructor(
            inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
        )


class UpdateTransform(DeclaredLink, TensorTransform):
    """A tensor transform that does not need the loss: `transform` is its hook, or `transform_at` with the parameter."""

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

    Attributes:
        buffers: States that are tensors like the update and start at zero, each with how it follows a change of the basis
            (see `add_projected_keys`; None for not at all).
        projects: More states that follow a change of the basis, by how they do.
        tfms: Arguments that are links, each with the states that it is for.
    """

    buffers: ClassVar[Mapping[str, ProjectedBuffer | None]] = {}
    tfms: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    projects: ClassVar[Mapping[ProjectedBuffer, tuple[str, ...]]] = {}

    def collect(self, given: Mapping[str, Any]) -> None:
        """Besides, say what follows a change of the basis."""
        super().collect(given)
        for name, kind in self.buffers.items():
            if kind is not None:
                self.add_projected_keys(kind, name)
        for kind, names in self.projects.items():
            self.add_projected_keys(kind, *names)

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


class MatrixTransform(MatrixLink, BufferTransform):
    """A `BufferTransform` that treats each tensor as a matrix, whole; or as a batch of them, by the axes of its model."""

    members = "batched"
    across = Across.MATRICES
    uses_params = False
    attributes: ClassVar[tuple[str, ...]] = ("batch", "matrix")

    batch: str | tuple[str, ...] | None = None
    matrix: str | None = None

    def stacks_alike(self, hook: str) -> bool:
        """Whether matrices of one shape are stacked for one call; there is nothing to call where a link does not learn."""
        idle = hook == "single_tensor_update" and type(self).learn is BufferTransform.learn
        return not idle and super().stacks_alike(hook)


class ListTransform(BufferTransform):
    """A `BufferTransform` that learns from all tensors together (`learn_all`), or transforms them so (`transform_all`)."""

    def learn_all(self, tensors: Tensors, states: States, settings: SettingsList) -> None:
        """Learn from all tensors; change `states`, not `tensors`."""
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            self.learn(tensor, state, setting)

    def transform_all(self, tensors: Tensors, states: States, settings: SettingsList) -> Sequence[Tensor]:
        """Transform all tensors and return them."""
        return [self.transform(*row) for row in zip(tensors, states, settings, strict=True)]

    def multi_tensor_update(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: SettingsList,
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
        settings: SettingsList,
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
