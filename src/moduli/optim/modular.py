"""The module of `Optimizer` under its name in torchzero, for programs written for that; the code is in `optimizer`."""

from .optimizer import Optimizer

__all__ = ["Optimizer"]
