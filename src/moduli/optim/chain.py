"""Several links as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ._needs import Across, Need
from .functional import step
from .module import Chainable, Module

if TYPE_CHECKING:
    from .objective import Objective

__all__ = ["Chain", "flatten", "maybe_chain"]


def flatten(modules: Iterable[Any]) -> Iterator[Module]:
    """Yield the links in a nesting of sequences and chains, in order."""
    for module in modules:
        if isinstance(module, Chain):
            yield from module.get_children_sequence()
        elif isinstance(module, Module):
            yield module
        elif isinstance(module, list | tuple):
            yield from flatten(module)
        else:
            name = getattr(module, "__name__", type(module).__name__)
            raise TypeError(f"a chain is made of links, got {name}")


class Chain(Module):
    """Links in order, as one link. Nested chains are flattened.

    Args:
        *modules: Links and sequences of links.

    Example:
        >>> from moduli import m, optim
        >>> optim.Chain(m.ClipNorm(1.0), [m.Adam(), m.LR(0.1)])
        Chain(ClipNorm, Adam, LR)
    """

    needs = frozenset()
    differentiable = True
    across = Across.NOTHING

    def __init__(self, *modules: Chainable) -> None:
        super().__init__()
        self.set_children_sequence(flatten(modules))

    def __repr__(self) -> str:
        return f"Chain({', '.join(type(child).__name__ for child in self.children.values())})"

    def update(self, objective: Objective) -> None:
        """Have every link learn from the update as transformed by the links before it; the update itself is not changed."""
        links = self.get_children_sequence()
        if links:
            probe = objective.clone(clone_updates=True)
            probe.post_step_hooks = []
            moves = any(Need.CLOSURE in link.all_needs() for link in links[:-1])
            with objective.moved() if moves else nullcontext():
                for i, link in enumerate(links):
                    link.update(probe)
                    if i + 1 < len(links):
                        probe = link.apply(probe)
                        if probe.stop:
                            break
            # The objective gets the evaluations of the probe, but not its moves.
            probe.skip_update, probe.accepted = False, None
            objective.update_attrs_from_clone_(probe)

    def apply(self, objective: Objective) -> Objective:
        """Transform the update by every link; none of them learns."""
        outer = objective.stop
        for link in self.get_children_sequence():
            objective = link.apply(objective)
            if objective.stop:
                break
        objective.stop = outer
        return objective

    def step(self, objective: Objective) -> Objective:
        """Run each link in turn. A link that stops the chain stops this one, not the enclosing one."""
        outer = objective.stop
        objective = step(objective, self.get_children_sequence(), owner=self)
        objective.stop = outer
        return objective


def maybe_chain(*modules: Chainable) -> Module:
    """Return one link unmodified, several as a `Chain`.

    Example:
        >>> from moduli import m, optim
        >>> optim.maybe_chain(m.LR(0.1)), optim.maybe_chain([m.Adam(), m.LR(0.1)])
        (LR(lr=0.1), Chain(Adam, LR))
    """
    links = list(flatten(modules))
    return links[0] if len(links) == 1 else Chain(*links)
