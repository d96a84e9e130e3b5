"""Runs of pointwise links as one pass over all parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import kernels
from ..layout import map_tensors
from ._checks import check_pointwise, check_updates
from ._composite import Composite, Part, Parts, split_settings
from ._hooks import gather_arguments, measure, show_arguments
from ._needs import Across
from ._settings import Binding, current, is_per_member
from ._vectors import as_real, resolve_lazy
from .transform import TensorTransform

if TYPE_CHECKING:
    from . import Module, Objective


_PLAIN = frozenset({float, int, bool, str, type(None)})
_INITIALIZE = ("single_tensor_initialize", "multi_tensor_initialize")


def explain_unfused(link: Module, over_members: bool = False) -> str | None:
    """Why a link can't be part of a fused run; None where it can."""
    if not isinstance(link, TensorTransform):
        return "it works on the objective, not on tensors"
    name = link.find_override()
    # One number per member is no scalar of a kernel.
    differs = over_members and (link.finds_numbers() or link.settings.are_per_member())
    reasons = {
        "its hooks are not declared pointwise": not link.elementwise,
        "it works on one vector of all parameters": link.concat_params,
        f"it has inner links ({', '.join(link.children)})": bool(link.children),
        f"it learns at every {link.update_freq}th step only": link.update_freq != 1,
        "it uses the loss": link.uses_loss,
        "a number differs between members": differs,
        f"it overrides {name}": name is not None,
        f"its hooks are not pure: {link.impure}": link.impure is not None,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def find_segments(owner: Any, links: Sequence[Module]) -> Sequence[Any]:
    """Return the links with each maximal run of pointwise ones as one `FusedRun`.

    Args:
        owner: The optimizer or link whose chain it is, which stores them until a change of links or groups is counted.
        links: The links.
    """
    if owner is None:
        return links
    binding: Binding = getattr(owner, "binding", None) or owner.settings.binding
    known = getattr(owner, "_segments", None)
    if known is not None and known[0][0] is binding and known[0][1] == binding.writes.count:
        return known[1]  # type: ignore[no-any-return]
    over_members = binding.members is not None
    whole = (Across.MATRICES, Across.EVERYTHING) if binding.in_pieces else ()
    out: list[Any] = []
    for link in links:
        if explain_unfused(link, over_members) is not None or link.across in whole:
            out.append(link)
        elif out and isinstance(out[-1], list) and not link.finds_numbers():  # type: ignore[attr-defined]
            out[-1].append(link)
        else:
            out.append([link])
    last = len(out) - 1 if getattr(owner, "moves_parameters", False) else -1
    segments = [FusedRun(part, i == last) if isinstance(part, list) else part for i, part in enumerate(out)]
    owner._segments = ((binding, binding.writes.count), segments)
    return segments


@dataclass(eq=False)
class _Cohort:
    """Parameters that share settings, dtypes and the numbers of their states: one call."""

    indices: list[int]
    params: list[Tensor]
    raw: list[dict[str, Any]]
    #: For each link the states that are numbers on the host.
    numbers: list[dict[str, Any]]
    keys: list[tuple[str, ...]]
    rows: list[list[dict[str, Any]]]
    states: list[list[list[Tensor]]]
    #: For each link its settings of the last step, as part of a kernel's key and as numbers.
    splits: list[tuple[Mapping[str, Any], Part, list[Any]] | None]
    scratch: list[Tensor] | None = None
    bound: dict[tuple[Any, ...], kernels.Bound] = field(default_factory=dict)
    last: tuple[Parts, kernels.Bound] | None = None
    #: Whether the settings are plain values, the same at every step of a plan; None where that is not known.
    steady: bool | None = None

    def evaluate(self, step: int) -> list[Mapping[str, Any]]:
        """Return the settings of each link at a step."""
        if self.steady is None:
            self.steady = all(type(value) in _PLAIN for raw in self.raw for value in raw.values())
        return list(self.raw) if self.steady else [current(raw, step) for raw in self.raw]


# The update, which the links may write to where it is owned; the gradient, where they read it; and where the result goes.
_Given = tuple[list[Tensor], list[Tensor] | None, list[Tensor] | None]


class FusedRun:
    """Pointwise links in a row, run in one pass over all parameters with equal settings."""

    def __init__(self, links: list[TensorTransform], tail: bool) -> None:
        self.links = links
        self.tail = tail
        self._cohorts: list[_Cohort] = []
        self._params: list[Tensor] | None = None
        #: Whether some parameters are complex: hooks see them as pairs of reals.
        self._pairs = False
        #: The plan that the cohorts were made for.
        self._plan: Any = None
        self._present: list[bool] | None = None
        self._fused: dict[Parts, tuple[kernels.Fused, list[str]]] = {}
        self._measures = links[0].finds_numbers()
        self._grads = any(link.uses_grad for link in links)
        #: The writes that were counted when the cohorts were made: of settings, and of rows.
        self._numbers = self._rows_version = -1
        #: Whether rows were ever handed out: a caller that holds a tensor of one may give it other memory.
        self._exposed = False

    # ------------------------------------------------------------------ cohorts

    def _is_valid(self, objective: Objective) -> bool:
        """Whether the cohorts are those of this plan, these parameters and the rows that the links store."""
        plan = objective.plan
        if plan is None or self._plan is not plan or self._params is None:
            return False
        if self._params is not objective.params:
            known, here = self._params, objective.params
            if len(known) != len(here) or not all(map(operator.is_, known, here)):
                return False
        if self._present != objective.present or self._rows_version != self._count_row_writes():
            return False
        if self._numbers != plan.numbers:  # settings have other numbers, in the same dictionaries
            self._numbers = plan.numbers
            for cohort in self._cohorts:
                cohort.splits, cohort.steady = [None] * len(self.links), None
        return True

    def _count_row_writes(self) -> int:
        return sum(map(_count, map(_row_writes, self.links)))

    def _build(self, objective: Objective, tensors: Sequence[Tensor]) -> bool:
        """Sort the parameters into cohorts; False where a link makes its state while it learns, not when asked to."""
        params = objective.params
        kept = [i for i in range(len(params)) if objective.present is None or objective.present[i]]
        members = [params[i] for i in kept]
        every_row, every_raw = [], []
        for link in self.links:
            rows = link.find_rows(members)
            every_row.append(rows)
            every_raw.append(list(map(link.settings.raw, members)))
            if (link.counts or link.has_own(*_INITIALIZE)) and not all(rows):
                _, given = gather_arguments(link, objective, *link._lists(objective), owned=False)
                with show_arguments(link, objective, given):
                    link._fill_states(given)
            if link.has_own("single_tensor_update") and not all(rows):
                return False
            if any(isinstance(row[name], Tensor) for name in link.list_numbers() for row in rows):
                return False  # a number for each member
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, i in enumerate(kept):
            kind: list[Any] = [params[i].dtype, tensors[i].dtype, params[i].device]
            for link, rows, raws in zip(self.links, every_row, every_raw, strict=True):
                row = rows[position]
                kind += [id(raws[position]), *(row[name] for name in link.list_numbers())]
                kind += [(key, value.dtype) for key, value in row.items() if isinstance(value, Tensor)]
            groups.setdefault(tuple(kind), []).append(position)
        self._cohorts = []
        for positions in groups.values():
            firsts = [rows[positions[0]] for rows in every_row]
            keys = [tuple(key for key, value in row.items() if isinstance(value, Tensor)) for row in firsts]
            pairs = zip(every_row, keys, strict=True)
            states = [[[rows[position][key] for position in positions] for key in own] for rows, own in pairs]
            self._cohorts.append(
                _Cohort(
                    [kept[position] for position in positions],
                    [members[position] for position in positions],
                    [raws[positions[0]] for raws in every_raw],
                    [
                        {name: row[name] for name in link.list_numbers()}
                        for link, row in zip(self.links, firsts, strict=True)
                    ],
                    keys,
                    [[rows[position] for position in positions] for rows in every_row],
                    states,
                    [None] * len(self.links),
                )
            )
        self._params, self._present, self._plan = params, objective.present, objective.plan
        self._numbers = -1 if objective.plan is None else objective.plan.numbers
        self._rows_version = self._count_row_writes()
        self._pairs = any(cohort.params[0].is_complex() for cohort in self._cohorts)
        return True

    # ------------------------------------------------------------------ the step

    def step(self, objective: Objective) -> Objective:
        """The same as each link's step in turn."""
        if not self.links[0].settings.binding.fuse:
            return self._run_unfused(objective)
        tensors = objective.peek_updates()
        if self._is_valid(objective):
            return self._run_cohorts(objective, tensors)
        exposed = [link.exposed for link in self.links]
        self._exposed = any(exposed)
        with kernels.pause_collection():  # states and plans are made, which are kept
            built = self._build(objective, tensors)
            objective = self._run_cohorts(objective, tensors) if built else self._run_unfused(objective)
        for link, before in zip(self.links, exposed, strict=True):
            link.exposed = before  # only the link's own hooks have read its rows
        self._rows_version = self._count_row_writes()
        return objective

    def _run_unfused(self, objective: Objective) -> Objective:
        self._params = None
        last = self.links[-1]
        for link in self.links:
            objective.wide = link is not last or self.tail
            objective = link.step(objective)
            if objective.checking:
                check_updates(objective, link)
        objective.wide = False
        return objective

    def _run_cohorts(self, objective: Objective, tensors: list[Tensor]) -> Objective:
        grads = objective.get_grads() if self._grads else None
        now = [cohort.evaluate(objective.current_step) for cohort in self._cohorts]
        if self._measures:
            self._measure(objective, [tensors, objective.params, grads], now)
        if objective.members is not None:
            every = (value for settings in now for setting in settings for value in setting.values())
            if any(map(is_per_member, every)):  # which a schedule has made
                return self._run_unfused(objective)
        # Hooks after the step read the update, so there has to be one.
        tail = self.tail and not objective.skip_update and not objective.post_step_hooks
        updates: list[Tensor] | None = None if tail else list(objective.updates or tensors)
        for cohort, settings in zip(self._cohorts, now, strict=True):
            self._run(cohort, settings, objective.updates is not None, (tensors, grads, updates))
        if tail:
            objective.skip_update = True
        else:
            objective.updates = updates
        return objective

    def _measure(self, objective: Objective, lists: list[Any], now: list[list[Mapping[str, Any]]]) -> None:
        """Add to the settings what the first link finds over all tensors for which it has the same."""
        if self._pairs:
            lists = [None if held is None else list(map(as_real, held)) for held in lists]
        places = [cohort.indices for cohort in self._cohorts]
        found = measure(self.links[0], objective, [settings[0] for settings in now], places, lists)
        for cohort, settings, numbers in zip(self._cohorts, now, found, strict=True):
            if not _PLAIN.issuperset(map(type, numbers.values())):
                numbers = map_tensors(numbers, partial(Tensor.to, device=cohort.params[0].device))
            settings[0] = {**settings[0], **numbers}

    def _run(self, cohort: _Cohort, settings: Sequence[Mapping[str, Any]], owned: bool, given: _Given) -> None:
        tensors, grads, updates = given
        numbers: list[Any] = []
        advanced: dict[int, dict[str, Any]] = {}
        for k, (link, setting) in enumerate(zip(self.links, settings, strict=True)):
            split = cohort.splits[k]
            if split is None or split[0] is not setting:
                split = self._split_settings(cohort, k, setting)
                # A measured number on a device is not kept: the next one takes its memory.
                cohort.splits[k] = ({}, split[1], []) if k == 0 and self._measures else split
            numbers += split[2]
            if link.counts or link.numbers:
                advanced[k] = dict(cohort.numbers[k])
                link.advance_numbers(advanced[k], setting)
                numbers += advanced[k].values()
        bound = self._find_bound(cohort, settings, updates is None)
        whole = len(cohort.indices) == len(tensors)
        params: list[Tensor] = cohort.params
        chosen = tensors if whole and type(tensors) is list else [tensors[i] for i in cohort.indices]
        pairs = params[0].is_complex()
        lists: list[Sequence[Tensor]] = [params, chosen]
        if self._grads and grads is not None:
            lists.append([grads[i] for i in cohort.indices])
        if updates is not None:
            if not owned and cohort.scratch is None:
                cohort.scratch = [torch.empty_like(t) for t in chosen]
            into: Sequence[Tensor] = chosen if owned else cohort.scratch or []
            lists.append(list(into))
            for i, tensor in zip(cohort.indices, into, strict=True):
                updates[i] = tensor
        if pairs:
            resolve_lazy(params)  # those that became lazy views since the optimizer was made
        args: list[Any] = [list(map(as_real, held)) for held in lists] if pairs else lists
        shown = chain(*cohort.states) if self._exposed else ()
        bound(*args, *shown, *numbers)
        if not bound.fused.fn.is_known:  # type: ignore[attr-defined]
            self._leave_impure(bound.fused.fn)  # type: ignore[arg-type]
        for k, changed in advanced.items():
            cohort.numbers[k] = changed
            for row in cohort.rows[k]:
                dict.update(row, changed)  # not counted as a change of the row

    def _leave_impure(self, run: Composite) -> None:
        """Take links whose hooks are not pure out of the run, once a trace has found them: the others stay one pass."""
        run.is_known = True
        for link, problem in zip(self.links, run.problems, strict=True):
            if problem is not None:
                link.impure = problem

    def _split_settings(
        self, cohort: _Cohort, k: int, setting: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Part, list[Any]]:
        """Return the settings of a link as part of a kernel's key and as numbers; an equal part is the object it was."""
        link, before = self.links[k], cohort.splits[k]
        names, values, constants = split_settings(link, setting)
        part: Part = (cohort.keys[k], (*names, *link.list_numbers()), tuple(constants))
        return setting, before[1] if before is not None and before[1] == part else part, values

    def _find_bound(self, cohort: _Cohort, settings: Sequence[Mapping[str, Any]], tail: bool) -> kernels.Bound:
        """Return the kernel for the settings of a cohort, with its states."""
        parts = tuple([split[1] for split in cohort.splits if split is not None])
        last = cohort.last
        if last is not None and last[0][1] is tail and all(map(operator.is_, last[0][2], parts)):
            return last[1]
        key: Parts = (self._grads, tail, parts)
        bound = cohort.bound.get(key)
        if bound is None:
            if key not in self._fused:
                check_pointwise(self.links, settings, cohort, self._grads)
                run = Composite(self.links, key)
                self._fused[key] = (kernels.fuse(run, private=run.private), run.private)
            fused, private = self._fused[key]
            states: dict[str, Any] = dict(zip(private, chain(*cohort.states), strict=True))
            # Tensors of rows that were handed out may have other memory by now: they are compared in every call.
            bound = cohort.bound[key] = fused.bind() if self._exposed else fused.bind(**states)
        cohort.last = (key, bound)
        return bound


_row_writes = operator.attrgetter("row_writes")
_count = operator.attrgetter("count")
