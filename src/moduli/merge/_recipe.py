"""A merging algorithm as the driver sees it: a function of one name and the tensors that have it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..layout import is_sharded, make_whole, piece_of
from ._checks import Checks
from ._coefficients import Coefficients
from ._errors import MergeError
from ._views import View, compare

ModelT = TypeVar("ModelT", bound=nn.Module | Mapping[str, Any])

Policy: TypeAlias = Literal["first", "merge"]
"""What happens to a buffer of floating dtype: the first model's is taken, or it is merged as a parameter is."""

Buffers: TypeAlias = Policy | Mapping[str, Policy]
"""A `Policy` for every buffer, or policies by glob pattern of their names; the first pattern that matches wins."""

Integers: TypeAlias = Literal["equal", "first"]
"""What happens to tensors of integers and truth values, which have no averages: they must be equal, or need not be."""


class Row:
    """The tensors of one name, one per model, in the dtype of the accumulation and on the device of the first.

    Each is read when it is asked for and not kept, so a kernel that takes them one at a time needs one at a time in
    memory. They may be the models' own: a kernel never writes into them. On a device, several names may be one vector.

    Args:
        views: The models.
        names: The name, or names that are merged alike, as one vector for each model.
        checks: What asks whether values are finite.
        pieces: Whether of DTensors what this process holds is enough; otherwise all processes gather them.

    Attributes:
        place: The piece, of the tensors as vectors. They are then read once for all pieces.
    """

    def __init__(self, views: list[View], names: list[str], checks: Checks, pieces: bool = False) -> None:
        self._views, self._names, self._checks, self._pieces = views, names, checks, pieces
        self.place: slice | None = None
        self._held: dict[int, Tensor] = {}
        # Only what they are like: a row may be kept, what was read for it from a file may not.
        looks = [views[0].look(name) for name in names]
        self._likes = [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in looks]
        like = looks[0]
        self._device = torch.device("cpu") if like.is_meta else like.device

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def read(self, index: int) -> Tensor:
        """The tensor of a model in its own dtype."""
        found = self._held.get(index)
        if found is None:
            parts = [self._read(index, name, like) for name, like in zip(self._names, self._likes, strict=True)]
            found = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1).to(self._device) for part in parts])
        if self.place is None:
            return found
        self._held[index] = found.contiguous()
        return self._held[index].view(-1)[self.place]

    def _read(self, index: int, name: str, like: Tensor) -> Tensor:
        raw = self._views[index].read(name)
        compare(name, self._views[0], like, self._views[index], raw)
        if not is_sharded(raw):
            return raw
        return piece_of(raw) if self._pieces else make_whole(raw)

    def __getitem__(self, index: int, /) -> Tensor:
        tensor = self.read(index).to(device=self._device, dtype=_accumulation(self._likes[0].dtype))
        if not self._checks.are_finite(tensor):
            raise MergeError(
                f"{self._names[0]!r} of {self._views[index].label} has values that are NaN or infinite; repair it, or, if "
                "it is a buffer, take the first's with buffers='first'"
            )
        return tensor


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of a dtype are combined."""
    if dtype in (torch.float64, torch.complex128):
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


Kernel: TypeAlias = Callable[[str, Row], Tensor]
"""From a name and its row to the merged tensor: a new one, of the row's dtype and shape."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way of merging, with its coefficients.

    Attributes:
        kernel: Merges one name; it looks at nothing else, so names may come in any order and from anywhere.
        coefficients: What to check against the names before any is merged.
        keeps: Whether models that agree on a name give what they agree on, for a name. Then it is copied bit for bit.
        elementwise: Whether every entry of the result depends on the entries in its place alone. Large tensors are then merged
            piece by piece, in the processor's caches.
        survey: For a recipe that must see every row before it merges the first one: makes the kernel to use. Names that
            are copied are not among them.
    """

    kernel: Kernel
    coefficients: tuple[Coefficients, ...] = ()
    keeps: Callable[[str], bool] = lambda _: True
    elementwise: bool = False
    survey: Callable[[Sequence[tuple[str, Row]]], Kernel] | None = None
