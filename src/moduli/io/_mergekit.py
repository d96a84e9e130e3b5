"""Recipes in mergekit's YAML, for the methods of `moduli.merge`; everything else raises an error that names it."""

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
from ._merge import merge_files
from ._merge_models import read_vocabulary
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


# The form of each entry of a recipe, and the hint of the error for any other form.
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
"""The name of recipes of mergekit-moe."""


@dataclass(frozen=True)
class MergeRecipe:
    """A recipe that was read: the arguments of `merge_files`.

    Attributes:
        recipe: The name of a recipe, or "experts".
        paths: The checkpoints.
        options: The arguments of the recipe.
        dtype: The dtype of the result, or None.
        slices: The slices of layers that make up the result; none if all layers of all checkpoints are merged.
        template: The chat template of the result, or None.
    """

    recipe: str
    paths: list[Path]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    slices: list[MergeSlice] = field(default_factory=list)
    template: str | None = None


def merge_recipe(path: PathLike, out: PathLike, *, shard_size: int | None = None, **options: Any) -> MergeRecipe:
    """Merge checkpoints according to a recipe in mergekit's YAML.

    Args:
        path: The recipe. Models in it are paths, relative to its directory.
        out: The result.
        shard_size: As for `merge_files`.
        **options: Other arguments of `merge_files` or of the recipe; they override those in the file.

    Returns:
        The recipe.

    Raises:
        MergeError: If the recipe uses a feature that is not supported, which the error names.
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
    recipe = read_recipe(path)
    options = {"shard_size": shard_size, "dtype": recipe.dtype, **options}
    if recipe.recipe == EXPERTS:
        merge_experts(recipe.paths[0], recipe.paths[1:], out, **{**recipe.options, **options})
    elif recipe.slices or recipe.template is not None or len(recipe.paths) < 2:
        slices = recipe.slices or [MergeSlice(recipe.paths, None, recipe.options)]
        merge_slices(recipe.recipe, slices, out, template=recipe.template, **options)
    else:
        merge_files(recipe.recipe, recipe.paths, out, **{**recipe.options, **options})
    return recipe


def read_recipe(path: PathLike) -> MergeRecipe:
    """Read a recipe in mergekit's YAML, without merging.

    Raises:
        MergeError: If it uses a feature that is not supported.
        CheckpointError: If it cannot be read.
    """
    path = Path(path)
    document = _parse_yaml(read_bytes(path), f"{str(path)!r}")
    try:
        if isinstance(document, dict) and "experts" in document:
            return _understand_experts(document, path.parent)
        return _understand(document, path.parent)
    except MergeError as error:
        raise MergeError(f"{str(path)!r}: {error}") from None


def _understand(document: Any, folder: Path) -> MergeRecipe:
    """Read a recipe for models or slices of layers."""
    _check_forms(document)
    dtype = document.get("out_dtype", document.get("dtype"))
    recipe, slices = METHODS[document["merge_method"]][0], document.get("slices")
    require(
        slices is None or document.get("models") is None,
        "it has models and slices; it is merged of the ones or of the others",
    )
    if slices is None:
        whole = _read_part(document, {}, document.get("models") or [], folder, None)
        parts, paths, options = [], whole.paths, whole.options
    else:
        parts, options = _read_slices(document, slices, folder), {}
        paths = list(dict.fromkeys(path for part in parts for path in part.paths))
    _check_tokens(document, paths, folder)
    template = _choose_template(document.get("chat_template"), paths)
    return MergeRecipe(recipe, paths, options, None if dtype is None else _DTYPES[dtype], parts, template)


def _check_forms(document: Any) -> None:
    """Raise MergeError for entries of a recipe that are unknown or have another form."""
    require(isinstance(document, dict) and "merge_method" in document, "it is no recipe: it has no merge_method")
    for key in document:
        require(
            key in _FORMS, f"it has {shorten(key)}, which is not merged here; there are {', '.join(sorted(_FORMS))}"
        )
    for key, (form, hint) in _FORMS.items():
        right = document.get(key) is None or has_form(document[key], form)
        require(right, f"{key} {shorten(document.get(key))} is not here; {hint}")


def _read_slices(document: dict[str, Any], slices: list[dict[str, Any]], folder: Path) -> list[MergeSlice]:
    """Read the slices of layers, which are numbered in their order."""
    require(bool(slices), "it has no slices")
    parts, start = [], 0
    for each in slices:
        parts.append(_read_part(document, each.get("parameters") or {}, each["sources"], folder, start))
        first, stop = each["sources"][0]["layer_range"]
        start += stop - first
    return parts


def _understand_experts(document: dict[str, Any], folder: Path) -> MergeRecipe:
    """Read a recipe of mergekit-moe."""
    for key in document:
        hint = ", ".join(sorted(_EXPERT_FORMS))
        require(key in _EXPERT_FORMS, f"it has {shorten(key)}, which is not done for experts here; there are {hint}")
    for key, (form, hint) in _EXPERT_FORMS.items():
        right = has_form(document[key], form) if key in document else key not in ("base_model", "gate_mode", "experts")
        require(right, f"{key} {shorten(document.get(key))} is not here; {hint}")
    paths = [
        folder / each for each in (document["base_model"], *(each["source_model"] for each in document["experts"]))
    ]
    for each in paths:
        require(each.exists(), f"there is no checkpoint {str(each)!r}; models are paths here, so download it first")
    options = {"experts_per_token": document.get("experts_per_token", 2)}
    return MergeRecipe(EXPERTS, paths, options, _DTYPES[document["dtype"]] if "dtype" in document else None)


def _read_part(
    document: dict[str, Any], more: dict[str, Any], models: list[dict[str, Any]], folder: Path, start: int | None
) -> MergeSlice:
    """Read the models and options of a slice, or of the whole result.

    Args:
        document: The recipe.
        more: Parameters of the slice; they override those of the recipe.
        models: The entries of models or sources.
        folder: The directory to which paths are relative.
        start: The number of the first layer of a slice in the result; None if there are no slices.
    """
    method, base = document["merge_method"], document.get("base_model")
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
    ranges = None if start is None else _read_ranges(used, base)
    defaults = {**defaults, **({"tasks": True} if first and recipe in _PERHAPS_BASED else {})}
    shared = {**(document.get("parameters") or {}), **more}
    scope = RecipeScope(paths[0], None if ranges is None else ranges[0], start or 0)
    return MergeSlice(paths, ranges, {**defaults, **read_options(method, shared, entries, scope)})


def _read_ranges(sources: Sequence[dict[str, Any]], base: Any) -> list[tuple[int, int]]:
    """Return the ranges of layers of the sources of a slice, which must be equally long."""
    missing = f"the base_model {shorten(base)} is in no source of a slice; add it, with its layer_range"
    require(all("layer_range" in each for each in sources), missing)
    ranges = [(each["layer_range"][0], each["layer_range"][1]) for each in sources]
    counts = {stop - begin for begin, stop in ranges}
    require(len(counts) == 1, f"the sources of a slice have {sorted(counts)} layers; they must have as many")
    return ranges


def _check_tokens(document: dict[str, Any], paths: Sequence[Path], folder: Path) -> None:
    """Raise MergeError if the recipe requires another vocabulary than that of the first model."""
    block, source = document.get("tokenizer"), document.get("tokenizer_source")
    require(block is None or source is None, "it has tokenizer and tokenizer_source")
    if block is not None:
        source = block.get("source", "union")
    named = document.get("base_model") if source == "base" else source
    wanted = paths[0] if named is None else folder / named
    if wanted == paths[0]:
        return
    here, *others = (read_vocabulary(each) if each.is_dir() else None for each in paths)
    if source not in ("base", "union"):
        require(wanted.exists(), f"there is no checkpoint {str(wanted)!r}, the source of the tokenizer")
    if source != "union":
        others = [read_vocabulary(wanted) if wanted.is_dir() else None]
    for other in others:
        _check_same_tokens(here, other, source, wanted, paths[0])


def _check_same_tokens(here: Any, other: Any, source: Any, wanted: Path, first: Path) -> None:
    """Raise MergeError if a vocabulary has other tokens than that of the first model."""
    odd = next((token for token in other or {} if here is not None and token not in here), None)
    message = (
        f"the tokenizer {shorten(source)} has the token {shorten(odd)}, which the first model {str(first)!r} has not"
    )
    require(
        odd is None,
        f"{message}; embeddings have the rows of the first model here: put the model with all tokens first",
    )
    require(
        other == here or source == "union",
        f"the tokenizer of {str(wanted)!r} is not that of the first model {str(first)!r}, which decides here",
    )


def _choose_template(template: str | None, paths: Sequence[Path]) -> str | None:
    """Return the text of a chat template: for "auto" the most common one of the models, otherwise the passed one."""
    if template == "auto":
        texts = [text for path in paths if path.is_dir() and (text := read_template(path)) is not None]
        return Counter(texts).most_common(1)[0][0] if texts else None
    message = f"chat_template {shorten(template)} is not here; write auto, or the template itself"
    require(template is None or "{{" in template or "{%" in template, message)
    return template


def _parse_yaml(text: bytes, what: str) -> Any:
    """Read a document as plain values, by PyYAML's safe loader."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{what} is read by PyYAML: pip install 'moduli[yaml]'") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            """Copy the entries of other mappings into one (`<<: *other`); limited, because repeated copies grow exponentially."""
            super().flatten_mapping(node)
            if len(node.value) > _MOST_ENTRIES:
                raise yaml.YAMLError(f"a mapping has more than {_MOST_ENTRIES} entries, with those that it takes over")

    try:
        return yaml.load(text, Loader)
    except Exception as error:  # the loader raises many kinds of errors for malformed numbers and dates
        reason = cut(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{what} cannot be read: {reason}") from error
