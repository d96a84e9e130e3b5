"""Looking at a chain from inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...optim import Module, Need, Objective


class _Print(Module):
    needs = frozenset()
    members = True
    text = ""

    def __init__(self, text: str | None = None, *, print_fn: Callable[[str], Any] = print) -> None:
        super().__init__()
        self.text = type(self).text if text is None else text
        self.print_fn = print_fn

    def observe(self, objective: Objective) -> Any:
        """What is printed."""
        raise TypeError(f"{type(self).__name__} does not say what to print")

    def apply(self, objective: Objective) -> Objective:
        """Print, and change nothing."""
        self.print_fn(f"{self.text}{self.observe(objective)}")
        return objective


class PrintLoss(_Print):
    """Prints the loss.

    Args:
        text: Printed before it.
        print_fn: Prints.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> _ = mo.Optimizer([w], m.PrintLoss(), m.LR(0.1)).step(mo.closure(lambda: w.sum()))
        loss = 1.0
    """

    decides_on_host = True

    needs = frozenset({Need.LOSS})
    text = "loss = "

    def observe(self, objective: Objective) -> Any:
        return objective.get_loss(backward=False).tolist()


class PrintParams(_Print):
    """Prints the parameters.

    Args:
        text: Printed before them.
        print_fn: Prints.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> _ = optim.step_tensors(m.PrintParams(), [torch.ones(1)], [torch.zeros(1)])
        params = [[0.0]]
    """

    decides_on_host = True

    text = "params = "

    def observe(self, objective: Objective) -> Any:
        return [param.tolist() for param in objective.params]


class PrintShape(_Print):
    """Prints the shapes of the update.

    Args:
        text: Printed before them.
        print_fn: Prints.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> _ = optim.step_tensors(m.PrintShape(), [torch.ones(1, 2)])
        shapes = [(1, 2)]
    """

    needs = frozenset({Need.GRADIENT})
    text = "shapes = "

    def observe(self, objective: Objective) -> Any:
        return [tuple(tensor.shape) for tensor in objective.peek_updates()]


class PrintUpdate(_Print):
    """Prints the update.

    Args:
        text: Printed before it.
        print_fn: Prints.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> _ = optim.step_tensors(m.PrintUpdate(), [torch.ones(2)])
        update = [[1.0, 1.0]]
    """

    decides_on_host = True

    needs = frozenset({Need.GRADIENT})
    text = "update = "

    def observe(self, objective: Objective) -> Any:
        return [tensor.tolist() for tensor in objective.peek_updates()]
