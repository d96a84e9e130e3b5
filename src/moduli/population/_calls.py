"""Calling a population: outputs, losses and gradients of every member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn  # noqa: F401 - for the examples

from moduli.labels import Tensor as LabelledTensor
from moduli.layout import Guard

from ._core import Core, allocate
from ._evaluator import forward
from ._rule import Call, EvaluationPlan, read_call

# Phrases in torch's errors when an operation has no batching rule, or reads the values of a batch.
_UNBATCHED = (
    "vmap:",
    "Batching rule not implemented",
    "Cannot access data pointer of Tensor that doesn't have storage",
)
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class Calls(Core):
    """The methods of a population that evaluate its members."""

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
            vectorize: `"auto"` chooses by shapes and layer types; or `"vmap"`, `"chunked"` or `"loop"`.
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
        """Return the loss of every member, `fn(member, *args)`, as a tensor of shape (N,).

        With gradients enabled, the result is differentiable with respect to `parameters()`: the gradient of the sum
        consists of the members' gradients.

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
        """Return the gradient of every member's loss as a population: row i is the gradient at member i.

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
        """Return `losses` and `gradients` from one evaluation; the losses are detached.

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
        result: tuple[Tensor, Self] = self._evaluate(call, gradients=True)
        return result

    def explain(self, *args: Any, in_dims: Any = None, vectorize: str = "auto", chunk_size: int | None = None) -> str:
        """Return how a call with these arguments is evaluated, and why, in a sentence.

        Further lines report timings of this process for layers of these sizes, if calls have measured them. If `torch.vmap`
        failed on a model in a call with `"auto"`, later calls loop.

        Args:
            *args: Arguments of the model.
            in_dims: As in a call.
            vectorize: As in a call.
            chunk_size: As in a call.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.LSTM(3, 2), 5).explain(torch.ones(7, 3))
            'loop: the model (LSTM) has no batching rule'
        """
        call = read_call(forward, args, {}, in_dims, self._count, vectorize, chunk_size)
        recorded = torch.is_grad_enabled() and any(self._flags)
        plan = self._evaluator.plan(call, self._count, recorded)
        return "\n".join([plan.reason, *self._evaluator.describe_choices(plan)])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _differentiate(self, call: Call, plan: EvaluationPlan) -> tuple[Tensor, Self]:
        """Return the losses and gradients of all members, according to a plan."""
        with torch.inference_mode(False), torch.no_grad():
            values = allocate(self.layout, self._count)
            out = self.layout.views(values.matrices)
            views = self.layout.views(self._values.matrices)
            losses: list[Tensor] = []
            block = plan.block or max(self._count, 1)
            for start in range(0, self._count, block):
                stop = min(self._count, start + block)
                rows = [v[start:stop].detach().requires_grad_(f) for v, f in zip(views, self._flags, strict=True)]
                buffers = [buffer[start:stop] for buffer in self._buffers.values()]
                with torch.enable_grad():
                    result = self._evaluator.run(call, plan, [*rows, *buffers], start, stop - start)
                    loss = _one_each(result, stop - start)
                    tracked = [row for row in rows if row.requires_grad]
                    gradients = iter(
                        torch.autograd.grad(loss.sum(), tracked, allow_unused=True)
                        if tracked and loss.requires_grad
                        else [None] * len(tracked)
                    )
                for target, row in zip(out, rows, strict=True):
                    gradient = next(gradients) if row.requires_grad else None
                    target[start:stop].zero_() if gradient is None else target[start:stop].copy_(gradient)
                losses.append(loss.detach())
            if not losses:
                losses.append(torch.zeros(0))
            copies = self._copy_buffers()
        return torch.cat(losses), self._make_alike(values, self._count, copies)

    def _evaluate(self, call: Call, gradients: bool = False) -> Any:
        """Return the result of a call, or the losses and gradients; loop over members if `torch.vmap` fails on the model.

        A call that fails leaves the buffers unchanged.

        Raises:
            MemoryError: If there is not enough memory.
        """
        self._check_members()
        recorded = not gradients and torch.is_grad_enabled() and any(self._flags)
        plan = self._evaluator.plan(call, self._count, recorded)
        may_loop = call.vectorize == "auto" and call.randomness != "error" and plan.form != "loop"
        state = torch.get_rng_state() if may_loop else None

        def call_or_undo(how: EvaluationPlan) -> Any:
            with Guard() as guard:
                guard.tensors(self._buffers.values())
                if gradients:
                    return self._differentiate(call, how)
                tensors = [*self._read_leaves(), *self._buffers.values()]
                return self._evaluator.run(call, how, tensors, 0, self._count)

        try:
            try:
                return call_or_undo(plan)
            except RuntimeError as error:
                if state is None or not _says(error, _UNBATCHED):
                    raise
                why = str(error).splitlines()[0].removeprefix("vmap: ")
            # A loop from the start would have drawn from this state.
            torch.set_rng_state(state)
            reason = f"loop: torch.vmap cannot follow the model ({why})"
            result = call_or_undo(EvaluationPlan("loop", 0, reason))
            # A failure of another function than the model itself says nothing about later functions.
            if call.fn is forward:
                self._evaluator.refused = reason
            return result
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _says(error, _OUT_OF_MEMORY):
                raise
            raise self._explain_memory(plan) from error

    def _explain_memory(self, plan: EvaluationPlan) -> MemoryError:
        """Return the error of a call that ran out of memory, with a chunk size that takes less."""
        size = 1 if plan.form == "loop" else plan.block or self._count
        remedy = f"give a chunk_size below {size}" if size > 1 else "use smaller batches (chunk_size is 1 already)"
        return MemoryError(
            f"evaluating {size} of {self._count} members at a time takes more memory than there is; {remedy}. "
            "Nothing was changed"
        )


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    message = str(error)
    return any(phrase in message for phrase in phrases)


def _one_each(made: Any, count: int) -> Tensor:
    """Return the result of a function as a plain tensor of one number per member.

    Raises:
        ValueError: If it has another shape.
        TypeError: If it is not a tensor.
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
