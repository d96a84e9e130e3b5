"""Tensors that stand in for parameters, where a link runs its child on something of another shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._binding import Binding


class StandIns:
    """The same tensor objects at every step, so that a child can key its state by them; their storage is borrowed."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    @contextmanager
    def point_at(
        self, tensors: Sequence[Tensor], binding: Binding | None, sources: Sequence[Tensor] | None
    ) -> Iterator[list[Tensor]]:
        """Inside the block the stand-ins have the shapes and values of these tensors."""
        while len(self.tensors) < len(tensors):
            like = tensors[len(self.tensors)]
            self.tensors.append(torch.empty(0, dtype=like.dtype, device=like.device))
        fakes = self.tensors[: len(tensors)]
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                fakes[i].data = tensor.detach()
        if binding is not None and sources:
            for i, fake in enumerate(fakes):
                binding.sources[fake] = sources[min(i, len(sources) - 1)]
        try:
            yield fakes
        finally:
            for fake in fakes:
                fake.grad = None  # of another size than what follows, so that it could not be copied
                fake.data = torch.empty(0, dtype=fake.dtype, device=fake.device)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__
