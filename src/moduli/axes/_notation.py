"""User-defined names of axes, in the notation of einops: "(qkv=3 head=4 size) model"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ..layout import check_pattern, match_name, public_name
from ._atoms import Atoms, Dim
from ._tracer import Traced

Word = tuple[str, int | None]
_TOKEN = re.compile(r"\(|\)|[^\s()]+")


def parse(text: str) -> list[list[Word]]:
    """Return the factors of each axis, with their sizes or None.

    Raises:
        ValueError: If the parentheses do not match, or a word is not a name.

    Example:
        >>> from moduli.axes._notation import parse
        >>> parse("(head=4 size) model")
        [[('head', 4), ('size', None)], [('model', None)]]
    """
    axes: list[list[Word]] = []
    group: list[Word] | None = None
    for token in _TOKEN.findall(text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            axes.append(group)
            group = None
        elif token in "()":
            raise ValueError(f"axes: the parentheses of {text!r} do not match, or are nested")
        elif group is None:
            axes.append([] if token == "1" else [_parse_word(token, text)])
        else:
            group.append(_parse_word(token, text))
    if group is not None:
        raise ValueError(f"axes: the parentheses of {text!r} do not match, or are nested")
    return axes


def _parse_word(token: str, text: str) -> Word:
    name, equals, size = token.partition("=")
    if not name or (equals and not size.isdecimal()):
        raise ValueError(f"axes: {token!r} in {text!r} is no name; write name or name=size")
    return name, int(size) if equals else None


def fit(words: Sequence[Word], size: int, where: str) -> list[int]:
    """Return the sizes of factors whose product has a size; at most one of them may be unknown.

    Args:
        words: The factors.
        size: The size of their product.
        where: The parameter and axis, for errors.

    Raises:
        ValueError: If they do not fit, with the parameter and both sizes.
    """
    product = math.prod(each for _, each in words if each is not None)
    open_words = [name for name, each in words if each is None]
    text = " ".join(name if each is None else f"{name}={each}" for name, each in words)
    if len(open_words) > 1:
        raise ValueError(f"{where}: ({text}) leaves the sizes of {open_words} open; give all but one")
    if product == 0 or size % product or (not open_words and product != size):
        raise ValueError(f"{where} has size {size}, which ({text}) of size {product} does not fit")
    return [size // product if each is None else each for _, each in words]


def apply_names(
    atoms: Atoms,
    parameters: Mapping[str, Traced],
    ties: Mapping[str, str],
    names: Mapping[str, str],
    labels: Sequence[tuple[Dim, str]] = (),
) -> dict[int, str]:
    """Split and unify axes according to user-defined names.

    Args:
        atoms: The atoms of the trace, which are changed.
        parameters: The axes of parameters and buffers by name.
        ties: Other names of tied parameters.
        names: Names of axes by pattern.
        labels: Axes that have a name already, by their labels; user-defined names replace it.

    Returns:
        The name of each leaf that has one.
    """
    labels = list(labels)
    for pattern, text in names.items():
        axes = parse(text)
        check_pattern(pattern, [public_name(each) for each in (*parameters, *ties)], owner="axes.trace: the model")
        for name, traced in parameters.items():
            aliases = [public_name(each) for each in (name, *(tie for tie, first in ties.items() if first == name))]
            if not any(match_name(alias, [pattern]) for alias in aliases):
                continue
            if len(axes) != len(traced.shape):
                raise ValueError(
                    f"axes.trace: {name!r} has {len(traced.shape)} axes {traced.shape}, and {text!r} names {len(axes)}"
                )
            labels += _apply_to_parameter(atoms, name, traced, axes)
    result = {}
    for dim, word in labels:
        leaves = atoms.list_leaves(dim)
        for position, leaf in enumerate(dict.fromkeys(leaves)):
            result[leaf] = word if len(set(leaves)) == 1 else f"{word}.{position}"
    return result


def _apply_to_parameter(
    atoms: Atoms, name: str, traced: Traced, axes: Sequence[Sequence[Word]]
) -> list[tuple[Dim, str]]:
    labels: dict[str, Dim] = {}
    for axis, words in enumerate(axes):
        size = traced.shape[axis]
        sizes = fit(words, size, f"axes.trace: axis {axis} of {name!r}")
        for (word, _), dim in zip(words, atoms.regroup([traced.dims[axis]], sizes), strict=True):
            if not dim:
                continue
            other = labels.setdefault(word, dim)
            if atoms.size(other) != atoms.size(dim):
                raise ValueError(
                    f"axes.trace: {name!r} has two axes {word!r}, of size {atoms.size(other)} and {atoms.size(dim)}"
                )
            atoms.unify(other, dim)
    return [(dim, word) for word, dim in labels.items()]
