"""Adagrad with one number in place of one per element."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import Chainable
from .._checks import allow_none, fraction, non_negative
from .._lists import dot
from .._scalars import divide
from .._transforms import ListTransform, Settings, States, Tensors


class AdagradNorm(ListTransform):
    r"""Divides the update by the root of the sum of its squared norms.

    $b \leftarrow b + \|u\|^2,\quad u \leftarrow u / (\sqrt b + \epsilon)$

    Args:
        lr_decay: Decay of the step.
        initial_accumulator_value: The sum at the start.
        eps: Added to the denominator.
        beta: Memory of a mean in place of the sum; None: a sum.
        beta_debias: Correct for the mean starting at zero.
        layerwise: A sum for each tensor; False: one over all parameters.
        use_sqrt: Divide by the root; False: by the sum itself.
        alpha: A factor.
        inner: Links that transform the update before it is divided, after its norm was learnt.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> _ = mo.Optimizer([w], m.AdagradNorm(), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.7000, 3.6000])

    References:
        R. Ward, X. Wu, L. Bottou, "AdaGrad stepsizes: sharp convergence over nonconvex landscapes", ICML 2019.
    """

    members = "batched"

    shared_settings = ("layerwise",)
    differentiable = True
    counts = True
    ranges = {non_negative: ("lr_decay", "initial_accumulator_value", "eps"), allow_none(fraction): ("beta",)}

    def __init__(
        self,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        beta: float | None = None,
        beta_debias: bool = True,
        layerwise: bool = True,
        use_sqrt: bool = True,
        alpha: float = 1.0,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulator"] = setting["initial_accumulator_value"]

    def learn_all(self, tensors: Tensors, states: States, settings: Settings) -> None:
        whole = None if settings[0]["layerwise"] else dot(tensors, tensors)
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            size = dot([tensor], [tensor]) if whole is None else whole
            beta = setting["beta"]
            if beta is None:
                state["accumulator"] = state["accumulator"] + size
            else:
                state["accumulator"] = beta * state["accumulator"] + (1 - beta) * size

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        b, beta = state["accumulator"], setting["beta"]
        if beta is not None and setting["beta_debias"]:
            b = b / (1 - beta ** state["step"])
        size = setting["alpha"] / (1 + (state["step"] - 1) * setting["lr_decay"])
        below = (b**0.5 if setting["use_sqrt"] else b) + setting["eps"]
        return tensor * divide(size, below, 0.0)
