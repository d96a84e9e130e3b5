"""Links that show the tensors to other links in another form."""

from ._projection import Projection, ScalarProjection, To, VectorProjection, ViewAsReal

__all__ = ["Projection", "ScalarProjection", "To", "VectorProjection", "ViewAsReal"]
