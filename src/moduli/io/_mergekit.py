"""Recipes in the YAML that mergekit reads, for the methods that `moduli.merge` has; everything else is refused by name."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from .._texts import cut, shorten
from ..merge import RECIPES, MergeError
from ._basics import CheckpointError, PathLike, has_form
from ._files import TensorFiles
from ._merge import merge_files
from ._open import read_bytes
from ._safetensors import dtype_name

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
    "karcher": ("karcher", {}),
}
# What a parameter is called here; those of models may also be given once for all of them.
_OF_MODELS: Final = {"weight": "weights", "density": "density", "gamma": "gamma", "epsilon": "epsilon"}
_OF_ALL: Final = {
    "t": "t", "normalize": "normalize", "rescale": "rescale", "lambda": "scale", "select_topk": "density",
    "max_iter": "steps", "tol": "tolerance", "seed": "generator",
}  # fmt: skip
_CALLED: Final = _OF_MODELS | _OF_ALL
_MOST_ENTRIES: Final = 10_000
_IGNORED: Final = "int8_mask"  # how it computes
_DTYPES: Final = {dtype_name(each): each for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_BASED: Final = frozenset({"task_arithmetic", "ties", "dare", "stock", "breadcrumbs", "della", "sce"})


def _is_table(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(key, str) for key in value))


def _is_entry(value: Any) -> bool:
    return has_form(value, {"model": str, "parameters": _is_table}) and "model" in value


# What a recipe has, and what to say of anything else in its place.
_DTYPE: Final = (lambda found: isinstance(found, str) and found in _DTYPES, f"there are {', '.join(_DTYPES)}")
_FORMS: Final[dict[str, tuple[Any, str]]] = {
    "merge_method": (lambda found: isinstance(found, str) and found in METHODS, f"there are {', '.join(METHODS)}"),
    "tokenizer_source": (lambda found: found == "base", "embeddings follow the first model"),
    "base_model": (str, "it must be a path"),
    "models": ([_is_entry], "it is a list with a model, and perhaps parameters, in each entry"),
    "parameters": (_is_table, "they must be a mapping from names to values"),
    "dtype": _DTYPE,
    "out_dtype": _DTYPE,
    "name": (str, "it must be a text"),
}


@dataclass(frozen=True)
class MergeRecipe:
    """A recipe that was read: what `merge_files` is to be called with.

    Attributes:
        recipe: The name of a recipe.
        paths: The checkpoints.
        options: The arguments of the recipe.
        dtype: The dtype of the result, or None.
    """

    recipe: str
    paths: list[Path]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None


def merge_recipe(path: PathLike, out: PathLike, *, shard_size: int | None = None, **options: Any) -> MergeRecipe:
    """Merge what a recipe in mergekit's YAML says.

    Args:
        path: The recipe. Models in it are paths, as seen from where it is.
        out: What to write.
        shard_size: As for `merge_files`.
        **options: Other arguments of `merge_files` or of the recipe; they win over those in the file.

    Returns:
        What was done.

    Raises:
        MergeError: If the recipe asks for something that there is not here, which is named.
        CheckpointError: If the recipe cannot be read, a checkpoint is damaged, or the result cannot be written.

    Example:
        >>> import pathlib, tempfile, torch
        >>> import moduli.io as io
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name, value in (("a", 0.0), ("b", 4.0)):
        ...     io.save(folder / f"{name}.safetensors", {"w": torch.full((2,), value)})
        >>> _ = (folder / "recipe.yml").write_text('''
        ... merge_method: linear
        ... models:
        ...   - model: a.safetensors
        ...     parameters:
        ...       weight: 3
        ...   - model: b.safetensors
        ...     parameters:
        ...       weight: 1
        ... ''')
        >>> _ = io.merge_recipe(folder / "recipe.yml", folder / "c.safetensors")
        >>> io.read(folder / "c.safetensors").module["w"]
        tensor([1., 1.])
    """
    found = read_recipe(path)
    given = {**found.options, **options}
    merge_files(found.recipe, found.paths, out, shard_size=shard_size, dtype=found.dtype, **given)
    return found


def read_recipe(path: PathLike) -> MergeRecipe:
    """Read a recipe in mergekit's YAML, without merging.

    Raises:
        MergeError: If it asks for something that there is not here.
        CheckpointError: If it cannot be read.
    """
    path = Path(path)
    found = _parse_yaml(read_bytes(path), f"{str(path)!r}")
    try:
        return _understand(found, path.parent)
    except MergeError as error:
        raise MergeError(f"{str(path)!r}: {error}") from None


def _understand(found: Any, folder: Path) -> MergeRecipe:
    _require(isinstance(found, dict) and "merge_method" in found, "it is no recipe: it has no merge_method")
    for key in found:
        _require(
            key in _FORMS, f"it has {shorten(key)}, which is not merged here; there are {', '.join(sorted(_FORMS))}"
        )
    for key, (form, told) in _FORMS.items():
        right = found.get(key) is None or has_form(found[key], form)
        _require(right, f"{key} {shorten(found.get(key))} is not here; {told}")
    method, base, models = found["merge_method"], found.get("base_model"), found.get("models") or []
    recipe, options = METHODS[method]
    _require(recipe not in _BASED or base is not None, f"{method} needs a base_model")
    entries, first = [each for each in models if each["model"] != base], [] if base is None else [{"model": base}]
    if recipe in ("linear", "karcher"):
        entries, first = models, []
    _require(bool(entries), "it has no models to merge")
    paths = [folder / each["model"] for each in [*first, *entries]]
    for each in paths:
        _require(each.exists(), f"there is no checkpoint {str(each)!r}; models are paths here, so download it first")
    options = {**options, **_options(recipe, found, entries, paths[0])}
    dtype = found.get("out_dtype", found.get("dtype"))
    return MergeRecipe(recipe, paths, options, None if dtype is None else _DTYPES[dtype])


def _require(right: bool, told: str) -> None:
    if not right:
        raise MergeError(told)


def _parse_yaml(text: bytes, what: str) -> Any:
    """Read a document as plain values, by PyYAML's safe loader."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{what} is read by PyYAML: pip install 'moduli[yaml]'") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            """Copy the entries of other mappings into one (`<<: *other`), which may double them again and again."""
            super().flatten_mapping(node)
            if len(node.value) > _MOST_ENTRIES:
                raise yaml.YAMLError(f"a mapping has more than {_MOST_ENTRIES} entries, with those that it takes over")

    try:
        return yaml.load(text, Loader)
    except Exception as error:  # the loader fails in many ways on numbers and dates that are none
        told = cut(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{what} cannot be read: {told}") from error


def _options(recipe: str, found: dict[str, Any], entries: list[dict[str, Any]], first: Path) -> dict[str, Any]:
    """The arguments of a recipe: a list for what models have, and functions of the name for numbers by layer or filter."""
    shared, *own = (each.get("parameters") or {} for each in (found, *entries))
    accepted = signature(RECIPES[recipe]).parameters
    names = list(TensorFiles(first))

    def read(value: Any) -> Any:
        return _number_by_name(value, names) if isinstance(value, list) else value

    given: dict[str, Any] = {key: read(value) for key, value in shared.items() if key not in (*_OF_MODELS, _IGNORED)}
    for key in {**_OF_MODELS, **dict.fromkeys(key for part in own for key in part)}:
        values = [part.get(key, shared.get(key)) for part in own]
        if any(value is not None for value in values):
            _require(
                key in _OF_MODELS,
                f"the parameter {shorten(key)} of a model is not here; there are {', '.join(_OF_MODELS)}",
            )
            _require(None not in values, f"some models have a {key} and some have none")
            given[key] = [read(value) for value in values]
    if recipe == "task_arithmetic":  # its numbers are the products
        weights, factor = given.pop("weight", [1.0] * len(entries)), given.pop("lambda", 1.0)
        given["lambda"] = [_product(factor, each) for each in weights]
    if "epsilon" in given:  # half of what the paper, and the recipe, call so
        given["epsilon"] = [_product(2, each) for each in given["epsilon"]]
    options: dict[str, Any] = {}
    for key, value in given.items():
        _require(key in _CALLED, f"the parameter {shorten(key)} is not here; there are {', '.join(_CALLED)}")
        if _CALLED[key] in accepted:
            options[_CALLED[key]] = value
        else:
            # What a recipe without such an argument does anyway.
            right = (key, value) in (("normalize", False), ("rescale", recipe == "della"), ("rescale", False))
            _require(right, f"{found['merge_method']} has no parameter {shorten(key)} here; remove it")
    return options


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _product(left: Any, right: Any) -> Any:
    """The product of two numbers, or of numbers by name."""
    for each in (left, right):
        _require(callable(each) or _is_number(each), f"{shorten(each)} is no number and no list of numbers")
    return lambda name: prod(each(name) if callable(each) else each for each in (left, right))


def _number_by_name(value: list[Any], names: list[str]) -> Callable[[str], float]:
    """What a gradient over layers, or filters with numbers or gradients, give for each name."""
    if all(map(_is_number, value)):
        value = [{"value": value}]
    rules: list[tuple[str, list[float]]] = []
    for each in value:
        right = isinstance(each, dict) and "value" in each and not set(each) - {"filter", "value"}
        right = right and isinstance(each.get("filter"), str | None)
        _require(right, f"{shorten(each)} is no filter with a value")
        points = each["value"] if isinstance(each["value"], list) else [each["value"]]
        _require(
            bool(points) and all(map(_is_number, points)), f"{shorten(points)} is no number and no list of numbers"
        )
        part = "" if each.get("filter") in (None, "*") else each["filter"]
        told = f"no name of the first model contains the filter {shorten(part)}; correct or remove it"
        _require(any(part in name for name in names), told)
        rules.append((part, [float(point) for point in points]))
    last = max(map(_layer, names), default=0)
    flat = all(len(points) == 1 for _, points in rules)
    _require(last > 0 or flat, "it has a gradient over layers, and the first model has no numbered layers")

    def number(name: str) -> float:
        points = next((points for part, points in rules if part in name), [])
        _require(
            bool(points),
            f"the recipe has no value for {shorten(name)}: no filter is part of it; add one without a filter",
        )
        place = max(_layer(name), 0) / max(last, 1) * (len(points) - 1)
        low, high = int(place), min(int(place) + 1, len(points) - 1)
        return points[low] + (points[high] - points[low]) * (place - low)

    return number


def _layer(name: str) -> int:
    """The number of the layer that a name is in; -1 if it is in none."""
    found = re.search(r"\.(?:layers|h|blocks|layer)\.([0-9]+)\.", f".{name}")
    return int(found[1]) if found is not None else -1
