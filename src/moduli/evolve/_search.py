"""`search`: gradient-free search over parameters of a module, or over tensors, in one call."""

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

from ..labels import Tensor as Labelled
from . import ars, cem, cmaes, de, ga, guided_es, open_es, pgpe, pso, snes, xnes
from ._base import Search
from ._distribution import choose_population
from ._executor import EvaluationWarning, Executor, InProcess, member_seeds
from ._matrix_search import MatrixSearch
from ._module_fitness import Chosen, ModuleFitness
from ._problem import Reason, split_bounds
from ._tensor_tree import TensorTree, TreeFitness, TreeLeaf
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
    """The best parameters that a search found, and how it went.

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

    def __repr__(self) -> str:
        return (
            f"SearchResult(value={self.value:.6g}, success={self.success}, steps={self.steps}, "
            f"evaluations={self.evaluations}, seconds={self.seconds:.3g}, reason={str(self.reason)!r})"
        )


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
    If an exception is raised, the module has the best parameters so far: its own until a member was evaluated.

    Instead of a module, `net` may be a tensor, or nested dictionaries, lists and tuples of tensors: `fitness` is then a
    function of such a tree, the tensors are not changed, and the best point is the result's `x`.

    Ctrl-C ends the search after the last evaluated member, with `Reason.INTERRUPTED`. With a `checkpoint`, the same call
    resumes from there, also after the program was killed: every fitness value is in the file or in the journal beside it.

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
    if settings.get("bounds") is not None:
        settings["bounds"] = _read_bounds(settings["bounds"], net)
    _check_options(method, vectorised and executor is not None, polish and checkpoint is not None)
    limit = budget - budget // 5 if polish else budget
    if polish and issubclass(METHODS[method][0], MatrixSearch):
        settings.setdefault("tol", 0.01)
    searcher = _make_search(net, chosen, method, limit, {"seed": seed, "target": target, **settings})
    workers = executor or InProcess(vectorised=vectorised)
    searcher.share = workers.share
    about: dict[str, Any] = {
        "method": method,
        "names": chosen.names,
        "shapes": [list(entry.shape) for entry in chosen.entries],
    }
    file, history, evaluated = None, list[float](), dict[int, float]()
    if checkpoint is not None:
        from ._checkpoint import SearchFile, describe_settings  # only checkpoints need files

        about["settings"] = describe_settings({"seed": seed, **settings})
        file = SearchFile(checkpoint, workers.keeps_files, about)
        history, evaluated = file.load(searcher)
    steps = evaluations = 0

    def run(searcher: Search) -> Reason:
        evaluate = functools.partial(workers.collect, ModuleFitness(net, chosen, fitness, searcher), searcher.rows)
        return _run(evaluate, searcher, file, history, evaluated, callback)

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


def _check_options(method: str, executor_given: bool, polishes_checkpoint: bool) -> None:
    """Raise ValueError if the method is unknown, or options of `search` contradict each other."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; there are auto, {', '.join(METHODS)}")
    if executor_given:
        raise ValueError("vectorised=True evaluates in this process; leave executor out")
    if polishes_checkpoint:
        raise ValueError(
            "polish=True is not kept in checkpoints; search with the checkpoint first, and polish its result"
        )


def _read_bounds(bounds: Any, net: nn.Module) -> tuple[Any, ...]:
    """Return both bounds as the methods take them."""
    return tuple(_read_bound(end, net) for end in split_bounds(bounds))


def _read_bound(bound: Any, net: nn.Module) -> Any:
    """Return a bound in the form of one tensor as a vector; a labelled one in the order of its axes and labels."""
    form = net.form if isinstance(net, TensorTree) else None
    if not isinstance(form, TreeLeaf):
        if isinstance(bound, Labelled):
            raise TypeError("labelled bounds are those of one labelled tensor; give one number for each coordinate")
        return bound
    if isinstance(bound, Labelled) and form.dims is not None:
        aligned = Labelled(torch.empty(net.get_parameter(form.name).shape, dtype=bound.data.dtype), form.dims)
        try:
            aligned[...] = bound.detach()
        except (LookupError, ValueError) as error:
            raise ValueError(f"the axes or labels of a bound are not those of the tensor: {error}") from None
        bound = aligned
    data = bound.data if isinstance(bound, Labelled) else bound
    is_shaped = isinstance(data, torch.Tensor) and data.shape == net.get_parameter(form.name).shape
    return data.reshape(-1) if is_shaped else data


def choose_method(size: int) -> str:
    """Return the name of the best method whose memory is affordable for this number of parameters."""
    if size <= 1_000:
        return "cmaes"
    return "sepcmaes" if size <= 100_000 else "openes"


def _make_search(net: Any, chosen: Chosen, method: str, limit: int, settings: dict[str, Any]) -> Search:
    """Return the search of a method over the chosen parameters, with defaults for its population, dtype and shapes.

    Raises:
        ValueError: If the method would allocate more than two gigabytes for a covariance that was not requested.
    """
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
    if kind is not de.DE:  # DE chooses its population from max_evaluations
        settings.setdefault("population", _first_population(kind, size, limit))
    if "rank" in settings:
        settings.setdefault("shapes", [entry.shape for entry in chosen.entries])
    x0 = chosen.read(net, torch.float64 if double else None)
    _refuse_unknown(kind, method, settings)
    return kind(x0, max_evaluations=limit, own=True, **{**preset, **settings})


def _refuse_unknown(kind: type[Search], method: str, settings: Mapping[str, Any]) -> None:
    """Raise TypeError for a setting that neither the method nor what all searches share has."""
    # `**options` of a method are passed on to its bases.
    inits = [signature(base.__init__) for base in kind.__mro__ if "__init__" in vars(base)]  # type: ignore[misc]
    known = {each.name for init in inits for each in init.parameters.values() if each.kind is each.KEYWORD_ONLY}
    for key in settings:
        if key not in known:
            own = sorted(known - {"own", "max_evaluations"})
            raise TypeError(f"method={method!r} has no setting {key!r}; it has {', '.join(own)}")


def _first_population(kind: type[Search], size: int, budget: int) -> int:
    """Return the method's default population, reduced where the budget does not suffice for one generation of it."""
    default = signature(kind).parameters["population"].default if "population" in signature(kind).parameters else 64
    wanted = min(choose_population(size) if default is None else default, budget)
    return max(kind.least, wanted - wanted % kind.multiple)


def _run(
    evaluate: Callable[..., Tensor],
    searcher: Search,
    file: SearchFile | None,
    history: list[float],
    evaluated: dict[int, float],
    callback: Callable[[Search], Any] | None,
) -> Reason:
    """Run generations until there is a reason to stop, which is returned; append the best fitness of each to `history`."""
    try:
        while (reason := searcher.should_stop()) is None:
            seeds = member_seeds(int(searcher.state["seed"]), searcher.evaluations, searcher.population)
            if 0 < len(evaluated) < len(seeds):
                what = (
                    f"generation {searcher.generation} goes on with {len(evaluated)} of {len(seeds)} members known; those that "
                    "were under way when the search ended are evaluated again"
                )
                warnings.warn(EvaluationWarning(what), stacklevel=3)
            if file is not None:
                file.begin(searcher.generation, evaluated)
            searcher.tell(evaluate(seeds, evaluated, None if file is None else file.note))
            history.append(searcher.best_fitness)
            if file is not None:
                file.save(searcher, history)
            evaluated = {}
            if callback is not None and callback(searcher):
                return searcher.should_stop() or Reason.CALLBACK
    except KeyboardInterrupt:
        return Reason.INTERRUPTED
    return reason
