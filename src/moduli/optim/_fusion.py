"""Runs of pointwise links as one pass over all parameters."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import kernels
from ..layout import map_tensors
from ._needs import Across
from ._settings import current, is_per_member
from ._vectors import as_real
from .transform import TensorTransform, gather_arguments, measure, show_arguments

if TYPE_CHECKING:
    from . import Module, Objective


_INITIALIZE = ("single_tensor_initialize", "multi_tensor_initialize")

# What decides whether and how a link is fused; an object may say otherwise than its class, and later than before.
_declared = operator.attrgetter(
    "elementwise", "concat_params", "update_freq", "uses_loss", "uses_grad", "measures", "counts", "static"
)


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
    }
    return next((why for why, holds in reasons.items() if holds), None)


def segments(owner: Any, links: Sequence[Module]) -> Sequence[Any]:
    """The links with each maximal run of pointwise ones as one `FusedRun`; remembered by the owner of the chain."""
    if owner is None:
        return links
    binding = getattr(owner, "binding", None) or owner.settings.binding
    over_members = binding is not None and binding.members is not None
    key: list[Any] = [(id(link), _declared(link) if hasattr(link, "elementwise") else None) for link in links]
    if over_members:
        key += [link.settings.are_per_member() for link in links]
    known, before = getattr(owner, "_segments", None) or (None, ())
    if known == key:
        return before
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
    rows: list[list[dict[str, Any]]]
    states: list[list[list[Tensor]]]
    scratch: list[Tensor] | None = None
    bound: dict[tuple[Any, ...], kernels.Bound] = field(default_factory=dict)


# The update, which the links may write to where it is owned; the gradient, where they read it; and where the result goes.
_Given = tuple[list[Tensor], list[Tensor] | None, list[Tensor] | None]


class FusedRun:
    """Pointwise links in a row, run in one pass over all parameters with equal settings."""

    def __init__(self, links: list[TensorTransform], tail: bool) -> None:
        self.links = links
        self.tail = tail
        self._cohorts: list[_Cohort] = []
        self._params: list[Tensor] | None = None
        self._present: list[bool] | None = None
        self._fused: dict[_Parts, tuple[kernels.Fused, list[str]]] = {}
        self._measures = links[0].finds_numbers()
        self._grads = any(link.uses_grad for link in links)
        #: Set in the links by a step, until their states are shown.
        self._token = object()
        #: Whether the states were ever shown after they were made: who holds one may change it at any time.
        self._exposed = False

    # ------------------------------------------------------------------ cohorts

    def _is_valid(self, objective: Objective) -> bool:
        if self._params is None or self._present != objective.present:
            return False
        if self._params is not objective.params:
            known, here = self._params, objective.params
            if len(known) != len(here) or not all(map(operator.is_, known, here)):
                return False
            self._params = here
        for cohort in self._cohorts:
            first = cohort.params[0]
            for link, raw in zip(self.links, cohort.raw, strict=True):
                if link.settings.raw(first) is not raw:
                    return False
        if not all(map(operator.is_, map(_seen_by, self.links), repeat(self._token))):
            self._exposed = True
        return not self._exposed or all(map(self._holds, self._cohorts))

    def _holds(self, cohort: _Cohort) -> bool:
        """Whether links keep for a cohort what it was made of."""
        for k, (link, known) in enumerate(zip(self.links, cohort.rows, strict=True)):
            rows = [link._state[param] for param in cohort.params]
            held = [[row.get(key) for row in rows] for key in cohort.keys[k]]
            counts = {row.get("step", 0) for row in rows} if link.counts else {cohort.counts[k]}
            same = counts == {cohort.counts[k]} and list(map(len, rows)) == list(map(len, known))
            if not same or not all(map(operator.is_, chain(*held), chain(*cohort.states[k]))):
                return False
            cohort.rows[k] = rows
        return True

    def _build(self, objective: Objective, tensors: Sequence[Tensor]) -> bool:
        """Sort the parameters into cohorts; False where a link makes its state while it learns, not when asked to."""
        params = objective.params
        kept = [i for i in range(len(params)) if objective.present is None or objective.present[i]]
        members = [params[i] for i in kept]
        every_row, every_raw = [], []
        for link in self.links:
            rows = [link._state[param] for param in members]
            every_row.append(rows)
            every_raw.append(list(map(link.settings.raw, members)))
            if (link.counts or link.has_own(*_INITIALIZE)) and not all(rows):
                _, given = gather_arguments(link, objective, *link._lists(objective), owned=False)
                with show_arguments(link, objective, given):
                    link._fill_states(given)
            if link.has_own("single_tensor_update") and not all(rows):
                return False
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, i in enumerate(kept):
            kind: list[Any] = [params[i].dtype, tensors[i].dtype, params[i].device]
            for link, rows, raws in zip(self.links, every_row, every_raw, strict=True):
                row = rows[position]
                kind += [id(raws[position]), row.get("step", 0) if link.counts else 0]
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
                    [row.get("step", 0) if link.counts else 0 for link, row in zip(self.links, firsts, strict=True)],
                    keys,
                    [[rows[position] for position in positions] for rows in every_row],
                    states,
                )
            )
        self._params, self._present = params, objective.present
        return True

    # ------------------------------------------------------------------ the step

    def step(self, objective: Objective) -> Objective:
        """The same as each link's step in turn."""
        binding = self.links[0].settings.binding
        if binding is not None and not binding.fuse:
            return self._run_unfused(objective)
        tensors = objective.peek_updates()
        if self._is_valid(objective):
            return self._run_cohorts(objective, tensors)
        with kernels.pause_collection():  # states and plans are made, which are kept
            built = self._build(objective, tensors)
            return self._run_cohorts(objective, tensors) if built else self._run_unfused(objective)

    def _run_unfused(self, objective: Objective) -> Objective:
        self._params = None
        for link in self.links:
            objective = link.step(objective)
        return objective

    def _run_cohorts(self, objective: Objective, tensors: list[Tensor]) -> Objective:
        grads = objective.get_grads() if self._grads else None
        now = [[current(raw, objective.current_step) for raw in cohort.raw] for cohort in self._cohorts]
        if self._measures:
            self._measure(objective, [tensors, objective.params, grads], now)
        every = (value for settings in now for setting in settings for value in setting.values())
        if objective.members is not None and any(map(is_per_member, every)):  # which a schedule has made
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
        if any(cohort.params[0].is_complex() for cohort in self._cohorts):
            lists = [None if held is None else list(map(as_real, held)) for held in lists]
        places = [cohort.indices for cohort in self._cohorts]
        found = measure(self.links[0], objective, [settings[0] for settings in now], places, lists)
        for cohort, settings, numbers in zip(self._cohorts, now, found, strict=True):
            bring = partial(Tensor.to, device=cohort.params[0].device)
            settings[0] = {**settings[0], **map_tensors(numbers, bring)}

    def _run(self, cohort: _Cohort, settings: Sequence[Mapping[str, Any]], owned: bool, given: _Given) -> None:
        tensors, grads, updates = given
        parts = []
        numbers: list[Any] = []
        for link, setting, keys, count in zip(self.links, settings, cohort.keys, cohort.counts, strict=True):
            names, values, constants = _split(link, setting)
            parts.append((keys, (*names, "step") if link.counts else tuple(names), tuple(constants)))
            numbers += [*values, count + 1] if link.counts else values
        key: _Parts = (self._grads, updates is None, tuple(parts))
        bound = cohort.bound.get(key)
        if bound is None:
            if key not in self._fused:
                run = Composite(self.links, key)
                self._fused[key] = (kernels.fuse(run, private=run.private), run.private)
            fused, private = self._fused[key]
            states: dict[str, Any] = dict(zip(private, chain(*cohort.states), strict=True))
            bound = cohort.bound[key] = fused.bind(**states)
        if self._exposed:
            bound.distrust()
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
        args: list[Any] = [list(map(as_real, held)) for held in lists] if pairs else lists
        bound(*args, *numbers)
        for k, link in enumerate(self.links):
            link._seen_by = self._token
            if link.counts:
                cohort.counts[k] += 1
                for row in cohort.rows[k]:
                    row["step"] = cohort.counts[k]


def _split(link: TensorTransform, setting: Mapping[str, Any]) -> tuple[list[str], list[Any], list[tuple[str, Any]]]:
    """Settings of a link that are numbers, free to change (names, values), and those that decide what is done."""
    names: list[str] = []
    values: list[Any] = []
    constants: list[tuple[str, Any]] = []
    for key, value in setting.items():
        kind = type(value)
        number = kind is float or kind is int
        if isinstance(value, Tensor):
            number = value.dim() == 0 and value.dtype.is_floating_point
        elif not number and kind is not bool and isinstance(value, float | int):  # NumPy's
            number, value = True, float(value)
        if number and key not in link.static:
            names.append(key)
            values.append(value)
        else:
            constants.append((key, value))
    return names, values, constants


_seen_by = operator.attrgetter("_seen_by")


# What decides a kernel: whether hooks read the gradient, whether the pass moves the parameters itself, and for each link the
# names of its states and of its numbers, and its constants.
_Parts = tuple[bool, bool, tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, Any], ...]], ...]]


class Composite:
    """The hooks of several links as one function of tensors and numbers, to be traced."""

    def __init__(self, links: Sequence[TensorTransform], key: _Parts) -> None:
        self.links = links
        self.grads, self.tail, self.parts = key
        # Where hooks find the state and settings of the symbol that they are shown as their parameter (`Module.shown`). Taken
        # here, because what runs while the hooks are traced is watched for changes, and the links' whole state is large.
        self.tables = [(link._state.shown, link.settings.shown) for link in links]
        self.__name__ = " | ".join(type(link).__name__ for link in links)
        names = ["param", "tensor"]
        names += ["grad"] if self.grads else []
        names += [] if self.tail else ["result"]
        #: What links remember is theirs: no graph holds it.
        self.private = [f"state{k}_{i}" for k, (states, _, _) in enumerate(self.parts) for i in range(len(states))]
        names += self.private
        names += [f"number{k}_{i}" for k, (_, numbers, _) in enumerate(self.parts) for i in range(len(numbers))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, *args: Any) -> None:
        values = iter(args)
        param, tensor = next(values), next(values).clone()
        grad = next(values) if self.grads else None
        result = None if self.tail else next(values)
        remembered = [{key: next(values) for key in states} for states, _, _ in self.parts]
        every = zip(self.links, self.tables, remembered, self.parts, strict=True)
        for link, tables, given, (_, numbers, constants) in every:
            setting: dict[str, Any] = {**dict(constants), **{key: next(values) for key in numbers}}
            state = dict(given)
            if link.counts:
                state["step"] = setting.pop("step")
            # The gradient is shared with the other links, so what this one writes to it is dropped.
            tables[0][param], tables[1][param] = state, setting
            try:
                link.single_tensor_update(tensor, param, grad, None, state, setting)
                tensor = link.single_tensor_apply(tensor, param, grad, None, state, setting)
            finally:
                tables[0].clear()
                tables[1].clear()
            extra = set(state) - set(given) - {"step"}
            if extra:
                name = f"{type(link).__name__} makes the state {sorted(extra)[0]!r} while learning"
                raise kernels.NotPointwiseError(
                    f"{name}; make it in single_tensor_initialize, or set elementwise = False"
                )
            for key, original in given.items():
                if state[key] is not original:
                    original.copy_(state[key])
        if result is None:
            param.sub_(tensor)
        else:
            result.copy_(tensor)
