"""The catalogue of links."""

from ._adam import Adam
from ._lr import LR

__all__ = ["LR", "Adam"]
