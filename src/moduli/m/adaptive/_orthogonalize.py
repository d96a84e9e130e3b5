"""Orthogonalised and normalised matrices.

* Orthogonalised updates, the core of Muon.
* Linear minimisation oracles: the steepest direction in a norm. Scion's links.
* Rows of orthogonalised updates brought to one size: NorMuon.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor

from ..._search_ranges import UNIT_STEPS
from ...optim import MatrixTransform, Setting
from ...optim import ranges as check
from ._polar import Method, orthogonalize


class Orthogonalize(MatrixTransform):
    r"""Replaces each matrix by the nearest one with orthonormal rows or columns, $U \Sigma V^H \mapsto U V^H$.

    Muon is momentum, then this (`presets.muon`). Tensors with fewer than two axes longer than one are left as they are.

    Args:
        adjust_lr: Multiply by $0.2 \sqrt{\max(\text{rows}, \text{columns})}$, so that a step has the size of Adam's and
            step sizes carry over.
        dual_norm_correction: Multiply by $\langle u, U V^H\rangle$, the nuclear norm of the update: steepest descent in
            the spectral norm.
        method: "newtonschulz" (a quintic iteration, singular values end between 0.7 and 1.2), "polar_express" (or
            "polarexpress", the best quintic for each iteration), "svd" and "eigh" (exact), or "qr" (orthonormal, but not
            the nearest).
        steps: Iterations of the first two methods.
        dtype: "bfloat16" multiplies in bfloat16 in the first two methods, which GPUs do many times faster, with singular values
            that are off by a percent; None in float32, or in float64 for float64.
        flatten: A tensor with more than two axes is the matrix of its first axis by all others, a convolution's
            (out, in * height * width); False: a batch of matrices.
        channel_first: In a batch, whether the first two axes are the matrix; False: the last two.
        orthogonalize: False leaves tensors as they are; meant for groups of parameters.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> u = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
        >>> optim.step_tensors(m.Orthogonalize(method="svd"), [u])
        [tensor([[1., 0.],
                [0., 1.]])]

    References:
        K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
        J. Liu et al., "Muon is scalable for LLM training", 2025 (adjust_lr).
        N. Amsel, D. Persson, C. Musco, R. M. Gower, "The Polar Express", 2025.
        J. Bernstein, L. Newhouse, "Old optimizer, new norm: an anthology", 2024 (dual norm).
    """

    search_ranges = {"lr": UNIT_STEPS}

    differentiable = True
    capturable = True
    ranges = {check.at_least_one: ("steps",)}

    adjust_lr: bool = False
    dual_norm_correction: bool = False
    method: Method = "newtonschulz"
    steps: int = 5
    dtype: Literal["bfloat16"] | None = None
    flatten: bool = True
    channel_first: bool = True
    orthogonalize: bool = True

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        x = as_matrix(tensor, setting["flatten"], setting["channel_first"])
        if not setting["orthogonalize"] or x is None:
            return tensor
        dtype = torch.bfloat16 if setting["dtype"] == "bfloat16" else None
        out = orthogonalize(x, setting["method"], setting["steps"], dtype)
        if setting["dual_norm_correction"]:
            out = out * ((x.conj() * out).real if x.is_complex() else x * out).sum((-2, -1), keepdim=True)
        if setting["adjust_lr"]:
            out = out * (0.2 * max(x.shape[-2:]) ** 0.5)
        return from_matrix(out, tensor, setting["flatten"], setting["channel_first"])


def as_matrix(tensor: Tensor, flatten: bool = True, channel_first: bool = True) -> Tensor | None:
    """Return a tensor as a matrix, or as a batch of matrices in the last two axes; None if it is a vector.

    Args:
        tensor: The tensor.
        flatten: All axes after the first become the columns of one matrix.
        channel_first: The first two axes are those of matrices, instead of the last two.
    """
    if tensor.dim() < 2 or not tensor.numel():
        return None
    x = tensor
    if tensor.dim() > 2:
        if flatten:
            x = tensor.flatten(1)
        elif channel_first:
            x = tensor.movedim((0, 1), (-2, -1))
    return x if min(x.shape[-2:]) > 1 else None


def from_matrix(matrix: Tensor, like: Tensor, flatten: bool = True, channel_first: bool = True) -> Tensor:
    """Return a result for `as_matrix` in the tensor's shape.

    Args:
        matrix: The result.
        like: The tensor.
        flatten: As for `as_matrix`.
        channel_first: As for `as_matrix`.
    """
    if like.dim() == 2 or flatten or not channel_first:
        return matrix.reshape(like.shape)
    return matrix.movedim((-2, -1), (0, 1)).contiguous()


class DualNormCorrection(MatrixTransform):
    r"""Multiplies each matrix of the update by its inner product with the gradient, $U \leftarrow \langle G, U\rangle U$.

    After `Orthogonalize` that is the nuclear norm of the gradient, so that the step is steepest descent in the spectral norm
    with a size of its own. Tensors that are no matrices are left as they are.

    Args:
        flatten: A tensor with more than two axes is the matrix of its first axis by all others; False: a batch.
        channel_first: In a batch, whether the first two axes are the matrix; False: the last two.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> g = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> optim.step_tensors([m.Orthogonalize(method="svd"), m.DualNormCorrection()], [g.clone()], grads=[g])
        [tensor([[4., 0.],
                [0., 4.]])]

    References:
        J. Bernstein, L. Newhouse, "Old optimizer, new norm: an anthology", 2024.
    """

    uses_params = True
    differentiable = True
    capturable = True
    uses_grad = True

    flatten: bool = True
    channel_first: bool = True

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        how = (setting["flatten"], setting["channel_first"])
        x = as_matrix(tensor, *how)
        g = None if grad is None else as_matrix(grad, *how)
        if x is None or g is None:
            return tensor
        product = (g.conj() * x).real if x.is_complex() else g * x
        return from_matrix(x * product.sum((-2, -1), keepdim=True), tensor, *how)


class MuonAdjustLR(MatrixTransform):
    r"""Multiplies each matrix of the update by $0.2\,\alpha\sqrt{\max(\text{rows}, \text{columns})}$.

    An orthogonal matrix then has the size of a step of Adam, so that step sizes carry over; the same as
    `Orthogonalize(adjust_lr=True)`, in a place of its own. Tensors that are no matrices are left as they are.

    Args:
        alpha: A factor.
        flatten: A tensor with more than two axes is the matrix of its first axis by all others; False: a batch.
        channel_first: In a batch, whether the first two axes are the matrix; False: the last two.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.MuonAdjustLR(), [torch.eye(4)])[0].diagonal()
        tensor([0.4000, 0.4000, 0.4000, 0.4000])

    References:
        J. Liu et al., "Muon is scalable for LLM training", 2025.
    """

    differentiable = True
    capturable = True

    alpha: float = 1.0
    flatten: bool = True
    channel_first: bool = True

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        x = as_matrix(tensor, setting["flatten"], setting["channel_first"])
        return tensor if x is None else tensor * (0.2 * setting["alpha"] * max(x.shape[-2:]) ** 0.5)


class LMO(MatrixTransform):
    r"""Replaces the update by the point of a norm's ball that it points to.

    $u \leftarrow \rho\,\arg\max_{\|z\| \le 1}\langle u, z\rangle$. For an m x n matrix (outputs by inputs): "spectral"
    $\sqrt{m/n}\,U V^T$; "sign" $\frac1n \operatorname{sign}(u)$; "column" each column $\sqrt m\,c/\|c\|$; "row" each row
    $\sqrt{1/n}\,r/\|r\|$; "rms" $\sqrt{\text{size}}\,u/\|u\|$ for any tensor. A vector under a matrix's ball takes "rms",
    for "sign" its sign. Momentum before it and `LR` after it make Scion (`presets.scion`).

    Args:
        ball: The norm.
        radius: The radius $\rho$.
        steps: Iterations of the orthogonalisation.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.LMO("rms", radius=2.0), [torch.tensor([3.0, 4.0])])
        [tensor([1.6971, 2.2627])]

    References:
        T. Pethick et al., "Training deep learning models with norm-constrained LMOs", ICML 2025, Tables 2 and 3.
    """

    capturable = True
    ranges = {check.positive: ("radius",), check.at_least_one: ("steps",)}

    ball: Literal["spectral", "sign", "column", "row", "rms"] = field(default="spectral", kw_only=False)
    radius: Setting = 1.0
    steps: int = 5

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        ball, wide = setting["ball"], torch.promote_types(tensor.dtype, torch.float32)
        x = as_matrix(tensor.to(wide))
        if ball == "sign":
            out = tensor.to(wide).sgn() / (tensor[0].numel() if tensor.dim() > 1 and tensor.numel() else 1)
        elif x is None or ball == "rms":
            out = _unit(tensor.to(wide), None) * tensor.numel() ** 0.5
        elif ball == "spectral":
            rows, columns = x.shape[-2:]
            out = from_matrix(orthogonalize(x, "newtonschulz", setting["steps"]), tensor) * (rows / columns) ** 0.5
        elif ball == "column":
            out = from_matrix(_unit(x, -2), tensor) * x.shape[-2] ** 0.5
        else:
            out = from_matrix(_unit(x, -1), tensor) / x.shape[-1] ** 0.5
        return (out * setting["radius"]).to(tensor.dtype)


def _unit(tensor: Tensor, dim: int | None) -> Tensor:
    norm = torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None)
    return tensor / torch.where(norm > 0, norm, 1.0)


class NeuronNormalize(MatrixTransform):
    r"""Divides each row of a matrix, the weights of one neuron, by a running root mean square of that row.

    $v_i \leftarrow \beta v_i + (1-\beta)\,\operatorname{mean}_j(u_{ij}^2)$, $\hat u_{ij} = u_{ij}/(\sqrt{v_i} + \epsilon)$ and
    $u \leftarrow 0.2\sqrt{mn}\;\hat u/\|\hat u\|$, the size of a step of Adam. After momentum and `Orthogonalize` it is
    NorMuon (`presets.normuon`). Tensors that are no matrices are left as they are.

    Args:
        beta: Memory of the mean squares.
        eps: Added to the denominator.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.NeuronNormalize(), [torch.tensor([[3.0, 3.0], [1.0, -1.0]])])
        [tensor([[ 0.2000,  0.2000],
                [ 0.2000, -0.2000]])]

    References:
        Z. Li et al., "NorMuon: making Muon more efficient and scalable", 2025, Algorithm 1.
    """

    differentiable = True
    follows = {"mean_sq": lambda axes: (0,)}
    ranges = {check.fraction: ("beta",), check.positive: ("eps",)}

    beta: Setting = 0.95
    eps: Setting = 1e-8

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = as_matrix(tensor)
        wide = torch.promote_types(tensor.abs().dtype, torch.float32)
        state["mean_sq"] = tensor.new_zeros(0 if x is None else x.shape[0], dtype=wide)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = as_matrix(tensor)
        if x is not None:
            square = x.to(torch.promote_types(x.dtype, torch.float32)).abs().square().mean(-1)
            state["mean_sq"].lerp_(square, 1 - setting["beta"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        x = as_matrix(tensor)
        if x is None:
            return tensor
        out = x / (state["mean_sq"].sqrt() + setting["eps"]).unsqueeze(-1)
        norm = torch.linalg.vector_norm(out)
        out = out * (0.2 * x.numel() ** 0.5 / torch.where(norm > 0, norm, 1.0))
        return from_matrix(out, tensor).to(tensor.dtype)
