"""The report about the accelerator of this machine: numbers against the host, and times.

The authors had no accelerator to run this on, so reports in issues are welcome.
"""

import importlib.util
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from .. import kernels, m
from .._version import __version__
from ..optim import Module, Optimizer, closure

ONE: list[Any] = [torch.neg, torch.abs, torch.sign, torch.sgn, torch.square, torch.sqrt, torch.rsqrt, torch.reciprocal]
ONE += [torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p, torch.erf, torch.erfc]
ONE += [torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan]
ONE += [torch.sinh, torch.cosh, torch.tanh, torch.asinh, torch.acosh, torch.atanh, torch.sigmoid, torch.relu]
ONE += [F.silu, F.softsign, torch.floor, torch.ceil, torch.trunc, torch.round, torch.frac, torch.nan_to_num]
TWO: list[Any] = [torch.add, torch.sub, torch.mul, torch.div, torch.floor_divide, torch.fmod, torch.remainder]
TWO += [torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.hypot, torch.atan2, torch.copysign]
THREE: list[Any] = [torch.addcmul, torch.addcdiv, torch.lerp]
"""Functions of one, two and three tensors that a compiled kernel knows."""

WORKLOADS: dict[str, list[Any]] = {"200 of 64x64": [(64, 64)] * 200, "4 of 2048x2048": [(2048, 2048)] * 4}
"""The shapes that are timed."""

# The vendors' functions may differ from the host's in their last digits; another formula differs by more.
_NEAR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def make_chain() -> list[Module]:
    """Return the chain that is compared and timed: clipping, Adam, decay and a learning rate."""
    return [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3)]


def name_device() -> str | None:
    """Return the type of this machine's accelerator; None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def make_parameters(shapes: Sequence[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    """Return uninitialised parameters with gradients."""
    params = [nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.empty(param.shape, device=device)
    return params


def step_own(params: list[nn.Parameter]) -> Callable[[], Any]:
    """Return a function that takes a step of the chain."""
    return Optimizer(params, *make_chain()).step


def step_torchs(params: list[nn.Parameter]) -> Callable[[], Any]:
    """Return a function that takes the same step with torch's optimizer."""
    optimizer = torch.optim.AdamW(params, foreach=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return step


def _count(title: str, compared: Iterable[tuple[str, Tensor, Tensor, float]]) -> list[str]:
    """Return a line for each (name, numbers here, numbers there, tolerance) that differs, and the count of the others."""
    count, lines = 0, []
    for name, here, there, near in compared:
        count += 1
        gap = float(((here - there).abs() / here.abs().clamp(min=1.0)).nan_to_num(nan=0.0).max())
        if gap > near or not torch.equal(here.isnan(), there.isnan()):
            lines.append(f"  {name}: differs by {gap:.1e}")
    return ["", f"{title}:", *lines, f"  {count - len(lines)} of {count} agree"]


def _compare_operations(device: str, names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Iterate over (name, on the host, on the device, tolerance) of every operation of the kernels table."""
    points = torch.randn(3, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for roles, table in enumerate((ONE, TWO, THREE), 1):
        for function in table:
            name = function.__name__
            for dtype, near in _NEAR.items() if names is None or name in names else ():
                if dtype is torch.float64 and device == "mps":
                    continue
                args = [row.to(dtype) for row in points[:roles]]
                # float16 and bfloat16 are computed in float32 and rounded once.
                wide = dtype if dtype is torch.float64 else torch.float32
                expected = function(*(x.to(wide) for x in args)).to(dtype).double()
                got = _fuse(function, roles)(*([x.to(device)] for x in args))[0].cpu().double()
                yield f"{name} in {str(dtype).removeprefix('torch.')}", expected, got, near


def _fuse(function: Callable[..., Tensor], roles: int) -> Callable[..., Any]:
    """Return a function of torch fused; a lambda declares the number of its lists, since torch's functions have no signature."""
    if roles == 1:
        return kernels.fuse(lambda x: function(x))
    return kernels.fuse((lambda x, y: function(x, y)) if roles == 2 else (lambda x, y, z: function(x, y, z)))


def _compare_links(device: str, names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Iterate over (name, on the host, on the device, tolerance) of every deterministic link that fits the problem."""
    chains: dict[str, Callable[[], list[Module]]] = {"clip, Adam, decay, lr": make_chain}
    links = {name: getattr(m, name) for name in (m.__all__ if names is None else names) if not name.startswith("Print")}
    for name, link in links.items():
        if isinstance(link, type) and issubclass(link, Module):
            chains[name] = lambda link=link: [link(), m.LR(1e-2)]  # type: ignore[misc]
    for name, make in chains.items():
        here, again = _take_steps(make, "cpu", 0), _take_steps(make, "cpu", 1)
        if here.isfinite().all() and torch.equal(here, again):  # devices draw other numbers than the host
            yield name, here, _take_steps(make, device, 0), 1e-4


def _take_steps(make: Callable[[], list[Module]], place: str, seed: int) -> Tensor:
    """Return the parameters after five steps; infinity if the chain needs arguments, a population, residuals or a child."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(place)) for shape in ((33, 7), (5,), ())]
    targets = [torch.randn(param.shape, generator=generator).to(place) for param in params]

    def measure() -> Tensor:
        return torch.stack([(param - x).square().log1p().sum() for param, x in zip(params, targets, strict=True)]).sum()

    try:
        optimizer = Optimizer(params, *make())
        for _ in range(5):
            optimizer.step(closure(measure))
    except (TypeError, ValueError, RuntimeError):
        return torch.tensor(torch.inf)
    values = torch.cat([param.detach().cpu().reshape(-1) for param in params])
    return values.nan_to_num(nan=-7.0)  # so that NaN on both devices compares equal


def _report_times(device: str) -> list[str]:
    lines = ["", f"milliseconds per step on {device}, median of a second (and the bandwidth that it makes):"]
    for name, shapes in WORKLOADS.items():
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        for label, make in (("moduli", step_own), ("torch, foreach", step_torchs)):
            # Timer synchronises with the device before it reads the clock.
            timer = Timer("step()", globals={"step": make(make_parameters(shapes, device))})
            middle = timer.blocked_autorange(min_run_time=1.0).median
            lines.append(f"  {name:18}{label:16}{1e3 * middle:8.3f}  {32 * elements / middle / 1e9:8.1f} GB/s")
    return lines


def report() -> int:
    """Print the report; return the number of differences as the exit code."""
    device = name_device()
    has = importlib.util.find_spec("triton") is not None
    lines = [
        f"moduli {__version__}, torch {torch.__version__}, Triton {'installed' if has else 'not installed'}, "
        f"Python {platform.python_version()}, {platform.platform()}"
    ]
    if device is None:
        lines.append("This machine has no accelerator that torch can use.")
    else:
        lines.append(f"accelerator: {device}, {torch.accelerator.device_count()} of them")
        lines += _count(f"operations on {device} against the host", _compare_operations(device))
        lines += _count(f"links on {device} against the host, after five steps", _compare_links(device))
        lines += _report_times(device)
    print("\n".join(lines))
    return sum("differs by" in line for line in lines)
