"""Settings to tune contenders with: the numbers of a chain, their ranges, and chains with other numbers in them.

A setting is a chain as text, so that whatever was chosen can be run again by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .._search_ranges import SearchRange, find_declared_ranges, find_search_ranges, make_range
from ._contender import Contender
from ._grammar import Link, ParsedChain, Value, parse
from .catalogue import CatalogueEntry, check, find

RangeSpec = tuple[float, float] | SearchRange | float
SCALES = ("linear", "log", "one_minus")
# Sobol points are drawn with this seed: every contender gets the same points of the unit cube.
SOBOL_SEED = 0


PathStep = tuple[int, str | int]
"""The index of a link in its chain, and an argument of it: the name, or the position if it has no name."""


class TunedNumber(NamedTuple):
    """A number of a chain that is tuned.

    Attributes:
        name: The link and the argument, such as ``"LR.lr"``.
        path: The index of its link in the chain and its argument; for a number of a chain in an argument, a pair for each level.
        range: The range in which it is searched for.
    """

    name: str
    path: tuple[PathStep, ...]
    range: SearchRange


@dataclass(frozen=True)
class Setting:
    """One setting of a contender.

    Attributes:
        contender: The contender with these numbers.
        values: The numbers by name.
        number: Its index among the contender's settings.
        seed: The seed of its study.
    """

    contender: Contender
    values: dict[str, float]
    number: int
    seed: int


def make_settings(
    contender: Contender, count: int, seeds: Sequence[int], ranges: Mapping[str, RangeSpec] | None = None
) -> list[Setting]:
    """Return the settings of a contender: quasi-random in its ranges, dealt to the studies in equal parts.

    Args:
        contender: A chain, or a function whose keyword arguments have numbers as their defaults.
        count: How many settings, a multiple of the number of seeds.
        seeds: The seeds, one for each study.
        ranges: Ranges, and fixed numbers, by ``"lr"`` or ``"LR.lr"``; they replace those that are declared.

    Returns:
        The settings, those of the first study first. A contender without a number to tune has one for each study, itself.

    >>> from moduli.lab import contender
    >>> for setting in make_settings(contender("Adam(beta1=0.9) | LR(1)"), 2, [0, 1], {"beta2": 0.99, "beta1": 0.8}):
    ...     print(setting.contender.source)
    Adam(beta1=0.8, beta2=0.99) | LR(0.002663)
    Adam(beta1=0.8, beta2=0.99) | LR(0.00479)
    """
    numbers = list_tuned_numbers(contender, ranges or {})
    fixed = {each.name: each.range.low for each in numbers if each.range.low == each.range.high}
    free = [each for each in numbers if each.name not in fixed]
    if not free:
        whole = _replace_values(contender, numbers, fixed)
        return [Setting(whole, fixed, number, seed) for number, seed in enumerate(seeds)]
    points = torch.quasirandom.SobolEngine(len(free), scramble=True, seed=SOBOL_SEED).draw(count).double()  # type: ignore[no-untyped-call]
    settings = []
    for number, point in enumerate(points.tolist()):
        values = {each.name: each.range.value_at(at) for each, at in zip(free, point, strict=True)} | fixed
        seed = seeds[number * len(seeds) // count]
        settings.append(Setting(_replace_values(contender, numbers, values), values, number, seed))
    return settings


def list_tuned_numbers(contender: Contender, ranges: Mapping[str, RangeSpec]) -> list[TunedNumber]:
    """Return the numbers of a contender that have a range, declared or in `ranges`; a fixed number is a range of no width.

    Args:
        contender: A chain, or a function.
        ranges: Ranges and fixed numbers by name, as for `make_settings`.

    >>> from moduli.lab import contender
    >>> [each.name for each in list_tuned_numbers(contender("ClipNorm(1) | Adam | LR(0.01)"), {})]
    ['Adam.beta1', 'Adam.beta2', 'LR.lr']
    """
    if contender.factory is not None:
        declared = find_search_ranges(contender.factory)
        arguments = list(inspect.signature(contender.factory).parameters)[1:]
        kind = contender.label
        places: list[Place] = [(f"{kind}.{name}", ((0, name),), declared.get(name)) for name in arguments]
    else:
        places = list(_walk(parse(contender.source), ()))
    numbers: dict[str, TunedNumber] = {}
    for name, path, declared_range in places:
        limits = _choose_range(name, declared_range, ranges)
        if limits is not None:
            unique, count = name, 1
            while unique in numbers:
                count += 1
                unique = f"{name}#{count}"
            numbers[unique] = TunedNumber(unique, path, limits)
    return list(numbers.values())


def read_ranges(ranges: Mapping[str, Any]) -> dict[str, RangeSpec]:
    """Return ranges and fixed numbers as numbers of Python; a range may be a list, as in the header of a race.

    Args:
        ranges: Limits, limits with a scale, or numbers, by name.

    Raises:
        ValueError: If a range has other parts, or an unknown scale.

    >>> read_ranges({"lr": [1e-3, 1, "linear"], "beta1": 0.9})
    {'lr': SearchRange(low=0.001, high=1.0, scale='linear'), 'beta1': 0.9}
    """
    return {name: _read_range(name, spec) for name, spec in ranges.items()}


def _read_range(name: str, spec: Any) -> RangeSpec:
    """Return the range, or the fixed number, of one specification; `name` is for errors."""
    parts = list(spec) if hasattr(spec, "__len__") and not isinstance(spec, str) else [spec]
    if len(parts) not in (1, 2, 3) or (len(parts) == 3 and parts[2] not in SCALES):
        scales = ", ".join(map(repr, SCALES))
        fact = f"the range of {name!r} is {spec!r}"
        raise ValueError(f"{fact}; give two numbers, the lower first, and if need be a scale: {scales}")
    low, high = float(parts[0]), float(parts[-1] if len(parts) < 3 else parts[1])
    if len(parts) < 3:
        return low if len(parts) == 1 else (low, high)
    if low == high:
        return SearchRange(low, high, parts[2])
    scale = make_range(name, low, high, SearchRange(low, high, parts[2])).scale
    if scale != parts[2] and parts[2] != "linear":
        raise ValueError(f"the range of {name!r} is {low} to {high}, which has no scale {parts[2]!r}")
    return SearchRange(low, high, parts[2])


def check_ranges(contenders: Sequence[Contender], ranges: Mapping[str, RangeSpec]) -> None:
    """Raise ValueError if no contender has a number of a name in `ranges`."""
    names = {name for each in contenders for name in _list_names(each)}
    for key in ranges:
        if not any(_matches(key, name) for name in names):
            raise ValueError(
                f"no contender has a number {key!r} to tune; there are {', '.join(sorted(names)) or 'none'}"
            )


def _list_names(contender: Contender) -> list[str]:
    """Return the full names of the numbers of a contender that a range can be set for."""
    if contender.factory is not None:
        return [f"{contender.label}.{name}" for name in list(inspect.signature(contender.factory).parameters)[1:]]
    return [name for name, _, _ in _walk(parse(contender.source), ())]


def _matches(key: str, name: str) -> bool:
    """Whether a key of `ranges` is the full name of a number, or its last part."""
    return key == name or key == name.rpartition(".")[2]


def _choose_range(name: str, declared: SearchRange | None, ranges: Mapping[str, RangeSpec]) -> SearchRange | None:
    """Return the range of a number: that in `ranges`, by its full name or else its last part, otherwise the declared one."""
    for key in (name, name.rpartition(".")[2]):
        if key in ranges:
            limits = ranges[key]
            if isinstance(limits, SearchRange):
                return limits
            if isinstance(limits, tuple | list):
                return make_range(key, float(limits[0]), float(limits[1]), declared)
            return SearchRange(float(limits), float(limits))
    return declared


# -- chains -----------------------------------------------------------------------------------------------------------

Place = tuple[str, tuple[PathStep, ...], SearchRange | None]


def _walk(chain: ParsedChain, path: tuple[PathStep, ...]) -> Iterator[Place]:
    """Yield name, path and declared range of every argument that could be a number, links in order."""
    steps: SearchRange | None = None
    for at, link in enumerate(chain.links):
        entry = find(link.name)
        declared, written = find_search_ranges(entry.make), _read_arguments(link, entry)
        steps = _find_steps(entry, link) or steps
        arguments: list[tuple[str | int, Value]] = [*enumerate(link.args), *link.kwargs]
        for key, inner in arguments:
            if isinstance(inner, ParsedChain):
                yield from _walk(inner, (*path, (at, key)))
        for name in entry.signature.parameters:
            value = written.get(name)
            limits = declared.get(name)
            if name not in find_declared_ranges(entry.make) and name in written and limits is None:
                limits = _find_by_name(name, value)  # off by default, but the chain sets it
            if name in ("lr", "learning_rate") and limits is not None and steps is not None:
                limits = steps
            if name not in written or (isinstance(value, int | float) and not isinstance(value, bool)):
                yield f"{link.name}.{name}", (*path, (at, name)), limits


def _find_by_name(name: str, value: Any) -> SearchRange | None:
    """Return the range that arguments of a name have if their default is `value`; None for zero and for other types."""
    return find_search_ranges(_Example(name, value)).get(name) if isinstance(value, int | float) and value else None


class _Example:
    """A function with one argument, of which only the signature matters."""

    def __init__(self, name: str, default: float) -> None:
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        self.__signature__ = inspect.Signature([parameter])

    def __call__(self) -> None:
        """Do nothing."""


def _find_steps(entry: CatalogueEntry, link: Link) -> SearchRange | None:
    """Return the range of step sizes that the class of a link, a preset or an optimizer of torch declares, or None."""
    if entry.kind == "link":
        return find_declared_ranges(entry.make).get("lr")
    if entry.kind == "torch":
        from .. import m  # imported when the first chain is read

        return find_declared_ranges(getattr(m, link.name.removeprefix("torch.").removesuffix("W"), None)).get("lr")
    if entry.kind == "preset":
        try:
            parts = entry.make()
        except TypeError:  # it has arguments without a default
            return None
        links = parts if isinstance(parts, list | tuple) else [parts]
        ranges = [find_declared_ranges(type(each)).get("lr") for each in links]
        return next((limits for limits in reversed(ranges) if limits is not None), None)
    return None


def _read_arguments(link: Link, entry: CatalogueEntry) -> dict[str, Value]:
    """Return the arguments of a link by name, those by position included."""
    names = [
        name
        for name, parameter in entry.signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return {**dict(zip(names, link.args, strict=False)), **dict(link.kwargs)}


def _replace_values(contender: Contender, numbers: Sequence[TunedNumber], values: Mapping[str, float]) -> Contender:
    """Return a contender of the same label with other numbers: `values` has those of `numbers`, by name."""
    if not values:
        return contender
    if contender.factory is not None:
        keywords = {str(each.path[-1][1]): values[each.name] for each in numbers}
        text = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
        return Contender(contender.label, f"{contender.source}({text})", partial(contender.factory, **keywords))
    chain = parse(contender.source)
    for each in numbers:
        chain = replace_number(chain, each.path, values[each.name])
    check(chain)
    return Contender(contender.label, str(chain), None)


def replace_number(chain: ParsedChain, path: Sequence[PathStep], value: Any) -> ParsedChain:
    """Return a chain with another value of one argument, written where the old one was, or added.

    Args:
        chain: The chain.
        path: The index of a link and the name of its argument; several such pairs for a chain in an argument.
        value: The value.

    >>> print(replace_number(parse("Alternate(Adam, Lion) | LR(0.1)"), [(1, "lr")], 0.5))
    Alternate(Adam, Lion) | LR(0.5)
    """
    (at, key), *rest = path
    link = chain.links[at]
    position = key if isinstance(key, int) else list(find(link.name).signature.parameters).index(key)
    if rest:
        inner = link.args[position] if isinstance(key, int) else _read_arguments(link, find(link.name))[key]
        value = replace_number(inner, rest, value)  # type: ignore[arg-type]
    if position < len(link.args):
        changed = replace(link, args=(*link.args[:position], value, *link.args[position + 1 :]))
    else:
        changed = replace(link, kwargs=tuple({**dict(link.kwargs), str(key): value}.items()), columns=())
    return ParsedChain((*chain.links[:at], changed, *chain.links[at + 1 :]), chain.source)


def map_numbers(chains: Sequence[ParsedChain], join: Callable[[list[float]], Any]) -> ParsedChain | None:
    """Return one chain for several that differ in numbers only, with `join` of these numbers; None if they differ in more.

    Args:
        chains: The chains.
        join: A function of the numbers, one for each chain.

    >>> print(map_numbers([parse("Adam | LR(0.1)"), parse("Adam | LR(0.2)")], sum))
    Adam | LR(0.30000000000000004)
    """
    try:
        joined = _join(list(chains), join)
    except _DifferentChainsError:
        return None
    return joined if isinstance(joined, ParsedChain) else None


class _DifferentChainsError(Exception):
    """Chains that differ in more than numbers."""


def _join(values: list[Any], join: Callable[[list[float]], Any]) -> Any:
    """Return one value for several: the common value, or `join` of numbers that differ, inside of chains and containers, too.

    Raises:
        _DifferentChainsError: If they differ in more than numbers.
    """
    first = values[0]
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        return first if all(each == first for each in values) else join([float(each) for each in values])
    if any(type(each) is not type(first) for each in values):
        raise _DifferentChainsError
    if isinstance(first, ParsedChain):
        rows = [each.links for each in values]
        return ParsedChain(tuple(_join_rows(rows, join)), first.source)
    if isinstance(first, Link):
        return _join_links(values, join)
    if isinstance(first, list | tuple):
        return type(first)(_join_rows(values, join))
    if any(each != first for each in values):
        raise _DifferentChainsError
    return first


def _join_links(links: list[Link], join: Callable[[list[float]], Any]) -> Link:
    """Return `_join` of links of one name; defaults are the arguments that a link does not set."""
    if any(each.name != links[0].name for each in links):
        raise _DifferentChainsError
    args = tuple(_join_rows([each.args for each in links], join))
    names = list(dict.fromkeys(key for each in links for key, _ in each.kwargs))
    arguments = _join_rows([[_find_value(each, name) for name in names] for each in links], join)
    return replace(links[0], args=args, kwargs=tuple(zip(names, arguments, strict=True)), columns=())


def _find_value(link: Link, name: str) -> Value:
    """Return an argument of a link, or its default if the link does not set it."""
    default: Value = find(link.name).signature.parameters[name].default
    return dict(link.kwargs).get(name, default)


def _join_rows(rows: Sequence[Sequence[Any]], join: Callable[[list[float]], Any]) -> list[Any]:
    """Return `_join` of each column of rows of one length."""
    if len({len(row) for row in rows}) > 1:
        raise _DifferentChainsError
    return [_join(list(column), join) for column in zip(*rows, strict=True)]
