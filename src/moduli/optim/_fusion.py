"""Runs of pointwise links as one pass over all parameters."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import kernels
from ..layout import map_tensors
from ._composite import Composite, CompositeParts
from ._needs import Across
from ._settings import current
from ._vectors import as_real
from .transform import HookArguments, TensorTransform, measure

if TYPE_CHECKING:
    from .module import Module
    from .objective import Objective


_INITIALIZE = ("single_tensor_initialize", "multi_tensor_initialize")

# What decides whether and how a link is fused; an object may say otherwise than its class, and later than before.
_declared = operator.attrgetter(
    "elementwise", "concat_params", "update_freq", "uses_loss", "uses_grad", "measures", "counts", "static"
)


def explain_unfused(link: Module, over_members: bool = False) -> str | None:
    """Why a link can't be part of a fused run; None where it can."""
    if not isinstance(link, TensorTransform):
        return "it works on the objective, not on tensors"
    if not link.elementwise:
        return "its hooks are not declared pointwise"
    if link.concat_params:
        return "it works on one vector of all parameters"
    if link.children:
        return f"it has inner links ({', '.join(link.children)})"
    if link.update_freq != 1:
        return f"it learns at every {link.update_freq}th step only"
    if link.uses_loss:
        return "it uses the loss"
    # One number per member is no scalar of a kernel.
    if over_members and (link.finds_numbers() or link.settings.are_per_member()):
        return "a number differs between members"
    name = link.find_override()
    return None if name is None else f"it overrides {name}"


def segments(owner: Any, links: Sequence[Module]) -> Sequence[Any]:
    """The links with each maximal run of pointwise ones as one `FusedRun`; remembered by the owner of the chain."""
    if owner is None:
        return links
    binding = getattr(owner, "binding", None) or owner.settings.binding
    over_members = binding is not None and binding.members is not None
    key: list[Any] = [
        (id(link), type(link), _declared(link) if hasattr(link, "elementwise") else None) for link in links
    ]
    if over_members:
        key += [link.settings.are_per_member() for link in links]
    known, before = getattr(owner, "_segments", None) or (None, ())
    if known == key:
        return before
    for segment in before:
        if isinstance(segment, FusedRun):
            segment.flush()
    whole = (Across.MATRICES, Across.EVERYTHING) if binding is not None and binding.in_pieces else ()
    out: list[Any] = []
    for link in links:
        if explain_unfused(link, over_members) is not None or link.across in whole:
            out.append(link)
        elif out and isinstance(out[-1], list) and not link.finds_numbers():  # type: ignore[attr-defined]
            out[-1].append(link)
        else:
            out.append([link])
    last = len(out) - 1 if getattr(owner, "moves_parameters", False) else -1
    found = [FusedRun(part, i == last) if isinstance(part, list) else part for i, part in enumerate(out)]
    owner._segments = (key, found)
    return found


@dataclass(eq=False)
class _Cohort:
    """Parameters that share settings, counts and dtypes: one call."""

    indices: list[int]
    params: list[Tensor]
    raw: list[dict[str, Any]]
    counts: list[int]
    keys: list[tuple[str, ...]]
    states: list[list[list[Tensor]]]
    scratch: list[Tensor] | None = None
    bound: dict[tuple[Any, ...], kernels.Bound] = field(default_factory=dict)
    last: kernels.Bound | None = None  # of them, by the last step


class FusedRun:
    """Pointwise links in a row, run in one pass over all parameters with equal settings."""

    def __init__(self, links: list[TensorTransform], tail: bool) -> None:
        self.links = links
        self.tail = tail
        self._cohorts: list[_Cohort] = []
        self._valid: tuple[Any, ...] | None = None
        self._params: list[Tensor] | None = None
        self._fused: dict[tuple[Any, ...], kernels.Fused] = {}
        self._measures = links[0].finds_numbers()
        # What a link calls before its state is shown; a weak reference, since the run holds the links.
        self._flush = weakref.WeakMethod(self.flush)
        self._grads = any(link.uses_grad for link in links)
        #: Whether the states were ever shown after they were made: who holds one of their tensors may move it at any time.
        self._exposed = False

    def __repr__(self) -> str:
        return f"FusedRun({' | '.join(type(link).__name__ for link in self.links)})"

    # ------------------------------------------------------------------ counters

    def flush(self) -> None:
        """Write the counts of the last steps into the links' states, once: later the states may be newer than they."""
        # Another run of the same link may have counted since.
        owed = [link._pending is self._flush for link in self.links]
        for link, due in zip(self.links, owed, strict=True):
            link._pending = None if due else link._pending
        for cohort in self._cohorts:
            for link, count, due in zip(self.links, cohort.counts, owed, strict=True):
                if due and link.counts:
                    for param in cohort.params:
                        dict.__setitem__(link._state[param], "step", count)  # no cached list holds it

    # ------------------------------------------------------------------ cohorts

    def _stamp(self, present: list[bool] | None) -> tuple[Any, ...]:
        return (present, *[link._state.changes[0] for link in self.links])

    def _is_valid(self, objective: Objective) -> bool:
        if self._valid is None or self._valid != self._stamp(objective.present):
            return False
        if self._params is not objective.params:
            known, here = self._params or [], objective.params
            if len(known) != len(here) or not all(map(operator.is_, known, here)):
                return False
            self._params = here
        for cohort in self._cohorts:
            first = cohort.params[0]
            for link, raw in zip(self.links, cohort.raw, strict=True):
                if link.settings.raw(first) is not raw:
                    return False
        return True

    def _build(self, objective: Objective, tensors: Sequence[Tensor], grads: Sequence[Tensor] | None) -> bool:
        """Sort the parameters into cohorts; False where a link makes its state while it learns, not when asked to."""
        params = objective.params
        kept = [i for i in range(len(params)) if objective.present is None or objective.present[i]]
        step = objective.current_step
        members = [params[i] for i in kept]
        every_row, every_raw = [], []
        for link in self.links:
            rows = [link._state[param] for param in members]
            raws = list(map(link.settings.raw, members))
            every_row.append(rows)
            every_raw.append(raws)
            if any(not row for row in rows) and (link.counts or link.has_own(*_INITIALIZE)):
                now = {id(raw): current(raw, step) for raw in raws}
                forms, settings = [as_real(param) for param in members], [now[id(raw)] for raw in raws]
                with link.shown(forms, rows, settings):
                    seen = [as_real(tensors[i]) for i in kept]
                    slopes = None if grads is None else [as_real(grads[i]) for i in kept]
                    link._fill_states(HookArguments(seen, forms, slopes, None, rows, settings))  # type: ignore[arg-type]
            if link.has_own("single_tensor_update") and any(not row for row in rows):
                return False
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, i in enumerate(kept):
            kinds = [
                _kind(link, rows[position], raws[position])
                for link, rows, raws in zip(self.links, every_row, every_raw, strict=True)
            ]
            p, t = params[i], tensors[i]
            groups.setdefault((p.dtype, t.dtype, p.device, *kinds), []).append(position)
        self._cohorts = []
        for positions in groups.values():
            firsts = [rows[positions[0]] for rows in every_row]
            keys = [tuple(key for key, value in row.items() if isinstance(value, Tensor)) for row in firsts]
            states = [
                [[rows[position][key] for position in positions] for key in own]
                for rows, own in zip(every_row, keys, strict=True)
            ]
            self._cohorts.append(
                _Cohort(
                    [kept[position] for position in positions],
                    [members[position] for position in positions],
                    [raws[positions[0]] for raws in every_raw],
                    [row.get("step", 0) if link.counts else 0 for link, row in zip(self.links, firsts, strict=True)],
                    keys,
                    states,
                )
            )
        self._params = params
        self._valid = self._stamp(objective.present)
        return True

    # ------------------------------------------------------------------ the step

    def step(self, objective: Objective) -> Objective:
        """The same as each link's step in turn."""
        binding = self.links[0].settings.binding
        if binding is not None and not binding.fuse:
            return self._run_unfused(objective)
        tensors = objective.peek_updates()
        grads = objective.get_grads() if self._grads else None
        if self._is_valid(objective):
            return self._run_cohorts(objective, tensors, grads)
        with kernels.pause_collection():  # states and plans are made, which are kept
            self._settle()
            built = self._build(objective, tensors, grads)
            return self._run_cohorts(objective, tensors, grads) if built else self._run_unfused(objective)

    def _settle(self) -> None:
        for link in self.links:
            link._settle()

    def _run_unfused(self, objective: Objective) -> Objective:
        self._settle()
        self._valid = None
        for link in self.links:
            objective = link.step(objective)
        return objective

    def _run_cohorts(
        self, objective: Objective, tensors: Sequence[Tensor], grads: Sequence[Tensor] | None
    ) -> Objective:
        now = [[current(raw, objective.current_step) for raw in cohort.raw] for cohort in self._cohorts]
        if self._measures:
            self._measure(objective, tensors, grads, now)
        split = [list(map(_split, self.links, settings)) for settings in now]
        if any(
            per_member for row in split for _, _, _, per_member in row
        ):  # numbers of members that a schedule has made
            return self._run_unfused(objective)
        # Hooks after the step read the update, so there has to be one.
        tail = self.tail and not objective.skip_update and not objective.post_step_hooks
        updates: list[Tensor] | None = None if tail else list(objective.updates or tensors)
        if not self._exposed and self._cohorts and self._cohorts[0].bound:
            self._exposed = not all(map(operator.is_, map(_pending, self.links), repeat(self._flush)))
        for cohort, parts in zip(self._cohorts, split, strict=True):
            self._run(cohort, objective, parts, tensors, grads, updates)
        if tail:
            objective.skip_update = True
        else:
            if objective.present is not None and objective.updates is None and updates is not None:
                updates = [
                    u if here else torch.zeros_like(u) for u, here in zip(updates, objective.present, strict=True)
                ]
            objective.updates = updates
        return objective

    def explain_forms(self) -> list[kernels.Explanation]:
        """Which forms of the kernels room the last step took; empty before the first one."""
        found = [cohort.last.explain() for cohort in self._cohorts if cohort.last is not None]
        return [each for each in found if each is not None]

    def _measure(
        self, objective: Objective, tensors: Sequence[Tensor], grads: Any, now: list[list[Mapping[str, Any]]]
    ) -> None:
        """Add to the settings what the first link finds over all tensors for which it has the same."""
        lists: list[Any] = [tensors, objective.params, grads]
        if any(cohort.params[0].is_complex() for cohort in self._cohorts):
            lists = [None if held is None else list(map(as_real, held)) for held in lists]

        def bring(found: Mapping[str, Any], place: int) -> Any:
            return map_tensors(found, partial(Tensor.to, device=self._cohorts[place].params[0].device))

        places = [cohort.indices for cohort in self._cohorts]
        found = measure(self.links[0], objective, [settings[0] for settings in now], places, lists, bring)
        for settings, first in zip(now, found, strict=True):
            settings[0] = first

    def _run(
        self,
        cohort: _Cohort,
        objective: Objective,
        split: Sequence[_Parts],
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor] | None,
        updates: list[Tensor] | None,
    ) -> None:
        parts = []
        numbers: list[Any] = []
        for link, (names, values, constants, _), keys, count in zip(
            self.links, split, cohort.keys, cohort.counts, strict=True
        ):
            parts.append((keys, (*names, "step") if link.counts else tuple(names), tuple(constants)))
            numbers += [*values, count + 1] if link.counts else values
        key = CompositeParts(self._grads, updates is None, tuple(parts))
        bound = cohort.bound.get(key)
        if bound is None:
            fused = self._fused.get(key)
            if fused is None:
                fused = self._fused[key] = kernels.fuse((run := Composite(self.links, key)), private=run.private)
            every: list[Any] = [tensors for states in cohort.states for tensors in states]
            bound = cohort.bound[key] = fused.bind(**dict(zip(key.name_states(), every, strict=True)))
        if self._exposed:
            bound.distrust()
        whole = len(cohort.indices) == len(tensors)
        params: list[Tensor] = cohort.params
        chosen = tensors if whole and type(tensors) is list else [tensors[i] for i in cohort.indices]
        args: list[Any] = []
        if params[0].is_complex():
            args += [[as_real(p.detach()) for p in params], [as_real(t) for t in chosen]]
        else:
            args += [params, chosen]
        if self._grads and grads is not None:
            args.append([as_real(grads[i]) for i in cohort.indices])
        if updates is not None:
            owned = objective.updates is not None
            if not owned and cohort.scratch is None:
                cohort.scratch = [torch.empty_like(t) for t in chosen]
            into: Sequence[Tensor] = chosen if owned else cohort.scratch or []
            args.append([as_real(t) for t in into] if params[0].is_complex() else list(into))
            for i, tensor in zip(cohort.indices, into, strict=True):
                updates[i] = tensor
        cohort.last = bound
        bound(*args, *numbers)
        for k, link in enumerate(self.links):
            if link.counts:
                cohort.counts[k] += 1
            link._pending = self._flush


def _kind(link: TensorTransform, row: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[Any, ...]:
    """What parameters of one cohort have in common in a link."""
    states = tuple([(key, value.dtype) for key, value in row.items() if isinstance(value, Tensor)])
    return (id(raw), row.get("step", 0) if link.counts else 0, states)


_Parts = tuple[list[str], list[Any], list[tuple[str, Any]], bool]


def _split(link: TensorTransform, setting: Mapping[str, Any]) -> _Parts:
    """Settings of a link that are numbers, free to change (names, values), and those that decide what is done.

    And whether one of them has a number for each member of a population.
    """
    names: list[str] = []
    values: list[Any] = []
    constants: list[tuple[str, Any]] = []
    per_member = False
    for key, value in setting.items():
        kind = type(value)
        number = kind is float or kind is int
        if isinstance(value, Tensor):
            number = value.dim() == 0 and value.dtype.is_floating_point
            per_member = per_member or value.dim() > 0
        elif not number and kind is not bool and isinstance(value, float | int):  # NumPy's
            number, value = True, float(value)
        if number and key not in link.static:
            names.append(key)
            values.append(value)
        else:
            constants.append((key, value))
    return names, values, constants, per_member


_pending = operator.attrgetter("_pending")
