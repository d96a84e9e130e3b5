"""The page for people who come from torchzero names everything that is there."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from moduli import m

PAGE = (Path(__file__).parents[2] / "docs" / "from-torchzero.md").read_text(encoding="utf-8")

# The classes of torchzero.m 0.4.4.
NAMES = (Path(__file__).parent / "torchzero_names.txt").read_text(encoding="utf-8").split()


def _section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def _table(text):
    """The cells of rows that are not heads."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")
    ]
    return [
        row for row in rows if not set("".join(row)) <= set("-|") and row[0] not in ("family", "torchzero", "argument")
    ]


def _quoted(text):
    return re.findall(r"`([^`]+)`", text)


def test_every_class_is_named():
    both, others = _section("All names").split("These names differ or are missing:")
    same = [name for _, cells in _table(both) for name in _quoted(cells)]
    assert len(same) == len(set(same))
    for name in same:
        assert hasattr(m, name), f"the page says that moduli has {name}"
    different = {name for row in _table(others) for name in _quoted(row[0])}
    assert sorted(set(same) | (different & set(NAMES))) == sorted(NAMES)
    for name in different & set(NAMES):
        assert not hasattr(m, name), f"{name} is here under the same name"


def test_what_is_offered_instead_exists():
    for section in ("All names", "Arguments that are left out"):
        for row in _table(_section(section)):
            for code in _quoted(row[-1]):
                name = re.match(r"(?:m\.)?([A-Z][A-Za-z0-9]+)", code)
                if name is not None:
                    assert hasattr(m, name[1]), f"the page offers {code}"


def _arguments(link):
    """Those of a class, and of the one it hands the rest to."""
    found = set()
    for cls in link.__mro__:
        made = cls.__dict__.get("__init__")
        if made is not None:
            parameters = inspect.signature(made).parameters
            found |= set(parameters)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return found


LEFT_OUT = [
    (call[1], argument)
    for row in _table(_section("Arguments that are left out"))
    for call in (re.match(r"(\w+)\((.*)\)", code) for code in _quoted(row[0]))
    if call is not None and "=" not in call[2]
    for argument in call[2].split(", ")
]


@pytest.mark.parametrize(("name", "argument"), LEFT_OUT)
def test_arguments_that_are_left_out_are(name, argument):
    assert argument not in _arguments(getattr(m, name))


def test_an_argument_that_is_left_out_is_an_error_that_says_what_there_is():
    with pytest.raises(TypeError, match="history_size"):
        m.GGT(basis_optimizer=None)


def _defaults_that_differ():
    """Each link, argument and default that the page gives for moduli."""
    for row in _table(_section("Defaults that differ")):
        arguments = []
        for code in _quoted(row[0]):
            name, _, inside = code.partition("(")
            arguments = inside.rstrip(")").split(", ") if inside else arguments
            for argument in arguments:
                yield name, argument, ast.literal_eval(_quoted(row[2])[0])


@pytest.mark.parametrize(("name", "argument", "expected"), list(_defaults_that_differ()))
def test_defaults_that_differ_are_as_the_page_says(name, argument, expected):
    for cls in getattr(m, name).__mro__:
        parameters = inspect.signature(cls.__init__).parameters
        if argument in parameters:
            assert parameters[argument].default == expected
            return
    raise AssertionError(f"{name} has no argument {argument}")
