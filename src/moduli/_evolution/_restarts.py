"""When and how a strategy starts again.

References:
    Auger and Hansen, A restart CMA evolution strategy with increasing population size, CEC 2005;
    Hansen, Benchmarking a BI-population CMA-ES on the BBOB-2009 function testbed, GECCO workshop 2009, section 2.
"""

import math

__all__ = ["bipop", "ipop"]


def ipop(population: int, factor: float = 2.0) -> int:
    """The next population: twice the last."""
    return math.ceil(population * factor)


def bipop(
    default: int, large: int, spent_large: int, spent_small: int, u1: float, u2: float
) -> tuple[bool, int, float]:
    """The next run of BIPOP: whether it is a large one, its population, and the factor on the first step size.

    The regime that has spent fewer evaluations goes next. A large run doubles the largest population so far; a small one
    has λ = ⌊λ₀ (½ λ_large / λ₀)^(u₁²)⌋ and σ₀ · 10^(-2 u₂).
    """
    if spent_large <= spent_small:
        return True, 2 * large, 1.0
    small = math.floor(default * (0.5 * large / default) ** (u1 * u1))
    return False, max(small, 2), 10 ** (-2 * u2)
