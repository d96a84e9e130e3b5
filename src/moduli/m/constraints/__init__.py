"""Links that hold constraints."""

from ._augmented_lagrangian import AugmentedLagrangian

__all__ = ["AugmentedLagrangian"]
