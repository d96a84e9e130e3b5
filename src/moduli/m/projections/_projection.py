"""Links that run other links on another view of the tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Module, Objective
from ...optim._vectors import as_real, from_vector, like, to_vector
from ...optim.functional import step as run

__all__ = ["Projection", "ScalarProjection", "To", "VectorProjection", "ViewAsReal"]


class Projection(Module):
    """Runs links on transformed updates, gradients and parameters, and transforms the result back.

    Links inside keep their state for stand-ins that stay the same, and inherit the settings of the parameters. They may
    re-evaluate: the closure is shown to them, with the parameters moved to wherever they put the stand-ins.

    Args:
        modules: The links.
    """

    needs = frozenset()

    def __init__(self, modules: Chainable) -> None:
        super().__init__()
        self.set_child("modules", modules)

    @abstractmethod
    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        """The transformed tensors."""

    @abstractmethod
    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """The tensors as they were, shaped like the parameters."""

    def _inside(self, objective: Objective, how: Callable[[Module, Objective], Any]) -> Objective:
        from ...optim._stand_ins import StandIns

        params = objective.params
        shown = [t.clone() for t in self.project([param.detach() for param in params])]
        stand_ins = self._stand_ins.setdefault("modules", StandIns())
        child = self.children["modules"]
        with stand_ins.pointed_at(shown, self.settings.binding, params) as fakes:
            inner = Objective(
                fakes,
                _Through(self, objective, fakes) if objective.evaluator is not None else None,
                objective.loss,
                objective.model,
                objective.current_step,
                parent=objective,
                modular=objective.modular,
                needs=objective.needs,
                members=objective.members,
            )
            if objective.grads is not None:
                inner.grads = [t.clone() for t in self.project(objective.grads)]
            if objective.updates is not None:
                inner.updates = [t.clone() for t in self.project(objective.updates)]
            out = how(child, inner)
            if isinstance(out, Objective):
                objective.updates = self.unproject(out.get_updates(), params)
                if out.should_terminate is not None:
                    objective.should_terminate = bool(objective.should_terminate) or out.should_terminate
        return objective

    def update(self, objective: Objective) -> None:
        """The links inside learn."""
        self._inside(objective, lambda child, inner: child.update(inner))

    def apply(self, objective: Objective) -> Objective:
        """The links inside transform."""
        return self._inside(objective, lambda child, inner: child.apply(inner))

    def step(self, objective: Objective) -> Objective:
        """The links inside make their step."""
        return self._inside(objective, lambda child, inner: run(inner, [child]))


class _Through:
    """The closure as links inside a projection call it."""

    def __init__(self, owner: Projection, objective: Objective, fakes: list[Tensor]) -> None:
        self.owner, self.objective, self.fakes = owner, objective, fakes

    def __call__(self, backward: bool = True) -> Tensor:
        objective = self.objective
        with objective.moved(), torch.no_grad():
            values = self.owner.unproject([fake.detach() for fake in self.fakes], objective.params)
            for param, value in zip(objective.params, values, strict=True):
                param.copy_(value)
            loss = objective.get_loss(backward=backward, at_x0=False)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in objective.params] if backward else None
        if grads is not None:
            for fake, grad in zip(self.fakes, self.owner.project(grads), strict=True):
                fake.grad = grad.clone()
        return loss


class VectorProjection(Projection):
    """The links inside see one vector of all parameters.

    Args:
        modules: The links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.VectorProjection(m.Normalize()), [torch.tensor([3.0]), torch.tensor([4.0])])
        [tensor([0.6000]), tensor([0.8000])]
    """

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        return [to_vector([as_real(tensor) for tensor in tensors])]

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        parts = from_vector(tensors[0], [as_real(param.detach()) for param in params])
        return [like(part, param) for part, param in zip(parts, params, strict=True)]


class ScalarProjection(Projection):
    """The links inside see every number as a parameter of its own (slow: for a few parameters).

    Args:
        modules: The links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.ScalarProjection(m.Normalize(dim=None)), [torch.tensor([3.0, -4.0])])
        [tensor([ 1., -1.])]
    """

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(to_vector([as_real(tensor) for tensor in tensors]).unbind(0))

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        parts = from_vector(torch.stack(tensors), [as_real(param.detach()) for param in params])
        return [like(part, param) for part, param in zip(parts, params, strict=True)]


class ViewAsReal(Projection):
    """The links inside see complex numbers as pairs of reals.

    Args:
        modules: The links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.ViewAsReal(m.Sign()), [torch.tensor([3.0 - 4.0j])])
        [tensor([1.-1.j])]
    """

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        return [as_real(tensor) for tensor in tensors]

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        return [like(tensor, param) for tensor, param in zip(tensors, params, strict=True)]


class To(Projection):
    """The links inside run in another dtype or on another device; their result is converted back.

    Args:
        modules: The links.
        dtype: The dtype; None keeps it.
        device: The device; None keeps it.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.To(m.LR(0.5), dtype=torch.float64), [torch.ones(2)])
        [tensor([0.5000, 0.5000])]
    """

    def __init__(
        self, modules: Chainable, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__(modules)
        if dtype is None and device is None:
            raise ValueError("To: give a dtype, a device, or both")
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"To: {dtype} has no fractions; give a floating dtype")
        self.dtype = dtype
        self.device = device

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        out = []
        for tensor in tensors:
            dtype = self.dtype
            if dtype is not None and tensor.is_complex() and not dtype.is_complex:
                dtype = dtype.to_complex()
            out.append(tensor.to(device=self.device, dtype=dtype))
        return out

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        return [tensor.to(param) for tensor, param in zip(tensors, params, strict=True)]
