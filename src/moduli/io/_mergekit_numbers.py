"""Parameters of mergekit's YAML as arguments of recipes: by model, layer or filter, and in the units of our recipes."""

from collections.abc import Callable
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any, Final

from .._texts import shorten
from ..merge import RECIPES, MergeError
from ._files import TensorFiles
from ._slices import layer_of, rename_layers

# The recipe of each method of mergekit, with the options in which mergekit's defaults differ.
METHODS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "linear": ("linear", {}),
    "slerp": ("slerp", {}),
    "task_arithmetic": ("task_arithmetic", {}),
    "ties": ("ties", {"density": 1.0}),
    "dare_ties": ("dare", {"then": "ties", "density": 1.0, "normalize": False, "generator": 0}),
    "dare_linear": ("dare", {"then": "linear", "density": 1.0, "normalize": False, "generator": 0}),
    "model_stock": ("stock", {}),
    "breadcrumbs": ("breadcrumbs", {"then": "linear", "density": 1.0}),
    "breadcrumbs_ties": ("breadcrumbs", {"then": "ties", "density": 1.0, "normalize": False}),
    "della": ("della", {"then": "ties", "density": 1.0, "epsilon": 0.3, "generator": 0}),
    "della_linear": ("della", {"then": "linear", "density": 1.0, "epsilon": 0.3, "generator": 0}),
    "sce": ("sce", {}),
    "karcher": ("karcher", {"steps": 10, "tolerance": 1e-5}),
    "nuslerp": ("nuslerp", {}),
    "multislerp": ("multislerp", {}),
    "nearswap": ("nearswap", {}),
    "arcee_fusion": ("arcee_fusion", {}),
    "ram": ("ram", {}),
    "ramplus_tl": ("ram", {"r": 0.1, "alpha": 0.2}),
    "passthrough": ("linear", {"normalize": False}),
}
# The argument of each parameter; parameters of models may also be given once for all models.
_OF_MODELS: Final = {"weight": "weights", "density": "density", "gamma": "gamma", "epsilon": "epsilon"}
_OF_ALL: Final = {
    "t": "t", "normalize": "normalize", "rescale": "rescale", "lambda": "scale", "select_topk": "density",
    "max_iter": "steps", "tol": "tolerance", "seed": "generator", "normalize_weights": "normalize", "r": "r", "alpha": "alpha",
    "axis": "axis", "threshold": "threshold",
}  # fmt: skip
_CALLED: Final = _OF_MODELS | _OF_ALL
_IGNORED: Final = ("int8_mask", "eps")  # parameters of mergekit's implementation


class RecipeScope:
    """The names to which a recipe's numbers apply: those of the first checkpoint, or of a slice of its layers.

    Args:
        path: The checkpoint.
        layers: The first layer and the one after the last; None for all.
        start: The number of the first layer in the result.

    Attributes:
        names: The names in the checkpoint.
        sizes: The number of elements of each tensor in the result, by name.
    """

    def __init__(self, path: Path, layers: tuple[int, int] | None, start: int) -> None:
        files = TensorFiles(path)
        self.names = list(files)
        table = {name: name for name in files}
        if layers is not None:
            table = rename_layers(files, layers, start, (True, True), str(path))
        self.sizes = {name: files.meta(source).numel() for name, source in table.items()}
        self._start = start
        self.last = max(map(layer_of, table), default=0) - start

    def find_place(self, name: str) -> float:
        """Return the position of a name between the first layer, 0, and the last, 1; 0 if it is in no layer."""
        return max(layer_of(name) - self._start, 0) / max(self.last, 1)


def read_options(
    method: str, shared: dict[str, Any], entries: list[dict[str, Any]], scope: RecipeScope
) -> dict[str, Any]:
    """Return the arguments of a recipe: lists for parameters of models, functions of the name for numbers by layer or filter.

    Args:
        method: The method of mergekit.
        shared: The parameters of the recipe.
        entries: The entries of the models, with their own parameters.
        scope: The names to which the numbers apply.
    """
    recipe, own = METHODS[method][0], [each.get("parameters") or {} for each in entries]
    if method == "passthrough":
        shared, own = _rename(shared, "scale", "weight"), [_rename(each, "scale", "weight") for each in own]
    if recipe == "ram":
        shared = _rename(shared, "epsilon", "threshold")

    def read(value: Any) -> Any:
        return _number_by_name(value, scope) if isinstance(value, list) else value

    parameters: dict[str, Any] = {
        key: read(value) for key, value in shared.items() if key not in (*_OF_MODELS, *_IGNORED)
    }
    parameters |= {key: list(map(read, values)) for key, values in _collect_by_model(shared, own).items()}
    _adapt(method, parameters, len(entries), scope)
    return _name_arguments(method, parameters)


def _collect_by_model(shared: dict[str, Any], own: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the parameters of models, with one value for each model."""
    collected = {}
    for key in {**_OF_MODELS, **dict.fromkeys(key for part in own for key in part)}:
        values = [part.get(key, shared.get(key)) for part in own]
        if any(value is not None for value in values):
            require(
                key in _OF_MODELS,
                f"the parameter {shorten(key)} of a model is not here; there are {', '.join(_OF_MODELS)}",
            )
            require(None not in values, f"some models have a {key} and some have none")
            collected[key] = values
    return collected


def _name_arguments(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters under the names of the recipe's arguments; raise for those that it does not have."""
    recipe = METHODS[method][0]
    accepted = signature(RECIPES[recipe]).parameters
    options: dict[str, Any] = {}
    for key, value in parameters.items():
        require(key in _CALLED, f"the parameter {shorten(key)} is not here; there are {', '.join(_CALLED)}")
        if _CALLED[key] in accepted:
            options[_CALLED[key]] = value
        else:
            # Values that describe what a recipe without such an argument does.
            right = (key, value) in (("normalize", False), ("rescale", recipe == "della"), ("rescale", False))
            require(right, f"{method} has no parameter {shorten(key)} here; remove it")
    return options


def _rename(table: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in table.items()}


def _adapt(method: str, parameters: dict[str, Any], count: int, scope: RecipeScope) -> None:
    """Convert parameters whose numbers mean something else in the recipe, in place."""
    recipe = METHODS[method][0]
    if recipe == "task_arithmetic":  # the recipe's scales are the products of both
        weights, factor = parameters.pop("weight", [1.0] * count), parameters.pop("lambda", 1.0)
        parameters["lambda"] = [_product(factor, each) for each in weights]
    if "epsilon" in parameters:  # mergekit's is half of the paper's, and the recipe's
        parameters["epsilon"] = [_product(2, each) for each in parameters["epsilon"]]
    if recipe == "nuslerp":
        whole, columns = parameters.pop("nuslerp_flatten", True), parameters.pop("nuslerp_row_wise", False)
        parameters["axis"] = None if whole else 0 if columns else -1
    if recipe == "stock" and parameters.get("filter_wise") is False:
        del parameters["filter_wise"]
    _round_shares(recipe, parameters, count, scope)


def _round_shares(recipe: str, parameters: dict[str, Any], count: int, scope: RecipeScope) -> None:
    """Round the numbers of entries of sparse recipes down, as mergekit does, in place."""
    if recipe in ("ties", "breadcrumbs") and "density" in parameters:
        least = recipe == "ties"  # which keeps at least one entry
        parameters["density"] = [_truncate(each, scope, least) for each in parameters["density"]]
    if recipe == "sce" and "select_topk" in parameters:
        parameters["select_topk"] = _truncate(parameters["select_topk"], scope, 0)
    if recipe == "breadcrumbs":
        densities = parameters.get("density", [1.0] * count)
        gammas = parameters.get("gamma", [0.01] * count)
        parameters["gamma"] = [_truncate(each, scope, 0, rest) for each, rest in zip(gammas, densities, strict=True)]


def _truncate(share: Any, scope: RecipeScope, least: int, rest: Any = 0.0) -> Callable[[str], float]:
    """Return a function from a name to the share of a whole number of entries.

    Args:
        share: The share, or a function from a name to it.
        scope: The names.
        least: The smallest number of entries.
        rest: Another share, which limits the number of entries.
    """
    for each in (share, rest):
        require(callable(each) or _is_number(each), f"{shorten(each)} is no number and no list of numbers")

    def find(name: str) -> float:
        wanted, taken = (each(name) if callable(each) else each for each in (share, rest))
        size = scope.sizes.get(name, 0)
        if not size or not 0 <= wanted <= 1:
            return float(wanted)  # the recipe raises for shares outside of 0 to 1
        return float(min(max(int(wanted * size), least), size - round(taken * size)) / size)

    return find


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _product(left: Any, right: Any) -> Any:
    """Return the product of two numbers, or numbers by name, as a function of the name."""
    for each in (left, right):
        require(callable(each) or _is_number(each), f"{shorten(each)} is no number and no list of numbers")
    return lambda name: prod(each(name) if callable(each) else each for each in (left, right))


def _number_by_name(value: list[Any], scope: RecipeScope) -> Callable[[str], float]:
    """Return a gradient over layers, or filters with numbers or gradients, as a function of the name."""
    if all(map(_is_number, value)):
        value = [{"value": value}]
    rules: list[tuple[str, list[float]]] = []
    for each in value:
        right = isinstance(each, dict) and "value" in each and not set(each) - {"filter", "value"}
        right = right and isinstance(each.get("filter"), str | None)
        require(right, f"{shorten(each)} is no filter with a value")
        points = each["value"] if isinstance(each["value"], list) else [each["value"]]
        require(bool(points) and all(map(_is_number, points)), f"{shorten(points)} is no number and no list of numbers")
        part = "" if each.get("filter") in (None, "*") else each["filter"]
        unmatched = f"no name of the first model contains the filter {shorten(part)}; correct or remove it"
        require(any(part in name for name in scope.names), unmatched)
        rules.append((part, [float(point) for point in points]))
    flat = all(len(points) == 1 for _, points in rules)
    require(
        any(layer_of(name) > 0 for name in scope.names) or flat,
        "it has a gradient over layers, and the first model has no numbered layers",
    )

    def number(name: str) -> float:
        points = next((points for part, points in rules if part in name), [])
        require(
            bool(points),
            f"the recipe has no value for {shorten(name)}: no filter is part of it; add one without a filter",
        )
        place = scope.find_place(name) * (len(points) - 1)
        low, high = int(place), min(int(place) + 1, len(points) - 1)
        return points[low] + (points[high] - points[low]) * (place - low)

    return number


def require(right: bool, message: str) -> None:
    """Raise MergeError with a message unless a condition holds."""
    if not right:
        raise MergeError(message)
