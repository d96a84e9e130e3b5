"""The section on steps of presets beside their reference implementations, with equal settings on both sides."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from _section import ROOT, Section, is_installed, load, tabulate
from torch import nn
from torch.overrides import TorchFunctionMode

from moduli import Optimizer, m, presets

STEPS, CLOSE = 30, 1e-6
PEER = "pytorch_optimizer"


def _construct(kind: type, net: nn.Module, **settings: Any) -> Any:
    return kind(net.parameters(), **settings)


@dataclass(frozen=True)
class Row:
    """A preset beside a reference, with equal settings on both sides.

    Attributes:
        settings: What both sides get beyond the defaults of the preset, in words.
        ours: Returns the chain; None for the preset with the reference's defaults.
        theirs: Returns the reference for its class and a network.
        note: Why the settings are needed, or why the steps differ.
        paper: The test that compares the preset with the formula of its paper, where the reference has another one.
        lost: What the other side does better, if anything.
        path: The class of the reference; empty for that of the table of defaults.
        sizes: The widths of the network.
        bias: Whether its layers have biases.
        call: "step" after a backward pass, "again" the same with a closure as well, "closure" with a closure and one batch for
            all steps.
        graph: Whether backward passes keep their graph, for products with the Hessian.
        scale: A factor of the loss.
        during: A context for the reference's steps.
    """

    settings: str = ""
    ours: Callable[[], list[Any]] | None = None
    theirs: Callable[[type, nn.Module], Any] = _construct
    note: str = ""
    paper: str = ""
    lost: str = ""
    path: str = ""
    sizes: tuple[int, int, int] = (6, 8, 3)
    bias: bool = True
    call: Literal["step", "again", "closure"] = "step"
    graph: bool = False
    scale: float = 1.0
    during: Callable[[], AbstractContextManager[None]] = nullcontext


def _make_low_rank(kind: type, net: nn.Module, scale: float, **settings: Any) -> Any:
    group = {"params": net.parameters(), "rank": 2, "update_proj_gap": 200, "projection_type": "std", "scale": scale}
    return kind([group], lr=1e-2, eps=0.0, **settings)


def _make_mars(kind: type, net: nn.Module) -> Any:
    """Return MARS whose first step has no gradient before it, so that nothing is corrected."""

    class Begun(kind):
        def init_group(self, group, **more):
            new = [param for param in group["params"] if param not in self.state]
            super().init_group(group, **more)
            for param in new:
                self.state[param]["last_grad"].copy_(param.grad)

    return Begun(net.parameters(), optimize_1d=True, eps=0.0)


def _make_psgd(kind: type, net: nn.Module) -> Any:
    import torchzero

    link = kind(inner=torchzero.m.EMA(0.9, debias=True), **_FACTORS)
    return torchzero.Optimizer(net.parameters(), link, torchzero.m.LR(1e-3))


@contextmanager
def _replace_norms() -> Iterator[None]:
    """Let the author's code of PSGD estimate two norms as moduli does."""
    code = importlib.import_module("torchzero.modules.adaptive.psgd.psgd")
    largest = importlib.import_module("moduli.m.adaptive._kron").largest
    with (
        patch.object(code, "norm_lower_bound_spd", largest),
        patch.object(code, "norm_lower_bound_skh", lambda skew: torch.linalg.matrix_norm(skew) / 2**0.5),
    ):
        yield


def _make_scion(kind: type, net: nn.Module) -> Any:
    norms = importlib.import_module(f"{PEER}.optimizer.scion").LMONorm
    hidden, head = net.parameters()
    balls = [
        {"params": [hidden], "norm_type": norms.SPECTRAL, "scale": 50.0},
        {"params": [head], "norm_type": norms.SIGN, "scale": 3000.0},
    ]
    return kind(balls, constraint=True)


def _undo_bias(step: int) -> float:
    """Return Adam's bias correction as a factor of the step size, for a step counted from 0."""
    return float(1e-2 * (1 - 0.999 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1)))


_FACTORS = {"init_scale": 1.0, "damping": 0.0, "balance_probability": 0.0}
_LAWS = "`tests/laws/rows/adaptive_matrices.py`"

ROWS: dict[str, Row] = {
    "adafactor": Row("`lr=None`: torch always scales steps by the size of parameters", lambda: presets.adafactor(None)),
    "adahessian": Row("`eps=1e-16`", lambda: [m.AdaHessian(eps=1e-16), m.LR(0.1)], graph=True),
    "adam_mini": Row(
        "`m.AdamMini(blocks=1)`, `weight_decay=0.1`; there `lr=1e-3`",
        lambda: [m.AdamMini(blocks=1), m.WeightDecay(0.1), m.LR(1e-3)],
        lambda kind, net: kind(net, lr=1e-3),
        "the collection has one second moment for each matrix that is no query or key, moduli one for each row by default",
    ),
    "adopt": Row(
        "there `clip_lambda=lambda step: (step - 1) ** 0.25`",
        theirs=partial(_construct, clip_lambda=lambda step: (step - 1) ** 0.25),
        note="the collection counts the first step, which only measures, so that its default bound is one step ahead of "
        "Algorithm 2",
    ),
    "apollo": Row(
        "`rank=2`, `m.Adam(eps=0)`; there `scale_type='channel'`",
        lambda: [m.APOLLO(m.Adam(eps=0.0), rank=2), m.LR(1e-2)],
        partial(_make_low_rank, scale=1.0, scale_type="channel"),
        "Algorithm 1 scales the columns of the gradient; the collection scales those of the projected gradient and projects "
        "back, so that its updates have the rank of the projection",
        paper=f"the row APOLLO in {_LAWS}",
    ),
    "dadapt": Row(
        note="Algorithm 5 divides by the root of the second moment with this step's gradient, the collection by that of the "
        "step before",
        paper="`tests/m/test_learning_rate_free.py`",
    ),
    "fira": Row(
        "`rank=2`, `scale=1`, `m.Adam(eps=0, debias=False)`, its bias correction in `m.LR`",
        lambda: [m.Fira(m.Adam(eps=0.0, debias=False), rank=2, scale=1.0), m.LR(_undo_bias)],
        partial(_make_low_rank, scale=1.0),
        "the collection limits the growth of the norm before bias correction, moduli after it; its `scale` is also a factor "
        "of the part of the gradient that is subtracted",
    ),
    "galore": Row(
        "`rank=2`, `m.Adam(eps=0)`",
        lambda: [m.GaLore(m.Adam(eps=0.0), rank=2), m.LR(1e-2)],
        partial(_make_low_rank, scale=0.25),
        "without a rank the class of the collection is Adam",
    ),
    "lamb": Row(
        "`m.Adam(debias=False)`, `m.TrustRatio(eps=1e-6)`; there `adam_debias=True`",
        lambda: [m.Adam(eps=1e-6, debias=False), m.TrustRatio(eps=1e-6), m.LR(1e-3)],
        partial(_construct, adam_debias=True),
        "Algorithm 2 corrects both moments, as moduli does by default; the collection corrects neither, and divides the step "
        "size by 1 - beta1^t",
    ),
    "lars": Row(
        "`lr=1e-3`, no biases",
        lambda: presets.lars(1e-3),
        note="the collection leaves vectors unscaled",
        bias=False,
    ),
    "lbfgs": Row(
        "`history_size=100`; a step of 1 instead of a line search, one batch, the loss times 0.05",
        lambda: [m.LBFGS(history_size=100), m.LR(1.0)],
        partial(_construct, history_size=100, max_iter=1),
        "line searches find different points that fulfil the strong Wolfe conditions (moduli's is that of Moré and Thuente), and "
        "torch's first step is at most 1 / ‖g‖₁ long, which the factor of the loss makes 1",
        call="closure",
        scale=0.05,
    ),
    "mars": Row(
        "`m.MARSCorrection(max_norm=None)`, `eps=0`; there `optimize_1d=True`, and no correction in the first step",
        lambda: [m.MARSCorrection(beta=0.95, max_norm=None), m.Adam(beta1=0.95, beta2=0.99, eps=0.0), m.LR(3e-3)],
        _make_mars,
        "Algorithm 1 has x₁ = x₀, so that nothing is corrected at first, and clips the whole gradient; the collection takes "
        "zero for the gradient before the first, and clips each tensor (none here exceeds the bound)",
    ),
    "momentum": Row("`lr=1e-3`", lambda: presets.momentum(1e-3), partial(_construct, momentum=0.9)),
    "muon": Row(
        '`method="newtonschulz"`, `weight_decay=0.1`, no biases; there `adjust_lr_fn="match_rms_adamw"`',
        lambda: presets.muon(method="newtonschulz", weight_decay=0.1),
        partial(_construct, adjust_lr_fn="match_rms_adamw"),
        "torch multiplies in bfloat16, which here is double, too",
        bias=False,
    ),
    "nesterov": Row("`lr=1e-3`", lambda: presets.nesterov(1e-3), partial(_construct, momentum=0.9, nesterov=True)),
    "normuon": Row(
        '`lr=0.02`, no biases; there `nesterov=False`, `update_scale="match_rms"`',
        lambda: presets.normuon(0.02),
        lambda kind, net: kind(
            [{"params": list(net.parameters()), "use_muon": True}], nesterov=False, update_scale="match_rms"
        ),
        "Algorithm 1 has a plain mean of gradients and steps of the size of Adam's",
        bias=False,
    ),
    "prodigy": Row(
        "`eps=0`",
        lambda: [m.Prodigy(eps=0.0), m.LR(1.0)],
        partial(_construct, eps=0.0),
        "Algorithm 4 multiplies eps by the estimate of this step, the collection by that of the next; it keeps two sums in "
        "single precision, which here are double",
    ),
    "psgd": Row(
        "`init_scale=1`, `damping=0`, no balancing, our estimates of two norms; a mean of gradients inside",
        lambda: [m.PSGDKronWhiten(inner=m.EMA(0.9, debias=True), **_FACTORS), m.LR(1e-3)],
        _make_psgd,
        f"torchzero has the author's code of 2025, which estimates norms from random vectors; `{PEER}.Kron` is the older rule "
        'with triangular factors, `dQ="EQ"` here',
        path="torchzero.modules.PSGDKronWhiten",
        during=_replace_norms,
    ),
    "sam": Row(
        "SGD with `lr=1e-2` and `momentum=0.9` inside",
        presets.sam,
        lambda kind, net: kind(net.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9),
        call="again",
    ),
    "scion": Row(
        "constrained; radii of 50 (spectral) and 3000 (sign, the last layer); no biases",
        lambda: presets.scion(adam="2.weight"),
        _make_scion,
        "the collection chooses a norm by the shape of a parameter and has radii of 1 by default",
        bias=False,
    ),
    "shampoo": Row(
        "`lr=1e-3`, no momentum, `precond_freq=1`, `m.Shampoo(reg=0)`; there `matrix_eps=1`",
        lambda: [m.Shampoo(precond_freq=1, reg=0.0), m.LR(1e-3)],
        partial(_construct, matrix_eps=1.0),
        "covariances begin at the identity here, and at 1e-6 of it in the collection",
    ),
    "soap": Row(
        "`eps=0`, `weight_decay=0`, square matrices",
        lambda: [m.SOAP(eps=0.0, precondition_1d=False), m.LR(3e-3)],
        partial(_construct, eps=0.0, weight_decay=0.0),
        "the collection adds eps before bias correction, and decays the moved weights; eigenvectors of the null space that "
        "other shapes have are arbitrary",
        sizes=(6, 6, 6),
    ),
    "sophia": Row(
        "`lr=0.06`; there `p=1`",
        lambda: presets.sophia(0.06),
        partial(_construct, p=1.0),
        "Algorithm 3 clips at 1, the collection at 0.01",
        graph=True,
    ),
    "splus": Row(
        "`weight_decay=0`, square matrices",
        lambda: presets.splus(weight_decay=0.0),
        partial(_construct, weight_decay=0.0),
        "eigenvectors of the null space that other shapes have are arbitrary",
        lost="the authors multiply weight decay by 2 / (m + n), as the step; `presets.splus` does not",
        sizes=(6, 6, 6),
    ),
}  # fmt: skip


def check_steps() -> Section:
    """Return the section on thirty steps of presets beside their reference implementations, with equal settings."""
    references = load(ROOT / "tools" / "preset_defaults.py").REFERENCES
    torch.set_num_threads(1)  # the matrices are small
    cells, lost = [], []
    for name, reference in sorted(references.items()):
        row = ROWS.get(name, Row())
        difference, result = _judge_steps(name, row, reference)
        defaults = (f"`{ours}={reference.defaults[ours][1]!r}`" for ours in reference.differs)
        path = row.path or reference.path
        cells.append((f"`{name}`", f"`{path}`", row.settings or ", ".join(defaults), difference, result))
        if result.startswith("**"):
            lost.append(
                f"`{name}` and `{path}`: {difference or 'not compared'} after {STEPS} steps, for an unknown reason"
            )
        if row.lost:
            lost.append(f"`{name}`: {row.lost}")
    about = (
        f"Largest difference of a parameter after {STEPS} steps in double precision, which the references compute in throughout, "
        "with the gradients of a small network, a new batch at each step and the same random numbers; equal is at most "
        f"{CLOSE:g}. Both sides have the settings of the third column, and otherwise the defaults of the reference. Where a "
        f"reference has another rule than its paper, the last column names the test that compares the preset with the paper. "
        f"`{PEER}` is called the collection. [The table of defaults](preset-defaults.md) has all defaults."
    )
    heads = ("preset", "reference", "settings beyond our defaults", "largest difference", "result")
    return Section(
        "Optimizers beside their reference implementations", about, "python tools/validate steps", tabulate(heads, cells), lost,
        ("torch", PEER, "torchzero"),
    )  # fmt: skip


def _judge_steps(name: str, row: Row, reference: Any) -> tuple[str, str]:
    """Return the largest difference and the result of a row, as text."""
    if not is_installed((row.path or reference.path).partition(".")[0]):
        return "", "not installed"
    try:
        difference = compare_steps(name, row, reference)
    except Exception as error:  # noqa: BLE001 - a peer may raise any error, which is shown in its row
        return "", f"**not compared**: {type(error).__name__}: {str(error)[:80]}"
    result = "equal" if difference <= CLOSE else f"equal to the paper ({row.paper})" if row.paper else "**other steps**"
    return f"{difference:.1e}", "; ".join(filter(None, (result, row.note)))


def compare_steps(name: str, row: Row, reference: Any) -> float:
    """Return the largest difference of a parameter after all steps."""
    module, _, kind = (row.path or reference.path).rpartition(".")
    first, hidden, last = row.sizes
    with _prefer_double(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(nn.Sequential(nn.Linear(first, hidden, row.bias), nn.Tanh(), nn.Linear(hidden, last, row.bias)))
        settings = {ours: value for ours, (_, value) in reference.defaults.items() if value is not None}
        chain = row.ours() if row.ours else getattr(presets, name)(**settings)
        mine = Optimizer(nets[0], *chain)
        theirs = row.theirs(getattr(importlib.import_module(module), kind), nets[1])
        if hasattr(theirs, "train"):
            theirs.train()
        for step in range(STEPS):
            torch.manual_seed(0 if row.call == "closure" else step)
            batch = torch.randn(32, first), torch.randn(32, last)
            for net, optimizer in zip(nets, (mine, theirs), strict=True):
                torch.manual_seed(STEPS + step)
                _take_step(row, net, optimizer, batch)
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def _take_step(row: Row, net: nn.Module, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Take one step of an optimizer, as the row says."""
    x, y = batch

    def closure(backward: bool = True) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = row.scale * (net(x) - y).square().mean()
        if backward:
            loss.backward(create_graph=row.graph)
        return loss

    if isinstance(optimizer, Optimizer):
        optimizer.step(closure)
        return
    if row.call != "closure":
        closure()
    with row.during(), _InDouble():
        optimizer.step(*([] if row.call == "step" else [closure]))


class _InDouble(TorchFunctionMode):
    """Computes in double precision where a program converts to a shorter one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.float, torch.Tensor.bfloat16):
            function = torch.Tensor.double
        kwargs = {key: _widen(value) for key, value in (kwargs or {}).items()}
        return function(*map(_widen, args), **kwargs)


def _widen(value: Any) -> Any:
    """Return float64 for a shorter floating dtype, and anything else unchanged."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


@contextmanager
def _prefer_double() -> Iterator[None]:
    """Create tensors in double precision inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
