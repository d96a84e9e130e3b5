"""A noisy, badly scaled valley, where following noisy slopes gets stuck and CMA-ES does not.

Run it with `python examples/noisy_function.py`.
"""

import torch
from torch import Tensor

from moduli.evolve import CMAES, DE, PSO, OpenES, Search

DIM, BUDGET = 10, 6000


def valley(x: Tensor) -> Tensor:
    """An ellipsoid with axes from 1 to 1000, turned by 45 degrees in each pair of coordinates."""
    a, b = x[..., 0::2], x[..., 1::2]
    turned = torch.cat([a + b, a - b], -1) / 2**0.5
    return (turned.square() * torch.logspace(0, 3, DIM, dtype=x.dtype)).sum(-1)


def measured(x: Tensor, noise: torch.Generator) -> Tensor:
    """What can be seen of it: each value is off by a few per cent, differently each time."""
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
    found = {}
    for name, search in searches.items():
        noise = torch.Generator().manual_seed(1)
        while not search.should_stop():
            search.tell(measured(search.ask(), noise))
        found[name] = float(valley(search.mean))
        print(f"{name:8s} {found[name]:10.3g}   {search.should_stop()}")
    if min(found, key=found.__getitem__) != "CMA-ES":
        raise SystemExit("CMA-ES should have won")


if __name__ == "__main__":
    main()
