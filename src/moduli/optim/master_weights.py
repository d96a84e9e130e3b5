"""Parameters of half precision with a copy in single precision: the link that `Optimizer(master="float32")` adds."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ._checks import HALVES
from .transforms import UpdateTransform

__all__ = ["MasterWeights", "RoundingTransform"]


class RoundingTransform(UpdateTransform):
    """A pointwise link that chooses how a parameter of half precision is rounded; the last link of a chain.

    Updates of parameters of other dtypes are not changed.

    Example:
        >>> import torch
        >>> from moduli.optim import RoundingTransform
        >>> class Truncate(RoundingTransform):
        ...     def round_update(self, tensor, param, state, setting):
        ...         moved = (param - tensor).to(setting["dtype"]).float()
        ...         return param - moved
        >>> Truncate.is_last
        True
    """

    elementwise = True
    uses_dtype = True
    is_last = True

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        """Return `round_update` for parameters of half precision, the update itself for others.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            state: The state of the parameter.
            setting: Its settings; `setting["dtype"]` is the parameter's dtype.
        """
        return self.round_update(tensor, param, state, setting) if setting["dtype"] in HALVES else tensor

    @abstractmethod
    def round_update(self, tensor: Tensor, param: Tensor, state: Any, setting: Any) -> Tensor:
        """Return an update that leads to a number of `setting["dtype"]`.

        Args:
            tensor: The update, in single precision.
            param: The parameter, in single precision.
            state: Its state.
            setting: Its settings.
        """


class MasterWeights(RoundingTransform):
    """Stores a copy of half-precision parameters in single precision, updates the copy, and rounds it.

    It is the last link of a chain; `Optimizer(..., master="float32")` adds it. It needs four bytes per number. If a program
    writes into a parameter itself, the copy is replaced.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> opt = mo.Optimizer([w], m.Adam(), m.LR(1e-4), master="float32")
        >>> for _ in range(200):
        ...     w.grad = torch.ones_like(w)
        ...     _ = opt.step()
        >>> opt.link("MasterWeights").state[w]["master"]
        tensor([0.9800])

    References:
        P. Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1.
    """

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Store a copy of the parameter in single precision, if it is of half precision.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter, empty.
            setting: Its settings.
        """
        if setting["dtype"] in HALVES:
            state["master"] = param.detach().to(torch.float32, copy=True)

    def round_update(self, tensor: Tensor, param: Tensor, state: Any, setting: Any) -> Tensor:
        """Update the copy, and return the update that leads to its rounded value.

        Args:
            tensor: The update, in single precision.
            param: The parameter, in single precision.
            state: Its state, with the copy.
            setting: Its settings.
        """
        master, dtype = state["master"], setting["dtype"]
        # A parameter that differs from its rounded copy was written by the program.
        master = torch.where(master.to(dtype).float() == param, master, param) - tensor
        state["master"] = master
        return param - master.to(dtype).float()
