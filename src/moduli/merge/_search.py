"""`search`: finding the coefficients of a recipe by the score of the merged model, per model and per group of layers."""

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._search_ranges import SearchRange
from .._texts import shorten
from ._call import make_recipe
from ._coefficients import check_patterns, find_by_pattern
from ._driver import ModelT, Recipe, Row, run
from ._models import MergeError, check, view

Groups: TypeAlias = str | Sequence[str]
"""The groups of names with separate coefficients: `"layers"`, or glob patterns."""

UNIT = SearchRange(0.0, 1.0)
RANGES: Mapping[str, SearchRange] = {
    "t": UNIT,
    "weights": UNIT,
    "scale": SearchRange(0.0, 1.5),
    "density": SearchRange(0.05, 1.0),
}
"""The ranges in which coefficients of recipes are searched for, by name."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.([0-9]+)\.|^([0-9]+)\.")


@dataclass(frozen=True)
class MergeSearch:
    """The result of `search`.

    Attributes:
        model: The best merged model.
        options: Its coefficients, as arguments of the recipe.
        score: Its score.
        evaluations: The number of models that were made and evaluated.
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
    score: Callable[[Any], Any],
    budget: int = 100,
    *,
    start: Mapping[str, Any] | None = None,
    groups: Groups | None = None,
    vectorised: bool = False,
    bounds: tuple[float, float] | None = None,
    method: str = "cmaes",
    seed: int = 0,
    **options: Any,
) -> MergeSearch:
    """Find the coefficients of a recipe that make the best model, by any method of `moduli.evolve`.

    Models are made one at a time, and only the best is stored. With `vectorised`, those of a generation are made together, as the
    rows of a `Population`.

    Args:
        recipe: The name of a recipe: one of `RECIPES`.
        models: Live modules or state dicts; for recipes with a base, the base first.
        score: A function from the merged model to one number, the smaller the better: a validation loss. With
            `vectorised`, a function from a `Population` to one number for each member.
        budget: The number of models to make and evaluate.
        start: The initial values of the coefficients to search for, by name: numbers, lists of numbers with one for each
            model, or mappings from glob patterns to numbers. Without it, `t` of `lerp` and `slerp`, or one weight per model.
        groups: Searches for a separate number for every group of names: `"layers"` for one group per
            numbered layer and one for everything else, or glob patterns, of which the first that matches a name applies.
        vectorised: Whether a whole generation is evaluated at once. For modules, and recipes that are weighted sums (`linear`,
            `lerp`, `task_arithmetic`); a generation has to fit in memory.
        bounds: From where to where each coefficient may go; without it, the range that is declared for its name (`RANGES`),
            or from 0 to 1.
        method: A method of `moduli.evolve.search`.
        seed: The seed of the search.
        **options: The other arguments of the recipe, which are fixed.

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
    coefficients_start = dict(_find_start(recipe, len(models)) if start is None else start)
    if not coefficients_start:
        raise MergeError(f"{shorten(recipe)} has no coefficients to search for; say which with start=")
    if bounds is not None and not bounds[0] < bounds[1]:
        raise MergeError(f"bounds are {bounds}; the first must be less than the second")
    if groups is not None:
        patterns = _list_patterns(groups, list(view(models[0], "models[0]").names()))
        coefficients_start = {name: _divide(value, patterns) for name, value in coefficients_start.items()}
    low, high = _list_limits(coefficients_start, bounds)
    trials = _Trials(recipe, models, score, coefficients_start, (low, high), options)
    numbers = torch.tensor(list(_flatten(coefficients_start)), dtype=torch.float64).clamp(low, high)
    # The initial values are evaluated too.
    trials.judge_all(numbers.unsqueeze(0)) if vectorised else trials.judge(numbers)
    from ..evolve import Executor  # a room above this one: declared with the order of the rooms
    from ..evolve import search as evolve

    class GenerationExecutor(Executor):
        def evaluate(
            self, fitness: Any, rows: Any, seeds: Sequence[int], known: Any
        ) -> Generator[tuple[int, float], None, None]:
            yield from enumerate(trials.judge_all(rows(0, len(seeds))))

    holder = nn.Module()
    holder.register_parameter("numbers", nn.Parameter(numbers))
    widest = float(low.min()), float(high.max())
    width = widest[1] - widest[0]
    spread = method in ("cmaes", "sepcmaes", "ipop", "bipop", "snes", "xnes", "cem")
    settings: dict[str, Any] = {"sigma": width / 4} if spread else {}
    if vectorised:
        settings["executor"] = GenerationExecutor()
    result = evolve(
        holder,
        lambda module: trials.judge(module.get_parameter("numbers").detach()),
        method=method,
        budget=max(budget - 1, 1),
        seed=seed,
        bounds=widest,
        **settings,
    )
    if trials.best is None:
        raise MergeError("no merged model had a score that is a number; check the score function")
    coefficients, value, model = trials.best
    model = run(trials.describe(coefficients), list(models)) if model is None else model
    return MergeSearch(model, coefficients, value, result.evaluations + 1, list(result.history))


def _list_limits(start: Mapping[str, Any], bounds: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """Return the lower and upper bounds of all coefficients, by default those that are declared for their names."""
    ranges = [
        SearchRange(*bounds) if bounds is not None else RANGES.get(name, UNIT)
        for name, value in start.items()
        for _ in _flatten(value)
    ]
    ends = torch.tensor([(each.low, each.high) for each in ranges], dtype=torch.float64)
    return ends[:, 0], ends[:, 1]


class _Trials:
    """The evaluations of a search, and the best merged model.

    Args:
        recipe: The name of the recipe.
        models: The models.
        score: The score of one model, or of a population of them.
        start: The coefficients to search for, as arguments of the recipe.
        bounds: The lower and upper bound of each coefficient.
        options: The other arguments of the recipe.

    Attributes:
        best: The coefficients, the score and the model of the best; None instead of a model that was a row of a population.
    """

    def __init__(
        self,
        recipe: str,
        models: Sequence[Any],
        score: Callable[[Any], Any],
        start: dict[str, Any],
        bounds: tuple[Tensor, Tensor],
        options: dict[str, Any],
    ) -> None:
        self._recipe, self._models, self._score, self._options = recipe, list(models), score, options
        self._start, self._bounds = start, bounds
        self.best: tuple[dict[str, Any], float, Any] | None = None

    def read(self, numbers: Tensor) -> dict[str, Any]:
        """Return a vector of numbers as coefficients."""
        coefficients: dict[str, Any] = _restore(self._start, iter(numbers.clamp(*self._bounds).tolist()))
        return coefficients

    def describe(self, coefficients: dict[str, Any]) -> Recipe:
        """Return the recipe with these coefficients."""
        return make_recipe(self._recipe, len(self._models), {**self._options, **coefficients})

    @torch.no_grad()
    def judge(self, numbers: Tensor) -> float:
        """Merge one model and return its score."""
        coefficients = self.read(numbers)
        model = run(self.describe(coefficients), self._models)
        value = float(self._score(model))
        self._note(coefficients, value, model)
        return value

    @torch.no_grad()
    def judge_all(self, rows: Tensor) -> list[float]:
        """Make a population, one member for each row of numbers, and return the scores."""
        all_coefficients = [self.read(row) for row in rows]
        scores = self._score(self._make_population([self.describe(each) for each in all_coefficients]))
        values = [float(value) for value in scores]
        if len(values) != len(rows):
            raise MergeError(
                f"the score of a population gave {len(values)} numbers for {len(rows)} members; give one for each"
            )
        for coefficients, value in zip(all_coefficients, values, strict=True):
            self._note(coefficients, value, None)
        return values

    def _note(self, coefficients: dict[str, Any], value: float, model: Any) -> None:
        if value < (float("inf") if self.best is None else self.best[1]):
            self.best = coefficients, value, model

    def _make_population(self, recipes: list[Recipe]) -> Any:
        """Return a population with one merged model for each recipe: weights by models times models by entries, name by name."""
        from ..population import Population  # imported here because other searches do not need it

        first = self._models[0]
        if recipes[0].weights is None or not all(isinstance(model, nn.Module) for model in self._models):
            raise MergeError(
                "a generation is merged at once if the recipe is a weighted sum of modules, which "
                f"{shorten(self._recipe)} of these models is not; leave vectorised out"
            )
        views = [view(model, f"models[{at}]") for at, model in enumerate(self._models)]
        names = [name for name, _ in first.named_parameters()]
        for other in views[1:]:
            check(views[0], other, names)
        for coefficient in recipes[0].coefficients:
            coefficient.check(names)
        members = Population.of(first, len(recipes))
        for name, leaf in members.named_parameters():
            row = Row(views, name)
            stacked = torch.stack([tensor.reshape(-1) for tensor in row])
            weights = [recipe.weights(name) for recipe in recipes if recipe.weights is not None]
            factors = torch.tensor(weights, dtype=stacked.dtype, device=stacked.device)
            leaf.copy_((factors @ stacked).view(leaf.shape))
        return members


def _find_start(recipe: str, count: int) -> dict[str, Any]:
    """Return the initial coefficients of a search; none if the recipe has none."""
    others = count - 1
    starts: dict[tuple[str, ...], dict[str, Any]] = {
        ("lerp", "slerp"): {"t": 0.5},
        ("linear", "karcher", "nuslerp", "multislerp"): {"weights": [1.0 / count] * count},
        ("task_arithmetic",): {"scale": [1.0 / max(others, 1)] * others},
        ("ties", "dare", "breadcrumbs", "della"): {"weights": [0.5] * others, "density": 0.5},
        ("sce",): {"density": 0.5},
    }
    return next((start for names, start in starts.items() if recipe in names), {})


def _list_patterns(groups: Groups, names: list[str]) -> list[str]:
    """Return the patterns of groups; for "layers", one for each numbered layer and one for everything else.

    Raises:
        MergeError: If there are no numbered layers, or a pattern matches no name.
    """
    if groups != "layers":
        patterns = [groups] if isinstance(groups, str) else list(groups)
        check_patterns(patterns, names, "groups")
        missed = next((name for name in names if find_by_pattern(dict.fromkeys(patterns, 1), name) is None), None)
        if missed is not None:
            raise MergeError(
                f"groups have no pattern for {shorten(missed)}; add one that matches it, such as '*' at the end"
            )
        return patterns
    prefixes = dict.fromkeys(name[: match.end()] for name in names if (match := _LAYER.search(name)) is not None)
    if not prefixes:
        raise MergeError("groups are 'layers', and no name has the number of a layer in it; give patterns of names")
    patterns = [f"{prefix}*" for prefix in prefixes]
    others = any(_LAYER.search(name) is None for name in names)
    return [*patterns, "*"] if others else patterns


def _divide(value: Any, patterns: list[str]) -> Any:
    """Return a number for each group instead of one number; mappings by pattern are unmodified."""
    if isinstance(value, Mapping):
        return value
    return (
        [_divide(each, patterns) for each in value]
        if isinstance(value, list | tuple)
        else dict.fromkeys(patterns, value)
    )


def _flatten(value: Any) -> Iterator[float]:
    """Iterate over all numbers of nested lists and mappings, in order."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _flatten(each)
    else:
        yield float(value)


def _restore(value: Any, numbers: Iterator[float]) -> Any:
    """Return numbers, in the order of `_flatten`, in the form of nested lists and mappings."""
    if isinstance(value, Mapping):
        return {key: _restore(each, numbers) for key, each in value.items()}
    return [_restore(each, numbers) for each in value] if isinstance(value, list | tuple) else next(numbers)
