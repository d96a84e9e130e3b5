"""The parameters of a fused run, sorted into cohorts: those that one call of a kernel can take together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .. import kernels
from ._composite import KernelKey, KernelPart
from ._device_numbers import place_number, read_number
from ._first_state import starts_from_update
from ._hooks import gather_arguments, show_arguments
from .offload import STREAMED, fetch_columns, find_place, is_host, send_row, store_columns

if TYPE_CHECKING:
    from .objective import Objective
    from .transform import TensorTransform

_INITIALIZE = ("single_tensor_initialize", "multi_tensor_initialize")


class SplitSettings(NamedTuple):
    """The settings and measures of a link at the last step, split for the kernel.

    Attributes:
        setting: The settings.
        measured: The names of the measures.
        part: The part of the kernel's key.
        scalars: The values of the settings that are scalars.
    """

    setting: Mapping[str, Any]
    measured: tuple[str, ...]
    part: KernelPart
    scalars: list[Any]


@dataclass(eq=False)
class Cohort:
    """Parameters that share settings, dtypes and the numbers of their states: one call.

    Attributes:
        indices: The positions of the parameters in the objective.
        params: The parameters.
        raw: For each link its settings, with schedules not yet evaluated.
        numbers: For each link the states that are numbers on the host.
        keys: For each link the names of the states that are tensors.
        rows: For each link the row of each parameter.
        states: For each link and each name in `keys` the tensor of each parameter.
        splits: For each link its settings at the last step; None before the first.
        is_away: Whether the states are offloaded to another device between steps.
        scratch: Tensors for the result, if the pass may not write to its input.
        bound: The kernels that ran.
        last: The kernel of the last step, with its key; None if the part of a link in the key has changed since.
        steady: Whether all settings have the same value at every step of a plan; None if that was not checked.
    """

    indices: list[int]
    params: list[Tensor]
    raw: list[dict[str, Any]]
    numbers: list[dict[str, Any]]
    keys: list[tuple[str, ...]]
    rows: list[list[dict[str, Any]]]
    states: list[list[list[Tensor]]]
    splits: list[SplitSettings | None]
    is_away: bool = False
    scratch: list[Tensor] | None = None
    bound: dict[KernelKey, kernels.Bound] = field(default_factory=dict)
    last: tuple[KernelKey, kernels.Bound] | None = None
    steady: bool | None = None


def make_cohorts(
    links: Sequence[TensorTransform], objective: Objective, tensors: Sequence[Tensor]
) -> list[Cohort] | None:
    """Return the parameters with a gradient as cohorts; None if the state of a link does not allow one pass.

    Args:
        links: The links of a fused run.
        objective: The objective.
        tensors: The update so far.
    """
    binding, indices = links[0].settings.binding, objective.list_present()
    params = [objective.params[i] for i in indices]
    rows_by_link: list[list[dict[str, Any]]] = []
    for link in links:
        rows = _read_rows(link, objective, params, behind=link is not links[0])
        if rows is None:
            return None
        rows_by_link.append(rows)
    raw_by_link = [list(map(link.settings.raw, params)) for link in links]
    groups: dict[tuple[Any, ...], list[int]] = {}
    streamed = 0
    for k, (i, param) in enumerate(zip(indices, params, strict=True)):
        kind: list[Any] = [param.dtype, tensors[i].dtype, param.device]
        if find_place(binding, param) is not None:
            kind.append(streamed // STREAMED)  # offloaded state is fetched in chunks of this size
            streamed += param.numel()
        for link, rows, raw in zip(links, rows_by_link, raw_by_link, strict=True):
            kind += [id(raw[k]), *_describe_row(link, rows[k])]
        groups.setdefault(tuple(kind), []).append(k)
    return [
        _make_cohort(
            links,
            [indices[k] for k in group],
            [params[k] for k in group],
            [[rows[k] for k in group] for rows in rows_by_link],
            [raw[group[0]] for raw in raw_by_link],
        )
        for group in groups.values()
    ]


def _read_rows(
    link: TensorTransform, objective: Objective, params: Sequence[Tensor], behind: bool
) -> list[dict[str, Any]] | None:
    """Return a link's row for each parameter, filled at first use, with its numbers on the host.

    The result is None for a link that creates its state when it first learns, for one with a number for each member, and for
    one whose state starts from an update that the links before it have not computed yet.

    Args:
        link: The link.
        objective: The objective.
        params: The parameters with a gradient.
        behind: Whether the run has links before this one.
    """
    rows = link.find_rows(params)
    if (link.counts or link.has_own(*_INITIALIZE)) and not all(rows):
        _, arguments = gather_arguments(link, objective, *link._lists(objective), owned=False)
        if behind and link.has_own(*_INITIALIZE) and starts_from_update(link, arguments):
            return None
        with show_arguments(link, objective, arguments):
            link._fill_states(arguments, streamed=True)
    if link.has_own("single_tensor_update") and not all(rows):
        return None
    for row, name in product(rows, link.list_numbers()):
        number = row[name]
        if isinstance(number, Tensor):
            if number.dim():
                return None
            dict.update(row, {name: read_number(number)})
    return rows


def _describe_row(link: TensorTransform, row: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a link's row that parameters of one cohort share: its numbers, and the dtypes of its tensors."""
    dtypes = [(key, value.dtype) for key, value in row.items() if isinstance(value, Tensor)]
    return [*(row[name] for name in link.list_numbers()), *dtypes]


def _make_cohort(
    links: Sequence[TensorTransform],
    indices: list[int],
    params: list[Tensor],
    rows: list[list[dict[str, Any]]],
    raw: list[dict[str, Any]],
) -> Cohort:
    """Return a cohort, and send its states to their place between steps.

    Args:
        links: The links of the run.
        indices: The positions of the parameters in the objective.
        params: The parameters.
        rows: For each link the row of each parameter.
        raw: For each link the settings that they share.
    """
    binding, device = links[0].settings.binding, params[0].device
    place = find_place(binding, params[0])
    for row in chain(*rows):
        send_row(row, place)
    keys = [tuple(key for key, value in own[0].items() if isinstance(value, Tensor)) for own in rows]
    numbers = [{name: own[0][name] for name in link.list_numbers()} for link, own in zip(links, rows, strict=True)]
    if binding.device_steps is not None:
        numbers = [{name: place_number(value, device) for name, value in own.items()} for own in numbers]
        for own, values in zip(rows, numbers, strict=True):
            for row in own:
                dict.update(row, values)
    return Cohort(
        indices=indices,
        params=params,
        raw=raw,
        numbers=numbers,
        keys=keys,
        rows=rows,
        states=[[[row[key] for row in own] for key in names] for own, names in zip(rows, keys, strict=True)],
        splits=[None] * len(links),
        is_away=place is not None and not is_host(device),
    )


def call_fetched(bound: kernels.Bound, columns: Sequence[Any], cohort: Cohort, scalars: Sequence[Any]) -> None:
    """Call a kernel with offloaded states, which are copied to the device and back.

    Args:
        bound: The kernel.
        columns: The lists of the pass other than states.
        cohort: The cohort.
        scalars: The scalars of the pass.
    """
    stored: list[list[Tensor]] = list(chain(*cohort.states))
    fetched = fetch_columns(stored, cohort.params)
    bound(*columns, *fetched, *scalars)
    store_columns(stored, fetched)


def write_numbers(cohort: Cohort, advanced: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the advanced scalars of each link to its tensors on the device."""
    for k, changed in advanced.items():
        for name, value in changed.items():
            cohort.numbers[k][name].copy_(value)
