"""Grafting: the direction of one method with the size of another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Need, Objective
from .._measures import check_metric, shape_like, sizes
from .._vectors import mask_absent
from ._operations import _MultiOperation
from ._sources import Params, _SourceLink


class _Pass(_SourceLink):
    """The update as it is."""

    differentiable = True

    def apply(self, objective: Objective) -> Objective:
        return objective


class _Gradient(_SourceLink):
    """The gradient."""

    differentiable = True
    needs = frozenset({Need.GRADIENT})

    def emit(self, objective: Objective) -> list[Tensor]:
        return [grad.clone() for grad in objective.get_grads()]


class Graft(_MultiOperation):
    r"""The direction of one chain with the size of another, $u \leftarrow d\,\frac{\|m\|}{\|d\| + \epsilon}$.

    Args:
        direction: Links that give the direction.
        magnitude: Links that give the size.
        tensorwise: Norms of each tensor, or one norm of all.
        ord: Which norm: p, or a name such as "mad" or "std".
        eps: Added to the norm of the direction.
        strength: Between the direction's own size (0) and that of the other (1).

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Graft(m.Sign(), m.Mul(2.0), eps=0.0), [torch.tensor([3.0, 4.0])])
        [tensor([7.0711, 7.0711])]

    References:
        N. Agarwal, R. Anil, E. Hazan, T. Koren, C. Zhang, "Disentangling adaptive gradient methods from learning rates",
        2020.
    """

    def __init__(
        self,
        direction: Chainable,
        magnitude: Chainable,
        *,
        tensorwise: bool = True,
        ord: float | str = 2,
        eps: float = 1e-6,
        strength: Any = 1.0,
    ) -> None:
        check_metric(type(self).__name__, "ord", ord)
        super().__init__({"eps": eps, "strength": strength}, direction=direction, magnitude=magnitude)
        self.tensorwise = tensorwise
        self.ord = ord

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        direction = values["direction"]
        mine, other = self._sizes(objective, direction), self._sizes(objective, values["magnitude"])
        settings = [self.settings[param] for param in objective.params]
        rows = zip(direction, mine, other, settings, strict=True)
        return [d * shape_like(self._factor(size, wanted, setting), d) for d, size, wanted, setting in rows]

    def _factor(self, mine: Tensor, other: Tensor, setting: Any) -> Tensor:
        below = mine + setting["eps"]
        ratio = torch.where(below == 0, torch.ones_like(below), other / torch.where(below == 0, 1.0, below))
        return 1 + setting["strength"] * (ratio - 1)

    def _sizes(self, objective: Objective, tensors: list[Tensor]) -> list[Tensor]:
        return sizes(mask_absent(tensors, objective.present), self.tensorwise, self.ord, objective.members)


class GraftInputToOutput(Graft):
    r"""The update rescaled to the size of what other links make of it.

    Args:
        magnitude: The links.
        tensorwise: Norms of each tensor, or one norm of all.
        ord: Which norm: p, or a name such as "mad" or "std".
        eps: Added to the norm of the update.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.GraftInputToOutput(m.Mul(2.0), eps=0.0), [torch.tensor([3.0, 4.0])])
        [tensor([6., 8.])]
    """

    def __init__(
        self, magnitude: Chainable, *, tensorwise: bool = True, ord: float | str = 2, eps: float = 1e-6
    ) -> None:
        super().__init__(_Pass(), magnitude, tensorwise=tensorwise, ord=ord, eps=eps)


class GraftOutputToInput(Graft):
    r"""The result of other links for the update, rescaled to the size of the update.

    Args:
        direction: The links.
        tensorwise: Norms of each tensor, or one norm of all.
        ord: Which norm: p, or a name such as "mad" or "std".
        eps: Added to the norm of the direction.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.GraftOutputToInput(m.Sign(), eps=0.0), [torch.tensor([3.0, 4.0])])
        [tensor([3.5355, 3.5355])]
    """

    def __init__(
        self, direction: Chainable, *, tensorwise: bool = True, ord: float | str = 2, eps: float = 1e-6
    ) -> None:
        super().__init__(direction, _Pass(), tensorwise=tensorwise, ord=ord, eps=eps)


class GraftToGrad(Graft):
    r"""The update rescaled to the size of the gradient.

    Args:
        tensorwise: Norms of each tensor, or one norm of all.
        ord: Which norm: p, or a name such as "mad" or "std".
        eps: Added to the norm of the update.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> _ = mo.Optimizer([w], m.Mul(9.0), m.GraftToGrad(eps=0.0)).step(mo.closure(lambda: (w**2 / 4).sum()))
        >>> w.data
        tensor([0.5000])
    """

    needs = frozenset({Need.GRADIENT})

    def __init__(self, *, tensorwise: bool = False, ord: float | str = 2, eps: float = 1e-6) -> None:
        super().__init__(_Pass(), _Gradient(), tensorwise=tensorwise, ord=ord, eps=eps)


class GraftGradToUpdate(Graft):
    r"""The gradient rescaled to the size of the update.

    Args:
        tensorwise: Norms of each tensor, or one norm of all.
        ord: Which norm: p, or a name such as "mad" or "std".
        eps: Added to the norm of the gradient.

    Example:
        >>> from moduli import m
        >>> sorted(m.GraftGradToUpdate().children)
        ['direction', 'magnitude']
    """

    needs = frozenset({Need.GRADIENT})

    def __init__(self, *, tensorwise: bool = False, ord: float | str = 2, eps: float = 1e-6) -> None:
        super().__init__(_Gradient(), _Pass(), tensorwise=tensorwise, ord=ord, eps=eps)


class GraftToParams(Graft):
    r"""The update rescaled to the size of the parameters, $u \leftarrow u\,\frac{\max(\|x\|, \epsilon)}{\|u\|}$.

    Args:
        tensorwise: Norms of each tensor, or one norm of all.
        ord: Which norm: p, or a name such as "mad" or "std".
        eps: The smallest size that parameters count for, so that those at zero can leave it.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.full((1,), 4.0))
        >>> _ = mo.Optimizer([w], m.GraftToParams(), m.LR(0.5)).step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([2.])
    """

    def __init__(self, *, tensorwise: bool = False, ord: float | str = 2, eps: float = 1e-4) -> None:
        super().__init__(_Pass(), Params(), tensorwise=tensorwise, ord=ord, eps=eps)

    def _factor(self, mine: Tensor, other: Tensor, setting: Any) -> Tensor:
        return other.clamp(min=setting["eps"]) / torch.where(mine == 0, 1.0, mine)
