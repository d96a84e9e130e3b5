"""The part of `Objective` that moves the parameters, evaluates where they are, and puts them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .._torch import is_fake
from ._evaluators import hold_gradients

if TYPE_CHECKING:
    from .objective import Objective


class Moving:
    """Trial points are written in place; where the step began is remembered for each parameter that was moved."""

    params: list[Tensor]
    _starts: dict[Tensor, Tensor]  # shared by all copies of an objective
    _graph: tuple[Tensor, list[Tensor]] | None = None
    _residuals: Tensor | None = None
    _elsewhere_graph: tuple[Tensor, list[Tensor]] | None = None

    def _remember_start(self, values: Sequence[Tensor] | None = None) -> None:
        # For each parameter by itself: a link may move some of them only, and another the rest. A caller with
        # a copy of the values that is never written can give it.
        starts = self._starts
        for i, param in enumerate(self.params):
            if param not in starts:
                starts[param] = param.detach().clone() if values is None else values[i]

    def restore_start(self) -> None:
        """Put the parameters back where the step began, if a link has moved them."""
        with torch.no_grad():
            for param, value in self._starts.items():
                param.copy_(value)

    @contextmanager
    def moved(self) -> Iterator[list[Tensor]]:
        """A block in which a link may move the parameters; they are put back at its end, whatever happens.

        Gives the values at the start of the block.
        """
        self._remember_start()
        before = [param.detach().clone() for param in self.params]
        grads = [param.grad for param in self.params]
        try:
            yield before
        finally:
            with torch.no_grad():
                for param, value, grad in zip(self.params, before, grads, strict=True):
                    param.copy_(value)
                    param.grad = grad
            self._forget_graph()

    def move_to(self, point: Sequence[Tensor]) -> None:
        """Put the parameters at a point, in place. Where the step fails later, they return to its start."""
        self._remember_start()
        with torch.no_grad():
            for param, value in zip(self.params, point, strict=True):
                param.copy_(value)
        self._forget_graph()

    def original_closure(self, note: Callable[[Tensor], None]) -> Callable[..., Tensor]:
        """The closure as it is now, for one that replaces it and calls it; `note` is told the loss where the step is now.

        It is differentiated through where the other one is: asked for a value with grad mode on, it keeps the graph.
        """
        original = cast("Objective", self).clone(clone_updates=False)
        params = original.params
        start = [param.detach().clone() for param in params]
        versions = [param._version for param in params]

        def ask(backward: bool = True) -> Tensor:
            evaluator = original._closure("evaluations at other points")
            if not backward and torch.is_grad_enabled() and evaluator.kind != "no":
                raw = evaluator.ask()
                loss = raw if original.members is not None else original._scalar(raw)
                value = original._value(raw)
            else:
                loss = value = original.get_loss(backward=backward, at_x0=False)
            if _are_at(params, start, versions):
                note(value)
            return loss

        return ask

    def _forget_graph(self) -> None:
        """What autograd saved of the parameters at the start was written over: differentiated again, it is evaluated again."""
        self._graph = self._residuals = None

    def _evaluate_elsewhere(self, backward: bool, graph: bool) -> Tensor:
        """The loss where the parameters are now; its gradient is left in `.grad`, with a graph in `_elsewhere_graph`."""
        me = cast("Objective", self)
        ask = me._closure("evaluations at other points")
        if graph:
            raw, _, self._elsewhere_graph = me._ask_graph(ask)
            return me._value(raw)
        if backward:
            return me._value(ask.gradient(me.params, me._scalar))
        # A function of ours leaves gradients alone.
        with nullcontext() if ask.kind == "function" else hold_gradients(me.params):
            return me._value(ask.value())


def can_compare(param: Tensor) -> bool:
    """Whether comparing values costs no wait for a device."""
    return param.device.type == "cpu" and not is_fake(param)


def _are_at(params: Sequence[Tensor], start: Sequence[Tensor], versions: Sequence[int]) -> bool:
    """Whether parameters are where they were; on a device, whether they were never moved."""
    return all(
        torch.equal(param, value) if can_compare(param) else param._version == version
        for param, value, version in zip(params, start, versions, strict=True)
    )
