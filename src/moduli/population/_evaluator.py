"""Calling a function of a model for every member, by the rule of `_rule`: on stacked tensors, by vmap, or in a loop."""

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
    """What a population that is called evaluates: the model itself."""
    return model(*args, **kwargs)


class PopulationEvaluator:
    """What the populations of one template are evaluated by.

    Args:
        template: The model that takes the tensors of members for the time of a call.

    Attributes:
        layout: The layout of a member.
        entries: The parameters of the template, in the order of the layout.
    """

    def __init__(self, template: nn.Module) -> None:
        self.template = template
        self.layout, self.entries = layout_and_tensors(template)
        # Why the model itself has to be looped, where a call has shown that.
        self.refused: str | None = None

    @cached_property
    def swap(self) -> Swap:
        """The places of the model's tensors."""
        return Swap(self.template, self.entries)

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The modules of the template, whose structure is the population's and does not change."""
        return list(self.template.modules())

    @cached_property
    def steps(self) -> list[LinearStep] | None:
        """The layers of a model that is a sequence of linear ones and activation functions; None for other models."""
        return None if self.kind.not_plain is not None else find_steps(self.template, self.entries)

    @cached_property
    def attends(self) -> bool:
        """Whether the model may compute attention: it has such layers of torch, or code that torch does not know."""
        kinds = {getattr(type(module), "_adopted", type(module)) for module in self.template.modules()}
        return any(
            not kind.__module__.startswith("torch.nn.modules.")
            or "transformer" in kind.__module__
            or "Attention" in kind.__name__
            for kind in kinds
        )

    @cached_property
    def kind(self) -> Kind:
        """What the model's layers allow."""
        return kind_of(self.template, self.layout)

    def plan(self, call: Call, count: int, recorded: bool = False) -> EvaluationPlan:
        """How a call is evaluated, with or without gradients of the whole of it."""
        if self.refused is not None and call.fn is forward and call.vectorize == "auto":
            return EvaluationPlan("loop", 0, self.refused)
        if self._takes_sequence(call, count):
            return EvaluationPlan("sequence", 0, _SEQUENCE)
        return choose(self.kind, self.layout, count, call, recorded)

    def describe_choices(self, plan: EvaluationPlan) -> list[str]:
        """What was measured in this process for layers like those of the model."""
        if plan.form == "sequence":
            return describe_blocks(self.steps or [])
        shapes = {(entry.shape[0], entry.shape[1]) for entry in self.layout if len(entry.shape) == 2}
        return describe_choices(shapes) if plan.form == "stacked" else []

    def _takes_sequence(self, call: Call, count: int) -> bool:
        """Whether a call of the model itself needs none of its code: a sequence of layers, without gradients."""
        if call.fn is not forward or call.vectorize != "auto" or call.chunk_size is not None or call.kwargs:
            return False
        if torch.is_grad_enabled() or len(call.leaves) != 1 or type(call.leaves[0]) is not Tensor or self.steps is None:
            return False
        x, entry = call.leaves[0], self.entries[self.steps[0].weight]
        fits = (
            x.dim() - (call.dims[0] is not None) > 0 and x.shape[-1] == entry.shape[-1] and call.dims[0] != x.dim() - 1
        )
        alike = x.dtype is entry.dtype and x.device == entry.device and x.numel() > 0
        plain = not (is_transformed() or has_autocast() or has_global_hooks() or has_hooks(self.modules))
        return count > 0 and fits and alike and plain

    def run(self, call: Call, plan: EvaluationPlan, tensors: Sequence[Tensor], first: int, count: int) -> Any:
        """Call `fn(model, *args, **kwargs)` for some members and stack what it returns.

        Args:
            call: The function, and the arguments of all members.
            plan: How.
            tensors: One tensor of shape (count, *shape) per parameter, then one per buffer; what a call does to buffers is
                written there.
            first: Which member is the first of these.
            count: How many there are.
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
            block = plan.block or count
            # Split and not sliced: the gradient of a slice is as large as the whole, that of a split is one `cat`.
            parts = zip(*(torch.split(each, block) for each in tensors), strict=True) if block < count else [tensors]
            act = self._stack if plan.form == "stacked" else self._map
            blocks = []
            for start, rows in zip(range(first, first + count, block), parts, strict=True):
                blocks.append(act(call, rows, call.rows(start, min(first + count, start + block)), outputs))
            columns = blocks[0] if len(blocks) == 1 else [torch.cat(parts) for parts in zip(*blocks, strict=True)]
            return outputs.unflatten(columns)

    def _choose_attention(self, plan: EvaluationPlan) -> AbstractContextManager[None]:
        """A block in which attention, if there is any, takes the form that suits the plan."""
        if plan.form in ("stacked", "sequence"):
            return nullcontext()
        if torch.is_grad_enabled() or in_transform() or (self.template.training and plan.form == "vmap"):
            return _no_shortcuts()
        return _ignore_warning()

    def _stack(self, call: Call, tensors: Sequence[Tensor], mapped: list[Tensor], outputs: Outputs) -> Sequence[Tensor]:
        """One call on tensors that stand for those of all members."""
        given = [Stacked(each, call.randomness) for each in (*tensors, *mapped)]
        output, _ = self._call_one(call, given, outputs)
        count = len(tensors[0])
        return [each.physical if type(each) is Stacked else each.expand(count, *each.shape) for each in output]

    def _map(self, call: Call, tensors: Sequence[Tensor], mapped: list[Tensor], outputs: Outputs) -> Sequence[Tensor]:
        """One call by `torch.vmap`."""
        changed: list[int] = []

        # Flat tensors, all with the members in front: torch takes structures of tensors and of dimensions apart several
        # times.
        def one_member(*given: Tensor) -> tuple[Tensor, ...]:
            output, rebound = self._call_one(call, given, outputs)
            changed[:] = list(rebound)
            return (*output, *rebound.values())

        made = torch.vmap(one_member, 0, 0, call.randomness)(*tensors, *mapped)
        outer = len(made) - len(changed)
        _write(tensors, dict(zip(changed, made[outer:], strict=True)))
        return made[:outer]

    def _loop(self, call: Call, tensors: Sequence[Tensor], mapped: list[Tensor], outputs: Outputs, count: int) -> Any:
        """One member after the other."""
        rows = [each.unbind(0) for each in (*tensors, *mapped)]
        columns: list[list[Tensor]] = []
        start = torch.get_rng_state() if call.randomness != "different" else None
        for index in range(count):
            given = [row[index] for row in rows]
            output, rebound = self._call_one(call, given, outputs)
            _write(given, rebound)
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
        """The output of no members: what one would return, with a leading dimension of 0."""
        given = [*self.entries, *(held.clone() for _, held in self.template.named_buffers())]
        given += [row.new_zeros(row.shape[1:]) for row in call.rows(0, 0)]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            output, _ = self._call_one(call, given, outputs)
        return outputs.unflatten([value.new_empty((0, *value.shape)) for value in output])

    def _call_one(self, call: Call, given: Sequence[Any], outputs: Outputs) -> tuple[list[Tensor], dict[int, Tensor]]:
        """The tensors that one call returns, and the buffers that it replaced by others, by place."""
        own, mapped = given[: self.swap.size], given[self.swap.size :]
        with self.swap.exchange(own):
            return outputs.flatten(call.run(self.template, mapped)), self.swap.find_rebound(own)


class Swap:
    """Every place in a module tree that holds one of its tensors, so that others can be put there and taken out again.

    Parameters and buffers are registered under one or more names; some modules also keep them in lists (an LSTM does, in
    `_flat_weights`), where they are exchanged too.
    """

    def __init__(self, module: nn.Module, entries: Sequence[Tensor]) -> None:
        tensors = [*entries, *(held for _, held in module.named_buffers())]
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self.size, self._first = len(tensors), len(entries)
        self._slots: list[tuple[dict[str, Any], str, int]] = []
        self._lists: list[tuple[dict[str, Any], str, Any, list[int]]] = []
        for each in module.modules():
            for slots in (each._parameters, each._buffers):
                self._slots += [(slots, name, places[id(held)]) for name, held in slots.items() if id(held) in places]
            for key, held in each.__dict__.items():
                if isinstance(held, list | tuple) and any(id(item) in places for item in held):
                    self._lists.append((each.__dict__, key, held, [places.get(id(item), -1) for item in held]))

    @contextmanager
    def exchange(self, tensors: Sequence[Any]) -> Iterator[None]:
        """A block in which the module holds other tensors."""
        slots = [(held, name, tensors[place]) for held, name, place in self._slots]
        for state, key, held, places in self._lists:
            filled = [item if place < 0 else tensors[place] for item, place in zip(held, places, strict=True)]
            slots.append((state, key, filled if isinstance(held, list) else tuple(filled)))
        before = [held[name] for held, name, _ in slots]
        for held, name, value in slots:
            held[name] = value
        try:
            yield
        finally:
            for (held, name, _), value in zip(slots, before, strict=True):
                held[name] = value

    def find_rebound(self, tensors: Sequence[Any]) -> dict[int, Any]:
        """The buffers that a call replaced by other tensors, by place."""
        found: dict[int, Any] = {}
        for slots, name, place in self._slots:
            held = slots.get(name)
            if place >= self._first and held is not tensors[place] and held is not None:
                found.setdefault(place, held)
        return found


def _write(tensors: Sequence[Tensor], changed: dict[int, Tensor]) -> None:
    with torch.no_grad():
        for place, value in changed.items():
            held = tensors[place]
            if value.shape != held.shape:
                raise StructureError(
                    f"a call gave a buffer of shape {tuple(held.shape[1:])} the shape {tuple(value.shape[1:])}"
                )
            held.copy_(value)


def _repeat(start: Tensor, randomness: str, index: int, count: int) -> None:
    """Put the state of torch's generator back, or object to its use."""
    if randomness == "same":
        if index < count - 1:
            torch.set_rng_state(start)
    elif not torch.equal(start, torch.get_rng_state()):
        raise RuntimeError('the model draws random numbers; say randomness="different" or randomness="same"')


@contextmanager
def _ignore_warning() -> Iterator[None]:
    """Torch warns that it runs a fused operation for one member after the other, which here is chosen."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


@contextmanager
def _no_shortcuts() -> Iterator[None]:
    """Attention takes the form that can be vectorised and differentiated, as in training."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
