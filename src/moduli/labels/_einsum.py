"""einsum and dot: contraction by axis name or by letter."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ._axes import Axes, DimsLike, as_key, cache_by_axes, intern_pairs, split_names
from ._gather import Gather, gather
from ._join import policy
from ._pairing import Check, check_sizes, pair_spaces
from ._space import Space
from ._tensor import RULES, Tensor, as_tensor, finish, method

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

# What identifies an index of the contraction: a name, a letter, or a place within "...".
_Index = Hashable


# The equation for torch, what is rearranged in each operand, the sizes that must agree, and the axes of the result.
_Contraction = tuple[str, tuple[tuple[tuple[int, Gather], ...], ...], tuple[Check, ...], Axes]


def einsum(equation: str, *tensors: Tensor) -> Tensor:
    """Multiply, and sum over what does not appear in the result.

    A term lists the axes of one tensor. With spaces between them they are names, looked up in the tensor by name in any
    order: ``einsum("b in, out in -> b out", x, w)``. Written together they are single letters for the axes in order:
    ``einsum("bi,oi->bo", x, w)``. Labels of a shared index are aligned; a letter that occurs twice in one term is the
    diagonal by label; ``...`` stands for all other axes, paired as in arithmetic.

    Args:
        equation: The terms, separated by commas, and after ``->`` the axes of the result. For letters the result may be
            left out: it then has the letters that occur once, in alphabetical order.
        tensors: One tensor per term.

    Raises:
        ValueError: If the terms do not fit the tensors, or labels or sizes of a shared index differ.

    Example:
        >>> import moduli as mo
        >>> w = mo.tensor([[1.0, 2.0], [3.0, 4.0]], out=["p", "q"], **{"in": ["a", "b"]})
        >>> x = mo.tensor([10.0, 1.0], **{"in": ["b", "a"]})
        >>> mo.einsum("out in, in -> out", w, x)
        Tensor(out: p=21., q=43.)
        >>> mo.einsum("oi,i->o", w, x)
        Tensor(out: p=21., q=43.)
    """
    if not isinstance(equation, str):
        raise TypeError(
            f"the first argument of einsum is an equation such as 'b in, out in -> b out', not {equation!r}"
        )
    operands = [as_tensor(t) for t in tensors]
    if not operands:
        raise ValueError("einsum needs at least one tensor")
    plan = _parse_equation(operands[0]._axes, tuple(t._axes for t in operands[1:]), equation, policy.how)
    return _contract(plan, [t._data for t in operands])


@method
def dot(a: Tensor, b: Tensor, over: DimsLike = None) -> Tensor:
    """The product of two tensors summed over named axes.

    Axes that both have and that are not summed over are paired; the result has the left's axes, then the right's others.

    Args:
        a: The left tensor.
        b: The right tensor.
        over: The axes to sum over, by name. Without it, the axes that both have; two unnamed vectors are summed over
            their only axis.

    Raises:
        ValueError: If an axis to sum over is missing, or labels or sizes differ.

    Example:
        >>> import moduli as mo
        >>> basis = mo.tensor([[1.0, 0.0], [1.0, 1.0]], mode=["s", "p"], x=[0, 1])
        >>> mo.dot(mo.tensor([2.0, 3.0], mode=["s", "p"]), basis, over="mode")
        Tensor(x: 0=5., 1=3.)
    """
    a, b = as_tensor(a), as_tensor(b)
    key = as_key(over)
    plan = _plan_dot(a._axes, b._axes, key, policy.how)
    return _contract(plan, [a._data, b._data])


def _contract(plan: _Contraction, data: list[torch.Tensor]) -> Tensor:
    equation, gathers, checks, axes = plan
    check_sizes(checks, data)
    fill = policy.fill if policy.how != "exact" else 0.0
    for number, moves in enumerate(gathers):
        for axis, move in moves:
            data[number] = gather(data[number], axis, move, fill)
    if any(each.dtype != data[0].dtype for each in data):
        dtype = data[0].dtype
        for each in data[1:]:
            dtype = torch.promote_types(dtype, each.dtype)
        data = [each.to(dtype) for each in data]
    return finish(torch.einsum(equation, *data), axes)


@cache_by_axes
def _plan_dot(axes: Axes, other: Axes, over: DimsLike, how: str) -> _Contraction:
    if over is None and not any(axes.names) and not any(other.names):
        if axes.ndim != 1 or other.ndim != 1:
            raise ValueError(f"dot needs the names of the axes to sum over; {axes.listing()} and {other.listing()}")
        return _plan_contraction((axes, other), [["sum"], ["sum"]], [], how)
    shared = [name for name in axes.names if name is not None and name in other.names]
    if isinstance(over, int):
        raise TypeError(f"dot sums over axes by name, not by {over!r}")
    names = shared if over is None else list(split_names(over) if isinstance(over, str) else over)
    for name in names:
        for each in (axes, other):
            if not isinstance(name, str):
                raise TypeError(f"dot sums over axes by name, not by {name!r}")
            each.axis(name)
    terms: list[list[_Index]] = [
        [n if n is not None else (k, i) for i, n in enumerate(each.names)] for k, each in enumerate((axes, other))
    ]
    result = [index for index in dict.fromkeys([*terms[0], *terms[1]]) if index not in names]
    return _plan_contraction((axes, other), terms, result, how)


@cache_by_axes
def _parse_equation(axes: Axes, others: tuple[Axes, ...], equation: str, how: str) -> _Contraction:
    operands = (axes, *others)
    left, arrow, right = equation.partition("->")
    texts = left.split(",")
    if len(texts) != len(operands):
        raise ValueError(f"{equation!r} has {len(texts)} terms, but {len(operands)} tensors were given")
    terms: list[list[_Index]] = []
    letters = True
    for number, (text, operand) in enumerate(zip(texts, operands, strict=True)):
        term, spelled = _term(text, operand, number, equation)
        terms.append(term)
        letters = letters and spelled
    _pair_dots(operands, terms)
    known = dict.fromkeys(index for term in terms for index in term)
    inner = [index for index in known if isinstance(index, tuple)]
    # Places are counted from the right and listed from the left; names are in the order of their occurrence.
    inner.sort(key=lambda index: index[1] if isinstance(index[1], int) else 0)
    if not arrow:
        if not letters:
            raise ValueError(f"{equation!r} has no '->': with axis names, write the axes of the result after it")
        once = [index for index in known if sum(term.count(index) for term in terms) == 1 and isinstance(index, str)]
        return _plan_contraction(operands, terms, [*inner, *sorted(once)], how)
    tokens = right.split()
    if len(tokens) == 1 and letters and tokens[0] not in known:
        tokens = _spell(tokens[0])
    result: list[_Index] = []
    for token in tokens:
        if token == "...":
            result.extend(inner)
        elif token not in known:
            raise ValueError(f"{token!r} in the result of {equation!r} does not occur on the left")
        else:
            result.append(token)
    if len(set(result)) != len(result):
        raise ValueError(f"an axis occurs twice in the result of {equation!r}")
    return _plan_contraction(operands, terms, result, how)


def _term(text: str, operand: Axes, number: int, equation: str) -> tuple[list[_Index], bool]:
    """The indices of one operand's axes, and whether they were spelled as letters."""
    tokens = text.split()
    if len(tokens) == 1 and tokens[0] not in operand.names and ("..." in text or len(tokens[0]) == operand.ndim):
        tokens = _spell(tokens[0])
    dots = text.count("...")
    if dots > 1:
        raise ValueError(f"term {number + 1} of {equation!r} has more than one '...'")
    named = [token for token in tokens if token != "..." and token in operand.names]
    plain_tokens = [token for token in tokens if token != "..."]
    if named and len(named) == len(plain_tokens) and len(set(named)) == len(named):
        by_axis: list[_Index] = [name if name in named else ("...", i) for i, name in enumerate(operand.names)]
        if not dots and any(isinstance(index, tuple) for index in by_axis):
            raise ValueError(f"term {number + 1} of {equation!r} leaves out an axis: {operand.listing()}")
        return by_axis, all(len(token) == 1 for token in plain_tokens)
    if any(operand.names) and any(len(token) > 1 for token in plain_tokens):
        unknown = next(token for token in plain_tokens if token not in operand.names)
        operand.axis(unknown)
    rest = operand.ndim - len(plain_tokens)
    if rest < 0 or (rest and not dots):
        raise ValueError(f"term {number + 1} of {equation!r} is for {len(plain_tokens)} axes, but {operand.listing()}")
    at = tokens.index("...") if dots else 0
    result: list[_Index] = [*tokens]
    if dots:
        result[at : at + 1] = [("...", at + i) for i in range(rest)]
    return result, all(len(token) == 1 for token in plain_tokens)


def _spell(word: str) -> list[str]:
    head, dots, tail = word.partition("...")
    return [*head, *([dots] if dots else []), *tail]


def _pair_dots(operands: Sequence[Axes], terms: list[list[_Index]]) -> None:
    """Give the axes that '...' stands for the same index where they meet: by name, or from the right."""
    names = [
        operands[k].names[i] for k, term in enumerate(terms) for i, index in enumerate(term) if isinstance(index, tuple)
    ]
    for operand, term in zip(operands, terms, strict=True):
        places = [i for i, index in enumerate(term) if isinstance(index, tuple)]
        for order, i in enumerate(places):
            term[i] = ("...", order - len(places) if None in names else operand.names[i])


def _plan_contraction(
    operands: Sequence[Axes], terms: Sequence[Sequence[_Index]], result: list[_Index], how: str
) -> _Contraction:
    known = list(dict.fromkeys(index for term in terms for index in term))
    if len(known) > len(_LETTERS):
        raise ValueError(f"einsum can tell {len(_LETTERS)} axes apart, got {len(known)}")
    letter = dict(zip(known, _LETTERS, strict=False))
    gathers: list[list[tuple[int, Gather]]] = [[] for _ in operands]
    checks: list[Check] = []
    pairs: dict[_Index, tuple[str | None, Space | None]] = {}
    for index in known:
        parts = [(k, i) for k, term in enumerate(terms) for i, each in enumerate(term) if each == index]
        spaces = [operands[k].spaces[i] for k, i in parts]
        own = [operands[k].names[i] for k, i in parts if operands[k].names[i] is not None]
        if isinstance(index, tuple) and len(set(own)) > 1:
            raise ValueError(
                f"axes that meet by position within '...' have different names: {own}; rename one of them, "
                "or name all axes so that they pair by name"
            )
        # A letter may meet axes of different names: it says on purpose that they are the same index.
        name = index if isinstance(index, str) and index in own else (own[0] if own else None)
        space, plans = pair_spaces(spaces, how, name, parts[0][1])
        for (k, i), plan in zip(parts, plans, strict=True):
            if plan is not None:
                gathers[k].append((i, plan))
        firm = [part for part, s in zip(parts, spaces, strict=True) if s is None or not s.broadcast]
        if len(firm) > 1 and any(operands[k].spaces[i] is None for k, i in firm):
            checks.append((name, tuple(firm)))
        repeated = [k for k, _ in parts]
        if len(set(repeated)) != len(repeated) and len(firm) != len(parts):
            raise ValueError(
                f"index {index!r} occurs twice in one term, and one of its axes is BROADCAST; squeeze it first"
            )
        pairs[index] = (name, space)
    left = ",".join("".join(letter[index] for index in term) for term in terms)
    right = "".join(letter[index] for index in result)
    axes = intern_pairs(pairs[index] for index in result)
    return f"{left}->{right}", tuple(tuple(moves) for moves in gathers), tuple(checks), axes


def _einsum_rule(equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return einsum(equation, *operands)


RULES[torch.einsum] = _einsum_rule
