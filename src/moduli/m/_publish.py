"""The exports of a family of links."""

from __future__ import annotations

from typing import Any

from ..optim import Module


def publish_links(namespace: dict[str, Any]) -> None:
    """Set `__all__` in a family's `globals()` to the links defined there: its classes without an underscore."""
    family = namespace["__name__"]
    links = {name: value for name, value in namespace.items() if isinstance(value, type) and issubclass(value, Module)}
    # Without a static `__all__`, type checkers export everything that the family's files define.
    namespace["__all__"] = sorted(name for name, link in links.items() if name[0] != "_" and family in link.__module__)
