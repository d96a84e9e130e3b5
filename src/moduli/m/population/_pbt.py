"""Population-based training: the worst members copy the best, and try other hyperparameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._torch import pytree
from ...optim import ChainError, MemberValues, Module, Need, Objective, Optimizer, find_search_ranges
from ...population import Population, Shard
from .._vectors import land


class PBT(Module):
    r"""Every so often the worst members take over weights, buffers and optimizer state of the best, and vary settings.

    Comes last in a chain. Settings are addressed by link and name and belong to each member: they are drawn between the
    given limits at first, then multiplied by $1 \pm$ `perturb` when a member takes over from another (and stay within the
    limits).

    Args:
        settings: What is varied: {"lr.lr": (1e-4, 1e-1)}, the limits of each setting; drawn on a logarithmic scale where
            both limits are positive. None for limits takes those that the link declares (`search_ranges`).
        every: How many steps lie between two exchanges.
        share: The share of members that is replaced (and of those that are copied).
        perturb: The relative change of a setting.
        score: What members are ranked by: a function of the population that gives one number per member, the lower the
            better, such as the loss on validation data; None for the training loss. It is called without gradients, at an
            exchange only.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 8, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.Adam(), m.LR(0.1), m.PBT({"lr.lr": (1e-5, 1.0)}, every=5, seed=0))
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["hyperparameters"]["lr.lr"].shape
        torch.Size([8])

    References:
        M. Jaderberg et al., "Population based training of neural networks", 2017.
    """

    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.MEMBERS})
    members = True
    over_processes = True

    def __init__(
        self,
        settings: Mapping[str, tuple[float, float] | None],
        *,
        every: int = 10,
        share: float = 0.25,
        perturb: float = 0.2,
        score: Callable[[Population], Tensor] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if score is not None and not callable(score):
            raise TypeError(f"PBT: score is a {type(score).__name__}; give a function of the population")
        self.score = score
        if every < 1 or not 0 < share <= 0.5 or not 0 <= perturb < 1:
            raise ValueError("PBT: every is at least 1, share lies in (0, 0.5], perturb in [0, 1)")
        self.ranges: dict[str, Any] = {name: _check_limits(name, limits) for name, limits in settings.items()}
        self.every, self.share, self.perturb, self.seed = every, share, perturb, seed

    def attached(self, optimizer: Optimizer) -> None:
        """Give every member its own settings, before the first step."""
        if self not in optimizer.modules:
            raise ChainError("PBT exchanges the state of all links, so it stands by itself in the chain, not in a link")
        if optimizer.modules[-1] is not self:
            after = type(optimizer.modules[optimizer.modules.index(self) + 1]).__name__
            if after == type(self).__name__:
                raise ChainError("one PBT exchanges the members; give it the settings of both")
            raise ChainError(
                f"PBT comes last: a loser takes over where the winner goes, which {after} after it would change. Write "
                f"Optimizer(pop, ..., {after}(...), PBT(...))"
            )
        for name, limits in self.ranges.items():
            link, key = _target(optimizer, name)
            if limits is None:
                self.ranges[name] = _find_declared(optimizer, link, key, name)
        hyperparameters: dict[str, Tensor] = self.global_state.setdefault("hyperparameters", {})
        generator = self.get_generator("cpu", self.seed)
        for name, (low, high) in self.ranges.items():
            if name not in hyperparameters:
                shard = _shard(optimizer)
                draw = torch.rand(optimizer.binding.members or 1 if shard is None else shard.total, generator=generator)
                draw = draw if shard is None else shard.own(draw)
                logarithmic = low > 0 and high > 0
                a, b = (math.log(low), math.log(high)) if logarithmic else (low, high)
                value = a + (b - a) * draw
                hyperparameters[name] = (value.exp() if logarithmic else value).clamp(low, high)
        self._install(optimizer)

    def _install(self, optimizer: Optimizer) -> None:
        hyperparameters = self.global_state["hyperparameters"]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for name, value in hyperparameters.items():
            link, key = _target(optimizer, name)
            # Parameters with the same settings share the dictionary, and so are moved in one pass.
            renewed: dict[int, dict[str, Any]] = {}
            for param in params:
                stored = link.settings.local.get(param, {})
                link.settings.local[param] = renewed.setdefault(id(stored) if stored else 0, {**stored, key: value})
            link.settings.forget()
        optimizer.attrs["hyperparameters"] = dict(hyperparameters)

    def reset(self) -> None:
        """Restart the count of steps; the members keep their settings."""
        hyperparameters = self.global_state.get("hyperparameters")
        super().reset()
        if hyperparameters is not None:
            self.global_state["hyperparameters"] = hyperparameters

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        optimizer = self._owner() if self._owner is not None else None
        if optimizer is not None and "hyperparameters" in self.global_state:
            self._install(optimizer)

    def update(self, objective: Objective) -> None:
        """Set the settings of parameters that were added since."""
        optimizer = _optimizer(objective)
        configured = {param for name in self.ranges for param in _target(optimizer, name)[0].settings.local}
        if self.ranges and any(param not in configured for param in objective.params):
            self._install(optimizer)

    def apply(self, objective: Objective) -> Objective:
        """Exploit and explore, at every n-th step."""
        optimizer = _optimizer(objective)
        shard = _shard(optimizer)
        here = objective.members or 0
        count = here if shard is None else shard.total
        if self.increment_counter("steps", 1) % self.every or count < 2:
            return objective
        losses = self._scores(objective, optimizer, here)
        losses = losses if shard is None else shard.gather(losses)
        ranked = torch.where(losses.isnan(), torch.full_like(losses, torch.inf), losses).argsort(stable=True)
        replaced = max(1, int(self.share * count))
        best, worst = ranked[:replaced], ranked[-replaced:]
        generator = self.get_generator("cpu", self.seed)
        source = best[torch.randint(replaced, (replaced,), generator=generator).to(best.device)]
        self._exploit(objective, optimizer, here, worst, source)
        hyperparameters = self.global_state["hyperparameters"]
        for name, (low, high) in self.ranges.items():
            value = hyperparameters[name].clone() if shard is None else shard.gather(hyperparameters[name])
            sign = torch.randint(0, 2, (replaced,), generator=generator) * 2 - 1
            value[worst.cpu()] = (value[source.cpu()] * (1 + self.perturb * sign)).clamp(low, high)
            hyperparameters[name] = value if shard is None else shard.own(value)
        self._install(optimizer)
        objective.attrs["replaced"] = dict(zip(worst.tolist(), source.tolist(), strict=True))
        return objective

    def _scores(self, objective: Objective, optimizer: Optimizer, count: int) -> Tensor:
        if self.score is None or optimizer.population is None:
            return objective.get_loss(backward=True)
        with torch.no_grad():
            scores = self.score(optimizer.population)
        if not isinstance(scores, Tensor) or scores.shape != (count,):
            what = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
            raise ValueError(f"PBT: score returned {what} for {count} members; return one number per member")
        return scores if scores.is_floating_point() else scores.to(torch.get_default_dtype())

    def _exploit(self, objective: Objective, optimizer: Optimizer, count: int, worst: Tensor, source: Tensor) -> None:
        params, updates = objective.params, objective.get_updates()
        goal = [param.detach() - update.to(param.dtype) for param, update in zip(params, updates, strict=True)]
        shard = _shard(optimizer)
        moved = worst if shard is None else worst[(worst >= shard.start) & (worst < shard.stop)] - shard.start
        for param, update, there in zip(params, updates, goal, strict=True):
            _copy_rows(there, worst, source, shard)
            # The update is subtracted at the end, and has to lead to the winner's next point.
            update[moved] = (param.detach()[moved] - there[moved]).to(update.dtype)
        land(objective, goal)
        moving = {id(param) for param in params}
        population = optimizer.population
        if population is not None:
            rest = [param for _, param in population.named_parameters() if id(param) not in moving]
            for tensor in (*rest, *(buffer for _, buffer in population.named_buffers())):
                _copy_rows(tensor.detach(), worst, source, shard)
        for _, link in optimizer._links:
            if link is not self:
                _copy_state(link, count, worst, source, shard)


def _find_declared(optimizer: Optimizer, link: Module, key: str, name: str) -> tuple[float, float]:
    """Return the declared range of a setting; that of a step size is the one of the link whose updates it scales."""
    limits = find_search_ranges(type(link)).get(key)
    if key == "lr":
        before = optimizer.modules[: optimizer.modules.index(link)] if link in optimizer.modules else []
        declared = [type(each).search_ranges["lr"] for each in before if "lr" in type(each).search_ranges]
        limits = declared[-1] if declared else limits
    if limits is None:
        raise ChainError(
            f"PBT: {type(link).__name__} declares no range for {name!r}; give its limits, such as (1e-4, 1e-1)"
        )
    return limits.low, limits.high


def _check_limits(name: str, limits: Any) -> tuple[float, float] | None:
    if "." not in name:
        raise ValueError(f"PBT: {name!r} names no link; write 'lr.lr' or 'adam.beta1'")
    if limits is None:
        return None
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        raise ValueError(f"PBT: the limits of {name!r} are {limits!r}; give two numbers, such as (1e-4, 1e-1)")
    low, high = (float(limit) for limit in limits)
    if not low <= high:
        raise ValueError(f"PBT: the limits of {name!r} are {low} and {high}; the lower comes first")
    return low, high


def _optimizer(objective: Objective) -> Optimizer:
    if objective.modular is None:
        raise ChainError("PBT exchanges the state of the other links, so it has to be in an Optimizer")
    return objective.modular


def _target(optimizer: Optimizer, name: str) -> tuple[Module, str]:
    owner, _, key = name.rpartition(".")
    matching = [
        link
        for path, link in optimizer._links
        if (path == owner or type(link).__name__.lower() == owner.lower()) and key in link.defaults
    ]
    if len(matching) != 1:
        raise ChainError(f"PBT: {len(matching)} links of the chain are meant by {name!r}; it has to be one")
    if isinstance(matching[0].defaults[key], bool | str):
        raise ChainError(f"PBT: {name!r} is {matching[0].defaults[key]!r}, a choice and not a number between limits")
    return matching[0], key


def _shard(optimizer: Optimizer) -> Shard | None:
    return None if optimizer.population is None else optimizer.population.sharding


def _copy_rows(rows: Tensor, targets: Tensor, sources: Tensor, shard: Shard | None) -> None:
    """Copy the rows of winners to losers, in this process or in another."""
    if shard is None:
        rows[targets] = rows[sources].clone()
    else:
        shard.copy(rows, targets, sources)


def _copy_state(link: Module, count: int, targets: Tensor, sources: Tensor, shard: Shard | None) -> None:
    for row in (*link.state.values(), link.global_state):
        for value in row.values():
            if isinstance(value, MemberValues):
                if shard is not None:
                    raise ChainError(
                        f"PBT can't exchange what {type(link).__name__} keeps for each member in another shape between "
                        "processes; leave it out, or train in one process"
                    )
                for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                    value[target] = copy.deepcopy(value[source])
                continue
            for tensor in pytree.tree_leaves(value):  # links keep lists of matrices, too
                if isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == count:
                    _copy_rows(tensor, targets, sources, shard)
