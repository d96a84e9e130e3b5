"""Draw the picture of the README: `python docs/img/draw_house.py [--measure]`.

`house.svg` has four panels: a labelled fit with its error band, a network that grows, two networks merged before and after
alignment, and the profile of a race. The numbers are read from house.json, barrier.json and race.jsonl; --measure runs the first
two programs and writes house.json again.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHOWN = ("Adam", "SOAP", "BFGS", "L-BFGS", "trust region", "CMA-ES", "swarm")


def measure() -> dict[str, Any]:
    """Return the numbers of the fit and of the growth."""
    return {"fit": fit_bands(), "growth": grow_network()}


def fit_bands() -> dict[str, Any]:
    """Fit three labelled bands of a spectrum; the error of the curve is propagated from the covariance."""
    import torch

    import moduli as mo

    torch.manual_seed(0)
    energy = mo.tensor(torch.linspace(0, 10, 60, dtype=torch.float64), "energy")
    bands = mo.Space(["sigma", "pi", "delta"], name="band")

    def spectrum(p: Any) -> Any:
        center, height = (mo.Tensor(each, (bands,)) for each in (p[:3], p[3:]))
        return (height * (-((energy - center) ** 2)).exp()).sum("band")

    truth = torch.tensor([2.0, 5.0, 7.5, 1.0, 0.5, 2.0], dtype=torch.float64)
    measured = spectrum(truth) + 0.15 * mo.randn(energy=60, dtype=torch.float64)
    start = torch.tensor([2.4, 5.4, 7.9, 1.0, 1.0, 1.0], dtype=torch.float64)
    fit = mo.minimize(lambda p: (spectrum(p) - measured).data, start)
    slopes = torch.func.jacfwd(lambda p: spectrum(p).data)(fit.x)
    error = torch.einsum("xp,pq,xq->x", slopes, fit.covariance(), slopes).sqrt()
    curve = spectrum(fit.x).data
    rows = {
        "energy": energy.data,
        "measured": measured.data,
        "curve": curve,
        "low": curve - 2 * error,
        "high": curve + 2 * error,
    }
    return {name: [round(float(value), 4) for value in values] for name, values in rows.items()}


def grow_network() -> dict[str, Any]:
    """Train a network that is grown twice, and record the loss before and after each growth."""
    import torch

    import moduli as mo
    from moduli import m, particles

    torch.manual_seed(0)
    x = torch.rand(256, 2) * 2 - 1
    y = torch.sin(5 * x[:, :1]) * torch.cos(4 * x[:, 1:])
    net = mo.adopt(torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)))
    opt = mo.Optimizer(net, m.Adam(), m.LR(5e-3))
    losses, jumps = [], []
    for step in range(900):
        losses.append(opt.step(mo.closure(lambda f: (f(x) - y).square().mean())).item())
        if step in (299, 599):
            before = (net(x) - y).square().mean().item()
            particles.grow(net, {"0.out": 2 * net[0].out_features}, example=x)
            jumps.append([step + 1, before, (net(x) - y).square().mean().item(), net[0].out_features])
    return {"losses": [float(f"{loss:.4g}") for loss in losses[::3]], "every": 3, "jumps": jumps}


def draw(data: dict[str, Any]) -> str:
    """Return the picture: four sketches side by side."""
    panels = [
        ("A labelled fit and its error", draw_fit(data["fit"])),
        ("A network that grows during training", draw_growth(data["growth"])),
        (
            "Merging networks from different starts",
            draw_barrier(json.loads((HERE / "barrier.json").read_text())["512"]),
        ),
        ("Fraction of seven problems solved", draw_profile()),
    ]
    parts = []
    for at, (title, sketch) in enumerate(panels):
        x, y = 440 * (at % 2), 340 * (at // 2)
        parts.append(f'<text x="{x + 50}" y="{y + 20}" font-weight="600" font-size="14">{title}</text>')
        sized = re.sub(
            r'style="width:100%;max-width:640px;[^"]*"',
            f'x="{x}" y="{y + 28}" width="420" height="300"',
            sketch,
            count=1,
        )
        parts.append(sized.replace("var(--soft,currentColor)", "#444"))
    size = 'width="860" height="680" viewBox="0 0 860 680" font-family="sans-serif" font-size="11"'
    alt = "A labelled fit with its error band, a network that grows, two networks merged, and the profile of a race"
    background = '<rect width="860" height="680" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{alt}">{background}{"".join(parts)}</svg>\n'


def draw_fit(fit: dict[str, list[float]]) -> str:
    """Return the panel of the fit."""
    from moduli import lab

    picture = lab.Sketch("energy", "intensity").add_points(fit["energy"], fit["measured"], "measured")
    picture.add_line(fit["energy"], fit["curve"], "fit")
    return picture.add_band(fit["energy"], fit["low"], fit["high"], "two standard errors").svg()


def draw_growth(growth: dict[str, Any]) -> str:
    """Return the panel of the network that grows."""
    from moduli import lab

    picture = lab.Sketch("step", "loss", log=True)
    picture.add_line([growth["every"] * at for at in range(len(growth["losses"]))], growth["losses"], "loss with Adam")
    steps, _, after, units = zip(*growth["jumps"], strict=True)
    return picture.add_points(steps, after, f"grown to {' and '.join(map(str, units))} units").svg()


def draw_barrier(losses: dict[str, list[float]]) -> str:
    """Return the panel of the two networks."""
    from moduli import lab

    picture = lab.Sketch("weight of the other network", "loss")
    for name in ("as they are", "aligned"):
        picture.add_line([at / (len(losses[name]) - 1) for at in range(len(losses[name]))], losses[name], name)
    return picture.svg()


def draw_profile() -> str:
    """Return the panel of the race."""
    from moduli import lab
    from moduli.lab._statistics import profiles

    picture = lab.Sketch("log10(evaluations / fewest evaluations)", "fraction solved")
    rows = {row["label"]: row for row in profiles(lab.Results.read(HERE / "race.jsonl"), 1e-3)}
    limit = max(row["x"][-1] for row in rows.values())
    for label in SHOWN:
        places = [*rows[label]["x"], limit]
        shares = [*rows[label]["y"], rows[label]["y"][-1]]
        corners = [(math.log10(x), y) for at, x in enumerate(places) for y in (shares[max(0, at - 1)], shares[at])]
        picture.add_line(*zip(*corners, strict=True), label)
    return picture.svg()


def main() -> None:
    """Write the picture."""
    data = HERE / "house.json"
    if "--measure" in sys.argv[1:]:
        data.write_text(json.dumps(measure(), separators=(",", ":")) + "\n")
    (HERE / "house.svg").write_text(draw(json.loads(data.read_text())))


if __name__ == "__main__":
    main()
