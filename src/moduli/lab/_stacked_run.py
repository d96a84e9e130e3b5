"""Many runs at once: contenders that differ in numbers only, as the members of one population.

Each member has its own start, its own numbers and, by its seed, its own batches. The records are those of separate runs to
rounding. That is checked: two members take a few steps alone first, and unless the population has the same losses in these
steps, the runs are done one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import optim
from ..population import Population
from ._contender import Contender
from ._grammar import ChainSyntaxError, ParsedChain, parse
from ._run import (
    IDLE,
    LOST,
    PATH_POINTS,
    Meter,
    RunEnd,
    RunReason,
    drop_infinite,
    find_spacing,
    find_target,
    read_clock,
    round_values,
    seed_all,
    take_steps,
    thin,
)  # fmt: skip
from ._tuning import map_numbers
from .catalogue import make_links
from .problems import Problem, SampledProblem

# How many steps are compared with those of separate runs, and the relative tolerances of their losses.
CHECKED_STEPS = 3
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}


class CannotStackError(Exception):
    """Runs that have to be done one by one, with the reason."""


def run_stacked(
    problem: Problem,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    *,
    budget: int,
    seconds: float = 60.0,
    target: float | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> list[dict[str, Any]]:
    """Do several runs as members of one population, with the records of separate calls of `run`.

    Args:
        problem: The problem.
        contenders: Chains that differ in numbers only, one for each run.
        seeds: The seed of each run.
        budget: How many evaluations each run has.
        seconds: How long each run may take; the population may take this times the number of runs.
        target: As for `run`.
        progress: Called now and then with (evaluations, best value).

    Returns:
        The records of the runs, as `run` returns them, with ``"stacked"``, how many ran together. Seconds are each run's share.

    Raises:
        CannotStackError: If the runs can't be members of a population; nothing is known of them then.

    >>> from moduli.lab import contender, problems
    >>> contenders = [contender("Adam | LR(0.1)"), contender("Adam | LR(0.2)")]
    >>> [run["reason"] for run in run_stacked(problems.get("rosenbrock"), contenders, [0, 0], budget=20)]
    ['budget spent', 'budget spent']
    """
    chain = _stack_chains(contenders)
    if problem.noisy and not isinstance(problem, SampledProblem) and len(set(seeds)) > 1:
        raise CannotStackError(f"{problem.name} draws its batches itself, so runs of several seeds can't share a step")
    expected = {at: _take_first_losses(problem, contenders[at], seeds[at]) for at in {0, len(seeds) - 1}}
    seed_all(seeds[0])
    try:
        population = Population.from_modules([problem.model(seed) for seed in seeds])
        optimizer = optim.Optimizer(population, *make_links(chain))
    except (ChainSyntaxError, TypeError, ValueError, RuntimeError) as error:
        raise CannotStackError(f"{type(error).__name__}: {error}") from error
    meter = _MemberMeter(len(seeds), budget, seconds, find_target(problem, target), progress)
    meter.spacing = find_spacing(problem)
    meter.reached = RunReason.REACHED if target is None else RunReason.TARGET
    runs = _StackedRuns(problem, population, optimizer, seeds, meter, expected)
    try:
        runs.take_all_steps()
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:  # one member's error would end all of them
        raise CannotStackError(f"{type(error).__name__}: {error}") from error
    return [runs.describe(member) for member in range(len(seeds))]


def _stack_chains(contenders: Sequence[Contender]) -> ParsedChain:
    """Return one chain in which a number that differs is a tensor with an entry per contender.

    Raises:
        CannotStackError: If a contender is no chain, or the chains differ in more than numbers.
    """
    if not all(each.is_chain for each in contenders):
        raise CannotStackError("a function of a model makes an optimizer for one model")
    chains = [parse(each.source) for each in contenders]
    chain = map_numbers(chains, lambda values: torch.tensor(values, dtype=torch.float64))
    if chain is None:
        raise CannotStackError("the chains differ in more than numbers")
    return chain


def _take_first_losses(problem: Problem, contender: Contender, seed: int) -> list[float]:
    """Return the losses of the first steps of a run by itself.

    Raises:
        CannotStackError: If a step takes more than one evaluation, or none, or is taken without gradients.
    """
    seed_all(seed)
    losses: list[float] = []
    meter = Meter(CHECKED_STEPS, math.inf, None)
    counts = []
    try:
        entrant = contender.enter(problem.model(seed))
        steps = take_steps(problem, entrant, meter, torch.Generator().manual_seed(seed), watch=losses.append)
        for _ in range(CHECKED_STEPS):
            next(steps)
            counts.append(meter.evaluations)
    except RunEnd:
        pass
    except Exception as error:
        raise CannotStackError(f"{type(error).__name__}: {error}") from error
    if counts != list(range(1, CHECKED_STEPS + 1)) or len(losses) != CHECKED_STEPS:
        raise CannotStackError("a step is not one evaluation with its gradient")
    return losses


class _MemberMeter:
    """A meter of all members, which counts for each what `Meter` counts for one run."""

    def __init__(
        self,
        size: int,
        budget: int,
        seconds: float,
        target: float | None,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        self.size, self.budget, self.limit, self.target, self.progress = size, budget, seconds * size, target, progress
        self.reached, self.spacing = RunReason.REACHED, 1.0
        self.evaluations = 0
        self.next = 0.0
        self.began = read_clock()
        self.paused = 0.0
        self.best = torch.full((size,), math.inf, dtype=torch.float64)
        self.lost = torch.zeros(size, dtype=torch.int64)
        self.alive = torch.ones(size, dtype=torch.bool)
        self.steps = 0
        self.ends: dict[int, dict[str, Any]] = {}
        self.history: list[tuple[int, float, list[float]]] = []
        self.losses: list[torch.Tensor] = []

    @contextlib.contextmanager
    def pause(self) -> Any:
        """Exclude the time of the block from the seconds of the runs."""
        began = read_clock()
        try:
            yield
        finally:
            self.paused += read_clock() - began

    def share(self) -> float:
        """Return the seconds of each run: those of the population divided by its size."""
        return (read_clock() - self.began - self.paused) / self.size

    def end(self, members: torch.Tensor, reason: RunReason, detail: str = "") -> None:
        """Store how the runs of some members ended.

        Args:
            members: Which members, as a boolean for each; those that have ended before are not changed.
            reason: Why they end.
            detail: More about it.
        """
        for member in (members & self.alive).nonzero().flatten().tolist():
            self.ends[member] = {
                "reason": str(reason),
                "detail": detail,
                "value": drop_infinite(float(self.best[member])),
                "evaluations": self.evaluations,
                "steps": self.steps,
                "seconds": round(self.share(), 6),
            }
        self.alive &= ~members

    def take(self, values: torch.Tensor) -> None:
        """Take the present values that the runs are judged by, and end those that reach the target."""
        better = self.alive & (values < self.best)
        self.best = torch.where(better, values, self.best)
        at_target = self.alive & (self.best <= self.target) if self.target is not None else torch.zeros_like(self.alive)
        if bool(at_target.any()) or self.evaluations >= self.next:
            self.record()
        if bool(at_target.any()):
            self.end(at_target, self.reached)

    def record(self) -> None:
        """Add a point to the history of all members."""
        self.history.append((self.evaluations, round(self.share(), 6), self.best.tolist()))
        self.next = max(self.evaluations + 1, self.evaluations * self.spacing)
        if self.progress is not None:
            self.progress(self.evaluations * self.size, float(self.best.min()))


class _StackedRuns:
    """Runs that are the members of one population."""

    def __init__(
        self,
        problem: Problem,
        population: Population,
        optimizer: Any,
        seeds: Sequence[int],
        meter: _MemberMeter,
        expected: dict[int, list[float]],
    ) -> None:
        self.problem, self.population, self.optimizer, self.seeds, self.meter = (
            problem, population, optimizer, list(seeds), meter,
        )  # fmt: skip
        self.expected = expected
        self.generators = {seed: torch.Generator().manual_seed(seed) for seed in dict.fromkeys(seeds)}
        self.samples: torch.Tensor | None = None
        self.frames: list[torch.Tensor] = []

    def take_all_steps(self) -> None:
        """Take steps until every run has ended."""
        meter = self.meter
        with meter.pause():
            meter.take(self.measure())
            self.add_frame()
        idle = 0
        while bool(meter.alive.any()):
            with meter.pause():
                self.resample()
            before = meter.evaluations
            self.optimizer.step(self.closure)
            if not bool(meter.alive.any()):
                break
            with meter.pause():
                self.finish_step(meter.evaluations - before)
            idle = idle + 1 if meter.evaluations == before else 0
            if idle >= IDLE:
                meter.end(meter.alive.clone(), RunReason.STOPPED, f"{IDLE} steps in a row evaluated nothing")
            if meter.evaluations >= meter.budget:
                meter.end(meter.alive.clone(), RunReason.BUDGET)
            if meter.share() * meter.size > meter.limit:
                limit = meter.limit / meter.size
                meter.end(meter.alive.clone(), RunReason.TIME, f"more than {limit:g} seconds")
        if meter.history[-1][0] != meter.evaluations:
            meter.record()

    def finish_step(self, evaluations: int) -> None:
        """Count a step, record the members' positions, and end the runs of those with a parameter that is not finite."""
        meter = self.meter
        if evaluations != 1 or getattr(self.optimizer, "should_terminate", False):
            raise CannotStackError("a step is not one evaluation of all members, or a link ends the chain")
        # A finite sum shows that all parameters are finite. Otherwise each is checked, because a sum may also overflow.
        finite = self.population.matrix.detach().sum(-1).isfinite()
        if not bool(finite.all()):
            finite = self.population.matrix.isfinite().all(-1)
            meter.end(~finite, RunReason.DIVERGED, "a parameter is no longer a finite number")
        meter.steps += 1
        self.add_frame()
        if self.problem.noisy and meter.evaluations >= meter.next:
            meter.take(self.measure())

    def resample(self) -> None:
        """Draw each seed's batch or noise of the next step."""
        problem = self.problem
        if not isinstance(problem, SampledProblem):
            for generator in self.generators.values():
                problem.resample(generator)
            return
        samples = {}
        for seed, generator in self.generators.items():
            problem.resample(generator)
            if problem.sample is None:
                raise CannotStackError(f"{problem.name} draws no sample that runs could have each their own of")
            samples[seed] = problem.sample
        self.samples = torch.stack([samples[seed] for seed in self.seeds]) if len(samples) > 1 else None

    def closure(self, backward: bool = True) -> torch.Tensor:
        """Return the losses of all members, each with its own batch."""
        meter, problem = self.meter, self.problem
        if not backward:
            raise CannotStackError("a step evaluates without gradients")
        self.population.zero_grad()
        with torch.enable_grad():
            losses = (
                self.population.losses(problem.loss)
                if self.samples is None or not isinstance(problem, SampledProblem)
                else self.population.losses(problem.loss_on, *problem.gather(self.samples), in_dims=0)
            )
            losses.sum().backward()  # type: ignore[no-untyped-call]
        with meter.pause():
            self._count(losses.detach().reshape(-1))
        return losses

    def _count(self, losses: torch.Tensor) -> None:
        """Count an evaluation, compare the first losses with those of separate runs, and end runs that diverged."""
        meter = self.meter
        meter.evaluations += 1
        values = losses.double().cpu()
        meter.losses.append(values)
        if len(meter.losses) <= CHECKED_STEPS:
            tolerance = TOLERANCES.get(losses.dtype, 1e-2)
            for member, expected in self.expected.items():
                loss, separate_loss = float(values[member]), expected[len(meter.losses) - 1]
                if not (math.isclose(loss, separate_loss, rel_tol=tolerance, abs_tol=1e-12) or loss == separate_loss):
                    fact = f"member {member} has the loss {loss:.6g} after {len(meter.losses) - 1} steps, alone {separate_loss:.6g}"
                    raise CannotStackError(fact)
        finite = values.isfinite()
        meter.lost = torch.where(finite, 0, meter.lost + 1)
        meter.end(meter.lost >= LOST, RunReason.DIVERGED, f"the loss was not finite in {LOST} evaluations in a row")
        if not self.problem.noisy:
            meter.take(torch.where(values.isnan(), math.inf, values))

    def measure(self) -> torch.Tensor:
        """Return the values that the runs are judged by, one for each member."""
        problem, population = self.problem, self.population
        has_default_measure = isinstance(problem, SampledProblem) and type(problem).measure is SampledProblem.measure
        if has_default_measure or type(problem).measure is Problem.measure:
            with torch.no_grad():
                values = population.losses(
                    (lambda net: problem.loss_of(net, None)) if isinstance(problem, SampledProblem) else problem.loss
                )
        else:
            values = torch.tensor([problem.measure(population[i]) for i in range(len(population))])
        values = values.double().cpu()
        return torch.where(values.isnan(), math.inf, values)

    def add_frame(self) -> None:
        """Store the positions of the members in the plane."""
        if self.problem.window is not None:
            self.frames.append(self.population.matrix.detach().clone())

    def describe(self, member: int) -> dict[str, Any]:
        """Return the record of one run."""
        meter, end = self.meter, self.meter.ends[member]
        evaluations = end["evaluations"]
        rows = [row for row in meter.history if row[0] < evaluations or row[0] == evaluations == 0]
        history = [[count, share, drop_infinite(best[member])] for count, share, best in rows]
        if evaluations:
            history.append([evaluations, end["seconds"], end["value"]])
        losses = [float(values[member]) for values in meter.losses[:evaluations]]
        record: dict[str, Any] = {
            **end,
            "traceback": "",
            "gradients": evaluations,
            "digest": hashlib.blake2b(struct.pack(f"{len(losses)}d", *losses), digest_size=16).hexdigest(),
            "history": history,
            "stacked": meter.size,
        }
        if self.frames:
            points = [round_values(frame[member]) for frame in self.frames[: end["steps"] + 1]]
            path = [point for at, point in enumerate(points) if at == 0 or point != points[at - 1]]
            record["path"] = thin(path, PATH_POINTS)
        return record
