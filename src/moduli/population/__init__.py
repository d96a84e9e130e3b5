"""Populations."""

from ._population import Population

__all__ = ["Population"]
