"""Links that stop training."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from .. import kernels
from ..optim import Module, Need, Objective
from ..optim import ranges as check
from ._measures import measure_move

__all__ = [
    "TerminateAfterNEvaluations",
    "TerminateAfterNSeconds",
    "TerminateAfterNSteps",
    "TerminateAll",
    "TerminateAny",
    "TerminateByGradientNorm",
    "TerminateByUpdateNorm",
    "TerminateNever",
    "TerminateOnLossReached",
    "TerminateOnNoImprovement",
    "TerminationCriteria",
    "make_termination_criteria",
]


class TerminationCriteria(Module):
    """A condition that, met at n steps in a row, ends the training: `optimizer.should_terminate` becomes True.

    Override `met`, which returns a sentence or None. Several criteria in a chain are an "or"; the optimizer keeps their
    sentences in `reasons`.

    Args:
        defaults: Settings.
        n: How many steps in a row.
    """

    shared_settings = True
    needs = frozenset()

    def __init__(self, defaults: dict[str, Any] | None = None, n: int = 1) -> None:
        check.at_least_one(type(self).__name__, "n", n)
        super().__init__(defaults)
        self.n = n

    @abstractmethod
    def met(self, objective: Objective) -> str | None:
        """Return the reason to stop, or None."""

    def check_now(self, objective: Objective) -> str | None:
        """Return the reason to stop after n steps in a row with the condition met, or None."""
        reason = self.met(objective)
        hits = self.global_state.get("hits", 0) + 1 if reason is not None else 0
        self.global_state["hits"] = hits
        return reason if reason is not None and hits >= self.n else None

    def update(self, objective: Objective) -> None:
        """Check the condition, and ask to stop after n steps in a row."""
        reason = self.check_now(objective)
        if reason is not None:
            objective.terminate(reason)

    def apply(self, objective: Objective) -> Objective:
        """Return the objective unmodified."""
        return objective


class TerminateAfterNSteps(TerminationCriteria):
    """Ends with the given step.

    Args:
        steps: How many steps.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = mo.Optimizer([w], m.TerminateAfterNSteps(2), m.LR(0.1))
        >>> while not opt.should_terminate:
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.current_step, opt.reasons
        (2, ['2 steps were made'])
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def met(self, objective: Objective) -> str | None:
        done = self.increment_counter("steps", 1)
        return f"{self.steps} steps were made" if done >= self.steps else None


class TerminateAfterNEvaluations(TerminationCriteria):
    """Ends when the closure has been called so many times.

    Args:
        maxevals: How many evaluations.

    Example:
        >>> from moduli import m
        >>> m.TerminateAfterNEvaluations(100)
        TerminateAfterNEvaluations()
    """

    def __init__(self, maxevals: int) -> None:
        super().__init__()
        self.maxevals = maxevals

    def met(self, objective: Objective) -> str | None:
        before = 0 if objective.modular is None else objective.modular.num_evaluations
        done = before + (1 if objective.evaluator is None else objective.evaluator.count)
        return f"{self.maxevals} evaluations were made" if done >= self.maxevals else None


class TerminateAfterNSeconds(TerminationCriteria):
    """Ends when so much time has passed since the first step.

    Args:
        seconds: How long.
        sec_fn: The clock.

    Example:
        >>> from moduli import m
        >>> m.TerminateAfterNSeconds(60.0).seconds
        60.0
    """

    def __init__(self, seconds: float, *, sec_fn: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.seconds = seconds
        self.sec_fn = sec_fn

    def met(self, objective: Objective) -> str | None:
        now = self.sec_fn()
        # The elapsed time is saved, not the clock: a resumed run continues counting.
        spent = self.global_state.get("spent", 0.0) + now - getattr(self, "_last", now)
        self._last, self.global_state["spent"] = now, spent
        return f"{self.seconds:g} seconds have passed" if spent >= self.seconds else None


class TerminateByGradientNorm(TerminationCriteria):
    r"""Ends when $\|\nabla f\| \le$ tol at n steps in a row.

    Args:
        tol: The size.
        n: How many steps in a row.
        ord: Which norm: 1, 2 or infinity.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> opt = mo.Optimizer([w], m.TerminateByGradientNorm(1e-6, n=1), m.LR(0.1))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.reasons
        ['the gradient has norm 0, at most 1e-06']
    """

    decides_on_host = True

    needs = frozenset({Need.GRADIENT})

    def __init__(self, tol: float = 1e-8, *, n: int = 3, ord: float = 2) -> None:
        super().__init__({"tol": tol, "ord": ord}, n=n)

    def met(self, objective: Objective) -> str | None:
        setting = self.settings[objective.params[0]]
        size = float(kernels.norm(objective.get_grads(), setting["ord"]))
        return f"the gradient has norm {size:g}, at most {setting['tol']:g}" if size <= setting["tol"] else None


class TerminateByUpdateNorm(TerminationCriteria):
    r"""Ends when the parameters moved by at most tol at n steps in a row.

    Args:
        tol: The size of the move.
        n: How many steps in a row.
        ord: Which norm: 1, 2 or infinity.

    Example:
        >>> from moduli import m
        >>> m.TerminateByUpdateNorm(1e-6).n
        3
    """

    points = ("previous",)
    decides_on_host = True

    def __init__(self, tol: float = 1e-8, *, n: int = 3, ord: float = 2) -> None:
        super().__init__({"tol": tol, "ord": ord}, n=n)

    def met(self, objective: Objective) -> str | None:
        setting = self.settings[objective.params[0]]
        size = measure_move(self, objective.params, setting["ord"])
        if size is None or size > setting["tol"]:
            return None
        return f"the parameters moved by {size:g}, at most {setting['tol']:g}"


class TerminateOnNoImprovement(TerminationCriteria):
    """Ends when the loss has not become smaller by more than tol for n steps.

    Args:
        tol: The least improvement; None for the smallest that the dtype can show.
        n: How many steps.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = mo.Optimizer([w], m.TerminateOnNoImprovement(n=2), m.LR(0.0))
        >>> while not opt.should_terminate:
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.current_step
        3
    """

    decides_on_host = True

    needs = frozenset({Need.GRADIENT, Need.LOSS})

    def __init__(self, tol: float | None = None, *, n: int = 10) -> None:
        super().__init__({"tol": tol}, n=n)

    def met(self, objective: Objective) -> str | None:
        loss = objective.get_loss(backward=True)
        tol = self.settings[objective.params[0]]["tol"]
        tol = 2 * torch.finfo(loss.dtype).tiny if tol is None else tol
        best = self.global_state.get("best")
        if best is None or bool(best - loss > tol):
            self.global_state["best"] = loss.clone()
            return None
        return f"the loss has not improved for {self.n} steps"


class TerminateOnLossReached(TerminationCriteria):
    """Ends when the loss is at most the given value.

    Args:
        value: The loss to reach.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> opt = mo.Optimizer([w], m.TerminateOnLossReached(0.5), m.LR(0.1))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.reasons
        ['the loss is 0, at most 0.5']
    """

    decides_on_host = True

    needs = frozenset({Need.GRADIENT, Need.LOSS})

    def __init__(self, value: float) -> None:
        super().__init__({"value": value})

    def met(self, objective: Objective) -> str | None:
        loss = float(objective.get_loss(backward=True))
        value = self.settings[objective.params[0]]["value"]
        return f"the loss is {loss:g}, at most {value:g}" if loss <= value else None


class TerminateNever(TerminationCriteria):
    """Never ends; a placeholder.

    Example:
        >>> from moduli import m
        >>> m.TerminateNever()
        TerminateNever()
    """

    def met(self, objective: Objective) -> str | None:
        return None


class _Several(TerminationCriteria):
    def __init__(self, *criteria: TerminationCriteria) -> None:
        super().__init__()
        for criterion in criteria:
            if not isinstance(criterion, TerminationCriteria):
                raise TypeError(f"{type(self).__name__} takes criteria, got {type(criterion).__name__}")
        self.set_children_sequence(criteria, prefix="criterion_")

    def _reasons(self, objective: Objective) -> list[str | None]:
        # Every criterion is checked at every step, with its own patience.
        children = self.get_children_sequence("criterion_")
        return [child.check_now(objective) for child in children if isinstance(child, TerminationCriteria)]


class TerminateAny(_Several):
    """Ends when one of several criteria, each with its own patience, is met.

    Args:
        *criteria: The criteria.

    Example:
        >>> from moduli import m
        >>> len(m.TerminateAny(m.TerminateAfterNSteps(5), m.TerminateOnLossReached(0.0)).children)
        2
    """

    def met(self, objective: Objective) -> str | None:
        reasons = [reason for reason in self._reasons(objective) if reason is not None]
        return " and ".join(reasons) if reasons else None


class TerminateAll(_Several):
    """Ends when all of several criteria, each with its own patience, are met.

    Args:
        *criteria: The criteria.

    Example:
        >>> from moduli import m
        >>> len(m.TerminateAll(m.TerminateAfterNSteps(5), m.TerminateOnLossReached(0.0)).children)
        2
    """

    def met(self, objective: Objective) -> str | None:
        reasons = self._reasons(objective)
        return " and ".join(str(reason) for reason in reasons) if reasons and None not in reasons else None


def make_termination_criteria(
    ftol: float | None = None,
    gtol: float | None = None,
    stol: float | None = None,
    maxiter: int | None = None,
    maxeval: int | None = None,
    maxsec: float | None = None,
    target_loss: float | None = None,
    extra: list[TerminationCriteria] | None = None,
    n: int = 3,
) -> TerminationCriteria:
    """The usual criteria as one: whichever is met first.

    Args:
        ftol: Least improvement of the loss.
        gtol: Size of the gradient.
        stol: Size of a move.
        maxiter: Number of steps.
        maxeval: Number of evaluations.
        maxsec: Seconds.
        target_loss: A loss to reach.
        extra: More criteria.
        n: How many steps in a row, for the first three.

    Example:
        >>> from moduli import m
        >>> type(m.make_termination_criteria(gtol=1e-6, maxiter=100)).__name__
        'TerminateAny'
    """
    criteria: list[TerminationCriteria] = []
    criteria += [] if ftol is None else [TerminateOnNoImprovement(ftol, n=n)]
    criteria += [] if gtol is None else [TerminateByGradientNorm(gtol, n=n)]
    criteria += [] if stol is None else [TerminateByUpdateNorm(stol, n=n)]
    criteria += [] if maxiter is None else [TerminateAfterNSteps(maxiter)]
    criteria += [] if maxeval is None else [TerminateAfterNEvaluations(maxeval)]
    criteria += [] if maxsec is None else [TerminateAfterNSeconds(maxsec)]
    criteria += [] if target_loss is None else [TerminateOnLossReached(target_loss)]
    criteria += extra or []
    return criteria[0] if len(criteria) == 1 else TerminateAny(*criteria) if criteria else TerminateNever()
