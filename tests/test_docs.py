"""Every Python block of README and docs runs, and every example in a docstring.

The blocks of one page run in order in one namespace, in an empty directory. A ```text block that directly follows a
Python block is what that block must print; `...` in it matches anything.
"""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import sys
import textwrap
import traceback
import types
from pathlib import Path

import pytest
import torch

import moduli
import moduli.device
from launching import load_program

ROOT = Path(__file__).resolve().parent.parent
# Pages of the gallery are written from executed notebooks: tests/test_gallery.py.
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "gallery"]
PAGES.insert(0, ROOT / "README.md")
MODULES = ["moduli", *sorted(info.name for info in pkgutil.walk_packages(moduli.__path__, "moduli."))]

# Modules that need these extras are skipped if the extra is missing.
EXTRAS = {"plotly", "ray", "sklearn", "xarray"}
# Packages on pages that the tests' environment lacks: their blocks run only if they are installed.
SERVICES = {"mlflow", "wandb"}

FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S
)


def blocks(text):
    """Yield the fenced blocks of a page: (language, number of the first line, code, whether it directly follows the last)."""
    end = 0
    for match in FENCE.finditer(text):
        language = (match["info"].split() or [""])[0]
        line = text.count("\n", 0, match.start("body")) + 1
        yield language, line, textwrap.dedent(match["body"]), not text[end : match.start()].strip()
        end = match.end()


def run_page(path):
    """Run the Python blocks of a page and return their number; a failure names the file and the line."""
    name = f"page_{re.sub(r'[^a-z0-9]', '_', path.stem.lower())}"
    # A module in `sys.modules`, so that classes defined on a page can be pickled.
    page = sys.modules[name] = types.ModuleType(name)
    printed, count = None, 0
    try:
        for language, line, code, adjacent in blocks(path.read_text(encoding="utf-8")):
            if language == "python":
                printed = run_block(path, line, code, page)
                count += 1
            elif language == "text" and adjacent and printed is not None:
                compare(path, line, code, printed)
                printed = None
            else:
                printed = None
    finally:
        del sys.modules[name]
    return count


def run_block(path, line, code, page):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), page.__dict__)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        if isinstance(error, ModuleNotFoundError) and error.name in SERVICES:
            return None
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = at[-1] if at else getattr(error, "lineno", None) or line
        trace = "".join(traceback.format_exception(error))
        pytest.fail(f"{path}:{where}: {type(error).__name__}: {error}\n\n{trace}", pytrace=False)
    return out.getvalue()


def compare(path, line, expected, printed):
    want, got = ("".join(f"{row.rstrip()}\n" for row in text.rstrip().splitlines()) for text in (expected, printed))
    if not doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        pytest.fail(f"{path}:{line}: the page says\n\n{want}\nbut the block before it prints\n\n{got}", pytrace=False)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Run in an empty directory, and restore torch's seed and default dtype afterwards."""
    monkeypatch.chdir(tmp_path)
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.manual_seed(0)
    yield tmp_path
    torch.set_default_dtype(dtype)
    torch.set_rng_state(state)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_run(path, elsewhere):
    run_page(path)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name, elsewhere):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in EXTRAS:
            pytest.skip(f"needs {error.name}")
        raise
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=report.write)
    assert not runner.failures, report.getvalue()


# -- the code of this file --------------------------------------------------------------------------------------------


def write_page(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_blocks_share_a_namespace_and_their_output_is_compared(elsewhere):
    path = write_page(
        elsewhere,
        """\
        ```python
        import pickle
        class Point: x = 1
        ```

        words between

        ```python title="with more after the language"
        print(pickle.loads(pickle.dumps(Point())).x, "and")
        print(0.123456)
        ```

        ```text
        1 and
        0.12...
        ```

        ```text
        this follows no Python
        ```

        !!! note
            ```python
            print("indented")
            ```
            ```text
            indented
            ```

        ```bash
        false
        ```
        """,
    )
    assert run_page(path) == 3


def test_a_wrong_output_names_the_line(elsewhere):
    path = write_page(elsewhere, "words\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page\.md:8: the page says\n\n2\n\nbut .* prints\n\n1\n"):
        run_page(path)


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [("x = 1\n1 / 0\n", 3, "ZeroDivisionError"), ("x = 1\nx = = 2\n", 3, "SyntaxError"), ("exit()\n", 2, "SystemExit")],
)
def test_a_failing_block_names_the_line(code, line, error, elsewhere):
    path = write_page(elsewhere, "```python\n" + code + "```\n")
    with pytest.raises(pytest.fail.Exception, match=rf"page\.md:{line}: {error}"):
        run_page(path)


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    return load_program(ROOT / "docs" / "hooks.py")


def test_every_public_name_is_documented(hooks):
    seen = set()
    assert [name for room in hooks.rooms() for name in hooks.undocumented(room, seen)] == []


def test_undocumented_names_are_found(hooks, elsewhere, monkeypatch):
    (elsewhere / "bare_room.py").write_text(
        textwrap.dedent(
            '''
            from dataclasses import dataclass
            from functools import cached_property
            from moduli.device import DeviceLike, Device
            __all__ = ["f", "g", "C", "D", "E", "LIMIT", "SPOKEN", "Alias", "DeviceLike", "Device", "absent"]
            def f(): ...
            def g():
                """Said."""
            class C:
                """Said."""
                def silent(self): ...
                @property
                def mute(self): ...
                @cached_property
                def dumb(self): ...
                @classmethod
                def still(cls): ...
                @staticmethod
                def hushed(): ...
                def _private(self): ...
                def said(self):
                    """Said."""
            class D(C):
                def said(self): ...
            @dataclass
            class E:
                x: int
            LIMIT = 3
            SPOKEN: int = 4
            """Said."""
            Alias = list[int]
            '''
        )
    )
    monkeypatch.syspath_prepend(str(elsewhere))
    undocumented = {
        name.partition(" ")[0].removeprefix("bare_room") for name in hooks.undocumented(_import("bare_room"))
    }
    assert undocumented == {
        "",
        ".f",
        ".C.silent",
        ".C.mute",
        ".C.dumb",
        ".C.still",
        ".C.hushed",
        ".D",
        ".E",
        ".LIMIT",
        ".Alias",
        ".absent",
    }


def _import(name):
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    del sys.modules[name]
    return module


def test_a_package_without_all_is_reported(hooks):
    room = types.ModuleType("listless", "Said.")
    assert list(hooks.undocumented(room)) == ["listless.__all__ (a room lists its public names)"]


def test_names_without_source_are_described_too(hooks):
    room = types.ModuleType("made", "Said.")
    exec('def f(x, y=2):\n    """Said.\n\n    More.\n    """\n', room.__dict__)
    text = hooks._entry(room, "f", types.SimpleNamespace(members={}), 2)
    assert "## f { #made.f }" in text
    assert "f(x, y=2)" in text
    assert "More." in text


def test_the_page_of_the_package_links_to_its_modules(hooks):
    front = types.ModuleType("moduli", "Said.")
    front.Device, front.DeviceLike = moduli.device.Device, moduli.device.DeviceLike
    front.device, front.__version__ = moduli.device, "1"
    front.__all__ = ["__version__", "device", "Device", "DeviceLike"]
    text = hooks.page(front, [front, moduli.device])
    summary = moduli.Device.__doc__.splitlines()[0]
    assert f"- [`Device`][moduli.device.Device] {summary}\n" in text
    assert "- [`DeviceLike`][moduli.device.DeviceLike] \n" in text
    assert "__version__" not in text
    assert "\n::: moduli.device.Device\n" in hooks.page(moduli.device, [front, moduli.device])


def test_formulas_are_written_as_mathml(hooks):
    drawn = hooks.maths('<p><span class="arithmatex">\\(m_t &lt; \\beta^2\\)</span> $5</p>', "page")
    assert drawn.startswith("<p><math ")
    assert "<msup>" in drawn
    assert "&#x0003C;" in drawn or "&lt;" in drawn
    assert drawn.endswith("</math> $5</p>")


def test_the_catalogue_has_every_link(hooks):
    from moduli import m

    text = hooks.catalogue({"Adam": "<figure>the path of Adam</figure>"})
    for name in m.__all__:
        assert f"### {name} " in text, name
    adam = text[text.index("### Adam ") :]
    adam = adam[: adam.index("\n### ")]
    for part in ("m.Adam(*, beta1=0.9", "| `beta1` |", "Needs the gradient", "```pycon", "Kingma", "the path of Adam"):
        assert part in adam, part
