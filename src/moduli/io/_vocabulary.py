"""Vocabularies: rows of embeddings brought into the order of another tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..merge import MergeError
from ._errors import CheckpointError
from ._header import _json
from ._tensor_file import TensorMapping

TOKENIZER: Final = "tokenizer.json"

# Names of tensors with one row for each token, in the checkpoints that there are.
_MODULES: Final = "embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed_out|lm_head|shared"
_ROWS: Final = re.compile(rf"(^|\.)({_MODULES})\.(weight|bias)$")


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """The tokens of a `tokenizer.json` with their numbers, those that were added included; None if there is no such file.

    Raises:
        CheckpointError: If it is malformed.
    """
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    found = _json(path.read_bytes(), f"{str(path)!r}")
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
        found: Tensor = (self._first if name in self._names else self._model).meta(name)
        return found

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._model[name]
        if name not in self._names:
            return value
        result: Tensor = self._first[name].to(value.dtype).clone()
        count = len(result)
        sources = self._sources[:count]
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
    # Rows that no token has are padding: one is as good as another of its place.
    free = set(range(length)) - set(ours.values())
    for token, number in ours.items():
        if number < length:
            sources[number] = theirs.get(token, -1)
    taken = set(theirs.values())
    for number in free:
        sources[number] = number if number not in taken else -1
    return Aligned(model, first, sources, frozenset(rows))
