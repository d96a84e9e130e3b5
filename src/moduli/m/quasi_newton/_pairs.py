"""Differences of points and gradients, and the links that use one, a few, or drawn ones.

* Pairs of steps and changes of the update, for links over all parameters concatenated.
* The gradient where an exact line search would have ended.
* Limited-memory symmetric rank-one updates.
* Spall's second-order stochastic approximation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import Dense, LinearOperator, LowRankPlusDiagonal, ScaledIdentity
from ...optim import Chainable, Module, Need, Objective, sample_like
from ...optim import ranges as check
from .._vectors import HessianLink, VectorLink, flat, gather_update, is_small, vector_like
from ..second_order._newton import shortest


class _PairLink(VectorLink):
    """A link that learns from pairs, the differences of successive points and updates."""

    def reset_for_online(self) -> None:
        """Clear the last point, so that no pair is formed across an evaluation of another function."""
        super().reset_for_online()
        self.clear_state_keys("x", "u", "loss")


def take_pair(objective: Objective, state: Any, ptol: float, gtol: float) -> tuple[Tensor, Any, Any, str]:
    """Return (x, s, y, verdict) of all parameters; s and y are None at first, and the verdict says why they are of no use.

    They are arrays if the vector is small and tensors otherwise; the verdict is "first" or "new" if no matching point was
    stored, "step" or "gradient" if a difference is within its threshold, and "" for a pair.

    Args:
        objective: The objective.
        state: Where the last point is stored.
        ptol: The threshold of the step.
        gtol: The threshold of the difference of gradients.
    """
    x, u = flat(objective.params), gather_update(objective)
    before: Tensor | None = state.get("x")
    if before is None or before.shape != x.shape or before.dtype != x.dtype:
        state["x"], state["u"] = x.clone(), u.clone()
        return x, None, None, "first" if before is None else "new"
    vectors: list[Any] = [x, u, before, state["u"]]
    if is_small(x.numel(), x.device):
        vectors = [tensor.numpy() for tensor in vectors]
    s, y = vectors[0] - vectors[2], vectors[1] - vectors[3]
    vectors[2][:], vectors[3][:] = vectors[0], vectors[1]
    verdict = "" if _exceeds(y, gtol) else "gradient"
    return x, s, y, verdict if _exceeds(s, ptol) else "step"


def take_tensors(
    link: Module, objective: Objective, state: Any, setting: Any
) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """Return `take_pair`'s result as tensors, and count pairs that are of no use as skipped; s and y are None then.

    The pair is divided by the largest component of s: the same curvature, and no power of s underflows.

    Args:
        link: The link that counts.
        objective: The objective.
        state: Where the last point is stored.
        setting: The settings: ptol and gtol.
    """
    x, s, y, verdict = take_pair(objective, state, setting["ptol"], setting["gtol"])
    if verdict in ("step", "gradient"):
        count_skipped(link, objective, state)
    if verdict:
        return x, None, None, verdict
    s, y = torch.as_tensor(s), torch.as_tensor(y)
    largest = torch.linalg.vector_norm(s, float("inf"))
    return x, s / largest, y / largest, verdict


def count_skipped(link: Module, objective: Objective, state: Any) -> None:
    """Count a pair that carries no information, and publish the number of them in `attrs`.

    Args:
        link: The link that counts.
        objective: The objective.
        state: Where the number is stored.
    """
    state["skipped"] = state.get("skipped", 0) + 1
    objective.attrs[f"{type(link).__name__}.skipped_pairs"] = state["skipped"]


def _exceeds(vector: Any, tol: float) -> bool:
    """Return whether the largest component of an array or tensor is above a threshold, and all are finite."""
    if tol * tol * len(vector) < float(vector.dot(vector)) < float("inf"):
        return True  # the mean square is above the threshold's
    return len(vector) > 0 and tol < float(abs(vector).max()) < float("inf")


class GradientCorrection(_PairLink):
    r"""Corrects the update as if the last line search had been exact: $u \leftarrow u - y\,\frac{s^Tu}{s^Ty}$.

    With s the last step and y the change of the update, the result has no part left along s. Use it as `inner` of a
    quasi-Newton link, whose theory supposes that.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DFP(inner=m.GradientCorrection()), m.Backtracking())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        S. Hoshino, "A formulation of variable metric methods", J. Inst. Maths Applics 10 (1972).
    """

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        _, s, y, _ = take_tensors(self, objective, state, {"ptol": 0.0, "gtol": 0.0})
        state.pop("s", None)
        if s is None or y is None:
            return
        if torch.finfo(s.dtype).tiny < torch.dot(s, y).item() < float("inf"):
            state["s"], state["y"] = s, y
        else:
            count_skipped(self, objective, state)

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        if "s" not in state:
            return None
        s, y = state["s"], state["y"]
        return u - y * (torch.dot(s, u.to(s.dtype)) / torch.dot(s, y))


class LSR1(_PairLink, HessianLink):
    r"""Multiplies the update by the SR1 matrix of the last pairs, started from $\gamma I$.

    $H = \gamma I + Z^T (R + R^T - D - \gamma Y Y^T)^{-1} Z,\ Z = S - \gamma Y$ (pairs in rows), with $D$ the diagonal and
    $R$ the upper part of $S Y^T$. It may be indefinite, as the Hessian may: best in a trust region.

    Args:
        history_size: How many pairs are kept.
        init_scale: $\gamma$.
        ptol: A step whose largest component is not above this gives no pair.
        gtol: A change of the gradient whose largest component is not above this gives no pair.
        ptol_restart: Forget all pairs after a step that gives none.
        gtol_restart: Forget all pairs after a change of the gradient that gives none.
        scale_first: Before there is a pair, scale the update to a length of at most one.
        update_freq: Take in a pair at every n-th step only.
        inner: Links between learning and the product.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.TrustCG(m.LSR1()))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-4)
        True

    References:
        R. H. Byrd, J. Nocedal, R. B. Schnabel, "Representations of quasi-Newton matrices", Math. Programming 63 (1994),
        theorem 5.1.
    """

    ranges = {check.at_least_one: ("history_size",), check.once(check.positive): ("init_scale",)}

    history_size: int = 10
    init_scale: float = 1.0
    ptol: float = 1e-32
    gtol: float = 1e-32
    ptol_restart: bool = False
    gtol_restart: bool = False
    scale_first: bool = False
    update_freq: int = 1
    inner: Chainable | None = None

    def _times(self, state: Any, v: Tensor, gamma: float) -> Tensor:
        """Return H v."""
        if not state.get("s"):
            return gamma * v
        S, Y = torch.stack(state["s"]), torch.stack(state["y"])
        Z, SY = S - gamma * Y, S @ Y.T
        M = SY.triu() + SY.triu(1).T - gamma * (Y @ Y.T)
        inner: Tensor = torch.linalg.pinv(M, hermitian=True) @ (Z @ v)
        return gamma * v + Z.T @ inner

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        x, s, y, verdict = take_tensors(self, objective, state, setting)
        steps = state.setdefault("s", [])
        other = state.setdefault("y", [])
        restart = (verdict == "step" and setting["ptol_restart"]) or (verdict == "gradient" and setting["gtol_restart"])
        if restart or (steps and steps[0].shape != x.shape):
            steps.clear()
            other.clear()
        if s is None or y is None:
            return
        # The matrix does not depend on the lengths of pairs, but its small matrix is better conditioned for equal lengths.
        z = s - self._times(state, y, float(setting["init_scale"]))
        sizes = float(torch.linalg.vector_norm(z)) * float(torch.linalg.vector_norm(y))
        limits = torch.finfo(s.dtype)
        if limits.max > abs(torch.dot(z, y).item()) > max(max(1e-8, limits.eps) * sizes, limits.tiny):
            steps.append(s)
            other.append(y)
            del steps[: -setting["history_size"]], other[: -setting["history_size"]]
        else:
            count_skipped(self, objective, state)

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        out = self._times(state, u, float(setting["init_scale"]))
        if setting["scale_first"] and not state.get("s"):
            length = float(torch.linalg.vector_norm(out))
            out = out / length if 1 < length < float("inf") else out
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        sigma = 1 / float(setting["init_scale"])
        diag = vector_like(objective).fill_(sigma)
        if not state.get("s"):
            return ScaledIdentity(len(diag), diag.new_tensor(sigma))
        S, Y = torch.stack(state["s"]), torch.stack(state["y"])
        Z, SY = Y - sigma * S, S @ Y.T
        M = SY.tril() + SY.tril(-1).T - sigma * (S @ S.T)
        core = torch.linalg.pinv(M, hermitian=True)
        return LowRankPlusDiagonal(diag, Z.T, 0.5 * (core + core.T))


class SG2(HessianLink):
    r"""Estimates the Hessian from differences of gradients along random signs $\Delta$, and solves with it.

    $\hat H = \tfrac12 (A + A^T),\ A = \Delta^{-1}\,(g(x + h\Delta) - g(x - h\Delta))^T / 2h$, averaged over all steps
    (or exponentially). In the first steps the update is divided by the mean of the diagonal instead. Behind `SPSA` the
    gradients are made of values, which is the method called 2SPSA.

    Args:
        n_samples: Directions per step.
        n_first_step_samples: Directions in the first step.
        start_step: The step from which systems are solved.
        beta: Memory of an exponential mean; None for the mean of all.
        damping: Added to the diagonal.
        h: The length of the differences.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        update_freq: Learn at every n-th step only.
        inner: Links between learning and the solution.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SG2(seed=0), m.Backtracking())
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. C. Spall, "Adaptive stochastic approximation by the simultaneous perturbation method", IEEE Trans. Automatic
        Control 45 (2000).
    """

    needs = frozenset({Need.GRADIENT, Need.CLOSURE})
    real_only = True
    required_state = "H"

    ranges = {check.at_least_one: ("n_samples", "n_first_step_samples"), check.once(check.positive): ("h",)}
    attributes = ("seed",)

    n_samples: int = 1
    n_first_step_samples: int = 10
    start_step: int = 10
    beta: float | None = None
    damping: float = 1e-4
    h: float = 1e-2
    seed: int | None = None
    update_freq: int = 1
    inner: Chainable | None = None

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        objective.get_updates()
        like = flat(objective.params)
        k, h = state.get("step", 0), setting["h"]
        count = setting["n_first_step_samples"] if k == 0 else setting["n_samples"]
        total = torch.zeros(like.numel(), like.numel(), dtype=like.dtype, device=like.device)
        generator = self.get_generator(like.device, self.seed)
        for _ in range(count):
            signs = sample_like(objective.params, "rademacher", generator=generator)
            difference = self._gradient(objective, signs, h) - self._gradient(objective, signs, -h)
            total += torch.outer(1 / flat(signs), difference / (2 * h))
        H = 0.5 * (total + total.T) / count
        mean: Tensor | None = state.get("H")
        if mean is None or mean.shape != H.shape:
            state["H"], state["step"] = H, 1
            return
        beta = setting["beta"]
        weight = 1 / (k + 1) if beta is None else 1 - beta
        state["H"] = torch.lerp(mean, H, weight)
        state["step"] = k + 1

    def _gradient(self, objective: Objective, signs: list[Tensor], h: float) -> Tensor:
        with objective.moved() as start:
            objective.move_to([x + h * z for x, z in zip(start, signs, strict=True)])
            return flat(objective.get_loss_grads(at_x0=False)[1]).clone()

    def _damp(self, state: Any, setting: Any) -> Tensor:
        H: Tensor = state["H"].clone()
        H.diagonal().add_(setting["damping"])
        return H

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        H = self._damp(state, setting)
        if state["step"] > setting["start_step"]:
            return shortest(H, u)
        mean = float(H.diagonal().abs().sum())
        return u / mean if mean > 0 else u.clone()

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        return Dense(self._damp(state, setting), symmetric=True)
