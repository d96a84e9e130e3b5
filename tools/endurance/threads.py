"""Four threads that share fused functions must compute what each computes alone, bit for bit.

Threads work on separate lists, of other sizes and at other addresses, while the interpreter switches threads every
microsecond. A case is a function of a thread's number that returns tensors.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import moduli as mo
from moduli import kernels, m, presets

THREADS = 4

Case = Callable[[int], list[Tensor]]


def run(seconds: float) -> dict[str, int]:
    """Run all cases in turn until the time is over, each at least once.

    Args:
        seconds: The time after which no new round starts.

    Returns:
        The number of cases and of rounds.

    Raises:
        RuntimeError: If a thread computed other values than it computes alone.
    """
    cases = {**list_functions(), **list_presets(), **list_programs()}
    rounds, end = 0, time.monotonic() + seconds
    while not rounds or time.monotonic() < end:
        for name, case in cases.items():
            check_case(name, case)
        rounds += 1
    return {"cases shared by four threads": len(cases), "rounds of them": rounds}


def check_case(name: str, case: Case) -> None:
    """Raise RuntimeError unless every thread computes what it computes alone."""
    alone = [case(k) for k in range(THREADS)]
    together: list[Any] = [None] * THREADS
    start = threading.Barrier(THREADS)

    def work(k: int) -> None:
        try:
            start.wait()
            together[k] = case(k)
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            together[k] = error

    with switch_often():
        threads = [threading.Thread(target=work, args=(k,)) for k in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for k, (expected, got) in enumerate(zip(alone, together, strict=True)):
        if isinstance(got, BaseException):
            raise RuntimeError(f"{name}: thread {k} failed among {THREADS}") from got  # noqa: TRY004
        same = len(expected) == len(got) and all(map(is_same, expected, got))
        if not same:
            raise RuntimeError(f"{name}: thread {k} got other numbers among {THREADS} threads than alone")


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, where NaN (the root of a random number) is like NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def switch_often() -> Iterator[None]:
    """Switch threads every microsecond inside the block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def list_functions() -> dict[str, Case]:
    """Return a case for each fused function that lives in a module of the library, and for a few written here."""
    functions: dict[str, kernels.Fused] = {
        "in place": kernels.fuse(lambda p, g: p + g, inplace="p"),
        "several results": kernels.fuse(lambda p, g, w: (p - w * g, g * g)),
    }
    for info in pkgutil.walk_packages(mo.__path__, "moduli."):
        if ".cli" not in info.name and not info.name.endswith(("_ray", "_hosted")):
            module = import_module(info.name)
            shared = {f"{info.name}.{n}": v for n, v in vars(module).items() if isinstance(v, kernels.Fused)}
            functions.update(shared)
    return {name: make_call(fused) for name, fused in functions.items()}


def make_call(fused: kernels.Fused) -> Case:
    """Return a case that calls a fused function with random lists, and numbers where its annotations say so."""
    hints = inspect.signature(fused.fn).parameters

    def case(k: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(k)
        results: list[Tensor] = []
        for _ in range(60):  # new addresses each time; two threads have the same sizes, so that they share a plan
            sizes = [8 + k % 2, 3, 100 * (k % 2)]
            arguments: list[Any] = []
            for name in fused.names:
                number = len(name) <= 2 and name[0] in "wc" and hints[name].annotation in ("float", inspect._empty)
                tensors = [torch.randn(n, generator=generator) for n in sizes]
                arguments.append(0.5 + k if number else tensors)
            for _ in range(2):  # the second time at the same addresses
                out = fused(*arguments)
                results += [t.clone() for part in (out if isinstance(out, tuple) else (out,)) for t in part]
        return results

    return case


def list_presets() -> dict[str, Case]:
    """Return a case for each preset that steps with the gradients in `.grad`."""
    cases = {}
    for name in presets.__all__:
        preset = getattr(presets, name)
        arguments = inspect.signature(preset).parameters
        if any(each.default is each.empty for each in arguments.values()):
            continue  # it needs the layers of a network
        settings = {"seed": 0} if "seed" in arguments else {}
        if not any(need.evaluates for link in preset(**settings) for need in link.all_needs()):
            cases[f"presets.{name}"] = make_steps(lambda preset=preset, settings=settings: preset(**settings))
    return cases


def make_steps(chain: Callable[[], Any]) -> Case:
    """Return a case that makes steps of an optimizer, with new gradients at each."""

    def case(k: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(k)
        shapes = [(4 + k % 2, 3), (5,), (2, 2 + k % 2)]
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = mo.Optimizer(params, *chain())
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        return [param.detach() for param in params]

    return case


def list_programs() -> dict[str, Case]:
    """Return cases of whole programs that use fused functions of the library: searches and populations."""

    def search(method: str) -> Case:
        def case(k: int) -> list[Tensor]:
            net = make_net(k)
            mo.search(
                net, lambda net: float(sum((p**2).sum() for p in net.parameters())), method=method, budget=60, seed=k
            )
            return [param.detach().clone() for param in net.parameters()]

        return case

    def swarm(k: int) -> list[Tensor]:
        population = mo.Population.of(make_net(k), 6, init=1.0, generator=torch.Generator().manual_seed(k))
        optimizer = mo.Optimizer(population, m.Adam(), m.LR(1e-2), m.PSO(social=0.3, seed=k))
        x = torch.ones(4, 2 + k % 2)
        for _ in range(3):
            optimizer.step(mo.closure(lambda: (population(x) ** 2).mean((1, 2))))
        return [param.detach().clone() for param in population.parameters()]

    return {"DE": search("de"), "PSO": search("pso"), "m.PSO": swarm, "m.Cautious": make_steps(make_cautious)}


def make_net(k: int) -> torch.nn.Module:
    """Return a small network; two threads have the same sizes."""
    generator = torch.Generator().manual_seed(k)
    net = torch.nn.Linear(2 + k % 2, 1)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return net


def make_cautious() -> list[Any]:
    """Return a chain with a cautious momentum."""
    return [m.HeavyBall(0.9), m.Cautious(), m.LR(0.1)]
