"""The error of this room."""

__all__ = ["StructureError"]


class StructureError(ValueError, AssertionError):
    """Two models have different structures, or one is not in the state an operation needs.

    It is a `ValueError`, because that is what it means, and an `AssertionError`, because that is what the interface of
    versions and products has always promised; it is raised explicitly, so `python -O` does not remove it.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt
        >>> a, b = adopt(torch.nn.Linear(3, 2)), adopt(torch.nn.Linear(4, 2))
        >>> a + b
        Traceback (most recent call last):
        ...
        moduli.particles.errors.StructureError: cannot combine Linear and Linear: 'weight' has shape (2, 3) on the left ...
    """
