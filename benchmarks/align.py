"""Barriers between models from different starts, before and after `merge.align`, and the time that it takes.

    python benchmarks/align.py [--transformer]

Two networks are trained on scikit-learn's digits from two seeds. The barrier is the loss at the midpoint above the mean of the
losses of the ends, on the data that both were trained on. With --transformer a permuted copy of a transformer of ten million
parameters is aligned to it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import moduli as mo
from moduli import merge


def read_digits() -> tuple[Tensor, Tensor]:
    """Return images as rows, and their digits."""
    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def make_mlp(width: int) -> nn.Module:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


class ResidualNet(nn.Module):
    """A small convolutional network with two residual blocks and batch normalisation.

    Args:
        width: The number of channels.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(2)
        )  # fmt: skip
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of digits."""
        x = F.relu(self.first(x.view(-1, 1, 8, 8)))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.last(x.mean((2, 3)))


class Block(nn.Module):
    """A block of a transformer, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.a, self.b = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each position."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.a(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.b(x))))


class Transformer(nn.Module):
    """A language model; with the defaults, of ten million parameters."""

    def __init__(self, tokens: int = 1000, width: int = 320, layers: int = 8, heads: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next token."""
        return self.head(self.norm(self.blocks(self.embed(x))))


def train(net: nn.Module, seed: int, steps: int = 600) -> nn.Module:
    """Train a network on digits and return it.

    Args:
        net: The network.
        seed: The seed of the batches.
        steps: The number of steps.
    """
    x, y = read_digits()
    generator = torch.Generator().manual_seed(seed)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        opt.step()
    return net.eval().requires_grad_(False)


def measure_barrier(a: Any, b: Any, repair: bool) -> float:
    """Return the loss at the midpoint minus the mean loss of the ends.

    Args:
        a: One end.
        b: The other end.
        repair: Whether to repair the statistics of the midpoint.
    """
    x, y = read_digits()
    loss = lambda net: float(F.cross_entropy(net(x), y))  # noqa: E731
    middle = merge.lerp(a, b, 0.5, buffers="merge")
    if repair:
        middle = merge.repair(middle, [x], [a, b])
    return loss(middle) - (loss(a) + loss(b)) / 2


def compare(name: str, make: Any) -> None:
    """Print the barriers between two networks."""
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        nets.append(train(make(), seed))
    a, b = nets
    x, _ = read_digits()
    began = time.perf_counter()
    c = merge.align(b, a, example=x[:8])
    seconds = time.perf_counter() - began
    d = merge.align(b, a, example=x[:8], by="activations", data=[x])
    rows = {f"{how}{', repaired' * repair}": measure_barrier(a, each, repair)
            for how, each in (("naive", b), ("by weights", c), ("by activations", d)) for repair in (False, True)}  # fmt: skip
    print(f"{name}: {', '.join(f'{how} {value:.4f}' for how, value in rows.items())}; {seconds:.2f} s")


def align_transformer() -> None:
    """Print how long it takes to align a permuted copy of a transformer, and whether it is recovered."""
    torch.manual_seed(0)
    net, x = Transformer(), torch.randint(1000, (1, 12))
    ax = mo.axes.trace(net, x)
    generator = torch.Generator().manual_seed(0)
    units = {axis.name: torch.randperm(axis.size, generator=generator) for axis in ax.free}
    other = merge.permute_units(net, ax, units, x)
    torch.manual_seed(1)
    stranger = Transformer()
    for name, model in (("a permuted copy", other), ("a stranger", stranger)):
        began = time.perf_counter()
        aligned = merge.align(model, net, ax, x)
        seconds = time.perf_counter() - began
        same = all(map(torch.equal, aligned.state_dict().values(), net.state_dict().values()))
        print(f"{sum(p.numel() for p in net.parameters()):,} parameters, {name}: {seconds:.1f} s, equal: {same}")


def main() -> None:
    """Print the comparisons chosen by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transformer", action="store_true")
    if parser.parse_args().transformer:
        align_transformer()
        return
    for width in (32, 128, 512):
        compare(f"MLP of width {width}", lambda width=width: make_mlp(width))
    for width in (16, 64):
        compare(f"residual network of {width} channels", lambda width=width: ResidualNet(width))


if __name__ == "__main__":
    main()
