"""A bound on the norm of the update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...optim import Across, TensorTransform
from .._checks import check_at_least_one, non_negative
from .._metrics import Axes, axes_of, check_axes, check_metric, lengths, metric, metric_of_all
from .._scalars import choose


class NormLink(TensorTransform):
    """What links that scale by a norm share: the norm of everything, of each tensor, or along axes."""

    differentiable = True
    static = ("ord", "dim", "min_size")

    @property
    def across(self) -> Across:  # type: ignore[override]
        if self.defaults["dim"] != "global":
            return Across.MATRICES
        return Across.SUMS if self.defaults["ord"] in (2, "l2") else Across.EVERYTHING

    def __init__(self, key: str, value: Any, ord: Any, dim: Axes | str, inverse_dims: bool, min_size: int) -> None:
        name = type(self).__name__
        non_negative(name, **{key: value})
        check_metric(name, ord)
        check_at_least_one(name, min_size=min_size)
        dim = check_axes(name, dim)
        if dim == "global" and inverse_dims:
            raise ValueError(f"{name}: inverse_dims is for axes, but dim is 'global'")
        super().__init__({key: value, "ord": ord, "dim": dim, "inverse_dims": inverse_dims, "min_size": min_size})
        # Every other norm of a complex number is not that of its two parts.
        self.elementwise = dim == "global" and ord in (2, "l2")
        self.measures = dim == "global"

    def measure(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        settings: Sequence[Mapping[str, Any]],
        members: int | None,
    ) -> dict[str, Any] | None:
        if settings[0]["dim"] != "global":
            return None
        if members is not None:
            return {"norm": lengths(tensors)}
        return {"norm": metric_of_all(tensors, settings[0]["ord"])}

    @abstractmethod
    def factor(self, norm: Any, setting: Any) -> Any:
        """What to multiply by, given the norm."""

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        if setting["dim"] == "global":
            everywhere: Tensor = tensor * self.factor(setting["norm"], setting)
            return everywhere
        axes = axes_of(tensor, setting["dim"], setting["inverse_dims"], setting["min_size"])
        if axes is None:
            return tensor
        norm = metric(tensor, setting["ord"], axes)
        out: Tensor = tensor * self.factor(norm, setting)
        return out.to(tensor.dtype)


class ClipNorm(NormLink):
    r"""Scales the update down where its norm is above a bound: $u \leftarrow u \min(1, c / (\|u\| + 10^{-6}))$.

    By default the norm is that of all parameters together, the same as `torch.nn.utils.clip_grad_norm_`.

    Args:
        max_norm: The bound c.
        ord: The norm: p, or "mad" (mean absolute value), "std", "var", "sum", "l0" to "l4", "linf".
        dim: "global" for one norm over all parameters, None for one per tensor, axes for one per slice along them. A
            tensor that has none of the axes is left as it is.
        inverse_dims: The axes are those to keep.
        min_size: Norms of fewer elements are not bounded.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.ClipNorm(1.0), [torch.tensor([3.0]), torch.tensor([4.0])])
        [tensor([0.6000]), tensor([0.8000])]

    References:
        R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.
    """

    members = "batched"

    def __init__(
        self,
        max_norm: Any,
        *,
        ord: Any = 2,
        dim: Axes | str = "global",
        inverse_dims: bool = False,
        min_size: int = 1,
    ) -> None:
        super().__init__("max_norm", max_norm, ord, dim, inverse_dims, min_size)

    def factor(self, norm: Any, setting: Any) -> Any:
        """At most 1; the small number in the denominator is torch's."""
        scale = setting["max_norm"] / (norm + 1e-6)
        return choose(scale >= 1, 1.0, scale)
