"""Refuse two classes of one name, and words that say less than the field's own.

`make lint` runs it, and so does `tests/test_house.py`. A reader who meets `Plan` in a traceback should know which one it is, and
a sentence about "somebody" does not say what holds the reference, calls the hook or writes the file.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src" / "moduli"
# Two things of one name by contract: torch's own word for a module and for a link, and an algorithm beside its link.
SHARED = {"Module"}
ALGORITHMS = ("evolve/", "m/evolution/", "m/population/")
VAGUE = re.compile(r"\b(somebody|nobody|whoever|anybody|everybody)\b", re.IGNORECASE)


def main() -> int:
    """Print what is refused."""
    found = list(check(SOURCE))
    print(
        *found,
        f"{len(found)} names or words" if found else "Names are unique and words are the field's",
        sep="\n",
    )
    return 1 if found else 0


def check(source: pathlib.Path) -> Iterator[str]:
    """A line for everything that is refused in the package at `source`."""
    places = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source).as_posix()
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{inside}:{node.lineno}")
        for number, line in enumerate(text.splitlines(), 1):
            for word in VAGUE.findall(line):
                yield f"{inside}:{number}: {word!r} names nothing; say what it is"
    for name, where in places.items():
        algorithms = [place for place in where if place.startswith(ALGORITHMS)]
        if len(where) > 1 and name not in SHARED and len(algorithms) < len(where):
            yield f"{name}: {len(where)} classes of one name: {', '.join(where)}"


if __name__ == "__main__":
    sys.exit(main())
