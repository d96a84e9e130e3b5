"""Refuse two classes of one name, private functions named by participles or adverbs, and words that name nothing.

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
# Names that two classes may have: `Module` as in torch and as a link, and an algorithm beside its link.
SHARED = {"Module"}
ALGORITHMS = ("evolve/", "m/evolution", "m/population/")
# First words of function names that are no verbs.
PARTICIPLES = re.compile(
    r"_(?:\w*[^e]ed|made|taken|drawn|found|held|known|kept|met|seen|shown|told|written|built|chosen|grown|frozen)(?:_\w+)?"
)
ADVERBS = re.compile(
    r"_?(?:[a-z]+ly|beyond|beside|elsewhere|together|again|alone|aside|always|twice|later|live|hot|quick)"
)
VERBS = re.compile(r"_?(?:apply|multiply|supply|rely|comply|only)")
VAGUE = re.compile(r"\b(somebody|someone|nobody|whoever|anybody|anyone|everybody|everyone)\b", re.IGNORECASE)


def main() -> int:
    """Print all violations; return 1 if there are any."""
    lines = list(check(SOURCE))
    print(
        *lines,
        f"{len(lines)} names or words" if lines else "Names are unique and words are the field's",
        sep="\n",
    )
    return 1 if lines else 0


def check(source: pathlib.Path) -> Iterator[str]:
    """Yield a line for every violation in the package at `source`."""
    places = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source).as_posix()
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{inside}:{node.lineno}")
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and not is_verb(function):
                yield f"{inside}:{function.lineno}: {function.name!r} is no verb; say what the function does"
        for number, line in enumerate(text.splitlines(), 1):
            for word in VAGUE.findall(line):
                yield f"{inside}:{number}: {word!r} names nothing; say what it is"
    for name, where in places.items():
        algorithms = [place for place in where if place.startswith(ALGORITHMS)]
        if len(where) > 1 and name not in SHARED and len(algorithms) < len(where):
            yield f"{name}: {len(where)} classes of one name: {', '.join(where)}"


def is_verb(function: ast.FunctionDef) -> bool:
    """Whether the name of a function begins with a verb; special methods and properties always pass."""
    if function.name.startswith("__") or any("property" in ast.unparse(each) for each in function.decorator_list):
        return True
    first = re.match(r"_?[^_]*", function.name)
    word = first.group() if first else function.name
    if VERBS.fullmatch(word) or word in {"_need", "_seed", "_feed", "_embed"}:
        return True
    return not PARTICIPLES.fullmatch(word) and not ADVERBS.fullmatch(function.name)


if __name__ == "__main__":
    sys.exit(main())
