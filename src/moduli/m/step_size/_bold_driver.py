"""The bold driver: a step size that grows while the loss falls."""

from __future__ import annotations

from ...optim import Chainable, Need, Objective
from .._checks import positive
from .._scalars import choose, read
from .._transforms import Settings, States
from ._step_scale import StepScale


class BoldDriver(StepScale):
    """Multiplies the update by a step size that grows when the loss fell and shrinks when it did not.

    Args:
        a_init: The first step size.
        nplus: The growth.
        nminus: The shrinkage.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.BoldDriver(a_init=0.25, nplus=2.0))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.])

    References:
        R. Battiti, "Accelerated backpropagation learning: two optimization methods", Complex Systems 1989.
    """

    needs = frozenset({Need.GRADIENT, Need.LOSS})
    ranges = {positive: ("a_init", "nplus", "nminus")}

    def __init__(
        self, *, a_init: float = 1e-3, nplus: float = 1.1, nminus: float = 0.1, inner: Chainable | None = None
    ) -> None:
        super().__init__(locals())

    def update_states(self, objective: Objective, states: States, settings: Settings) -> None:
        """Compares the loss with the last one."""
        setting, memory = settings[0], self.global_state
        loss = read(objective.get_loss(backward=True).double())
        if "loss" in memory:
            memory["alpha"] = memory["alpha"] * choose(loss < memory["loss"], setting["nplus"], setting["nminus"])
        else:
            memory.setdefault("alpha", setting["a_init"])
        memory["loss"] = loss

    def reset_for_online(self) -> None:
        """Forgets the last loss."""
        super().reset_for_online()
        self.global_state.pop("loss", None)
