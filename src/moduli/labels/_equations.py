"""The equations of `einsum`: terms of axis names or letters, parsed to an index for each axis of each operand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

from ._axes import Axes

Index = Hashable
"""The key of an index of a contraction: a name, a letter, or a position within "..."."""


def parse_equation(equation: str, operands: Sequence[Axes]) -> tuple[list[list[Index]], list[Index]]:
    """Return the indices of the axes of each operand, and of the result.

    Args:
        equation: The equation, as `einsum` takes it.
        operands: The axes of each tensor.

    Raises:
        ValueError: If the terms do not fit the tensors.
    """
    left, arrow, right = equation.partition("->")
    texts = left.split(",")
    if len(texts) != len(operands):
        raise ValueError(f"{equation!r} has {len(texts)} terms, but {len(operands)} tensors were given")
    terms: list[list[Index]] = []
    letters = True
    for number, (text, operand) in enumerate(zip(texts, operands, strict=True)):
        term, spelled = _term(text, operand, number, equation)
        terms.append(term)
        letters = letters and spelled
    _pair_dots(operands, terms)
    if not arrow and not letters:
        raise ValueError(f"{equation!r} has no '->': with axis names, write the axes of the result after it")
    return terms, _read_result(equation, terms, right if arrow else None, letters)


def _read_result(equation: str, terms: list[list[Index]], right: str | None, letters: bool) -> list[Index]:
    """Return the indices of the result; without an arrow, those that occur once, in alphabetical order."""
    indices = dict.fromkeys(index for term in terms for index in term)
    inner = [index for index in indices if isinstance(index, tuple)]
    # Positions are counted from the right and listed from the left; names are in the order of their occurrence.
    inner.sort(key=lambda index: index[1] if isinstance(index[1], int) else 0)
    if right is None:
        return [*inner, *_list_single(terms)]
    tokens = right.split()
    if len(tokens) == 1 and letters and tokens[0] not in indices:
        tokens = _spell(tokens[0])
    absent = [token for token in tokens if token != "..." and token not in indices]
    if absent:
        raise ValueError(f"{absent[0]!r} in the result of {equation!r} does not occur on the left")
    result: list[Index] = []
    for token in tokens:
        result += inner if token == "..." else [token]
    if len(set(result)) != len(result):
        raise ValueError(f"an axis occurs twice in the result of {equation!r}")
    return result


def _list_single(terms: list[list[Index]]) -> list[str]:
    """Return the letters that occur once in all terms, in alphabetical order."""
    counts = Counter(itertools.chain.from_iterable(terms))
    return sorted(index for index, count in counts.items() if count == 1 and isinstance(index, str))


def _term(text: str, operand: Axes, number: int, equation: str) -> tuple[list[Index], bool]:
    """Return the indices of one operand's axes, and whether they were spelled as letters."""
    tokens = _split_term(text, operand)
    dots, called = text.count("..."), f"term {number + 1} of {equation!r}"
    if dots > 1:
        raise ValueError(f"{called} has more than one '...'")
    words = [token for token in tokens if token != "..."]
    spelled = all(len(word) == 1 for word in words)
    if words and set(words) <= set(operand.names) and len(set(words)) == len(words):
        by_axis: list[Index] = [name if name in words else ("...", i) for i, name in enumerate(operand.names)]
        if not dots and any(isinstance(index, tuple) for index in by_axis):
            raise ValueError(f"{called} leaves out an axis: {operand.listing()}")
        return by_axis, spelled
    if any(operand.names) and not spelled:
        _refuse_names(words, operand, called)
    return _place_letters(tokens, operand, called), spelled


def _split_term(text: str, operand: Axes) -> list[str]:
    """Return the words of a term, or its letters if it is one word that is no name of an axis."""
    tokens = text.split()
    one = len(tokens) == 1 and tokens[0] not in operand.names
    return _spell(tokens[0]) if one and ("..." in text or len(tokens[0]) == operand.ndim) else tokens


def _refuse_names(words: list[str], operand: Axes, called: str) -> None:
    """Raise the error for names that are not distinct axes of an operand."""
    unknown = [word for word in words if word not in operand.names]
    if not unknown:
        raise ValueError(f"{called} names an axis twice; {operand.listing()}")
    operand.axis(unknown[0])  # raises UnknownLabelError


def _place_letters(tokens: list[str], operand: Axes, called: str) -> list[Index]:
    """Return the letters of a term as the indices of an operand's axes in order, with '...' for the rest of them."""
    words = [token for token in tokens if token != "..."]
    if any("..." in word for word in words):
        raise ValueError(f"{called} has '...' inside of a word; put spaces around it")
    rest = operand.ndim - len(words)
    if rest < 0 or (rest and "..." not in tokens):
        raise ValueError(f"{called} is for {len(words)} axes, but {operand.listing()}")
    result: list[Index] = [*tokens]
    if "..." in tokens:
        at = tokens.index("...")
        result[at : at + 1] = [("...", at + i) for i in range(rest)]
    return result


def _spell(word: str) -> list[str]:
    head, dots, tail = word.partition("...")
    return [*head, *([dots] if dots else []), *tail]


def _pair_dots(operands: Sequence[Axes], terms: list[list[Index]]) -> None:
    """Give the axes of '...' the same index where they meet: by name, or from the right."""
    names = [
        operands[k].names[i] for k, term in enumerate(terms) for i, index in enumerate(term) if isinstance(index, tuple)
    ]
    for operand, term in zip(operands, terms, strict=True):
        places = [i for i, index in enumerate(term) if isinstance(index, tuple)]
        for order, i in enumerate(places):
            term[i] = ("...", order - len(places) if None in names else operand.names[i])
