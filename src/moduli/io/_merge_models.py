"""Models as inputs of a merge: with an adapter applied, with permuted units, and with the rows of embeddings aligned by token."""

import re
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from .._texts import shorten
from ..axes import ModelAxes
from ..merge import MergeError
from ._basics import CheckpointError, parse_json
from ._open import read_bytes
from ._read import TensorFile, TensorMapping

_CONFIG: Final = "adapter_config.json"
_PAIRS: Final = (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"])
_UNKNOWN: Final = ("use_dora", "use_qalora", "alpha_pattern")
_TOKENIZER: Final = "tokenizer.json"
# Names of tensors with one row for each token, in common checkpoints.
_MODULES: Final = "embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed_out|lm_head|shared"
_ROWS: Final = re.compile(rf"(^|\.)({_MODULES})\.(weight|bias)$")


def is_adapter(path: Path) -> bool:
    """Whether a path is the directory of an adapter in PEFT's layout."""
    return (path / _CONFIG).is_file()


class AdaptedTensors(TensorMapping):
    """A base with a LoRA adapter in PEFT's layout applied, each tensor computed when it is indexed.

    The weight of an adapted layer is W + s B A with s = alpha / r, or alpha / √r for `use_rslora`; embeddings have W + s (B A)ᵀ.
    Modules that were trained as a whole (`modules_to_save`) replace the base's.

    Args:
        base: The model on which the adapter was trained.
        path: The directory of the adapter.

    Raises:
        CheckpointError: If the adapter is damaged.
        MergeError: If it does not fit the base, or is not a plain LoRA adapter.
    """

    def __init__(self, base: Any, path: Path) -> None:
        super().__init__(base)
        self._base, self.path = base, path
        self._config = parse_json(read_bytes(path / _CONFIG), f"{str(path / _CONFIG)!r}")
        kind, more = self._config.get("peft_type"), [key for key in _UNKNOWN if self._config.get(key)]
        if kind != "LORA" or more:
            adapter = f"an adapter of type {shorten(kind)}{''.join(f' with {key}' for key in more)}"
            raise MergeError(f"{str(path)!r} is {adapter}; only plain LORA adapters are merged")
        self._alpha = self._config.get("lora_alpha")
        if not isinstance(self._alpha, int | float | None):
            raise CheckpointError(f"{str(path / _CONFIG)!r} has lora_alpha {shorten(self._alpha)}, which is no number")
        self._file = TensorFile(path / "adapter_model.safetensors")
        self._deltas: dict[str, dict[str, str]] = {}
        self._whole: dict[str, str] = {}
        for key in self._file:
            name = key.removeprefix("base_model.model.")
            match = re.fullmatch(rf"(.+)\.({'|'.join(chain(*_PAIRS))})(?:\.default)?(?:\.weight)?", name)
            if match is not None:
                self._deltas.setdefault(f"{match[1]}.weight", {})[match[2]] = key
            else:
                name = re.sub(r"\.modules_to_save(\.default)?|\.base_layer", "", name)
                self._whole[name] = key
                self._check(name, tuple(self._file.meta(key).shape))
        for name, parts in self._deltas.items():
            if sorted(parts) not in _PAIRS:
                raise CheckpointError(f"the adapter {str(path)!r} has only {', '.join(parts)} of {shorten(name)}")
            a, b = (tuple(self._file.meta(part).shape) for _, part in sorted(parts.items()))
            fits = len(a) == len(b) == 2 and a[0] == b[1] > 0
            turned = (a[1], b[0]) if self._is_turned(name) else (b[0], a[1])
            self._check(name, turned if fits else f"A {a} and B {b}")

    def _check(self, name: str, shape: object) -> None:
        here = tuple(self._base.meta(name).shape) if name in self._base else "not there"
        if shape != here:
            raise MergeError(f"{shorten(name)} is {shape} in the adapter {str(self.path)!r}, and {here} in the base")

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of the base's."""
        return cast(Tensor, self._base.meta(name))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._whole:
            return self._file[self._whole[name]]
        value: Tensor = self._base[name]
        if name not in self._deltas:
            return value
        a, b = (self._file[part].float() for _, part in sorted(self._deltas[name].items()))
        delta = (b @ a).T if self._is_turned(name) else b @ a
        alpha = len(a) if self._alpha is None else self._alpha
        # In the precision of the accumulation: rounding to the base's dtype would lose small changes of the adapter.
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return torch.add(wide, delta, alpha=alpha / (len(a) ** 0.5 if self._config.get("use_rslora") else len(a)))

    def _is_turned(self, name: str) -> bool:
        return "lora_embedding_A" in self._deltas[name] or bool(self._config.get("fan_in_fan_out"))


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """Return the tokens of a `tokenizer.json` with their numbers, added tokens included; None if there is no such file.

    Raises:
        CheckpointError: If it is malformed.
    """
    path = directory / _TOKENIZER
    if not path.is_file():
        return None
    content = parse_json(read_bytes(path), f"{str(path)!r}")
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # pairs of token and score, in order
            vocabulary = {each[0]: at for at, each in enumerate(vocabulary)}
        tokens = {str(token): int(number) for token, number in vocabulary.items()}
        tokens |= {str(each["content"]): int(each["id"]) for each in content.get("added_tokens") or []}
    except (AttributeError, TypeError, KeyError, ValueError, IndexError):
        tokens = {"": -1}
    if min(tokens.values(), default=0) < 0:
        raise CheckpointError(f"{str(path)!r} has no vocabulary from tokens to numbers")
    return tokens


class _Aligned(TensorMapping):
    """A model with the rows of its embeddings in the order of another's vocabulary.

    A token that only the other model has gets the other's row, so that merging does not change it.
    """

    def __init__(self, model: Any, first: Any, sources: Tensor, names: Collection[str]) -> None:
        super().__init__(model)
        self._model, self._first, self._sources, self._names = model, first, sources, names

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor; embeddings have the shape of the other model's."""
        return cast(Tensor, (self._first if name in self._names else self._model).meta(name))

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._model[name]
        if name not in self._names:
            return value
        result: Tensor = self._first[name].to(value.dtype).clone()
        sources = self._sources[: len(result)]
        here = torch.nonzero((sources >= 0) & (sources < len(value))).flatten()
        result[here] = value[sources[here]]
        return result


class PermutedTensors(TensorMapping):
    """A model with its units in another order.

    Args:
        model: The model.
        axes: Its axes.
        units: For axes by name, the units in their new order.
    """

    def __init__(self, model: Any, axes: ModelAxes, units: Mapping[str, Tensor]) -> None:
        super().__init__(model)
        self._model, self._axes, self._units = model, axes, units
        if hasattr(model, "_metadata"):  # the labels
            self._metadata = model._metadata

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of the model's."""
        return cast(Tensor, self._model.meta(name))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._axes.parameters and name not in self._axes.ties:
            return cast(Tensor, self._model[name])
        return self._axes.take({name: self._model[name]}, self._units)[name]


def align_embeddings(first: Any, model: Any, labels: tuple[str, str], ours: Any, theirs: Any) -> Any:
    """Return a model whose embeddings have their rows in the order of the first model's vocabulary.

    Args:
        first: The first model.
        model: The other model.
        labels: Their names in errors.
        ours: The vocabulary of the first; None if it has none.
        theirs: The vocabulary of the other.

    Raises:
        MergeError: If embeddings have different sizes, and a vocabulary is missing.
    """
    rows = _count_rows(first, model)
    differ = [name for name, counts in rows.items() if len(set(counts)) > 1]
    if differ and (ours is None or theirs is None):
        here, there = rows[differ[0]]
        raise MergeError(
            f"{shorten(differ[0])} has {here} rows in {labels[0]} and {there} in {labels[1]}: their vocabularies differ. Rows are "
            f"aligned by token if both directories have a {_TOKENIZER}; {labels[ours is not None]} has none"
        )
    if ours is None or theirs is None or not (differ or ours != theirs):
        return model
    sources = _match_tokens(ours, theirs, max((here for here, _ in rows.values()), default=0))
    return _Aligned(model, first, sources, rows)


def _count_rows(first: Any, model: Any) -> dict[str, tuple[int, int]]:
    """Return the numbers of rows, in both models, of the embeddings whose other axes have equal sizes."""
    named = [name for name in first if _ROWS.search(name) and name in model]
    shapes = {name: (first.meta(name).shape, model.meta(name).shape) for name in named}
    return {name: (a[0], b[0]) for name, (a, b) in shapes.items() if a and b and a[1:] == b[1:]}


def _match_tokens(ours: Mapping[str, int], theirs: Mapping[str, int], length: int) -> Tensor:
    """Return, for each row of our embeddings, the row of the same token in theirs; -1 if they lack it."""
    sources = torch.full((length,), -1, dtype=torch.long)
    for token, number in ours.items():
        if number < length:
            sources[number] = theirs.get(token, -1)
    # Rows without a token are padding, which is matched by position.
    for number in set(range(length)) - set(ours.values()) - set(theirs.values()):
        sources[number] = number
    return sources
