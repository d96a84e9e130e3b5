"""Two spirals: a population of small networks, each descending its gradient while the swarm pulls them together.

Gradient steps and swarm moves are links of one chain, and the swarm needs no evaluation of its own: the one that gives the
gradients gives the losses too. The mixture is compared with either alone. On a loss as smooth as this the gradient does the
work, the swarm alone is far behind, and pulling members together costs them some of their variety.
"""

import math

import torch

import moduli as mo
from moduli import m


def spirals(points):
    """Two arms of points, one class each."""
    t = torch.linspace(0.3, 1.0, points) * 2.2 * math.pi
    arm = torch.stack([t * t.cos(), t * t.sin()], 1) / 7
    return torch.cat([arm, -arm]), torch.cat([torch.zeros(points), torch.ones(points)])


def network():
    """What the members are."""
    return torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )


def train(links, steps=80):
    """The lowest and the highest loss, and the best accuracy."""
    torch.manual_seed(0)
    pop = mo.Population.of(network, 8)
    opt = mo.Optimizer(pop, *links)

    def loss(net):
        return torch.nn.functional.binary_cross_entropy_with_logits(net(X)[:, 0], Y)

    for _ in range(steps):
        opt.step(mo.closure(loss))
    with torch.no_grad():
        right = pop.losses(lambda net: ((net(X)[:, 0] > 0) == (Y > 0.5)).float().mean())
        losses = pop.losses(loss)
        return losses.min().item(), losses.max().item(), right.max().item()


X, Y = spirals(32)
for name, links in {
    "PSO": [m.PSO(seed=0)],
    "Adam": [m.Adam(), m.LR(0.02)],
    "Adam and PSO": [m.Adam(), m.LR(0.02), m.PSO(inertia=0.3, cognitive=0.1, social=0.1, seed=0)],
}.items():
    best, worst, accuracy = train(links)
    print(f"{name:13} losses {best:.4f} to {worst:.4f}, best accuracy {accuracy:.1%}")
