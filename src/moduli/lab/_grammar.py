"""The grammar of chains: text such as `ClipNorm(1) | Adam | LR(1e-2)` to a tree and back.

    chain = link { "|" link }
    link  = name [ "(" [ argument { "," argument } [ "," ] ] ")" ]
    argument = [ word "=" ] value
    value = number | string | True | False | None | "[" values "]" | "(" values ")" | chain
    name  = word { "." word }

The parser knows no names and runs nothing: what a name means is decided by `moduli.lab.catalogue`, which only ever looks
it up in lists. A number, a string and a list mean what they mean in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Chain", "ChainError", "Link", "Value", "parse"]

LONGEST = 20_000
DEEPEST = 40

Value: TypeAlias = "bool | int | float | str | list[Value] | tuple[Value, ...] | Chain | None"


class ChainError(ValueError):
    """A chain that cannot be read or built; the message shows where.

    Args:
        fact: What is wrong, in a sentence without its end.
        source: The text of the chain.
        column: Where, counted from 1.
        width: How many characters are meant.

    >>> print(ChainError("unknown name 'Adma'", "Adma | LR(1)", 1, 4))
    unknown name 'Adma' (column 1)
      Adma | LR(1)
      ^^^^
    """

    def __init__(self, fact: str, source: str = "", column: int = 1, width: int = 1) -> None:
        self.fact, self.source, self.column, self.width = fact, source, column, max(1, width)
        super().__init__(fact)

    def __str__(self) -> str:
        line = re.sub(r"\s", " ", self.source)
        if not line.strip():
            return self.fact
        # A long chain is shown around the place that is meant.
        start = 0 if len(line) <= 100 else max(0, min(self.column - 51, len(line) - 100))
        shown = "".join(letter if letter.isprintable() else "?" for letter in line[start : start + 100])
        at = self.column - 1 - start
        carets = "^" * max(1, min(self.width, len(shown) - at))
        return f"{self.fact} (column {self.column})\n  {shown}\n  {' ' * at}{carets}"


@dataclass(frozen=True)
class Link:
    """One name of a chain with its arguments, as written.

    Attributes:
        name: The name, dots included.
        args: What was given by position.
        kwargs: What was given by name, in order.
        column: Where the name begins, counted from 1; no part of equality.
        columns: Where each argument begins, those by position first; no part of equality.
        called: Whether it was written with parentheses; no part of equality, since `Adam` and `Adam()` mean the same.
    """

    name: str
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()
    column: int = field(default=1, compare=False)
    columns: tuple[int, ...] = field(default=(), compare=False)
    called: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        parts = [_print(value) for value in self.args]
        parts += [f"{key}={_print(value)}" for key, value in self.kwargs]
        return f"{self.name}({', '.join(parts)})" if parts else self.name


@dataclass(frozen=True)
class Chain:
    """Links in the order in which they act.

    Attributes:
        links: The links.
        source: The text they were read from; no part of equality.

    >>> print(parse("ClipNorm( 1 )|Adam()  | LR(1e-2,)"))
    ClipNorm(1) | Adam | LR(0.01)
    """

    links: tuple[Link, ...]
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        return " | ".join(map(str, self.links))


def parse(source: str) -> Chain:
    """Read a chain.

    Args:
        source: The text.

    Raises:
        ChainError: When the text is no chain; the message points at the column.

    >>> chain = parse("LevenbergMarquardt(GaussNewton) | LR([1, 2.5], name='a')")
    >>> chain.links[0].args[0].links[0].name, chain.links[1].kwargs
    ('GaussNewton', (('name', 'a'),))
    >>> parse(str(chain)) == chain
    True
    """
    if len(source) > LONGEST:
        raise ChainError(f"a chain has at most {LONGEST} characters, this one has {len(source)}")
    return _Parser(source).whole()


# -- words ------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<number>[+-]?(?:(?:[0-9]+(?:_[0-9]+)*)?\.[0-9]+|[0-9]+(?:_[0-9]+)*\.?)(?:[eE][+-]?[0-9]+)?)(?![A-Za-z0-9_.])
      | (?P<signed>[+-](?:inf|nan))(?![A-Za-z0-9_.])
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)
      | (?P<string>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
      | (?P<sign>[|(),=\[\]])
    """,
    re.VERBOSE,
)
_WORDS: dict[str, Value] = {"True": True, "False": False, "None": None, "true": True, "false": False, "none": None}
_FLOATS = {"inf": math.inf, "nan": math.nan, "+inf": math.inf, "-inf": -math.inf, "+nan": math.nan, "-nan": math.nan}
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r", "0": "\0"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    column: int


def _tokens(source: str) -> Iterator[_Token]:
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            bad = source[at]
            if bad in "'\"":
                raise ChainError("this string has no end", source, at + 1)
            word = re.match(r"[^\s|(),=\[\]]+", source[at:])
            text = word[0] if word else bad
            fact = f"{text!r} is no number" if bad in "+-.0123456789" else f"{bad!r} has no meaning in a chain"
            raise ChainError(fact, source, at + 1, len(text) if bad in "+-.0123456789" else 1)
        kind = match.lastgroup or "sign"
        if kind != "space":
            yield _Token(kind, match[0], at + 1)
        at = match.end()
    yield _Token("end", "", len(source) + 1)


# -- sentences --------------------------------------------------------------------------------------------------------


class _Parser:
    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = list(_tokens(source))
        self.at = 0
        self.depth = 0

    def whole(self) -> Chain:
        if self.now.kind == "end":
            raise ChainError("a chain needs at least one link", self.source)
        chain = self.chain()
        if self.now.kind != "end":
            raise self.unexpected("'|' or the end")
        return chain

    @property
    def now(self) -> _Token:
        return self.tokens[self.at]

    def take(self, text: str) -> bool:
        if self.now.kind == "sign" and self.now.text == text:
            self.at += 1
            return True
        return False

    def unexpected(self, wanted: str) -> ChainError:
        token = self.now
        found = f"there is {token.text!r}" if token.kind != "end" else "the chain ends"
        return ChainError(f"expected {wanted} here, but {found}", self.source, token.column, len(token.text))

    def chain(self) -> Chain:
        links = [self.link()]
        while self.take("|"):
            links.append(self.link())
        return Chain(tuple(links), self.source)

    def link(self) -> Link:
        token = self.now
        if token.kind != "name" or token.text in _WORDS or token.text in _FLOATS:
            raise self.unexpected("the name of a link")
        self.at += 1
        args: list[Value] = []
        kwargs: list[tuple[str, Value]] = []
        columns: list[int] = []
        called = self.take("(")
        while called and not self.take(")"):
            columns.append(self.now.column)
            key = self.keyword()
            if key is not None:
                if any(key == other for other, _ in kwargs):
                    raise ChainError(f"{key!r} is given twice", self.source, columns[-1], len(key))
                kwargs.append((key, self.value()))
            elif kwargs:
                raise ChainError("an argument by position comes before those by name", self.source, columns[-1])
            else:
                args.append(self.value())
            if not self.take(","):
                if not self.take(")"):
                    raise self.unexpected("',' or ')'")
                break
        return Link(token.text, tuple(args), tuple(kwargs), token.column, tuple(columns), called)

    def keyword(self) -> str | None:
        follows = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else self.now
        if self.now.kind != "name" or (follows.kind, follows.text) != ("sign", "="):
            return None
        name = self.now.text
        if "." in name or name in _WORDS:
            raise ChainError(f"{name!r} cannot be the name of an argument", self.source, self.now.column, len(name))
        self.at += 2
        return name

    def value(self) -> Value:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ChainError(f"a chain nests at most {DEEPEST} deep", self.source, self.now.column)
        try:
            return self.deeper()
        finally:
            self.depth -= 1

    def deeper(self) -> Value:
        token = self.now
        if token.kind == "number":
            self.at += 1
            return _number(token, self.source)
        if token.kind == "string":
            self.at += 1
            return _string(token, self.source)
        if token.kind == "signed" or token.text in _FLOATS:
            self.at += 1
            return _FLOATS[token.text]
        if token.kind == "name" and token.text in _WORDS:
            self.at += 1
            return _WORDS[token.text]
        if token.kind == "name":
            return self.chain()
        if self.take("["):
            return self.values("]")[0]
        if self.take("("):
            values, comma = self.values(")")
            # As in Python, parentheses around one value only group.
            return values[0] if len(values) == 1 and not comma else tuple(values)
        raise self.unexpected("a value")

    def values(self, end: str) -> tuple[list[Value], bool]:
        found: list[Value] = []
        comma = False
        while not self.take(end):
            found.append(self.value())
            comma = self.take(",")
            if not comma:
                if not self.take(end):
                    raise self.unexpected(f"',' or {end!r}")
                break
        return found, comma


def _number(token: _Token, source: str) -> int | float:
    text = token.text.replace("_", "")
    if re.fullmatch(r"[+-]?[0-9]+", text):
        if len(text) > 300:
            raise ChainError("this number has too many digits", source, token.column, len(token.text))
        return int(text)
    return float(text)


def _string(token: _Token, source: str) -> str:
    out: list[str] = []
    letters = iter(enumerate(token.text[1:-1], token.column + 1))
    for column, letter in letters:
        if letter == "\\":
            _, letter = next(letters)
            if letter not in _ESCAPES:
                raise ChainError(f"'\\{letter}' has no meaning in a string", source, column, 2)
            letter = _ESCAPES[letter]
        out.append(letter)
    return "".join(out)


def _print(value: Value) -> str:
    if isinstance(value, str):
        escaped = value
        for code, letter in (("\\", "\\"), ("'", "'"), ("n", "\n"), ("t", "\t"), ("r", "\r"), ("0", "\0")):
            escaped = escaped.replace(letter, "\\" + code)
        return f"'{escaped}'"
    if isinstance(value, list):
        return f"[{', '.join(map(_print, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_print, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, Chain) else repr(value)
