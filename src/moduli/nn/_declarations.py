"""Declarations about a module's tensors: which are buffers, and which names share one tensor."""

from collections.abc import Callable

from torch import nn

from ._functional import list_descendants
from ._module import Module, ModuleType
from ._ownership import own


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
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"nograd_tensors takes names: write @nograd_tensors('name') above the class, not {names!r}")

    def annotate(cls: ModuleType) -> ModuleType:
        if not (isinstance(cls, type) and issubclass(cls, Module)):
            raise TypeError(f"nograd_tensors decorates a class derived from moduli.nn.Module, not {cls!r}")
        # A class may be decorated when others are derived from it already.
        affected: list[type[Module]] = [cls, *list_descendants(cls)]
        for each in affected:
            each.__nograd_tensors__ = each.__nograd_tensors__ | frozenset(names)
        return cls

    return annotate


def tie(module: nn.Module, name: str, to: str) -> None:
    """Register one tensor under a second name.

    Assignment copies, so `module.b = module.a` gives two parameters. After `tie(module, "b", to="a")` there is one parameter
    with two names: it is trained once, with the gradients of both uses; copies, pickles, conversions and checkpoints
    preserve the tie. A labelled tensor has its labels under both names. Assigning to either name ends the tie.

    Args:
        module: The module, or a module above both names.
        name: The dotted name to register the tensor under; a tensor registered there before is dropped.
        to: The dotted name of a labelled tensor, a parameter or a buffer.

    Raises:
        AttributeError: If there is no tensor named `to`.
        KeyError: If `name` is not free for a buffer.
        ValueError: If the two names are the same, or one is declared by `nograd_tensors` and the other trained.

    Example:
        >>> import torch
        >>> from moduli.labels import Space, Tensor
        >>> from moduli.nn import Module, tie
        >>> m = Module()
        >>> m.a = Tensor(torch.ones(2, requires_grad=True), (Space(["x", "y"]),))
        >>> tie(m, "b", to="a")
        >>> m.b.data is m.a.data, len(list(m.parameters())), list(m.state_dict())
        (True, 1, ['tensor:a', 'tensor:b'])
    """
    (target, source), (holder, public) = (_find_holder(module, each) for each in (to, name))
    if (holder, public) == (target, source):
        raise ValueError(f"{name!r} and {to!r} are the same name")
    labelled = vars(target).get("_labelled", {})
    key = labelled[source][0] if source in labelled else source
    tensor = target._parameters.get(key)
    trained = tensor is not None
    if tensor is None:
        tensor = target._buffers.get(key)  # type: ignore[assignment]
        if tensor is None:
            raise AttributeError(f"{type(module).__name__} has no tensor {to!r} to tie to")
    if isinstance(holder, Module) and source in labelled:
        declared = public in holder.__nograd_tensors__
        if declared == trained:
            raise ValueError(
                f"{to!r} is a {'parameter' if trained else 'buffer'}, but {name!r} is {'' if declared else 'not '}declared "
                "by nograd_tensors: they cannot be one tensor"
            )
        own(holder, public, getattr(target, source), fresh=True)
        for each, tied in ((holder, public), (target, source)):
            each.__dict__["_tied"] = each.__dict__.get("_tied", frozenset()) | {tied}
        public = holder._labelled[public][0]
    elif trained:
        setattr(holder, public, tensor)
    else:
        holder.register_buffer(public, tensor, persistent=key not in target._non_persistent_buffers_set)
    (holder._parameters if trained else holder._buffers)[public] = tensor


def _find_holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, public = name.rpartition(".")
    return module.get_submodule(path), public
