"""A population, with uncertainty.

Thirty-two networks are one matrix, trained in one pass. Each sees another sample of the data, so that they agree where the data say
much and disagree where they say little.
"""

import torch

import moduli as mo
from moduli import m

torch.manual_seed(0)
time = torch.cat([torch.rand(40, 1) * 1.2 - 2, torch.rand(40, 1) * 1.2 + 0.8])  # nothing between -0.8 and 0.8
signal = torch.sin(2 * time) + 0.1 * torch.randn(80, 1)
rows = torch.randint(80, (32, 80))  # each member draws 80 points, with replacement


def make():
    return torch.nn.Sequential(torch.nn.Linear(1, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1))


pop = mo.Population.of(make, 32)
opt = mo.Optimizer(pop, m.Adam(), m.LR(0.02))
for _ in range(300):
    opt.zero_grad()
    losses = pop.losses(lambda f, x, y: (f(x) - y).square().mean(), time[rows], signal[rows], in_dims=(0, 0))
    losses.sum().backward()
    opt.step()

span = torch.linspace(-3, 3, 120)[:, None]
prediction = pop.predict(span)
low, high = prediction.quantile([0.05, 0.95])
print(f"{len(pop)} networks of {sum(p.numel() for p in pop[0].parameters())} numbers, best loss {losses.min():.4f}")
for at in (-1.0, 0.0, 3.0):
    spot = pop.predict(torch.tensor([[at]]))
    print(f"at {at:4.1f}: {spot.mean.item():6.2f} +/- {spot.std.item():.2f}")

picture = mo.lab.Sketch("time", "signal")
picture.add_band(span, low, high, "90% of the members")
picture.add_line(span, prediction.mean, "mean")
picture.add_points(time, signal, "data")

if __name__ == "__main__":
    picture.write("population.svg")
