"""Hand-written models of every kind, each with an example and the names of axes that must be free."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A model whose forward is a function."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *args):
        return self.run(self, *args)


def weight(*shape):
    return nn.Parameter(torch.randn(shape) * 0.3)


def mlp():
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return net, (torch.randn(5, 4),), ["0.out", "2.out"]


def residual_mlp():
    def run(self, x):
        x = self.a(x)
        x = x + self.c(F.gelu(self.b(x)))
        return self.d(self.n(x))

    net = Model(run, a=nn.Linear(3, 8), b=nn.Linear(8, 20), c=nn.Linear(20, 8), n=nn.LayerNorm(8), d=nn.Linear(8, 2))
    return net, (torch.randn(4, 3),), ["a.out", "b.out"]


def bilinear():
    def run(self, x, y):
        return self.out(self.mix(self.a(x), self.b(y)))

    net = Model(run, a=nn.Linear(3, 6), b=nn.Linear(4, 5), mix=nn.Bilinear(6, 5, 7), out=nn.Linear(7, 2))
    return net, (torch.randn(4, 3), torch.randn(4, 4)), ["a.out", "b.out", "mix.out"]


def swiglu():
    def run(self, x):
        gate, up = self.both(self.n(self.a(x))).chunk(2, -1)
        return self.out(self.down(F.silu(gate) * up))

    parts = {
        "a": nn.Linear(3, 8),
        "n": nn.RMSNorm(8),
        "both": nn.Linear(8, 24),
        "down": nn.Linear(12, 8),
        "out": nn.Linear(8, 2),
    }
    return Model(run, **parts), (torch.randn(4, 3),), ["a.out", "both.out.1", "down.out"]


def glu():
    def run(self, x):
        return self.out(F.glu(self.both(x)))

    return Model(run, both=nn.Linear(3, 12), out=nn.Linear(6, 2)), (torch.randn(4, 3),), ["both.out.1"]


def conv_net(dims, grouped=True):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    back = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]

    def run(self, x):
        x = self.n(self.a(x)).relu()
        x = x + self.c(self.g(self.b(x)).relu())
        return self.out(self.up(self.d(x)).flatten(2).mean(-1))

    net = Model(
        run,
        a=conv(3, 8, 3, padding=1),
        n=norm(8),
        b=conv(8, 12, 3, padding=1, groups=4),
        g=nn.GroupNorm(2, 12),
        c=conv(12, 8, 1),
        d=conv(8, 8, 3, groups=8),
        up=back(8, 6, 2, stride=2, groups=2),
        out=nn.Linear(6, 2),
    )
    return net, (torch.randn(2, 3, *(7,) * dims),), ["a.out.0", "a.out.2", "up.out"]


def plain_convolutions():
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(6, 5, 3),
        nn.BatchNorm2d(5),
        nn.Upsample(scale_factor=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )
    return net, (torch.randn(2, 3, 11, 11),), ["0.out", "3.out"]


def unet():
    def run(self, x):
        skip = self.a(x).relu()
        low = self.b(F.max_pool2d(skip, 2)).relu()
        return self.out(self.c(torch.cat([skip, F.interpolate(low, scale_factor=2)], 1)).relu())

    parts = {
        "a": nn.Conv2d(3, 6, 3, padding=1),
        "b": nn.Conv2d(6, 10, 3, padding=1),
        "c": nn.Conv2d(16, 8, 3, padding=1),
    }
    return Model(run, **parts, out=nn.Conv2d(8, 2, 1)), (torch.randn(2, 3, 8, 8),), ["a.out", "b.out", "c.out"]


def padded_shortcut():
    def run(self, x):
        x = self.a(x)
        return self.out(F.pad(x, (0, 0, 0, 0, 2, 2)) + self.b(x).relu())

    parts = {"a": nn.Conv2d(3, 6, 3, padding=1), "b": nn.Conv2d(6, 10, 3, padding=1), "out": nn.Conv2d(10, 2, 1)}
    return Model(run, **parts), (torch.randn(2, 3, 5, 5),), ["a.out"]


def tied_language_model():
    def run(self, ids):
        x = self.embed(ids) + self.position[:, : ids.shape[1]]
        return self.norm(x + self.down(self.up(x).relu())) @ self.embed.weight.T

    parts = {"embed": nn.Embedding(11, 8), "up": nn.Linear(8, 20), "down": nn.Linear(20, 8), "norm": nn.LayerNorm(8)}
    return Model(run, **parts, position=weight(1, 9, 8)), (torch.randint(0, 11, (2, 7)),), ["embed.out", "up.out"]


class Attention(nn.Module):
    """Attention in several forms: fused or separate projections, explicit or torch's function, grouped queries, rotary."""

    def __init__(self, width=24, heads=4, kv=4, fused=False, by_hand=False, rotary=False, repeat=False):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.fused, self.by_hand, self.rotary, self.repeat = fused, by_hand, rotary, repeat
        if fused:
            self.qkv = nn.Linear(width, (heads + 2 * kv) * self.size)
        else:
            self.q = nn.Linear(width, width)
            self.k, self.v = (nn.Linear(width, kv * self.size) for _ in range(2))
        self.o = nn.Linear(width, width)
        if rotary:
            self.register_buffer("frequency", 1.0 / 100 ** (torch.arange(0, self.size, 2) / self.size))

    def rotate(self, x):
        angle = torch.arange(x.shape[-2])[:, None] * self.frequency
        angle = torch.cat([angle, angle], -1)
        one, two = x[..., : self.size // 2], x[..., self.size // 2 :]
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

    def forward(self, x):
        batch, length, width = x.shape
        if self.fused:
            q, k, v = self.qkv(x).split([self.heads * self.size, self.kv * self.size, self.kv * self.size], -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.view(batch, length, -1, self.size).transpose(1, 2) for each in (q, k, v))
        if self.rotary:
            q, k = self.rotate(q), self.rotate(k)
        if self.repeat:
            k, v = (each[:, :, None].expand(-1, -1, self.heads // self.kv, -1, -1).reshape(q.shape) for each in (k, v))
        if self.by_hand:
            scores = (q @ k.transpose(-1, -2) / self.size**0.5).masked_fill(
                torch.ones(length, length, dtype=torch.bool).triu(1), -1e9
            )
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.kv != self.heads and not self.repeat
            )
        return self.o(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width=24, **how):
        super().__init__()
        self.att = Attention(width, **how)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def transformer(expected, **how):
    def run(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))

    net = Model(
        run,
        embed=nn.Embedding(11, 24),
        blocks=nn.Sequential(Block(**how), Block(**how)),
        norm=nn.LayerNorm(24),
        head=nn.Linear(24, 11),
    )
    return net, (torch.randint(0, 11, (2, 7)),), ["embed.out", "blocks.0.up.out", "blocks.1.up.out", *expected]


def multihead_attention():
    def run(self, ids):
        x = self.embed(ids)
        return self.head(x + self.att(x, x, x, need_weights=False)[0])

    parts = {
        "embed": nn.Embedding(11, 12),
        "att": nn.MultiheadAttention(12, 3, batch_first=True),
        "head": nn.Linear(12, 5),
    }
    return Model(run, **parts), (torch.randint(0, 11, (2, 7)),), ["embed.out", "att.in_proj.head"]


def encoder_layer():
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, dropout=0.1)
    net = nn.Sequential(nn.Linear(5, 12), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(12, 4))
    return net, (torch.randn(2, 6, 5),), ["0.out", "1.layers.0.linear1.out", "1.layers.1.self_attn.in_proj.head"]


def recurrent(kind, **how):
    def run(self, x):
        return self.out(self.cell(x)[0])

    sides = 2 if how.get("bidirectional") else 1
    net = Model(run, cell=kind(3, 7, 2, batch_first=True, **how), out=nn.Linear(7 * sides, 2))
    last = "out" if kind is nn.RNN else "out.1"
    return net, (torch.randn(2, 5, 3),), [f"cell.weight_ih_l0.{last}", f"cell.weight_ih_l1.{last}"]


def einsum_experts():
    """Experts that are weighted by their scores, so that the axis of experts is free too."""

    def run(self, x):
        x = self.a(x)
        scores = (x @ self.router).softmax(-1)
        hidden = torch.einsum("bd,edh->beh", x, self.up).relu()
        return self.out(torch.einsum("be,beh,ehd->bd", scores, hidden, self.down) + x)

    parts = {
        "a": nn.Linear(3, 8),
        "router": weight(8, 5),
        "up": weight(5, 8, 9),
        "down": weight(5, 9, 8),
        "out": nn.Linear(8, 2),
    }
    return Model(run, **parts), (torch.randn(4, 3),), ["a.out", "router.out", "up.out.1"]


def chosen_experts():
    """Experts that are selected by index."""

    def run(self, x):
        x = self.a(x)
        scores, chosen = (x @ self.router).softmax(-1).topk(2, -1)
        hidden = torch.einsum("bd,bkdh->bkh", x, self.up[chosen]).relu()
        return self.out(torch.einsum("bk,bkh,bkhd->bd", scores, hidden, self.down[chosen]))

    parts = {
        "a": nn.Linear(3, 8),
        "router": weight(8, 5),
        "up": weight(5, 8, 9),
        "down": weight(5, 9, 8),
        "out": nn.Linear(8, 2),
    }
    return Model(run, **parts), (torch.randn(4, 3),), ["a.out", "router.out", "up.out", "down.out"]


def gathered():
    """A value of each row is gathered at the position of the largest score."""

    def run(self, x):
        best = self.score(x).argmax(-1, keepdim=True)
        return self.value(x).gather(-1, best)

    return Model(run, score=nn.Linear(3, 6), value=nn.Linear(3, 6)), (torch.randn(9, 3),), ["score.out"]


def functional_form():
    def run(self, x):
        def loss(w):
            return F.linear(x, w).tanh().square().sum()

        hidden = torch.func.vmap(lambda row: self.b @ row)(F.linear(x, self.a).tanh())
        return hidden @ self.c, torch.func.grad(loss)(self.a).sum(0)

    return Model(run, a=weight(6, 3), b=weight(7, 6), c=weight(7, 2)), (torch.randn(4, 3),), ["a.out", "b.out"]


def interleaved_rotary():
    """Neighbouring pairs are rotated by a buffer of angles."""

    def run(self, x):
        x = self.a(x).view(4, 5, 3, 2)
        c, s = self.angle.cos(), self.angle.sin()
        y = torch.stack([x[..., 0] * c - x[..., 1] * s, x[..., 1] * c + x[..., 0] * s], -1).flatten(-2)
        return self.out(y[..., ::2] * y[..., 1::2])

    return (
        Model(run, a=nn.Linear(3, 6), angle=torch.rand(5, 3), out=nn.Linear(3, 2)),
        (torch.randn(4, 5, 3),),
        ["a.out.0"],
    )


def weight_normed():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    return net, (torch.randn(3, 4),), ["0.out"]


def scattered_state():
    """A tensor of zeros is filled slice by slice."""

    def run(self, x):
        out = torch.zeros(x.shape[0], 10)
        out[:, :4] = self.a(x)
        out[:, 4:] = self.b(x).relu()
        return self.out(out)

    return (
        Model(run, a=nn.Linear(3, 4), b=nn.Linear(3, 6), out=nn.Linear(10, 2)),
        (torch.randn(5, 3),),
        ["a.out", "b.out"],
    )


def low_rank():
    def run(self, x):
        return self.out((self.a(x) @ (self.left @ self.right + self.base)).relu())

    parts = {
        "a": nn.Linear(3, 6),
        "left": weight(6, 2),
        "right": weight(2, 8),
        "base": weight(6, 8),
        "out": nn.Linear(8, 2),
    }
    return Model(run, **parts), (torch.randn(5, 3),), ["a.out", "left.out", "base.out"]


MODELS = {
    "mlp": mlp,
    "residual mlp": residual_mlp,
    "bilinear": bilinear,
    "swiglu": swiglu,
    "glu": glu,
    "conv 1d": lambda: conv_net(1),
    "conv 2d": lambda: conv_net(2),
    "conv 3d": lambda: conv_net(3),
    "plain convolutions": plain_convolutions,
    "unet": unet,
    "padded shortcut": padded_shortcut,
    "tied": tied_language_model,
    "attention by hand": lambda: transformer(["blocks.0.att.q.head"], by_hand=True),
    "attention by torch": lambda: transformer(["blocks.1.att.q.head"]),
    "fused qkv": lambda: transformer(["blocks.0.att.qkv.head"], fused=True),
    "fused qkv by hand": lambda: transformer(["blocks.0.att.qkv.head"], fused=True, by_hand=True),
    "grouped queries": lambda: transformer(["blocks.0.att.q.head.0", "blocks.1.att.q.head.1"], kv=2),
    "grouped queries, fused": lambda: transformer([], kv=2, fused=True),
    "grouped queries, repeated": lambda: transformer([], kv=2, repeat=True, by_hand=True),
    "rotary": lambda: transformer(["blocks.0.att.q.head"], rotary=True),
    "multihead attention": multihead_attention,
    "encoder layer": encoder_layer,
    "rnn": lambda: recurrent(nn.RNN),
    "gru": lambda: recurrent(nn.GRU),
    "lstm": lambda: recurrent(nn.LSTM),
    "lstm, both ways": lambda: recurrent(nn.LSTM, bidirectional=True),
    "einsum experts": einsum_experts,
    "chosen experts": chosen_experts,
    "gathered": gathered,
    "functional": functional_form,
    "interleaved rotary": interleaved_rotary,
    "weight norm": weight_normed,
    "slices": scattered_state,
    "low rank": low_rank,
}
