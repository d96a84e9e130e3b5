"""Populations."""

from . import selection
from ._population import Population

__all__ = ["Population", "selection"]
