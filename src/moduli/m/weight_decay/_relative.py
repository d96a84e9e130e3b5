"""Weight decay relative to the size of the update."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .._checks import choice, non_negative, positive
from .._metrics import check_metric, metric_of_all
from .._transforms import Settings, Tensors, UpdateTransform
from ._weight_decay import penalty


class RelativeWeightDecay(UpdateTransform):
    r"""Weight decay times a measure of the update over all parameters, $u \leftarrow u + \lambda\,\mu(u)\,x$.

    Args:
        weight_decay: The factor $\lambda$.
        ord: The penalty $|x|^p / p$ is that of this p.
        norm_input: What is measured: the "update", the "grad" or the "params".
        metric: The measure: "mad" (mean absolute value), or any other that `ClipNorm` takes.
        cautious: Only where the step shrinks the weight anyway.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> x, u = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 6.0])
        >>> optim.step_tensors(m.RelativeWeightDecay(0.5), [u], params=[x])
        [tensor([4., 4.])]
    """

    members = "batched"

    differentiable = True
    static = ("ord",)
    ranges = {non_negative: ("weight_decay",), positive: ("ord",)}

    def __init__(
        self,
        weight_decay: Any = 0.1,
        *,
        ord: float = 2,
        norm_input: Literal["update", "grad", "params"] = "update",
        metric: Any = "mad",
        cautious: bool = False,
    ) -> None:
        choice("RelativeWeightDecay", "norm_input", norm_input, ("update", "grad", "params"))
        check_metric("RelativeWeightDecay", metric, "metric")
        super().__init__(locals(), uses_grad=norm_input == "grad")

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: Settings, members: int | None
    ) -> dict[str, Any] | None:
        source = {"update": tensors, "params": params, "grad": grads}[settings[0]["norm_input"]]
        return {"size": metric_of_all(source or tensors, settings[0]["metric"])}

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        decay = penalty(param, setting["ord"]) * (setting["weight_decay"] * setting["size"])
        if setting["cautious"]:
            agrees = (tensor * param.conj()).real > 0 if tensor.is_complex() else tensor * param > 0
            decay = torch.where(agrees, decay, torch.zeros_like(decay))
        return tensor + decay
