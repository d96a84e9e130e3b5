"""Links around a search: the search proposes models, the link evaluates them and reports the losses.

One adapter makes all of them. A link has the arguments of its search, with the same names and defaults, except for those that an
optimizer determines: the start, the number of members of a population, and the descent along a gradient.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..evolve import Distribution, EvaluationWarning, GradientSearch, Search, evaluate_low_rank
from ..optim import DeclaredLink, Need, Objective, Optimizer, as_real, make_constructor
from ..population import Population, Shard
from ._vectors import flat, flat_members, land, unflat

BLOCK = 1 << 22  # the limit of elements of the models in one block
_OURS = ("x0", "initial", "spread", "shapes", "lr", "optimizer", "momentum", "betas", "own")


def read_settings(search: type[Search], left_out: tuple[str, ...]) -> list[inspect.Parameter]:
    """Return the settings of a search that a link has too, with their defaults."""
    parameters: dict[str, inspect.Parameter] = {}
    for kind in search.__mro__[: search.__mro__.index(Search)]:
        for name, parameter in inspect.signature(kind.__init__).parameters.items():  # type: ignore[misc]
            settable = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
            if settable and name not in (*_OURS, *left_out):
                parameters.setdefault(name, parameter)
    return list(parameters.values())


class SearchLink(DeclaredLink):
    """A link around a search; a subclass names the search.

    Args:
        seed: Decides every random number.
        **options: The settings of the search.
    """

    decides_on_host = True

    search_class: ClassVar[type[Search]]
    left_out: ClassVar[tuple[str, ...]] = ()
    attributes = ("seed",)

    seed: int

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "search_class" in cls.__dict__:
            settings = read_settings(cls.search_class, cls.left_out)
            seed = inspect.Parameter("seed", inspect.Parameter.KEYWORD_ONLY, default=0)
            this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
            cls.__init__ = make_constructor(inspect.Signature([this, *settings, seed]))  # type: ignore[method-assign]

    def collect(self, given: Mapping[str, Any]) -> None:
        """Store the arguments for the search."""
        super().collect({"seed": given["seed"]})
        self.options = {key: value for key, value in given.items() if key not in ("self", "seed")}
        self._made: Search | None = None
        self._begin(self._example())  # raises for options that can't work

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items() if value is not None)
        return f"{type(self).__name__}(seed={self.seed}{options})"

    def _example(self) -> Tensor:
        """Return a valid start of a search."""
        return torch.zeros(2)

    def _arguments(self, start: Tensor) -> dict[str, Any]:
        """Return the arguments besides the options of a search with this start."""
        return {"x0": start}

    def _begin(self, start: Tensor) -> Search:
        options = {key: value for key, value in self.options.items() if value is not None}
        return self.search_class(seed=self.seed, **{**self._arguments(start), **options})

    def search(self, start: Tensor) -> Search:
        """Return the current search; a new one, or one restored from saved state, if there is none."""
        if self._made is None:
            search = self._begin(start)
            saved = self.global_state.get("search")
            if saved is not None:
                search.load_state_dict({"method": type(search).__name__, **saved})
            self._made = search
        return self._made

    def _report(self, objective: Objective, search: Search) -> None:
        objective.attrs["best_loss"] = search.best_fitness
        reason = search.should_stop()
        if reason is not None:
            objective.terminate(str(reason))

    def reset(self) -> None:
        """Restart the search from the current parameters."""
        super().reset()
        self._made = None

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        self._made = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_made": None}


class ModelLink(SearchLink):
    """A link around a search over the parameters of one model as one vector.

    Each step asks for a generation around the parameters, evaluates it (all at once where the closure is a function of the
    model, `mo.closure(lambda net: ...)`, and the optimizer was given the module; else one by one), and emits the way from
    the parameters to the new centre of the search; where the search estimates a gradient it emits that, for the next link.
    """

    needs = frozenset({Need.CLOSURE})
    vector_state = True
    left_out: ClassVar[tuple[str, ...]] = ("rank",)

    def _arguments(self, start: Tensor) -> dict[str, Any]:
        # The next link makes the step, so the search only estimates the gradient.
        descends: dict[str, Any] = {"optimizer": None} if issubclass(self.search_class, GradientSearch) else {}
        if self.options.get("rank") is not None:
            descends["shapes"] = self._shapes or [start.shape]
        return {"x0": start, **descends}

    #: The shapes of the parameters, for noise of low rank.
    _shapes: Sequence[Sequence[int]] = ()

    def apply(self, objective: Objective) -> Objective:
        """Run one generation, and return the objective with its update."""
        params = objective.params
        x = flat(params).clone()
        self._shapes = [as_real(param.detach()).shape for param in params]
        search = self.search(x)
        search.revise(mean=x.clone())
        fitness = self._evaluate(objective, search, x.numel())
        search.tell(fitness)
        self.global_state["search"] = search.state
        if isinstance(search, GradientSearch):
            # The difference to the new centre would be the estimate rounded to the precision of the parameters.
            objective.updates = unflat(search.take_estimate(), params)
            objective.grads = [tensor.clone() for tensor in objective.updates]
            objective.present = None
        else:
            centre = unflat(search.mean.to(x), params)
            objective.updates = [param.detach() - goal for param, goal in zip(params, centre, strict=True)]
            land(objective, centre)
        finite = fitness[fitness.isfinite()]
        objective.loss_approx = finite.mean() if len(finite) else fitness.mean()
        self._report(objective, search)
        return objective

    def _evaluate(self, objective: Objective, search: Search, size: int) -> Tensor:
        evaluator = objective._closure("evaluations at other points")
        asked, net = evaluator.closure, objective.model
        fitness = torch.empty(search.population, dtype=torch.float64)
        if asked is None or not asked.of_model or not isinstance(net, torch.nn.Module):
            with objective.moved(), torch.no_grad():
                for i in range(search.population):
                    objective.move_to(unflat(search.rows(i, i + 1)[0], objective.params))
                    fitness[i] = objective.get_loss(backward=False, at_x0=False).double()
            return fitness
        if isinstance(search, Distribution) and search.shares_products() and not self._made_one_by_one:
            names = {id(param): name for name, param in net.named_parameters()}
            like = {names[id(param)]: param.detach() for param in objective.params}
            try:
                return self._evaluate_shared(objective, search, like, asked.fn)
            except (RuntimeError, ValueError, TypeError) as error:
                why = str(error).strip().splitlines()[0]
                message = f"members are made, because the loss can't be vectorised around their mean: {why}"
                warnings.warn(EvaluationWarning(message), stacklevel=2)
                self._made_one_by_one = True
        # Frozen parameters and buffers are copied for every model too.
        copied = sum(tensor.numel() for tensor in (*net.parameters(), *net.buffers()))
        block = max(1, min(search.population, BLOCK // max(copied, size, 1)))
        for start in range(0, search.population, block):
            stop = min(start + block, search.population)
            fitness[start:stop] = self._evaluate_together(objective, search.rows(start, stop), asked.fn)
        return fitness

    #: Whether torch failed to vectorise the loss around a mean.
    _made_one_by_one = False

    def _evaluate_shared(
        self, objective: Objective, search: Distribution, like: Mapping[str, Tensor], fn: Callable[..., Any]
    ) -> Tensor:
        """Return the losses of members that differ by noise of low rank, by products shared by all, without creating them."""
        net: Any = objective.model
        fitness = torch.empty(search.population, dtype=torch.float64)
        block = 2 * max(1, min(search.population, BLOCK // max(1, search.count_drawn())) // 2)
        with torch.no_grad():
            for start in range(0, search.population, block):
                stop = min(start + block, search.population)
                losses = evaluate_low_rank(net, fn, like, search, range(start, stop))
                fitness[start:stop] = (losses if objective.reduce is None else objective.reduce(losses)).double()
        if objective.evaluator is not None:
            objective.evaluator.count += search.population
        return fitness

    def _evaluate_together(self, objective: Objective, rows: Tensor, fn: Callable[..., Any]) -> Tensor:
        net: Any = objective.model
        pop = Population.of(net, len(rows))
        leaves = dict(pop.named_parameters())
        names = {id(param): name for name, param in net.named_parameters()}
        at = 0
        with torch.no_grad():
            for param in objective.params:
                leaf = leaves[names[id(param)]]
                size = as_real(param.detach()).numel()
                part = rows[:, at : at + size]
                at += size
                as_real(leaf.detach()).copy_(part.reshape(as_real(leaf.detach()).shape))
            losses = pop.losses(fn).detach()
        if objective.evaluator is not None:
            objective.evaluator.count += len(rows)
        return (losses if objective.reduce is None else objective.reduce(losses)).double()


class PopulationLink(SearchLink):
    """A link around a search whose members are the population's.

    A step first applies the update of the links before it (gradient steps), then gets new members from the search,
    evaluates them, reports the losses, and sets the population to the members that the search keeps.

    Where processes share a population, each runs the same search from the same seed and evaluates its own members: what
    travels is fitness, and the members themselves only where other links have moved them.
    """

    needs = frozenset({Need.CLOSURE, Need.LOSS, Need.MEMBERS})
    members = True
    over_processes = True
    replicated = True
    left_out: ClassVar[tuple[str, ...]] = ("population", "rank")

    def _example(self) -> Tensor:
        return torch.zeros(64, 2)

    def _arguments(self, start: Tensor) -> dict[str, Any]:
        return {"x0": start[0], "population": len(start), "initial": start}

    def attached(self, optimizer: Optimizer) -> None:
        """Raise an error for a population that is too small for the method."""
        shard = None if optimizer.population is None else optimizer.population.sharding
        self._begin(torch.zeros((optimizer.binding.members if shard is None else shard.total) or 1, 2))

    def apply(self, objective: Objective) -> Objective:
        """Run one generation, and return the objective with its update."""
        params = objective.params
        shard = None if objective.model is None else getattr(objective.model, "sharding", None)
        own = slice(None) if shard is None else slice(shard.start, shard.stop)
        here = flat_members(params)
        base = here
        if objective.updates is not None:
            moved = zip(params, objective.updates, strict=True)
            base = flat_members([param.detach() - update for param, update in moved])
        search = self._find_search(params, base, shard)
        with objective.moved(), torch.no_grad():
            members = search.state.get("x")
            if search.generation and isinstance(members, Tensor):
                followed = torch.tensor([float(torch.equal(members[own], base))])
                if not _gather(followed.expand(len(base)), shard).all():
                    self._follow(objective, search, base, shard)
            asked = search.ask().clone()
            objective.move_to(unflat(asked[own], params))
            losses = objective.get_loss(backward=False, at_x0=False)
            search.tell(_gather(losses, shard))
        self.global_state["search"] = search.state
        members = search.state.get("x")
        goal = unflat((members if isinstance(members, Tensor) else asked)[own].to(here), params)
        objective.updates = [param.detach() - there for param, there in zip(params, goal, strict=True)]
        # A generation moves all parameters, also those without a gradient.
        objective.present = None
        land(objective, goal)
        if objective.loss is None:
            objective.loss_approx = losses
        self._report(objective, search)
        return objective

    def _find_search(self, params: list[Tensor], base: Tensor, shard: Shard | None) -> Search:
        """Return the search of the members, which begins at them if it is new or the set of parameters has changed.

        Args:
            params: The parameters of the members of this process.
            base: These members as rows.
            shard: Which members they are; None where processes share no population.
        """
        count = len(base) if shard is None else shard.total
        shapes = [[count, *param.shape[1:]] for param in params]
        if self.global_state.setdefault("shapes", shapes) != shapes:
            # Some parameters were frozen or unfrozen.
            self.global_state["shapes"], self._made = shapes, None
            self.global_state.pop("search", None)
        if self._made is None and shard is not None:
            begins = "search" not in self.global_state
            self.search(shard.gather(base) if begins else base.new_zeros(count, base.shape[1]))
        return self.search(base)

    def _follow(self, objective: Objective, search: Search, base: Tensor, shard: Shard | None) -> None:
        """Mark members that gradient links (or the user) moved: their stored fitness is out of date."""
        entries = {"x": base.clone() if shard is None else shard.gather(base)}
        if "fitness" in search.state:
            objective.move_to(unflat(base, objective.params))
            losses = _gather(objective.get_loss(backward=False, at_x0=False), shard)
            losses = torch.where(losses.isnan(), torch.full_like(losses, torch.inf), losses).double()
            entries["fitness"] = losses.to(search.device)
        search.revise(**entries)


def _gather(rows: Tensor, shard: Shard | None) -> Tensor:
    """Return the rows of all members; the same rows where processes share no population."""
    return rows if shard is None else shard.gather(rows)
