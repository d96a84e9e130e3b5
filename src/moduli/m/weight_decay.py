"""Weight decay and regularisation.

* Weight decay, coupled or decoupled by its position in the chain.
* Weight decay relative to the size of the update.
* Random regularisation: updates and weights that are dropped, perturbed or reset.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..optim import (
    Chainable,
    DeclaredLink,
    Module,
    Objective,
    Reformulation,
    Setting,
    SettingsList,
    Tensors,
    UpdateTransform,
    sample_like,
)
from ..optim import ranges as check
from ._decays import DecayingLink, Decays
from ._measures import check_metric, metric, metric_of_all, read, reset_others

__all__ = [
    "CautiousWeightDecay",
    "Dropout",
    "PerturbWeights",
    "RandomReinitialize",
    "RelativeWeightDecay",
    "WeightDecay",
    "WeightDropout",
]


def penalty(param: Tensor, ord: Any) -> Tensor:
    """Return the direction in which a weight decays, the gradient of |x|^ord / ord."""
    if ord == 2:
        return param
    if ord == 1:
        return param.sgn()
    # The sign is split from the power: odd powers must not flip, nor fractional ones fail, for negative weights.
    return param.sgn() * param.abs() ** (ord - 1)


class _Decay(UpdateTransform):
    """Weight decay, element by element."""

    elementwise = True
    static = ("ord",)
    ranges = {check.non_negative: ("weight_decay",), check.positive: ("ord",)}

    weight_decay: Setting = field(kw_only=False)
    ord: float = 2


class WeightDecay(_Decay, DecayingLink):
    r"""Adds the weights to the update, $u \leftarrow u + \lambda x$, so that they shrink.

    Its place in the chain says how it is coupled: before a preconditioner it is an L2 penalty, between it and `LR` it is
    decoupled (`Adam(), WeightDecay(0.01), LR(1e-3)` is AdamW), after `LR` it does not depend on the step size.

    Args:
        weight_decay: The factor $\lambda$.
        ord: The penalty $|x|^p / p$ is that of this p: 2 adds the weights, 1 their signs, and so on.
        only: "matrices" leaves biases and scales of normalisations alone: by the axes of the model where the optimizer has them
            (what no product uses), by their shape elsewhere (at most one axis longer than one).

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.WeightDecay(0.5), m.LR(0.5)).step(mo.closure(lambda: (w * 0).sum()))
        >>> w.data
        tensor([0.7500])

    References:
        I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """

    attributes = ("only",)

    only: Decays = "all"

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        return tensor + penalty(param, setting["ord"]) * setting["weight_decay"]


class CautiousWeightDecay(_Decay):
    r"""Weight decay where the step shrinks the weight anyway: $u_i \leftarrow u_i + \lambda x_i\,[u_i x_i > 0]$.

    Args:
        weight_decay: The factor $\lambda$.
        ord: The penalty $|x|^p / p$ is that of this p.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> x, u = torch.tensor([1.0, 1.0]), torch.tensor([2.0, -2.0])
        >>> optim.step_tensors(m.CautiousWeightDecay(0.5), [u], params=[x])
        [tensor([ 2.5000, -2.0000])]

    References:
        L. Chen et al., "Cautious weight decay", arXiv:2510.12402, 2025.
    """

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        shrinks = tensor * param > 0
        decay = penalty(param, setting["ord"]) * setting["weight_decay"]
        return torch.where(shrinks, tensor + decay, tensor)


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
    ranges = {check.non_negative: ("weight_decay",), check.positive: ("ord",), check_metric: ("metric",)}

    weight_decay: Setting = field(default=0.1, kw_only=False)
    ord: float = 2
    norm_input: Literal["update", "grad", "params"] = "update"
    metric: Any = "mad"
    cautious: bool = False

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect({**given, "uses_grad": given["norm_input"] == "grad"})

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        source = {"update": tensors, "params": params, "grad": grads}[settings[0]["norm_input"]]
        return {"size": metric_of_all(source or tensors, settings[0]["metric"])}

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        decay = penalty(param, setting["ord"]) * (setting["weight_decay"] * setting["size"])
        if setting["cautious"]:
            agrees = (tensor * param.conj()).real > 0 if tensor.is_complex() else tensor * param > 0
            decay = torch.where(agrees, decay, torch.zeros_like(decay))
        return tensor + decay


def _coins(tensor: Tensor, chance: float, generator: torch.Generator | None) -> Tensor:
    """Return True with this probability, for each element of a tensor."""
    return torch.rand(tensor.shape, device=tensor.device, generator=generator) < chance


class Dropout(UpdateTransform):
    """Sets each element of the update to zero with a probability.

    Args:
        p: The probability.
        graft: Scale what is left to the norm of the whole, for each tensor.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> out = optim.step_tensors(m.Dropout(0.5, seed=0), [torch.ones(1000)])[0]
        >>> sorted(set(out.tolist())), bool(abs(out.mean() - 0.5) < 0.1)
        ([0.0, 1.0], True)
    """

    differentiable = True
    ranges = {check.probability: ("p",)}

    p: float = field(default=0.5, kw_only=False)
    graft: bool = False
    seed: int | None = None

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        dropped = _coins(tensor, setting["p"], self.get_generator(tensor.device, setting["seed"]))
        out = torch.where(dropped, torch.zeros_like(tensor), tensor)
        if setting["graft"]:
            left = torch.linalg.vector_norm(out)
            out = out * torch.where(left > 0, torch.linalg.vector_norm(tensor) / torch.where(left > 0, left, 1.0), 0.0)
        return out


class _ChangeWeights(DeclaredLink, Reformulation):
    """Evaluates the loss at weights that are changed at random, in the same way within a step."""

    attributes = ("seed",)

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        self._drawn: list[Tensor] = []

    @abstractmethod
    def change(self, param: Tensor, drawn: Tensor) -> None:
        """Change a weight by the numbers drawn for it."""

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, Sequence[Tensor] | None]:
        for param, drawn in zip(params, self._drawn, strict=True):
            self.change(param, drawn)
        loss = closure(backward)
        grads = [None if param.grad is None else param.grad.clone() for param in params]
        return loss, grads if backward else None  # type: ignore[return-value]


class WeightDropout(_ChangeWeights):
    """Evaluates the loss with each weight set to zero with a probability; the same ones within a step.

    Args:
        p: The probability that a weight is dropped.
        modules: Links that see that loss; by default all that follow.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1000))
        >>> _ = mo.Optimizer([w], m.WeightDropout(0.25, seed=0), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> sorted(set(w.tolist())), bool(abs(w.mean() - 0.25) < 0.1)
        ([0.0, 1.0], True)

    References:
        L. Wan et al., "Regularization of neural networks using DropConnect", ICML 2013.
    """

    ranges = {check.probability: ("p",)}

    p: float = field(default=0.5, kw_only=False)
    modules: Chainable | None = None
    seed: int | None = None

    def pre_step(self, objective: Objective) -> None:
        """Choose the weights of this step."""
        self._drawn = [
            _coins(param, self.settings[param]["p"], self.get_generator(param.device, self.seed))
            for param in objective.params
        ]

    def change(self, param: Tensor, drawn: Tensor) -> None:
        """Set the chosen weights to zero."""
        param.masked_fill_(drawn, 0)


class PerturbWeights(_ChangeWeights):
    r"""Evaluates the loss at weights with noise, $x + \alpha\,s\,z$; the same noise within a step.

    Args:
        alpha: The size of the noise.
        relative: Whether it is relative to the size s of each tensor, by `metric`; else s is one.
        distribution: "normal", "uniform", "rademacher" or "sphere".
        metric: The size of a tensor: "mad" (the mean of absolute values), "std", or a norm as in `ClipNorm`.
        modules: Links that see that loss; by default all that follow.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> opt = mo.Optimizer([w], m.PerturbWeights(alpha=0.5, distribution="rademacher", seed=0), m.LR(0.5))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.abs().item()
        1.0
    """

    ranges = {check.non_negative: ("alpha",)}
    attributes = ("distribution",)

    alpha: Setting = 0.1
    relative: bool = True
    distribution: Literal["normal", "uniform", "rademacher", "sphere"] = "normal"
    metric: Any = "mad"
    modules: Chainable | None = None
    seed: int | None = None

    def pre_step(self, objective: Objective) -> None:
        """Draw the noise of this step."""
        params = objective.params
        generator = self.get_generator(params[0].device, self.seed)
        self._drawn = []
        for param, z in zip(params, sample_like(params, self.distribution, 1.0, generator), strict=True):
            setting = self.settings[param]
            size: Any = 1.0
            if setting["relative"] and param.numel():
                size = read(metric(param.detach(), setting["metric"], tuple(range(param.dim()))).reshape(()))
            self._drawn.append(z * (setting["alpha"] * size))

    def change(self, param: Tensor, drawn: Tensor) -> None:
        """Add the noise."""
        param.add_(drawn)


class RandomReinitialize(Module):
    """Now and then puts some weights back to where they were at first: the update is the way there.

    Put it last, so that the weights get where they are meant to.

    Args:
        p_reinit: The probability of it at a step.
        p_weights: The probability of each weight then.
        store_every: The number of steps after which the weights are stored again; None keeps the first ones.
        beta: Mix what is stored with what was stored before, of which this part is kept.
        reset: Whether the state of all other links is reset, too.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.LR(0.1), m.RandomReinitialize(p_reinit=0.5, p_weights=1.0, seed=0))
        >>> seen = []
        >>> for _ in range(20):
        ...     _ = opt.step(mo.closure(lambda: w.sum()))
        ...     seen.append(round(w.item(), 1))
        >>> seen.count(1.0) > 3, min(seen) < 0.9
        (True, True)
    """

    points = ("stored",)

    def __init__(
        self,
        *,
        p_reinit: float = 0.01,
        p_weights: float = 0.1,
        store_every: int | None = None,
        beta: float = 0.0,
        reset: bool = False,
        seed: int | None = None,
    ) -> None:
        check.probability("RandomReinitialize", "p_reinit", p_reinit)
        check.probability("RandomReinitialize", "p_weights", p_weights)
        check.fraction("RandomReinitialize", "beta", beta)
        check.allow(check.at_least_one, None)("RandomReinitialize", "store_every", store_every)
        super().__init__({"p_reinit": p_reinit, "p_weights": p_weights, "beta": beta})
        self.store_every, self.reset_others, self.seed = store_every, reset, seed

    def update(self, objective: Objective) -> None:
        """Store initial weights, and draw whether to reset some."""
        params = objective.params
        steps = self.increment_counter("steps", 0)
        for param in params:
            state, beta = self.state[param], self.settings[param]["beta"]
            if "stored" not in state:
                state["stored"] = param.detach().clone()
            elif self.store_every is not None and steps % self.store_every == 0:
                state["stored"].lerp_(param.detach(), 1 - beta)
        coin = float(torch.rand((), generator=self.get_generator("cpu", self.seed)))
        again = [coin < self.settings[param]["p_reinit"] for param in params]
        for param, its in zip(params, again, strict=True):
            state = self.state[param]
            state.pop("chosen", None)
            if its:
                generator = self.get_generator(param.device, self.seed)
                state["chosen"] = _coins(param, self.settings[param]["p_weights"], generator)
        if any(again) and self.reset_others:
            objective.post_step_hooks.append(partial(reset_others, self))

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with an update that resets the chosen weights."""
        out = list(objective.get_updates())
        for i, param in enumerate(objective.params):
            state = self.state[param]
            if "chosen" in state and (objective.present is None or objective.present[i]):
                out[i] = torch.where(state["chosen"], param.detach() - state["stored"], out[i])
        objective.updates = out
        return objective
