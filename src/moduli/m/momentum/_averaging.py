"""Averages of updates and of parameters.

* Averages over the last updates.
* Lookahead: k steps forward, one step back.
* Averages of the parameters, to be evaluated in their place.
* Schedule-free averaging in place of momentum and a schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ...layout import Guard
from ...optim import BufferTransform, Setting
from ...optim import ranges as check
from .._measures import rise


class _History(BufferTransform):
    """Keeps the last updates."""

    members = "batched"
    differentiable = True
    ranges = {check.at_least_one: ("history_size",)}

    projects = {"grad": ("history",)}

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
        numbers = tuple(float(weight) for weight in weights)
        if any(sum(numbers[i:]) == 0 for i in range(len(numbers))):
            raise ValueError(f"WeightedAveraging: the weights {numbers} sum to zero while updates are gathered")
        self.collect({"history_size": len(numbers), "weights": numbers})

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

    history_size: int = field(kw_only=False)

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

    history_size: int = field(kw_only=False)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        past = torch.stack(list(state["history"]))
        if past.is_complex():
            return torch.view_as_complex(_median(torch.view_as_real(past)).contiguous())
        return _median(past)


def _median(past: Tensor) -> Tensor:
    # torch's quantile rejects half types, and its median takes the lower of the middle two.
    ordered = past.sort(0).values
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


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

    points = ("slow",)
    elementwise = True
    counts = True
    static = ("k",)
    ranges = {check.at_least_one: ("k",), check.positive: ("alpha",)}

    k: int = 5
    alpha: Setting = 0.5

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["slow"] = param.clone()

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        back = (state["step"] % setting["k"] == 0) * 1.0
        state["slow"].lerp_(param - tensor, setting["alpha"] * back)

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        back = (state["step"] % setting["k"] == 0) * 1.0
        return tensor + (param - tensor - state["slow"]) * back


class PolyakAveraging(BufferTransform):
    r"""Averages the parameters over the steps; training goes on where it is, and the average is evaluated.

    $\bar x_t = \bar x_{t-1} + c_t (x_t - \bar x_{t-1})$ with $c_t = 1 / t$, the mean of all points, or $c_t = 1 - d$ for a memory
    of d, from step `start` on; before it the average is the parameters. Put it last, after `LR`. `opt.eval()` puts the average
    into the parameters and `opt.train()` the trained ones back.

    Args:
        decay: The memory d of a running average; None for the mean of all steps.
        start: Steps that do not count.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.LR(1.0), m.PolyakAveraging())
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: -w.sum()))
        >>> opt.link("PolyakAveraging").averages([w])
        [tensor([2.])]

    References:
        B. T. Polyak, A. B. Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 30, 1992.
    """

    points = ("average",)
    elementwise = True
    counts = True
    static = ("start",)
    ranges = {check.allow(check.fraction, None): ("decay",), check.non_negative: ("start",)}

    decay: Any = None
    start: int = 0

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["average"] = param.clone()

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        counted = state["step"] - setting["start"]
        late = (counted > 1) * 1.0
        fading = 1 / (counted * late + (1 - late)) if setting["decay"] is None else 1 - setting["decay"] * late
        state["average"].lerp_(param - tensor, fading)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor

    def averages(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the average of each parameter; one that has not been stepped is its own."""
        out = []
        for param in params:
            here, average = param.detach(), self.state.get(param, {}).get("average")
            if average is not None and here.is_complex() and not average.is_complex():
                average = torch.view_as_complex(average)
            out.append(here.clone() if average is None else average.to(here.dtype, copy=True))
        return out


class ScheduleFree(BufferTransform):
    r"""Steps with a sequence z, evaluates between it and its average x, so that no schedule is needed.

    The parameters are $y = (1-\beta) z + \beta x$. A step makes $z \leftarrow z - s_t u$ and
    $x \leftarrow (1-c_t) x + c_t z$ with $s_t = \min(t/T, 1)$ over T steps of warmup and
    $c_t = \frac{w_t}{\sum_{i \le t} w_i}$, $w_t = t^r s_t^2$: a step counts by the square of its size, as in the authors'
    code. Put it last, after a constant `LR`. Training evaluates at y; the result is the average x: see `averaged`.

    Args:
        momentum: Where between z and x the gradient is taken, $\beta$; above zero.
        r: The power of t that weighs the average; 0 weighs all steps the same.
        warmup: Steps T over which steps grow; 0 for none.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> link = m.ScheduleFree()
        >>> opt = mo.Optimizer([w], m.LR(0.5), link)
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> with link.averaged([w]):
        ...     print(abs(w.item()) < 0.05)
        True

    References:
        A. Defazio et al., "The road less scheduled", NeurIPS 2024, Algorithm 1.
    """

    points = ("z",)
    elementwise = True
    counts = True

    ranges = {check.fraction: ("momentum",), check.positive: ("momentum",), check.non_negative: ("r",)}
    attributes = ("r", "warmup")

    momentum: Setting = field(default=0.9, kw_only=False)
    r: float = 0.0
    warmup: int = 0

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"ScheduleFree: warmup is {self.warmup!r}; give a number of steps, or 0")
        # Without a power of t the sum of the weights has a closed form, and the link is pointwise.
        self.elementwise = self.r == 0

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["z"] = param.clone()
        if self.r:
            state["weight_sum"] = 0.0

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        size = self._size(state["step"])
        state["z"].sub_(tensor * size)
        if self.r:
            state["weight_sum"] = state["weight_sum"] + state["step"] ** self.r * size**2

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        beta, t, z = setting["momentum"], state["step"], state["z"]
        size = self._size(t)
        total = state["weight_sum"] if self.r else self._total(t)
        c = t**self.r * size**2 / total
        # beta x = y - (1 - beta) z before the step, so that x need not be stored.
        average = (param - (z + tensor * size) * (1 - beta)) * (1 - c)
        return param - z * (1 - beta + beta * c) - average

    def _size(self, t: Any) -> Any:
        """Return min(t / T, 1) in a form for which t may be a symbol."""
        return rise(t, self.warmup) if self.warmup else 1.0

    def _total(self, t: Any) -> Any:
        """Return the sum of squared sizes up to t: squares of 1/T, 2/T, ... while they rise, then ones."""
        n = self.warmup
        if not n:
            return t
        rising = (t < n) * 1.0
        squares = t * (t + 1) * (2 * t + 1) / (6 * n * n)
        return rising * squares + (1 - rising) * ((n + 1) * (2 * n + 1) / (6 * n) + t - n)

    def averages(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the average x of these parameters; a parameter without a step is its own average."""
        out = []
        for param in params:
            state, beta = self.state.get(param), self.settings[param]["momentum"]
            here = param.detach()
            if not state:
                out.append(here.clone())
                continue
            z = torch.view_as_complex(state["z"]) if here.is_complex() and not state["z"].is_complex() else state["z"]
            out.append((here - (1 - beta) * z) / beta)
        return out

    @contextmanager
    def averaged(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Replace these parameters by their averages in a block, to evaluate or save; training continues after it."""
        chosen = list(params)
        with Guard() as guard:
            guard.tensors(chosen)
            with torch.no_grad():
                for param, value in zip(chosen, self.averages(chosen), strict=True):
                    param.copy_(value)
            yield
            guard.restore()
