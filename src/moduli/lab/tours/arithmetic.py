"""Model arithmetic, and a version that follows.

A model is fine-tuned twice, on other halves of the data. What each has learnt is a difference of models, and the sum of both is
added to the base. Then the structure of the base changes, and its relative follows.
"""

import torch

import moduli as mo
from moduli import m, particles

torch.manual_seed(0)
x = torch.linspace(-1, 1, 200)[:, None]
wave, wish = torch.sin(3 * x), torch.sin(3 * x) + 0.8 * torch.exp(-((x.abs() - 0.6) ** 2) / 0.02)


class Curve(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Tanh())
        self.head = torch.nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.body(torch.exp(-((x - torch.linspace(-1.2, 1.2, 48)) ** 2) / 0.005)))


def train(net, target, chosen, steps=300):
    opt = mo.Optimizer(net, m.Adam(), m.LR(1e-3))
    for _ in range(steps):
        opt.step(mo.closure(lambda f: (f(x[chosen]) - target[chosen]).square().mean()))
    return net


base = train(Curve(), wave, slice(None))
left = train(base.clone(), wish, slice(0, 100))
right = train(base.clone(), wish, slice(100, 200))
both = base + (left - base) + (right - base)

for name, net in {"base": base, "left": left, "right": right, "both": both}.items():
    error = (net(x) - wish).square().mean().sqrt()
    print(f"{name:5} error {error:.3f}, {particles.distance(net, base):.2f} from the base")

base.head = torch.nn.Linear(64, 3)  # the species changes
both.touch()  # the relative follows
print(base.history[-1].what, "->", both.head.out_features, "outputs in the relative, too")

picture = mo.lab.Sketch("x", "output")
picture.add_line(x, wish, "wish", dashed=True)
picture.add_line(x, left(x)[:, :1], "left")
picture.add_line(x, right(x)[:, :1], "right")
picture.add_line(x, both(x)[:, :1], "base + (left - base) + (right - base)")

if __name__ == "__main__":
    picture.write("arithmetic.svg")
