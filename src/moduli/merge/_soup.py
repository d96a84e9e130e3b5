"""Model soups: averages of fine-tuned models, of all of them or of those that help.

Reference:
    Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
    inference time", ICML 2022, arXiv:2203.05482 (the uniform soup, and Recipe 1 for the greedy one).
"""

from collections.abc import Callable, Sequence
from inspect import unwrap
from math import isnan
from typing import Literal, cast

from ._errors import MergeError
from ._linear import linear
from ._paths import list_models, recipe
from ._recipe import Buffers, Integers, ModelT


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
    """Average models: all of them, θ = (1/n) Σᵢ θᵢ, or greedily those that help.

    Args:
        models: Modules, or state dicts, usually fine-tuned from one base.
        how: Whether to average all, or to choose as `greedy_soup` does.
        evaluate: For the greedy soup, the score of a model.
        mode: For the greedy soup, whether a greater or a lesser score is better.
        buffers: Whether floating buffers are the first model's (the best model's, when greedy) or merged too.
        integers: Whether tensors of integers must be equal; they are the first model's in any case.

    Raises:
        MergeError: If the structures differ, values are NaN, or `evaluate` is missing or not used.

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
    if how not in ("uniform", "greedy"):
        raise MergeError(f"how is {how!r}; it must be 'uniform' or 'greedy'")
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
    models = list_models(models)
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
    """Choose the models of a greedy soup: from the best on, each is kept if the average does not get worse by it.

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
    if mode not in ("max", "min"):
        raise MergeError(f"mode is {mode!r}; it must be 'max' or 'min'")

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
        # Not given a name, which would keep it alive while the next is made.
        value = score(
            linear([models[each] for each in tried], buffers=buffers, integers=integers),
            f"the average of models {tried}",
        )
        if value >= best:
            chosen, best = tried, value
    return tuple(chosen)
