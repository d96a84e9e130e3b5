"""A state dict in memory, seen as the module part of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._errors import DamagedFileError
from ._module import collect
from ._replace import PathLike
from ._saved import Saved
from ._tree import Tensors


class InMemory(Saved):
    """A state dict that is in memory already, seen as the module part of a file."""

    def __init__(self, path: PathLike, state: Mapping[str, Any]) -> None:
        tensors = Tensors()
        found, content = collect(state, tensors)
        self.present = True
        self.reader: Any = _HeldTensors(os.fspath(path), {**found, **tensors.found})
        self.names = list(found)
        self.ties, self.extra = content.get("ties", {}), content.get("extra_state", {})
        self.metadata = self._metadata(content["metadata"])
        self.history, self.policies, self.virtual, self.frozen, self.kind = [], {}, [], [], ""


class _HeldTensors:
    """Tensors in memory, with what `plan` asks a reader for."""

    def __init__(self, path: str, tensors: dict[str, Tensor]) -> None:
        self.path = path
        self._tensors = tensors

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    copy = tensor

    def damaged(self, why: str) -> DamagedFileError:
        return DamagedFileError(f"{self.path!r} was damaged: {why}")
