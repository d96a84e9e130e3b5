"""What methods that precondition by a sketch of the Hessian's diagonal have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...optim import Objective
from .._transforms import transform_buffers
from ._base import SecondOrderLink

_DISTRIBUTIONS = ("rademacher", "normal", "gaussian", "uniform", "sphere")


class HutchinsonBase(SecondOrderLink):
    """Estimates the Hessian's diagonal, or products with random vectors, at every n-th step.

    Args:
        update_freq: Estimate at every n-th step.
        **arguments: The settings, among them hvp_method, distribution, h, n_samples and zHz; `seed` and `inner`; and the
            `*_tfm`, links that transform copies of what is remembered before it is used.
    """

    shared_settings = ("n_samples", "zHz", "distribution", "hvp_method", "h")

    def __init__(self, *, update_freq: int, **arguments: Any) -> None:
        name, distribution = type(self).__name__, arguments["distribution"]
        if distribution not in _DISTRIBUTIONS:
            raise ValueError(f"{name}: distribution is {distribution!r}; it can be {', '.join(_DISTRIBUTIONS)}")
        if arguments["n_samples"] < 1 or update_freq < 1:
            raise ValueError(f"{name}: n_samples and update_freq are at least 1")
        children = {key: arguments.pop(key) for key in list(arguments) if key.endswith("_tfm")}
        super().__init__(**arguments)
        self.every = update_freq
        for key, links in children.items():
            self.set_child(key, links)

    def find_known(
        self, objective: Objective, states: list[dict[str, Any]], **buffers: str
    ) -> list[tuple[int, dict[str, Any]]]:
        """The parameters that something is known about, with their states as the `*_tfm` links make them.

        Args:
            objective: The objective.
            states: The states.
            **buffers: The state that each argument's links are for.
        """
        kept = [i for i, state in enumerate(states) if all(name in state for name in buffers.values())]
        rows = [dict(states[i]) for i in kept]
        params = [objective.params[i] for i in kept]
        for key, name in buffers.items():
            found = transform_buffers(self, key, [row[name] for row in rows], params, objective)
            for row, buffer in zip(rows, found, strict=True):
                row[name] = buffer
        return list(zip(kept, rows, strict=True))


class DiagonalMoments(HutchinsonBase):
    """Divides the mean gradient by a running mean that is learnt from estimates of the Hessian's diagonal."""

    second: ClassVar[str]
    """The entry of the state that holds that mean."""

    @abstractmethod
    def learn_diagonal(self, held: Tensor, D: Tensor, setting: Any) -> None:
        """Take one estimate of the diagonal into the mean, in place."""

    @abstractmethod
    def divide(self, m: Tensor, D: Tensor, setting: Any) -> Tensor:
        """The update from both means."""

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """The mean gradient, and the other mean when it is its turn."""
        found: list[Tensor] | None = None
        first = settings[0]
        if self.increment_counter("estimates", 0) % self.every == 0:
            found = objective.hutchinson_hessian(
                n_samples=first["n_samples"],
                distribution=first["distribution"],
                hvp_method=first["hvp_method"],
                h=first["h"],
                generator=self.get_generator(objective.params[0].device, self.seed),
                zHz=first["zHz"],
            )[0]
        for i, (u, state, setting) in enumerate(zip(objective.peek_updates(), states, settings, strict=True)):
            if objective.present is not None and not objective.present[i]:
                continue
            if "exp_avg" not in state:
                state["exp_avg"], state[self.second] = torch.zeros_like(u), torch.zeros_like(u)
                state["step"] = state["estimates"] = 0
            state["step"] += 1
            state["exp_avg"].lerp_(u, 1 - setting["beta1"])
            if found is not None:
                state["estimates"] += 1
                self.learn_diagonal(state[self.second], found[i], setting)

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Divides one mean by the other."""
        out = list(objective.get_updates())
        buffers = {"exp_avg_tfm": "exp_avg", f"{self.second}_tfm": self.second}
        for i, state in self.find_known(objective, states, **buffers):
            setting, m, D = settings[i], state["exp_avg"], state[self.second]
            if setting["debias"]:
                m = m / (1 - setting["beta1"] ** state["step"])
                D = D / (1 - setting["beta2"] ** max(state["estimates"], 1))
            out[i] = self.divide(m, D, setting)
        objective.updates = out
        return objective
