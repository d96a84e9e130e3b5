"""Calling a population: outputs, losses and gradients of every member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli.labels import Tensor as LabelledTensor

from ._attempt import attempted
from ._chain import chain, run
from ._core import Core
from ._evaluate import arguments, evaluate
from ._plan import Kind, Plan, choose, kind_of
from ._swap import Swap
from ._values import fresh

__all__ = ["Calls"]


class Calls(Core):
    """How members are evaluated."""

    __slots__ = ()

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
        return self._evaluated(_forward, args, kwargs, in_dims, vectorize, chunk_size, randomness)

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
        made = self._evaluated(fn, args, {}, in_dims, vectorize, chunk_size, randomness)
        return _one_each(made, self._count)

    def gradients(
        self,
        fn: Callable[..., Any],
        *args: Any,
        in_dims: Any = None,
        vectorize: str = "auto",
        chunk_size: int | None = None,
        randomness: str = "different",
    ) -> Self:
        """The gradient of every member's loss, as a population: row i is the gradient at member i.

        Args:
            fn: A function of a model and the arguments that returns one number.
            *args: Arguments, as in a call.
            in_dims: As in a call.
            vectorize: As in a call.
            chunk_size: As in a call; it bounds the memory of the backward pass too.
            randomness: As in a call.

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
        return self.losses_and_gradients(
            fn, *args, in_dims=in_dims, vectorize=vectorize, chunk_size=chunk_size, randomness=randomness
        )[1]

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
        self._ready()
        flat = arguments(args, {}, in_dims, self._count)
        plan = self._plan(flat, fn, vectorize, chunk_size)
        # What a failed call did to the statistics of some members is taken back.
        kept = {name: held.clone() for name, held in self._buffers.items()}

        def call(how: Plan) -> tuple[Tensor, Self]:
            try:
                return self._differentiated(fn, flat, how, randomness)
            except BaseException:
                with torch.no_grad():
                    for name, before in kept.items():
                        self._buffers[name].copy_(before)
                raise

        made: tuple[Tensor, Self] = self._attempted(call, plan, fn, vectorize, randomness)
        return made

    def explain(self, *args: Any, in_dims: Any = None, vectorize: str = "auto", chunk_size: int | None = None) -> str:
        """How a call with these arguments is evaluated, and why, in a sentence.

        A model that `torch.vmap` turned out to be unable to follow, in a call with `"auto"`, is looped from then on.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.LSTM(3, 2), 5).explain(torch.ones(7, 3))
            'loop: the model (LSTM) has no batching rule'
        """
        return self._plan(arguments(args, {}, in_dims, self._count), _forward, vectorize, chunk_size).reason

    # -- inside ------------------------------------------------------------------------------------------------------

    def _attempted(self, call: Callable[[Plan], Any], plan: Plan, fn: Any, vectorize: str, randomness: str) -> Any:
        def refused(reason: str) -> None:
            # That a function other than the model's own cannot be followed says nothing about the next one.
            if fn is _forward:
                self._plans["refused"] = reason

        return attempted(call, plan, vectorize == "auto" and randomness != "error", self._count, refused)

    def _differentiated(self, fn: Any, flat: Any, plan: Plan, randomness: str) -> tuple[Tensor, Self]:
        """The losses and gradients of all members, according to a plan."""
        with torch.inference_mode(False), torch.no_grad():
            values = fresh(self.layout, self._count)
            out = self.layout.views(values.matrices)
            views = self.layout.views(self._values.settle())
            names = list(self._buffers)
            losses: list[Tensor] = []
            block = plan.block or max(self._count, 1)
            for start in range(0, self._count, block):
                stop = min(self._count, start + block)
                rows = [v[start:stop].detach().requires_grad_(f) for v, f in zip(views, self._flags, strict=True)]
                buffers = [self._buffers[name][start:stop] for name in names]
                part = flat._replace(leaves=_sliced(flat, start, stop))
                with torch.enable_grad():
                    made = evaluate(self._swap(), fn, plan, rows, buffers, part, randomness, stop - start)
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
            copies = {name: held.clone() for name, held in self._buffers.items()}
        return torch.cat(losses), self._made(values, self._count, copies)

    def _swap(self) -> Swap:
        known = self._plans.get("swap")
        if known is None or known.module is not self.template:
            known = Swap(self.template, self._entries, [held for _, held in self.template.named_buffers()])
            self._plans["swap"] = known
        return known

    def _kind(self) -> Kind:
        known: Kind | None = self._plans.get("kind")
        if known is None:
            known = self._plans["kind"] = kind_of(self.template, self.layout)
        return known

    def _plan(self, args: Any, fn: Any, vectorize: str, chunk_size: int | None) -> Plan:
        reason = self._plans.get("refused") if fn is _forward and vectorize == "auto" else None
        if reason is not None:
            return Plan("loop", 0, reason)
        return choose(self._kind(), self.layout, self._count, args, fn, vectorize, chunk_size)

    def _evaluated(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, in_dims: Any, vectorize: str, chunk: Any, randomness: str
    ) -> Any:
        if randomness not in ("different", "same", "error"):
            raise ValueError(f"randomness={randomness!r}; choose from different, same, error")
        self._ready()
        flat = arguments(args, kwargs, in_dims, self._count)
        plan = self._plan(flat, fn, vectorize, chunk)
        leaves = self._stacked()
        if self._tape is not None and torch.is_grad_enabled():
            leaves = self._tape(leaves)
        if plan.form == "stacked" and fn is _forward and len(args) == 1 and not kwargs and flat.dims == [None]:
            layers = chain(self.template, self._entries)
            block = plan.block or self._count
            made = None
            if layers is not None:
                made = self._attempted(lambda _: run(layers, leaves, args[0], block), plan, fn, "stacked", randomness)
            if made is not None:
                return made
        attentive = fn is not _forward or self._kind().attentive
        buffers = list(self._buffers.values())

        def call(how: Plan) -> Any:
            return evaluate(self._swap(), fn, how, leaves, buffers, flat, randomness, self._count, attentive)

        return self._attempted(call, plan, fn, vectorize, randomness)


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _sliced(args: Any, start: int, stop: int) -> list[Any]:
    """The leaves of arguments, with those that differ cut to some members."""
    rows = iter(args.rows(start, stop))
    made = []
    for leaf, dim in zip(args.leaves, args.dims, strict=True):
        if dim is None:
            made.append(leaf)
        else:
            row = next(rows)
            made.append(row if isinstance(leaf, Tensor) else type(leaf)(row, leaf.dims))
    return made


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
