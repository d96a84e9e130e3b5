"""Recipes in the YAML that mergekit reads, for the methods that `moduli.merge` has; everything else is refused by name."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from .._texts import cut, shorten
from ..merge import MergeError
from ._basics import CheckpointError, PathLike, has_form
from ._experts import merge_experts
from ._merge import merge_files, read_vocabulary
from ._mergekit_numbers import METHODS, RecipeScope, read_options, require
from ._open import read_bytes
from ._safetensors import dtype_name
from ._slices import MergeSlice, merge_slices, read_template

_MOST_ENTRIES: Final = 10_000
_DTYPES: Final = {dtype_name(each): each for each in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_BASED: Final = frozenset(
    {"task_arithmetic", "ties", "dare", "stock", "breadcrumbs", "della", "sce", "ram", "nearswap", "arcee_fusion"}
)
_PERHAPS_BASED: Final = frozenset({"nuslerp", "multislerp"})


def _is_table(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(key, str) for key in value))


def _is_entry(value: Any) -> bool:
    return has_form(value, {"model": str, "parameters": _is_table}) and "model" in value


def _is_source(value: Any) -> bool:
    form = {"model": str, "parameters": _is_table, "layer_range": (_is_layer, _is_layer)}
    return (
        has_form(value, form)
        and {"model", "layer_range"} <= set(value)
        and value["layer_range"][0] < value["layer_range"][1]
    )


def _is_layer(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_ENTRIES


def _is_slice(value: Any) -> bool:
    return has_form(value, {"sources": [_is_source], "parameters": _is_table}) and bool(value.get("sources"))


# What a recipe has, and what to say of anything else in its place.
_DTYPE: Final = (lambda found: isinstance(found, str) and found in _DTYPES, f"there are {', '.join(_DTYPES)}")
_FORMS: Final[dict[str, tuple[Any, str]]] = {
    "merge_method": (lambda found: isinstance(found, str) and found in METHODS, f"there are {', '.join(METHODS)}"),
    "tokenizer_source": (str, "it is base, union or a path"),
    "tokenizer": (
        {"source": str, "tokens": lambda found: not found, "pad_to_multiple_of": lambda found: found is None},
        "it has a source: base, union or a path; tokens and pad_to_multiple_of are not done here",
    ),
    "chat_template": (str, "it must be a text"),
    "base_model": (str, "it must be a path"),
    "models": ([_is_entry], "it is a list with a model, and perhaps parameters, in each entry"),
    "slices": (
        [_is_slice],
        "it is a list with sources, and perhaps parameters, in each entry; a source has a model and a layer_range [0, 8]",
    ),
    "parameters": (_is_table, "they must be a mapping from names to values"),
    "dtype": _DTYPE,
    "out_dtype": _DTYPE,
    "name": (str, "it must be a text"),
}
# The same for recipes of mergekit-moe.
_EXPERT_FORMS: Final[dict[str, tuple[Any, str]]] = {
    "base_model": (str, "it must be a path"),
    "gate_mode": (
        lambda found: found == "random",
        "only random gates are made: hidden and cheap_embed run the model and its tokenizer; write gate_mode: random",
    ),
    "experts": (
        [lambda found: has_form(found, {"source_model": str, "positive_prompts": list}) and "source_model" in found],
        "it is a list with a source_model in each entry; prompts do nothing for random gates",
    ),
    "experts_per_token": (lambda found: type(found) is int, "it must be a whole number"),
    "architecture": (lambda found: found == "mixtral", "it must be mixtral"),
    "dtype": _DTYPE,
}
EXPERTS: Final = "experts"
"""What a recipe of mergekit-moe is called."""


@dataclass(frozen=True)
class MergeRecipe:
    """A recipe that was read: what `merge_files` is to be called with.

    Attributes:
        recipe: The name of a recipe, or "experts".
        paths: The checkpoints.
        options: The arguments of the recipe.
        dtype: The dtype of the result, or None.
        slices: The slices of layers of which the result is put together; none if all layers of all checkpoints are merged.
        template: The chat template of the result, or None.
    """

    recipe: str
    paths: list[Path]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    slices: list[MergeSlice] = field(default_factory=list)
    template: str | None = None


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
    options = {"shard_size": shard_size, "dtype": found.dtype, **options}
    if found.recipe == EXPERTS:
        merge_experts(found.paths[0], found.paths[1:], out, **{**found.options, **options})
    elif found.slices or found.template is not None or len(found.paths) < 2:
        slices = found.slices or [MergeSlice(found.paths, None, found.options)]
        merge_slices(found.recipe, slices, out, template=found.template, **options)
    else:
        merge_files(found.recipe, found.paths, out, **{**found.options, **options})
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
        if isinstance(found, dict) and "experts" in found:
            return _understand_experts(found, path.parent)
        return _understand(found, path.parent)
    except MergeError as error:
        raise MergeError(f"{str(path)!r}: {error}") from None


def _understand(found: Any, folder: Path) -> MergeRecipe:
    experts = isinstance(found, dict) and "experts" in found
    require(
        not experts, "it is a recipe of mergekit-moe: experts and gates are not put together here; use that program"
    )
    require(isinstance(found, dict) and "merge_method" in found, "it is no recipe: it has no merge_method")
    for key in found:
        require(
            key in _FORMS, f"it has {shorten(key)}, which is not merged here; there are {', '.join(sorted(_FORMS))}"
        )
    for key, (form, told) in _FORMS.items():
        right = found.get(key) is None or has_form(found[key], form)
        require(right, f"{key} {shorten(found.get(key))} is not here; {told}")
    dtype = found.get("out_dtype", found.get("dtype"))
    recipe = METHODS[found["merge_method"]][0]
    slices, start = found.get("slices"), 0
    require(
        slices is None or found.get("models") is None,
        "it has models and slices; it is merged of the ones or of the others",
    )
    if slices is None:
        parts = [_read_part(found, {}, found.get("models") or [], folder, None)]
    else:
        require(bool(slices), "it has no slices")
        parts = []
        for each in slices:
            parts.append(_read_part(found, each.get("parameters") or {}, each["sources"], folder, start))
            start += each["sources"][0]["layer_range"][1] - each["sources"][0]["layer_range"][0]
    paths = list(dict.fromkeys(path for part in parts for path in part.paths)) if slices else parts[0].paths
    _check_tokens(found, paths, folder)
    template = _choose_template(found.get("chat_template"), paths)
    options = {} if slices else parts[0].options
    return MergeRecipe(
        recipe, paths, options, None if dtype is None else _DTYPES[dtype], parts if slices else [], template
    )


def _understand_experts(found: dict[str, Any], folder: Path) -> MergeRecipe:
    """Read a recipe of mergekit-moe."""
    for key in found:
        told = ", ".join(sorted(_EXPERT_FORMS))
        require(key in _EXPERT_FORMS, f"it has {shorten(key)}, which is not done for experts here; there are {told}")
    for key, (form, told) in _EXPERT_FORMS.items():
        right = has_form(found[key], form) if key in found else key not in ("base_model", "gate_mode", "experts")
        require(right, f"{key} {shorten(found.get(key))} is not here; {told}")
    paths = [folder / each for each in (found["base_model"], *(each["source_model"] for each in found["experts"]))]
    for each in paths:
        require(each.exists(), f"there is no checkpoint {str(each)!r}; models are paths here, so download it first")
    options = {"experts_per_token": found.get("experts_per_token", 2)}
    return MergeRecipe(EXPERTS, paths, options, _DTYPES[found["dtype"]] if "dtype" in found else None)


def _read_part(
    found: dict[str, Any], more: dict[str, Any], models: list[dict[str, Any]], folder: Path, start: int | None
) -> MergeSlice:
    """Read what a slice, or the whole result, is merged of.

    Args:
        found: The recipe.
        more: Parameters of the slice; they win over those of the recipe.
        models: The entries of models or sources.
        folder: Where paths start.
        start: The number of the first layer of a slice in the result; None if there are no slices.
    """
    method, base = found["merge_method"], found.get("base_model")
    recipe, defaults = METHODS[method]
    require(recipe not in _BASED or base is not None, f"{method} needs a base_model")
    entries = [each for each in models if each["model"] != base]
    first = [] if base is None else [next((each for each in models if each["model"] == base), {"model": base})]
    if recipe in ("linear", "karcher"):
        entries, first = models, []
    require(bool(entries), "it has no models to merge")
    require(method != "passthrough" or len(entries) == 1, f"passthrough takes one model at a time, not {len(entries)}")
    used = [*first, *entries]
    paths = [folder / each["model"] for each in used]
    for each in paths:
        require(each.exists(), f"there is no checkpoint {str(each)!r}; models are paths here, so download it first")
    ranges: list[tuple[int, int]] | None = None
    if start is not None:
        told = f"the base_model {shorten(base)} is in no source of a slice; add it, with its layer_range"
        require(all("layer_range" in each for each in used), told)
        ranges = [(each["layer_range"][0], each["layer_range"][1]) for each in used]
        counts = {stop - begin for begin, stop in ranges}
        require(len(counts) == 1, f"the sources of a slice have {sorted(counts)} layers; they must have as many")
    defaults = {**defaults, **({"tasks": True} if first and recipe in _PERHAPS_BASED else {})}
    shared = {**(found.get("parameters") or {}), **more}
    scope = RecipeScope(paths[0], None if ranges is None else ranges[0], start or 0)
    return MergeSlice(paths, ranges, {**defaults, **read_options(method, shared, entries, scope)})


def _check_tokens(found: dict[str, Any], paths: Sequence[Path], folder: Path) -> None:
    """Raise MergeError if the vocabulary of the result is to be another than that of the first model."""
    block, source = found.get("tokenizer"), found.get("tokenizer_source")
    require(block is None or source is None, "it has tokenizer and tokenizer_source")
    if block is not None:
        source = block.get("source", "union")
    named = found.get("base_model") if source == "base" else source
    wanted = paths[0] if named is None else folder / named
    if wanted == paths[0]:
        return
    here, *others = (read_vocabulary(each) if each.is_dir() else None for each in paths)
    if source not in ("base", "union"):
        require(wanted.exists(), f"there is no checkpoint {str(wanted)!r}, the source of the tokenizer")
    if source != "union":
        others = [read_vocabulary(wanted) if wanted.is_dir() else None]
    for other in others:
        odd = next((token for token in other or {} if here is not None and token not in here), None)
        told = f"the tokenizer {shorten(source)} has the token {shorten(odd)}, which the first model {str(paths[0])!r} has not"
        require(
            odd is None,
            f"{told}; embeddings have the rows of the first model here: put the model with all tokens first",
        )
        same = other == here or source == "union"
        require(
            same,
            f"the tokenizer of {str(wanted)!r} is not that of the first model {str(paths[0])!r}, which decides here",
        )


def _choose_template(template: str | None, paths: Sequence[Path]) -> str | None:
    """Return the text of a chat template: the most common one of the models, or the one that is written out."""
    if template == "auto":
        texts = [text for path in paths if path.is_dir() and (text := read_template(path)) is not None]
        return Counter(texts).most_common(1)[0][0] if texts else None
    told = f"chat_template {shorten(template)} is not here; write auto, or the template itself"
    require(template is None or "{{" in template or "{%" in template, told)
    return template


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
