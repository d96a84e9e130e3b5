"""Population-based training: learning rates are selected during training.

Sixteen networks start with learning rates spread over five orders of magnitude. Every twenty steps the worst four copy the
weights, optimizer state and learning rates of the best four, and the learning rates are changed at random. The interval matters:
with an exchange every ten steps members copy each other before they differ, and the best of them is worse than without exchanges.
"""

import torch

import moduli as mo
from moduli import m

torch.manual_seed(0)
x = torch.linspace(-3, 3, 64)[:, None]
y = torch.sin(2 * x) + 0.3 * x


def network():
    """Return one member."""
    return torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def loss(net):
    """Return the loss of one member."""
    return (net(x) - y).square().mean()


def train(*more):
    """Return the losses after training with these links after Adam."""
    torch.manual_seed(0)
    pop = mo.Population.of(network, 16)
    opt = mo.Optimizer(pop, m.Adam(), m.LR(1e-2), *more)
    if not more:  # the initial rates of PBT, constant during training
        rates = mo.Optimizer(pop, m.LR(1.0), m.PBT({"lr.lr": (1e-5, 1.0)}, seed=0)).attrs["hyperparameters"]["lr.lr"]
        opt.param_groups[0]["lr"] = rates
    for step in range(240):
        losses = opt.step(mo.closure(loss))
        if more and step % 80 == 0:
            rates = opt.attrs["hyperparameters"]["lr.lr"]
            print(f"step {step:3}: rates {rates.min():.1e} to {rates.max():.1e}, best loss {losses.min():.4f}")
    return losses


with_pbt = train(m.PBT({"lr.lr": (1e-5, 1.0)}, every=20, share=0.25, seed=0))
without = train()
print(f"with PBT:    median loss {with_pbt.median():.4f}, best {with_pbt.min():.4f}")
print(f"without it:  median loss {without.median():.4f}, best {without.min():.4f}")
