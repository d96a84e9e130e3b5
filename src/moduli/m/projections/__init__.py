"""Links that show the tensors to other links in another form: another shape, dtype or basis."""

from ._bases import *
from ._low_rank import *
from ._projection import *

__all__ = [
    "APOLLO",
    "Fira",
    "GGTBasis",
    "GaLore",
    "Projection",
    "SOAPBasis",
    "ScalarProjection",
    "To",
    "VectorProjection",
    "ViewAsReal",
]
