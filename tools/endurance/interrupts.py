"""Interrupt operations at random instants: afterwards every object is as before the operation, or as after it.

Every operation runs on two equal systems. One is not interrupted; the other is interrupted by a timer whose handler raises
KeyboardInterrupt, as Ctrl-C does, and must then equal the first one before or after its operation. Everything that the
operation may change is compared: parameters, buffers, the state of links, versions. Grad mode must be restored, all locks of
the library released, and the next signal handled immediately.
"""

from __future__ import annotations

import copy
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import moduli as mo
from moduli import io, m, merge, optim, particles

D = torch.float64


@dataclass
class System:
    """An object with an operation on it, and the state that the operation may change.

    Attributes:
        act: The operation.
        observe: Returns everything that it may change, as nested plain data; tensors need not be copied.
        prepare: Called uninterrupted before each operation, with the number of operations made.
        locks: The locks that the operation may acquire.
    """

    act: Callable[[], object]
    observe: Callable[[], Any]
    prepare: Callable[[int], object] = lambda count: None
    locks: Callable[[], list[Any]] = list


class InterruptError(AssertionError):
    """An interrupted operation was neither complete nor undone."""


def run(seconds: float, seed: int = 0, least: int = 1) -> dict[str, int]:
    """Interrupt all operations in turn for some seconds; return counts by operation and by outcome.

    Args:
        seconds: The time to run.
        seed: The seed of the instants.
        least: The smallest number of interrupts, which may take longer.

    Raises:
        InterruptError: If an operation is neither complete nor undone.
    """
    rng, counts = random.Random(seed), dict.fromkeys(("attempts", "interrupted", "undone", "done"), 0)
    with tempfile.TemporaryDirectory() as folder, raise_at_alarm(), ThreadPoolExecutor(1) as thread:
        pairs = [Pair(name, make, pathlib.Path(folder), thread) for name, make in OPERATIONS.items()]
        end = time.monotonic() + seconds
        while True:
            for pair in pairs:
                for _ in range(10):
                    pair.attempt(rng, counts)
                if time.monotonic() > end and counts["interrupted"] >= least:
                    return counts


class Pair:
    """Two equal systems, one of which is interrupted."""

    def __init__(self, name: str, make: Callable[[pathlib.Path], System], folder: pathlib.Path, thread: Any) -> None:
        self.name, self.thread, self.count = name, thread, 0
        scratch, self.calm, self.shaken = (make(folder) for _ in range(3))
        self.duration = sorted(_time(scratch, i) for i in range(9))[5]
        self.before: Any = None

    def attempt(self, rng: random.Random, counts: dict[str, int]) -> None:
        """Run the operation once on both systems, and try to interrupt one of them."""
        if self.before is None:  # the last operation was completed
            self.calm.prepare(self.count)
            self.shaken.prepare(self.count)
            self.before = freeze(self.calm.observe())
            self.calm.act()
            self.after = freeze(self.calm.observe())
        recording, interrupted = rng.random() < 0.5, False
        torch.set_grad_enabled(recording)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + rng.random() * 1.2 * self.duration)
            self.shaken.act()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        if torch.is_grad_enabled() != recording:
            raise InterruptError(f"{self.name}: grad mode is {not recording}, and was {recording}")
        torch.set_grad_enabled(True)
        if not _is_heard():
            raise InterruptError(f"{self.name}: signals are still held back")
        if not self.thread.submit(_are_free, self.shaken.locks()).result():
            raise InterruptError(f"{self.name}: a lock is held")
        counts["attempts"] += 1
        counts["interrupted"] += interrupted
        counts[self.name] = counts.get(self.name, 0) + interrupted
        self._judge(interrupted, counts)

    def _judge(self, interrupted: bool, counts: dict[str, int]) -> None:
        now = self.shaken.observe()
        undone, done = (find_difference(now, there) for there in (self.before, self.after))
        if (undone and done) or (done and not interrupted):
            raise InterruptError(f"{self.name}: {undone or 'nothing'} differs from before it, {done} from after it")
        counts["undone" if done else "done"] += interrupted
        if not done:
            self.before, self.count = None, self.count + 1


def _time(system: System, count: int) -> float:
    system.prepare(count)
    start = time.perf_counter()
    system.act()
    return time.perf_counter() - start


def _is_heard() -> bool:
    try:
        signal.raise_signal(signal.SIGALRM)
    except KeyboardInterrupt:
        return True
    return False


def _are_free(locks: list[Any]) -> bool:
    free = [lock.acquire(blocking=False) for lock in locks]
    for lock, taken in zip(locks, free, strict=True):
        if taken:
            lock.release()
    return all(free)


def find_locks() -> list[Any]:
    """Return the locks that the library's modules hold as globals."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("moduli")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, kinds)]


@contextmanager
def raise_at_alarm() -> Iterator[None]:
    """Raise KeyboardInterrupt at the timer's signal inside the block; those ignored in destructors are not reported."""
    before, report = signal.signal(signal.SIGALRM, signal.default_int_handler), sys.unraisablehook
    sys.unraisablehook = lambda event: None if event.exc_type is KeyboardInterrupt else report(event)
    try:
        with warnings.catch_warnings():
            # After an interrupt between `open` and its `with` block, the reference count closes the file.
            warnings.simplefilter("ignore", ResourceWarning)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = report


def freeze(value: Any) -> Any:
    """Return a deep copy of nested data with tensors."""
    return copy.deepcopy(value)


def find_difference(a: Any, b: Any, path: str = "it") -> str | None:
    """Return the path of the first difference between nested data; None if they are equal up to rounding.

    Args:
        a: The first.
        b: The second.
        path: The path of both in the whole.
    """
    if isinstance(a, Tensor):
        same = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return None if same and torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True) else path
    if isinstance(a, dict):
        if not isinstance(b, dict) or list(a) != list(b):
            return path
        pairs = [(f"{path}/{key}", a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple):
        if not isinstance(b, list | tuple) or len(a) != len(b):
            return path
        pairs = [(f"{path}/{i}", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, float):
        return None if isinstance(b, float) and (a == b or abs(a - b) <= 1e-9 * abs(a) or a != a) else path
    else:
        return None if a == b else path
    return next((difference for place, x, y in pairs if (difference := find_difference(x, y, place))), None)


# -- operations ----------------------------------------------------------------------------------------------------------


def observe_optimizer(opt: Any, tensors: list[Tensor]) -> Any:
    """Return parameters and all state of an optimizer."""
    return {"params": [tensor.detach() for tensor in tensors], "state": opt.state_dict()}


def make_params() -> list[nn.Parameter]:
    """Return parameters of a few shapes, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((6, 5), (5,), (4, 4), (3,), (2, 3))
    return [nn.Parameter(torch.randn(shape, dtype=D, generator=generator)) for shape in shapes]


def step_given(*links: Callable[[], Any], **options: Any) -> Callable[[pathlib.Path], System]:
    """Return a function that makes a system whose operation is a step with given gradients."""

    def make(folder: pathlib.Path) -> System:
        params = make_params()
        opt = mo.Optimizer(params, *(link() for link in links), **options)

        def prepare(count: int) -> None:
            generator = torch.Generator().manual_seed(count)
            for param in params:
                param.grad = torch.randn(param.shape, dtype=D, generator=generator)

        return System(opt.step, lambda: observe_optimizer(opt, params), prepare, find_locks)

    return make


def step_closure(*links: Callable[[], Any], **options: Any) -> Callable[[pathlib.Path], System]:
    """Return a function that makes a system whose operation is a step with a closure."""

    def make(folder: pathlib.Path) -> System:
        params = make_params()
        opt = mo.Optimizer(params, *(link() for link in links), **options)
        closure = mo.closure(lambda: sum(((p - i) ** 2).sum() + (p**4).sum() for i, p in enumerate(params)))

        def prepare(count: int) -> None:
            if count % 20 == 19:  # restart, because nothing moves at the optimum
                for param, start in zip(params, make_params(), strict=True):
                    param.data.copy_(start)

        return System(lambda: opt.step(closure), lambda: observe_optimizer(opt, params), prepare, find_locks)

    return make


class Net(mo.Module):
    """A small particle with a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(4, 5, dtype=D)
        self.norm = nn.BatchNorm1d(5, dtype=D)
        self.head = nn.Linear(5, 2, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.head(self.norm(self.body(x)).tanh())


def step_population(folder: pathlib.Path) -> System:
    """Return a system that steps Adam on all members of a population."""
    torch.manual_seed(0)
    pop = mo.Population.of(nn.Linear, 3, 4, 2, dtype=D)
    opt = mo.Optimizer(pop, m.Adam(), m.LR(0.01))
    x = torch.ones(3, 4, dtype=D)
    closure = mo.closure(lambda: (pop(x) - 1).square().mean((1, 2)))
    return System(lambda: opt.step(closure), lambda: observe_optimizer(opt, list(pop.parameters())), locks=find_locks)


def step_functional(folder: pathlib.Path) -> System:
    """Return a system that makes a pure step, which stores no state in its links."""
    links = [m.Adam(), m.LR(0.01)]
    current = {"params": [p.detach() for p in make_params()]}
    current["state"] = optim.functional.init(links, current["params"])

    def act() -> None:
        stepped = optim.functional.step(links, current["params"], [p * 2 for p in current["params"]], current["state"])
        current.update(zip(("params", "state"), stepped, strict=True))

    def observe() -> Any:
        own = [(len(link.state), dict(link.global_state), link.settings.binding is None) for link in links]
        return {**current, "links": own}

    return System(act, observe, locks=find_locks)


def load_file(folder: pathlib.Path) -> System:
    """Return a system that loads a module and an optimizer from one of two files in turn."""
    net = Net()
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.01))
    x, turn = torch.randn(8, 4, dtype=D), [0]
    for i in range(2):
        if not (folder / f"net{i}").exists():
            opt.step(mo.closure(lambda: net(x).square().mean()))
            io.save(folder / f"net{i}", net, optimizer=opt)
    io.load(folder / "net1", net, optimizer=opt)

    def prepare(count: int) -> None:
        turn[0] = count % 2

    def act() -> None:
        io.load(folder / f"net{turn[0]}", net, optimizer=opt)

    return System(
        act, lambda: {**observe_optimizer(opt, []), "net": dict(net.state_dict())}, prepare, lambda: locks_of(net)
    )


def load_state(folder: pathlib.Path) -> System:
    """Return a system that loads a module from a state dict."""
    net, states = Net(), [Net(i).state_dict() for i in (1, 2)]
    turn = [0]
    return System(
        lambda: net.load_state_dict(states[turn[0]]),
        lambda: dict(net.state_dict()),
        lambda count: turn.__setitem__(0, count % 2),
        lambda: locks_of(net),
    )


def locks_of(net: Any) -> list[Any]:
    """Return the locks of the library, and of a particle's species."""
    return [*find_locks(), net._version_kernel.data.version.species.lock]


def touch(folder: pathlib.Path) -> System:
    """Return a system in which a particle follows the edits of a relative."""
    net = Net()
    other = net + 0

    def prepare(count: int) -> None:
        torch.manual_seed(count)
        other.head = nn.Linear(5, 2 + count % 3, dtype=D)
        other.extra = nn.BatchNorm1d(2 + count % 5, dtype=D)

    def observe() -> Any:
        return {"state": dict(net.state_dict()), "modules": [name for name, _ in net.named_modules()]}

    return System(net.touch, observe, prepare, lambda: locks_of(net))


def change_model(folder: pathlib.Path) -> System:
    """Return a system with in-place arithmetic on a model, for all tensors at once and tensor by tensor."""
    net, other = particles.adopt(Net()), particles.adopt(Net(1))
    turn = [0]

    def act() -> None:
        model: Any = net
        if turn[0] == 0:
            model *= 1.01
        elif turn[0] == 1:
            model += other
        elif turn[0] == 2:
            particles.lerp_(net, other, 0.1)
        else:
            model %= 3.0

    return System(
        act,
        lambda: dict(net.state_dict()),
        lambda count: turn.__setitem__(0, count % 4),
        lambda: locks_of(net),
    )


def change_population(folder: pathlib.Path) -> System:
    """Return a system with in-place arithmetic on a population and replaced members."""
    torch.manual_seed(0)
    pop = mo.Population.of(Net(), 4)
    parts: Any = pop.only("body.*")
    others, turn = pop[2:] * 1.01, [0]

    def act() -> None:
        members: Any = pop
        if turn[0] == 0:
            members *= 1.01
        elif turn[0] == 1:
            part = parts
            part *= 0.99
        else:
            pop.replace([0, 1], others)

    return System(
        act, lambda: dict(pop.state_dict()), lambda count: turn.__setitem__(0, count % 3), lambda: find_locks()
    )


def merge_models(folder: pathlib.Path) -> System:
    """Return a system that merges models, which must not change."""
    a, b = Net(1), Net(2)
    return System(lambda: merge.lerp(a, b, 0.5), lambda: [dict(a.state_dict()), dict(b.state_dict())], locks=find_locks)


OPERATIONS: dict[str, Callable[[pathlib.Path], System]] = {
    "fused": step_given(lambda: m.ClipNorm(1.0), m.Adam, lambda: m.WeightDecay(0.01), lambda: m.LR(0.01)),
    "unfused": step_given(lambda: m.ClipNorm(1.0), m.Adam, lambda: m.LR(0.01), fuse=False),
    "soap": step_given(m.SOAP, lambda: m.LR(0.01)),
    "shampoo": step_given(m.Shampoo, lambda: m.LR(0.01)),
    "sam": step_closure(m.SAM, m.Adam, lambda: m.LR(0.01)),
    "line search": step_closure(m.Adam, m.Backtracking),
    "lbfgs": step_closure(m.LBFGS, m.StrongWolfe),
    "population": step_population,
    "functional": step_functional,
    "load": load_file,
    "load_state_dict": load_state,
    "touch": touch,
    "model in place": change_model,
    "population in place": change_population,
    "merge": merge_models,
}
