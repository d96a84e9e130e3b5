"""A weight that is derived, not stored.

The parameter is any matrix; the weight is the rotation that its antisymmetric part generates, computed whenever it is read, with
gradients to its source. It is a rotation after every step, which a free matrix is not.
"""

import torch

import moduli as mo
from moduli import m

torch.manual_seed(0)
angle = torch.linspace(0, 2 * torch.pi, 80)
outline = torch.stack([16 * angle.sin() ** 3, 13 * angle.cos() - 5 * (2 * angle).cos() - 2 * (3 * angle).cos()], 1) / 16
turn = torch.tensor(1.0)
turned = outline @ torch.tensor([[turn.cos(), turn.sin()], [-turn.sin(), turn.cos()]])
seen = turned[::4] + 0.15 * torch.randn(20, 2)


class Turn(mo.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.nn.Parameter(torch.zeros(2, 2))

    @mo.virtual
    def weight(self):
        return torch.matrix_exp(self.generator - self.generator.T)

    def forward(self, points):
        return points @ self.weight


net = Turn()
opt = mo.Optimizer(net, m.LBFGS(), m.StrongWolfe())
for _ in range(10):
    loss = opt.step(mo.closure(lambda f: (f(outline[::4]) - seen).square().mean()))

free = torch.linalg.lstsq(outline[::4], seen).solution
print(f"angle {torch.atan2(net.weight[0, 1], net.weight[0, 0]):.3f}, truth {turn:.3f}, loss {loss:.4f}")
print(f"determinant {net.weight.det():.6f}; of a free matrix {free.det():.6f}")
print("stored:", [name for name, _ in net.named_parameters()])

picture = mo.lab.Sketch("x", "y", equal=True)
picture.add_line(outline[:, 0], outline[:, 1], "outline", dashed=True)
picture.add_points(seen[:, 0], seen[:, 1], "seen, turned")
picture.add_line(*net(outline).T, "outline @ weight")

if __name__ == "__main__":
    picture.write("derive.svg")
