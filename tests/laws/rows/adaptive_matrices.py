"""Links on matrices and links with little state, each with the formula of its paper as reference."""

import torch

from laws.helpers import orthogonalize_quintic
from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _rms(x):
    return x.abs().square().mean().sqrt() if x.numel() else torch.zeros(())


def _factored(memory, name, square, beta):
    """Algorithm 4 of Adafactor, with sums."""
    if square.dim() < 2:
        memory[name] = beta * memory.get(name, 0) + (1 - beta) * square
        return memory[name]
    memory[name + "R"] = beta * memory.get(name + "R", 0) + (1 - beta) * square.sum(-1)
    memory[name + "C"] = beta * memory.get(name + "C", 0) + (1 - beta) * square.sum(-2)
    rows, columns = memory[name + "R"], memory[name + "C"]
    return rows.unsqueeze(-1) * columns.unsqueeze(-2) / rows.sum(-1)[..., None, None]


def _adafactor(relative):
    def step(x, g, memory, t):
        scaled = g / _factored(memory, "v", g * g + 1e-30, 1 - t**-0.8).sqrt()
        scaled = scaled / max(1.0, _rms(scaled).item())
        return scaled * max(1e-3, _rms(x).item()) * min(1e-2, t**-0.5) if relative else 0.05 * scaled

    return step


def _came(x, g, memory, t):
    scaled = g / _factored(memory, "v", g * g + 1e-30, 0.999).sqrt()
    scaled = scaled / max(1.0, _rms(scaled).item())
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * scaled
    if g.dim() < 2:
        return 0.01 * memory["m"]
    return 0.01 * memory["m"] / _factored(memory, "s", (scaled - memory["m"]) ** 2 + 1e-16, 0.9999).sqrt()


def _adam_mini(x, g, memory, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    square = torch.stack([row.square().mean() for row in g]) if g.dim() > 1 else g.square().mean()
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * square
    below = (memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8
    return 0.05 * memory["m"] / (1 - 0.9**t) / (below[:, None] if g.dim() > 1 else below)


def _lamb(x, g, memory, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
    u = memory["m"] / (1 - 0.9**t) / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + 0.1 * x
    ratio = x.norm() / u.norm() if x.norm() > 0 and u.norm() > 0 else 1.0
    return 0.01 * ratio * u


def _lars(x, g, memory, t):
    ratio = 1e-2 * x.norm() / (g.norm() + 0.1 * x.norm() + 1e-8) if x.norm() > 0 and g.norm() > 0 else 1.0
    memory["v"] = 0.9 * memory.get("v", 0) + ratio * (g + 0.1 * x)
    return memory["v"]


def _splus(x, g, memory, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    if g.dim() < 2:
        return 0.1 * 1e-3 * memory["m"].sign()
    QL, QR = memory.get("Q", [torch.eye(size, dtype=g.dtype) for size in g.shape])
    memory["L"] = 0.999 * memory.get("L", 0) + 0.001 * g @ g.T
    memory["R"] = 0.999 * memory.get("R", 0) + 0.001 * g.T @ g
    if t == 1 or t % 3 == 0:  # the bases of the next step
        memory["Q"] = [torch.linalg.eigh(memory[key])[1] for key in "LR"]
    rotated = QL.T @ memory["m"] @ QR
    return 0.1 * QL @ torch.where(rotated.abs() > 1e-13, rotated, 0.0).sign() @ QR.T * 2 / sum(g.shape)


def _kl_shampoo(x, g, memory, t):
    if g.dim() < 2:
        memory["v"] = 0.9 * memory.get("v", 0) + 0.1 * g * g
        return 0.05 * g / (memory["v"] / (1 - 0.9**t)).sqrt()
    m, n = g.shape
    L = memory.setdefault("L", torch.eye(m, dtype=g.dtype) * _rms(g))
    R = memory.setdefault("R", torch.eye(n, dtype=g.dtype) * _rms(g))

    def damped(a):
        return a + 1e-4 * a.diagonal().mean() * torch.eye(len(a), dtype=a.dtype)

    before = (torch.linalg.inv(damped(L)), torch.linalg.inv(damped(R))) if t > 1 else (L.inverse(), R.inverse())
    memory["L"] = 0.9 * L + 0.1 * g @ before[1] @ g.T / n
    memory["R"] = 0.9 * R + 0.1 * g.T @ before[0] @ g / m

    def root(a):
        values, vectors = torch.linalg.eigh(damped(a))
        return vectors @ torch.diag(values**-0.5) @ vectors.T

    return 0.05 * root(memory["L"]) @ g @ root(memory["R"])


def _normuon(x, g, memory, t):
    if g.dim() < 2:
        return 0.05 * g
    U, _, V = torch.linalg.svd(g, full_matrices=False)
    out = U @ V
    memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * out.square().mean(1)
    out = out / (memory["v"].sqrt() + 1e-8)[:, None]
    return 0.05 * 0.2 * g.numel() ** 0.5 * out / out.norm()


def _lmo(x, g, memory, t):
    return 0.05 * (2.0 * g.sign() / g.shape[-1] if g.dim() == 2 else 2.0 * g.sign())


def _scion(x, g, memory, t):
    if g.dim() < 2:
        norm = g.norm()
        return 0.01 * g * (g.numel() ** 0.5 / (norm if norm > 0 else 1.0))
    return 0.01 * (g.shape[0] / g.shape[1]) ** 0.5 * orthogonalize_quintic(g)


def _dion(params, grads, memory, t):
    """Algorithm 1, with the power iteration's start drawn in the order of the parameters."""
    generator = memory.setdefault("generator", torch.Generator().manual_seed(0))
    for i, (param, g) in enumerate(zip(params, grads, strict=True)):
        own = memory.setdefault(i, {"M": torch.zeros_like(g)})
        if g.dim() < 2:
            own["M"] = 0.95 * own["M"] + g
            param.data.sub_(0.02 * own["M"])
            continue
        if "V" not in own:
            own["V"] = torch.linalg.qr(torch.randn(g.shape[1], min(2, *g.shape), dtype=g.dtype, generator=generator))[0]
        B = own["M"] + g
        P = torch.linalg.qr(B @ own["V"])[0]
        R = B.T @ P
        own["M"] = B - (1 - 0.95) * P @ R.T
        own["V"] = R / R.norm(dim=0)
        param.data.sub_(0.02 * (g.shape[0] / g.shape[1]) ** 0.5 * P @ own["V"].T)


def _adam(memory, g, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
    return memory["m"] / (1 - 0.9**t) / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8)


def _limited(own, rest):
    norm = rest.norm()
    if "norm" in own and norm > 1.01 * own["norm"]:
        rest, norm = rest * (1.01 * own["norm"] / norm), 1.01 * own["norm"]
    own["norm"] = norm
    return rest


def _low_rank(kind):
    """Rank one of the shorter side, a new direction at every second step, Adam inside."""

    def move(params, grads, memory, t):
        generator = memory.setdefault("generator", torch.Generator().manual_seed(0))
        for i, (param, g) in enumerate(zip(params, grads, strict=True)):
            own = memory.setdefault(i, {})
            if g.dim() < 2 or min(g.shape) <= 1:
                param.data.sub_(0.02 * _adam(own, g, t))
                continue
            G = g.T if g.shape[0] > g.shape[1] else g
            if (t - 1) % 2 == 0:
                if kind == "apollo":
                    own["P"] = torch.randn(1, G.shape[0], dtype=g.dtype, generator=generator).T
                else:
                    P = torch.linalg.svd(G)[0][:, :1]
                    own["P"] = P * P[P.abs().argmax()].sign()
            seen = own["P"].T @ G
            inner = _adam(own, seen, t)
            ratio = inner.norm(dim=0) / seen.norm(dim=0)
            if kind == "apollo":
                out = _limited(own, G * ratio)
            else:
                out = own["P"] @ inner
                if kind == "fira":
                    out = out + _limited(own, (G - own["P"] @ seen) * ratio)
            param.data.sub_(0.02 * (out.T if g.shape[0] > g.shape[1] else out))

    return move


_WHOLE = {"pieces": False}

ROWS = [
    Row(
        "Adafactor", lambda: [m.Adafactor(), m.LR(0.05)], tolerance=0.05, reference=formula(_adafactor(False)), **_WHOLE
    ),
    Row(
        "Adafactor, relative steps",
        lambda: [m.Adafactor(relative_step=True)],
        target="",
        reference=formula(_adafactor(True)),
        **_WHOLE,
    ),
    Row("CAME", lambda: [m.CAME(), m.LR(0.01)], target="", reference=formula(_came), **_WHOLE),
    Row("AdamMini", lambda: [m.AdamMini(), m.LR(0.05)], tolerance=1e-2, reference=formula(_adam_mini), **_WHOLE),
    Row(
        "TrustRatio, LAMB",
        lambda: [m.Adam(eps=1e-6), m.WeightDecay(0.1), m.TrustRatio(), m.LR(0.01)],
        target="",
        reference=formula(_lamb),
        **_WHOLE,
    ),
    Row(
        "TrustRatio, LARS",
        lambda: [m.TrustRatio(trust=1e-2, weight_decay=0.1, eps=1e-8), m.HeavyBall(0.9)],
        target="",
        reference=formula(_lars),
        **_WHOLE,
    ),
    Row("SPlus", lambda: [m.SPlus(precond_freq=3), m.LR(0.1)], target="", reference=formula(_splus), **_WHOLE),
    Row(
        "KLShampoo",
        lambda: [m.KLShampoo(beta=0.9, eps=1e-4), m.LR(0.05)],
        target="",
        reference=formula(_kl_shampoo),
        **_WHOLE,
    ),
    Row(
        "NeuronNormalize",
        lambda: [m.Orthogonalize(method="svd"), m.NeuronNormalize(), m.LR(0.05)],
        target="",
        reference=formula(_normuon),
        **_WHOLE,
    ),
    Row("LMO, sign", lambda: [m.LMO("sign", radius=2.0), m.LR(0.05)], target="", reference=formula(_lmo), **_WHOLE),
    Row("LMO, spectral", lambda: [m.LMO("spectral"), m.LR(0.01)], target="", reference=formula(_scion), **_WHOLE),
    Row("Dion", lambda: [m.Dion(rank=2, seed=0), m.LR(0.02)], target="", random=True, reference=_dion, **_WHOLE),
    Row(
        "GaLore, whole rank",
        lambda: [m.GaLore(m.Identity(), rank=100, scale=1.0), m.LR(0.05)],
        reference=lambda params: torch.optim.SGD(params, 0.05),
        **_WHOLE,
    ),
    Row(
        "GaLore",
        lambda: [m.GaLore(m.Adam(), rank=1, update_gap=2, scale=1.0), m.LR(0.02)],
        target="",
        reference=_low_rank("galore"),
        **_WHOLE,
    ),
    Row(
        "Fira",
        lambda: [m.Fira(m.Adam(), rank=1, update_gap=2, scale=1.0), m.LR(0.02)],
        target="",
        reference=_low_rank("fira"),
        **_WHOLE,
    ),
    Row(
        "APOLLO",
        lambda: [m.APOLLO(m.Adam(), rank=1, update_gap=2, seed=0), m.LR(0.02)],
        target="",
        reference=_low_rank("apollo"),
        random=True,
        **_WHOLE,
    ),
    Row("Quantized", lambda: [m.Quantized(m.Adam()), m.LR(0.05)], reference=lambda p: torch.optim.Adam(p, 0.05)),
]
