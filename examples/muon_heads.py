"""Train a character-level transformer with Muon, which orthogonalises the matrix of each attention head separately.

Run it with `python examples/muon_heads.py`.
"""

import torch
from torch import Tensor, nn

import moduli as mo
from moduli import optim, presets

TEXT = "the axes of a model say which units are the same, and a head is a matrix of its own. " * 20
LETTERS = sorted(set(TEXT))
WIDTH, HEADS, LENGTH = 32, 4, 32


class Block(nn.Module):
    """Attention with one fused projection, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the block."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        hidden: Tensor = self.up(self.second(x)).relu()
        return x + self.down(hidden)


class Reader(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the next characters."""
        scores: Tensor = self.head(self.blocks(self.letters(ids) + self.places.weight[: ids.shape[1]]))
        return scores


def train(batch: str | None, steps: int = 60) -> float:
    """Return the loss of the last step; `batch` names the axis along which parameters are split into separate matrices."""
    torch.manual_seed(0)
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    net = Reader()
    axes = mo.axes.trace(net, ids[None, :LENGTH])
    if batch is not None:
        print(optim.matrix_view(axes.of("blocks.0.qkv.weight"), batch=batch))
    opt = mo.Optimizer(net, *presets.muon(0.01, axes=axes, batch=batch))
    loss = torch.zeros(())
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (8,))
        rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()])
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        opt.step()
    return loss.item()


def main() -> None:
    """Train with the projection as one matrix, and with one matrix for each head."""
    for name, batch in (("whole projections", None), ("heads", "head")):
        print(f"Muon of {name}: loss {train(batch):.3f}")


if __name__ == "__main__":
    main()
