"""Sizes of updates bounded by numbers.

* A bound on the norm of the update.
* Updates with mean zero.
* QK-clip: attention logits kept bounded by rescaling query and key weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ...optim import Across, Module, Objective, Setting, SettingsList, Tensors, UpdateTransform
from ...optim import ranges as check
from .._measures import Axes, axes_of, check_axes, check_metric, choose, lengths, metric, metric_of_all


class _NormLink(UpdateTransform):
    """The base of links that scale by a norm: of all parameters, of each tensor, or along axes."""

    members = "batched"
    differentiable = True
    static = ("ord", "dim", "min_size")
    ranges = {check_metric: ("ord",), check.at_least_one: ("min_size",)}

    @property
    def across(self) -> Across:  # type: ignore[override]
        if self.defaults["dim"] != "global":
            return Across.MATRICES
        return Across.SUMS if self.defaults["ord"] in (2, "l2") else Across.EVERYTHING

    ord: float | str = 2
    dim: Axes | str = "global"
    inverse_dims: bool = False
    min_size: int = 1

    def collect(self, given: Mapping[str, Any]) -> None:
        dim = check_axes(type(self).__name__, given["dim"], given["inverse_dims"])
        super().collect({**given, "dim": dim})
        self.elementwise = dim == "global" and given["ord"] in (2, "l2")
        self.measures = "norm" if self.elementwise else dim == "global"

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        if settings[0]["dim"] != "global":
            return None
        if members is not None:
            return {"norm": lengths(tensors)}
        return {"norm": metric_of_all(tensors, settings[0]["ord"])}

    @abstractmethod
    def factor(self, norm: Any, setting: Any) -> Any:
        """Return the factor for a norm."""

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if setting["dim"] == "global":
            return tensor * self.factor(setting["norm"], setting)
        axes = axes_of(tensor, setting["dim"], setting["inverse_dims"], setting["min_size"])
        if axes is None:
            return tensor
        norm = metric(tensor, setting["ord"], axes)
        out: Tensor = tensor * self.factor(norm, setting)
        return out.to(tensor.dtype)


class ClipNorm(_NormLink):
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

    clips = True
    ranges = {check.non_negative: ("max_norm",)}

    max_norm: Setting = field(kw_only=False)

    def factor(self, norm: Any, setting: Any) -> Any:
        """Return a factor of at most 1; the small number in the denominator is torch's."""
        scale = setting["max_norm"] / (norm + 1e-6)
        return choose(scale >= 1, 1.0, scale)


class Normalize(_NormLink):
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

    ranges = {check.non_negative: ("norm_value",)}

    norm_value: Setting = field(default=1.0, kw_only=False)

    def factor(self, norm: Any, setting: Any) -> Any:
        """Return the factor for a norm; 1 for a norm of zero."""
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

    clips = True
    elementwise = True
    ranges = {check.non_negative: ("value",)}

    value: Setting = field(kw_only=False)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor.clamp(-setting["value"], setting["value"])


class Centralize(UpdateTransform):
    r"""Subtracts the mean from the update, $u \leftarrow u - \operatorname{mean}(u)$.

    Gradient centralisation, the mean over every axis but the output's, is `Centralize(dim=0, inverse_dims=True)`.

    Args:
        dim: None for the mean of each tensor, axes for the mean over them, "global" for the mean of everything. A tensor
            that has none of the axes is left as it is.
        inverse_dims: The axes are those to keep.
        min_size: Means of fewer elements are not subtracted.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Centralize(), [torch.tensor([3.0, 1.0])])
        [tensor([ 1., -1.])]

    References:
        H. Yong, J. Huang, X. Hua, L. Zhang, "Gradient centralization: a new optimization technique for deep neural
        networks", ECCV 2020.
    """

    members = "batched"
    differentiable = True
    static = ("dim", "min_size")
    ranges = {check.at_least_one: ("min_size",)}

    dim: Axes | str = None
    inverse_dims: bool = False
    min_size: int = 2

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect({**given, "dim": check_axes("Centralize", given["dim"], given["inverse_dims"])})

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        if settings[0]["dim"] != "global":
            return None
        count = sum(tensor.numel() for tensor in tensors)
        if count < settings[0]["min_size"]:
            return {"mean": 0.0}
        totals = [tensor.sum() if torch.is_grad_enabled() else tensor.sum().item() for tensor in tensors]
        return {"mean": sum(totals) / count}

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if setting["dim"] == "global":
            return tensor - setting["mean"]
        axes = axes_of(tensor, setting["dim"], setting["inverse_dims"], setting["min_size"])
        if axes is None or tensor.dim() == 0:
            return tensor
        return tensor - tensor.mean(axes, keepdim=True)


class QKClip(Module):
    r"""Scales the query and key weights of attention heads whose largest logit exceeded a bound.

    After the step, head h with largest logit $S_h > \tau$ has $\gamma_h = \tau / S_h$, its rows of $W_q$ are multiplied by
    $\gamma_h^{\alpha}$ and those of $W_k$ by $\gamma_h^{1-\alpha}$, so that its logits are at most $\tau$ again. Put it
    last. After `presets.muon` it is MuonClip (`presets.muonclip`).

    Args:
        pairs: The weights (query, key) of each attention layer, both (heads * size, inputs).
        logits: A function that returns, for each pair, the largest logit of each head in the last forward pass.
        tau: The bound $\tau$.
        alpha: How much of the factor queries take.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> q, k = (torch.nn.Parameter(torch.full((2, 1), 20.0)) for _ in range(2))
        >>> link = m.QKClip([(q, k)], lambda: [torch.tensor([400.0, 50.0])], tau=100.0)
        >>> _ = mo.Optimizer([q, k], m.LR(0.0), link).step(mo.closure(lambda: (q * k).sum()))
        >>> q.data.squeeze()
        tensor([10., 20.])

    References:
        Kimi Team, "Kimi K2: open agentic intelligence", 2025, Algorithm 1.
    """

    needs = frozenset()

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        logits: Callable[[], Sequence[Tensor]],
        *,
        tau: Any = 100.0,
        alpha: Any = 0.5,
    ) -> None:
        check.positive("QKClip", "tau", tau)
        pairs = list(pairs)
        if not pairs or any(len(pair) != 2 or not all(isinstance(w, Tensor) for w in pair) for pair in pairs):
            raise ValueError("QKClip: pairs is a list of (query weight, key weight), one for each attention layer")
        if not callable(logits):
            raise TypeError(f"QKClip: logits is {logits!r}; give a function that returns the largest logits per head")
        super().__init__({"tau": tau, "alpha": alpha})
        self.pairs, self.logits = pairs, logits

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with the update that leads to the scaled weights."""
        logits = list(self.logits())
        if len(logits) != len(self.pairs):
            raise ValueError(f"QKClip: logits returned {len(logits)} tensors for {len(self.pairs)} attention layers")
        updates, where = list(objective.get_updates()), {id(p): i for i, p in enumerate(objective.params)}
        for (query, key), largest in zip(self.pairs, logits, strict=True):
            setting = self.settings[query]
            gamma = (setting["tau"] / largest.detach().reshape(-1).clamp(min=setting["tau"])).to(query)
            for weight, power in ((query, setting["alpha"]), (key, 1 - setting["alpha"])):
                i = where.get(id(weight))
                if i is None:
                    raise ValueError("QKClip: a weight of its pairs is not a parameter of this optimizer")
                heads = gamma.numel()
                if weight.shape[0] % heads:
                    raise ValueError(f"QKClip: {heads} heads do not divide the {weight.shape[0]} rows of a weight")
                rows = (gamma**power).repeat_interleave(weight.shape[0] // heads)
                scale = rows.reshape(-1, *([1] * (weight.dim() - 1)))
                updates[i] = weight.detach() - (weight.detach() - updates[i]) * scale
        objective.updates = updates
        return objective
