"""Parameters of mergekit's YAML as arguments of recipes: by model, by layer, by filter, and as its methods count."""

from collections.abc import Callable
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any, Final

from .._texts import shorten
from ..merge import RECIPES, MergeError
from ._files import TensorFiles
from ._slices import layer_of, rename_layers

# What a method is called here, with the options that make it so, where its defaults are other than ours.
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
# What a parameter is called here; those of models may also be given once for all of them.
_OF_MODELS: Final = {"weight": "weights", "density": "density", "gamma": "gamma", "epsilon": "epsilon"}
_OF_ALL: Final = {
    "t": "t", "normalize": "normalize", "rescale": "rescale", "lambda": "scale", "select_topk": "density",
    "max_iter": "steps", "tol": "tolerance", "seed": "generator", "normalize_weights": "normalize", "r": "r", "alpha": "alpha",
    "axis": "axis", "threshold": "threshold",
}  # fmt: skip
_CALLED: Final = _OF_MODELS | _OF_ALL
_IGNORED: Final = ("int8_mask", "eps")  # how it computes


class RecipeScope:
    """The names that a recipe's numbers are for: those of the first checkpoint, or of a slice of its layers.

    Args:
        path: The checkpoint.
        layers: The first layer and the one after the last; None for all.
        start: The number of the first layer in the result.

    Attributes:
        names: The names in the checkpoint.
        sizes: How many entries the tensor of each name in the result has.
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
        """Where a name is between the first layer, 0, and the last, 1; 0 if it is in none."""
        return max(layer_of(name) - self._start, 0) / max(self.last, 1)


def read_options(
    method: str, shared: dict[str, Any], entries: list[dict[str, Any]], scope: RecipeScope
) -> dict[str, Any]:
    """The arguments of a recipe: a list for what models have, and functions of the name for numbers by layer or filter."""
    recipe, own = METHODS[method][0], [each.get("parameters") or {} for each in entries]
    if method == "passthrough":
        shared, own = _rename(shared, "scale", "weight"), [_rename(each, "scale", "weight") for each in own]
    if recipe == "ram":
        shared = _rename(shared, "epsilon", "threshold")

    def read(value: Any) -> Any:
        return _number_by_name(value, scope) if isinstance(value, list) else value

    given: dict[str, Any] = {key: read(value) for key, value in shared.items() if key not in (*_OF_MODELS, *_IGNORED)}
    for key in {**_OF_MODELS, **dict.fromkeys(key for part in own for key in part)}:
        values = [part.get(key, shared.get(key)) for part in own]
        if any(value is not None for value in values):
            require(
                key in _OF_MODELS,
                f"the parameter {shorten(key)} of a model is not here; there are {', '.join(_OF_MODELS)}",
            )
            require(None not in values, f"some models have a {key} and some have none")
            given[key] = [read(value) for value in values]
    _adapt(method, given, len(entries), scope)
    accepted = signature(RECIPES[recipe]).parameters
    options: dict[str, Any] = {}
    for key, value in given.items():
        require(key in _CALLED, f"the parameter {shorten(key)} is not here; there are {', '.join(_CALLED)}")
        if _CALLED[key] in accepted:
            options[_CALLED[key]] = value
        else:
            # What a recipe without such an argument does anyway.
            right = (key, value) in (("normalize", False), ("rescale", recipe == "della"), ("rescale", False))
            require(right, f"{method} has no parameter {shorten(key)} here; remove it")
    return options


def _rename(table: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in table.items()}


def _adapt(method: str, given: dict[str, Any], count: int, scope: RecipeScope) -> None:
    """Change parameters whose numbers mean something else in the recipe, in place."""
    recipe = METHODS[method][0]
    if recipe == "task_arithmetic":  # its numbers are the products
        weights, factor = given.pop("weight", [1.0] * count), given.pop("lambda", 1.0)
        given["lambda"] = [_product(factor, each) for each in weights]
    if "epsilon" in given:  # half of what the paper, and the recipe, call so
        given["epsilon"] = [_product(2, each) for each in given["epsilon"]]
    if recipe == "nuslerp":
        whole, columns = given.pop("nuslerp_flatten", True), given.pop("nuslerp_row_wise", False)
        given["axis"] = None if whole else 0 if columns else -1
    if recipe == "stock" and given.get("filter_wise") is False:
        del given["filter_wise"]
    if recipe in ("ties", "breadcrumbs"):  # numbers of entries are rounded down, and ties keeps one
        least = recipe == "ties"
        given |= {"density": [_truncate(each, scope, least) for each in given["density"]]} if "density" in given else {}
    if recipe == "sce" and "select_topk" in given:
        given["select_topk"] = _truncate(given["select_topk"], scope, 0)
    if recipe == "breadcrumbs":
        densities = given.get("density", [1.0] * count)
        gammas = given.get("gamma", [0.01] * count)
        given["gamma"] = [_truncate(each, scope, 0, rest) for each, rest in zip(gammas, densities, strict=True)]


def _truncate(share: Any, scope: RecipeScope, least: int, rest: Any = 0.0) -> Callable[[str], float]:
    """Return by name the share of a whole number of entries: at least `least`, and no more than another share leaves."""
    for each in (share, rest):
        require(callable(each) or _is_number(each), f"{shorten(each)} is no number and no list of numbers")

    def find(name: str) -> float:
        wanted, taken = (each(name) if callable(each) else each for each in (share, rest))
        size = scope.sizes.get(name, 0)
        if not size or not 0 <= wanted <= 1:
            return float(wanted)  # which the recipe refuses in words
        return float(min(max(int(wanted * size), least), size - round(taken * size)) / size)

    return find


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _product(left: Any, right: Any) -> Any:
    """The product of two numbers, or of numbers by name."""
    for each in (left, right):
        require(callable(each) or _is_number(each), f"{shorten(each)} is no number and no list of numbers")
    return lambda name: prod(each(name) if callable(each) else each for each in (left, right))


def _number_by_name(value: list[Any], scope: RecipeScope) -> Callable[[str], float]:
    """What a gradient over layers, or filters with numbers or gradients, give for each name."""
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
        told = f"no name of the first model contains the filter {shorten(part)}; correct or remove it"
        require(any(part in name for name in scope.names), told)
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


def require(right: bool, told: str) -> None:
    """Raise MergeError with a text unless something is right."""
    if not right:
        raise MergeError(told)
