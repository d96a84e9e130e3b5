"""Limited-memory BFGS."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...linalg import LBFGSOperator, LinearOperator, ScaledIdentity
from ...optim import Chainable, ChainError, Objective, Optimizer, Transform, describe_params
from .._flat import array, flat, is_plain, mask_absent, size, tensors_of, unflat
from ._memory import PairMemory
from ._of_members import learn_members, multiply_members
from ._pairs import changed, exceeds_array, forget_point

_LOW = (torch.float16, torch.bfloat16)


class LBFGS(Transform):
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

    decides_on_host = True

    members = True
    vector_state = True
    hessian = "matrix"

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
        super().__init__(
            {
                "history_size": history_size,
                "ptol": ptol,
                "ptol_restart": ptol_restart,
                "gtol": gtol,
                "gtol_restart": gtol_restart,
                "sy_tol": sy_tol,
                "scale_first": scale_first,
                "damping": damping,
            },
            update_freq=update_freq,
            inner=inner,
        )

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

    def _memory(self, state: Any, n: int, like: Tensor, history: int) -> PairMemory:
        held: PairMemory | None = self.__dict__.get("_held")
        dtype = like.dtype
        if dtype is not torch.float64 and dtype is not torch.float32:
            dtype = torch.float32 if dtype in _LOW else dtype.to_real()
        if held is None or not held.still(state, n, dtype, history):
            held = self._held = PairMemory(state, n, dtype, like.device, history)
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
        state, setting = states[0], settings[0]
        if is_plain(objective.params):
            memory, s, y, sy, verdict = self._small_pair(objective, state, setting)
        else:
            x, _, s, y, verdict = changed(objective, state, setting["ptol"], setting["gtol"])
            memory = self._memory(state, len(x), x, setting["history_size"])
            sy = None
        if verdict:
            restart = (setting["ptol_restart"] and verdict == "step") or (
                setting["gtol_restart"] and verdict == "gradient"
            )
            if restart or verdict == "new":
                memory.clear()
            return
        if s is None or y is None:
            return
        if setting["damping"] == "powell":
            y, sy = _powell(torch.as_tensor(s), torch.as_tensor(y), self._operator(memory)), None
        if sy is None:
            s, y = (torch.as_tensor(s).numpy(), torch.as_tensor(y).numpy()) if memory.numpy else (s, y)
            sy = (float(s.dot(y)), float(s.dot(s)), float(y.dot(y)))
        along, ss, yy = sy
        if along > setting["sy_tol"] and math.inf > along > memory.eps * math.sqrt(ss * yy):
            memory.add(s, y, along)

    def _small_pair(self, objective: Objective, state: Any, setting: Any) -> tuple[PairMemory, Any, Any, Any, str]:
        """What `changed` finds, as arrays, with the inner products of s and y."""
        params, updates = objective.params, objective.peek_updates()
        x, u = array(params), array(mask_absent(updates, objective.present))
        memory = self._memory(state, x.size, params[0], setting["history_size"])
        same = len(params) == 1 and objective.present is None and updates[0].dtype is params[0].dtype
        memory.observe = (updates[0], u) if same and updates[0].is_contiguous() else None
        held = state.get("x")
        if held is None or held.shape != x.shape or held.dtype is not params[0].dtype:
            state["x"], state["u"] = torch.from_numpy(x.copy()), torch.from_numpy(u.copy())
            return memory, None, None, None, "first" if held is None else "new"
        x_before, u_before = memory.point(state)
        s, y = x - x_before, u - u_before
        x_before[:], u_before[:] = x, u
        ss, yy = float(s.dot(s)), float(y.dot(y))
        verdict = ""
        if not exceeds_array(s, ss, setting["ptol"]):
            verdict = "step"
        elif not exceeds_array(y, yy, setting["gtol"]):
            verdict = "gradient"
        return memory, s, y, (float(s.dot(y)), ss, yy), verdict

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Multiplies by the inverse Hessian of the pairs."""
        if objective.members is not None:
            return multiply_members(objective, states, self.global_state, settings[0])
        state, setting = states[0], settings[0]
        params, updates = objective.params, objective.peek_updates()
        held: PairMemory | None = self.__dict__.get("_held")
        if held is not None and held.slots and held.rows is state.get("rows"):
            seen = held.observe
            if seen is not None and seen[0] is updates[0]:
                # The vector that was just learnt from; the array is a view, so it is that tensor as it is now.
                objective.updates = tensors_of(held.direction(seen[1]), params)
                return objective
        updates = mask_absent(updates, objective.present)
        if is_plain(params) and all(update.dtype is params[0].dtype for update in updates):
            v = array(updates)
            memory = self._memory(state, len(v), params[0], setting["history_size"])
            if memory.slots:
                objective.updates = tensors_of(memory.direction(v), params)
                return objective
        u = flat(updates)
        memory = self._memory(state, len(u), u, setting["history_size"])
        if memory.slots:
            out = torch.from_numpy(memory.direction(u.numpy())) if memory.numpy else memory.direction(u)
            objective.updates = unflat(out, params)
        elif setting["scale_first"]:
            length = float(torch.linalg.vector_norm(u))
            if length > 1 and math.isfinite(length):
                objective.updates = unflat(u / length, params)
        return objective

    def _operator(self, memory: PairMemory) -> LinearOperator:
        if not len(memory):
            return ScaledIdentity(
                memory.rows.shape[1], torch.ones((), dtype=memory.rows.dtype, device=memory.rows.device)
            )
        s, y = memory.ordered()
        return LBFGSOperator(s, y)

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The BFGS matrix of the pairs, in compact form."""
        param = objective.params[0]
        like = flat([param.detach()]).new_empty(size(objective.params))
        return self._operator(self._memory(self.state[param], len(like), like, self.settings[param]["history_size"]))

    def reset_for_online(self) -> None:
        """Forgets the last point; the pairs stay."""
        super().reset_for_online()
        for state in self.state.values():
            forget_point(state)


def _powell(s: Tensor, y: Tensor, B: LinearOperator) -> Tensor:
    Bs = B.matvec(s)
    sBs, sy = float(torch.dot(s, Bs)), float(torch.dot(s, y))
    if sy >= 0.2 * sBs or sBs == sy:
        return y
    theta = 0.8 * sBs / (sBs - sy)
    return theta * y + (1 - theta) * Bs


def _drop_size(part: str) -> str:
    return part.rpartition(":")[0]
