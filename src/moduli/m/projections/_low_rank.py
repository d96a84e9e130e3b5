"""Links run on low-rank projections of matrices: GaLore, Fira, APOLLO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ...optim import MatrixLink, Module, Need, Objective, Setting
from ...optim import ranges as check
from ._projection import Projection


class _LowRank(MatrixLink, Projection):
    """The links inside see a matrix through `rank` directions of its shorter side, which are renewed now and then.

    Where axes make a parameter a batch of matrices, each has directions of its own; the links inside see a batch, too.
    """

    needs = frozenset({Need.GRADIENT})

    ranges = {check.at_least_one: ("rank", "update_gap"), check.positive: ("scale",), check.above_one: ("growth",)}
    attributes = ("rank", "update_gap", "tensorwise", "growth", "seed", "batch", "matrix")

    rank: int
    update_gap: int
    batch: str | tuple[str, ...] | None = None
    matrix: str | None = None

    @abstractmethod
    def directions(self, matrix: Tensor, state: Any) -> Tensor:
        """Return the directions for a matrix no higher than wide, as columns: (rows, rank)."""

    @abstractmethod
    def expand(self, inner: Tensor, matrix: Tensor, state: Any) -> Tensor:
        """Return the update of a matrix.

        Args:
            inner: The inner links' result for its projection.
            matrix: The matrix, no higher than wide.
            state: The state of its parameter.
        """

    def _learn(self, objective: Objective) -> None:
        for i, (param, update) in enumerate(zip(objective.params, objective.peek_updates(), strict=True)):
            if objective.present is not None and not objective.present[i]:
                continue
            state = self.state[param]
            steps = state["step"] = state.get("step", 0) + 1
            matrix = self._flatten(update, param)
            if matrix is not None and (steps - 1) % self.update_gap == 0 and min(matrix.shape[-2:]) > self.rank:
                state["basis"] = self.directions(matrix, state).contiguous()

    def _run_inside(self, objective: Objective, how: Callable[[Module, Objective], Any]) -> Objective:
        self._given = list(objective.peek_updates())
        try:
            return super()._run_inside(objective, how)
        finally:
            self._given = []

    def prepare(self, params: list[Tensor]) -> list[str]:
        keys = super().prepare(params)
        self._shown = [params[i] for i in self._order]
        self._rows = [self.state[param] for param in self._shown]
        return keys

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        return [
            tensor if "basis" not in row else row["basis"].mH @ cast(Tensor, self._flatten(tensor, param))
            for tensor, param, row in zip(tensors, self._shown, self._rows, strict=True)
        ]

    def _flatten(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        """Return a tensor as a matrix no higher than wide, or as a batch of such; None for a vector."""
        view = self.find_view(param)
        if view is None:
            return _flat_side(tensor)
        blocks = view.split(tensor)
        if len(blocks) > 1:
            name = self.settings.binding.slots.find_name(param)
            raise ValueError(f"{type(self).__name__}: {name!r} is cut into matrices of several sizes: {view}")
        return _flat_side(blocks[0], batched=True)

    def _restore(self, matrix: Tensor, param: Tensor) -> Tensor:
        """Return a result for `_flatten` in the parameter's shape."""
        view = self.find_view(param)
        if view is None:
            tall = param.shape[0] > param[0].numel()
            return (matrix.mT if tall else matrix).reshape(param.shape)
        tall = view.shapes[0][1] > view.shapes[0][2]
        return view.join([matrix.mT if tall else matrix])

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        out = []
        for k, (tensor, row, param) in enumerate(zip(tensors, self._rows, params, strict=True)):
            if "basis" not in row:
                out.append(tensor)
                continue
            matrix = cast(Tensor, self._flatten(self._given[self._order[k]], self._shown[k]))
            expanded = self.expand(tensor, matrix, row) * self.settings[param]["scale"]
            out.append(self._restore(expanded, self._shown[k]).to(param.dtype))
        return out

    def update(self, objective: Objective) -> None:
        """Renew the directions at every n-th step, and let the inner links learn."""
        self._learn(objective)
        super().update(objective)

    def step(self, objective: Objective) -> Objective:
        """Renew the directions at every n-th step, and run the step of the inner links."""
        self._learn(objective)
        return super().step(objective)


def _flat_side(tensor: Tensor, batched: bool = False) -> Tensor | None:
    """Return a tensor as a matrix no higher than wide, in a dtype that can be factorised; None for a vector."""
    if tensor.dim() < 2 or not tensor.numel():
        return None
    matrix = tensor if batched else tensor.flatten(1)
    matrix = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
    return matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix


class GaLore(_LowRank):
    r"""Runs links on the projection of each gradient matrix onto its leading singular vectors.

    With P the first r left singular vectors of the update U at every T-th step (of its shorter side), the links see
    $P^T U$, and $u \leftarrow \alpha P\, n$ of what they return, n. With `Adam` inside, its states are r rows instead of m.
    Matrices whose shorter side is at most r, and vectors, are shown as they are.

    Args:
        modules: The links, `m.Adam()` say.
        rank: How many directions, r.
        update_gap: Steps between two decompositions, T.
        scale: The factor $\alpha$ of projected updates.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.outer(torch.ones(6), torch.ones(4)))
        >>> opt = mo.Optimizer([w], m.GaLore(m.HeavyBall(0.0), rank=1, scale=1.0), m.LR(0.25))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool((w - 0.5).abs().max() < 1e-5)
        True

    References:
        J. Zhao et al., "GaLore: memory-efficient LLM training by gradient low-rank projection", ICML 2024, Algorithm 2.
    """

    rank: int = 128
    update_gap: int = 200
    scale: Setting = 0.25

    def directions(self, matrix: Tensor, state: Any) -> Tensor:
        left = torch.linalg.svd(matrix, full_matrices=False)[0][..., : self.rank]
        # A singular vector's sign is arbitrary; it is fixed, since states of the inner links would change sign with it.
        largest = left.abs().argmax(-2, keepdim=True)
        pivot = left.gather(-2, largest)
        return left * (pivot.conj() / pivot.abs() if pivot.is_complex() else pivot.sign())

    def expand(self, inner: Tensor, matrix: Tensor, state: Any) -> Tensor:
        return state["basis"] @ inner


class Fira(GaLore):
    r"""`GaLore` that also follows the rest of the gradient, scaled as the links scaled what they saw.

    $u \leftarrow \alpha\left(P n + \phi \circ (U - P P^T U)\right)$, where $\phi_j = \|n_j\| / \|P^T U_j\|$ for each column. The
    norm of the second part may grow by a factor $\gamma$ per step at most.

    Args:
        modules: The links, `m.Adam()` say.
        rank: How many directions.
        update_gap: Steps between two decompositions.
        scale: The factor $\alpha$ of updates.
        growth: The limit $\gamma$.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.eye(4))
        >>> opt = mo.Optimizer([w], m.Fira(m.HeavyBall(0.0), rank=2, scale=1.0), m.LR(0.25))
        >>> _ = opt.step(mo.closure(lambda: w.sum()))
        >>> bool((w - torch.eye(4) + 0.25).abs().max() < 1e-5)
        True

    References:
        X. Chen et al., "Fira: can we achieve full-rank training of LLMs under low-rank constraint?", 2024, Algorithm 1.
    """

    growth: float = 1.01

    def expand(self, inner: Tensor, matrix: Tensor, state: Any) -> Tensor:
        seen = state["basis"].mH @ matrix
        rest = (matrix - state["basis"] @ seen) * _ratios(inner, seen)
        return super().expand(inner, matrix, state) + _limit_growth(rest, state, self.growth)


class APOLLO(_LowRank):
    r"""Scales the columns of each gradient matrix as links scaled a random projection of it.

    With S of r rows of normal numbers, variance 1/r, drawn again at every T-th step, the links get $S U$ and return n;
    $u \leftarrow \alpha\, U \operatorname{diag}\!\left(\|n_j\| / \|S U_j\|\right)$, or one ratio for the whole matrix
    (`tensorwise`, APOLLO-Mini with rank 1). The norm of the update may grow by a factor $\gamma$ per step at most.

    Args:
        modules: The links, `m.Adam()` say.
        rank: How many random directions, r.
        update_gap: Steps between two draws, T.
        scale: The factor $\alpha$; for `tensorwise` the paper takes $\sqrt{128}$.
        tensorwise: One ratio for each matrix.
        growth: The limit $\gamma$.
        seed: Draws from a generator of its own.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(6, 4))
        >>> opt = mo.Optimizer([w], m.APOLLO(m.Mul(2.0), rank=2, seed=0), m.LR(0.25))
        >>> _ = opt.step(mo.closure(lambda: w.sum()))
        >>> bool((w - 0.5).abs().max() < 1e-5)
        True

    References:
        H. Zhu et al., "APOLLO: SGD-like memory, AdamW-level performance", MLSys 2025, Algorithm 1.
    """

    rank: int = 256
    update_gap: int = 200
    scale: Setting = 1.0
    tensorwise: bool = False
    growth: float = 1.01
    seed: int | None = None

    def directions(self, matrix: Tensor, state: Any) -> Tensor:
        generator = self.get_generator(matrix.device, self.seed)
        drawn = torch.randn(self.rank, matrix.shape[-2], dtype=matrix.dtype, device=matrix.device, generator=generator)
        return (drawn.mT / self.rank**0.5).expand(*matrix.shape[:-2], -1, -1)

    def expand(self, inner: Tensor, matrix: Tensor, state: Any) -> Tensor:
        seen = state["basis"].mH @ matrix
        if self.tensorwise:
            ratio = _ratios(inner.flatten(-2).unsqueeze(-1), seen.flatten(-2).unsqueeze(-1))
        else:
            ratio = _ratios(inner, seen)
        return _limit_growth(matrix * ratio, state, self.growth)


def _ratios(after: Tensor, before: Tensor) -> Tensor:
    """Return the ratio of norms, column by column; zero for zero columns."""
    above, below = (torch.linalg.vector_norm(t, dim=-2, keepdim=True) for t in (after, before))
    return torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0)


def _limit_growth(matrix: Tensor, state: Any, growth: float) -> Tensor:
    """Return a matrix whose norm is at most `growth` times that of the last step."""
    norm = _measure(matrix)
    before = state.get("norm")
    if before is not None:
        bound = before * growth
        shrunk = matrix * (bound / torch.where(norm > 0, norm, 1.0))[..., None, None]
        matrix = torch.where(((bound > 0) & (norm > bound))[..., None, None], shrunk, matrix)
        norm = _measure(matrix)
    state["norm"] = norm
    return matrix


def _measure(matrix: Tensor) -> Tensor:
    """Return the norm of a matrix, or of each in a batch."""
    if matrix.dim() == 2:
        return torch.linalg.vector_norm(matrix)
    return torch.linalg.vector_norm(matrix, dim=(-2, -1))
