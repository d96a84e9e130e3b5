"""Runs of pointwise links as one pass over all parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import kernels
from ..layout import map_tensors
from ._checks import check_pointwise, check_updates
from ._composite import Composite, Part, Parts, are_scalars, split_settings
from ._device_numbers import advance_copies, place_number, read_number
from ._hooks import gather_arguments, measure, show_arguments
from ._settings import current, is_per_member
from ._vectors import as_real, resolve_lazy
from .objective import Objective
from .offload import STREAMED, fetch_columns, fetched_rows, find_place, is_host, send_row, store_columns
from .transform import TensorTransform
from .watch import run_watched

if TYPE_CHECKING:
    from . import Module
    from .forms import StepForm


_PLAIN = frozenset({float, int, bool, str, type(None)})
_FLOATS = frozenset({float})
#: A placeholder with which hooks are checked where the kernel's call computes the norm.
_NORM: Mapping[str, Any] = {"norm": 1.0}
_INITIALIZE = ("single_tensor_initialize", "multi_tensor_initialize")

#: Traced kernels by the links of a run.
Traced = dict[tuple["Module", ...], dict[Parts, kernels.Fused]]


@dataclass(eq=False)
class _Cohort:
    """Parameters that share settings, dtypes and the numbers of their states: one call."""

    indices: list[int]
    params: list[Tensor]
    #: For each link its settings.
    raw: list[dict[str, Any]]
    #: For each link the states that are numbers on the host.
    numbers: list[dict[str, Any]]
    keys: list[tuple[str, ...]]
    rows: list[list[dict[str, Any]]]
    states: list[list[list[Tensor]]]
    #: For each link its settings and the names of its measures at the last step, its part of the kernel's key, its scalars.
    splits: list[tuple[Mapping[str, Any], tuple[str, ...], Part, list[Any]] | None]
    #: Whether the states are offloaded to another device between steps.
    is_away: bool = False
    scratch: list[Tensor] | None = None
    bound: dict[tuple[Any, ...], kernels.Bound] = field(default_factory=dict)
    last: tuple[Parts, kernels.Bound] | None = None
    #: Whether the settings are plain values, the same at every step of a plan; None where that is not known.
    steady: bool | None = None


# The update (which the links may write to where it is owned), the gradient where they read it, and the list for the result.
_Lists = tuple[list[Tensor], list[Tensor] | None, list[Tensor] | None]


class FusedRun:
    """Pointwise links in a row, run in one pass over all parameters with equal settings.

    Args:
        links: The links.
        tail: Whether the pass may move the parameters.
        traced: Kernels traced from their hooks, by key; new ones are added.
    """

    def __init__(self, links: list[TensorTransform], tail: bool, traced: dict[Parts, kernels.Fused]) -> None:
        self.links = links
        self.tail = tail
        self._traced = traced
        self._binding = links[0].settings.binding
        self._cohorts: list[_Cohort] = []
        #: The parameters of the cohorts, and which of them have a gradient.
        self._params: list[Tensor] | None = None
        self._present: list[bool] | None = None
        #: Whether callers have references to states, so that every call looks their addresses up.
        self._shared = False
        #: Whether some parameters are complex: they are passed to hooks as pairs of reals.
        self._pairs = False
        self._measures = links[0].finds_numbers()
        #: Whether the first link measures the norm of the update, which the kernel's call computes.
        self._finds_norm = False
        self._grads = any(link.uses_grad for link in links)

    def explain(self) -> list[Any]:
        """Return an `Explanation` of each pass that ran."""
        reports = [bound.explain() for cohort in self._cohorts for bound in cohort.bound.values()]
        return [report for report in reports if report is not None]

    def renew_numbers(self) -> None:
        """Read the settings again at the next step: the dictionaries are the same, with other values."""
        for cohort in self._cohorts:
            cohort.splits, cohort.steady = [None] * len(self.links), None

    # ------------------------------------------------------------------ the step

    def run(self, objective: Objective, form: StepForm) -> Objective:
        """Run the steps of all links in one pass; unfused where a plan or the settings do not allow it."""
        if objective.plan is None or not self._binding.fuse:
            return self._run_unfused(objective)
        tensors, params, before = objective.peek_updates(), objective.params, self._params
        # Links that split the parameters pass some of them to their children, perhaps others at the next call.
        same = params is before or (
            before is not None and len(params) == len(before) and all(map(operator.is_, params, before))
        )
        if same and self._present == objective.present:
            return self._run_cohorts(objective, tensors)
        shared = [link.row_writes.shared for link in self.links]
        self._params, self._shared = None, any(shared)
        with kernels.pause_collection():  # many long-lived states and plans are allocated
            built = self._build(objective, tensors)
            objective = self._run_cohorts(objective, tensors) if built else self._run_unfused(objective)
        for link, before_it in zip(self.links, shared, strict=True):
            link.row_writes.shared = before_it  # only the link's own hooks have read its rows
        return objective

    def _run_unfused(self, objective: Objective) -> Objective:
        self._params = None
        last = self.links[-1]
        for link in self.links:
            link.row_writes.watcher = None
            objective.wide = link is not last or self.tail
            with fetched_rows(link, objective.params):
                objective = run_watched(link, objective, link.step)
            if objective.checking:
                check_updates(objective, link)
        objective.wide = False
        return objective

    def _build(self, objective: Objective, tensors: Sequence[Tensor]) -> bool:
        """Sort the parameters into cohorts; return False if a link only creates its state while it learns."""
        params, present = objective.params, objective.present
        positions = [i for i in range(len(params)) if present is None or present[i]]
        members = [params[i] for i in positions]
        every_row, every_raw = [], []
        for link in self.links:
            link.row_writes.watcher = None
            rows = link.find_rows(members)
            every_row.append(rows)
            every_raw.append(list(map(link.settings.raw, members)))
            if (link.counts or link.has_own(*_INITIALIZE)) and not all(rows):
                _, arguments = gather_arguments(link, objective, *link._lists(objective), owned=False)
                with show_arguments(link, objective, arguments):
                    link._fill_states(arguments, streamed=True)
            if link.has_own("single_tensor_update") and not all(rows):
                return False
            for row, name in product(rows, link.list_numbers()):
                number = row[name]
                if isinstance(number, Tensor):
                    if number.dim():
                        return False  # a number for each member
                    dict.update(row, {name: read_number(number)})
        groups: dict[tuple[Any, ...], list[int]] = {}
        streamed = 0
        for k, i in enumerate(positions):
            kind: list[Any] = [params[i].dtype, tensors[i].dtype, params[i].device]
            if find_place(self._binding, params[i]) is not None:
                kind.append(streamed // STREAMED)  # offloaded state is fetched in chunks of this size
                streamed += params[i].numel()
            for link, rows, raws in zip(self.links, every_row, every_raw, strict=True):
                kind += [id(raws[k]), *(rows[k][name] for name in link.list_numbers())]
                kind += [(key, value.dtype) for key, value in rows[k].items() if isinstance(value, Tensor)]
            groups.setdefault(tuple(kind), []).append(k)
        self._cohorts = [
            self._make_cohort(group, positions, members, every_row, every_raw) for group in groups.values()
        ]
        self._params, self._present = params, present
        self._pairs = any(cohort.params[0].is_complex() for cohort in self._cohorts)
        first, whole = self.links[0], len(self._cohorts) == 1 and len(positions) == len(params)
        self._finds_norm = first.measures == "norm" and whole and objective.shards is None and not first.numbers
        for link in self.links:
            # Passes store the addresses of states: a caller that replaces one, or gets a reference, changes the plan.
            link.row_writes.watcher = self._binding.writes
        return True

    def _make_cohort(
        self,
        group: Sequence[int],
        positions: Sequence[int],
        members: Sequence[Tensor],
        every_row: Sequence[Sequence[dict[str, Any]]],
        every_raw: Sequence[Sequence[dict[str, Any]]],
    ) -> _Cohort:
        rows = [[own[k] for k in group] for own in every_row]
        place = find_place(self._binding, members[group[0]])
        for row in chain(*rows):
            send_row(row, place)
        keys = [tuple(key for key, value in own[0].items() if isinstance(value, Tensor)) for own in rows]
        numbers = [{n: own[0][n] for n in link.list_numbers()} for link, own in zip(self.links, rows, strict=True)]
        if self._binding.device_steps is not None:
            device = members[group[0]].device
            numbers = [{name: place_number(value, device) for name, value in own.items()} for own in numbers]
            for own, values in zip(rows, numbers, strict=True):
                for row in own:
                    dict.update(row, values)
        return _Cohort(
            indices=[positions[k] for k in group],
            params=[members[k] for k in group],
            raw=[raws[group[0]] for raws in every_raw],
            numbers=numbers,
            keys=keys,
            rows=rows,
            states=[[[row[key] for row in own] for key in names] for own, names in zip(rows, keys, strict=True)],
            splits=[None] * len(self.links),
            is_away=place is not None and not is_host(members[group[0]].device),
        )

    def _run_cohorts(self, objective: Objective, tensors: list[Tensor]) -> Objective:
        grads = objective.get_grads() if self._grads else None
        now: list[Sequence[Mapping[str, Any]]] = []
        for cohort in self._cohorts:
            if cohort.steady is None:
                cohort.steady = _PLAIN.issuperset(map(type, chain(*map(dict.values, cohort.raw))))
            step = objective.current_step if cohort.steady else self._find_step(objective, cohort)
            settings = cohort.raw if cohort.steady else [current(raw, step) for raw in cohort.raw]
            now.append(settings)
            values = (
                () if cohort.steady or objective.members is None else chain(*(setting.values() for setting in settings))
            )
            if any(map(is_per_member, values)):  # the value of a schedule
                return self._run_unfused(objective)
        measured = [_NORM] if self._finds_norm else []
        if self._measures and not self._finds_norm:
            measured = self._measure(objective, [tensors, objective.params, grads], now)
        # Hooks after the step read the update, so there has to be one.
        tail = self.tail and not objective.skip_update and not objective.post_step_hooks
        updates: list[Tensor] | None = None if tail else list(objective.updates or tensors)
        for i, cohort in enumerate(self._cohorts):
            numbers = measured[i] if self._measures else {}
            self._run(cohort, now[i], numbers, objective.updates is not None, (tensors, grads, updates))
        if tail:
            objective.skip_update = True
        else:
            objective.updates = updates
        return objective

    def _find_step(self, objective: Objective, cohort: _Cohort) -> int | Tensor:
        """Return the step at which schedules are evaluated: a tensor where steps can be captured."""
        steps, step = self._binding.device_steps, objective.current_step
        return step if steps is None else steps.find(cohort.params[0].device, step)

    def _measure(
        self, objective: Objective, lists: list[Any], now: list[Sequence[Mapping[str, Any]]]
    ) -> list[Mapping[str, Any]]:
        """Return for each cohort the scalars that the first link measures over all tensors with equal settings.

        Measured values that can't be scalars of a kernel become settings.
        """
        link = self.links[0]
        if self._pairs:
            lists = [None if each is None else list(map(as_real, each)) for each in lists]
        places = [cohort.indices for cohort in self._cohorts]
        results: list[Any] = measure(link, objective, [settings[0] for settings in now], places, lists)
        for i, cohort in enumerate(self._cohorts):
            if not _FLOATS.issuperset(map(type, results[i].values())):
                results[i] = map_tensors(results[i], partial(Tensor.to, device=cohort.params[0].device))
                if not are_scalars(link, now[i][0], results[i]):
                    now[i], results[i] = [{**now[i][0], **results[i]}, *now[i][1:]], {}
        return results

    def _run(
        self,
        cohort: _Cohort,
        settings: Sequence[Mapping[str, Any]],
        measured: Mapping[str, Any],
        owned: bool,
        lists: _Lists,
    ) -> None:
        tensors, grads, updates = lists
        numbers: list[Any] = []
        advanced: dict[int, dict[str, Any]] = {}
        for k, (link, setting) in enumerate(zip(self.links, settings, strict=True)):
            split, extra = cohort.splits[k], measured if k == 0 else {}
            if split is None or split[0] is not setting or split[1] != tuple(extra):
                split = self._split_settings(cohort, k, setting, tuple(extra))
            numbers += split[3]
            if not self._finds_norm:
                numbers += extra.values()
            if link.numbers:
                advanced[k] = advance_copies(link, cohort.numbers[k], {**setting, **extra})
                numbers += advanced[k].values()
            elif link.counts:
                count = cohort.numbers[k]["step"] + 1
                advanced[k] = {"step": count}
                numbers.append(count)
        bound = self._find_bound(cohort, settings, measured, updates is None)
        params: list[Tensor] = cohort.params
        whole = len(cohort.indices) == len(tensors)
        chosen = tensors if whole and type(tensors) is list else [tensors[i] for i in cohort.indices]
        columns: list[Sequence[Tensor]] = [params, chosen]
        if self._grads and grads is not None:
            columns.append([grads[i] for i in cohort.indices])
        if updates is not None:
            columns.append(self._choose_results(cohort, chosen, owned, updates))
        if params[0].is_complex():
            resolve_lazy(params)  # some may have become lazy views since the optimizer was constructed
            columns = [list(map(as_real, each)) for each in columns]
        if cohort.is_away:
            _call_fetched(bound, columns, cohort, numbers)
        else:
            bound(*columns, *(chain(*cohort.states) if self._shared else ()), *numbers)
        if self._binding.watch is not None:
            self._binding.watch.add_run(self.links, params, bound.partial_squares, updates is None)
        if not bound.fused.fn.is_known:  # type: ignore[attr-defined]
            self._leave_impure(bound.fused.fn)  # type: ignore[arg-type]
        if self._binding.device_steps is not None:
            _write_numbers(cohort, advanced)
            return
        for k, changed in advanced.items():
            cohort.numbers[k] = changed
            for row in cohort.rows[k]:
                dict.update(row, changed)  # not counted as a change of the row

    def _choose_results(
        self, cohort: _Cohort, tensors: Sequence[Tensor], owned: bool, updates: list[Tensor]
    ) -> list[Tensor]:
        """Return the tensors that a pass writes the update of a cohort to, and set them in `updates`."""
        if not owned and cohort.scratch is None:
            cohort.scratch = [torch.empty_like(tensor) for tensor in tensors]
        results = list(tensors if owned else cohort.scratch or ())
        for i, tensor in zip(cohort.indices, results, strict=True):
            updates[i] = tensor
        return results

    def _leave_impure(self, run: Composite) -> None:
        """Exclude links whose hooks are not pure, after a trace has detected them: the others stay one pass."""
        run.is_known = True
        for link, problem in zip(self.links, run.problems, strict=True):
            if problem is not None:
                link.impure = problem

    def _split_settings(
        self, cohort: _Cohort, k: int, setting: Mapping[str, Any], measured: Sequence[str]
    ) -> tuple[Mapping[str, Any], tuple[str, ...], Part, list[Any]]:
        """Return the settings of a link as its part of a kernel's key and as scalars; an unchanged part is the same object."""
        link, before = self.links[k], cohort.splits[k]
        names, values, constants = split_settings(link, link.add_dtype(setting, cohort.params[0]))
        part: Part = (cohort.keys[k], (*names, *measured, *link.list_numbers()), tuple(constants))
        split = (setting, tuple(measured), before[2] if before is not None and before[2] == part else part, values)
        cohort.splits[k] = split
        return split

    def _find_bound(
        self, cohort: _Cohort, settings: Sequence[Mapping[str, Any]], measured: Mapping[str, Any], tail: bool
    ) -> kernels.Bound:
        """Return the kernel for the settings of a cohort, bound to its states."""
        parts = tuple([split[2] for split in cohort.splits if split is not None])
        last = cohort.last
        watched = self._binding.watch is not None
        same = last is not None and last[0][1] is tail and last[0][3] is watched
        if last is not None and same and all(map(operator.is_, last[0][2], parts)):
            return last[1]
        key: Parts = (self._grads, tail, parts, watched)
        bound = cohort.bound.get(key)
        if bound is None:
            fused = self._traced.get(key)
            if fused is None:
                check_pointwise(self.links, [{**settings[0], **measured}, *settings[1:]], cohort, self._grads)
                run = Composite(self.links, key)
                fused = self._traced[key] = kernels.fuse(run, private=run.private)
            names = () if self._shared or cohort.is_away else fused.fn.private  # type: ignore[attr-defined]
            norms = {f"number0_{parts[0][1].index('norm')}": "tensor"} if self._finds_norm else {}
            states = dict(zip(names, chain(*cohort.states), strict=False))
            bound = cohort.bound[key] = fused.bind(norms=norms, **states)
        cohort.last = (key, bound)
        return bound


def _call_fetched(bound: kernels.Bound, lists: Sequence[Any], cohort: _Cohort, numbers: Sequence[Any]) -> None:
    """Call a kernel with offloaded states, which are copied to the device and back."""
    stored: list[list[Tensor]] = list(chain(*cohort.states))
    fetched = fetch_columns(stored, cohort.params)
    bound(*lists, *fetched, *numbers)
    store_columns(stored, fetched)


def _write_numbers(cohort: _Cohort, advanced: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the advanced scalars of each link to its tensors on the device."""
    for k, changed in advanced.items():
        for name, value in changed.items():
            cohort.numbers[k][name].copy_(value)
