"""A user's program that is type-checked strictly against the installed package."""

import torch
from torch import Tensor, nn

import moduli as mo
from moduli import m, presets


class Line(mo.Module):
    """A labelled model with one derived tensor."""

    coef: mo.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.coef = mo.zeros(term=["constant", "slope"]).attach()

    def forward(self, x: Tensor) -> mo.Tensor:
        """Return the line at some points."""
        powers = mo.tensor(torch.stack([torch.ones_like(x), x]), "term x", term=["constant", "slope"])
        return mo.dot(self.coef, powers, over="term")


class Halve(mo.optim.TensorTransform):
    """A link defined by a user."""

    elementwise = True

    def single_tensor_apply(
        self,
        tensor: Tensor,
        param: Tensor,
        grad: Tensor | None,
        loss: Tensor | None,
        state: dict[str, object],
        setting: dict[str, object],
    ) -> Tensor:
        """Return half of the update."""
        return tensor / 2


def train(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Train a network and return its loss."""
    optimizer = mo.Optimizer(net, m.ClipNorm(1.0), m.Adam(), Halve(), m.LR(1e-2))
    loss: Tensor | None = None
    for _ in range(3):
        loss = optimizer.step(mo.closure(lambda: (net(x) - y).square().mean()))
    return float("nan") if loss is None else float(loss)


def measure(p: Tensor) -> Tensor:
    """Return the squared distance to 3."""
    return (p - 3.0).square().sum()


def use() -> None:
    """Use the other public names as most programs do."""
    net = nn.Linear(3, 1)
    value: float = train(net, torch.rand(8, 3), torch.rand(8, 1))
    a, b = mo.adopt(nn.Linear(3, 1)), mo.adopt(nn.Linear(3, 1))
    merged = a + 0.5 * (b - a)
    stack = mo.adopt(nn.Sequential(nn.Linear(3, 1)))
    doubled: Tensor = (2 * stack)[0].weight
    population = mo.Population.of(net, 4, init=0.1)
    member: nn.Linear = population[0]
    copies: list[nn.Linear] = population.to_modules()
    line = Line()
    twice: Line = 2 * line + line.clone()
    scheduled = m.LR(lambda step: 0.1 / (step + 1))
    optimizer = mo.Optimizer(population, presets.adamw(1e-2))
    result: mo.Result = mo.minimize(measure, torch.zeros(4))
    mo.save("consumer.safetensors", module=net, optimizer=optimizer)
    print(
        value,
        merged,
        doubled.shape,
        result.success,
        member,
        len(copies),
        twice,
        scheduled,
        len(population),
        Line()(torch.rand(4)).names,
    )


if __name__ == "__main__":
    use()
