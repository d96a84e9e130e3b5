"""`align`: permute the units of a model so that it can be merged with one that was trained from another start.

Reference:
    Ainsworth, Hayase, Srinivasa, "Git Re-Basin: merging models modulo permutation symmetries", ICLR 2023, arXiv:2209.04836.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from .. import axes as model_axes
from .._texts import shorten
from ..axes import ModelAxes
from ._activations import collect_activations
from ._driver import ModelT
from ._matching import AxisTensor, UnitMatching
from ._models import MergeError, check_choice

By: TypeAlias = Literal["weights", "activations"]
"""What units are compared by: their weights, or what they do on data."""


def align(
    model: ModelT,
    to: ModelT,
    axes: ModelAxes | None = None,
    example: Any = None,
    *,
    by: By = "weights",
    data: Iterable[Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    sweeps: int = 50,
    seed: int = 0,
) -> ModelT:
    """Permute the units of a model to be those of another, without changing what it computes.

    Two models trained from different starts learn similar units in different orders, so that their average is worse than
    both. The units of a network can be put into any order, as long as it is the same everywhere; `align` finds the order that
    brings the model nearest to the other. Heads of attention move as blocks, and statistics of batch normalisation follow.

    Args:
        model: A module, or a state dict. It is not changed.
        to: Another of the same structure.
        axes: The axes of the model, as `moduli.axes.trace` finds them; a state dict needs them.
        example: The argument of a forward, or a tuple of its arguments, with which to find the axes of a module. The result
            is compared with the model on it, if it has numbers.
        by: "weights" compares the weights of units, "activations" what they compute on data.
        data: For activations: batches, the same for both models.
        forward: For activations, how to run a model on a batch: `forward(model, batch)`. By default the batch, or its first
            item, is the only argument.
        sweeps: How often all axes are improved at most.
        seed: Decides the order in which axes are improved.

    Returns:
        A copy of the model with its units in another order.

    Raises:
        MergeError: If structures differ, nothing says what the axes are, or the permuted copy computes something else.
        ImportError: Without SciPy, which is in the extra `merge`.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> other = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> same = merge.align(other, net, example=torch.randn(8, 4))
        >>> distance = lambda a, b: sum((x - y).square().sum() for x, y in zip(a.parameters(), b.parameters()))
        >>> bool(distance(same, net) < distance(other, net))
        True

    Reference:
        Ainsworth et al., "Git Re-Basin", ICLR 2023, arXiv:2209.04836.
    """
    axes = find_axes(model, axes, example)
    units = match_units(model, to, axes, by=by, data=data, forward=forward, sweeps=sweeps, seed=seed)
    return permute_units(model, axes, units, example)


def align_all(
    models: Sequence[ModelT], axes: ModelAxes | None = None, example: Any = None, *, rounds: int = 10, **options: Any
) -> list[ModelT]:
    """Permute the units of several models to be those of their mean, one after the other until nothing changes.

    Args:
        models: Modules, or state dicts, of one structure.
        axes: The axes of the models; a state dict needs them.
        example: As for `align`.
        rounds: How often every model is aligned to the mean of the others at most.
        **options: The others of `align`; models are compared by their weights.

    Returns:
        Copies of the models with their units in another order.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> nets = [torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)) for _ in range(3)]
        >>> soup = merge.soup(merge.align_all(nets, example=torch.randn(8, 4)))

    Reference:
        Ainsworth et al., "Git Re-Basin", ICLR 2023, arXiv:2209.04836 (algorithm 3).
    """
    if options.get("by", "weights") != "weights":
        raise MergeError("align_all compares weights, since a mean of models computes nothing of use; leave by= out")
    if len(models) < 2:
        return [copy.deepcopy(model) for model in models]
    axes = find_axes(models[0], axes, example)
    tensors: list[dict[str, Tensor]] = [_list_tensors(model) for model in models]
    every = [{name: torch.arange(axis.size) for name, axis in axes.axes.items() if axis.free} for _ in models]
    order = torch.Generator().manual_seed(options.get("seed", 0))
    for _ in range(rounds):
        moved = False
        for at in torch.randperm(len(models), generator=order).tolist():
            others = [each for place, each in enumerate(tensors) if place != at]
            mean = {name: torch.stack([_widen(each[name]) for each in others]).mean(0) for name in tensors[at]}
            units = match_units(tensors[at], mean, axes, **options)
            changed = {name: index for name, index in units.items() if not torch.equal(index, torch.arange(len(index)))}
            if changed:
                moved = True
                tensors[at] = axes.take(tensors[at], changed)
                every[at] |= {name: every[at][name][index] for name, index in changed.items()}
        if not moved:
            break
    pairs = zip(models, every, strict=True)
    return [permute_units(model, axes, units, example) for model, units in pairs]


def match_units(
    model: Any,
    to: Any,
    axes: ModelAxes,
    *,
    by: By = "weights",
    data: Iterable[Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    sweeps: int = 50,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Find the order of the units of a model in which they are nearest to those of another.

    Args:
        model: A module, or tensors by name.
        to: Another of the same structure.
        axes: The axes of the model.
        by: As for `align`.
        data: As for `align`.
        forward: As for `align`.
        sweeps: As for `align`.
        seed: As for `align`.

    Returns:
        For each free axis, the unit of the model that takes the place of each unit of the other: what `ModelAxes.take` takes.

    Raises:
        MergeError: If structures differ, or `by` and `data` do not fit.

    Example:
        >>> import torch
        >>> from moduli import axes, merge
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> ax, order = axes.trace(net, torch.zeros(1, 2)), torch.tensor([2, 0, 1])
        >>> permuted = ax.take(dict(net.named_parameters()), {"0.out": order})
        >>> merge.match_units(permuted, net, ax)["0.out"].tolist() == torch.argsort(order).tolist()
        True
    """
    check_choice("by", by, "weights", "activations")
    if (by == "activations") != (data is not None):
        raise MergeError("activations are compared on data: give by='activations' and data= together, or neither")
    weights = _pair_tensors(_list_tensors(model), _list_tensors(to), axes)
    if data is None:
        return UnitMatching(axes, weights, seed).run(sweeps)
    if not (isinstance(model, nn.Module) and isinstance(to, nn.Module)):
        raise MergeError("activations are those of modules; load the state dicts into modules, or compare weights")
    tensors = collect_activations(model, to, axes, data, forward)
    covered = {name for each in tensors for name in each.names}
    # Units that no layer puts out, such as heads inside of attention, are compared by their weights.
    tensors += [each for each in weights if each.names - covered]
    return UnitMatching(axes, tensors, seed).run(sweeps)


@torch.no_grad()
def permute_units(model: ModelT, axes: ModelAxes, units: Mapping[str, Tensor], example: Any = None) -> ModelT:
    """Return a copy of a model with its units in another order, which computes the same.

    Args:
        model: A module, or a state dict.
        axes: The axes of the model.
        units: For axes by name, the units in their new order.
        example: The arguments of a forward, on which a module is compared with the copy.

    Raises:
        MergeError: If the copy computes something else.

    Example:
        >>> import torch
        >>> from moduli import axes, merge
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> ax, x = axes.trace(net, torch.zeros(1, 2)), torch.randn(5, 2)
        >>> other = merge.permute_units(net, ax, {"0.out": torch.tensor([2, 0, 1])}, x)
        >>> torch.allclose(other(x), net(x), atol=1e-6), torch.equal(other[0].bias, net[0].bias[[2, 0, 1]])
        (True, True)
    """
    tensors = axes.take({name: each for name, each in _list_tensors(model).items() if _is_known(axes, name)}, units)
    if not isinstance(model, nn.Module):
        return cast(ModelT, {name: tensors[name] if name in tensors else model[name] for name in model})
    result = copy.deepcopy(model)
    for name, tensor in _list_tensors(result).items():
        if name in tensors:
            tensor.copy_(tensors[name])
    if example is not None:
        _compare_outputs(model, result, example)
    return result


def find_axes(model: Any, axes: ModelAxes | None, example: Any) -> ModelAxes:
    """Return the axes that are given, or those of a module by a trace.

    Raises:
        MergeError: If nothing says what they are.
    """
    if axes is not None:
        return axes
    if not isinstance(model, nn.Module) or example is None:
        raise MergeError(
            "nothing says which axes of the model are the same units: give example=, the argument of a forward, "
            "or axes=moduli.axes.trace(model, example)"
        )
    return model_axes.trace(model, *_list_arguments(example))


def _list_arguments(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, tuple | list) else (example,)


def _list_tensors(model: Any) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name."""
    if not isinstance(model, nn.Module):
        return {name: each.detach() for name, each in model.items() if isinstance(each, Tensor)}
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def _is_known(axes: ModelAxes, name: str) -> bool:
    try:
        axes.of(name)
    except KeyError:
        return False
    return True


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if not tensor.is_complex() else tensor


def _pair_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], axes: ModelAxes) -> list[AxisTensor]:
    """Return the floating tensors of two models in pairs; refuse those that the axes or the other do not have."""
    pairs = []
    for name, shown in axes.parameters.items():
        if name not in ours or name not in theirs:
            where = "the model" if name not in ours else "`to`"
            raise MergeError(f"{shorten(name)} is missing in {where}; align models of one structure")
        one, two = ours[name], theirs[name]
        if one.shape != two.shape or tuple(one.shape) != tuple(shown.shape):
            told = f"has shape {tuple(one.shape)} in the model, {tuple(two.shape)} in `to` and {tuple(shown.shape)} in axes"
            raise MergeError(f"{shorten(name)} {told}; align models of one structure, with its own axes")
        if one.is_complex():
            one, two, shown = torch.view_as_real(one), torch.view_as_real(two), _add_parts(shown)
        if one.is_floating_point():
            pairs.append(AxisTensor(shown, one.to("cpu", torch.float64), two.to("cpu", torch.float64)))
    return pairs


def _add_parts(shown: Any) -> Any:
    """Return the axes of a complex parameter with one more, for its real and imaginary parts."""
    import dataclasses

    part = "real and imaginary part"
    return dataclasses.replace(
        shown,
        shape=(*shown.shape, 2),
        dims=(*shown.dims, (part,)),
        uses=(*shown.uses, "kernel"),
        sizes={**shown.sizes, part: 2},
    )


def _compare_outputs(model: nn.Module, result: nn.Module, example: Any) -> None:
    """Raise MergeError where a permuted copy computes something else than the model."""
    outputs = []
    for each in (model, result):
        run = copy.deepcopy(each).eval()
        outputs.append(run(*_list_arguments(example)))
    # Sums in another order differ by rounding, which is coarser than that where parameters are of half precision.
    eps = max((torch.finfo(each.dtype).eps for each in model.parameters() if each.is_floating_point()), default=0.0)
    coarse = eps > 1e-6
    try:
        torch.testing.assert_close(
            outputs[1], outputs[0], rtol=8 * eps if coarse else 1e-4, atol=8 * eps if coarse else 1e-5
        )
    except AssertionError as error:
        fact = "the permuted copy does not compute what the model computes, so that its axes are not what they were taken for"
        raise MergeError(f"{fact}; look for the axis with moduli.axes.check(model, example): {error}") from error
