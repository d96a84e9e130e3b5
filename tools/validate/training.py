"""Sections on training: losses of a language model, widths, growth, and CartPole."""

from __future__ import annotations

import warnings

import torch
from _section import BENCHMARKS, Section, capture, is_installed, load, quick_environment, tabulate
from torch import nn


def check_language_model() -> Section:
    """Return the section on losses of a character transformer over three seeds, beside other libraries."""
    module = load(BENCHMARKS / "character_lm.py")
    with capture() as printed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = module.table()
    losses = [row for row in rows if row["unit"] == "nats"]
    lost = [
        f"{row['name']}: {row['value']:+.4f} nats, which is more than noise ({row['bar']:.4f})"
        for row in losses if row["value"] > row["bar"]
    ]  # fmt: skip
    lines = [line for line in printed.getvalue().splitlines() if " loss " in line]
    cells = [
        (line[:14].strip(), line[15:48].strip(), line.partition(" loss ")[2].partition("  step ")[0]) for line in lines
    ]
    table = tabulate(
        ("optimizer", "library", "loss over the last ten steps, mean and deviation over three seeds"), cells
    )
    table += "\n\n" + tabulate(
        ("difference", "nats", "noise", ""),
        [
            (row["name"], f"{row['value']:+.4f}", f"{row['bar']:.4f}", "agrees" if row["ok"] else "**differs**")
            for row in losses
        ],
    )
    about = (
        "A transformer of 0.36M parameters on a page of text that is shipped with the package, 150 steps, three seeds; the same "
        "weights, batches and settings for everyone. Noise is twice the standard error of the difference over seeds, or 0.01."
    )
    packages = ("torch", "pytorch_optimizer", "heavyball")
    return Section(
        "Losses of a character transformer", about, "python benchmarks/character_lm.py", table, lost, packages
    )


def check_mup() -> Section:
    """Return the section on the best learning rate over widths, with and without muP."""
    with quick_environment():
        axes = load(BENCHMARKS / "axes.py")
        results = axes.sweep()
        difference = axes.compare_with_mup()
    best = {name: axes.find_best(losses) for name, losses in results.items()}
    rows = [(name, *(f"2^{power}" for power in powers), max(powers) - min(powers)) for name, powers in best.items()]
    lost = []
    if max(best["muP"]) - min(best["muP"]) > 1:
        lost.append(
            f"with muP the best rate moves by {max(best['muP']) - min(best['muP'])} factors of two, and not by one"
        )
    body = tabulate(("best learning rate", *(f"width {width}" for width in axes.WIDTHS), "moves by factors of 2"), rows)
    body += "\n\nParameters after five steps, largest difference from the package `mup`: "
    body += "not installed." if difference is None else f"{difference:.1e}."
    about = (
        "An MLP of three layers on digits, Adam, 60 steps, learning rates a factor of two apart, the geometric mean of two seeds "
        "(the benchmark has five). Two seeds can move a best rate by one factor of two."
    )
    return Section(
        "Learning rates that hold for every width (muP)",
        about,
        "python benchmarks/run.py axes",
        body,
        lost,
        ("torch", "mup"),
    )


def check_growth() -> Section:
    """Return the section on the jump of the loss when a model grows, and the steps of Adam after it."""
    import moduli as mo
    from moduli import m

    rows, lost = [], []
    for kind in ("MLP", "residual MLP"):
        for seed in range(3):
            torch.manual_seed(seed)
            net = _make_growing(kind)
            x = torch.randn(256, 16)
            y = torch.sin(x @ torch.randn(16, 4))
            opt = mo.Optimizer(net, m.Adam(), m.LR(1e-3))

            def loss(net=net, x=x, y=y):
                return (net(x) - y).square().mean()

            for _ in range(300):
                opt.step(mo.closure(loss))
            before = float(loss())
            axes = mo.axes.trace(net, x)
            sizes = {axis.name: 2 * axis.size for axis in axes.free if axis.size == 32}
            mo.particles.grow(net, sizes, axes)
            after = float(loss())
            steps = [float(opt.step(mo.closure(loss))) for _ in range(100)]
            rise = max(steps) / before
            rows.append(
                (kind, seed, f"{before:.6f}", f"{abs(after - before) / before:.1e}", f"{rise:.4f}", f"{steps[-1]:.6f}")
            )
            if abs(after - before) > 1e-5 * before:
                lost.append(f"{kind}, seed {seed}: the loss jumps by {abs(after - before) / before:.1e} when it grows")
            if rise > 1.05:
                lost.append(
                    f"{kind}, seed {seed}: within 100 steps after the growth the loss is at most {rise:.3f} of before"
                )
    about = (
        "A network with 32 hidden units is trained by Adam for 300 steps, grows to 64 under its optimizer, and trains on. The jump "
        "is relative, and is that of rounding where it is below 1e-5; then the largest loss of the next hundred steps over the "
        "loss before. No other library grows a model under its optimizer, so there is no peer."
    )
    heads = ("model", "seed", "loss before", "jump", "largest loss after / before", "100 steps later")
    return Section(
        "Growth without a jump of the loss", about, "python tools/validate growth", tabulate(heads, rows), lost
    )


def _make_growing(kind: str) -> nn.Module:
    if kind == "MLP":
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 24), nn.Linear(24, 4)
            self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

        def forward(self, x):
            h = self.enter(x)
            return self.leave(h + self.down(torch.relu(self.up(h))))

    return Residual()


def check_cart_pole() -> Section:
    """Return the section on CartPole-v1 by evolution strategies."""
    about = (
        "A linear policy without bias, from zero, until a member has a mean return of 500 over 16 episodes with fixed starts; then "
        "the mean return over 100 other episodes, where 475 counts as solved. Evaluations vary by a factor of four from seed to "
        "seed, so this says that it works and nothing finer. evotorch 0.6.1 took 80, 30, 60 and 50 on seeds 0 to 3 (measured once, "
        "with other starts for each evaluation, which is harder)."
    )
    command = "python tools/validate cartpole"
    if not is_installed("gymnasium"):
        lost = ["gymnasium is not installed"]
        return Section(
            "Evolution strategies on CartPole-v1", about, command, "gymnasium is not installed.", lost, ("gymnasium",)
        )
    from moduli.evolve import problems, search

    rows, lost = [], []
    for method in ("cmaes", "openes", "snes"):
        for seed in range(3):
            problem = problems.gym("CartPole-v1", episodes=16)
            policy = nn.Linear(problem.observations, problem.actions, bias=False)
            nn.init.zeros_(policy.weight)
            result = search(policy, problem, method=method, sigma=1.0, budget=600, target=-500, seed=seed)
            score = float(problem.returns(policy, episodes=100, seed=1000).mean())
            rows.append(
                (method, seed, result.evaluations, f"{score:.1f}", "solved" if score >= 475 else "**not solved**")
            )
            if score < 475:
                lost.append(f"{method}, seed {seed}: a mean return of {score:.1f}")
    heads = ("method", "seed", "evaluations of 16 episodes", "mean return over 100 others", "")
    return Section(
        "Evolution strategies on CartPole-v1", about, command, tabulate(heads, rows), lost, ("torch", "gymnasium")
    )
