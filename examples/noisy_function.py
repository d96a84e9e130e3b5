"""Minimise a noisy, ill-conditioned function with four methods, of which only CMA-ES reaches the minimum within the budget.

Run it with `python examples/noisy_function.py`.
"""

import torch
from torch import Tensor

from moduli.evolve import CMAES, DE, PSO, OpenES, Search

DIM, BUDGET = 10, 6000


def valley(x: Tensor) -> Tensor:
    """Return a quadratic form with eigenvalues from 1 to 1000, rotated by 45 degrees in each pair of coordinates."""
    a, b = x[..., 0::2], x[..., 1::2]
    rotated = torch.cat([a + b, a - b], -1) / 2**0.5
    return (rotated.square() * torch.logspace(0, 3, DIM, dtype=x.dtype)).sum(-1)


def measured(x: Tensor, noise: torch.Generator) -> Tensor:
    """Return values with a relative error of about five per cent, which is drawn again at each call."""
    value = valley(x)
    return value * (1 + 0.05 * torch.randn(value.shape, generator=noise, dtype=x.dtype))


def main() -> None:
    """Give each method the same budget, and compare the true value at its mean."""
    start = torch.full((DIM,), 2.0, dtype=torch.float64)
    searches: dict[str, Search] = {
        "CMA-ES": CMAES(start, sigma=1.0, max_evaluations=BUDGET),
        "OpenES": OpenES(start, sigma=0.1, lr=0.05, population=20, max_evaluations=BUDGET),
        "PSO": PSO(start, population=20, max_evaluations=BUDGET),
        "DE": DE(start, population=20, max_evaluations=BUDGET),
    }
    values = {}
    for name, search in searches.items():
        noise = torch.Generator().manual_seed(1)
        while not search.should_stop():
            search.tell(measured(search.ask(), noise))
        values[name] = float(valley(search.mean))
        print(f"{name:8s} {values[name]:10.3g}   {search.should_stop()}")
    if min(values, key=values.__getitem__) != "CMA-ES":
        raise SystemExit("CMA-ES should have won")


if __name__ == "__main__":
    main()
