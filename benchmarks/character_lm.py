"""A character transformer of 0.36M parameters trained for 150 steps: loss and time of a step against other libraries.

Three layers of attention, 96 wide, with biases and scales, read the page of text that is shipped with `moduli.lab`, in batches of
16 windows of 64 letters. Every optimizer of a kind starts at the same weights, sees the same batches and has the same settings, in
float32 on one thread; nothing is compiled. The loss is the mean over the last ten steps, in nats per letter, for each of three
seeds; it agrees where the means differ by less than twice the standard error of their difference over seeds, or by 0.01. The time
is that of the processor for `step()`, a mean over ten steps, so that bases that move at every tenth count, and the median of
those: optimizers take turns, with gradients of their own.
A peer that is not installed, or that fails, has no row.

    python benchmarks/character_lm.py [--seeds 3] [--steps 150] [--only soap]
"""

import argparse
import math
import statistics
import time
import warnings
from importlib.resources import files

import torch
from torch import nn
from torch.nn import functional as F

import moduli as mo
from links import InFloat32, peers
from moduli import presets

WIDTH, CONTEXT, HEADS, LAYERS, BATCH = 96, 64, 4, 3, 16
CLOSE = 0.01
WARM = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, places, _ = x.shape
        parts = self.mix(self.before(x)).view(batch, places, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, places, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Reader(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letter_embed, self.place_embed = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, x):
        h = self.letter_embed(x) + self.place_embed(torch.arange(x.shape[1]))
        return self.head(self.last(self.blocks(h)))


def read_text():
    text = files("moduli.lab.problems").joinpath("page.txt").read_text(encoding="utf-8")
    letters = "".join(sorted(set(text)))
    return len(letters), torch.tensor([letters.index(letter) for letter in text])


def split(net):
    """Return the matrices of hidden layers, and all other parameters."""
    hidden = [p for name, p in net.named_parameters() if p.dim() == 2 and "embed" not in name and "head" not in name]
    taken = set(map(id, hidden))
    return hidden, [p for p in net.parameters() if id(p) not in taken]


class Both:
    """Two optimizers that step together."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def list_adamw(libraries):
    yield "moduli", lambda net: mo.Optimizer(net, presets.adamw(1e-3))
    yield "torch fused", lambda net: torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
    if "heavyball" in libraries:
        hb = libraries["heavyball"]
        yield "heavyball", lambda net: hb.AdamW(net.parameters(), 1e-3, betas=(0.9, 0.999), weight_decay=0.01)


def list_muon(libraries):
    yield "moduli", lambda net: mo.Optimizer(net, presets.muon(1e-3, method="newtonschulz"))
    yield (
        "moduli, in bfloat16",
        lambda net: mo.Optimizer(net, presets.muon(1e-3, method="newtonschulz", dtype="bfloat16")),
    )

    def make_torch(net):
        hidden, rest = split(net)
        muon = torch.optim.Muon(hidden, 1e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        return Both(InFloat32(muon), torch.optim.AdamW(rest, 1e-3, weight_decay=0.0, fused=True))

    yield "torch, in float32", make_torch
    if "pytorch_optimizer" in libraries:
        po = libraries["pytorch_optimizer"]

        def make_peer(net):
            hidden, rest = split(net)
            groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]
            own = {"adamw_lr": 1e-3, "adamw_betas": (0.9, 0.999), "adamw_eps": 1e-8}
            return po.Muon(groups, lr=1e-3, weight_decay=0.0, use_adjusted_lr=True, **own)

        yield "pytorch_optimizer, in bfloat16", make_peer


def list_soap(libraries):
    yield "moduli", lambda net: mo.Optimizer(net, presets.soap(3e-3))
    if "pytorch_optimizer" in libraries:
        yield "pytorch_optimizer", lambda net: libraries["pytorch_optimizer"].SOAP(net.parameters(), 3e-3)
    if "heavyball" in libraries:
        own = {"betas": (0.95, 0.95), "precondition_frequency": 10, "merge_dims": False, "max_precond_dim": 4096}
        yield "heavyball", lambda net: libraries["heavyball"].SOAP(net.parameters(), 3e-3, **own)


def list_lion(libraries):
    yield "moduli", lambda net: mo.Optimizer(net, presets.lion(3e-4, weight_decay=0.01))
    if "pytorch_optimizer" in libraries:
        yield (
            "pytorch_optimizer",
            lambda net: libraries["pytorch_optimizer"].Lion(net.parameters(), 3e-4, weight_decay=0.01),
        )


def list_schedule_free(libraries):
    yield "moduli", lambda net: mo.Optimizer(net, presets.schedule_free(2.5e-3, weight_decay=0.01))
    if "pytorch_optimizer" in libraries:

        def make(net):
            opt = libraries["pytorch_optimizer"].ScheduleFreeAdamW(net.parameters(), 2.5e-3, weight_decay=0.01)
            opt.train()
            return opt

        yield "pytorch_optimizer", make
    if "heavyball" in libraries:
        own = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        yield "heavyball", lambda net: libraries["heavyball"].SFAdamW(net.parameters(), 2.5e-3, **own)


def list_prodigy(libraries):
    yield "moduli", lambda net: mo.Optimizer(net, presets.prodigy(weight_decay=0.01))
    if "pytorch_optimizer" in libraries:
        yield (
            "pytorch_optimizer",
            lambda net: libraries["pytorch_optimizer"].Prodigy(net.parameters(), weight_decay=0.01),
        )


CASES = {
    "adamw": list_adamw,
    "muon": list_muon,
    "soap": list_soap,
    "lion": list_lion,
    "schedule_free": list_schedule_free,
    "prodigy": list_prodigy,
}


def train(makers, seed, steps):
    """Return the losses and the times of steps of each optimizer; optimizers take turns.

    Args:
        makers: Functions that make the optimizers, by name.
        seed: The seed of the model and the batches.
        steps: The number of steps.
    """
    letters, text = read_text()
    runs, losses, times = {}, {}, {}
    for name, make in makers.items():
        torch.manual_seed(seed)
        net = Reader(letters)
        try:
            runs[name] = (net, make(net))
            losses[name], times[name] = [], []
        except Exception as error:
            if name == "moduli":
                raise
            print(f"{name} does not run: {type(error).__name__}: {str(error)[:100]}")
    noise = torch.Generator().manual_seed(seed)
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=noise)
        batch = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        order = list(runs) if step % 2 else list(reversed(runs))
        for name in order:
            net, opt = runs[name]
            net.zero_grad()
            loss = F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            begun = time.process_time()
            opt.step()
            times[name].append(time.process_time() - begun)
            losses[name].append(loss.item())
    return losses, times


def measure(kind, libraries, seeds, steps):
    """Return the final losses by seed and the median time of a step, for each optimizer of a kind.

    Args:
        kind: The key of `CASES`.
        libraries: The installed libraries, by name.
        seeds: The number of seeds.
        steps: The number of steps.
    """
    finals, clocks = {}, {}
    for seed in range(seeds):
        losses, times = train(dict(CASES[kind](libraries)), seed, steps)
        for name in losses:
            finals.setdefault(name, []).append(statistics.mean(losses[name][-10:]))
            warm = times[name][WARM:]
            tens = [statistics.mean(warm[k : k + 10]) for k in range(0, len(warm) - 9, 10)]
            clocks.setdefault(name, []).extend(tens or warm)
    return finals, {name: statistics.median(values) for name, values in clocks.items()}


def compare(finals, peer):
    """Return the difference of mean losses, and its limit."""
    ours, theirs = finals["moduli"], finals[peer]
    difference = statistics.mean(ours) - statistics.mean(theirs)
    if len(ours) < 2:
        return difference, CLOSE
    error = math.sqrt((statistics.variance(ours) + statistics.variance(theirs)) / len(ours))
    return difference, max(CLOSE, 2 * error)


def table(seeds=3, steps=150, kinds=tuple(CASES)):
    libraries = peers()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for kind in kinds:
        finals, clocks = measure(kind, libraries, seeds, steps)
        for name, values in finals.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(
                f"{kind:14} {name:32} loss {statistics.mean(values):.4f} +- {spread:.4f}  step {clocks[name] * 1e3:.2f} ms",
                flush=True,
            )
        for peer in finals:
            if not peer.startswith("moduli"):
                difference, bar = compare(finals, peer)
                title = f"{kind}, loss minus {peer}'s"
                rows.append(
                    {"name": title, "value": difference, "bar": bar, "unit": "nats", "ok": abs(difference) <= bar}
                )
        # Optimizers with products in bfloat16 are compared with each other.
        for ending in ("", ", in bfloat16"):
            alike = [value for name, value in clocks.items() if name.endswith(", in bfloat16") == bool(ending)]
            ours = clocks.get(f"moduli{ending}")
            if ours is None or len(alike) < 2:
                continue
            ratio = ours / min(value for value in alike if value is not ours)
            title = f"{kind}{ending}, step / best peer"
            rows.append({"name": title, "value": ratio, "bar": 1.0, "unit": "x", "ok": ratio <= 1.0})
    torch.set_num_threads(threads)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for row in table(arguments.seeds, arguments.steps, arguments.only):
        print(
            f"{row['name']:56} {row['value']:.4f} {row['unit']} (at most {row['bar']:.4f}) {'' if row['ok'] else 'MISSED'}"
        )
