"""Models seen otherwise: with a LoRA adapter in PEFT's layout applied, W + s B A, or with the rows of another's vocabulary."""

import re
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from ..merge import MergeError
from ._errors import CheckpointError
from ._files import TensorFile, TensorMapping
from ._json import parse_json

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PAIRS: Final = (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"])
_UNKNOWN: Final = ("use_dora", "use_qalora", "alpha_pattern")

TOKENIZER: Final = "tokenizer.json"

# Names of tensors with one row for each token, in the checkpoints that there are.
_MODULES: Final = "embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed_out|lm_head|shared"
_ROWS: Final = re.compile(rf"(^|\.)({_MODULES})\.(weight|bias)$")


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter."""
    return path.is_dir() and (path / CONFIG).is_file()


class Adapted(TensorMapping):
    """A base with a LoRA adapter applied, each tensor computed when it is asked for.

    The weight of an adapted layer is W + s B A with s = alpha / r, or alpha / √r for `use_rslora`; embeddings have W + s (B A)ᵀ.
    Modules that were trained as a whole (`modules_to_save`) take the place of the base's.

    Args:
        base: The model that the adapter was trained on.
        path: The directory of the adapter.

    Raises:
        CheckpointError: If the adapter is damaged.
        MergeError: If it does not fit the base, or is of a kind that is not LoRA.
    """

    def __init__(self, base: Any, path: Path) -> None:
        super().__init__(base)
        self._base, self.path = base, path
        self._config = parse_json((path / CONFIG).read_bytes(), f"{str(path / CONFIG)!r}")
        kind, more = self._config.get("peft_type"), [key for key in _UNKNOWN if self._config.get(key)]
        if kind != "LORA" or more:
            raise MergeError(
                f"{str(path)!r} is an adapter of type {kind!r}{''.join(f' with {key}' for key in more)}; only plain LORA adapters "
                "are merged: merge it with its own library first"
            )
        if not (path / WEIGHTS).is_file():
            raise CheckpointError(f"{str(path)!r} has no {WEIGHTS}")
        self._file = TensorFile(path / WEIGHTS)
        self._deltas: dict[str, dict[str, str]] = {}
        self._whole: dict[str, str] = {}
        for key in self._file:
            self._place(key)
        for name, parts in self._deltas.items():
            self._check(name, parts)

    def _place(self, key: str) -> None:
        name = key.removeprefix(_PREFIX)
        match = re.fullmatch(rf"(.+)\.({'|'.join(chain(*_PAIRS))})(?:\.default)?(?:\.weight)?", name)
        if match is not None:
            self._deltas.setdefault(f"{match[1]}.weight", {})[match[2]] = key
            return
        name = name.replace(".modules_to_save.default", "").replace(".modules_to_save", "").replace(".base_layer", "")
        if name not in self._base:
            raise MergeError(
                f"the adapter {str(self.path)!r} has {key!r}, which is no part of LoRA and not in the base"
            )
        theirs, ours = tuple(self._file.meta(key).shape), tuple(self._base.meta(name).shape)
        if theirs != ours:
            raise MergeError(f"{name!r} has shape {theirs} in the adapter {str(self.path)!r} and {ours} in the base")
        self._whole[name] = key

    def _check(self, name: str, parts: dict[str, str]) -> None:
        if sorted(parts) not in _PAIRS:
            raise CheckpointError(f"the adapter {str(self.path)!r} has only {', '.join(parts)} of {name!r}")
        if name not in self._base:
            raise MergeError(f"the adapter {str(self.path)!r} is for {name!r}, which the base does not have")
        a, b = (tuple(self._file.meta(part).shape) for _, part in sorted(parts.items()))
        here = tuple(self._base.meta(name).shape)
        if (
            len(a) != 2
            or len(b) != 2
            or a[0] != b[1]
            or (b[0], a[1]) != (here[::-1] if self._is_turned(name) else here)
        ):
            raise MergeError(f"{name!r} is {here} in the base, and the adapter {str(self.path)!r} has A {a} and B {b}")

    def meta(self, name: str) -> Tensor:
        """As the base has it."""
        return cast(Tensor, self._base.meta(name))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._whole:
            return self._file[self._whole[name]]
        value: Tensor = self._base[name]
        if name not in self._deltas:
            return value
        a, b = (self._file[part].float() for _, part in sorted(self._deltas[name].items()))
        delta = (b @ a).T if self._is_turned(name) else b @ a
        # In the precision of the accumulation: rounding to the base's dtype would lose what an adapter learnt.
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return torch.add(wide, delta, alpha=self._find_scale(len(a)))

    def _is_turned(self, name: str) -> bool:
        return "lora_embedding_A" in self._deltas[name] or bool(self._config.get("fan_in_fan_out"))

    def _find_scale(self, rank: int) -> float:
        alpha = self._config.get("lora_alpha", rank)
        if not isinstance(alpha, int | float) or rank < 1:
            raise CheckpointError(f"{str(self.path / CONFIG)!r} has lora_alpha {alpha!r}, which is no number")
        return float(alpha) / (rank**0.5 if self._config.get("use_rslora") else rank)


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """The tokens of a `tokenizer.json` with their numbers, those that were added included; None if there is no such file.

    Raises:
        CheckpointError: If it is malformed.
    """
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    found = parse_json(path.read_bytes(), f"{str(path)!r}")
    model = found.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of pieces with scores, in order
        vocabulary = {each[0]: at for at, each in enumerate(vocabulary) if isinstance(each, list) and each}
    added = found.get("added_tokens") or []
    try:
        tokens = {str(token): int(number) for token, number in vocabulary.items()}  # type: ignore[union-attr]
        tokens |= {str(each["content"]): int(each["id"]) for each in added}
    except (AttributeError, TypeError, KeyError, ValueError):
        raise CheckpointError(f"{str(path)!r} has no vocabulary from tokens to numbers") from None
    if any(number < 0 for number in tokens.values()):
        raise CheckpointError(f"{str(path)!r} gives a token a negative number")
    return tokens


class Aligned(TensorMapping):
    """A model with the rows of its embeddings in the order of another's vocabulary.

    A token that only the other has gets the other's row, so that a merge leaves it as it is there.
    """

    def __init__(self, model: Any, first: Any, sources: Tensor, names: frozenset[str]) -> None:
        super().__init__(model)
        self._model, self._first, self._sources, self._names = model, first, sources, names

    def meta(self, name: str) -> Tensor:
        """The shape is that of the other model."""
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


def align(first: Any, model: Any, labels: tuple[str, str], vocabularies: tuple[Any, Any]) -> Any:
    """A model whose embeddings have the rows of the first's, token by token.

    Args:
        first: The model that decides.
        model: Another one.
        labels: What errors call them.
        vocabularies: Those of both; None where a model has none.

    Raises:
        MergeError: If embeddings have different sizes, and a vocabulary is missing.
    """
    rows = [name for name in first if _ROWS.search(name) and name in model]
    differ = [
        name
        for name in rows
        if first.meta(name).shape != model.meta(name).shape and first.meta(name).shape[1:] == model.meta(name).shape[1:]
    ]
    ours, theirs = vocabularies
    if differ and (ours is None or theirs is None):
        sizes = len(first.meta(differ[0])), len(model.meta(differ[0]))
        without = labels[0] if ours is None else labels[1]
        raise MergeError(
            f"{differ[0]!r} has {sizes[0]} rows in {labels[0]} and {sizes[1]} in {labels[1]}: their vocabularies differ. Rows are "
            f"aligned by token if both directories have a {TOKENIZER}; {without} has none"
        )
    if ours is None or theirs is None or (not differ and ours == theirs):
        return model
    length = max((len(first.meta(name)) for name in rows), default=0)
    sources = torch.full((length,), -1, dtype=torch.long)
    for token, number in ours.items():
        if number < length:
            sources[number] = theirs.get(token, -1)
    # Rows that no token has are padding: one is as good as another of its place.
    for number in set(range(length)) - set(ours.values()) - set(theirs.values()):
        sources[number] = number
    return Aligned(model, first, sources, frozenset(rows))
