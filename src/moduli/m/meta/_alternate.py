"""Links that take turns."""

from __future__ import annotations

from collections.abc import Sequence

from ...optim import Chainable, Module, Objective
from ...optim import step as run


class Alternate(Module):
    """Chains in turn, each for its own number of steps, again and again.

    Args:
        *modules: Links, or sequences of links.
        steps: How many steps each chain makes before the next one's turn: a number, or one for each.
        loop: False stays with the last chain for ever.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.Alternate(m.LR(-1.0), m.LR(-0.1), steps=[2, 1]))
        >>> for _ in range(4):
        ...     _ = opt.step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([3.1000])
    """

    differentiable = True
    needs = frozenset()
    members = "matrix"

    def __init__(self, *modules: Chainable, steps: int | Sequence[int] = 1, loop: bool = True) -> None:
        super().__init__()
        if not modules:
            raise ValueError(f"{type(self).__name__} needs at least one chain")
        counts = [steps] * len(modules) if isinstance(steps, int) else list(steps)
        wanted = len(modules) if loop or isinstance(steps, int) else len(modules) - 1
        if len(counts) not in (wanted, len(modules)) or any(count < 1 for count in counts):
            raise ValueError(
                f"{type(self).__name__}: steps is {steps!r} for {len(modules)} chains; give one number, at least 1, for each"
            )
        self.steps = counts
        self.loop = loop
        self.set_children_sequence(modules)

    def _turn(self) -> Module:
        now = self.global_state.get("steps", 0)
        chains = self.get_children_sequence()
        if self.loop:
            now %= sum(self.steps)
        for chain, count in zip(chains, self.steps, strict=False):
            if now < count:
                return chain
            now -= count
        return chains[-1]

    def update(self, objective: Objective) -> None:
        """The chain whose turn it is learns."""
        self._turn().update(objective)

    def apply(self, objective: Objective) -> Objective:
        """The chain whose turn it is transforms the update, and the turn passes on."""
        chain = self._turn()
        self.global_state["steps"] = self.global_state.get("steps", 0) + 1
        return chain.apply(objective)

    def step(self, objective: Objective) -> Objective:
        """The chain whose turn it is makes its step."""
        chain = self._turn()
        out = run(objective, [chain])
        self.global_state["steps"] = self.global_state.get("steps", 0) + 1
        return out


class Switch(Alternate):
    """Chains one after the other, each for its number of steps, the last one for ever.

    Args:
        *modules: Links, or sequences of links.
        steps: After how many steps each chain hands over to the next.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.Switch(m.LR(-1.0), m.LR(-0.1), steps=1))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([1.2000])
    """

    def __init__(self, *modules: Chainable, steps: int | Sequence[int]) -> None:
        super().__init__(*modules, steps=steps, loop=False)
