"""A network that grows under its optimizer.

When six units are too few, `particles.grow` doubles them. The network computes what it did, its averaged teacher grows with it, and
the optimizer keeps the moments of every weight that stays.
"""

import torch

import moduli as mo
from moduli import m, particles

torch.manual_seed(0)
x = torch.rand(256, 2) * 2 - 1
y = torch.sin(5 * x[:, :1]) * torch.cos(4 * x[:, 1:])

net = mo.adopt(torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)))
teacher = net.clone()
opt = mo.Optimizer(net, m.Adam(), m.LR(2e-2))
losses, sizes = [], []
for step in range(600):
    losses.append(opt.step(mo.closure(lambda f: (f(x) - y).square().mean())).item())
    particles.lerp_(teacher, net, 0.1)  # a moving average
    if step in (199, 399):
        before = net(x)
        particles.grow(net, {"0.out": 2 * net[0].out_features}, example=x)
        sizes.append((step, losses[-1]))
        print(f"step {step + 1}: {net[0].out_features} units, outputs moved by {(net(x) - before).abs().max():.0e}")

print(f"loss {losses[199]:.4f}, {losses[399]:.4f}, {losses[-1]:.4f} with 6, 12 and 24 units")
print("teacher:", teacher.touch()[0].out_features, "units; edits:", len(net.history))

picture = mo.lab.Sketch("step", "loss", log=True)
picture.add_line(range(600), losses, "loss")
picture.add_points(*zip(*sizes, strict=True), "twice the units")

if __name__ == "__main__":
    picture.write("grow.svg")
