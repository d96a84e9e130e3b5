from ._lbfgs import LBFGS

__all__ = ["LBFGS"]
