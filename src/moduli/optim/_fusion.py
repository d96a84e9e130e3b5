"""Runs of pointwise links as one pass over all parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import kernels
from ..layout import map_tensors
from ._checks import check_pointwise, check_updates
from ._cohorts import Cohort, SplitSettings, call_fetched, make_cohorts, write_numbers
from ._composite import Composite, KernelKey, KernelPart, are_scalars, split_settings
from ._device_numbers import advance_copies
from ._hooks import measure
from ._settings import current, is_per_member
from ._vectors import as_real, resolve_lazy
from .objective import Objective
from .offload import fetched_rows
from .transform import TensorTransform
from .watch import run_watched

if TYPE_CHECKING:
    from . import Module
    from .forms import StepForm


#: The types of settings that have the same value at every step of a plan.
_CONSTANT_TYPES = frozenset({float, int, bool, str, type(None)})
_FLOATS = frozenset({float})
#: A placeholder with which hooks are checked if the kernel's call computes the norm.
_NORM: Mapping[str, Any] = {"norm": 1.0}

#: Traced kernels by the links of a run.
Traced = dict[tuple["Module", ...], dict[KernelKey, kernels.Fused]]

# The update (which a pass may write to if the objective owns it), the gradient if hooks read it, and the list for the result.
_Lists = tuple[list[Tensor], list[Tensor] | None, list[Tensor] | None]


class FusedRun:
    """Pointwise links in a row, run in one pass over all parameters with equal settings.

    Args:
        links: The links.
        tail: Whether the pass may move the parameters.
        traced: Kernels traced from their hooks, by key; new ones are added.
    """

    def __init__(self, links: list[TensorTransform], tail: bool, traced: dict[KernelKey, kernels.Fused]) -> None:
        self.links = links
        self.tail = tail
        self._traced = traced
        self._binding = links[0].settings.binding
        self._cohorts: list[Cohort] = []
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
        """Run the steps of all links in one pass; unfused without a plan, or if the settings do not allow it."""
        if objective.plan is None or not self._binding.fuse:
            return self._run_unfused(objective)
        tensors, params, before = objective.peek_updates(), objective.params, self._params
        # A link that splits the parameters may pass others of them to its children at the next call.
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
        for link, was_shared in zip(self.links, shared, strict=True):
            link.row_writes.shared = was_shared  # only the link's own hooks have read its rows
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
        """Sort the parameters into cohorts; return False if the state of a link does not allow one pass."""
        for link in self.links:
            link.row_writes.watcher = None
        cohorts = make_cohorts(self.links, objective, tensors)
        if cohorts is None:
            return False
        self._cohorts, self._params, self._present = cohorts, objective.params, objective.present
        self._pairs = any(cohort.params[0].is_complex() for cohort in cohorts)
        # The kernel's call computes a norm over its own lists, so these have to be all parameters.
        first, covers_all = self.links[0], len(cohorts) == 1 and len(cohorts[0].indices) == len(objective.params)
        self._finds_norm = first.measures == "norm" and covers_all and objective.shards is None and not first.numbers
        for link in self.links:
            # Passes store the addresses of states: a caller that replaces one, or gets a reference, changes the plan.
            link.row_writes.watcher = self._binding.writes
        return True

    def _run_cohorts(self, objective: Objective, tensors: list[Tensor]) -> Objective:
        """Run a pass over each cohort; run the links unfused if a schedule returns a number for each member.

        Args:
            objective: The objective.
            tensors: Its update so far.
        """
        grads = objective.get_grads() if self._grads else None
        settings_now: list[Sequence[Mapping[str, Any]]] = []
        for cohort in self._cohorts:
            settings = cohort.raw if cohort.steady else self._evaluate_settings(objective, cohort)
            if settings is None:
                return self._run_unfused(objective)
            settings_now.append(settings)
        measured = [_NORM] if self._finds_norm else []
        if self._measures and not self._finds_norm:
            measured = self._measure(objective, [tensors, objective.params, grads], settings_now)
        # Hooks after the step read the update, so there has to be one.
        tail = self.tail and not objective.skip_update and not objective.post_step_hooks
        updates: list[Tensor] | None = None if tail else list(objective.updates or tensors)
        for i, cohort in enumerate(self._cohorts):
            measures = measured[i] if self._measures else {}
            self._run(cohort, settings_now[i], measures, objective.updates is not None, (tensors, grads, updates))
        if tail:
            objective.skip_update = True
        else:
            objective.updates = updates
        return objective

    def _evaluate_settings(self, objective: Objective, cohort: Cohort) -> Sequence[Mapping[str, Any]] | None:
        """Return the settings of each link at this step; None if a schedule returns a number for each member."""
        if cohort.steady is None:
            cohort.steady = _CONSTANT_TYPES.issuperset(map(type, chain(*map(dict.values, cohort.raw))))
        if cohort.steady:
            return cohort.raw
        steps, step = self._binding.device_steps, objective.current_step
        now = step if steps is None else steps.find(cohort.params[0].device, step)
        settings = [current(raw, now) for raw in cohort.raw]
        scheduled = () if objective.members is None else chain(*(setting.values() for setting in settings))
        return None if any(map(is_per_member, scheduled)) else settings

    def _measure(
        self, objective: Objective, lists: list[Any], settings_now: list[Sequence[Mapping[str, Any]]]
    ) -> list[Mapping[str, Any]]:
        """Return for each cohort the scalars that the first link measures over all tensors with equal settings.

        Args:
            objective: The objective.
            lists: Update, parameters and gradient.
            settings_now: For each cohort the settings of each link. Measured values that can't be scalars of a kernel are moved
                into these.
        """
        link = self.links[0]
        if self._pairs:
            lists = [None if each is None else list(map(as_real, each)) for each in lists]
        places = [cohort.indices for cohort in self._cohorts]
        results: list[Any] = measure(link, objective, [settings[0] for settings in settings_now], places, lists)
        for i, cohort in enumerate(self._cohorts):
            if not _FLOATS.issuperset(map(type, results[i].values())):
                results[i] = map_tensors(results[i], partial(Tensor.to, device=cohort.params[0].device))
                first, *others = settings_now[i]
                if not are_scalars(link, first, results[i]):
                    settings_now[i], results[i] = [{**first, **results[i]}, *others], {}
        return results

    def _run(
        self,
        cohort: Cohort,
        settings: Sequence[Mapping[str, Any]],
        measured: Mapping[str, Any],
        owned: bool,
        lists: _Lists,
    ) -> None:
        """Run a pass over a cohort, and store the advanced numbers of the links.

        Args:
            cohort: The cohort.
            settings: The settings of each link at this step.
            measured: The measures of the first link.
            owned: Whether the pass may write to the update.
            lists: The update, the gradient, and the list for the results, None if the pass moves the parameters.
        """
        tensors, grads, updates = lists
        scalars, advanced = self._find_scalars(cohort, settings, measured)
        bound = self._find_bound(cohort, settings, measured, updates is None)
        params, chosen = cohort.params, _pick(cohort, tensors)
        columns: list[Sequence[Tensor]] = [params, chosen]
        if self._grads and grads is not None:
            columns.append(_pick(cohort, grads))
        if updates is not None:
            columns.append(self._choose_results(cohort, chosen, owned, updates))
        if params[0].is_complex():
            resolve_lazy(params)  # some may have become lazy views since the optimizer was constructed
            columns = [list(map(as_real, each)) for each in columns]
        if cohort.is_away:
            call_fetched(bound, columns, cohort, scalars)
        else:
            bound(*columns, *(chain(*cohort.states) if self._shared else ()), *scalars)
        if self._binding.watch is not None:
            self._binding.watch.add_run(self.links, params, bound.partial_squares, updates is None)
        if not bound.fused.fn.is_reported:  # type: ignore[attr-defined]
            self._exclude_impure(bound.fused.fn)  # type: ignore[arg-type]
        if self._binding.device_steps is not None:
            write_numbers(cohort, advanced)
            return
        for k, changed in advanced.items():
            cohort.numbers[k] = changed
            for row in cohort.rows[k]:
                dict.update(row, changed)  # not counted as a change of the row

    def _find_scalars(
        self, cohort: Cohort, settings: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]
    ) -> tuple[list[Any], dict[int, dict[str, Any]]]:
        """Return the scalars of a pass, and the advanced numbers of the links, by position.

        Args:
            cohort: The cohort.
            settings: The settings of each link at this step.
            measured: The measures of the first link.
        """
        scalars: list[Any] = []
        advanced: dict[int, dict[str, Any]] = {}
        for k, (link, setting) in enumerate(zip(self.links, settings, strict=True)):
            split, measures = cohort.splits[k], measured if k == 0 else {}
            if split is None or split.setting is not setting or split.measured != tuple(measures):
                split = self._split_settings(cohort, k, setting, tuple(measures))
            scalars += split.scalars
            if not self._finds_norm:
                scalars += measures.values()
            if link.numbers:
                advanced[k] = advance_copies(link, cohort.numbers[k], {**setting, **measures})
                scalars += advanced[k].values()
            elif link.counts:
                count = cohort.numbers[k]["step"] + 1
                advanced[k] = {"step": count}
                scalars.append(count)
        return scalars, advanced

    def _choose_results(
        self, cohort: Cohort, tensors: Sequence[Tensor], owned: bool, updates: list[Tensor]
    ) -> list[Tensor]:
        """Return the tensors that a pass writes the update of a cohort to, and set them in `updates`."""
        if not owned and cohort.scratch is None:
            cohort.scratch = [torch.empty_like(tensor) for tensor in tensors]
        results = list(tensors if owned else cohort.scratch or ())
        for i, tensor in zip(cohort.indices, results, strict=True):
            updates[i] = tensor
        return results

    def _exclude_impure(self, composite: Composite) -> None:
        """Exclude links whose hooks are not pure, after a trace has detected them: the others stay one pass."""
        composite.is_reported = True
        for link, problem in zip(self.links, composite.problems, strict=True):
            if problem is not None:
                link.impure = problem

    def _split_settings(
        self, cohort: Cohort, k: int, setting: Mapping[str, Any], measured: Sequence[str]
    ) -> SplitSettings:
        """Return the settings of a link as its part of a kernel's key and as scalars, and store them in the cohort."""
        link, before = self.links[k], cohort.splits[k]
        names, values, constants = split_settings(link, link.add_dtype(setting, cohort.params[0]))
        part = KernelPart(cohort.keys[k], (*names, *measured, *link.list_numbers()), tuple(constants))
        if before is None or before.part != part:
            cohort.last = None
        split = cohort.splits[k] = SplitSettings(setting, tuple(measured), part, values)
        return split

    def _find_bound(
        self, cohort: Cohort, settings: Sequence[Mapping[str, Any]], measured: Mapping[str, Any], tail: bool
    ) -> kernels.Bound:
        """Return the kernel for the settings of a cohort, bound to its states."""
        watched = self._binding.watch is not None
        if cohort.last is not None:
            key, bound = cohort.last
            if key.tail is tail and key.watched is watched:
                return bound
        parts = tuple([split.part for split in cohort.splits if split is not None])
        key = KernelKey(self._grads, tail, parts, watched)
        if key not in cohort.bound:
            fused = self._traced.get(key)
            if fused is None:
                check_pointwise(self.links, [{**settings[0], **measured}, *settings[1:]], cohort, self._grads)
                composite = Composite(self.links, key)
                fused = self._traced[key] = kernels.fuse(composite, private=composite.private)
            names = () if self._shared or cohort.is_away else fused.fn.private  # type: ignore[attr-defined]
            norms = {f"number0_{parts[0].scalars.index('norm')}": "tensor"} if self._finds_norm else {}
            states = dict(zip(names, chain(*cohort.states), strict=False))
            cohort.bound[key] = fused.bind(norms=norms, **states)
        cohort.last = (key, cohort.bound[key])
        return cohort.bound[key]


def _pick(cohort: Cohort, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return those of the objective's tensors that belong to the parameters of a cohort."""
    covers_all = len(cohort.indices) == len(tensors)
    return tensors if covers_all and type(tensors) is list else [tensors[i] for i in cohort.indices]
