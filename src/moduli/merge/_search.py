"""Finding coefficients: a search over the numbers of a recipe, each judged by the model that it makes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._call import RECIPES, make_recipe
from ._driver import ModelT, run
from ._models import MergeError


@dataclass(frozen=True)
class MergeSearch:
    """What `search` found.

    Attributes:
        model: The best merged model.
        options: The coefficients that make it, as the recipe takes them.
        score: Its score.
        evaluations: How many models were made and judged.
        history: The best score after each generation.
    """

    model: Any
    options: dict[str, Any]
    score: float
    evaluations: int
    history: list[float]


def search(
    recipe: str,
    models: Sequence[ModelT],
    score: Callable[[ModelT], Any],
    budget: int = 100,
    *,
    start: Mapping[str, Any] | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    method: str = "cmaes",
    seed: int = 0,
    **options: Any,
) -> MergeSearch:
    """Find the coefficients of a recipe that make the best model, by any method of `moduli.evolve`.

    Args:
        recipe: The name of a recipe: one of `RECIPES`.
        models: Live modules or state dicts; for recipes with a base, the base first.
        score: A function of the merged model that gives one number, the smaller the better: a validation loss.
        budget: How many models are made and judged.
        start: The coefficients to search for, by name, where the search starts: numbers, lists of numbers with one for each
            model, or mappings from glob patterns to numbers. Without it, `t` of `lerp` and `slerp`, or one weight per model.
        bounds: From where to where each coefficient may go.
        method: A method of `moduli.evolve.search`.
        seed: Decides every random number of the search.
        **options: The other arguments of the recipe, which stay as they are.

    Returns:
        The best model with its coefficients and its score. It is never worse than the start.

    Raises:
        MergeError: If the models or the coefficients do not fit.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 3.0])}
        >>> found = merge.search("lerp", [a, b], lambda m: (m["w"] - torch.tensor([0.25, 0.75])).square().sum(), 80)
        >>> round(found.options["t"], 2)
        0.25
    """
    given = dict(_start(recipe, len(models))) if start is None else dict(start)
    if not given:
        raise MergeError("start has no coefficients; give at least one")
    if not bounds[0] < bounds[1]:
        raise MergeError(f"bounds are {bounds}; the first must be less than the second")
    holder = nn.Module()
    for name, value in given.items():
        numbers = torch.tensor(list(value.values()) if isinstance(value, Mapping) else value, dtype=torch.float64)
        holder.register_parameter(name, nn.Parameter(numbers.reshape(-1).clamp(*bounds)))
    best: list[Any] = [None, None, float("inf")]

    def fitness(module: nn.Module) -> float:
        held = {name: numbers.detach().clamp(*bounds) for name, numbers in module.named_parameters()}
        found = {name: _restore(value, held[name]) for name, value in given.items()}
        model = run(make_recipe(recipe, len(models), {**options, **found}), list(models))
        with torch.no_grad():
            result = float(score(model))
        if result < best[2]:
            best[:] = [model, found, result]
        return result

    fitness(holder)  # the start itself counts
    from ..evolve import search as evolve  # a room above this one: declared with the order of the rooms

    width = bounds[1] - bounds[0]
    spread = method in ("cmaes", "sepcmaes", "ipop", "bipop", "snes", "xnes", "cem")
    settings: dict[str, Any] = {"sigma": width / 4} if spread else {}
    result = evolve(holder, fitness, method=method, budget=max(budget - 1, 1), seed=seed, bounds=bounds, **settings)
    if best[0] is None:
        raise MergeError("no merged model had a score that is a number; check the score function")
    return MergeSearch(best[0], best[1], best[2], result.evaluations + 1, list(result.history))


def _start(recipe: str, count: int) -> dict[str, Any]:
    if recipe in ("lerp", "slerp"):
        return {"t": 0.5}
    if recipe in ("linear", "karcher"):
        return {"weights": [1.0 / count] * count}
    if recipe == "task_arithmetic":
        return {"scale": [1.0 / (count - 1)] * (count - 1)}
    if recipe in ("ties", "dare", "breadcrumbs", "della"):
        return {"weights": [0.5] * (count - 1), "density": 0.5}
    if recipe == "sce":
        return {"density": 0.5}
    if recipe not in RECIPES:
        raise MergeError(f"{recipe!r} is not a recipe; choose from {', '.join(RECIPES)}")
    raise MergeError(f"{recipe!r} has no coefficients to search for; say which with start=")


def _restore(given: Any, numbers: Tensor) -> Any:
    """Numbers in the form in which the coefficient was given: one, a list, or a mapping from patterns."""
    found = numbers.tolist()
    if isinstance(given, Mapping):
        return dict(zip(given, found, strict=True))
    return found if isinstance(given, list | tuple) else found[0]
