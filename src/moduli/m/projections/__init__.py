"""Links that show the tensors to other links in another form: another shape, dtype or basis."""

from ._bases import GGTBasis, SOAPBasis
from ._low_rank import APOLLO, Fira, GaLore
from ._projection import Projection, ScalarProjection, To, VectorProjection, ViewAsReal

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
