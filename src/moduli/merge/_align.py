"""`align`: permute the units of a model so that it can be merged with one that was trained from other initial values.

Reference:
    Ainsworth, Hayase, Srinivasa, "Git Re-Basin: merging models modulo permutation symmetries", ICLR 2023, arXiv:2209.04836.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from .. import axes as model_axes
from .._texts import shorten
from ..axes import ModelAxes, ParameterAxes
from ..layout import copy_module, recompute_weights, unwrapped_name
from ._activations import collect_activations
from ._driver import ModelT
from ._matching import AxisTensor, UnitMatching
from ._models import MergeError, check_choice, find_reorders

By: TypeAlias = Literal["weights", "activations"]
"""What units are compared by: their weights, or their activations on data."""


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
    """Permute the units of a model to match those of another, without changing the function it computes.

    Two models trained from different initial values learn similar units in different orders, so that their average is worse than
    both. The units of a network may be in any order that is the same in all tensors; `align` finds the order in which
    the model is nearest to the other. Heads of attention are permuted as blocks, statistics of batch normalisation with them.

    Args:
        model: A module, or a state dict. It is not changed.
        to: Another of the same structure.
        axes: The axes of the model, the result of `moduli.axes.trace`; a state dict needs them.
        example: The argument of a forward, or a tuple of its arguments, for tracing the axes of a module. The outputs of
            the result on it are compared with the model's.
        by: "weights" compares the weights of units, "activations" their outputs on data.
        data: For activations: batches, the same for both models.
        forward: For activations: `forward(model, batch)` runs a model on a batch. By default the batch, or its first
            item, is the only argument.
        sweeps: The largest number of passes over all axes.
        seed: The seed of the order in which axes are improved.

    Returns:
        A copy of the model with its units in another order.

    Raises:
        MergeError: If structures differ, the axes are unknown, or the permuted copy computes something else.
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
    """Permute the units of several models to match those of their mean, one after the other until nothing changes.

    Args:
        models: Modules, or state dicts, of one structure.
        axes: The axes of the models; a state dict needs them.
        example: As for `align`.
        rounds: The largest number of passes over all models, each of which is aligned to the mean of the others.
        **options: The other arguments of `align`; models are compared by their weights.

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
        return [copy_module(model) if isinstance(model, nn.Module) else copy.deepcopy(model) for model in models]
    axes = find_axes(models[0], axes, example)
    tensors: list[dict[str, Tensor]] = [_list_tensors(model, models[0]) for model in models]
    every = [{name: torch.arange(axis.size) for name, axis in axes.axes.items() if axis.free} for _ in models]
    order = torch.Generator().manual_seed(options.get("seed", 0))
    for _ in range(rounds):
        places = torch.randperm(len(models), generator=order).tolist()
        moved = [_align_to_others(tensors, at, every[at], axes, options) for at in places]
        if not any(moved):
            break
    pairs = zip(models, every, strict=True)
    return [permute_units(model, axes, units, example) for model, units in pairs]


def _align_to_others(
    tensors: list[dict[str, Tensor]], at: int, units: dict[str, Tensor], axes: ModelAxes, options: Mapping[str, Any]
) -> bool:
    """Align one of several models to the mean of the others; return whether any of its units moved.

    Args:
        tensors: The tensors of all models; those of the aligned model are replaced.
        at: The position of the model.
        units: The order of its units, which is updated.
        axes: The axes of the models.
        options: The options of `match_units`.
    """
    others = [each for place, each in enumerate(tensors) if place != at]
    mean = {name: torch.stack([_widen(each[name]) for each in others]).mean(0) for name in tensors[at]}
    matched = match_units(tensors[at], mean, axes, **options)
    changed = {name: index for name, index in matched.items() if not torch.equal(index, torch.arange(len(index)))}
    tensors[at] = axes.take(tensors[at], changed)
    units |= {name: units[name][index] for name, index in changed.items()}
    return bool(changed)


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
    """Return the order of the units of a model in which they are nearest to those of another.

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
        For each free axis, the unit of the model that matches each unit of the other, as an argument of `ModelAxes.take`.

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
    weights = _pair_tensors(_list_tensors(model), _list_tensors(to, model), axes)
    if data is None:
        return UnitMatching(axes, weights, seed).run(sweeps)
    if not (isinstance(model, nn.Module) and isinstance(to, nn.Module)):
        raise MergeError("activations are those of modules; load the state dicts into modules, or compare weights")
    tensors = collect_activations(model, to, axes, data, forward)
    covered = {name for each in tensors for name in each.names}
    # Units that are no outputs of layers, such as heads inside of attention, are compared by their weights.
    tensors += [each for each in weights if each.names - covered]
    return UnitMatching(axes, tensors, seed).run(sweeps)


@torch.no_grad()
def permute_units(model: ModelT, axes: ModelAxes, units: Mapping[str, Tensor], example: Any = None) -> ModelT:
    """Return a copy of a model with its units in another order, which computes the same function.

    Args:
        model: A module, or a state dict.
        axes: The axes of the model.
        units: For axes by name, the units in their new order.
        example: The arguments of a forward, on which the outputs of a module and its copy are compared.

    Raises:
        MergeError: If units are no permutation, their axis is fixed, or the copy computes something else.

    Example:
        >>> import torch
        >>> from moduli import axes, merge
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> ax, x = axes.trace(net, torch.zeros(1, 2)), torch.randn(5, 2)
        >>> other = merge.permute_units(net, ax, {"0.out": torch.tensor([2, 0, 1])}, x)
        >>> torch.allclose(other(x), net(x), atol=1e-6), torch.equal(other[0].bias, net[0].bias[[2, 0, 1]])
        (True, True)
    """
    for name, order in units.items():
        axis = axes[name]
        if not axis.free and (example is None or not isinstance(model, nn.Module)):
            raise MergeError(
                f"axis {name!r} is fixed ({', '.join(axis.reasons)}), so that another order computes something else; with an "
                "example, outputs are compared"
            )
        if sorted(torch.as_tensor(order).tolist()) != list(range(axis.size)):
            raise MergeError(
                f"the units of axis {name!r} are no permutation: give each position from 0 to {axis.size - 1} once"
            )
    tensors = axes.take({name: each for name, each in _list_tensors(model).items() if axes.has_parameter(name)}, units)
    if not isinstance(model, nn.Module):
        state: Any = {name: tensors[name] if name in tensors else model[name] for name in model}
        if hasattr(model, "_metadata"):  # the labels
            state = OrderedDict(state)
            state._metadata = copy.deepcopy(model._metadata)
        return cast(ModelT, state)
    result = copy_module(model)
    for name, tensor in _list_tensors(result).items():
        if name in tensors:
            tensor.copy_(tensors[name])
    recompute_weights(result)
    if example is not None:
        _compare_outputs(model, result, example)
    return result


def find_axes(model: Any, axes: ModelAxes | None, example: Any) -> ModelAxes:
    """Return the axes of a model, from a trace unless they are passed.

    Args:
        model: The model.
        axes: Its axes, or None.
        example: The arguments of a forward, for a trace.

    Raises:
        MergeError: If the axes are unknown and can't be traced.
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


def _list_tensors(model: Any, like: Any = None) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, those of a module without the parts of wrappers.

    Args:
        model: A module, or a state dict.
        like: Another one, whose order of labels the tensors get; None for the model's own.
    """
    if isinstance(model, nn.Module):
        tensors = {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}
    else:
        tensors = {name: each.detach() for name, each in model.items() if isinstance(each, Tensor)}
    if like is not None:
        reorders = find_reorders(like, model, ("the model", "`to`"))
        tensors = {name: reorders[name](each) if name in reorders else each for name, each in tensors.items()}
    # Axes have names without the parts of wrappers, such as compiled modules.
    return {unwrapped_name(name): each for name, each in tensors.items()} if isinstance(model, nn.Module) else tensors


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if not tensor.is_complex() else tensor


def _pair_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], axes: ModelAxes) -> list[AxisTensor]:
    """Return the floating tensors of two models in pairs; raise for missing ones and other shapes."""
    pairs = []
    for name, own in axes.parameters.items():
        if name not in ours or name not in theirs:
            where = "the model" if name not in ours else "`to`"
            raise MergeError(f"{shorten(name)} is missing in {where}; align models of one structure")
        one, two = ours[name], theirs[name]
        if one.shape != two.shape or tuple(one.shape) != tuple(own.shape):
            shapes = (
                f"has shape {tuple(one.shape)} in the model, {tuple(two.shape)} in `to` and {tuple(own.shape)} in axes"
            )
            raise MergeError(f"{shorten(name)} {shapes}; align models of one structure, with its own axes")
        if one.is_complex():
            one, two, own = torch.view_as_real(one), torch.view_as_real(two), _add_parts(own)
        if one.is_floating_point():
            pairs.append(AxisTensor(own, one.to("cpu", torch.float64), two.to("cpu", torch.float64)))
    return pairs


def _add_parts(axes: ParameterAxes) -> ParameterAxes:
    """Return the axes of a complex parameter with one more, for its real and imaginary parts."""
    part = "real and imaginary part"
    return dataclasses.replace(
        axes,
        shape=(*axes.shape, 2),
        dims=(*axes.dims, (part,)),
        uses=(*axes.uses, "kernel"),
        sizes={**axes.sizes, part: 2},
    )


def _compare_outputs(model: nn.Module, result: nn.Module, example: Any) -> None:
    """Raise MergeError if a permuted copy computes something else than the model."""
    outputs = []
    for each in (model, result):
        run = copy_module(each).eval()
        outputs.append(run(*_list_arguments(example)))
    # Sums in another order differ by rounding, which is larger for parameters of half precision.
    eps = max((torch.finfo(each.dtype).eps for each in model.parameters() if each.is_floating_point()), default=0.0)
    coarse = eps > 1e-6
    try:
        torch.testing.assert_close(
            outputs[1], outputs[0], rtol=8 * eps if coarse else 1e-4, atol=8 * eps if coarse else 1e-5
        )
    except AssertionError as error:
        fact = "the permuted copy does not compute what the model computes, so that its axes are not what they were taken for"
        raise MergeError(f"{fact}; look for the axis with moduli.axes.check(model, example): {error}") from error
