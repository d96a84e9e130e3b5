"""The factors of one axis of a parameter: a product of axes of the model, and of concatenations of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import list_bases, public_name


class Segments(NamedTuple):
    """A factor that is a concatenation of axes.

    Attributes:
        parts: The axes, in order, each a product of factors.
    """

    parts: tuple[Factors, ...]


Factors = tuple["str | Segments", ...]
"""One axis of a parameter: the product of axes of the model (by name) and of concatenations of them."""


def list_names(factors: Factors) -> list[str]:
    """Return the names of the model's axes in a product, in order, including those in concatenations."""
    names: list[str] = []
    for factor in factors:
        if isinstance(factor, str):
            names.append(factor)
        else:
            names += [name for part in factor.parts for name in list_names(part)]
    return names


def measure(factors: Factors, sizes: Mapping[str, int]) -> int:
    """Return the size of a product of factors."""
    return math.prod(
        sizes[factor] if isinstance(factor, str) else sum(measure(part, sizes) for part in factor.parts)
        for factor in factors
    )


def index_factors(factors: Factors, sizes: Mapping[str, int], units: Mapping[str, Tensor]) -> Tensor:
    """Return the positions along an axis of the chosen units of each factor.

    Args:
        factors: The factors of the axis.
        sizes: The sizes of the model's axes.
        units: The chosen units by axis; of other axes all units are taken.
    """
    index = torch.zeros(1, dtype=torch.int64)
    for factor in factors:
        if isinstance(factor, str):
            size = sizes[factor]
            chosen = units[factor].to("cpu") if factor in units else torch.arange(size)
        else:
            size, pieces = 0, []
            for part in factor.parts:
                pieces.append(index_factors(part, sizes, units) + size)
                size += measure(part, sizes)
            chosen = torch.cat(pieces)
        index = (index[:, None] * size + chosen).flatten()
    return index


def locate_units(factors: Factors, sizes: Mapping[str, int], name: str) -> Tensor:
    """Return, for each position along a product of factors, the unit of an axis that it belongs to; -1 for none.

    Args:
        factors: The product.
        sizes: The sizes of the model's axes.
        name: The axis whose units are located.

    Returns:
        One unit for each position.

    Example:
        >>> from moduli.axes import locate_units
        >>> locate_units(("head", "size"), {"head": 2, "size": 3}, "head")
        tensor([0, 0, 0, 1, 1, 1])
    """
    units = torch.full((1,), -1)
    for factor in factors:
        if isinstance(factor, str):
            own = torch.arange(sizes[factor]) if factor == name else torch.full((sizes[factor],), -1)
        else:
            own = torch.cat([locate_units(part, sizes, name) for part in factor.parts])
        units = torch.maximum(units[:, None], own).flatten()
    return units


def show_factors(factors: Factors, sizes: Mapping[str, int], owner: str | None = None, outer: bool = False) -> str:
    """Return a product of factors as text, with sizes.

    Args:
        factors: The product.
        sizes: The sizes of the model's axes.
        owner: The layer whose name is left out of names.
        outer: Whether to put a product of several factors in parentheses.
    """
    words = []
    for factor in factors:
        if isinstance(factor, str):
            words.append(f"{factor.removeprefix(f'{owner}.') if owner else factor}={sizes[factor]}")
        else:
            text = " + ".join(show_factors(part, sizes, owner) for part in factor.parts)
            words.append(text if len(factors) == 1 else f"({text})")
    text = " ".join(words) or "1"
    return f"({text})" if outer and " " in text else text


def find_owner(parameter: str) -> str:
    """Return the name of the layer of a parameter: the module for a weight or bias, else the parameter's own name."""
    # A tensor from which a parametrized, pruned or normalised one is computed belongs to the layer of that one.
    base = list_bases(parameter)[-1]
    if "parametrizations." in parameter or base.endswith(("weight", "bias")):
        parameter = base
    parameter = public_name(parameter)
    path, _, last = parameter.rpartition(".")
    for suffix in ("weight", "bias"):
        last = last.removesuffix(suffix).removesuffix("_")
    return ".".join(part for part in (path, last) if part)


def encode(factors: Factors) -> list[Any]:
    """Return factors as plain data: names, and a list of lists for a concatenation."""
    return [factor if isinstance(factor, str) else [encode(part) for part in factor.parts] for factor in factors]


def decode(factors: Sequence[Any]) -> Factors:
    """Return factors from the plain data of `encode`."""
    return tuple(each if isinstance(each, str) else Segments(tuple(map(decode, each))) for each in factors)
