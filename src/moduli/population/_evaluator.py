"""Evaluates a function of a model for every member, as `_rule` plans: on stacked tensors, by vmap, or in a loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moduli._torch import has_autocast, has_global_hooks, in_transform, is_transformed
from moduli.layout import layout_and_tensors
from moduli.particles import StructureError

from ._measured import describe_choices
from ._rule import Call, EvaluationPlan, Kind, Outputs, choose, has_hooks, kind_of
from ._sequences import LinearStep, describe_blocks, find_steps, run_steps
from ._stacked import Stacked

_SEQUENCE = "sequence: linear layers and activation functions without gradients, in memory that blocks of members share"


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the model: the function that `pop(x)` evaluates for every member."""
    return model(*args, **kwargs)


class PopulationEvaluator:
    """Evaluates the members of the populations that share a template.

    Args:
        template: The model whose tensors are replaced by those of members during a call.

    Attributes:
        layout: The layout of a member.
        entries: The parameters of the template, in the order of the layout.
    """

    def __init__(self, template: nn.Module) -> None:
        self.template = template
        self.layout, self.entries = layout_and_tensors(template)
        # Why members have to be called in a loop, if torch.vmap failed on the model.
        self.refused: str | None = None

    @cached_property
    def swap(self) -> Swap:
        """The slots of the model's tensors."""
        return Swap(self.template, self.entries)

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The modules of the template, whose structure does not change."""
        return list(self.template.modules())

    @cached_property
    def steps(self) -> list[LinearStep] | None:
        """The layers of a model that is a sequence of linear ones and activation functions; None for other models."""
        return None if self.kind.not_plain is not None else find_steps(self.template, self.entries)

    @cached_property
    def attends(self) -> bool:
        """Whether the model may compute attention: it has attention layers of torch, or layers that are not torch's."""
        kinds = {getattr(type(module), "_adopted", type(module)) for module in self.template.modules()}
        return any(
            not kind.__module__.startswith("torch.nn.modules.")
            or "transformer" in kind.__module__
            or "Attention" in kind.__name__
            for kind in kinds
        )

    @cached_property
    def kind(self) -> Kind:
        """The properties of the model's layers that decide how it is evaluated."""
        return kind_of(self.template, self.layout)

    def plan(self, call: Call, count: int, recorded: bool = False) -> EvaluationPlan:
        """Return how a call is evaluated.

        Args:
            call: The function and its arguments.
            count: The number of members.
            recorded: Whether autograd records the whole call.
        """
        if self.refused is not None and call.fn is forward and call.vectorize == "auto":
            return EvaluationPlan("loop", 0, self.refused)
        if self._takes_sequence(call, count):
            return EvaluationPlan("sequence", 0, _SEQUENCE)
        return choose(self.kind, self.layout, count, call, recorded)

    def describe_choices(self, plan: EvaluationPlan) -> list[str]:
        """Return the timings of this process for layers of the model's sizes, as sentences."""
        if plan.form == "sequence":
            return describe_blocks(self.steps or [])
        shapes = {(entry.shape[0], entry.shape[1]) for entry in self.layout if len(entry.shape) == 2}
        return describe_choices(shapes) if plan.form == "stacked" else []

    def _takes_sequence(self, call: Call, count: int) -> bool:
        """Whether a call can be evaluated without the model's code: a sequence of layers, called without gradients."""
        if call.fn is not forward or call.vectorize != "auto" or call.chunk_size is not None or call.kwargs:
            return False
        if torch.is_grad_enabled() or len(call.leaves) != 1 or type(call.leaves[0]) is not Tensor or self.steps is None:
            return False
        plain = not (is_transformed() or has_autocast() or has_global_hooks() or has_hooks(self.modules))
        return count > 0 and plain and self._fits_sequence(call.leaves[0], call.dims[0], self.steps)

    def _fits_sequence(self, x: Tensor, dim: int | None, steps: list[LinearStep]) -> bool:
        """Whether data have the shape, dtype and device that the first linear layer takes."""
        weight = self.entries[steps[0].weight]
        fits = x.dim() - (dim is not None) > 0 and x.shape[-1] == weight.shape[-1] and dim != x.dim() - 1
        return fits and x.dtype is weight.dtype and x.device == weight.device and x.numel() > 0

    def run(self, call: Call, plan: EvaluationPlan, tensors: Sequence[Tensor], first: int, count: int) -> Any:
        """Call `fn(model, *args, **kwargs)` for some members and stack the results.

        Args:
            call: The function, and the arguments of all members.
            plan: How to evaluate.
            tensors: One tensor of shape (count, *shape) per parameter, then one per buffer; changes of buffers are written there.
            first: The index of the first of these members.
            count: The number of these members.
        """
        outputs = Outputs()
        with nullcontext() if call.fn is forward and not self.attends else self._choose_attention(plan):
            if count == 0:
                return self._call_nothing(call, outputs)
            if plan.form == "sequence":
                own, shared = call.rows(first, first + count), call.dims[0] is None
                return run_steps(self.steps or [], tensors, call.leaves[0] if shared else own[0], shared)
            if plan.form == "loop":
                return self._loop(call, tensors, call.rows(first, first + count), outputs, count)
            return outputs.unflatten(self._run_blocks(call, plan, tensors, first, count, outputs))

    def _run_blocks(
        self, call: Call, plan: EvaluationPlan, tensors: Sequence[Tensor], first: int, count: int, outputs: Outputs
    ) -> Sequence[Tensor]:
        """Return the flat outputs of members that are evaluated in blocks, stacked or by vmap."""
        block = plan.block or count
        # Split and not sliced: the gradient of a slice is as large as the whole, that of a split is one `cat`.
        parts = zip(*(torch.split(each, block) for each in tensors), strict=True) if block < count else [tensors]
        act = self._stack if plan.form == "stacked" else self._map
        blocks = []
        for start, rows in zip(range(first, first + count, block), parts, strict=True):
            blocks.append(act(call, rows, call.rows(start, min(first + count, start + block)), outputs))
        return blocks[0] if len(blocks) == 1 else [torch.cat(parts) for parts in zip(*blocks, strict=True)]

    def _choose_attention(self, plan: EvaluationPlan) -> AbstractContextManager[None]:
        """Return a context in which attention uses the kernels that suit the plan."""
        if plan.form in ("stacked", "sequence"):
            return nullcontext()
        if torch.is_grad_enabled() or in_transform() or (self.template.training and plan.form == "vmap"):
            return _no_shortcuts()
        return _ignore_warning()

    def _stack(self, call: Call, tensors: Sequence[Tensor], mapped: list[Tensor], outputs: Outputs) -> Sequence[Tensor]:
        """Call the function once on `Stacked` tensors, each of which represents the tensors of all members."""
        stacked = [Stacked(each, call.randomness) for each in (*tensors, *mapped)]
        output, _ = self._call_one(call, stacked, outputs)
        count = len(tensors[0])
        return [each.physical if type(each) is Stacked else each.expand(count, *each.shape) for each in output]

    def _map(self, call: Call, tensors: Sequence[Tensor], mapped: list[Tensor], outputs: Outputs) -> Sequence[Tensor]:
        """Call the function once by `torch.vmap`."""
        changed: list[int] = []

        # Flat tensors with the members in front, because vmap flattens nested arguments several times.
        def one_member(*args: Tensor) -> tuple[Tensor, ...]:
            output, rebound = self._call_one(call, args, outputs)
            changed[:] = list(rebound)
            return (*output, *rebound.values())

        results = torch.vmap(one_member, 0, 0, call.randomness)(*tensors, *mapped)
        outer = len(results) - len(changed)
        _write(tensors, dict(zip(changed, results[outer:], strict=True)))
        return results[:outer]

    def _loop(self, call: Call, tensors: Sequence[Tensor], mapped: list[Tensor], outputs: Outputs, count: int) -> Any:
        """Call the function for one member after the other."""
        rows = [each.unbind(0) for each in (*tensors, *mapped)]
        columns: list[list[Tensor]] = []
        start = torch.get_rng_state() if call.randomness != "different" else None
        for index in range(count):
            own = [row[index] for row in rows]
            output, rebound = self._call_one(call, own, outputs)
            _write(own, rebound)
            columns.append(output)
            if start is not None:
                _repeat(start, call.randomness, index, count)
        try:
            return outputs.unflatten([torch.stack(parts) for parts in zip(*columns, strict=True)])
        except RuntimeError as error:
            shapes = {tuple(tuple(t.shape) for t in output) for output in columns}
            if len(shapes) > 1:
                raise StructureError(
                    f"members returned tensors of different shapes, which cannot be stacked: {shapes}"
                ) from error
            raise

    def _call_nothing(self, call: Call, outputs: Outputs) -> Any:
        """Return the output for a population without members: that of the template, with a leading dimension of 0."""
        args = [*self.entries, *(buffer.clone() for _, buffer in self.template.named_buffers())]
        args += [row.new_zeros(row.shape[1:]) for row in call.rows(0, 0)]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            output, _ = self._call_one(call, args, outputs)
        return outputs.unflatten([value.new_empty((0, *value.shape)) for value in output])

    def _call_one(self, call: Call, args: Sequence[Any], outputs: Outputs) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Return the tensors of one call, and the buffers that it replaced, by index.

        `args` are the parameters and buffers, and the arguments that differ between members.
        """
        own, mapped = args[: self.swap.size], args[self.swap.size :]
        with self.swap.exchange(own):
            return outputs.flatten(call.run(self.template, mapped)), self.swap.find_rebound(own)


class Swap:
    """The slots of a module tree that reference its parameters and buffers, for temporarily replacing them.

    Parameters and buffers are registered under one or more names; some modules also store them in lists (an LSTM does, in
    `_flat_weights`), where they are replaced too.
    """

    def __init__(self, module: nn.Module, entries: Sequence[Tensor]) -> None:
        tensors = [*entries, *(buffer for _, buffer in module.named_buffers())]
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self.size, self._first = len(tensors), len(entries)
        self._slots: list[tuple[dict[str, Any], str, int]] = []
        self._lists: list[tuple[dict[str, Any], str, Any, list[int]]] = []
        for each in module.modules():
            for slots in (each._parameters, each._buffers):
                self._slots += [(slots, name, places[id(own)]) for name, own in slots.items() if id(own) in places]
            for key, items in each.__dict__.items():
                if isinstance(items, list | tuple) and any(id(item) in places for item in items):
                    self._lists.append((each.__dict__, key, items, [places.get(id(item), -1) for item in items]))

    @contextmanager
    def exchange(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Replace the tensors of the module inside of the block."""
        slots = [(state, name, tensors[place]) for state, name, place in self._slots]
        for state, key, items, places in self._lists:
            filled = [item if place < 0 else tensors[place] for item, place in zip(items, places, strict=True)]
            slots.append((state, key, filled if isinstance(items, list) else tuple(filled)))
        before = [state[name] for state, name, _ in slots]
        for state, name, value in slots:
            state[name] = value
        try:
            yield
        finally:
            for (state, name, _), value in zip(slots, before, strict=True):
                state[name] = value

    def find_rebound(self, tensors: Sequence[Any]) -> dict[int, Any]:
        """Return the buffers that a call replaced by other tensors, by index."""
        rebound: dict[int, Any] = {}
        for slots, name, place in self._slots:
            current = slots.get(name)
            if place >= self._first and current is not tensors[place] and current is not None:
                rebound.setdefault(place, current)
        return rebound


def _write(tensors: Sequence[Tensor], changed: dict[int, Tensor]) -> None:
    with torch.no_grad():
        for place, value in changed.items():
            buffer = tensors[place]
            if value.shape != buffer.shape:
                raise StructureError(
                    f"a call gave a buffer of shape {tuple(buffer.shape[1:])} the shape {tuple(value.shape[1:])}"
                )
            buffer.copy_(value)


def _repeat(start: Tensor, randomness: str, index: int, count: int) -> None:
    """Restore the state of torch's generator for the next member, or raise if the model used it."""
    if randomness == "same":
        if index < count - 1:
            torch.set_rng_state(start)
    elif not torch.equal(start, torch.get_rng_state()):
        raise RuntimeError('the model draws random numbers; say randomness="different" or randomness="same"')


@contextmanager
def _ignore_warning() -> Iterator[None]:
    """Silence torch's warning that vmap loops over members in a fused operation, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


@contextmanager
def _no_shortcuts() -> Iterator[None]:
    """Make attention use operations that can be vectorised and differentiated, as in training."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
