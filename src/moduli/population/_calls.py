"""Calling a population: outputs, losses and gradients of every member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn  # noqa: F401 - for the examples

from moduli.labels import Tensor as LabelledTensor

from ._core import Core, allocate
from ._evaluator import forward
from ._rule import Call, EvaluationPlan, read_call


class Calls(Core):
    """How members are evaluated."""

    def __call__(
        self,
        *args: Any,
        in_dims: Any = None,
        vectorize: str = "auto",
        chunk_size: int | None = None,
        randomness: str = "different",
        **kwargs: Any,
    ) -> Any:
        """Call every member and stack what they return along a new first dimension.

        Args:
            *args: Arguments of the model, the same for all members unless `in_dims` says otherwise.
            in_dims: The dimension of an argument along which each member has its own slice; a tuple for several
                arguments, None in it for those that are shared.
            vectorize: `"auto"` chooses from shapes and layer types; `"vmap"`, `"chunked"`, `"loop"` say how.
            chunk_size: At most how many members at a time, to bound memory.
            randomness: Whether layers such as dropout draw `"different"` numbers for each member, the `"same"`, or raise
                an `"error"`.
            **kwargs: More arguments of the model, the same for all members.

        Raises:
            StructureError: If an argument does not have one slice per member.
            ValueError: If the model cannot be evaluated in the way asked for.
            MemoryError: If that takes more memory than there is; a smaller `chunk_size` takes less.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 5, 3, 2)
            >>> pop(torch.ones(4, 3)).shape, pop(torch.ones(5, 4, 3), in_dims=0).shape
            (torch.Size([5, 4, 2]), torch.Size([5, 4, 2]))
        """
        return self._evaluate(read_call(forward, args, kwargs, in_dims, self._count, vectorize, chunk_size, randomness))

    def losses(
        self,
        fn: Callable[..., Any],
        *args: Any,
        in_dims: Any = None,
        vectorize: str = "auto",
        chunk_size: int | None = None,
        randomness: str = "different",
    ) -> Tensor:
        """The loss of every member: `fn(member, *args)`, as a tensor of shape (N,).

        With gradients enabled, the result is differentiable with respect to `parameters()`: the gradient of the sum
        holds each member's own.

        Args:
            fn: A function of a model and the arguments that returns one number.
            *args: Arguments, as in a call.
            in_dims: As in a call.
            vectorize: As in a call.
            chunk_size: As in a call.
            randomness: As in a call.

        Raises:
            ValueError: If the function returns anything but one number per member.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 5, 3, 2)
            >>> pop.losses(lambda net: net(torch.ones(4, 3)).square().mean()).shape
            torch.Size([5])
        """
        call = read_call(fn, args, {}, in_dims, self._count, vectorize, chunk_size, randomness)
        return _one_each(self._evaluate(call), self._count)

    def gradients(self, fn: Callable[..., Any], *args: Any, **how: Any) -> Self:
        """The gradient of every member's loss, as a population: row i is the gradient at member i.

        Args:
            fn: A function of a model and the arguments that returns one number.
            *args: Arguments, as in a call.
            **how: `in_dims`, `vectorize`, `chunk_size` and `randomness`, as in a call; `chunk_size` bounds the memory of the
                backward pass too.

        Returns:
            A population with the members' structure. Frozen and unused parameters have zeros.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 5, 3, 2)
            >>> step = pop.gradients(lambda net: net(torch.ones(3)).sum())
            >>> pop -= 0.1 * step
            >>> step[0].bias.data
            tensor([1., 1.])
        """
        return self.losses_and_gradients(fn, *args, **how)[1]

    def losses_and_gradients(
        self,
        fn: Callable[..., Any],
        *args: Any,
        in_dims: Any = None,
        vectorize: str = "auto",
        chunk_size: int | None = None,
        randomness: str = "different",
    ) -> tuple[Tensor, Self]:
        """`losses` and `gradients` of one evaluation; the losses carry no history.

        Args:
            fn: A function of a model and the arguments that returns one number.
            *args: Arguments, as in a call.
            in_dims: As in a call.
            vectorize: As in a call.
            chunk_size: As in a call.
            randomness: As in a call.

        Example:
            >>> from moduli.population import Population
            >>> losses, step = Population.of(nn.Linear, 5, 3, 2).losses_and_gradients(lambda net: net.bias.sum())
            >>> losses.shape, step
            (torch.Size([5]), Population(5 x Linear, 8 parameters each))
        """
        call = read_call(fn, args, {}, in_dims, self._count, vectorize, chunk_size, randomness)
        made: tuple[Tensor, Self] = self._evaluate(call, gradients=True)
        return made

    def explain(self, *args: Any, in_dims: Any = None, vectorize: str = "auto", chunk_size: int | None = None) -> str:
        """How a call with these arguments is evaluated, and why, in a sentence.

        A model that `torch.vmap` turned out to be unable to follow, in a call with `"auto"`, is looped from then on.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.LSTM(3, 2), 5).explain(torch.ones(7, 3))
            'loop: the model (LSTM) has no batching rule'
        """
        call = read_call(forward, args, {}, in_dims, self._count, vectorize, chunk_size)
        return self._evaluator.plan(call, self._count).reason

    # -- inside ------------------------------------------------------------------------------------------------------

    def _differentiate(self, call: Call, plan: EvaluationPlan) -> tuple[Tensor, Self]:
        """The losses and gradients of all members, according to a plan."""
        with torch.inference_mode(False), torch.no_grad():
            values = allocate(self.layout, self._count)
            out = self.layout.views(values.matrices)
            views = self.layout.views(self._values.matrices)
            losses: list[Tensor] = []
            block = plan.block or max(self._count, 1)
            for start in range(0, self._count, block):
                stop = min(self._count, start + block)
                rows = [v[start:stop].detach().requires_grad_(f) for v, f in zip(views, self._flags, strict=True)]
                buffers = [held[start:stop] for held in self._buffers.values()]
                with torch.enable_grad():
                    made = self._evaluator.run(call, plan, [*rows, *buffers], start, stop - start)
                    loss = _one_each(made, stop - start)
                    tracked = [row for row in rows if row.requires_grad]
                    found = iter(
                        torch.autograd.grad(loss.sum(), tracked, allow_unused=True)
                        if tracked and loss.requires_grad
                        else [None] * len(tracked)
                    )
                for target, row in zip(out, rows, strict=True):
                    gradient = next(found) if row.requires_grad else None
                    target[start:stop].zero_() if gradient is None else target[start:stop].copy_(gradient)
                losses.append(loss.detach())
            if not losses:
                losses.append(torch.zeros(0))
            copies = self._copy_buffers()
        return torch.cat(losses), self._make_alike(values, self._count, copies)

    def _evaluate(self, call: Call, gradients: bool = False) -> Any:
        """What a call returns, or the losses and gradients."""
        self._check_members()
        plan = self._evaluator.plan(call, self._count)
        buffers = list(self._buffers.values())

        def act(how: EvaluationPlan) -> Any:
            if gradients:
                return self._differentiate(call, how)
            return self._evaluator.run(call, how, [*self._read_leaves(), *buffers], 0, self._count)

        return self._evaluator.attempt(act, plan, call, self._count, buffers)


def _one_each(made: Any, count: int) -> Tensor:
    """One number per member.

    Raises:
        ValueError: If there is anything else.
        TypeError: If it is no tensor.
    """
    values = made.data if isinstance(made, LabelledTensor) else made
    if not isinstance(values, Tensor):
        raise TypeError(f"a loss is one number per member; the function returned a {type(values).__name__}")
    if values.shape != (count,):
        raise ValueError(
            f"a loss is one number per member; the function returned shape {tuple(values.shape[1:])}: end it with .mean() "
            "or .sum()"
        )
    return values
