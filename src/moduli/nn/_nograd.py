"""Declaring which labelled tensors of a class are state and not parameters."""

from collections.abc import Callable

from ._functional import list_descendants
from ._module import Module, ModuleType


def nograd_tensors(*names: str) -> Callable[[ModuleType], ModuleType]:
    """Declare attributes whose labelled tensors are kept as buffers: part of the state, never trained.

    Names declared by all bases hold too. A declared name that is never assigned is probably misspelt, and warned about
    once, when the module's parameters or state are first asked for.

    Args:
        *names: Names of attributes.

    Returns:
        A class decorator that annotates a `Module` class in place and returns it.

    Raises:
        TypeError: If a name is not a string, or the class is no `Module`.

    Example:
        >>> import torch
        >>> from moduli.labels import Space, Tensor
        >>> from moduli.nn import Module, nograd_tensors
        >>> @nograd_tensors("basis")
        ... class Fit(Module):
        ...     pass
        >>> m = Fit()
        >>> m.basis = Tensor(torch.eye(2), (Space(2), Space(2)))
        >>> [name for name, _ in m.named_buffers()], list(m.parameters())
        (['buffer:basis'], [])
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"nograd_tensors takes the names of attributes, not {name!r}; write @nograd_tensors('name') above the "
                "class"
            )

    def annotate(cls: ModuleType) -> ModuleType:
        if not (isinstance(cls, type) and issubclass(cls, Module)):
            raise TypeError(f"nograd_tensors decorates a class derived from moduli.nn.Module, not {cls!r}")
        # A class may be decorated when others are derived from it already.
        affected: list[type[Module]] = [cls, *list_descendants(cls)]
        for each in affected:
            each.__nograd_tensors__ = each.__nograd_tensors__ | frozenset(names)
        return cls

    return annotate
