"""Many starts at once: L-BFGS with a line search per start, all vectorised."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._point import Point
from ._result import Result

__all__ = ["minimize_batched"]


def minimize_batched(
    fun: Callable[[Any], Any],
    x0: Any,
    *,
    tol: float | None,
    max_evals: int | None,
    max_steps: int | None,
    history: int = 10,
) -> Result:
    """All starts along the first axis of every leaf; `fun` is of one point, and is vectorised.

    Args:
        fun: The loss of one point.
        x0: Starts in the rows of every leaf.
        tol: The largest component of a start's gradient at its end.
        max_evals: The largest number of vectorised evaluations.
        max_steps: The largest number of steps.
        history: How many pairs are kept.
    """
    began = time.perf_counter()
    point = Point(x0)
    counts = {leaf.shape[0] if leaf.dim() else None for leaf in point.leaves}
    if len(counts) != 1 or None in counts:
        raise ValueError("minimize: with batched=True every tensor of x0 has the starts along its first axis")
    N = point.leaves[0].shape[0]
    sizes = [leaf[0].numel() for leaf in point.leaves]
    shapes = [leaf.shape[1:] for leaf in point.leaves]
    x = torch.cat([leaf.detach().reshape(N, -1) for leaf in point.leaves], 1)
    tol = (1e-8 if x.dtype is torch.float64 else 1e-4) if tol is None else tol
    limit = max_evals if max_evals is not None else 5000
    calls = [0]

    def one(row: Tensor) -> Tensor:
        parts = [piece.view(shape) for piece, shape in zip(torch.split(row, sizes), shapes, strict=True)]
        found = fun(point._form(parts))
        if not isinstance(found, Tensor) or found.dim() != 0:
            raise ValueError("minimize: with batched=True the function takes one point and returns a 0-d tensor")
        return found

    pair = torch.func.vmap(torch.func.grad_and_value(one))

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        g, f = pair(x)
        f = torch.where(torch.isnan(f), torch.full_like(f, float("inf")), f)
        return f.detach(), g.detach()

    f, g = evaluate(x)
    n = x.shape[1]
    S, Y = x.new_zeros(history, N, n), x.new_zeros(history, N, n)
    rho = x.new_zeros(history, N)
    scale = torch.ones_like(f)
    record: list[tuple[int, Any]] = []
    steps, reason = 0, ""
    alive = torch.isfinite(f)
    while True:
        norm = g.abs().amax(1)
        active = alive & (norm > tol)
        if not bool(active.any()):
            reason = "Every start has reached a point where the gradient vanishes, or can get no lower."
            break
        if calls[0] >= limit or (max_steps is not None and steps >= max_steps):
            many = calls[0] >= limit
            reason = f"The limit of {limit if many else max_steps} {'evaluations' if many else 'steps'} was reached."
            break
        q, kept = g.clone(), []
        for i in range(min(steps, history)):
            k = (steps - 1 - i) % history
            a = rho[k] * (S[k] * q).sum(1)
            q = q - a.unsqueeze(1) * Y[k]
            kept.append((k, a))
        q = q * scale.unsqueeze(1)
        for k, a in reversed(kept):
            b = rho[k] * (Y[k] * q).sum(1)
            q = q + (a - b).unsqueeze(1) * S[k]
        slope = -(q * g).sum(1)
        bad = ~(slope < 0) | ~torch.isfinite(slope)
        q = torch.where(bad.unsqueeze(1), g, q)
        slope = torch.where(bad, -(g * g).sum(1), slope)
        t = torch.where(bad | (steps == 0), 1 / q.norm(dim=1).clamp(min=1.0), torch.ones_like(f))
        done = ~active
        new_x, new_f, new_g = x.clone(), f.clone(), g.clone()
        for _ in range(40):
            trial = torch.where(done.unsqueeze(1), new_x, x - t.unsqueeze(1) * q)
            ft, gt = evaluate(trial)
            good = ~done & (ft <= f + 1e-4 * t * slope)
            new_x = torch.where(good.unsqueeze(1), trial, new_x)
            new_f, new_g = torch.where(good, ft, new_f), torch.where(good.unsqueeze(1), gt, new_g)
            done = done | good
            if bool(done.all()) or calls[0] >= limit:
                break
            t = torch.where(done, t, 0.5 * t)
        stuck = active & ~done
        s, y = new_x - x, new_g - g
        sy = (s * y).sum(1)
        use = active & (sy > torch.finfo(x.dtype).eps * s.norm(dim=1) * y.norm(dim=1))
        k = steps % history
        S[k], Y[k] = torch.where(use.unsqueeze(1), s, 0 * s), torch.where(use.unsqueeze(1), y, 0 * y)
        rho[k] = torch.where(use, 1 / torch.where(use, sy, torch.ones_like(sy)), torch.zeros_like(sy))
        scale = torch.where(use, sy / (y * y).sum(1).clamp(min=torch.finfo(x.dtype).tiny), scale)
        # A start that found nothing lower forgets its pairs once; one that is at rest along the gradient has ended.
        rest = stuck & (S.abs().sum((0, 2)) == 0)
        alive = alive & ~rest
        for i in range(history):
            S[i][stuck], Y[i][stuck], rho[i][stuck] = 0, 0, 0
        scale = torch.where(stuck, torch.ones_like(scale), scale)
        x, f, g = new_x, new_f, new_g
        steps += 1
        record.append((calls[0], f.clone()))
    norm = g.abs().amax(1)
    near = norm <= max(tol, torch.finfo(x.dtype).eps ** 0.5 * 10)
    parts = [piece.reshape(N, *shape) for piece, shape in zip(torch.split(x, sizes, 1), shapes, strict=True)]
    return Result(
        point._form([part.clone() for part in parts]),
        f,
        reason,
        bool(near.all()),
        steps,
        calls[0],
        norm,
        time.perf_counter() - began,
        tuple(record),
        "lbfgs",
    )
