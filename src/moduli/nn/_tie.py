"""Tying: two names for one tensor."""

from typing import cast

from torch import nn

from ._module import Module
from ._ownership import own


def tie(module: nn.Module, name: str, to: str) -> None:
    """Make a name stand for the very tensor that another name stands for.

    Assignment copies, so `module.b = module.a` gives two parameters. After `tie(module, "b", to="a")` there is one,
    under two names: it is trained once, with the gradients of both uses; copies, pickles, conversions and checkpoints
    keep it so. A labelled tensor lends its labels too. Assigning to either name ends the tie.

    Args:
        module: The module, or a module above both names.
        name: The dotted name that gives up what it had, if anything.
        to: The dotted name of a labelled tensor, a parameter or a buffer.

    Raises:
        AttributeError: If there is no tensor named `to`, or `name` is not free for one.
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
    target, key, record = _find(module, to)
    holder, public = _holder(module, name)
    if holder is target and public == to.rpartition(".")[2]:
        raise ValueError(f"{name!r} and {to!r} are the same name")
    tensor = target._parameters.get(key)
    trained = tensor is not None
    if tensor is None:
        tensor = target._buffers[key]  # type: ignore[assignment]
    if isinstance(holder, Module) and record is not None:
        declared = public in holder.__nograd_tensors__
        if declared == trained:
            raise ValueError(
                f"{to!r} is a {'parameter' if trained else 'buffer'}, but {name!r} is {'' if declared else 'not '}declared "
                "by nograd_tensors: they cannot be one tensor"
            )
        own(holder, public, getattr(target, to.rpartition(".")[2]))
        public = holder._labelled[public][0]
    elif trained:
        setattr(holder, public, tensor)
    elif not hasattr(holder, public) or public in holder._buffers:
        persistent = key not in target._non_persistent_buffers_set
        holder.register_buffer(public, tensor, persistent=persistent)
    else:
        raise AttributeError(f"{name!r} is taken by something that is no buffer; delete it first")
    (holder._parameters if trained else holder._buffers)[public] = tensor


def _find(module: nn.Module, to: str) -> tuple[nn.Module, str, object]:
    target, public = _holder(module, to)
    key, record = public, cast(object, None)
    if isinstance(target, Module) and public in target._labelled:
        key, record = target._labelled[public]
    if target._parameters.get(key) is None and target._buffers.get(key) is None:
        raise AttributeError(f"{type(module).__name__} has no tensor {to!r} to tie to")
    return target, key, record


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, public = name.rpartition(".")
    return module.get_submodule(path), public
