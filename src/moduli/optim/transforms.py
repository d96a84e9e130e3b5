"""The base classes of links: functions of the update, of state and of settings.

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

from ._hooks import SettingsList, States, Tensors
from ._matrix_link import MatrixLink
from ._needs import Across
from ._vectors import as_real, restore_complex
from .declared import Ranges, make_constructor
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


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class DeclaredLink(Module):
    """A link whose constructor type checkers derive from the annotated attributes of its class.

    At run time every link does so (see `moduli.optim.declared`). This class only marks it, for links whose base
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
        ranges: For each check of `moduli.optim.ranges` the arguments that it applies to, in addition to those of the bases.
        attributes: Arguments that become attributes of the link, not settings, in addition to those of the bases.
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
        """Transform one tensor (in place or not) and return it.

        Args:
            tensor: The update.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """
        raise TypeError(f"{type(self).__name__} does not say how to transform the update")

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        """Transform one tensor, with access to its parameter and gradient, and return it.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """
        return self.transform(tensor, state, setting)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        """Return the result of `transform_at`.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss, which is not passed on.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """
        return self.transform_at(tensor, param, grad, state, setting)


class BufferTransform(UpdateTransform):
    """An `UpdateTransform` with state: `begin` fills the state of a parameter, `learn` changes it.

    Its buffers can be transformed by links before they are used. Such arguments are named in `tfms`, each with the
    state it is for (the first of these that exists). The links get a copy of the buffer in place of the update, so the
    buffer itself is not changed. They learn when this link is applied, as `inner` does.

    Attributes:
        buffers: States that are tensors like the update and start at zero, each with its rule for a change of the basis
            (see `add_projected_keys`; None for no change).
        projects: Further states that follow a change of the basis, by rule.
        tfms: Arguments that are links, each with the states that it is for.
    """

    buffers: ClassVar[Mapping[str, ProjectedBuffer | None]] = {}
    tfms: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    projects: ClassVar[Mapping[ProjectedBuffer, tuple[str, ...]]] = {}

    def collect(self, given: Mapping[str, Any]) -> None:
        """Store the arguments, and declare the buffers that follow a change of the basis."""
        super().collect(given)
        for name, kind in self.buffers.items():
            if kind is not None:
                self.add_projected_keys(kind, name)
        for kind, names in self.projects.items():
            self.add_projected_keys(kind, *names)

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        """Fill the state of one parameter, except for the buffers.

        Args:
            tensor: The update.
            state: The state of the parameter.
            setting: Its settings.
        """

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        """Learn from one tensor: change `state`, not `tensor`.

        Args:
            tensor: The update.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Create the buffers as zeros, then run `begin`.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter, empty.
            setting: Its settings.
        """
        for name in self.buffers:
            state[name] = torch.zeros_like(tensor)
        self.begin(tensor, state, setting)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Run `learn`.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """
        self.learn(tensor, state, setting)

    def get_applied_states(self, objective: Objective, positions: list[int], states: States) -> States:
        """Return copies of the states, with the buffers transformed by the links in `tfms`.

        Args:
            objective: The objective.
            positions: The positions of the parameters in the objective.
            states: The state of each.
        """
        if not any(key in self.children for key in self.tfms):
            return states
        rows = [dict(row) for row in states]
        own = [objective.params[i] for i in positions]
        for key, names in self.tfms.items():
            name = next((name for name in names if name in rows[0]), None)
            if key in self.children and name is not None:
                transformed = transform_buffers(self, key, [row[name] for row in rows], own, objective)
                for row, buffer in zip(rows, transformed, strict=True):
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
        """Return whether matrices of one shape are stacked for one call; never for a link that does not learn."""
        idle = hook == "single_tensor_update" and type(self).learn is BufferTransform.learn
        return not idle and super().stacks_alike(hook)


class ListTransform(BufferTransform):
    """A `BufferTransform` that learns from all tensors together (`learn_all`), or transforms them so (`transform_all`)."""

    def learn_all(self, tensors: Tensors, states: States, settings: SettingsList) -> None:
        """Learn from all tensors: change `states`, not `tensors`.

        Args:
            tensors: The updates.
            states: The state of each parameter.
            settings: The settings of each parameter, and measured scalars.
        """
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            self.learn(tensor, state, setting)

    def transform_all(self, tensors: Tensors, states: States, settings: SettingsList) -> Sequence[Tensor]:
        """Transform all tensors and return them.

        Args:
            tensors: The updates.
            states: The state of each parameter.
            settings: The settings of each parameter, and measured scalars.
        """
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
        """Run `learn_all`.

        Args:
            tensors: The updates.
            params: The parameters.
            grads: The gradients; None unless the link uses them.
            loss: The loss; None unless the link uses it.
            states: The state of each parameter.
            settings: The settings of each parameter, and measured scalars.
        """
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
        """Return the result of `transform_all`.

        Args:
            tensors: The updates.
            params: The parameters.
            grads: The gradients; None unless the link uses them.
            loss: The loss; None unless the link uses it.
            states: The state of each parameter.
            settings: The settings of each parameter, and measured scalars.
        """
        return self.transform_all(tensors, states, settings)


def transform_buffers(
    link: Module, key: str, buffers: Sequence[Tensor], params: Sequence[Tensor], objective: Objective
) -> list[Tensor]:
    """Return copies of buffers transformed by a child of a link; the buffers themselves if there is no such child.

    Args:
        link: The link.
        key: The name of the child.
        buffers: The buffers, one for each parameter.
        params: The parameters.
        objective: The objective.
    """
    if key not in link.children:
        return list(buffers)
    # Pointwise links store complex numbers as pairs of reals, but a child gets tensors like the parameters.
    copies = [
        restore_complex(buffer.clone(), param) if buffer.shape == as_real(param.detach()).shape else buffer.clone()
        for buffer, param in zip(buffers, params, strict=True)
    ]
    shaped = all(tensor.shape == param.shape for tensor, param in zip(copies, params, strict=True))
    out = link.inner_step_tensors(key, copies, clone=False, params=params if shaped else None, objective=objective)
    return [
        as_real(tensor) if tensor.is_complex() and not buffer.is_complex() else tensor
        for tensor, buffer in zip(out, buffers, strict=True)
    ]
