"""Links that emit something in place of the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, cast

import torch
from torch import Tensor

from ...optim import DeclaredLink, Need, Objective, Setting, UpdateTransform, sample_like
from ...optim import ranges as check
from .._measures import lengths, shape_like
from ._operations import spread_numbers


class _SourceLink(DeclaredLink):
    """Emits tensors computed from the objective."""

    needs = frozenset()
    members = True

    def emit(self, objective: Objective) -> list[Tensor]:
        """Return the tensors, one for each parameter."""
        raise TypeError(f"{type(self).__name__} does not say what it emits")

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with these tensors as its update."""
        objective.updates = self.emit(objective)
        return objective


_DISTRIBUTIONS = ("normal", "gaussian", "uniform", "rademacher", "sphere")


class Grad(UpdateTransform):
    r"""Replaces the update by the gradient, $u \leftarrow g$: what the links before it made is forgotten.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Grad(), [torch.tensor([3.0, 0.0])], grads=[torch.tensor([1.0, 2.0])])
        [tensor([1., 2.])]
    """

    elementwise = True

    uses_grad = True

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        return cast(Tensor, grad).clone()


class Params(_SourceLink):
    """The parameters themselves, in place of the update.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> _ = mo.Optimizer([w], m.Params(), m.LR(0.25)).step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([0.7500, 0.7500])
    """

    differentiable = True

    def emit(self, objective: Objective) -> list[Tensor]:
        return [param.clone() for param in objective.params]


class Fill(_SourceLink):
    """A number, in place of the update.

    Args:
        value: The number.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Fill(3.0), [torch.zeros(2)])
        [tensor([3., 3.])]
    """

    differentiable = True

    value: Setting = field(kw_only=False)

    def emit(self, objective: Objective) -> list[Tensor]:
        values = spread_numbers(objective, [self.settings[param]["value"] for param in objective.params])
        return [torch.zeros_like(param) + value for param, value in zip(objective.params, values, strict=True)]


class Zeros(Fill):
    """Zeros, in place of the update.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Zeros(), [torch.ones(2)])
        [tensor([0., 0.])]
    """

    value: float = field(default=0.0, init=False)


class Ones(Fill):
    """Ones, in place of the update.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Ones(), [torch.zeros(2)])
        [tensor([1., 1.])]
    """

    value: float = field(default=1.0, init=False)


class RandomSample(_SourceLink):
    """A random vector with mean 0, in place of the update.

    Args:
        distribution: "normal", "uniform", "rademacher" or "sphere".
        variance: The variance of each component.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.RandomSample(distribution="rademacher", seed=0), [torch.zeros(2)])[0].abs()
        tensor([1., 1.])
    """

    shared_settings = True

    ranges = {check.one_of(*_DISTRIBUTIONS): ("distribution",), check.non_negative: ("variance",)}
    attributes = ("seed",)

    distribution: str = "normal"
    variance: float = 1.0
    seed: int | None = None

    def emit(self, objective: Objective) -> list[Tensor]:
        params = objective.params
        generator = self.get_generator(params[0].device, self.seed)
        setting = self.settings[params[0]]
        kind, variance = setting["distribution"], setting["variance"]
        each = isinstance(variance, Tensor)  # one per member
        flat = objective.members is not None and (kind == "sphere" or each)
        drawn = sample_like(
            params, "normal" if flat and kind == "sphere" else kind, 1.0 if each else variance, generator
        )
        if not flat:
            return drawn
        scale = torch.as_tensor(variance, dtype=torch.float64, device=params[0].device).sqrt()
        if kind == "sphere":
            count = sum(param[0].numel() for param in params)
            scale = scale * count**0.5 / lengths(drawn).clamp(min=1e-300)
        return [tensor * shape_like(scale, tensor) for tensor in drawn]


class Randn(RandomSample):
    """Standard normal numbers, in place of the update.

    Args:
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Randn(seed=0), [torch.zeros(3)])[0].shape
        torch.Size([3])
    """

    distribution: str = field(default="normal", init=False)
    variance: float = field(default=1.0, init=False)


class Uniform(_SourceLink):
    """Numbers drawn uniformly from [low, high), in place of the update.

    Args:
        low: The lower end.
        high: The upper end.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> out = optim.step_tensors(m.Uniform(low=2.0, high=3.0, seed=0), [torch.zeros(100)])[0]
        >>> bool((out >= 2).all() and (out < 3).all())
        True
    """

    attributes = ("seed",)

    low: float = field()
    high: float = field()
    seed: int | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        if not given["low"] <= given["high"]:
            raise ValueError(f"Uniform: low is {given['low']} and high is {given['high']}; low comes first")

    def emit(self, objective: Objective) -> list[Tensor]:
        out = []
        for param in objective.params:
            setting = self.settings[param]
            generator = self.get_generator(param.device, self.seed)
            # Drawn in logical order, whatever the strides; complex numbers as pairs.
            like = torch.view_as_real(param.detach()) if param.is_complex() else param
            drawn = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            drawn.uniform_(setting["low"], setting["high"], generator=generator)
            out.append(torch.view_as_complex(drawn) if param.is_complex() else drawn)
        return out


class Clone(_SourceLink):
    """A copy of the update, which protects it from writes through other references to its tensors.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Clone(), [torch.ones(2)])
        [tensor([1., 1.])]
    """

    differentiable = True
    needs = frozenset({Need.GRADIENT})

    def emit(self, objective: Objective) -> list[Tensor]:
        return [tensor.clone() for tensor in objective.get_updates()]


class GradToNone(_SourceLink):
    """Forgets the gradient, so that the next link that needs it evaluates again.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = mo.Optimizer([w], m.Clone(), m.GradToNone(), m.Add(m.Grad()))
        >>> _ = opt.step(mo.closure(lambda: w.sum()))
        >>> opt.num_evaluations
        2
    """

    needs = frozenset({Need.CLOSURE})

    def apply(self, objective: Objective) -> Objective:
        objective.grads = objective.loss = None
        objective._graph = None
        return objective


class UpdateToNone(_SourceLink):
    """Forgets the update: the chain begins again from the gradient.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors([m.Mul(7.0), m.UpdateToNone()], [torch.ones(2)])
        [tensor([1., 1.])]
    """

    needs = frozenset({Need.GRADIENT})

    def apply(self, objective: Objective) -> Objective:
        objective.updates = None
        return objective
