"""A bound on the norm of the update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...optim import Across
from .._checks import check_at_least_one, non_negative
from .._metrics import Axes, axes_of, check_axes, check_metric, lengths, metric, metric_of_all
from .._scalars import choose
from .._transforms import Settings, Tensors, UpdateTransform


class NormLink(UpdateTransform):
    """What links that scale by a norm share: the norm of everything, of each tensor, or along axes."""

    members = "batched"
    differentiable = True
    static = ("ord", "dim", "min_size")

    @property
    def across(self) -> Across:  # type: ignore[override]
        if self.defaults["dim"] != "global":
            return Across.MATRICES
        return Across.SUMS if self.defaults["ord"] in (2, "l2") else Across.EVERYTHING

    def __init__(self, given: Mapping[str, Any]) -> None:
        name, ord, dim = type(self).__name__, given["ord"], check_axes(type(self).__name__, given["dim"])
        check_metric(name, ord)
        if dim == "global" and given["inverse_dims"]:
            raise ValueError(f"{name}: inverse_dims is for axes, but dim is 'global'")
        super().__init__({**given, "dim": dim})
        # Every other norm of a complex number is not that of its two parts.
        self.elementwise = dim == "global" and ord in (2, "l2")
        self.measures = dim == "global"

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: Settings, members: int | None
    ) -> dict[str, Any] | None:
        if settings[0]["dim"] != "global":
            return None
        if members is not None:
            return {"norm": lengths(tensors)}
        return {"norm": metric_of_all(tensors, settings[0]["ord"])}

    @abstractmethod
    def factor(self, norm: Any, setting: Any) -> Any:
        """What to multiply by, given the norm."""

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if setting["dim"] == "global":
            return tensor * self.factor(setting["norm"], setting)
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

    ranges = {non_negative: ("max_norm",), check_at_least_one: ("min_size",)}

    def __init__(
        self,
        max_norm: Any,
        *,
        ord: Any = 2,
        dim: Axes | str = "global",
        inverse_dims: bool = False,
        min_size: int = 1,
    ) -> None:
        super().__init__(locals())

    def factor(self, norm: Any, setting: Any) -> Any:
        """At most 1; the small number in the denominator is torch's."""
        scale = setting["max_norm"] / (norm + 1e-6)
        return choose(scale >= 1, 1.0, scale)


class Normalize(NormLink):
    r"""Scales the update to a given norm, $u \leftarrow c\,u / \|u\|$; an update of zero stays.

    Args:
        norm_value: The norm c.
        ord: The norm: p, or "mad" (mean absolute value), "std", "var", "sum", "l0" to "l4", "linf".
        dim: "global" for one norm over all parameters, None for one per tensor, axes for one per slice along them. A
            tensor that has none of the axes is left as it is.
        inverse_dims: The axes are those to keep.
        min_size: Fewer elements are left as they are.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Normalize(), [torch.tensor([3.0]), torch.tensor([4.0])])
        [tensor([0.6000]), tensor([0.8000])]
        >>> optim.step_tensors(m.Normalize(2.0, dim=None), [torch.tensor([3.0]), torch.tensor([4.0])])
        [tensor([2.]), tensor([2.])]
    """

    ranges = {non_negative: ("norm_value",), check_at_least_one: ("min_size",)}

    def __init__(
        self,
        norm_value: Any = 1.0,
        *,
        ord: Any = 2,
        dim: Axes | str = "global",
        inverse_dims: bool = False,
        min_size: int = 1,
    ) -> None:
        super().__init__(locals())

    def factor(self, norm: Any, setting: Any) -> Any:
        """1 where there is nothing to scale."""
        nothing = (norm == 0) * 1.0
        return setting["norm_value"] / (norm + nothing) * (1 - nothing) + nothing


class ClipValue(UpdateTransform):
    r"""Keeps each element within $[-c, c]$, as `torch.nn.utils.clip_grad_value_` does.

    Args:
        value: The bound c.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.ClipValue(1.0), [torch.tensor([3.0, -0.5, -2.0])])
        [tensor([ 1.0000, -0.5000, -1.0000])]
    """

    elementwise = True
    ranges = {non_negative: ("value",)}

    def __init__(self, value: Any) -> None:
        super().__init__(locals())

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor.clamp(-setting["value"], setting["value"])
