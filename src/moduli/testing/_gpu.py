"""The report about the accelerator of this machine: numbers against the host, launches, bytes, and times.

Without an accelerator only what can be counted is printed. Nothing here has ever run on one where it was written, so a
report is worth pasting into an issue.
"""

from __future__ import annotations

import importlib.util
import math
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import kernels, m
from .._torch import open_fake_device, pytree
from .._version import __version__
from ..optim import Module, Optimizer, closure
from ._operations import BINARY, TERNARY, UNARY
from ._problems import backend

workloads: dict[str, list[tuple[int, ...]]] = {
    "200 of 64x64": [(64, 64)] * 200,
    "1000 of 10": [(10,)] * 1000,
    "4 of 2048x2048": [(2048, 2048)] * 4,
}
"""The shapes of the first-order table."""


def make_chain() -> list[Module]:
    """Clip, Adam, decay and a learning rate: the chain that is counted and timed."""
    return [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3)]


def name_device() -> str | None:
    """The accelerator of this machine; None where there is none."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def _make_parameters(shapes: Sequence[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.empty(param.shape, device=device)
    return params


def count_step(
    make: Callable[[list[nn.Parameter]], Callable[[], Any]], shapes: Sequence[tuple[int, ...]], form: str
) -> tuple[StepCost, list[kernels.Launch]]:
    """What a third step would launch, copy and allocate on a GPU, by fake tensors: `make` makes a step of parameters."""
    with backend(form), open_fake_device("cuda"):
        step = make(_make_parameters(shapes, "cuda"))
        step()
        with Launches():
            step()  # a mode that watches is another plan
        with Launches() as seen, kernels.watch_launches() as generated:
            step()
    return seen.cost, generated


def _own(params: list[nn.Parameter]) -> Callable[[], Any]:
    return Optimizer(params, *make_chain()).step


def _torchs(params: list[nn.Parameter]) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(params, foreach=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return step


def _report_counts() -> list[str]:
    lines = ["", "counted on fake tensors, per step of clip + Adam + decay + lr (nothing was launched):"]
    lines.append(f"  {'':24}{'launches':>10}{'copies':>8}{'allocated':>11}{'bytes':>16}")
    for name, shapes in {"4 of 2048x2048": [(2048, 2048)] * 4, "100 of 64x64": [(64, 64)] * 100}.items():
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        cost, generated = count_step(_own, shapes, "triton")
        moved = sum(launch.bytes for launch in generated)
        least = 4 * elements * 8
        rows = [("triton", len(generated) + len(cost.launches), cost, f"{moved:,} ({moved / least:.2f} of the least)")]
        cost, _ = count_step(_own, shapes, "foreach")
        rows.append(("foreach", len(cost.launches), cost, ""))
        cost, _ = count_step(_torchs, shapes, "foreach")
        rows.append(("torch, foreach", len(cost.launches), cost, ""))
        lines.append(f"  {name}")
        for label, launches, found, size in rows:
            lines.append(f"    {label:22}{launches:>10}{len(found.copies):>8}{found.allocated:>11}  {size}")
    return lines


def _check_operations(device: str, names: Sequence[str] | None = None) -> list[str]:
    """Every operation of the kernels table on the device against the same function on the host."""
    lines, broken, count = ["", f"operations on {device} against the host:"], 0, 0
    dtypes = [torch.float32, torch.float16, torch.bfloat16, *([] if device == "mps" else [torch.float64])]
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 300, generator=generator, dtype=torch.float64)
    for roles, table in enumerate((UNARY, BINARY, TERNARY), 1):
        for name, function in table.items():
            for dtype in dtypes if names is None or name in names else ():
                args = [row.to(dtype) for row in points[:roles]]
                # float16 and bfloat16 are computed in float32 and rounded once.
                wide = dtype if dtype is torch.float64 else torch.float32
                expected = function(*(x.to(wide) for x in args)).to(dtype).double()
                got = _fuse(function, roles)(*([x.to(device)] for x in args))[0].cpu().double()
                gap = ((got - expected).abs() / expected.abs().clamp(min=1.0)).nan_to_num(nan=0.0).max()
                same = bool((got.isnan() == expected.isnan()).all())
                # The vendors' functions may differ from the host's in their last digits; another formula differs by more.
                near = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
                count += 1
                if not (same and gap <= near):
                    broken += 1
                    lines.append(f"  {name} in {str(dtype).removeprefix('torch.')}: differs by {float(gap):.1e}")
    lines.append(f"  {count - broken} of {count} agree")
    return lines


def _fuse(function: Callable[..., Tensor], roles: int) -> Callable[..., Any]:
    """Fused, with a name for each of its lists: the functions of torch have no signature that says how many there are."""
    if roles == 1:
        return kernels.fuse(lambda x: function(x))
    return kernels.fuse((lambda x, y: function(x, y)) if roles == 2 else (lambda x, y, z: function(x, y, z)))


def _check_numbers(device: str, names: Sequence[str] | None = None) -> list[str]:
    """The law of the report: every link of the catalogue steps on the device as on the host."""
    lines, broken, drawn, refused = ["", f"links on {device} against the host, after five steps:"], 0, 0, 0
    chains: dict[str, Callable[[], list[Module]]] = {"clip, Adam, decay, lr": make_chain}
    for name in m.__all__ if names is None else names:
        link = getattr(m, name)
        try:
            made = link() if isinstance(link, type) and issubclass(link, Module) else None
        except (TypeError, ValueError):
            continue  # it needs arguments
        if made is not None and not name.startswith("Print"):
            chains[name] = lambda link=link: [link(), m.LR(1e-2)]  # type: ignore[misc]
    for name, make in chains.items():
        host, again = _take_steps(make, "cpu", 0), _take_steps(make, "cpu", 1)
        if host is None or again is None:
            refused += 1  # for a population, residuals, or a child
            continue
        if not torch.equal(host, again):
            drawn += 1  # devices draw other numbers than the host
            continue
        there = _take_steps(make, device, 0)
        gap = float((host - there).abs().max() / host.abs().max().clamp(min=1e-30)) if there is not None else math.inf
        if not gap <= 1e-4:
            broken += 1
            lines.append(f"  {name}: differs by {gap:.1e}")
    count = len(chains) - drawn - refused
    lines.append(
        f"  {count - broken} of {count} chains agree to 1e-4; {drawn} draw random numbers and {refused} need another problem"
    )
    return lines


def _take_steps(make: Callable[[], list[Module]], place: str, seed: int) -> Tensor | None:
    """Where five steps end; None where the chain is refused."""
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
        return None
    found = torch.cat([param.detach().cpu().reshape(-1) for param in params])
    return found.nan_to_num(nan=-7.0)  # the root of a negative number is none on either


def _report_times(device: str) -> list[str]:
    lines = ["", f"milliseconds per step on {device}, median of 30 (and the bandwidth that it makes):"]
    for name, shapes in workloads.items():
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        for label, make in (("moduli", _own), ("torch, foreach", _torchs)):
            step = make(_make_parameters(shapes, device))
            times = []
            for _ in range(40):
                torch.accelerator.synchronize()
                begin = time.perf_counter()
                step()
                torch.accelerator.synchronize()
                times.append(time.perf_counter() - begin)
            middle = sorted(times[10:])[15]
            lines.append(f"  {name:18}{label:16}{1e3 * middle:8.3f}  {32 * elements / middle / 1e9:8.1f} GB/s")
    return lines


def report() -> int:
    """Print the report; the number of what failed is the exit code."""
    device = name_device()
    has = importlib.util.find_spec("triton") is not None
    lines = [
        f"moduli {__version__}, torch {torch.__version__}, Triton {'installed' if has else 'not installed'}, "
        f"Python {platform.python_version()}, {platform.platform()}"
    ]
    if device is None:
        lines.append("This machine has no accelerator that torch can use, so only what can be counted is shown.")
    else:
        lines.append(f"accelerator: {device}, {torch.accelerator.device_count()} of them")
        lines += _check_operations(device) + _check_numbers(device) + _report_times(device)
    lines += _report_counts()
    print("\n".join(lines))
    return sum("differs by" in line for line in lines)


# Operations that launch nothing: they make views and memory, or ask.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "detach"}
_FREE |= {"alias", "as_strided", "split", "split_with_sizes", "lift_fresh", "reshape", "_reshape_alias", "expand", "t"}
_FREE |= {"transpose", "permute", "slice", "select", "squeeze", "unsqueeze", "unbind", "view_as_real", "device"}
_FREE |= {"view_as_complex", "diagonal", "unfold", "chunk", "narrow", "_conj", "real", "imag", "is_same_size", "alias_"}
_COPIES = ("_to_copy", "copy_", "_foreach_copy_")


@dataclass
class StepCost:
    """What one step asks of a device.

    Attributes:
        launches: Names of the operations that launch something.
        copies: Copies between the host and a device, each with the place in the library that asks for it.
        allocated: How many tensors were made, without numbers.
        numbers: How many tensors without axes were made.
    """

    launches: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    allocated: int = 0
    numbers: int = 0


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts what is launched on devices other than the host. Fake tensors will do.

    Example:
        >>> import torch
        >>> from moduli.testing._gpu import Launches
        >>> with Launches() as seen:
        ...     _ = torch.ones(2, device="meta") + 1
        >>> seen.cost.launches
        ['ones', 'add']
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = StepCost()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against torch.compile imports all of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        kinds = {each.device.type for each in (*given, *made)}
        if kinds - {"cpu"}:
            known = {id(each) for each in given}
            if name not in _FREE:
                self.cost.launches.append(name)
            if not func.is_view and name not in ("device", "alias", "detach", "view", "reshape", "_unsafe_view"):
                new = [each.dim() for each in made if id(each) not in known]
                self.cost.numbers += new.count(0)
                self.cost.allocated += len(new) - new.count(0)
            if name in _COPIES and "cpu" in kinds:
                self.cost.copies.append(f"{name} at {find_place(traceback.extract_stack())}")
        return result


def find_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Where in the library a call came from."""
    root = str(Path(__file__).parents[1])
    inside = [frame for frame in frames if frame.filename.startswith(root) and frame.filename != __file__]
    return f"{Path(inside[-1].filename).relative_to(root)}:{inside[-1].lineno}" if inside else "the caller"
