"""Averages of all models or of a greedy selection, interpolation along straight lines, and sums of task vectors.

References:
    Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
    inference time", ICML 2022, arXiv:2203.05482 (the uniform soup, section 2, and Recipe 1 for the greedy one).
    Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022, arXiv:2109.01903 (interpolation of two).
    Ilharco et al., "Editing models with task arithmetic", ICLR 2023, arXiv:2212.04089 (section 2).
"""

from collections.abc import Callable, Sequence
from inspect import unwrap
from math import isnan
from typing import Literal, cast

import torch
from torch import Tensor

from .._texts import shorten
from ._call import list_models, recipe
from ._coefficients import Coefficient, Coefficients, per_model
from ._driver import Buffers, Integers, ModelT, Recipe, Row
from ._models import MergeError, check_choice


@recipe
def linear(
    models: Sequence[ModelT],
    weights: Sequence[Coefficient] | None = None,
    *,
    normalize: bool = True,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Combine models linearly: a weighted average, or any weighted sum.

    For each parameter, θ = Σᵢ wᵢ θᵢ / Σᵢ wᵢ, or θ = Σᵢ wᵢ θᵢ with `normalize=False`. A model of weight 0 is not read.

    Args:
        models: Modules, or state dicts. The first decides form, structure and dtypes of the result.
        weights: One coefficient per model: a number, or numbers by glob pattern of parameter names. Equal by default.
        normalize: Whether to divide by the sum of the weights, name by name.
        buffers: Whether floating buffers are the first model's or merged too.
        integers: Whether tensors of integers must be equal; they are the first model's in any case.

    Raises:
        MergeError: If structures or weights do not fit, weights to be normalised add up to 0, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b = {"w": torch.tensor([0.0, 4.0])}, {"w": torch.tensor([4.0, 0.0])}
        >>> merge.linear([a, b], [3, 1])
        {'w': tensor([1., 3.])}
        >>> merge.linear([a, b], [1, -1], normalize=False)
        {'w': tensor([-4.,  4.])}

    Reference:
        Wortsman et al., "Model soups", ICML 2022, arXiv:2203.05482.
    """
    each = per_model(weights, len(models), "weights")
    return cast(ModelT, add_by(each, lambda name: share_out([weight(name) for weight in each], name, normalize)))


@recipe
def lerp(a: ModelT, b: ModelT, t: Coefficient, *, buffers: Buffers = "first", integers: Integers = "equal") -> ModelT:
    """Interpolate between two models along a straight line.

    For each parameter, θ = (1 − t) a + t b. It is exactly `a` at 0 and exactly `b` at 1; beyond, it extrapolates.

    Args:
        a: A module or state dict. It decides form, structure and dtypes of the result.
        b: Another of the same structure.
        t: The position between `a` (0) and `b` (1): a number, or numbers by glob pattern of parameter names.
        buffers: Whether floating buffers are those of `a` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `a` in any case.

    Raises:
        MergeError: If the structures differ, `t` lacks a name, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a = {"body.w": torch.zeros(2), "head.w": torch.zeros(2)}
        >>> b = {"body.w": torch.ones(2), "head.w": torch.ones(2)}
        >>> merge.lerp(a, b, {"head.*": 1.0, "*": 0.25})
        {'body.w': tensor([0.2500, 0.2500]), 'head.w': tensor([1., 1.])}

    Reference:
        Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022, arXiv:2109.01903.
    """
    place = Coefficients(t, "t")
    return cast(ModelT, add_by((place,), lambda name: [1.0 - place(name), place(name)]))


@recipe
def task_vector(model: ModelT, base: ModelT, *, buffers: Buffers = "first", integers: Integers = "equal") -> ModelT:
    """Return the change by fine-tuning, τ = θ − θ_base, as a model.

    Adding it back gives the model: `linear([base, vector], [1, 1], normalize=False)`. To add several, or fractions of one,
    `task_arithmetic` needs no intermediate vectors and rounds less.

    Args:
        model: The fine-tuned module or state dict. It decides form, structure and dtypes of the result.
        base: The module or state dict that it was fine-tuned from.
        buffers: Whether floating buffers of the result are those of `model` or differences too.
        integers: Whether tensors of integers must be equal; they are those of `model` in any case.

    Raises:
        MergeError: If the structures differ, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> merge.task_vector({"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([1.0, 1.0])})
        {'w': tensor([0., 2.])}

    Reference:
        Ilharco et al., "Editing models with task arithmetic", ICLR 2023, arXiv:2212.04089.
    """
    return cast(ModelT, Recipe(lambda _, row: row[0] - row[1], keeps=lambda _: False, elementwise=True))


@recipe
def task_arithmetic(
    base: ModelT,
    models: Sequence[ModelT],
    scale: Coefficient | Sequence[Coefficient] = 1.0,
    *,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Add scaled task vectors to a base: combine several tasks, or, with negative scales, remove some.

    For each parameter, θ = θ_base + Σᵢ λᵢ τᵢ with τᵢ = θᵢ − θ_base. It is computed as (1 − Σᵢ λᵢ) θ_base + Σᵢ λᵢ θᵢ, so one
    model with scale 1 is reproduced exactly.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        scale: λ, for all models or a sequence with one for each: a number, or numbers by glob pattern.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or scales do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base, a, b = ({"w": torch.tensor(w)} for w in ([1.0, 1.0], [2.0, 1.0], [1.0, 3.0]))
        >>> merge.task_arithmetic(base, [a, b])
        {'w': tensor([2., 3.])}
        >>> merge.task_arithmetic(base, [a, b], [1.0, -0.5])
        {'w': tensor([2., 0.])}

    Reference:
        Ilharco et al., "Editing models with task arithmetic", ICLR 2023, arXiv:2212.04089.
    """
    scales = per_model(scale, len(models), "scale")
    return cast(ModelT, add_by(scales, lambda name: add_base([scale(name) for scale in scales])))


@recipe
def soup(
    models: Sequence[ModelT],
    *,
    how: Literal["uniform", "greedy"] = "uniform",
    evaluate: Callable[[ModelT], float] | None = None,
    mode: Literal["max", "min"] = "max",
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Average models: all of them, θ = (1/n) Σᵢ θᵢ, or a greedy selection that improves the score.

    Args:
        models: Modules, or state dicts, usually fine-tuned from one base.
        how: "uniform" to average all, "greedy" to select as `greedy_soup` does.
        evaluate: For the greedy soup, the score of a model.
        mode: For the greedy soup, whether a greater or a lesser score is better.
        buffers: Whether floating buffers are the first model's (the best model's, if greedy) or merged too.
        integers: Whether tensors of integers must be equal; they are the first model's in any case.

    Raises:
        MergeError: If the structures differ, values are NaN, or `evaluate` is missing or unused.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> models = [{"w": torch.tensor(w)} for w in (1.0, 2.0, 6.0)]
        >>> merge.soup(models)
        {'w': tensor(3.)}
        >>> merge.soup(models, how="greedy", evaluate=lambda model: -abs(model["w"].item() - 1.6))
        {'w': tensor(1.5000)}

    Reference:
        Wortsman et al., "Model soups", ICML 2022, arXiv:2203.05482.
    """
    check_choice("how", how, "uniform", "greedy")
    if (how == "greedy") != (evaluate is not None):
        raise MergeError("a greedy soup needs evaluate=, the score of a model, and a uniform one has no use for it")
    if evaluate is None:
        return cast(ModelT, unwrap(linear)(models))
    if models[0] is None:
        raise MergeError("a greedy soup judges models in memory; load them, and call greedy_soup")
    return greedy_soup(models, evaluate, mode=mode, buffers=buffers, integers=integers)


def greedy_soup(
    models: Sequence[ModelT],
    evaluate: Callable[[ModelT], float],
    *,
    mode: Literal["max", "min"] = "max",
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Average the models that `greedy_ingredients` chooses; never worse than the best of them, by the same evaluation.

    Args:
        models: Modules, or state dicts, usually fine-tuned from one base.
        evaluate: The score of a model; it is also called with averages, which are new models of the same form.
        mode: Whether a greater or a lesser score is better.
        buffers: Whether floating buffers are the best model's or merged too.
        integers: Whether tensors of integers must be equal; they are the best model's in any case.

    Raises:
        MergeError: If the structures differ, or values or scores are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> models = [{"w": torch.tensor(w)} for w in (1.0, 2.0, 6.0)]
        >>> merge.greedy_soup(models, lambda model: abs(model["w"].item() - 1.6), mode="min")
        {'w': tensor(1.5000)}

    Reference:
        Wortsman et al., "Model soups", ICML 2022, arXiv:2203.05482.
    """
    chosen = greedy_ingredients(models, evaluate, mode=mode, buffers=buffers, integers=integers)
    return linear([models[index] for index in chosen], buffers=buffers, integers=integers)


def greedy_ingredients(
    models: Sequence[ModelT],
    evaluate: Callable[[ModelT], float],
    *,
    mode: Literal["max", "min"] = "max",
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> tuple[int, ...]:
    """Select the models of a greedy soup: in the order of their scores, each is added unless the average gets worse.

    Args:
        models: As for `greedy_soup`.
        evaluate: As for `greedy_soup`. It is called once per model and once per average tried.
        mode: As for `greedy_soup`.
        buffers: As for `greedy_soup`.
        integers: As for `greedy_soup`.

    Returns:
        Positions in `models`, the best model's first.

    Raises:
        MergeError: As for `greedy_soup`.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> models = [{"w": torch.tensor(w)} for w in (6.0, 1.0, 2.0)]
        >>> merge.greedy_ingredients(models, lambda model: -abs(model["w"].item() - 1.6))
        (2, 1)

    Reference:
        Wortsman et al., "Model soups", ICML 2022, arXiv:2203.05482 (Recipe 1).
    """
    models = list_models(models)
    check_choice("mode", mode, "max", "min")

    def score(model: ModelT, what: str) -> float:
        value = float(evaluate(model))
        if isnan(value):
            raise MergeError(f"evaluate gave NaN for {what}, which cannot be compared")
        return value if mode == "max" else -value

    scores = [score(model, f"models[{index}]") for index, model in enumerate(models)]
    order = sorted(range(len(models)), key=lambda index: -scores[index])
    chosen, best = [order[0]], scores[order[0]]
    for index in order[1:]:
        tried = [*chosen, index]
        # Not assigned to a variable, which would keep the average alive while the next one is made.
        value = score(
            linear([models[each] for each in tried], buffers=buffers, integers=integers),
            f"the average of models {tried}",
        )
        if value >= best:
            chosen, best = tried, value
    return tuple(chosen)


def add_by(coefficients: tuple[Coefficients, ...], choose_weights: Callable[[str], list[float]]) -> Recipe:
    """Return the recipe of a weighted sum, with weights by name."""

    def kernel(name: str, row: Row) -> Tensor:
        return weighted_sum(row, choose_weights(name))

    # Equal models give the same model if the weights add up to one, except for rounding.
    keeps: Callable[[str], bool] = lambda name: abs(sum(choose_weights(name)) - 1.0) < 1e-12  # noqa: E731
    return Recipe(kernel, coefficients, keeps, elementwise=True, weights=choose_weights)


def share_out(weights: list[float], name: str, normalize: bool = True) -> list[float]:
    """Return weights divided by their sum, or unmodified.

    Args:
        weights: The weights.
        name: The parameter, for errors.
        normalize: Whether to divide.

    Raises:
        MergeError: If they add up to 0.
    """
    total = sum(weights) if normalize else 1.0
    if total == 0:
        raise MergeError(
            f"the weights for {shorten(name)} are {shorten(weights)} and add up to 0; use normalize=False for a plain sum"
        )
    return [weight / total for weight in weights]


def weighted_sum(row: Row, weights: Sequence[float]) -> Tensor:
    """Return Σᵢ wᵢ θᵢ over a row; tensors whose weight is 0 are not read."""
    result: Tensor | None = None
    for index, weight in enumerate(weights):
        if weight != 0:
            result = row[index] * weight if result is None else result.add_(row[index], alpha=weight)
    return torch.zeros_like(row[0]) if result is None else result


def add_base(scales: Sequence[float]) -> list[float]:
    """Return the weights of a base and of models for θ_base + Σᵢ λᵢ (θᵢ − θ_base)."""
    return [1.0 - sum(scales), *scales]
