"""Grow a character-level transformer during training: from 2 to 4 layers and from 64 to 128 units.

New layers start as the identity and new units as copies, so the loss does not change; the optimizer keeps the moments of all
weights that existed before. For comparison, a model of the full size is trained from the start.

Run it with `python examples/grow_a_transformer.py`, or with `--steps 2000` for a longer comparison.
"""

import argparse
import itertools
import pathlib
import time

import torch
from torch import Tensor, nn

import moduli as mo
from moduli import m, particles

LENGTH, HEAD_SIZE, BATCH = 48, 16, 8
# The text is source code of the library.
FILES = sorted((pathlib.Path(mo.__file__).parent / "particles").glob("*.py"))
TEXT = "".join(file.read_text(encoding="utf-8") for file in FILES)
LETTERS = sorted(set(TEXT))
IDS = torch.tensor([LETTERS.index(letter) for letter in TEXT])


class Block(nn.Module):
    """Attention and a hidden layer with residual connections. The size of heads is fixed, so their number depends on the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block."""
        y = self.first(x)
        q, k, v = (part(y).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        hidden: Tensor = nn.functional.gelu(self.up(self.second(x)))
        return x + self.down(hidden)


class Reader(nn.Module):
    """Predicts the next character."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)  # tokens, positions
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the next characters."""
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1]))
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def draw(generator: torch.Generator, count: int) -> Tensor:
    """Return rows of characters from random positions in the text."""
    starts = torch.randint(0, len(IDS) - LENGTH - 1, (count,), generator=generator)
    return torch.stack([IDS[start : start + LENGTH + 1] for start in starts.tolist()])


def measure(net: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of a model on rows of characters."""
    return nn.functional.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def deepen(net: Reader) -> None:
    """Insert a layer in the middle, which starts as the identity."""
    width, layers = net.head.in_features, len(net.blocks)
    particles.insert(net, f"blocks.{layers // 2}", Block(width), IDS[None, :LENGTH])


def widen(net: Reader) -> None:
    """Double the residual stream, the heads and the hidden units of all layers."""
    example = IDS[None, :LENGTH]
    axes = mo.axes.trace(net, example)
    sizes = {"letters.out": 2 * axes["letters.out"].size}
    sizes |= {axis.name: 2 * axis.size for axis in axes.free if axis.name.endswith((".q.head", ".up.out"))}
    particles.grow(net, sizes, axes, example)


def train(net: Reader, steps: int, plan: dict[int, str]) -> list[float]:
    """Train a model that grows at some steps; return its losses on held-out rows, one for each twelfth of the steps."""
    generator = torch.Generator().manual_seed(1)
    held_out = draw(torch.Generator().manual_seed(2), 32)
    opt = mo.Optimizer(net, m.ClipNorm(1.0), m.Adam(), m.LR(2e-3))
    curve = []
    for step in range(steps):
        if step in plan:
            before = measure(net, held_out).item()
            (deepen if plan[step] == "deepen" else widen)(net)
            after = measure(net, held_out).item()
            count = sum(param.numel() for param in net.parameters())
            print(f"  step {step}: {plan[step]} to {count:,} parameters, loss {before:.5f} -> {after:.5f}")
            if abs(after - before) > 1e-3:
                raise RuntimeError("the loss jumped")
        opt.zero_grad()
        measure(net, draw(generator, BATCH)).backward()
        opt.step()
        if (step + 1) % max(steps // 12, 1) == 0:
            with torch.no_grad():
                curve.append(measure(net, held_out).item())
    return curve


def main() -> None:
    """Train the model that grows, and the one that is large from the start, on the same rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=36)
    steps = parser.parse_args().steps
    plan = {steps // 4: "deepen", steps // 3: "deepen", steps // 2: "widen"}
    for name, width, layers, growth in (("grown", 64, 2, plan), ("large from the start", 128, 4, {})):
        torch.manual_seed(0)
        net, start = Reader(width, layers), time.perf_counter()
        print(f"{name}: {layers} layers of {width} units")
        curve = train(net, steps, growth)
        print("  loss:", *(f"{loss:.2f}" for loss in itertools.islice(curve, 12)))
        print(f"  {len(net.blocks)} layers of {net.head.in_features} units, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
