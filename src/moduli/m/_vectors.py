"""All parameters as one real vector, for links that work on the whole of them.

* Links over all parameters as one vector, whose state is that of the first parameter.
* Exact arrival at a target point.
* The Jacobian of a vector by all parameters concatenated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..linalg import LinearOperator
from ..optim import DeclaredLink, Objective, Transform, as_real, restore_complex

SMALL = 10_000
"""Up to this many numbers on the CPU are worked on by NumPy, whose dispatch costs less; above it would use all threads."""
_LOW = (torch.float16, torch.bfloat16)
_PLAIN = (torch.float32, torch.float64)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one real vector, complex numbers as pairs, half precision as float32; it may share memory."""
    vectors = [as_real(tensor.detach()).reshape(-1) for tensor in tensors]
    vector = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
    return vector.float() if vector.dtype in _LOW else vector


def flat_members(tensors: Sequence[Tensor]) -> Tensor:
    """Return one real vector for each member of a population, in rows: `flat` of each."""
    rows = torch.cat([as_real(tensor.detach()).reshape(len(tensor), -1) for tensor in tensors], 1)
    return rows.float() if rows.dtype in _LOW else rows


def array(tensors: Sequence[Tensor]) -> Any:
    """Return `flat` of plain tensors on the CPU as an array: for small vectors NumPy's dispatch costs less than torch's."""
    if len(tensors) == 1:
        tensor = tensors[0]
        out = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return out if out.ndim == 1 else out.reshape(-1)
    return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors])


def is_small(n: int, device: torch.device) -> bool:
    """Return whether a vector is processed by NumPy."""
    return n <= SMALL and device.type == "cpu"


def is_plain(params: Sequence[Tensor]) -> bool:
    """Return whether `array` can be used: real, of one precision, on the CPU, strided, and not too many numbers."""
    dtype = params[0].dtype
    if dtype not in _PLAIN:
        return False
    count = 0
    for param in params:
        if param.dtype is not dtype or not param.is_cpu or param.layout is not torch.strided:
            return False
        count += param.numel()
    return count <= SMALL


def size(params: Sequence[Tensor]) -> int:
    """Return the length of the vector of these tensors."""
    return sum(param.numel() * (2 if param.is_complex() else 1) for param in params)


def unflat(vector: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the vector split into tensors like the parameters; rows, one for each member, into stacked ones."""
    if len(params) == 1 and vector.dtype is params[0].dtype:
        return [vector.reshape(params[0].shape)]
    real = [as_real(param.detach()) for param in params]
    pieces = torch.split(vector, [tensor.numel() // vector.shape[:-1].numel() for tensor in real], -1)
    rows = zip(pieces, real, params, strict=True)
    return [restore_complex(piece.to(tensor.dtype).reshape(tensor.shape), param) for piece, tensor, param in rows]


def tensors_of(vector: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """Return `unflat` of an array for `is_plain` parameters; the tensors share its memory."""
    if len(params) == 1:
        out = torch.from_numpy(vector)
        return [out if params[0].dim() == 1 else out.view(params[0].shape)]
    return unflat(torch.from_numpy(vector), params)


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the inner product of two lists of tensors, as real vectors; summed over processes for sharded parameters."""
    if kernels.over_processes() is not None:
        return float(kernels.dot([as_real(tensor) for tensor in a], [as_real(tensor) for tensor in b]))
    return torch.dot(flat(a), flat(b)).item()


def mask_absent(tensors: Sequence[Tensor], present: Sequence[bool] | None) -> list[Tensor]:
    """Return the tensors, with zeros for parameters that have no gradient and so do not move."""
    if present is None:
        return list(tensors)
    return [tensor if here else torch.zeros_like(tensor) for tensor, here in zip(tensors, present, strict=True)]


def copy_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of `.grad`, with zeros for parameters that have none."""
    return [torch.zeros_like(param) if param.grad is None else param.grad.clone() for param in params]


def refuse_complex(name: str, params: Sequence[Tensor]) -> None:
    """Raise an error for complex parameters: second derivatives by complex numbers are not a matrix."""
    for param in params:
        if param.is_complex():
            raise TypeError(
                f"{name} takes real parameters, got {param.dtype}; optimize torch.view_as_real(w), or use LBFGS"
            )


def gather_update(objective: Objective) -> Tensor:
    """Return the update as one vector, with zeros for parameters without a gradient. It may share memory with the update."""
    return flat(mask_absent(objective.peek_updates(), objective.present))


def vector_like(objective: Objective) -> Tensor:
    """Return an uninitialised vector for all parameters."""
    return flat(objective.params[:1]).new_empty(size(objective.params))


class VectorLink(DeclaredLink, Transform):
    """A link that learns from, and transforms, the update as one vector: override `learn_vector` and `transform_vector`."""

    vector_state = True
    real_only: ClassVar[bool] = False
    """Whether complex parameters are refused."""
    required_state: ClassVar[str] = ""
    """The entry of the state that it cannot do without."""

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Learn from the update: change `state`, not the update.

        Args:
            objective: The objective.
            state: The state of the vector.
            setting: Its settings.
        """

    @abstractmethod
    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        """Return the new update for the current one; None to leave it.

        Args:
            objective: The objective.
            u: The update.
            state: The state of the vector.
            setting: Its settings.
        """

    def _lists(self, objective: Objective) -> Any:
        if not self.vector_state:
            return super()._lists(objective)
        first = objective.params[0]
        return [self.state[first]], [self.settings[first]]

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        if self.real_only:
            refuse_complex(type(self).__name__, objective.params)
        self.learn_vector(objective, states[0], settings[0])

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        self._ensure_learnt(objective, states[0], settings[0])
        out = self.transform_vector(objective, gather_update(objective), states[0], settings[0])
        if out is not None:
            objective.updates = unflat(out, objective.params)
        return objective

    def _ensure_learnt(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        if self.required_state and self.required_state not in state:
            self.update_states(objective, [state], [setting])


class HessianLink(VectorLink):
    """A link over one vector with the Hessian, or an approximation of it: override `operator` too."""

    decides_on_host = True

    hessian = "matrix"

    @abstractmethod
    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """Return the link's current Hessian.

        Args:
            objective: The objective.
            state: The state of the vector.
            setting: Its settings.
        """

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """Return the link's current Hessian."""
        param = objective.params[0]
        state, setting = self.state[param], self.settings[param]
        self._ensure_learnt(objective, state, setting)
        return self.operator(objective, state, setting)


def land(objective: Objective, goal: Sequence[Tensor]) -> None:
    """Set the parameters to a target bit for bit, if the following links do not change the update.

    The update is a difference, and x - (x - target) is the target up to rounding only; a search that runs again has to
    find its members unchanged, and a member that is infinite or NaN would stay so.
    """
    params, updates = list(objective.params), objective.get_updates()
    expected = [param.detach() - update.to(param.dtype) for param, update in zip(params, updates, strict=True)]

    def settle(last: Objective, links: Sequence[Any]) -> None:
        with torch.no_grad():
            for param, there, place in zip(params, expected, goal, strict=True):
                if torch.allclose(param, there, rtol=0.0, atol=0.0, equal_nan=True):
                    param.copy_(place)

    objective.post_step_hooks.append(settle)


def jacobian(vector: Tensor, params: Sequence[Tensor], batched: bool) -> Tensor:
    """Return the matrix of derivatives, one row per component; zero columns for parameters it does not depend on.

    Of half precision it is in float32, as `flat` is, since linear algebra has no half precision.

    Args:
        vector: The components, with their graph.
        params: The parameters.
        batched: All rows in one vectorised pass, or one after another.
    """
    with torch.enable_grad():
        flat = vector.reshape(-1)
    m = flat.numel()

    def join(grads: Sequence[Tensor | None], rows: int) -> Tensor:
        parts = [
            flat.new_zeros(rows, param.numel()) if f is None else f.reshape(rows, param.numel())
            for f, param in zip(grads, params, strict=True)
        ]
        matrix = torch.cat(parts, 1).detach()
        return matrix.float() if matrix.dtype in _LOW else matrix

    if not flat.requires_grad or m == 0:
        return join([None] * len(params), m)
    if batched:
        eye = torch.eye(m, dtype=flat.dtype, device=flat.device)
        grads = torch.autograd.grad(flat, params, eye, retain_graph=True, allow_unused=True, is_grads_batched=True)
        return join(grads, m)
    with torch.enable_grad():
        elements = flat.unbind(0)
    rows = [torch.autograd.grad(element, params, retain_graph=True, allow_unused=True) for element in elements]
    return torch.cat([join(row, 1) for row in rows])
