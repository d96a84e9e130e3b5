"""The law of accelerators, checked on a fake device.

Tensors of a fake device have shapes and no values. Reading a value from one raises, mixing them with tensors of the host
raises, and operations that would be launches are counted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import moduli
from moduli._torch import open_fake_device, pytree
from moduli.optim import Module, Optimizer, closure
from moduli.testing import Case, LawError

_GENERATOR = torch.Generator
_READS = ("DataDependentOutputException", "DynamicOutputShapeException")
DEVICE = "pretend"
"""The name of the fake device."""


@contextmanager
def fake_accelerator() -> Iterator[None]:
    """Allow tensors on `DEVICE` inside the block; the process can't be used for other work afterwards."""
    mode = open_fake_device(DEVICE)
    if mode is None:
        raise RuntimeError("this torch has no fake devices; install torch 2.13 or later")
    with mode, _HostNumbers(), mock.patch.object(torch, "Generator", _HostGenerator):
        yield


def leave() -> NoReturn:
    """End the process without cleanup: a thread of torch's fake device may still use the interpreter, which then aborts."""
    sys.stdout.flush()
    os._exit(0)


class _GeneratorType(type):
    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _GENERATOR("cpu" if torch.device(device).type == DEVICE else device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _GENERATOR)


class _HostGenerator(metaclass=_GeneratorType):
    """A replacement of torch's class that makes CPU generators for the fake device, which has none."""


class _HostNumbers(TorchDispatchMode):
    """A mode in which reading a CPU scalar (a random decision) gives a fixed value, because fake tensors have none."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_local_scalar_dense" and args[0].device.type == "cpu":
            return 0.5 if args[0].is_floating_point() else True if args[0].dtype is torch.bool else 1
        return func(*args, **(kwargs or {}))


def find_deciding(links: Sequence[Module]) -> list[str]:
    """Return the names of links and inner links that declare `decides_on_host`."""
    return [type(link).__name__ for top in links for _, link in top.links() if link.decides_on_host]


def weigh_step(case: Case, links: Sequence[Module], count: int, evaluates: bool = True) -> tuple[StepCost, list[str]]:
    """Return the cost of the third step of a chain, and the names of its state tensors on the host.

    Args:
        case: The case that the links are from.
        links: The links.
        count: The number of parameters.
        evaluates: Whether a step is given the closure, if the case needs one.
    """
    with fake_accelerator():
        return _weigh(case, links, count, evaluates, DEVICE)


def _weigh(case: Case, links: Sequence[Module], count: int, evaluates: bool, device: str) -> tuple[StepCost, list[str]]:
    params = [nn.Parameter(torch.empty(3, 2, device=device)) for _ in range(count)]

    def residuals() -> Tensor:
        return torch.cat([(param * param).reshape(-1) for param in params])

    def loss() -> Tensor:
        return residuals().sum()

    step_closure = (
        closure(residuals if case.target == "least squares" else loss) if case.closure and evaluates else None
    )
    for param in params:
        param.grad = torch.empty(3, 2, device=device)
    optimizer = Optimizer(params, *links)
    for _ in range(3):
        with Launches() as seen:  # around every step: a call under another number of modes makes another plan
            optimizer.step(step_closure)
    stray = []
    for top in links:
        for _, link in top.links():
            rows = [dict(row) for row in link.state.values()] + [dict(link.global_state)]
            for keys, leaf in _leaves(rows):
                if leaf.device.type == "cpu":
                    stray.append(f"{type(link).__name__}.{keys} of shape {tuple(leaf.shape)}")
    return seen.cost, stray


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, str(key))
    elif isinstance(tree, list | tuple) or hasattr(tree, "maxlen"):
        for value in tree:
            yield from _leaves(value, path)


def check_accelerator(case: Case) -> list[str]:
    """Check a case by the law of accelerators, in a process that does nothing else (see `fake_accelerator`).

    A step reads no value back, copies nothing between host and device, and has its state on the device of the parameters. A
    chain of pointwise links makes as many launches for four tensors as for two, and after its first step, if no link measures,
    allocates only 0-d tensors. Links that declare `decides_on_host` are removed from the chain; if they read nothing back, the
    declaration is wrong.

    Returns:
        Names of the links that decide on the host.

    Raises:
        LawError: If the law is broken; the message has the place in the library.
    """
    deciding = find_deciding(case.links())
    if deciding and _reads_back(case) is None:
        raise case.fail("accelerator", f"{', '.join(deciding)} declare decides_on_host, but nothing was read back")
    rest = [link for link in case.links() if not find_deciding([link])]
    if not rest:
        return deciding
    # Chains of other links evaluate the closure, whose launches are not counted for pointwise chains.
    pointwise = all(getattr(link, "elementwise", False) and not link.children for link in rest)
    costs = []
    for count in (2, 4):
        links = [link for link in case.links() if not find_deciding([link])]
        try:
            cost, stray = weigh_step(case, links, count, not pointwise)
        except Exception as error:
            where = find_place(traceback.extract_tb(error.__traceback__))
            what = "reads a number back" if _is_read(error) else f"{type(error).__name__}: {error}"
            raise case.fail("accelerator", f"{what} at {where}") from error
        if cost.copies:
            raise case.fail("accelerator", f"copies between host and device: {', '.join(cost.copies[:3])}")
        if stray:
            raise case.fail("accelerator", f"keeps on the host: {', '.join(stray[:3])}")
        costs.append(cost)
    measures = any(getattr(link, "measures", False) for link in rest)  # measuring may allocate lists
    if pointwise and not measures and costs[0].allocated:
        raise case.fail("accelerator", f"allocates {costs[0].allocated} tensors in its third step")
    if pointwise and len(costs[0].launches) != len(costs[1].launches):
        raise case.fail(
            "accelerator", f"{len(costs[0].launches)} launches for 2 tensors and {len(costs[1].launches)} for 4"
        )
    return deciding


def _is_read(error: BaseException) -> bool:
    return type(error).__name__ in _READS or "numpy() is not supported" in str(error)


def _reads_back(case: Case) -> LawError | None:
    """Return the error if a step of the whole chain reads a value back or copies; None if it does neither."""
    try:
        cost, _ = weigh_step(case, case.links(), 2)
    except Exception as error:
        if _is_read(error):
            return case.fail("accelerator", "reads a number back")
        raise case.fail("accelerator", f"{type(error).__name__}: {error}") from error
    return case.fail("accelerator", "copies") if cost.copies else None


# Operations that launch nothing: views, allocations and queries.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "detach"}
_FREE |= {"alias", "as_strided", "split", "split_with_sizes", "lift_fresh", "reshape", "_reshape_alias", "expand", "t"}
_FREE |= {"transpose", "permute", "slice", "select", "squeeze", "unsqueeze", "unbind", "view_as_real", "device"}
_FREE |= {"view_as_complex", "diagonal", "unfold", "chunk", "narrow", "_conj", "real", "imag", "is_same_size", "alias_"}
_COPIES = ("_to_copy", "copy_", "_foreach_copy_")


@dataclass
class StepCost:
    """The work that one step gives to a device.

    Attributes:
        launches: The names of the operations that launch a kernel.
        copies: Copies between the host and a device, each with the calling line of the library.
        allocated: The number of allocated tensors with axes.
        numbers: The number of allocated 0-d tensors.
    """

    launches: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    allocated: int = 0
    numbers: int = 0


class Launches(TorchDispatchMode):
    """A mode that counts launches, copies and allocations on devices other than the CPU, also for fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = StepCost()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the check for torch.compile would import all of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        kinds = {each.device.type for each in (*inputs, *outputs)}
        if kinds - {"cpu"}:
            input_ids = {id(each) for each in inputs}
            if name not in _FREE:
                self.cost.launches.append(name)
            if not func.is_view and name not in ("device", "alias", "detach", "view", "reshape", "_unsafe_view"):
                new = [each.dim() for each in outputs if id(each) not in input_ids]
                self.cost.numbers += new.count(0)
                self.cost.allocated += len(new) - new.count(0)
            if name in _COPIES and "cpu" in kinds:
                self.cost.copies.append(f"{name} at {find_place(traceback.extract_stack())}")
        return result


def find_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the file and line of the innermost frame in the library."""
    root = str(Path(moduli.__file__).parent)
    inside = [frame for frame in frames if frame.filename.startswith(root)]
    return f"{Path(inside[-1].filename).relative_to(root)}:{inside[-1].lineno}" if inside else "the caller"
