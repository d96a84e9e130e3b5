"""Averages over the last updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import check_at_least_one
from .._transforms import BufferTransform


class _History(BufferTransform):
    """Keeps the last updates."""

    members = "batched"
    differentiable = True
    ranges = {check_at_least_one: ("history_size",)}

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.add_projected_keys("grad", "history")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["history"] = deque(maxlen=setting["history_size"])

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["history"].append(tensor.clone())


class WeightedAveraging(_History):
    r"""Replaces the update by a weighted mean of the last ones, $\frac{\sum_i w_i u_{t-i}}{\sum_i w_i}$.

    Args:
        weights: The weights, from the oldest to the newest; while there are fewer updates the newest weights count.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.WeightedAveraging([1.0, 3.0]), torch.zeros(1)
        >>> for u in (4.0, 8.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([7.])]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        given = tuple(float(weight) for weight in weights)
        if any(sum(given[i:]) == 0 for i in range(len(given))):
            raise ValueError(f"WeightedAveraging: the weights {given} sum to zero while updates are gathered")
        super().__init__({"history_size": len(given), "weights": given})

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        history = list(state["history"])
        weights = setting["weights"][-len(history) :]
        out = torch.zeros_like(tensor)
        for weight, past in zip(weights, history, strict=True):
            out.add_(past, alpha=weight / sum(weights))
        return out


class Averaging(_History):
    """Replaces the update by the mean of the last ones.

    Args:
        history_size: How many updates the mean is over.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.Averaging(2), torch.zeros(1)
        >>> for u in (1.0, 2.0, 4.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([3.])]
    """

    def __init__(self, history_size: int) -> None:
        super().__init__(locals())

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return torch.stack(list(state["history"])).mean(0)


class MedianAveraging(_History):
    """Replaces each element of the update by the median of its last values (the mean of the middle two if even).

    Args:
        history_size: How many updates the median is over.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.MedianAveraging(3), torch.zeros(1)
        >>> for u in (1.0, 100.0, 2.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([2.])]
    """

    def __init__(self, history_size: int) -> None:
        super().__init__(locals())

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        past = torch.stack(list(state["history"]))
        if past.is_complex():
            return torch.view_as_complex(_median(torch.view_as_real(past)).contiguous())
        return _median(past)


def _median(past: Tensor) -> Tensor:
    # torch's quantile refuses half types, and its median takes the lower of the middle two.
    ordered = past.sort(0).values
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
