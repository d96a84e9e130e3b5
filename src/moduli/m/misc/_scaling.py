"""Updates scaled by parameters, signs and the loss, and functions of the loss.

* The update scaled by the parameters or by the loss, and signs from one with sizes from another.
* A monotone function of the loss in place of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import Need, Objective, Reformulation, Setting, TensorTransform, UpdateTransform
from .._measures import shape_like
from ..ops._sources import RandomSample


class Relative(UpdateTransform):
    r"""$u \leftarrow u \odot \max(|x|, \text{min\_value})$: steps relative to the size of each parameter.

    Args:
        min_value: The least size a parameter counts for.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Relative(), [torch.ones(2)], [torch.tensor([2.0, -3.0])])
        [tensor([2., 3.])]
    """

    elementwise = True

    min_value: Setting = 1e-4

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        size = param.abs()
        return tensor * torch.where(size < setting["min_value"], setting["min_value"], size)


class GradSign(UpdateTransform):
    r"""$u \leftarrow |u| \operatorname{sign}(g)$: the signs of the gradient (Grams).

    Example:
        >>> from moduli import m
        >>> m.GradSign().uses_grad
        True

    References:
        Y. Cao, X. Li, Z. Song, "Grams: gradient descent with adaptive momentum scaling", 2024.
    """

    elementwise = True

    uses_grad = True

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        return tensor.abs() * torch.sign(tensor if grad is None else grad)


class UpdateSign(UpdateTransform):
    r"""$u \leftarrow |g| \operatorname{sign}(u)$: the sizes of the gradient.

    Example:
        >>> from moduli import m
        >>> m.UpdateSign().uses_grad
        True
    """

    elementwise = True

    uses_grad = True

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        return (tensor if grad is None else grad).abs() * torch.sign(tensor)


class NoiseSign(RandomSample):
    r"""Random sizes with the signs of the update, $u \leftarrow |z| \operatorname{sign}(u)$.

    Args:
        distribution: "normal", "uniform", "rademacher" or "sphere".
        variance: The variance of z.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.NoiseSign(distribution="rademacher"), [torch.tensor([3.0, -2.0])])
        [tensor([ 1., -1.])]
    """

    needs = frozenset({Need.GRADIENT})

    def emit(self, objective: Objective) -> list[Tensor]:
        drawn = super().emit(objective)
        return [z.abs() * torch.sgn(u) for z, u in zip(drawn, objective.get_updates(), strict=True)]


class _ByLoss(TensorTransform):
    members = "matrix"

    def __init__(self, *, alpha: Any = 1.0, min_value: Any = 1e-16) -> None:
        super().__init__({"alpha": alpha, "min_value": min_value}, uses_loss=True)

    def _size(self, tensor: Tensor, loss: Tensor | None, setting: Any) -> Tensor:
        size = (torch.ones(()) if loss is None else loss).to(tensor.abs().dtype) * setting["alpha"]
        size = torch.where(size < setting["min_value"], torch.full_like(size, setting["min_value"]), size)
        return size if size.dim() == 0 else size.reshape(-1, *([1] * (tensor.dim() - 1)))


class MulByLoss(_ByLoss):
    r"""$u \leftarrow u \max(\alpha f, \text{min\_value})$.

    Args:
        alpha: A factor.
        min_value: The least factor.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.MulByLoss(), [torch.ones(2)], loss=torch.tensor(3.0))
        [tensor([3., 3.])]
    """

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return tensor * self._size(tensor, loss, setting)


class DivByLoss(_ByLoss):
    r"""$u \leftarrow u / \max(\alpha f, \text{min\_value})$.

    Args:
        alpha: A factor.
        min_value: The least divisor.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.DivByLoss(), [torch.ones(2)], loss=torch.tensor(4.0))
        [tensor([0.2500, 0.2500])]
    """

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return tensor / self._size(tensor, loss, setting)


class FillLoss(_ByLoss):
    r"""$u \leftarrow \alpha f$, the same number everywhere.

    Args:
        alpha: A factor.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.FillLoss(), [torch.ones(2)], loss=torch.tensor(4.0))
        [tensor([4., 4.])]
    """

    def __init__(self, *, alpha: Any = 1.0) -> None:
        super().__init__(alpha=alpha, min_value=float("-inf"))

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return torch.zeros_like(tensor) + self._size(tensor, loss, setting)


class LambdaHomotopy(Reformulation):
    r"""Optimizes $h(f)$ in place of f; gradients become $h'(f)\,\nabla f$.

    Args:
        fn: h, a differentiable, pointwise function of a tensor. It is not saved: it belongs to the code.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> opt = mo.Optimizer([w], m.LambdaHomotopy(lambda f: 3 * f), m.LR(0.25))
        >>> _ = opt.step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([1.2500])
    """

    members = True

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor, Sequence[Tensor] | None]:
        loss = closure(backward)
        with torch.enable_grad():
            inner = loss.detach().requires_grad_()
            outer = self.fn(inner)
            (slope,) = torch.autograd.grad(outer.sum(), inner)
        if not backward:
            return outer.detach(), None
        grads = [
            torch.zeros_like(param) if param.grad is None else shape_like(slope, param) * param.grad for param in params
        ]
        return outer.detach(), grads


def _square(f: Tensor) -> Tensor:
    return f * f.abs()


def _sqrt(f: Tensor) -> Tensor:
    return (f + 1e-12).sqrt()


def _log(f: Tensor) -> Tensor:
    return (f + 1e-12).log()


class SquareHomotopy(LambdaHomotopy):
    r"""Optimizes $\operatorname{sign}(f) f^2$.

    Example:
        >>> from moduli import m
        >>> m.SquareHomotopy()
        SquareHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(_square)


class SqrtHomotopy(LambdaHomotopy):
    r"""Optimizes $\sqrt{f}$, for a loss that is not negative.

    Example:
        >>> from moduli import m
        >>> m.SqrtHomotopy()
        SqrtHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(_sqrt)


class ExpHomotopy(LambdaHomotopy):
    r"""Optimizes $e^f$.

    Example:
        >>> from moduli import m
        >>> m.ExpHomotopy()
        ExpHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(torch.exp)


class LogHomotopy(LambdaHomotopy):
    r"""Optimizes $\log f$, for a loss that is positive.

    Example:
        >>> from moduli import m
        >>> m.LogHomotopy()
        LogHomotopy()
    """

    def __init__(self) -> None:
        super().__init__(_log)
