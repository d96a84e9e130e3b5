"""The maximal update parametrization: initial values and step sizes of parameters by the width of a model.

After Yang et al., "Tensor Programs V: tuning large neural networks via zero-shot hyperparameter transfer", 2022, table 3, which
changes only the initial values and the step size of a parameter, not the forward. Widths are relative to a base, at which the
parametrization is the standard one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from ..layout import public_name

if TYPE_CHECKING:
    from ._model_axes import ModelAxes, ParameterAxes


def measure_fans(axes: ModelAxes, name: str, base: int | ModelAxes) -> tuple[int, float, float]:
    """Return the fan-in of a parameter, and the ratios of its fan-in and fan-out to those at the base width.

    Args:
        axes: The axes of the model.
        name: The parameter.
        base: The base width, to which every product of units is compared, or the axes of the base model.

    Raises:
        ValueError: If the base model has no such parameter, or one with another number of axes.
    """
    own = axes.of(name)
    ratios = {use: _compare(axes, own, use, base) for use in ("in", "out")}
    return _count(own, ("in", "kernel")), ratios["in"], ratios["out"]


def _count(own: ParameterAxes, uses: tuple[str, ...]) -> int:
    return math.prod(size for size, use in zip(own.shape, own.uses, strict=True) if use in uses)


def _compare(axes: ModelAxes, own: ParameterAxes, use: str, base: int | ModelAxes) -> float:
    if isinstance(base, int):
        # Axes of data, positions and indices have the same size in every model.
        units = [axes[name].size for name in axes.list_units(own.name, use)]
        return math.prod(units) / base if units else 1.0
    other = base.of(own.name)
    if len(other.shape) != len(own.shape):
        raise ValueError(f"{own.name!r} has shape {own.shape}, and in the base model {other.shape}")
    return _count(own, (use,)) / _count(other, (use,))


def find_step_scale(axes: ModelAxes, name: str, base: int | ModelAxes, rule: Literal["adam", "sgd"]) -> float:
    """Return the factor of a parameter's step size (table 3).

    Args:
        axes: The axes of the model.
        name: The parameter.
        base: The base width, or the axes of the base model.
        rule: "adam" for updates whose size does not depend on that of the gradient, "sgd" for updates proportional to it.
    """
    own = axes.of(name)
    refuse_tied(own)
    _, fan_in, fan_out = measure_fans(axes, name, base)
    if own.role == "output" or (own.role == "hidden" and rule == "adam"):
        return 1 / fan_in
    return fan_out if own.role in ("input", "vector") and rule == "sgd" else 1.0


def refuse_tied(own: ParameterAxes) -> None:
    """Raise ValueError if a parameter is both an embedding and a head."""
    if own.role == "tied":
        raise ValueError(
            f"muP: {public_name(own.name)!r} is an embedding and a head, whose steps and starts change with width in two ways; "
            "untie them"
        )


def initialise_mup(axes: ModelAxes, net: nn.Module, base: int | ModelAxes, generator: torch.Generator | None) -> None:
    """Draw the parameters of a model by table 3; see `ModelAxes.initialise_mup`.

    Args:
        axes: The axes of the model.
        net: The model.
        base: The base width, or the axes of the base model.
        generator: The random number generator; torch's default one if None.
    """
    deviations = {}
    for name, param in net.named_parameters():
        own = axes.of(name)
        refuse_tied(own)
        if tuple(param.shape) != own.shape:
            raise ValueError(
                f"initialise_mup: {name!r} has shape {tuple(param.shape)}, and the axes are of {own.shape}"
            )
        if own.role != "vector":
            count, fan_in, _ = measure_fans(axes, name, base)
            deviations[name] = (count * (fan_in if own.role == "output" else 1.0)) ** -0.5
        elif own.name.endswith("bias"):
            deviations[name] = 0.0
    with torch.no_grad():
        for name, param in net.named_parameters():
            if name in deviations:
                param.normal_(0.0, deviations[name], generator=generator)


def check_base(base: object) -> None:
    """Raise TypeError or ValueError unless a base is a width or the axes of a model."""
    from ._model_axes import ModelAxes

    if isinstance(base, bool) or not isinstance(base, int | ModelAxes):
        raise TypeError(f"muP: base is {base!r}; give the width of the base model, or its axes")
    if isinstance(base, int) and base < 1:
        raise ValueError(f"muP: base is {base}; give at least 1")
