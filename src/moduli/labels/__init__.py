"""Labelled tensors: torch data whose axes have names and whose positions have labels."""

from . import _assign, _concat, _einsum, _elementwise, _index, _maths, _matmul, _placement, _rank, _reduce, _rules, _shape, _transforms
from ._elementwise import elementwise
from ._errors import UnknownLabelError
from ._join import join
from ._space import BROADCAST, Space
from ._tensor import AmbiguousTruthError, Tensor
