"""Limited-memory BFGS."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...linalg import LBFGSOperator, LinearOperator, ScaledIdentity
from ...optim import Chainable, ChainError, Objective, Optimizer, describe_params
from .._checks import collect_settings
from .._vector_link import HessianLink, vector_like
from ._memory import PairMemory
from ._of_members import learn_members, multiply_members
from ._pairs import PairLink, take_pair


class LBFGS(PairLink, HessianLink):
    r"""Multiplies the update by the BFGS matrix of the last pairs $s = x - x_-$, $y = u - u_-$.

    With $\gamma = s^Ty / y^Ty$ of the newest pair, $D$ the diagonal and $R$ the upper part of $S Y^T$ (pairs in rows),

    $H u = \gamma u + S^T R^{-T}\big((D + \gamma Y Y^T) R^{-1} S u - \gamma Y u\big) - \gamma Y^T R^{-1} S u$.

    This equals the two-loop recursion, in two products with one buffer. Follow it with a line search. Members of a
    population have pairs of their own.

    Args:
        history_size: How many pairs are kept.
        ptol: A step whose largest component is not above this gives no pair.
        ptol_restart: Forget all pairs after such a step.
        gtol: A change of the gradient whose largest component is not above this gives no pair.
        gtol_restart: Forget all pairs after such a change.
        sy_tol: A pair is kept where $s^Ty$ exceeds this, and rounding.
        scale_first: Before there is a pair, scale the update to a length of at most one.
        update_freq: Take in a pair at every n-th step only.
        damping: "powell" mixes y with Bs until $s^Ty \ge 0.2\,s^TBs$, so that no pair is lost.
        inner: Links that transform the update after the pair was learnt and before it is multiplied.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
        >>> for _ in range(15):
        ...     _ = opt.step(mo.closure(lambda: (w**4).sum() + (w**2).sum(), fixed=True))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        J. Nocedal, "Updating quasi-Newton matrices with limited storage", Math. Comp. 35 (1980); R. H. Byrd, J. Nocedal,
        R. B. Schnabel, "Representations of quasi-Newton matrices", Math. Programming 63 (1994), theorem 2.2; M. J. D.
        Powell, "Algorithms for nonlinear constraints that use Lagrangian functions", Math. Programming 14 (1978).
    """

    members = True

    def __init__(
        self,
        *,
        history_size: int = 10,
        ptol: float = 1e-32,
        ptol_restart: bool = False,
        gtol: float = 1e-32,
        gtol_restart: bool = False,
        sy_tol: float = 1e-32,
        scale_first: bool = True,
        update_freq: int = 1,
        damping: str | None = None,
        inner: Chainable | None = None,
    ) -> None:
        if not isinstance(history_size, int) or history_size < 1:
            raise ValueError(f"LBFGS: history_size is {history_size!r}; keep at least one pair")
        if damping not in (None, "powell"):
            raise ValueError(f"LBFGS: damping is {damping!r}; it is None or 'powell'")
        settings = collect_settings(locals(), "update_freq", "inner")
        super().__init__(settings, update_freq=update_freq, inner=inner)

    def attached(self, optimizer: Optimizer) -> None:
        """For a population the pairs of all members are kept with each parameter."""
        if optimizer.binding.members is None:
            return
        if self.defaults["damping"] is not None or self.children:
            raise ChainError(
                "LBFGS of a population has neither damping nor inner links: leave them out, or train each model by itself"
            )
        self.vector_state = False

    def _follow_members(self, params: list[Tensor]) -> None:
        binding = self.settings.binding
        here = sorted(describe_params(params, {} if binding is None else binding.names))
        known = self.global_state.get("members of")
        if known != here:
            # Sizes are those of all members in a process, of which a checkpoint may come from another number.
            if known is not None and [_drop_size(part) for part in known] != [_drop_size(part) for part in here]:
                self.reset()
            self.global_state["members of"] = here

    def _memory(self, state: Any, like: Tensor, setting: Any) -> PairMemory:
        held: PairMemory | None = self.__dict__.get("_held")
        if held is None or not held.still(state, like, setting["history_size"]):
            held = self._held = PairMemory(state, like, setting["history_size"])
        return held

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept.pop("_held", None)
        return kept

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Takes in the pair of the last step."""
        if objective.members is not None:
            self._follow_members(objective.params)
            states = [self.state[param] for param in objective.params]
            learn_members(objective, states, self.global_state, settings[0])
            return
        self.learn_vector(objective, states[0], settings[0])

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Takes in the pair of the last step of one model."""
        x, s, y, verdict = take_pair(objective, state, setting["ptol"], setting["gtol"])
        memory = self._memory(state, x, setting)
        if verdict:
            restart = {"new": True, "step": setting["ptol_restart"], "gradient": setting["gtol_restart"]}
            if restart.get(verdict):
                memory.clear()
            return
        if setting["damping"] == "powell":
            damped = _powell(torch.as_tensor(s), torch.as_tensor(y), self.operator(objective, state, setting))
            y = damped.numpy() if memory.numpy else damped
        along, size = float(s.dot(y)), math.sqrt(float(s.dot(s)) * float(y.dot(y)))
        if along > setting["sy_tol"] and math.inf > along > memory.eps * size:
            memory.add(s, y, along)

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Multiplies by the inverse Hessian of the pairs."""
        if objective.members is not None:
            return multiply_members(objective, states, self.global_state, settings[0])
        return super().apply_states(objective, states, settings)

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        """Multiplies the update of one model."""
        memory = self._memory(state, u, setting)
        if memory.slots:
            return torch.from_numpy(memory.direction(u.numpy())) if memory.numpy else memory.direction(u)
        length = float(torch.linalg.vector_norm(u)) if setting["scale_first"] else 0.0
        return u / length if 1 < length < math.inf else None

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The BFGS matrix of the pairs, in compact form."""
        like = vector_like(objective)
        memory = self._memory(state, like, setting)
        return LBFGSOperator(*memory.ordered()) if len(memory) else ScaledIdentity(len(like), like.new_ones(()))


def _powell(s: Tensor, y: Tensor, B: LinearOperator) -> Tensor:
    Bs = B.matvec(s)
    sBs, sy = float(torch.dot(s, Bs)), float(torch.dot(s, y))
    if sy >= 0.2 * sBs or sBs == sy:
        return y
    theta = 0.8 * sBs / (sBs - sy)
    return theta * y + (1 - theta) * Bs


def _drop_size(part: str) -> str:
    return part.rpartition(":")[0]
