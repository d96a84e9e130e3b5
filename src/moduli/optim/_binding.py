"""What the links of one optimizer share: which parameter is in which group, its name, and the step."""

from __future__ import annotations

from torch import Tensor


class Binding:
    """Shared by an optimizer and all of its links."""

    def __init__(self) -> None:
        self.group_of: dict[Tensor, int] = {}
        self.names: dict[Tensor, str] = {}
        self.sources: dict[Tensor, Tensor] = {}
        self.step = 0
        self.members: int | None = None
        self.member: int | None = None
        self.views: tuple[list[int], list[list[Tensor]]] | None = None
        self.fuse = True
        self.draws_alike = False
        self.in_pieces = False

    def source(self, param: Tensor) -> Tensor:
        """The parameter that a stand-in (a concatenation, a projection) was made from; itself otherwise."""
        if not self.sources:
            return param
        seen = param
        while (found := self.sources.get(seen)) is not None:
            seen = found
        return seen
