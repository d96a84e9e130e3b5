"""Names of parameters: the forms a name has, patterns that select by name, and renames.

A stored name has up to three forms, and a pattern may use any of them: the registered one (`tensor:coef`), the public one of
a labelled tensor (`coef`), and either without the parts that wrappers such as `torch.compile` insert (`_orig_mod.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache
from typing import Final, NoReturn, TypeAlias

from .._texts import shorten

TENSOR_PARAM_PREFIX: Final = "tensor:"
"""Prefix of the names under which owned tensors are registered as parameters."""

TENSOR_BUFFER_PREFIX: Final = "buffer:"
"""Prefix of the names under which owned tensors declared by `nograd_tensors` are registered as buffers."""

Rename: TypeAlias = Callable[[str], str | None]
"""A function from a name to its new name; None drops the name."""

NameMap: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
"""New names by old name, of tensors, or of modules with everything below them; None drops the name."""

_MOST_SHOWN: Final = 20
# Parts that torch's wrappers insert into the names of the parameters below them, at any depth.
_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# The prefix that the wrappers for data parallelism put before every name.
_DATA_PARALLEL: Final = "module."
_RANGE: Final = "<([0-9]+)-([0-9]+)>"
_MARK: Final = "\ue000"  # the placeholder of a range while a pattern is translated; no name has it


class UnknownNameError(ValueError):
    """A pattern matches no name.

    Example:
        >>> from moduli.layout import select
        >>> select("wieght", ["weight", "bias"])
        Traceback (most recent call last):
        ...
        moduli.layout._names.UnknownNameError: no parameter is called 'wieght'; did you mean 'weight'? there are weight, bias
    """


def public_name(name: str) -> str:
    """Return the name under which a labelled tensor is assigned and read; other names are their own.

    Example:
        >>> from moduli.layout import public_name
        >>> public_name("head.tensor:coef"), public_name("head.weight")
        ('head.coef', 'head.weight')
    """
    path, dot, last = name.rpartition(".")
    return path + dot + last.removeprefix(TENSOR_PARAM_PREFIX).removeprefix(TENSOR_BUFFER_PREFIX)


def unwrapped_name(name: str) -> str:
    """Return a name without the parts that `torch.compile`, FSDP and checkpointing insert.

    Example:
        >>> from moduli.layout import unwrapped_name
        >>> unwrapped_name("_orig_mod.0.weight")
        '0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@lru_cache(maxsize=65536)
def list_forms(name: str) -> tuple[str, ...]:
    """Return every form of a name that a pattern may use, its own first.

    Example:
        >>> from moduli.layout import list_forms
        >>> list_forms("_orig_mod.tensor:coef")
        ('_orig_mod.tensor:coef', '_orig_mod.coef', 'tensor:coef', 'coef')
    """
    short = unwrapped_name(name)
    return tuple(dict.fromkeys((name, public_name(name), short, public_name(short))))


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern of names as a regular expression.

    `*`, `?` and `[...]` are those of file names; `<0-15>` is a whole number from 0 to 15.

    Example:
        >>> from moduli.layout import compile_pattern
        >>> [bool(compile_pattern("layers.<0-9>.*").match(n)) for n in ("layers.9.bias", "layers.10.bias")]
        [True, False]
    """
    text = translate(re.sub(_RANGE, _MARK, pattern))
    for low, high in re.findall(_RANGE, pattern):
        numbers = "|".join(map(str, range(int(low), int(high) + 1)))
        # No digit may precede or follow the number.
        text = text.replace(_MARK, rf"(?<![0-9])0*(?:{numbers})(?![0-9])", 1)
    return re.compile(text)


def match_name(name: str, patterns: str | Iterable[str]) -> bool:
    """Return whether a name matches one of some patterns in any of its forms.

    Example:
        >>> from moduli.layout import match_name
        >>> match_name("encoder.tensor:coef", "encoder.coef"), match_name("head.bias", ["*.weight"])
        (True, False)
    """
    expressions = [compile_pattern(each) for each in ((patterns,) if isinstance(patterns, str) else patterns)]
    return any(each.match(form) for form in list_forms(name) for each in expressions)


def select(
    patterns: str | Iterable[str],
    names: Sequence[str | Sequence[str]],
    what: str = "parameter",
    owner: str = "",
) -> list[int]:
    """Return the indices of names that match one of some patterns, each of which has to match one.

    Args:
        patterns: A pattern, or several; see `compile_pattern`. `"*"` may match nothing.
        names: The names; a sequence of names, such as those of a tied parameter, is matched by each of them.
        what: The noun that errors use for what is named.
        owner: The owner of the names in errors, such as a class.

    Returns:
        The indices, in order.

    Raises:
        UnknownNameError: If a pattern matches none; the error shows the nearest names.

    Example:
        >>> from moduli.layout import select
        >>> select(["bias", "*.1.*"], ["weight", "bias", "layers.1.weight"])
        [1, 2]
    """
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    rows = [(each,) if isinstance(each, str) else tuple(each) for each in names]
    if rows and all(name.startswith(_DATA_PARALLEL) for row in rows for name in row):
        # A child may be called `module`, but then other names begin differently, or the pattern contains it.
        rows = [(*row, *(name.removeprefix(_DATA_PARALLEL) for name in row)) for row in rows]
    for pattern in patterns:
        check_pattern(pattern, [name for row in rows for name in row], what, owner)
    return [index for index, row in enumerate(rows) if any(match_name(name, patterns) for name in row)]


def check_pattern(pattern: str, names: Sequence[str], what: str = "parameter", owner: str = "") -> None:
    """Raise UnknownNameError if a pattern other than `"*"` matches none of some names.

    Args:
        pattern: The pattern.
        names: The names.
        what: The noun that the error uses for what is named.
        owner: The owner of the names in the error.

    Example:
        >>> from moduli.layout import check_pattern
        >>> check_pattern("*.bias", ["head.bias"])
    """
    if pattern != "*" and not any(match_name(name, pattern) for name in names):
        refuse_pattern(pattern, names, what, owner)


def refuse_pattern(pattern: str, names: Iterable[str], what: str = "parameter", owner: str = "") -> NoReturn:
    """Raise UnknownNameError for a pattern that matches none of some names.

    Args:
        pattern: The pattern.
        names: The names.
        what: The noun that the error uses for what is named.
        owner: The owner of the names in the error.

    Example:
        >>> from moduli.layout import refuse_pattern
        >>> refuse_pattern("bais", ["weight", "bias"], owner="Linear")
        Traceback (most recent call last):
        ...
        moduli.layout._names.UnknownNameError: Linear has no parameter called 'bais'; did you mean 'bias'? there are weight, bias
    """
    public = list(dict.fromkeys(map(public_name, names)))
    subject = f"{owner} has no {what}" if owner else f"no {what} is"
    more = f" and {len(public) - _MOST_SHOWN} more" if len(public) > _MOST_SHOWN else ""
    listed = f"there are {', '.join(public[:_MOST_SHOWN]) or 'none'}{more}"
    raise UnknownNameError(f"{subject} called {shorten(pattern)};{suggest_name(pattern, public)} {listed}")


def suggest_name(pattern: str, names: Iterable[str]) -> str:
    """Return the part of an error that suggests the nearest name; empty if none is near.

    Example:
        >>> from moduli.layout import suggest_name
        >>> suggest_name("bais", ["weight", "bias"])
        " did you mean 'bias'?"
    """
    nearest = get_close_matches(pattern, dict.fromkeys(map(public_name, names)), 1)
    return f" did you mean {nearest[0]!r}?" if nearest else ""


def make_rename(mapping: NameMap | None, names: Sequence[str]) -> Rename:
    """Return a mapping of names as a function.

    Args:
        mapping: A dict from names of tensors, registered or public, or of modules for everything below them, or a function; None
            keeps names.
        names: The names that the function will be applied to.

    Raises:
        ValueError: If a key of the mapping matches none of the names, or two names become one.

    Example:
        >>> from moduli.layout import make_rename
        >>> make_rename({"0": "head"}, ["0.weight", "0.bias"])("0.weight")
        'head.weight'
    """
    if mapping is None:
        return lambda name: name
    table = dict(mapping) if isinstance(mapping, Mapping) else {}
    used: set[str] = set()

    def rename(name: str) -> str | None:
        if not isinstance(mapping, Mapping):
            return mapping(name)
        public = public_name(name)
        if name not in table and public in table:
            used.add(public)
            new = table[public]
            return None if new is None else _register_like(new, name)
        path = name
        while path not in table:
            if "." not in path:
                return name
            path = path.rpartition(".")[0]
        used.add(path)
        new = table[path]
        return None if new is None else (new + name[len(path) :]).removeprefix("." if new == "" else "")

    sources: dict[str, str] = {}
    for name in names:
        new = rename(name)
        if new is not None and sources.setdefault(new, name) != name:
            raise ValueError(f"mapping gives {shorten(sources[new])} and {shorten(name)} the same name {shorten(new)}")
    unused = sorted(table.keys() - used)
    if unused:
        raise ValueError(f"mapping has {list_names(unused)}, which the checkpoint does not; it has {list_names(names)}")
    return rename


def _register_like(public: str, name: str) -> str:
    """Return a public name with the prefix that another name is registered with."""
    path, dot, last = public.rpartition(".")
    own = name.rpartition(".")[2]
    prefix = own.removesuffix(public_name(own))
    return public if last.startswith(prefix) else f"{path}{dot}{prefix}{last}"


def list_names(names: Iterable[str], most: int = 6) -> str:
    """Return the first few names as text, for an error.

    Example:
        >>> from moduli.layout import list_names
        >>> list_names("abcdefgh")
        "'a', 'b', 'c', 'd', 'e', 'f' and 2 more"
    """
    every = list(names)
    more = len(every) - most
    return ", ".join(map(shorten, every[:most])) + (f" and {more} more" if more > 0 else "")
