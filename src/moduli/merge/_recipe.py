"""A merging algorithm as the driver sees it: a function of one name and the tensors that have it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from ._coefficients import Coefficients


class Row(Protocol):
    """The tensors of one name, one per model, in the dtype of the accumulation and on the device of the first.

    Each is read when it is asked for and not kept, so a kernel that takes them one at a time needs one at a time in
    memory. They may be the models' own: a kernel never writes into them. A list of tensors is a row too.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]: ...


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
