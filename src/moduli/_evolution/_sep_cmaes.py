"""Covariance matrix adaptation with a diagonal covariance: linear in the dimension.

References:
    Ros and Hansen, A simple modification in CMA-ES achieving linear time and space complexity, PPSN X (2008), section 3.
"""

from torch import Tensor

from ._cmaes import Constants

__all__ = ["update_variances"]


def update_variances(C: Tensor, p_c: Tensor, linear2: Tensor, h_sigma: float, k: Constants) -> Tensor:
    """(47) of the tutorial on the diagonal, from Σ wᵢ zᵢ² over the μ best (yᵢ = √C∘zᵢ)."""
    delta = (1 - h_sigma) * k.c_c * (2 - k.c_c)
    decay = 1 + k.c_1 * delta - k.c_1 - k.c_mu
    return (decay * C).addcmul_(p_c, p_c, value=k.c_1).addcmul_(C, linear2.to(C), value=k.c_mu)
