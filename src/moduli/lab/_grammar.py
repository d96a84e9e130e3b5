"""The grammar of chains: text such as `ClipNorm(1) | Adam | LR(1e-2)` to a tree and back.

    chain = link { "|" link }
    link  = name [ "(" [ argument { "," argument } [ "," ] ] ")" ]
    argument = [ word "=" ] value
    value = number | string | True | False | None | "[" values "]" | "(" values ")" | chain
    name  = word { "." word } | FILE.py:word

A chain is an expression of Python: `ast` reads it, and of its tree only the kinds of nodes above are accepted. Nothing is ever
compiled or run, and no name is resolved here: `moduli.lab.catalogue` does that, by looking it up in lists, or by running the file
of a name such as `mine.py:SoftSign`. A path with spaces is written as a string that is
called: `'my links/mine.py:SoftSign'(0.5)`.
"""

import ast
import math
import re
import warnings
from dataclasses import dataclass, field
from typing import TypeAlias

# A name in a file, or a string, in which such a name has no meaning.
_REFERENCE = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?P<name>(?<![\w./\\~+:-])(?:[A-Za-z]:(?=[\\/]))?[\w./\\~+-]+\.py:[^\W\d]\w*)"""
)

Value: TypeAlias = "bool | int | float | str | list[Value] | tuple[Value, ...] | ParsedChain | None"


class ChainSyntaxError(ValueError):
    """A chain that cannot be read or built; the message shows where.

    Args:
        fact: What is wrong, in a sentence without its end.
        source: The text of the chain.
        column: Where, counted from 1.
        width: How many characters to mark.

    >>> print(ChainSyntaxError("unknown name 'Adma'", "Adma | LR(1)", 1, 4))
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
        # Of a long chain, only 100 characters around the column are printed.
        start = 0 if len(line) <= 100 else max(0, min(self.column - 51, len(line) - 100))
        window = "".join(letter if letter.isprintable() else "?" for letter in line[start : start + 100])
        at = self.column - 1 - start
        carets = "^" * max(1, min(self.width, len(window) - at))
        return f"{self.fact} (column {self.column})\n  {window}\n  {' ' * at}{carets}"


@dataclass(frozen=True)
class Link:
    """One name of a chain with its arguments, as written.

    Attributes:
        name: The name, dots included.
        args: The positional arguments.
        kwargs: The keyword arguments, in order.
        column: Where the name begins, counted from 1; no part of equality.
        columns: Where each argument begins, those by position first; no part of equality.
    """

    name: str
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()
    column: int = field(default=1, compare=False)
    columns: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        parts = [_format(value) for value in self.args]
        parts += [f"{key}={_format(value)}" for key, value in self.kwargs]
        match = _REFERENCE.fullmatch(self.name) if ":" in self.name else None
        quoted = ":" in self.name and (match is None or match["name"] is None)
        return f"{repr(self.name) if quoted else self.name}({', '.join(parts)})" if parts or quoted else self.name


@dataclass(frozen=True)
class ParsedChain:
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

    @property
    def references(self) -> list[str]:
        """The names in files (`mine.py:SoftSign`) of this chain and of the chains in its arguments.

        >>> parse("Alternate(mine.py:SoftSign, Adam) | LR(0.1)").references
        ['mine.py:SoftSign']
        """
        names = []
        waiting: list[Value] = [self]
        while waiting:
            value = waiting.pop()
            if isinstance(value, ParsedChain):
                names += [link.name for link in value.links if ":" in link.name]
                waiting += [each for link in value.links for each in (*link.args, *(each for _, each in link.kwargs))]
            elif isinstance(value, list | tuple):
                waiting += value
        return names


def parse(source: str) -> ParsedChain:
    """Read a chain.

    Args:
        source: The text.

    Raises:
        ChainSyntaxError: When the text is no chain; the message points at the column.

    >>> chain = parse("LevenbergMarquardt(GaussNewton) | LR([1, 2.5], name='a')")
    >>> chain.links[0].args[0].links[0].name, chain.links[1].kwargs
    ('GaussNewton', (('name', 'a'),))
    >>> parse(str(chain)) == chain
    True
    """
    if not source.strip():
        raise ChainSyntaxError("a chain needs at least one link", source)
    reader = _ChainReader(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python only warns of some mistakes, such as an invalid escape
            tree = ast.parse(reader.line, mode="eval").body
        return reader.read(tree)
    except SyntaxError as error:
        # Python's message, except for the one that does not say what is wrong.
        fact = error.msg
        if fact.startswith("invalid syntax"):
            fact = "this cannot be read: links are joined by '|', and arguments by ','"
        # An error without an offset is at the end of the text.
        column = min(error.offset + reader.blanks, len(source) + 1) if error.offset else len(source) + 1
        raise ChainSyntaxError(fact, source, column) from error
    except (RecursionError, MemoryError) as error:
        raise ChainSyntaxError("this nests too deeply", source) from error
    except ValueError as error:
        if isinstance(error, ChainSyntaxError):
            raise
        raise ChainSyntaxError(f"this cannot be read: {error}", source) from error


_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}


class _ChainReader:
    """A converter from Python's syntax tree to a `ParsedChain`; it raises ChainSyntaxError for what is no part of a chain."""

    def __init__(self, source: str) -> None:
        self.source, self.line = source, re.sub(r"\s", " ", source).lstrip()
        self.blanks = len(source) - len(self.line)
        # Python can't parse a path, so an identifier of the same length replaces it, which preserves the columns.
        self.references: dict[str, str] = {}
        if ".py:" in self.line:
            self.line = _REFERENCE.sub(self._replace, self.line)

    def _replace(self, match: re.Match[str]) -> str:
        """Return the identifier that replaces a reference to a file, and store the reference; return a string unmodified."""
        if match["name"] is None:
            return match[0]
        identifier = f"_{len(self.references):0{len(match[0]) - 1}}"
        self.references[identifier] = match[0]
        return identifier

    def read(self, tree: ast.expr) -> ParsedChain:
        """Return the chain of a whole text."""
        rest = self.line.encode()[tree.end_col_offset :].decode()
        if "#" in rest:  # Python ignores the rest as a comment
            column = len(self.source) - len(rest) + rest.index("#") + 1
            raise ChainSyntaxError("'#' has no meaning in a chain", self.source, column)
        return self.read_chain(tree)

    def find_column(self, node: ast.expr | ast.keyword, end: bool = False) -> int:
        """Return the column in the source where a node begins, or ends, counted from 1."""
        # Python counts the bytes of UTF-8.
        offset = (node.end_col_offset or 0) if end else node.col_offset
        return len(self.line.encode()[:offset].decode()) + 1 + self.blanks

    def make_error(self, node: ast.expr | ast.keyword, fact: str) -> ChainSyntaxError:
        """Return the error that marks a node."""
        at = self.find_column(node)
        return ChainSyntaxError(fact, self.source, at, self.find_column(node, end=True) - at)

    def read_chain(self, node: ast.expr) -> ParsedChain:
        links: list[Link] = []
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                waiting += [node.right, node.left]
            else:
                links.append(self.read_link(node))
        return ParsedChain(tuple(links), self.source)

    def read_link(self, node: ast.expr) -> Link:
        if not isinstance(node, ast.Call):
            return Link(self.read_name(node), column=self.find_column(node))
        args = tuple(self.read_value(each) for each in node.args)
        kwargs: list[tuple[str, Value]] = []
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.make_error(keyword, "'**' has no meaning in a chain")
            if any(keyword.arg == name for name, _ in kwargs):
                raise self.make_error(keyword, f"{keyword.arg!r} is given twice")
            kwargs.append((keyword.arg, self.read_value(keyword.value)))
        columns = (*map(self.find_column, node.args), *map(self.find_column, node.keywords))
        return Link(self.read_name(node.func), args, tuple(kwargs), self.find_column(node), columns)

    def read_name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ".py:" in node.value:
            return node.value
        words: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            words.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name) or (not words and inner.id in _WORDS):
            raise self.make_error(node, "here the name of a link is expected, such as Adam or LR(0.1)")
        return ".".join([self.references.get(inner.id, inner.id), *reversed(words)])

    def read_value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=None | bool() | str() | int() | float() as constant):
                return constant
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                number = self.read_value(node.operand)
                if isinstance(number, int | float) and not isinstance(number, bool):
                    return -number if isinstance(node.op, ast.USub) else number
            case ast.Name() if node.id in _WORDS:
                return _WORDS[node.id]
            case ast.List():
                return [self.read_value(each) for each in node.elts]
            case ast.Tuple():
                return tuple(self.read_value(each) for each in node.elts)
            case ast.Name() | ast.Attribute() | ast.Call() | ast.BinOp(op=ast.BitOr()):
                return self.read_chain(node)
        raise self.make_error(node, "this has no meaning in a chain: a value is a number, a string, a list or a chain")


def _format(value: Value) -> str:
    """Return the text of an argument in a chain."""
    if isinstance(value, list):
        return f"[{', '.join(map(_format, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_format, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, ParsedChain) else repr(value)
