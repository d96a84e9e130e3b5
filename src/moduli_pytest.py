"""A plugin of pytest: `pytest --moduli-links mypackage` puts the links of a package under moduli's laws.

Each pair of a link and a law is a test, `moduli-links::SoftSign::pieces`, that passes, fails, or is skipped with the reason why
the law does not apply. A link is made without arguments and followed by `LR(0.01)`; where it needs another chain, or more or less
may be expected of it, `conftest.py` says so:

    def pytest_moduli_case(link):
        if link is SoftSign:
            return Case("SoftSign", lambda: [SoftSign(), m.LR(0.1)], steps=1500, tolerance=1e-2)

It is a module beside moduli, so that pytest does not import torch where the option is not given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moduli.testing import Case

__all__ = ["LawItem"]


class Hooks:
    """The hook that a `conftest.py` may implement."""

    @pytest.hookspec(firstresult=True)
    def pytest_moduli_case(self, link: type) -> Case | None:
        """Return the case of a link, or None for the default."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("moduli", "laws of links")
    text = "put the links of this package, module or FILE.py under moduli's laws; may be given several times"
    group.addoption("--moduli-links", action="append", default=[], metavar="PACKAGE", help=text)
    text = "check these laws only, with commas between; by default all of them"
    group.addoption("--moduli-laws", default="", metavar="LAWS", help=text)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hook."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each law and each link of the packages."""
    packages = config.getoption("--moduli-links")
    if not packages:
        return
    from moduli import testing

    laws = [name.strip() for name in config.getoption("--moduli-laws").split(",") if name.strip()] or list(testing.LAWS)
    for name in laws:
        if name not in testing.LAWS:
            raise pytest.UsageError(f"--moduli-laws: there is no law {name!r}; there are {', '.join(testing.LAWS)}")
    for package in packages:
        try:
            links = testing.find_links(package)
        except (ImportError, ValueError) as error:
            raise pytest.UsageError(f"--moduli-links {package}: {error}") from error
        for link in links:
            case = config.hook.pytest_moduli_case(link=link) or testing.make_case(link)
            parent = LinkCollector.from_parent(
                session, name=f"moduli-links::{case.name}", nodeid=f"moduli-links::{case.name}"
            )
            items += (LawItem.from_parent(parent, name=law, case=case) for law in laws)


class LinkCollector(pytest.Collector):
    """A link, under whose name its laws are reported."""

    def collect(self) -> Iterator[pytest.Item]:
        """Return nothing: the laws are added beside the tests of files."""
        return iter(())


class LawItem(pytest.Item):
    """One link under one law."""

    def __init__(self, *, case: Case, **given: Any) -> None:
        super().__init__(**given)
        self.case = case

    def runtest(self) -> None:
        """Check the law; skip it where it says nothing about the link."""
        from moduli.testing import check_law

        reason = check_law(self.case, self.name)
        if reason is not None:
            pytest.skip(reason)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the sentence of a broken law, and the traceback only where the link itself raised an error."""
        from moduli.testing import LawError

        if isinstance(excinfo.value, LawError) and isinstance(excinfo.value.__cause__, LawError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return what reports call the test."""
        return "moduli-links", None, f"{self.case.name}: {self.name}"
