"""`search`: gradient-free search over parameters of a module, or over tensors, in one line."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..layout import Entry, layout_and_tensors, select
from ..population import FunctionOfMember, call_low_rank
from . import ars, cem, cmaes, de, ga, guided_es, open_es, pgpe, pso, snes, xnes
from ._base import MatrixSearch, Search
from ._distribution import Distribution, choose_population
from ._executor import EvaluationWarning, Executor, InProcess, member_seeds
from ._problem import Reason
from ._tensor_tree import TensorTree, TreeFitness
from .polish import Polish

if TYPE_CHECKING:
    from ._checkpoint import SearchFile

METHODS: dict[str, tuple[type[Search], dict[str, Any]]] = {
    "pso": (pso.PSO, {}),
    "de": (de.DE, {}),
    "jade": (de.DE, {"strategy": "current-to-pbest/1", "adapt": "jade"}),
    "shade": (de.DE, {"strategy": "current-to-pbest/1", "adapt": "shade"}),
    "lshade": (de.DE, {"strategy": "current-to-pbest/1", "adapt": "shade", "shrink": True}),
    "ga": (ga.GA, {}),
    "cem": (cem.CEM, {}),
    "openes": (open_es.OpenES, {}),
    "pgpe": (pgpe.PGPE, {}),
    "ars": (ars.ARS, {}),
    "guidedes": (guided_es.GuidedES, {}),
    "snes": (snes.SNES, {}),
    "xnes": (xnes.XNES, {}),
    "cmaes": (cmaes.CMAES, {}),
    "sepcmaes": (cmaes.CMAES, {"covariance": "separable"}),
    "ipop": (cmaes.CMAES, {"restarts": "ipop"}),
    "bipop": (cmaes.CMAES, {"restarts": "bipop"}),
}


@dataclass
class SearchResult:
    """What a search over a module found.

    Attributes:
        x: The best parameters found, by name; for tensors, all of them in the form in which they were given.
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

    x: Any
    value: float
    reason: Reason
    success: bool
    steps: int
    evaluations: int
    seconds: float
    history: list[float] = field(repr=False)
    search: Search = field(repr=False)


def search(
    net: Any,
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
    polish: bool = False,
    **settings: Any,
) -> SearchResult:
    """Search for parameters of a module that minimise a fitness, without gradients.

    The module ends with the best parameters that were found; the others, buffers included, are never written by the search.
    If anything raises, the module has the best parameters so far, which are its own until something is evaluated.

    Instead of a module, it may be a tensor, or nested dictionaries, lists and tuples of tensors: `fitness` is then a function
    of such a nesting, they stay as they are, and the best point is the result's `x`.

    Ctrl-C ends the search after what was evaluated, with `Reason.INTERRUPTED`. With a `checkpoint`, the same call goes on
    from there, also after the program was killed: what was evaluated is in the file or in the journal beside it.

    Args:
        net: Any module, or tensors.
        fitness: A function of the module (of the tensors) that gives one number; it runs without gradients.
        over: Names of parameters, or patterns such as `"head.*"`, as one string or several; tensors in dictionaries and lists
            are named by keys and indices, `"layer/0/weight"`.
        method: `"auto"` chooses by the number of parameters: full CMA-ES up to 1,000, separable up to 100,000, and beyond
            that seed-replayed `OpenES`, which keeps four vectors of the size of the model. By name: `"cmaes"`, `"sepcmaes"`,
            `"ipop"`, `"bipop"`, `"pso"`, `"de"`, `"jade"`, `"shade"`, `"lshade"`, `"ga"`, `"cem"`, `"openes"`, `"pgpe"`, `"ars"`,
            `"guidedes"`, `"snes"` or `"xnes"`.
        budget: How many evaluations there are at most; they are spent in whole generations.
        executor: Who evaluates: `Pool`, `Ray`, `Ranks`, or None for this process.
        vectorised: In this process, evaluate all members in one call: `fitness` then gets a function to call like the
            module, and runs under `torch.func.vmap`. With `rank=` (`"openes"`, `"ars"`, `"pgpe"`, `"snes"`,
            `"sepcmaes"`) members are never made, in this process and over `Pool`, `Ray` and `Ranks`: products serve all of
            them, as in `Population.around`, or those of a worker's slice; a fitness that `torch.vmap` can't follow is
            evaluated one by one, with a warning.
        seed: Decides every random number.
        target: Stop when a fitness this low is found.
        checkpoint: A file to keep the state in after each generation, and to resume from if it exists; with `Ranks`, one
            that all ranks can read.
        callback: Called with the search after each generation; a true result ends it.
        polish: Descend from the best point by L-BFGS with gradients by differences (`Polish`) when the search has ended, as
            SciPy's differential evolution does. It has a fifth of the budget and what is left; population methods then end when
            their members differ by a hundredth of their size. For smooth functions of few numbers.
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
    if not isinstance(net, nn.Module):
        tree = TensorTree(net)
        options: dict[str, Any] = {
            "method": method, "budget": budget, "executor": executor, "vectorised": vectorised, "seed": seed,
            "target": target, "checkpoint": checkpoint, "callback": callback, "polish": polish,
        }  # fmt: skip
        result = search(tree, TreeFitness(fitness), over, **options, **settings)
        return replace(result, x=tree.read())
    started = perf_counter()
    chosen = Chosen(net, over)
    if method == "auto":
        method = choose_method(chosen.numel)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; there are auto, {', '.join(METHODS)}")
    if vectorised and executor is not None:
        raise ValueError("vectorised=True evaluates in this process; leave executor out")
    if polish and checkpoint is not None:
        raise ValueError(
            "polish=True is not kept in checkpoints; search with the checkpoint first, and polish its result"
        )
    kind, preset = METHODS[method]
    # A covariance matrix loses its positive eigenvalues in single precision long before it has converged.
    double = kind in (cmaes.CMAES, xnes.XNES) and preset.get("covariance", settings.get("covariance")) != "separable"
    size = chosen.numel
    needed = 4 * 8 * size * size / 1024**3  # the covariance, its root, and as much again while they change
    if double and "covariance" not in settings and needed > 2:
        raise ValueError(
            f"method={method!r} keeps a covariance of {size} x {size} numbers, which takes {needed:.3g} GB; use 'sepcmaes', "
            "'snes' or 'openes', whose memory is that of the model, or ask for it with covariance='full'"
        )
    limit = budget - budget // 5 if polish else budget
    if kind is not de.DE:  # which knows the budget
        settings.setdefault("population", _first_population(kind, chosen.numel, limit))
    if polish and issubclass(kind, MatrixSearch):
        settings.setdefault("tol", 0.01)
    x0 = chosen.read(net, torch.float64 if double else None)
    if "rank" in settings:
        settings.setdefault("shapes", [entry.shape for entry in chosen.entries])
    searcher = kind(x0, seed=seed, target=target, max_evaluations=limit, own=True, **{**preset, **settings})
    del x0
    workers = executor or InProcess(vectorised=vectorised)
    searcher.share = workers.share
    about = {"method": method, "names": chosen.names, "shapes": [list(entry.shape) for entry in chosen.entries]}
    file, history, known = None, list[float](), dict[int, float]()
    if checkpoint is not None:
        from ._checkpoint import SearchFile  # others need no files

        file = SearchFile(checkpoint, workers.keeps_files, about)
        history, known = file.load(searcher)
    steps = evaluations = 0

    def run(searcher: Search) -> Reason:
        evaluate = functools.partial(workers.collect, ModuleFitness(net, chosen, fitness, searcher), searcher.rows)
        return _run(evaluate, searcher, file, history, known, callback)

    try:
        reason = run(searcher)
        unfinished = reason not in (Reason.TARGET, Reason.CALLBACK, Reason.INTERRUPTED, Reason.NOT_FINITE)
        if polish and unfinished and budget - searcher.evaluations >= chosen.numel:
            steps, evaluations = searcher.generation, searcher.evaluations
            options = {"bounds": settings.get("bounds"), "seed": seed + 1, "target": target}
            left = budget - evaluations
            searcher = Polish(searcher.best, value=searcher.best_fitness, max_evaluations=left, **options)
            reason = run(searcher)
    finally:
        best = searcher.lend_best()
        chosen.write(net, best)
    done = steps + searcher.generation, evaluations + searcher.evaluations, perf_counter() - started
    return SearchResult(
        chosen.named(best), searcher.best_fitness, reason, reason.success, *done, history=history, search=searcher
    )


def choose_method(size: int) -> str:
    """The method for so many parameters: the best that memory allows."""
    if size <= 1_000:
        return "cmaes"
    return "sepcmaes" if size <= 100_000 else "openes"


def _first_population(kind: type[Search], size: int, budget: int) -> int:
    """The method's default, or less where the budget does not suffice for one generation of it."""
    default = signature(kind).parameters["population"].default if "population" in signature(kind).parameters else 64
    wanted = min(choose_population(size) if default is None else default, budget)
    return max(kind.least, wanted - wanted % kind.multiple)


def _run(
    evaluate: Callable[..., Tensor],
    searcher: Search,
    file: SearchFile | None,
    history: list[float],
    known: dict[int, float],
    callback: Callable[[Search], Any] | None,
) -> Reason:
    """Generations until there is a reason to end; the history grows."""
    try:
        while (reason := searcher.should_stop()) is None:
            seeds = member_seeds(int(searcher.state["seed"]), searcher.evaluations, searcher.population)
            if 0 < len(known) < len(seeds):
                what = (
                    f"generation {searcher.generation} goes on with {len(known)} of {len(seeds)} members known; those that "
                    "were under way when the search ended are evaluated again"
                )
                warnings.warn(EvaluationWarning(what), stacklevel=3)
            if file is not None:
                file.begin(searcher.generation, known)
            searcher.tell(evaluate(seeds, known, None if file is None else file.note))
            history.append(searcher.best_fitness)
            if file is not None:
                file.save(searcher, history)
            known = {}
            if callback is not None and callback(searcher):
                return searcher.should_stop() or Reason.CALLBACK
    except KeyboardInterrupt:
        return Reason.INTERRUPTED
    return reason


class Chosen:
    """The parameters of a module whose names match a pattern, in the order of its layout."""

    def __init__(self, net: nn.Module, over: str | Sequence[str]) -> None:
        patterns = (over,) if isinstance(over, str) else tuple(over)
        layout, _ = layout_and_tensors(net)
        chosen = select(patterns, [entry.names for entry in layout], owner=type(net).__name__)
        self.entries: list[Entry] = [layout.entries[place] for place in chosen]
        for entry in self.entries:
            if not entry.dtype.is_floating_point:
                raise TypeError(f"{entry.name!r} is {entry.dtype}; a search moves real floating-point parameters")
        if len({entry.device for entry in self.entries}) > 1:
            raise ValueError("the chosen parameters are on several devices; search over those of one")
        self.names = [entry.name for entry in self.entries]
        self.numel = sum(entry.numel for entry in self.entries)
        if self.numel == 0:
            raise ValueError(f"the parameters that match {', '.join(map(repr, patterns))} have no elements")

    def tensors(self, net: nn.Module) -> list[Tensor]:
        """The chosen parameters of a module of this structure, where they are."""
        return [net.get_parameter(name) for name in self.names]

    def read(self, net: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
        """Their values as one new vector."""
        tensors = [t.detach().reshape(-1) for t in self.tensors(net)]
        dtype = dtype or functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        return torch.cat([t.to(dtype) for t in tensors])

    def write(self, net: nn.Module, values: Tensor, at: int = 0) -> None:
        """Copy a vector into them, or a part of one, which begins at `at`; a part needs contiguous ones."""
        start = 0
        for tensor in self.tensors(net):
            low, high = max(at, start), min(at + len(values), start + tensor.numel())
            part = values[low - at : max(low, high) - at]
            if len(part) == tensor.numel():
                tensor.detach().copy_(part.view(tensor.shape))
            elif len(part):
                tensor.detach().view(-1)[low - start : high - start] = part
            start += tensor.numel()

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows as parameters by name, each with the leading dimensions of `rows`, in its own dtype."""
        found, at = {}, 0
        for entry in self.entries:
            part = rows[..., at : at + entry.numel]
            found[entry.name] = part.reshape((*rows.shape[:-1], *entry.shape)).to(entry.dtype)
            at += entry.numel
        return found


def evaluate_low_rank(
    net: nn.Module, fitness: Callable[[Any], Any], like: Mapping[str, Tensor], search: Any, members: Sequence[int]
) -> Tensor:
    """Return the fitness of members that differ by noise of low rank, without making them: one product serves all of them.

    Args:
        net: The module.
        fitness: The function of it.
        like: The parameters that are searched over, by name, in the order of the search.
        search: The search, a `Distribution` that shares products.
        members: Which members.

    Raises:
        RuntimeError: If `torch.vmap` can't follow the fitness.
        ValueError: If it is more than one number for each member.
    """
    mean, spread, at = search.state["mean"], search.spread(), 0
    means, factors, vectors, spreads = {}, {}, {}, {}
    for (name, param), (left, right) in zip(like.items(), search.factors(members), strict=True):
        own = mean[at : at + param.numel()].view(param.shape).to(param.dtype)
        scale = None if spread is None else spread[at : at + param.numel()].view(param.shape).to(param.dtype)
        at += param.numel()
        if right is None:
            noise = left.view(-1, *param.shape).to(param.dtype)
            vectors[name] = own + (noise if scale is None else noise * scale)
        else:
            if scale is not None:
                spreads[name] = scale
            means[name], factors[name] = own, (left.to(param.dtype), right.to(param.dtype))
    counted: dict[str, Any] = {"count": len(members), "report": {}}
    values = call_low_rank(FunctionOfMember(net), fitness, (), (), means, factors, vectors, spreads, **counted)
    if not isinstance(values, Tensor) or values.shape.numel() != len(members):
        raise ValueError("fitness is one number per member")
    return values.reshape(len(members))


class ModuleFitness:
    """The fitness of a module as a function of its chosen parameters, for one row or for many.

    Args:
        net: The module, which is written to.
        chosen: Its chosen parameters.
        fitness: The function of the module.
        search: Makes the members; other processes are sent them, or its draft.
    """

    def __init__(
        self, net: nn.Module, chosen: Chosen, fitness: Callable[[Any], Any], search: Search | None = None
    ) -> None:
        self.net, self.chosen, self.fitness, self.search = net, chosen, fitness, search
        #: Whether the fitness turned out to be one that torch can't vectorise.
        self.refused = False

    def __call__(self, row: Tensor) -> Any:
        self.chosen.write(self.net, row)
        return self.fitness(self.net)

    def evaluate_member(self, index: int) -> Any:
        """The same for a member that is made here, in the memory of the module where that is possible."""
        search: Any = self.search
        if not all(tensor.is_contiguous() for tensor in self.chosen.tensors(self.net)):
            return self(search.rows(index, index + 1)[0])
        for at, values in search.parts(index):
            self.chosen.write(self.net, values, at)
        return self.fitness(self.net)

    def refuse(self, why: str) -> None:
        """Take notice that torch can't vectorise the fitness, and warn."""
        told = f"members are made one by one, because the fitness can't be vectorised: {why}"
        warnings.warn(EvaluationWarning(told), stacklevel=7)
        self.refused = True

    def shares_products(self) -> bool:
        """Whether members need not be made to be evaluated: they differ by noise of low rank."""
        return not self.refused and isinstance(self.search, Distribution) and self.search.shares_products()

    def evaluate_together(self, members: Sequence[int]) -> Tensor:
        """The fitness of several members by one product for all of them where parameters are matrices, and thin ones for each.

        Raises:
            RuntimeError: If `torch.vmap` can't follow the fitness.
        """
        like = dict(zip(self.chosen.names, self.chosen.tensors(self.net), strict=True))
        return evaluate_low_rank(self.net, self.fitness, like, self.search, members)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "search": None}

    def batch(self, rows: Tensor) -> Any:
        """All rows in one call, by `torch.func.vmap`: the fitness gets something to call like the module."""

        def one(parameters: dict[str, Tensor]) -> Any:
            return self.fitness(lambda *args, **kwargs: torch.func.functional_call(self.net, parameters, args, kwargs))

        return torch.func.vmap(one, randomness="different")(self.chosen.named(rows))
