"""Two strangers, merged.

Two networks from different starts learn similar units in different orders, so the average of both is worse than either.
`merge.align` finds the order in which one is nearest to the other; aligned, the barrier between them is small. Needs SciPy.
"""

import torch

import moduli as mo
from moduli import m, merge

points = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
kind = (points[:, :3].prod(1) > 0).long() + 2 * (points[:, 3:].sum(1) > 0).long()


def measure(net):
    return torch.nn.functional.cross_entropy(net(points), kind)


def train(seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(6, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    opt = mo.Optimizer(net, m.Adam(), m.LR(3e-3))
    for _ in range(200):
        opt.step(mo.closure(measure))
    return net.requires_grad_(False)


one, other = train(0), train(1)
aligned = merge.align(other, one, example=points[:2])
print("aligned computes the same:", torch.allclose(aligned(points), other(points), atol=1e-4))

naive, path = merge.path(one, other, measure), merge.path(one, aligned, measure)
print(f"loss of the average: {naive.losses[10]:.3f}, aligned {path.losses[10]:.3f}")
print(f"barrier: {naive.barrier:.3f}, aligned {path.barrier:.3f}")

picture = mo.lab.Sketch("weight of the other", "loss")
picture.add_line(naive.grid, naive.losses, "as they are")
picture.add_line(path.grid, path.losses, "aligned")

if __name__ == "__main__":
    picture.write("merge.svg")
