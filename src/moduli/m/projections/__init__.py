"""Links that show the tensors to other links in another form: another shape, dtype or basis."""

from ._ggt_basis import GGTBasis
from ._projection import Projection, ScalarProjection, To, VectorProjection, ViewAsReal
from ._soap_basis import SOAPBasis

__all__ = ["GGTBasis", "Projection", "SOAPBasis", "ScalarProjection", "To", "VectorProjection", "ViewAsReal"]
