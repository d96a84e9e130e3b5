"""The module of `Optimizer` by the name that programs written for torchzero know; it is `optimizer`."""

from .optimizer import Optimizer

__all__ = ["Optimizer"]
