"""What a fit found, as numbers to read: the parameters, and of a least-squares problem their standard errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .problems import Problem

_MOST = 64


def readable(model: nn.Module) -> dict[str, Any]:
    """The trainable parameters by name, as numbers and nested lists; none where there are more than 64 numbers."""
    found = _trainable(model)
    if sum(parameter.numel() for parameter in found.values()) > _MOST:
        return {}
    return {_name(name): _to_numbers(parameter.detach()) for name, parameter in found.items()}


def standard_errors(problem: Problem, model: nn.Module) -> dict[str, Any] | None:
    """The standard errors of a least-squares fit: the roots of the diagonal of s² (JᵀJ)⁻¹, with s² = |r|² / (n - p).

    Args:
        problem: The problem.
        model: Its fitted model.

    Returns:
        A number or nested list for each parameter; None if the problem is no least-squares problem, has fewer residuals than
        parameters, or does not determine all of them.
    """
    found = _trainable(model)
    if any(parameter.is_complex() for parameter in found.values()):
        return None
    with torch.enable_grad():
        residuals = problem.residuals(model)
        if residuals is None or not residuals.requires_grad:
            return None
        rows = [
            torch.autograd.grad(each, list(found.values()), retain_graph=True, allow_unused=True) for each in residuals
        ]
    columns = [
        torch.stack([torch.zeros_like(p) if row[at] is None else row[at] for row in rows])
        .reshape(len(rows), -1)
        .double()
        for at, p in enumerate(found.values())
    ]
    jacobian = torch.cat(columns, 1)
    count, unknowns = jacobian.shape
    # Columns of one length: which parameters are determined does not depend on their units.
    lengths = jacobian.norm(dim=0)
    if count <= unknowns or not bool((lengths > 0).all()):
        return None
    values, vectors = torch.linalg.eigh((jacobian / lengths).mT @ (jacobian / lengths))
    if float(values[0]) <= 1e-12 * float(values[-1]):
        return None
    variance = residuals.detach().double().square().sum() / (count - unknowns)
    errors = (variance * (vectors.square() / values).sum(1)).sqrt() / lengths
    parts = errors.split([parameter.numel() for parameter in found.values()])
    return {
        _name(name): _to_numbers(part.reshape(parameter.shape))
        for (name, parameter), part in zip(found.items(), parts, strict=True)
    }


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _name(name: str) -> str:
    """The name that a user knows: arguments of a function and owned tensors have a prefix in a model."""
    path, dot, last = name.rpartition(".")
    return path + dot + last.removeprefix("arg_").removeprefix("tensor:")


def _to_numbers(values: torch.Tensor) -> Any:
    if values.is_complex():
        values = torch.view_as_real(values)
    return _finite(values.double().tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if math.isfinite(value) else None
