"""`insert` and `remove`: adding layers to a model so that it computes the same function, and removing layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from moduli.layout import Guard

from ..axes import measure_difference
from ._growth_check import GrowthError, evaluate, list_arguments, run_example
from ._module_sizes import CONVOLUTIONS
from ._resize import ResizeWrites, edit_model, follow_relatives

T = TypeVar("T", bound=nn.Module)


def insert(
    net: T,
    path: str,
    block: nn.Module,
    example: Any = None,
    *,
    start: Literal["identity", "as given"] = "identity",
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> T:
    """Insert a layer into a `Sequential` or `ModuleList` of a model, so that the model computes the same function; in place.

    The layers after it move up by one. For a particle it is one edit of the species: relatives get a copy of the layer and keep
    their own values. An `Optimizer` of the model follows: the state of layers that moved stays with them.

    A layer is made the identity by setting some of its weights: a linear layer or a convolution with as many outputs as inputs
    by a unit matrix (Net2DeeperNet, Chen, Goodfellow and Shlens 2016), a block with a residual connection by zeros in the
    last weights of its branches. These weights are found by running the block on its inputs in a forward of the example.

    Args:
        net: The model, which is changed.
        path: The dotted name of the container, if it is not the model itself, and the position in it.
        block: The layer. Its values are changed to make it the identity.
        example: The arguments of a forward: a tensor, or a tuple of arguments. Blocks other than a linear layer or
            a convolution need one; with one, the outputs are compared before and after.
        start: "as given" to insert the layer with its present values.
        kwargs: Keyword arguments of the forward.
        tolerance: The largest difference of the outputs, relative to the largest one (at least 1).

    Returns:
        The model.

    Raises:
        KeyError: If there is no container at the path.
        IndexError: If the container has no such position.
        GrowthError: If the layer can't start as the identity, or the model would compute something else; nothing is changed.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> x = torch.randn(5, 3)
        >>> before = net(x)
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> len(mo.particles.insert(net, "2", block, example=x))
        4
        >>> torch.allclose(net(x), before)
        True
    """
    if start not in ("identity", "as given"):
        raise ValueError(f"start={start!r}; it is 'identity' or 'as given'")
    _check_model(net, "insert")
    follow_relatives(net)
    container, position = _find_place(net, path, "insert", extra=1)
    if any(block is module for module in net.modules()):
        raise ValueError(
            f"insert: this {type(block).__name__} is in the model already; insert a copy (copy.deepcopy(block))"
        )
    call = _Forward(net, list_arguments(example), kwargs or {})
    expected = call.run() if call.known and start == "identity" else None
    with Guard() as guard:
        guard.tensors(list(block.parameters()))
        if start == "identity":
            inputs = call.capture(container, position) if call.known else None
            _start_as_identity(block, inputs, f"insert: the {type(block).__name__} for {path!r}", tolerance)

        def check() -> None:
            if expected is not None:
                difference = measure_difference(expected, call.run())
                if not difference <= tolerance:
                    raise GrowthError(
                        f"insert: with the {type(block).__name__} at {path!r} the output differs by {difference:.1e}, relative to "
                        "its size, though the layer starts as the identity: something else reads the layers of the model. "
                        "Nothing was changed"
                    )

        sentence = f"a {type(block).__name__} was inserted at {path!r}"
        edit_model(net, partial(_write, container, position, block, sentence), check)
    return net


def remove(net: T, path: str) -> T:
    """Remove a layer from a `Sequential` or `ModuleList` of a model; in place, as one edit of the species.

    The layers after it move down by one. Relatives keep their own values, and an `Optimizer` the state of the layers that stay.

    Args:
        net: The model, which is changed.
        path: The dotted name of the container, if it is not the model itself, and the position in it.

    Returns:
        The model.

    Raises:
        KeyError: If there is no container at the path.
        IndexError: If the container has no such position.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> mo.particles.remove(net, "1")
        Sequential(
          (0): Linear(in_features=3, out_features=3, bias=True)
          (1): Linear(in_features=3, out_features=2, bias=True)
        )
    """
    _check_model(net, "remove")
    follow_relatives(net)
    container, position = _find_place(net, path, "remove", extra=0)
    sentence = f"the {type(container[position]).__name__} at {path!r} was removed"
    edit_model(net, partial(_write, container, position, None, sentence), lambda: None)
    return net


def _check_model(net: Any, verb: str) -> None:
    """Raise TypeError for anything but one model."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"{verb}: it takes one nn.Module, not a {type(net).__name__}")


def _find_place(net: nn.Module, path: str, verb: str, extra: int) -> tuple[Any, int]:
    """Return the container and the position of a dotted path."""
    prefix, _, last = str(path).rpartition(".")
    modules = dict(net.named_modules())
    container = modules.get(prefix)
    if not isinstance(container, nn.Sequential | nn.ModuleList):
        places = [
            name or "the model itself"
            for name, each in modules.items()
            if isinstance(each, nn.Sequential | nn.ModuleList)
        ]
        what = "is no module of the model" if container is None else f"is a {type(container).__name__}"
        raise KeyError(
            f"{verb}: {prefix or 'the model'!r} {what}; a layer has its place in a Sequential or ModuleList: "
            f"{', '.join(places) or 'there is none'}"
        )
    size = len(container)
    if list(container._modules) != [str(i) for i in range(size)]:
        raise KeyError(
            f"{verb}: the layers of {prefix or 'the model'!r} have names ({', '.join(container._modules)}), not numbers"
        )
    position = int(last) if last.lstrip("-").isdigit() else size + extra
    position += size if position < 0 else 0
    if not 0 <= position < size + extra:
        raise IndexError(f"{verb}: {prefix or 'the model'!r} has {size} layers, and no position {last!r}")
    return container, position


def _write(container: Any, position: int, block: nn.Module | None, sentence: str) -> ResizeWrites:
    """Insert a layer into a container, or remove one if `block` is None, and renumber those after it."""
    layers = list(container._modules.values())
    layers[position : position + (block is None)] = [] if block is None else [block]
    container._modules.clear()
    container._modules.update((str(i), layer) for i, layer in enumerate(layers))
    return ResizeWrites({}, [], [], sentence)


class _Forward:
    """Runs a model on its example, in evaluation mode."""

    def __init__(self, net: nn.Module, arguments: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.net, self.arguments, self.kwargs = net, arguments, kwargs
        self.known = bool(arguments or kwargs)

    def run(self) -> list[Tensor]:
        """Return the tensors among the outputs."""
        return run_example(self.net, self.arguments, self.kwargs)

    def capture(self, container: Any, position: int) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        """Return the arguments with which a layer at a position is called: those of the present one, or the last one's output."""
        calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
        last = position == len(container)
        if not len(container):
            return None

        def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Any = None) -> None:
            first = (result,) if last else args[:1]
            calls.append(((*first, *args[1:]), named))

        layer = container[-1 if last else position]
        register = layer.register_forward_hook if last else layer.register_forward_pre_hook
        handle = register(record, with_kwargs=True)
        try:
            self.run()
        finally:
            handle.remove()
        return calls[0] if calls else None


def _start_as_identity(block: nn.Module, inputs: Any, what: str, tolerance: float) -> None:
    """Set the weights of a block so that it returns its first argument.

    Args:
        block: The block.
        inputs: The arguments and keyword arguments with which it is called; None without an example.
        what: The description of the block in errors.
        tolerance: The largest relative difference of the output from the first argument.

    Raises:
        GrowthError: If no such weights are found.
    """
    layers = [each for each in block.modules() if isinstance(each, (nn.Linear, *CONVOLUTIONS))]
    unit = all(_can_be_unit(layer) for layer in layers)
    if inputs is None:
        if layers != [block] or not unit:
            raise GrowthError(
                f"{what} can be made the identity only on what reaches it: pass example=inputs, or start='as given'"
            )
        _make_unit(block)
        return
    args, named = inputs
    is_identity = partial(_is_identity, block, args, named, tolerance)
    if is_identity():
        return
    before = [param.detach().clone() for param in block.parameters()]
    if unit and layers:
        for layer in layers:
            _make_unit(layer)
        if is_identity():
            return
        _copy_values(block.parameters(), before)
    if _zero_branches(block, is_identity):
        return
    _copy_values(block.parameters(), before)
    raise GrowthError(
        f"{what} can't start as the identity: it has no residual connection, and its layers do not keep the number of units or are "
        "followed by a function that is not the identity on what reaches it. Pass start='as given' to insert it with its values"
    )


def _is_identity(block: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], tolerance: float) -> bool:
    """Whether a block returns its first argument, or the first item of it if that is a tuple."""
    with evaluate(block), torch.no_grad():
        result = block(*args, **named)
    result = result[0] if isinstance(result, tuple) and result else result
    argument = args[0][0] if isinstance(args[0], tuple) else args[0]
    same = isinstance(result, Tensor) and isinstance(argument, Tensor) and result.shape == argument.shape
    return same and measure_difference([argument], [result]) <= tolerance


def _zero_branches(block: nn.Module, is_identity: Callable[[], bool]) -> bool:
    """Set the last weights of residual branches to zero; return whether the block is the identity after that.

    All weights are set to zero, then restored one module after the other where the block stays the identity. So the weights
    that stay zero are the last ones of the branches, which have gradients.
    """
    groups = [
        [param for param in module._parameters.values() if param is not None]
        for module in block.modules()
        if any(param is not None and param.dim() > 1 for param in module._parameters.values())
    ]
    values = [[param.detach().clone() for param in group] for group in groups]
    for group in groups:
        _zero(group)
    if not groups or not is_identity():
        return False
    for group, saved in zip(groups, values, strict=True):
        _copy_values(group, saved)
        if not is_identity():
            _zero(group)
    return True


def _zero(params: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.zero_()


def _copy_values(params: Iterable[nn.Parameter], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def _can_be_unit(layer: Any) -> bool:
    """Whether some weights make a layer the identity: as many outputs as inputs, and no moved positions."""
    if "weight" not in layer._parameters:
        return False
    if isinstance(layer, nn.Linear):
        return layer.in_features == layer.out_features
    odd = all(size % 2 == 1 for size in layer.kernel_size)
    return (
        not layer.transposed
        and odd
        and layer.in_channels == layer.out_channels
        and layer.groups in (1, layer.in_channels)
    )


def _make_unit(layer: Any) -> None:
    """Set the weights of a linear layer or a convolution to the identity."""
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(torch.eye(len(layer.weight)))
        else:
            nn.init.dirac_(layer.weight, groups=layer.groups)
        if layer.bias is not None:
            layer.bias.zero_()
