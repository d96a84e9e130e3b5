"""Links that show the tensors to other links in another form: another shape, dtype or basis."""

from ._ggt_basis import GGTBasis
from ._low_rank import APOLLO, Fira, GaLore
from ._projection import Projection, ScalarProjection, To, VectorProjection, ViewAsReal
from ._soap_basis import SOAPBasis

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
