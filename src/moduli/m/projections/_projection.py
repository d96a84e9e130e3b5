"""Links that run other links on another view of the tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, DeclaredLink, Module, Objective, StandIns, as_real, restore_complex, to_vector
from ...optim import step as run
from .._vectors import copy_gradients, unflat


class Projection(DeclaredLink):
    """Runs links on transformed updates, gradients and parameters, and transforms the result back.

    Links inside keep their state for stand-ins that stay the same, and inherit the settings of the parameters. They may
    re-evaluate: the closure is shown to them, with the parameters moved to wherever they put the stand-ins.

    Args:
        modules: The links.
    """

    needs = frozenset()

    modules: Chainable = field(kw_only=False)

    def collect(self, given: Mapping[str, Any]) -> None:
        """Also initialise the order of the parameters, which is set at the first step."""
        super().collect(given)
        self._order: list[int] = []

    @abstractmethod
    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the transformed tensors."""

    @abstractmethod
    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """Return the tensors transformed back, shaped like the parameters."""

    def sources(self, params: list[Tensor]) -> list[Tensor]:
        """Return for each projected tensor the parameter whose settings apply to it."""
        return [params[i] for i in self._order]

    def _names(self, params: list[Tensor]) -> list[str]:
        slots = self.settings.binding.slots
        return [slots.find_name(param) or str(i) for i, param in enumerate(params)]

    def _project_updates(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.project([tensors[i] for i in self._order])

    def _unproject_updates(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        updates = self.unproject(tensors, [params[i] for i in self._order])
        out = list(updates)
        for i, tensor in zip(self._order, updates, strict=True):
            out[i] = tensor
        return out

    def prepare(self, params: list[Tensor]) -> list[str]:
        """Return one key for each projected tensor, under which its state is stored.

        The order of the parameters is that of the first step, so that it survives saving and reordering.
        """
        names = self._names(params)
        before = self.global_state.get("order", [])
        order = [name for name in before if name in names] + [name for name in names if name not in before]
        self.global_state["order"] = order
        self._order = [names.index(name) for name in order]
        return [f"modules {name}" for name in order]

    def _run_inside(self, objective: Objective, how: Callable[[Module, Objective], Any]) -> Objective:
        params = objective.params
        keys = self.prepare(params)
        projected = [t.clone() for t in self._project_updates([param.detach() for param in params])]
        child = self.children["modules"]
        if len(projected) < len(params):
            child.check_shared(params, every=True)
        with ExitStack() as stack:
            fakes = [
                stack.enter_context(
                    self._stand_ins.setdefault(key, StandIns()).point_at([tensor], self.settings.binding, [source])
                )[0]
                for key, tensor, source in zip(keys, projected, self.sources(params), strict=True)
            ]
            out = how(child, self._project_objective(objective, fakes))
            if isinstance(out, Objective):
                self._take_result(objective, out, fakes)
        return objective

    def _project_objective(self, objective: Objective, fakes: list[Tensor]) -> Objective:
        """Return the objective over the placeholders, with the projected update and gradient."""
        evaluator = objective.evaluator
        inner = Objective(
            fakes,
            _Through(self, objective, fakes) if evaluator is not None else None,
            objective.loss,
            objective.model,
            objective.current_step,
            parent=objective,
            modular=objective.modular,
            storage=objective.storage,
            needs=objective.needs,
            members=objective.members,
        )
        inner.attrs = objective.attrs
        if inner.evaluator is not None and evaluator is not None:
            inner.evaluator.count = evaluator.count
            if objective.grads is None and objective.updates is None:
                objective.get_loss(backward=True)
                inner.loss = objective.loss
        if objective.grads is not None:
            inner.grads = [t.clone() for t in self._project_updates(objective.grads)]
        if objective.updates is not None:
            inner.updates = [t.clone() for t in self._project_updates(objective.updates)]
        inner.present = self.presence(objective)
        return inner

    def _take_result(self, objective: Objective, inner: Objective, fakes: list[Tensor]) -> None:
        """Store the update of the inner links, transformed back, and their decision to stop.

        Args:
            objective: The objective that is changed.
            inner: The objective that the inner links returned.
            fakes: The placeholders.
        """
        params = objective.params
        if inner.skip_update:
            # The inner links moved the placeholders themselves.
            ends = self._unproject_updates([fake.detach() for fake in fakes], params)
            objective.updates = [p.detach() - end for p, end in zip(params, ends, strict=True)]
        else:
            objective.updates = self._unproject_updates(inner.get_updates(), params)
        if inner.should_terminate is not None:
            objective.should_terminate = bool(objective.should_terminate) or inner.should_terminate

    def presence(self, objective: Objective) -> list[bool] | None:
        """Return for each projected tensor whether it has a gradient."""
        return None if objective.present is None else [objective.present[i] for i in self._order]

    def update(self, objective: Objective) -> None:
        """Let the inner links learn."""
        self._run_inside(objective, lambda child, inner: child.update(inner))

    def apply(self, objective: Objective) -> Objective:
        """Transform the update by the inner links."""
        return self._run_inside(objective, lambda child, inner: child.apply(inner))

    def step(self, objective: Objective) -> Objective:
        """Run the step of the inner links."""
        return self._run_inside(objective, lambda child, inner: run(inner, [child]))


class _Through:
    """The closure for links inside a projection."""

    def __init__(self, owner: Projection, objective: Objective, fakes: list[Tensor]) -> None:
        self.owner, self.objective, self.fakes = owner, objective, fakes

    def __call__(self, backward: bool = True) -> Tensor:
        objective = self.objective
        with objective.moved(), torch.no_grad():
            values = self.owner._unproject_updates([fake.detach() for fake in self.fakes], objective.params)
            for param, value in zip(objective.params, values, strict=True):
                param.copy_(value)
            loss = objective.get_loss(backward=backward, at_x0=False)
            grads = copy_gradients(objective.params) if backward else None
        if grads is not None:
            for fake, grad in zip(self.fakes, self.owner._project_updates(grads), strict=True):
                fake.grad = grad.clone()
        return loss


class _Flat(Projection):
    """All numbers in one row."""

    def prepare(self, params: list[Tensor]) -> list[str]:
        sizes = {name: as_real(param.detach()).numel() for name, param in zip(self._names(params), params, strict=True)}
        if self.global_state.get("sizes", sizes) != sizes:
            self.reset()  # the state of other elements is invalid for these
        self.global_state["sizes"] = sizes
        super().prepare(params)
        return [f"modules {i}" for i in range(len(self.sources(params)))]

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        vector = tensors[0] if tensors[0].dim() else torch.stack(tensors)
        return unflat(vector, params)


class VectorProjection(_Flat):
    """The links inside see one vector of all parameters.

    Args:
        modules: The links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.VectorProjection(m.Normalize()), [torch.tensor([3.0]), torch.tensor([4.0])])
        [tensor([0.6000]), tensor([0.8000])]
    """

    def sources(self, params: list[Tensor]) -> list[Tensor]:
        for _, link in self.children["modules"].links():
            first = link.settings[params[0]]
            for param in params[1:]:
                other = link.settings[param]
                key = next((key for key in first if other is not first and differ(first[key], other[key])), None)
                if key is not None:
                    raise ValueError(
                        f"VectorProjection shows {type(link).__name__} one vector, but groups give it {key}="
                        f"{first[key]!r} and {key}={other[key]!r}; give one value, or put it into m.Split per group"
                    )
        return params[:1]

    def presence(self, objective: Objective) -> list[bool] | None:
        return None

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        return [to_vector([as_real(tensor) for tensor in tensors])]


class ScalarProjection(_Flat):
    """The links inside see every number as a parameter of its own (slow: for a few parameters).

    Args:
        modules: The links.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.ScalarProjection(m.Normalize(dim=None)), [torch.tensor([3.0, -4.0])])
        [tensor([ 1., -1.])]
    """

    def sources(self, params: list[Tensor]) -> list[Tensor]:
        ordered = [params[i] for i in self._order]
        return [param for param in ordered for _ in range(as_real(param.detach()).numel())]

    def presence(self, objective: Objective) -> list[bool] | None:
        if objective.present is None:
            return None
        with_gradient = {p for p, here in zip(objective.params, objective.present, strict=True) if here}
        return [source in with_gradient for source in self.sources(objective.params)]

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(to_vector([as_real(tensor) for tensor in tensors]).unbind(0))


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
        return [restore_complex(tensor, param) for tensor, param in zip(tensors, params, strict=True)]


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

    attributes = ("dtype", "device")

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        if self.dtype is None and self.device is None:
            raise ValueError("To: give a dtype, a device, or both")
        if self.dtype is not None and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"To: {self.dtype} has no fractions; give a floating dtype")

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


def differ(a: Any, b: Any) -> bool:
    """Return whether two settings are not the same."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not b and not (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
    return bool(a != b)
