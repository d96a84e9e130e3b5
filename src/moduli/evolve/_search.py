"""`search`: gradient-free search over parameters of a module, in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ._base import Search
from ._checkpoint import SearchFile
from ._chosen import Chosen, ModuleFitness
from ._distribution import choose_population
from ._executor import EvaluationWarning, Executor, InProcess, evaluate_generation, member_seeds
from ._reason import Reason
from .ars import ARS
from .cem import CEM
from .cmaes import CMAES
from .de import DE
from .ga import GA
from .guided_es import GuidedES
from .open_es import OpenES
from .pgpe import PGPE
from .pso import PSO
from .snes import SNES
from .xnes import XNES

METHODS: dict[str, tuple[type[Search], dict[str, Any]]] = {
    "pso": (PSO, {}),
    "de": (DE, {}),
    "jade": (DE, {"strategy": "current-to-pbest/1", "adapt": "jade"}),
    "shade": (DE, {"strategy": "current-to-pbest/1", "adapt": "shade"}),
    "ga": (GA, {}),
    "cem": (CEM, {}),
    "openes": (OpenES, {}),
    "pgpe": (PGPE, {}),
    "ars": (ARS, {}),
    "guidedes": (GuidedES, {}),
    "snes": (SNES, {}),
    "xnes": (XNES, {}),
    "cmaes": (CMAES, {}),
    "sepcmaes": (CMAES, {"covariance": "separable"}),
    "ipop": (CMAES, {"restarts": "ipop"}),
    "bipop": (CMAES, {"restarts": "bipop"}),
}


@dataclass
class SearchResult:
    """What a search over a module found.

    Attributes:
        x: The best parameters found, by name.
        value: Their fitness.
        reason: Why the search ended, as a sentence (a `Reason`).
        success: Whether it ended because it reached the target or converged.
        steps: How many generations there were.
        evaluations: How many members were evaluated.
        seconds: How long it took, since it was last resumed.
        history: The best fitness after each generation.
        search: The search itself, to go on with.

    Example:
        >>> import torch
        >>> from moduli.evolve import search
        >>> net = torch.nn.Linear(2, 1)
        >>> result = search(net, lambda net: net(torch.ones(2)).square(), budget=63)
        >>> result.evaluations, len(result.history) == result.steps
        (63, True)
    """

    x: dict[str, Tensor]
    value: float
    reason: Reason
    success: bool
    steps: int
    evaluations: int
    seconds: float
    history: list[float] = field(repr=False)
    search: Search = field(repr=False)


def search(
    net: nn.Module,
    fitness: Callable[[Any], Any],
    over: str | Sequence[str] = "*",
    *,
    method: str = "auto",
    budget: int = 1000,
    executor: Executor | None = None,
    vectorised: bool = False,
    seed: int = 0,
    target: float | None = None,
    checkpoint: str | Path | None = None,
    callback: Callable[[Search], Any] | None = None,
    **settings: Any,
) -> SearchResult:
    """Search for parameters of a module that minimise a fitness, without gradients.

    The module ends with the best parameters that were found; the others, buffers included, are never written by the search.
    If anything raises, the module has the best parameters so far, which are its own until something is evaluated.

    Ctrl-C ends the search after what was evaluated, with `Reason.INTERRUPTED`. With a `checkpoint`, the same call goes on
    from there, also after the program was killed: what was evaluated is in the file or in the journal beside it.

    Args:
        net: Any module.
        fitness: A function of the module that gives one number; it runs without gradients.
        over: Names of parameters, or patterns such as `"head.*"`, as one string or several.
        method: `"auto"` chooses by the number of parameters: full CMA-ES up to 1,000, separable up to 100,000, and beyond
            that seed-replayed `OpenES`, which keeps four vectors of the size of the model. By name: `"cmaes"`, `"sepcmaes"`,
            `"ipop"`, `"bipop"`, `"pso"`, `"de"`, `"jade"`, `"shade"`, `"ga"`, `"cem"`, `"openes"`, `"pgpe"`, `"ars"`,
            `"guidedes"`, `"snes"` or `"xnes"`.
        budget: How many evaluations there are at most; they are spent in whole generations.
        executor: Who evaluates: `Pool`, `Ray`, `Ranks`, or None for this process.
        vectorised: In this process, evaluate all members in one call: `fitness` then gets a function to call like the
            module, and runs under `torch.func.vmap`.
        seed: Decides every random number.
        target: Stop when a fitness this low is found.
        checkpoint: A file to keep the state in after each generation, and to resume from if it exists; with `Ranks`, one
            that all ranks can read.
        callback: Called with the search after each generation; a true result ends it.
        **settings: Those of the method: `population`, `sigma`, `bounds`, `patience`, `lr`, and so on.

    Raises:
        ValueError: If nothing matches `over`, the method or the checkpoint is unknown, or the method would need a matrix of
            more than two gigabytes that was not asked for (`covariance="full"` asks for it).
        EvaluationError: If no member of a generation could be evaluated; it has the traceback of one.

    Example:
        >>> import torch
        >>> from moduli.evolve import search
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> xor = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
        >>> result = search(net, lambda net: (net(x) - xor).square().mean(), budget=6000, target=0.01, vectorised=True)
        >>> print(result.reason)
        The target fitness was reached.
    """
    started = perf_counter()
    chosen = Chosen(net, over)
    if budget < 1:
        raise ValueError(f"budget={budget}: a search evaluates at least one member")
    if method == "auto":
        method = choose_method(chosen.numel)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; there are auto, {', '.join(METHODS)}")
    if vectorised and executor is not None:
        raise ValueError("vectorised=True evaluates in this process; leave executor out")
    kind, preset = METHODS[method]
    # A covariance matrix loses its positive eigenvalues in single precision long before it has converged.
    double = kind in (CMAES, XNES) and preset.get("covariance", settings.get("covariance")) != "separable"
    if double and "covariance" not in settings:
        _check_matrix(method, chosen.numel)
    settings.setdefault("population", _first_population(kind, chosen.numel, budget))
    x0 = chosen.read(net, torch.float64 if double else None)
    if "rank" in settings:
        settings.setdefault("shapes", [entry.shape for entry in chosen.entries])
    searcher = kind(x0, seed=seed, target=target, max_evaluations=budget, own=True, **{**preset, **settings})
    del x0
    workers = executor or InProcess(vectorised=vectorised)
    searcher.share = workers.share
    about = {"method": method, "names": chosen.names, "shapes": [list(entry.shape) for entry in chosen.entries]}
    file = SearchFile(checkpoint, workers.keeps_files, about)
    history = file.load(searcher)
    try:
        reason = _run(ModuleFitness(net, chosen, fitness, searcher), searcher, file, history, workers, callback)
    finally:
        best = searcher.lend_best()
        chosen.write(net, best)
    done = searcher.generation, searcher.evaluations, perf_counter() - started
    return SearchResult(
        chosen.named(best), searcher.best_fitness, reason, reason.success, *done, history=history, search=searcher
    )


def choose_method(size: int) -> str:
    """The method for so many parameters: the best that memory allows."""
    if size <= 1_000:
        return "cmaes"
    return "sepcmaes" if size <= 100_000 else "openes"


def _check_matrix(method: str, size: int) -> None:
    """Refuse a covariance matrix that can not have been meant, and say what it would cost."""
    needed = 4 * 8 * size * size  # the covariance, its root, and as much again while they change
    if needed > 2 * 1024**3:
        raise ValueError(
            f"method={method!r} keeps a covariance of {size} x {size} numbers, which takes {needed / 1024**3:.3g} GB; use "
            "'sepcmaes', 'snes' or 'openes', whose memory is that of the model, or ask for it with covariance='full'"
        )


def _first_population(kind: type[Search], size: int, budget: int) -> int:
    """The method's default, or less where the budget does not suffice for one generation of it."""
    default = signature(kind).parameters["population"].default if "population" in signature(kind).parameters else 64
    wanted = min(choose_population(size) if default is None else default, budget)
    return max(kind.least, wanted - wanted % kind.multiple)


def _run(
    fitness: ModuleFitness,
    searcher: Search,
    file: SearchFile,
    history: list[float],
    executor: Executor,
    callback: Callable[[Search], Any] | None,
) -> Reason:
    """Generations until there is a reason to end; the history grows."""
    known = file.read_journal(searcher.generation)
    try:
        if not file.exists:
            file.save(searcher, history)
        while (reason := searcher.should_stop()) is None:
            seeds = member_seeds(int(searcher.state["seed"]), searcher.evaluations, searcher.population)
            if 0 < len(known) < len(seeds):
                what = (
                    f"generation {searcher.generation} goes on with {len(known)} of {len(seeds)} members known; those that "
                    "were under way when the search ended are evaluated again"
                )
                warnings.warn(EvaluationWarning(what), stacklevel=3)
            with file.keep_journal(searcher.generation, known) as note:
                values = evaluate_generation(executor, fitness, searcher.rows, seeds, known, note)
            searcher.tell(values)
            history.append(searcher.best_fitness)
            file.save(searcher, history)
            known = {}
            if callback is not None and callback(searcher):
                return searcher.should_stop() or Reason.CALLBACK
    except KeyboardInterrupt:
        return Reason.INTERRUPTED
    return reason
