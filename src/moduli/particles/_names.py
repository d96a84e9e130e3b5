"""Choosing parameters and buffers by name: a registered name, the public name of a labelled tensor, or a pattern."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NoReturn

from moduli.nn import TENSOR_BUFFER_PREFIX, TENSOR_PARAM_PREFIX

__all__ = ["fits", "public_name", "refuse", "is_selected"]


def public_name(name: str) -> str:
    """The name under which a labelled tensor is assigned and read; other names are their own."""
    path, dot, last = name.rpartition(".")
    return path + dot + last.removeprefix(TENSOR_PARAM_PREFIX).removeprefix(TENSOR_BUFFER_PREFIX)


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name, or its public form, matches one of the patterns."""
    public = public_name(name)
    return any(fnmatchcase(name, pattern) or fnmatchcase(public, pattern) for pattern in patterns)


def is_selected(path: str, name: str | None) -> bool:
    """Whether a dotted name is that of an attribute, is below it, or matches it as a pattern."""
    return name is None or path.startswith(f"{name}.") or fits(path, [name])


def refuse(kind: str, what: str, pattern: str, names: Iterable[str]) -> NoReturn:
    """Say that nothing has a name.

    Raises:
        ValueError: Always.
    """
    listed = ", ".join(map(public_name, names)) or "none"
    raise ValueError(f"{kind} has no {what} called {pattern!r}; it has {listed}")
