"""The part of YAML that recipes are written in: mappings and lists by indentation, lists in brackets, and plain values.

Everything else (anchors, tags, folded text, mappings in braces, several documents) is refused with its line: a recipe that is
read wrongly would merge wrongly.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ._errors import CheckpointError

__all__ = ["parse_yaml"]

_LONGEST: Final = 1_000_000
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORDS: Final[dict[str, Any]] = {"true": True, "false": False, "null": None, "~": None, "": None}


def parse_yaml(text: str, what: str = "the recipe") -> Any:
    r"""Read a document.

    Raises:
        CheckpointError: If it is not of this part of YAML; the message names the line.

    Example:
        >>> parse_yaml("models:\n  - model: a  # the first\n    weight: [0.5, 1]\ndtype: bfloat16")
        {'models': [{'model': 'a', 'weight': [0.5, 1]}], 'dtype': 'bfloat16'}
    """
    if len(text) > _LONGEST:
        raise CheckpointError(f"{what} has {len(text)} letters; a recipe has at most {_LONGEST}")
    lines: list[tuple[int, int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = _without_comment(line)
        if not bare.strip() or (bare.strip() == "---" and not lines):
            continue
        indent = len(bare) - len(bare.lstrip(" "))
        if bare.lstrip(" ").startswith("\t"):
            raise CheckpointError(f"line {number} of {what} is indented by a tab; use blanks")
        lines.append((number, indent, bare.strip()))
    reader = _Lines(lines, what)
    found = reader.block(0) if lines else None
    if reader.at < len(lines):
        raise reader.error("is indented less than what it belongs to")
    return found


def _without_comment(line: str) -> str:
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1] in " \t"):
            return line[:at]
    return line


class _Lines:
    def __init__(self, lines: list[tuple[int, int, str]], what: str) -> None:
        self.lines, self.what, self.at = lines, what, 0

    def error(self, why: str) -> CheckpointError:
        number = self.lines[min(self.at, len(self.lines) - 1)][0]
        return CheckpointError(f"line {number} of {self.what} {why}")

    def block(self, depth: int) -> Any:
        if depth > 20:
            raise self.error("is nested too deeply")
        indent = self.lines[self.at][1]
        return self.items(indent, depth) if self._starts_item() else self.mapping(indent, depth)

    def _starts_item(self) -> bool:
        text = self.lines[self.at][2]
        return text == "-" or text.startswith("- ")

    def items(self, indent: int, depth: int) -> list[Any]:
        found: list[Any] = []
        while self.at < len(self.lines) and self.lines[self.at][1] == indent and self._starts_item():
            number, _, text = self.lines[self.at]
            rest = text[1:].lstrip()
            if not rest:
                self.at += 1
                found.append(self._deeper(indent, depth))
            elif _key(rest) is not None:
                # The first key of a mapping stands on the line of its item.
                self.lines[self.at] = number, indent + len(text) - len(rest), rest
                found.append(self.mapping(self.lines[self.at][1], depth + 1))
            else:
                found.append(self.value(rest))
                self.at += 1
        return found

    def mapping(self, indent: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.at < len(self.lines) and self.lines[self.at][1] == indent and not self._starts_item():
            text = self.lines[self.at][2]
            pair = _key(text)
            if pair is None:
                raise self.error(f"is no mapping from a name to a value: {text[:60]!r}")
            key, rest = pair
            if key in found:
                raise self.error(f"has {key!r} a second time")
            if rest:
                found[key] = self.value(rest)
                self.at += 1
            else:
                self.at += 1
                found[key] = self._deeper(indent, depth)
        if self.at < len(self.lines) and self.lines[self.at][1] > indent:
            raise self.error("is indented more than what stands before it")
        return found

    def _deeper(self, indent: int, depth: int) -> Any:
        if self.at >= len(self.lines) or self.lines[self.at][1] < indent:
            return None
        if self.lines[self.at][1] == indent and not self._starts_item():
            return None
        return self.block(depth + 1)

    def value(self, text: str) -> Any:
        if text.startswith("[") and text.endswith("]"):
            inside = text[1:-1].strip()
            if "[" in inside or "]" in inside:
                raise self.error("has a list in a list, which is not read here; write it in several lines")
            return [self.value(part.strip()) for part in inside.split(",")] if inside else []
        if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
            if "\\" in text or text[0] in text[1:-1]:
                raise self.error("has a quoted text with escapes, which is not read here")
            return text[1:-1]
        if text[0] in "[]{}&*!|>%@`'\"":
            raise self.error(f"uses {text[0]!r}, which is a part of YAML that is not read here; write it plainly")
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _NUMBER.fullmatch(text):
            return int(text) if re.fullmatch(r"[+-]?[0-9]{1,300}", text) else float(text)
        return text


def _key(text: str) -> tuple[str, str] | None:
    match = re.match(r"""("[^"]*"|'[^']*'|[^\s:'"\[\]{}&*!|>%@`#-][^:'"\[\]{}]*?)\s*:(?:\s+(.*))?$""", text)
    if match is None:
        return None
    return match[1].strip("'\""), (match[2] or "").strip()
