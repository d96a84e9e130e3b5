"""Lookahead: k steps forward, one step back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import check_at_least_one, positive
from .._transforms import BufferTransform


class Lookahead(BufferTransform):
    r"""Lets the links before it make k steps, then goes back to a point between where they began and where they are.

    At every k-th step $s \leftarrow s + \alpha (x - u - s)$ and the parameters become s; the steps between are left as
    they are. Put it last, after `LR`.

    Args:
        k: Steps between two returns.
        alpha: How much of the way is kept.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.LR(1.0), m.Lookahead(k=2, alpha=0.5))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: -w.sum()))
        ...     print(w.item())
        1.0
        1.0

    References:
        M. R. Zhang, J. Lucas, G. Hinton, J. Ba, "Lookahead optimizer: k steps forward, 1 step back", NeurIPS 2019,
        Algorithm 1.
    """

    elementwise = True
    counts = True
    static = ("k",)
    ranges = {check_at_least_one: ("k",), positive: ("alpha",)}

    def __init__(self, *, k: int = 5, alpha: Any = 0.5) -> None:
        super().__init__(locals())

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["slow"] = param.clone()

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        back = (state["step"] % setting["k"] == 0) * 1.0
        state["slow"].lerp_(param - tensor, setting["alpha"] * back)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        back = (state["step"] % setting["k"] == 0) * 1.0
        return tensor + (param - tensor - state["slow"]) * back
