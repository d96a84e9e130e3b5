"""The update scaled by the parameters or by the loss, and signs from one with sizes from another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Need, Objective, TensorTransform
from ..ops._sources import RandomSample


class Relative(TensorTransform):
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

    def __init__(self, *, min_value: Any = 1e-4) -> None:
        super().__init__({"min_value": min_value})

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        size = param.abs()
        return tensor * torch.where(size < setting["min_value"], setting["min_value"], size)


class GradSign(TensorTransform):
    r"""$u \leftarrow |u| \operatorname{sign}(g)$: the signs of the gradient (Grams).

    Example:
        >>> from moduli import m
        >>> m.GradSign().uses_grad
        True

    References:
        Y. Cao, X. Li, Z. Song, "Grams: gradient descent with adaptive momentum scaling", 2024.
    """

    elementwise = True

    def __init__(self) -> None:
        super().__init__(uses_grad=True)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return tensor.abs() * torch.sign(tensor if grad is None else grad)


class UpdateSign(TensorTransform):
    r"""$u \leftarrow |g| \operatorname{sign}(u)$: the sizes of the gradient.

    Example:
        >>> from moduli import m
        >>> m.UpdateSign().uses_grad
        True
    """

    elementwise = True

    def __init__(self) -> None:
        super().__init__(uses_grad=True)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
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
        found = (torch.ones(()) if loss is None else loss).to(tensor.abs().dtype) * setting["alpha"]
        found = torch.where(found < setting["min_value"], torch.full_like(found, setting["min_value"]), found)
        return found if found.dim() == 0 else found.reshape(-1, *([1] * (tensor.dim() - 1)))


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
