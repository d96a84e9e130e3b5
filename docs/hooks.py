"""Hooks of mkdocs: generate the catalogue of links and one API page per room, from the rooms' lists of public names.

The build fails, with a list, when a public name, method or property has no docstring, and when a built page would load
something from another host.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, cached_property
from html import unescape
from pathlib import Path
from types import ModuleType

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# In the order of the navigation.
ROOMS = (
    "device",
    "layout",
    "kernels",
    "labels",
    "nn",
    "axes",
    "particles",
    "population",
    "merge",
    "linalg",
    "optim",
    "m",
    "presets",
    "io",
    "evolve",
    "lab",
    "testing",
    "compat.nytorch",
)

SOURCE = Path(__file__).resolve().parent.parent / "src"


def rooms() -> list[ModuleType]:
    """Return the package and every room that exists, imported from this checkout."""
    for place in (SOURCE, Path(__file__).resolve().parent):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    front = importlib.import_module("moduli")
    names = [f"moduli.{room}" for room in ROOMS]
    return [front] + [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]


# -- docstrings -------------------------------------------------------------------------------------------------------


def undocumented(module: ModuleType, seen: set[str] | None = None) -> Iterator[str]:
    """Yield the full name of every public name, method and property of a module that has no docstring."""
    seen = set() if seen is None else seen
    if module.__name__ in seen:
        return
    seen.add(module.__name__)
    if not inspect.getdoc(module):
        yield module.__name__
    if not hasattr(module, "__all__"):
        yield f"{module.__name__}.__all__ (a room lists its public names)"
        return
    for name in module.__all__:
        path = f"{module.__name__}.{name}"
        if name.startswith("__"):
            continue
        if not hasattr(module, name):
            yield f"{path} (in __all__, but does not exist)"
            continue
        value = getattr(module, name)
        if inspect.ismodule(value):
            if value.__name__.startswith(module.__name__ + "."):
                yield from undocumented(value, seen)
        elif inspect.isclass(value):
            yield from _undocumented_class(value, path)
        elif callable(value) and not _is_alias(value):
            if not inspect.getdoc(value):
                yield path
        elif not _has_constant_docstring(module, name):
            yield f"{path} (write a string after its assignment)"


def _undocumented_class(cls: type, path: str) -> Iterator[str]:
    own = cls.__dict__.get("__doc__")
    # A dataclass without a docstring is given its signature as one.
    if not own or own.startswith(f"{cls.__name__}("):
        yield path
    if cls.__module__.startswith("torch."):  # other packages add methods to its classes
        return
    for name, value in vars(cls).items():
        member = isinstance(value, property | cached_property | classmethod | staticmethod) or inspect.isfunction(value)
        if member and not name.startswith("_") and not _has_docstring(cls, name):
            yield f"{path}.{name}"


def _has_docstring(cls: type, name: str) -> bool:
    """Whether a method or property has a docstring, its own or that of what it overrides, as help() would show it."""
    return any(vars(base)[name].__doc__ for base in cls.__mro__ if name in vars(base))


def _is_alias(value: object) -> bool:
    """Whether a callable value is a type alias such as `list[int]`, which has only its origin's docstring."""
    return hasattr(value, "__origin__") or (
        type(value).__module__ in ("typing", "types") and not inspect.isroutine(value)
    )


def _has_constant_docstring(module: ModuleType, name: str) -> bool:
    """Whether the assignment of `name`, in this module or in one it was imported from, is followed by a string."""
    pending, seen = [module], set()
    while pending:
        current = pending.pop()
        if current.__name__ in seen or not getattr(current, "__file__", None):
            continue
        seen.add(current.__name__)
        body = ast.parse(Path(str(current.__file__)).read_text(encoding="utf-8")).body
        # The package declares the origin of its names for type checkers, and imports them when they are used.
        body = [inner for node in body for inner in (node.body if isinstance(node, ast.If) else [node])]
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.ImportFrom) and any(
                (a.asname or a.name) in (name, "*") for a in statement.names
            ):
                origin = "." * statement.level + (statement.module or "")
                package = current.__name__ if hasattr(current, "__path__") else current.__name__.rpartition(".")[0]
                pending.append(importlib.import_module(origin, package))
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                text = following.value if isinstance(following, ast.Expr) else None
                return isinstance(text, ast.Constant) and isinstance(text.value, str)
    return False


# -- pages ------------------------------------------------------------------------------------------------------------


@cache
def _package() -> "griffe.Object | griffe.Alias":
    """The whole library as griffe reads it: asked for any part, it reads all, so it is asked once."""
    return griffe.load("moduli", search_paths=[SOURCE], resolve_aliases=False)


def _static(module: ModuleType) -> "griffe.Object | griffe.Alias":
    inside = module.__name__.partition(".")[2]
    return _package()[inside] if inside else _package()


def page(module: ModuleType, all_rooms: list[ModuleType]) -> str:
    """Return the API page of a room. Names of the package itself are links to the rooms that define them."""
    is_front = module is all_rooms[0]
    static = _static(module)
    parts = [f"# {module.__name__}\n\n{_module_docstring(module)}"]
    links = []
    for name in module.__all__:
        value = getattr(module, name)
        if name.startswith("__") or any(value is room for room in all_rooms):
            continue
        home = next((r for r in all_rooms[1:] if getattr(r, name, None) is value and name in r.__all__), None)
        if is_front and home is not None:
            links.append(f"- [`{name}`][{home.__name__}.{name}] {_summary(value)}")
        elif inspect.ismodule(value):
            parts.append(f"\n## {name}\n\n{_module_docstring(value)}")
            inside = _static(value)
            parts += [_entry(value, inner, inside, 3) for inner in value.__all__]
        else:
            parts.append(_entry(module, name, static, 2))
    if links:
        parts.insert(1, "\n".join(["", *links, ""]))
    return "\n".join(parts) + "\n"


def supported_functions() -> str:
    """Return the page of torch functions for which labelled tensors have a rule."""
    import torch
    from torch.overrides import resolve_name

    rules = set(importlib.import_module("moduli.labels._tensor").RULES)
    derive_rule = importlib.import_module("moduli.labels._elementwise").derive_rule
    for space in (torch, torch.nn.functional, torch.special):
        found = (getattr(space, name) for name in dir(space) if not name.startswith("_"))
        rules |= {function for function in found if inspect.isroutine(function) and derive_rule(function) is not None}
    names = {resolve_name(function) or f"torch.{getattr(function, '__name__', function)}" for function in rules}
    families: dict[str, list[str]] = {}
    for name in sorted(names):
        family, _, short = name.rpartition(".")
        families.setdefault(family, []).append(short)
    parts = [
        "# Torch functions for labelled tensors",
        "\nThese functions of torch accept labelled tensors and return labelled results. Any other raises a `TypeError` that "
        "names the function; apply it to `t.data`, and label the result with `mo.tensor`. The page is generated from the rules. "
        "See [labelled tensors](labels.md) for how operands are paired.",
    ]
    for family, members in sorted(families.items()):
        listed = ", ".join(f"`{member}`" for member in members)
        parts.append(f"\n## {family}\n\n{listed}")
    return "\n".join(parts) + "\n"


# -- the catalogue of links -------------------------------------------------------------------------------------------


def catalogue(pictures: dict[str, str], background: str = "") -> str:
    """Return the page of all links, by family, each with its arguments, requirements, paper, example and picture."""
    m = importlib.import_module("moduli.m")
    parts_of_m = {
        name: value
        for name, value in vars(m).items()
        if inspect.ismodule(value) and value.__name__ == f"moduli.m.{name}" and name[0] != "_"
    }
    families = {name: [each for each in m.__all__ if each in part.__all__] for name, part in parts_of_m.items()}
    count = sum(map(len, families.values()))
    parts = [
        "# The catalogue",
        f"\nAll {count} names of `moduli.m`, by family. A link transforms the update of the links before it; "
        "`mo.Optimizer(net, m.ClipNorm(1.0), m.Adam(), m.LR(1e-3))` is a chain of three. Each entry lists what the link "
        "needs, such as the gradient or a closure. [Optimizers](optim.md) explains chains, and [write your own "
        "link](write-a-link.md) how to add a link. Pictures show 25 steps on Rosenbrock's function.\n",
        background + "\n",
        "| family | links |\n|---|---|",
    ]
    for family, names in sorted(families.items()):
        parts.append(f"| {family.replace('_', ' ')} | {', '.join(f'[{n}](#{n.lower()})' for n in names)} |")
    for family, names in sorted(families.items()):
        package = importlib.import_module(f"moduli.m.{family}")
        parts.append(f"\n## {family.replace('_', ' ').capitalize()}\n\n{inspect.getdoc(package) or ''}\n")
        parts += [_link(name, getattr(m, name), pictures.get(name, "")) for name in names]
    return "\n".join(parts) + "\n"


_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|References):\n((?:(?:    .*)?\n?)*)", re.MULTILINE)


def _link(name: str, value: object, picture: str = "") -> str:
    """Return the entry of one link in the catalogue, with the picture of its path."""
    doc = (inspect.getdoc(value) or "") + "\n"
    sections = {title: textwrap.dedent(body).strip() for title, body in _SECTION.findall(doc)}
    text = _SECTION.split(doc)[0].strip()
    parts = [f"\n### {name} {{ #{name.lower()} }}\n\n{text}\n\n```python\nm.{name}{_signature(value)}\n```\n"]
    described = re.findall(r"^(\*{0,2}\w+): ((?:.|\n(?!\*{0,2}\w+: ))+)", sections.get("Args", ""), re.MULTILINE)
    if described:
        rows = (f"| `{key}` | {' '.join(words.split()).replace('|', chr(92) + '|')} |" for key, words in described)
        parts.append("| argument | |\n|---|---|\n" + "\n".join(rows) + "\n")
    if inspect.isclass(value) and (needs := sorted(need.value for need in getattr(value, "needs", ()))):
        parts.append(f"Needs {' and '.join(needs)}.\n")
    if "Example" in sections:
        parts.append(f"```pycon\n{sections['Example']}\n```\n")
    if "References" in sections:
        parts.append(f"{' '.join(sections['References'].split())}\n")
    parts.append(f"{picture}\n" if picture else "")
    return "\n".join(parts)


def _signature(value: object) -> str:
    """Return the names and defaults of the arguments, without types."""
    shown = []
    made = inspect.signature(value.__init__ if inspect.isclass(value) else value)  # type: ignore[misc, arg-type]
    for parameter in (parameter for key, parameter in made.parameters.items() if key != "self"):
        bare = parameter.replace(annotation=inspect.Parameter.empty)
        if bare.kind is bare.KEYWORD_ONLY and not any(word.startswith("*") for word in shown):
            shown.append("*")
        shown.append(str(bare))
    return f"({', '.join(shown)})"


def _entry(module: ModuleType, name: str, static: "griffe.Object | griffe.Alias", level: int) -> str:
    """One name: by mkdocstrings where the source shows it, otherwise from the object that was made at import."""
    if name in static.members:
        return f"\n::: {module.__name__}.{name}\n    options:\n      heading_level: {level}\n"
    value = getattr(module, name)
    try:
        signature = f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):
        signature = name
    summary, _, rest = (inspect.getdoc(value) or "").partition("\n")
    body = f"\n```text\n{rest.strip()}\n```\n" if rest.strip() else ""
    anchor = f"{{ #{module.__name__}.{name} }}"
    return f"\n{'#' * level} {name} {anchor}\n\n```python\n{signature}\n```\n\n{summary}\n{body}"


def _module_docstring(module: ModuleType) -> str:
    return f"::: {module.__name__}\n    options:\n      members: false\n      show_root_heading: false\n"


def _summary(value: object) -> str:
    """Return the first line of a docstring, or nothing for constants and type aliases, which have the docstring of their type."""
    described = inspect.isclass(value) or (callable(value) and not _is_alias(value))
    return (inspect.getdoc(value) or "").partition("\n")[0] if described else ""


class Examples(griffe.Extension):
    """Lets griffe read an "Example:" section like "Examples:"; otherwise its prompts become nested block quotes."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for each object that was read from source."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


# -- what mkdocs calls ------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the API pages to the last group of the navigation, the reference."""
    _package.cache_clear()  # while mkdocs serves, sources change
    pages = [{module.__name__: f"api/{module.__name__}.md"} for module in rooms()]
    *groups, reference = config.nav
    ((name, entries),) = reference.items()
    config.nav = [*groups, {name: [*entries, {"API": pages}]}]
    return config


def _page_of(module: ModuleType, all_rooms: list[ModuleType]) -> str:
    """Return the API page of a room; that of `moduli.m` refers to the catalogue."""
    if module.__name__ == "moduli.m":
        return f"# moduli.m\n\n{inspect.getdoc(module)}\n\nEvery link is described in [the catalogue](../links.md).\n"
    return page(module, all_rooms)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Raise an error for undocumented names, then make the API pages."""
    all_rooms = rooms()
    seen: set[str] = set()
    missing = [name for module in all_rooms for name in undocumented(module, seen)]
    if missing:
        raise PluginError("these public names have no docstring:\n  " + "\n  ".join(missing))
    for module in all_rooms:
        files.append(File.generated(config, f"api/{module.__name__}.md", content=_page_of(module, all_rooms)))
    files.append(File.generated(config, "labels-functions.md", content=supported_functions()))
    paths = importlib.import_module("paths")
    files.append(File.generated(config, "links.md", content=catalogue(paths.draw_all(), paths.draw_map())))
    return files


_MATHS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def maths(html: str, where: str) -> str:
    """Return a page with its formulas as MathML, which browsers draw without a library."""

    def drawn(found: re.Match[str]) -> str:
        formula = unescape(found[2])
        try:
            return convert(formula, display="inline" if found[1] == "span" else "block")
        except Exception as error:  # latex2mathml has no class of its own for all of them
            raise PluginError(f"{where}: the formula {formula!r} can't be drawn: {error!r}") from error

    return _MATHS.sub(drawn, html)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the formulas of a page."""
    return maths(html, page.file.src_uri)


_FOREIGN = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?(https?:)?//[^>]*>")


def on_post_build(config: MkDocsConfig) -> None:
    """Raise an error for pages that load something from another host."""
    foreign = [
        f"{built.relative_to(config.site_dir)}: {match.group(0)}"
        for built in sorted(Path(config.site_dir).rglob("*.html"))
        for match in _FOREIGN.finditer(built.read_text(encoding="utf-8"))
    ]
    if foreign:
        raise PluginError("these pages would load something from another host:\n  " + "\n  ".join(foreign))
