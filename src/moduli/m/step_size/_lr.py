"""The step size."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._transforms import UpdateTransform


class LR(UpdateTransform):
    r"""Multiplies the update by a step size, $u \leftarrow \eta u$.

    Torch's learning rate schedulers act on it: they write `lr` into the optimizer's groups.

    Args:
        lr: The step size: a number, a 0-d tensor, or a function of the step number, such as cosine with warmup and WSD
            (warmup, stable, decay) of `optim.schedules`; for a population also a tensor with one number per member.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.5000])
    """

    elementwise = True

    def __init__(self, lr: Any = 1.0) -> None:
        super().__init__(locals())

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * setting["lr"]


class StepSize(UpdateTransform):
    r"""Multiplies the update by a step size whose setting has a name of its own, so that schedulers leave it alone.

    Args:
        step_size: The step size.
        key: The name of the setting.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.StepSize(0.25, key="pace"), [torch.tensor([4.0])])
        [tensor([1.])]
    """

    elementwise = True

    def __init__(self, step_size: Any = 1.0, *, key: str = "step_size") -> None:
        if not isinstance(key, str) or not key:
            raise ValueError(f"StepSize: key is {key!r}; give the name of the setting")
        super().__init__({key: step_size})
        self.key = key

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * setting[self.key]
