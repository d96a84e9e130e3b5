"""Names for the completion of shells, from the stored list: torch is not imported to complete a word.

Only where no list was stored yet, the first completion makes it.
"""

import re
from textwrap import shorten

from .._plugins import list_plugins
from ._catalogue import read_names

# Listed here as well, so that help and completion do not import torch.
RECIPES = (
    "linear", "soup", "lerp", "slerp", "task_vector", "task_arithmetic", "ties", "dare", "stock", "breadcrumbs", "della", "sce",
    "karcher", "nuslerp", "multislerp", "nearswap", "arcee_fusion", "ram",
)  # fmt: skip


def complete_link(incomplete: str) -> list[tuple[str, str]]:
    """Return the links, presets and optimizers whose names begin with a text, with their summaries."""
    return _filter({name: entry["summary"] for name, entry in read_names()["entries"].items()}, incomplete)


def complete_chain(incomplete: str) -> list[tuple[str, str]]:
    """Return the completions of the last name of a chain: `ClipNorm(1) | Ad` becomes `ClipNorm(1) | Adam`, and so on."""
    name = re.search(r"[\w.]*$", incomplete)
    last = name[0] if name else ""
    before = incomplete[: len(incomplete) - len(last)]
    # A name can only begin after one of these characters.
    if before.strip() and before.strip()[-1] not in "|(,:=[":
        return []
    return [(before + each, summary) for each, summary in complete_link(last)]


def complete_problem(incomplete: str) -> list[tuple[str, str]]:
    """Return the problems whose names begin with a text; if there are none, the shell completes files."""
    return _filter({name: entry["summary"] for name, entry in read_names()["problems"].items()}, incomplete)


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes whose names begin with a text."""
    return [name for name in list_recipes() if name.startswith(incomplete)]


def list_recipes() -> list[str]:
    """Return the names of moduli's recipes and of those of other packages, which are not imported for it."""
    return list(dict.fromkeys([*RECIPES, *list_plugins("recipes")]))


def _filter(names: dict[str, str], incomplete: str) -> list[tuple[str, str]]:
    """Return the names that begin with a text, and their summaries, cut to 60 characters."""
    # Shells take one line per name, and typer folds longer texts.
    return [(name, shorten(text, 60, placeholder="...")) for name, text in names.items() if name.startswith(incomplete)]
