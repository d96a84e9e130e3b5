"""Two spirals: train a population of small networks by gradients, by a particle swarm, and by both.

Gradient steps and swarm moves are links of one chain. The swarm uses the losses of the evaluation that gives the gradients, so it
needs no further one. On a smooth loss like this one gradients reach far lower losses than the swarm alone. Together the best loss
is a little lower still, and members become similar, since the swarm attracts them to each other.
"""

import math

import torch

import moduli as mo
from moduli import m


def spirals(points):
    """Return points of two spiral arms and their classes."""
    t = torch.linspace(0.3, 1.0, points) * 2.2 * math.pi
    arm = torch.stack([t * t.cos(), t * t.sin()], 1) / 7
    return torch.cat([arm, -arm]), torch.cat([torch.zeros(points), torch.ones(points)])


def network():
    """Return one member."""
    return torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )


def train(links, steps=80):
    """Return the lowest and the highest loss, and the best accuracy."""
    torch.manual_seed(0)
    pop = mo.Population.of(network, 8)
    opt = mo.Optimizer(pop, *links)

    def loss(net):
        return torch.nn.functional.binary_cross_entropy_with_logits(net(X)[:, 0], Y)

    for _ in range(steps):
        opt.step(mo.closure(loss))
    with torch.no_grad():
        accuracies = pop.losses(lambda net: ((net(X)[:, 0] > 0) == (Y > 0.5)).float().mean())
        losses = pop.losses(loss)
        return losses.min().item(), losses.max().item(), accuracies.max().item()


X, Y = spirals(32)
for name, links in {
    "PSO": [m.PSO(seed=0)],
    "Adam": [m.Adam(), m.LR(0.02)],
    "Adam and PSO": [m.Adam(), m.LR(0.02), m.PSO(inertia=0.3, cognitive=0.1, social=0.1, seed=0)],
}.items():
    best, worst, accuracy = train(links)
    print(f"{name:13} losses {best:.4f} to {worst:.4f}, best accuracy {accuracy:.1%}")
