"""Define a problem for `moduli fit`: the parameters of two damped waves, estimated from noisy measurements.

    moduli fit examples/wave.py:problem --with "Adam | LR(0.05)" --steps 2000 --out wave.safetensors

The arguments of `problem` are the variables, and their defaults are the starting point. `network` fits the same
measurements with a module; it returns the module and its loss function.
"""

import torch
from torch import nn

from moduli.lab import as_problem, fit

TIME = torch.linspace(0, 10, 200)
MEASURED = 1.5 * torch.exp(-0.2 * TIME) * torch.sin(2.0 * TIME) + 0.5 * torch.exp(-0.05 * TIME) * torch.sin(3.0 * TIME)
AMPLITUDE, DECAY, FREQUENCY = torch.tensor([1.0, 1.0]), torch.tensor([0.1, 0.1]), torch.tensor([1.9, 3.1])
MEASURED = MEASURED + 0.01 * torch.randn(200, generator=torch.Generator().manual_seed(0))


def problem(
    amplitude: torch.Tensor = AMPLITUDE,
    decay: torch.Tensor = DECAY,
    frequency: torch.Tensor = FREQUENCY,
) -> torch.Tensor:
    """Return the mean squared error of two damped waves."""
    waves = amplitude[:, None] * torch.exp(-decay[:, None] * TIME) * torch.sin(frequency[:, None] * TIME)
    return (waves.sum(0) - MEASURED).square().mean()


def network():
    """Return a small network as a function of time, and its loss function."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return net, lambda f: (f(TIME[:, None] / 10).squeeze(-1) - MEASURED).square().mean()


def main() -> None:
    """Fit the waves and print what was found."""
    result = fit(as_problem(problem), "Adam | LR(0.05)", steps=600)
    print(f"{result.reason}: loss {result.start:.4f} -> {result.value:.6f}")
    for name, value in result.model().items():
        print(f"{name:10}", " ".join(f"{v:+.2f}" for v in value.tolist()))


if __name__ == "__main__":
    main()
