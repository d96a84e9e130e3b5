"""Labelled tensors: torch data whose axes have names and whose positions have labels."""

from ._elementwise import elementwise
from ._errors import UnknownLabelError
from ._join import join
from ._space import BROADCAST, Space
from ._tensor import AmbiguousTruthError, Tensor

__all__ = ["AmbiguousTruthError", "BROADCAST", "Space", "Tensor", "UnknownLabelError", "elementwise", "join"]
