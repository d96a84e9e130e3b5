"""Step sizes that are given.

* The step size, and its factors by width.
* A multiplier that rises at the start of training.
* Random step sizes.
* Layer-wise trust ratios: LARS and LAMB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor

from ...axes import ModelAxes, check_base, find_step_scale
from ...optim import (
    Across,
    Chain,
    ListTransform,
    Module,
    Optimizer,
    Setting,
    SettingsList,
    States,
    Tensors,
    UpdateTransform,
)
from ...optim import ranges as check
from .._decays import DecayingLink, Decays
from .._measures import lengths, metric_of_all


class LR(UpdateTransform):
    r"""Multiplies the update by a step size, $u \leftarrow \eta u$.

    Torch's learning rate schedulers act on it: they write `lr` into the optimizer's groups.

    Args:
        lr: The step size, not negative: a number, a 0-d tensor, or a function of the step number, such as cosine with warmup
            and WSD (warmup, stable, decay) of `optim.schedules`; for a population also a tensor with one number per member.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.5000])
    """

    elementwise = True
    ranges = {check.step_size: ("lr",)}

    lr: Setting = field(default=1.0, kw_only=False)

    def read_scale(self, setting: Any, step: int) -> Any:
        """Return the factor of a step, counted from zero."""
        return setting["lr"]

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * setting["lr"]


class MuP(UpdateTransform):
    r"""Scales the update of each parameter by its role and width, so that one step size serves all widths.

    The maximal update parametrization. With $\tilde n$ the fan-in over that of the base width: after Adam, and other links whose
    updates have a size of their own, hidden and output matrices take $1/\tilde n$; after plain gradients output matrices
    $1/\tilde n$, input matrices and vectors the ratio of their fan-out. `ax.initialise_mup(net)` draws the start. Put weight decay
    after it, and divide attention scores by the size of a head, not its root, where that size grows.

    Args:
        axes: The axes of the model (`mo.axes.trace`); None takes those of the optimizer.
        base: The width at which nothing is scaled: a size, to which the number of units is compared, or the axes of a model of that
            width, parameter by parameter.
        rule: "adam" where updates have a size of their own, "sgd" where they are gradients.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
        >>> ax = mo.axes.trace(net, torch.zeros(1, 4))
        >>> opt = mo.Optimizer(net, m.Sign(), m.MuP(ax, base=64), m.LR(0.25))
        >>> before = [param.detach().clone() for param in net.parameters()]
        >>> _ = opt.step(mo.closure(lambda: net(torch.ones(1, 4)).square().sum()))
        >>> [round((a - b.detach()).abs().max().item(), 3) for a, b in zip(before, net.parameters())]
        [0.25, 0.25, 0.125, 0.25]

    References:
        G. Yang et al., "Tensor Programs V: tuning large neural networks via zero-shot hyperparameter transfer", 2022, table 3.
    """

    elementwise = True
    reads_axes = True
    attributes = ("axes", "base", "rule")

    axes: ModelAxes | None = field(default=None, kw_only=False)
    base: int | ModelAxes = 64
    rule: Literal["adam", "sgd"] = "adam"

    def collect(self, given: Mapping[str, Any]) -> None:
        check_base(given["base"])
        super().collect(given)
        self.defaults["mup_scale"] = 1.0

    def attached(self, optimizer: Optimizer) -> None:
        """Find the factor of every parameter.

        Raises:
            ValueError: If there are no axes, or a parameter is an embedding and a head at once.
        """
        axes = optimizer.binding.axes
        if axes is None:
            raise ValueError("MuP has to know the axes of the model: m.MuP(mo.axes.trace(net, example), base=64)")
        find_name = optimizer.binding.slots.find_name
        groups: dict[float, list[Tensor]] = {}
        for param in optimizer.list_params():
            scale = find_step_scale(axes, find_name(param) or "", self.base, self.rule)
            groups.setdefault(scale, []).append(param)
        self.set_param_groups([{"params": params, "mup_scale": scale} for scale, params in groups.items()])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * setting["mup_scale"]


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
        check.step_size("StepSize", key, step_size)
        self.collect({key: step_size})
        self.key = key

    def read_scale(self, setting: Any, step: int) -> Any:
        """Return the factor of a step, counted from zero."""
        return setting[self.key]

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * setting[self.key]


class Warmup(UpdateTransform):
    r"""Multiplies the update by a number that rises linearly and then stays.

    $u \leftarrow \left(a + (b-a)\,\min\left(\frac{t-1}{n}, 1\right)\right) u$

    Args:
        steps: How many steps the rise takes, n.
        start_lr: The multiplier a of the first step.
        end_lr: The multiplier b after n steps.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.Warmup(2, start_lr=0.0))
        >>> for _ in range(4):
        ...     _ = opt.step(mo.closure(lambda: -w.sum()))
        ...     print(w.item())
        0.0
        0.5
        1.5
        2.5
    """

    elementwise = True
    counts = True
    ranges = {check.positive: ("steps",), check.non_negative: ("start_lr", "end_lr")}

    steps: Setting = field(default=100, kw_only=False)
    start_lr: Setting = 1e-5
    end_lr: Setting = 1.0

    def read_scale(self, setting: Any, step: int) -> Any:
        """Return the factor of a step, counted from zero."""
        start, end = setting["start_lr"], setting["end_lr"]
        return start + (end - start) * min(step / setting["steps"], 1.0)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        before, start, end = state["step"] - 1, setting["start_lr"], setting["end_lr"]
        rising = (before < setting["steps"]) * 1.0
        return tensor * (rising * (start + (end - start) * (before / setting["steps"])) + (1 - rising) * end)


def multiply_scales(link: Module, optimizer: Optimizer | None, params: Tensors) -> list[Any]:
    """Return the product of the step sizes that follow a link in its optimizer, for each parameter.

    A step size with different numbers for members of a population counts as 1 where a link steps all members at once, and is the
    member's number where it steps one.

    Args:
        link: The link.
        optimizer: The optimizer; None for factors of 1.
        params: The parameters.
    """
    out: list[Any] = [1.0] * len(params)
    if optimizer is None:
        return out
    for part in _list_following(optimizer.modules, link) or ():
        if isinstance(part, LR | StepSize | Warmup):
            scales = [part.read_scale(part.settings[param], optimizer.current_step) for param in params]
            out = [a if isinstance(b, Tensor) and b.dim() else a * b for a, b in zip(out, scales, strict=True)]
    return out


def _list_following(links: Sequence[Module], link: Module) -> list[Module] | None:
    """Return the links that follow a link in a sequence, with those of nested sequences; None if it is not there."""
    for i, part in enumerate(links):
        if part is link:
            return list(links[i + 1 :])
        inside = (
            [part.get_children_sequence()] if isinstance(part, Chain) else [[child] for child in part.children.values()]
        )
        for sequence in inside:
            following = _list_following(sequence, link)
            if following is not None:
                return [*following, *links[i + 1 :]]
    return None


class WarmupNormClip(UpdateTransform):
    """Bounds the norm over all parameters by a number that rises linearly, and after that not at all.

    Args:
        steps: How many steps the rise takes.
        start_norm: The bound of the first step.
        end_norm: The bound it rises to.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.WarmupNormClip(2, start_norm=1.0, end_norm=3.0))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: (-8 * w).sum()))
        ...     print(round(w.item(), 3))
        1.0
        3.0
        11.0
    """

    across = Across.SUMS

    differentiable = True
    elementwise = True
    counts = True
    ranges = {check.positive: ("steps", "start_norm", "end_norm")}

    steps: Setting = field(default=100, kw_only=False)
    start_norm: Setting = 1e-5
    end_norm: Setting = 1.0

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        return {"norm": metric_of_all(tensors) if members is None else lengths(tensors)}

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        before, start, end = state["step"] - 1, setting["start_norm"], setting["end_norm"]
        rising = (before < setting["steps"]) * 1.0
        scale = (start + (end - start) * (before / setting["steps"])) / (setting["norm"] + 1e-6)
        clipped = rising * ((scale < 1) * 1.0)
        return tensor * (clipped * scale + (1 - clipped))


class RandomStepSize(ListTransform):
    """Multiplies the update by a random number, uniform between two bounds.

    Args:
        low: The lower bound.
        high: The upper bound.
        parameterwise: A number for each tensor; otherwise one for all.
        seed: Seed of the numbers; None uses torch's own generator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> out = optim.step_tensors(m.RandomStepSize(low=0.5, high=1.0, seed=0), [torch.ones(2)])[0]
        >>> bool(out[0] == out[1]), 0.5 <= out[0].item() <= 1.0
        (True, True)
    """

    shared_settings = ("seed",)

    low: float = 0.0
    high: float = 1.0
    parameterwise: bool = False
    seed: int | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        if given["low"] > given["high"]:
            raise ValueError(f"RandomStepSize: low is {given['low']!r}, which is above high, {given['high']!r}")
        super().collect(given)

    def learn_all(self, tensors: Tensors, states: States, settings: SettingsList) -> None:
        one: float | None = None
        for state, setting in zip(states, settings, strict=True):
            if one is None or setting["parameterwise"]:
                one = torch.rand((), generator=self.get_generator("cpu", setting["seed"])).item()
            state["factor"] = setting["low"] + (setting["high"] - setting["low"]) * one

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * state["factor"]


class TrustRatio(UpdateTransform, DecayingLink):
    r"""Rescales the update of each tensor to a fraction of the tensor's own norm.

    $u \leftarrow \eta\,\frac{\phi(\|x\|)}{\|u\| + \lambda\|x\| + \epsilon}\,(u + \lambda x)$ with
    $\phi(z) = \min(\max(z, l), h)$; where either norm is zero the ratio is one. After `Adam` and `WeightDecay` it is
    LAMB (`presets.lamb`), before momentum it is LARS (`presets.lars`).

    Args:
        trust: The fraction $\eta$.
        weight_decay: An L2 penalty $\lambda$ that takes part in the ratio, as in LARS.
        only: "matrices" leaves biases and scales of normalisations without the penalty, as in `WeightDecay`.
        eps: Added to the denominator.
        low: The least norm that a tensor counts for, l.
        high: The largest norm that a tensor counts for, h; None for no limit.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.TrustRatio(), [torch.tensor([0.0, 8.0])], params=[torch.tensor([3.0, 4.0])])
        [tensor([0., 5.])]

    References:
        Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks", 2017 (LARS), equation (6).
        Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020 (LAMB),
        Algorithm 2.
    """

    members = "batched"
    across = Across.MATRICES
    differentiable = True
    capturable = True
    ranges = {
        check.positive: ("trust",),
        check.non_negative: ("weight_decay", "eps", "low"),
        check.allow(check.positive, None): ("high",),
    }

    attributes = ("only",)

    trust: Setting = 1.0
    weight_decay: Setting = 0.0
    eps: Setting = 0.0
    low: Setting = 0.0
    high: float | None = None
    only: Decays = "all"

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        x, u = param.to(wide), tensor.to(wide)
        size, step = torch.linalg.vector_norm(x), torch.linalg.vector_norm(u)
        decay = setting["weight_decay"]
        below = step + decay * size + setting["eps"]
        counted = size.clamp(min=setting["low"])
        if setting["high"] is not None:
            counted = counted.clamp(max=setting["high"])
        moves = (counted > 0) & (step > 0)
        ratio = torch.where(moves, counted * setting["trust"] / torch.where(moves, below, 1.0), 1.0)
        return ((u + x * decay) * ratio).to(tensor.dtype)
