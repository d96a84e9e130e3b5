"""`grow` and `shrink`: more or fewer units of an axis of a model, in every tensor that has it; `grow` preserves the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..axes import ModelAxes, trace
from ..labels import Space
from ..labels import Tensor as LabelledTensor
from ..layout import is_sharded, layout_of, recompute_weights, suggest_name, unwrapped_name
from ._growth_check import FunctionCheck, GrowthError, list_arguments, list_held_sizes
from ._module_sizes import list_sizes
from ._resize import ResizeWrites, edit_model, follow_relatives, write_tensors
from ._unit_plan import AxisResize, Compensation, UnitPlanner
from ._unit_requests import expand_names, find_axis, list_labels, plan_growth, plan_shrinking

T = TypeVar("T")
Score = Tensor | Callable[[ModelAxes, Mapping[str, Tensor]], Tensor]


def grow(
    net: T,
    sizes: Mapping[str, int | Sequence[Any]],
    axes: ModelAxes | None = None,
    example: Any = None,
    *,
    how: Literal["split", "zero"] = "split",
    noise: float = 0.1,
    seed: int = 0,
    kwargs: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> T:
    """Give axes of a model more units, in every tensor that has them, so that the model computes the same function; in place.

    New units are copies of others whose outgoing weights are divided among them (Net2Net, Chen, Goodfellow and Shlens 2016), or
    fresh ones with outgoing zeros. Parameters, buffers and the size attributes of torch's layers change together, all or nothing.
    For a particle it is one edit of the species: relatives keep their own values and grow in the same way. An `Optimizer` of the
    model keeps the state of every former entry.

    Axes of outputs and of indices (classes, tokens) get fresh entries, which nothing reads yet; axes of inputs get weights of zero.
    If a normalisation takes statistics over an axis (LayerNorm over a residual stream), only a multiple of its size preserves the
    function, because every unit is then there equally often.

    Args:
        net: A module, which is changed; or a `Population`, whose members all are.
        sizes: For axes of the model by name or pattern (`"blocks.*.head"`), the new number of units; for axes with labels, the
            labels of all units, the present ones included.
        axes: The axes of the model; by default those of `trace` with the example, or those of its labels.
        example: The arguments of a forward: a tensor, or a tuple of arguments. With one, the outputs are compared before and after.
        how: "split" for copies with divided outgoing weights, "zero" for fresh units with outgoing zeros.
        noise: The relative size of differences between the outgoing weights of copies. They add up to zero over the copies of a
            unit, so the function does not change; without noise, copies would have equal gradients for ever.
        seed: The seed of the noise and the fresh values.
        kwargs: Keyword arguments of the forward.
        attributes: Sizes in attributes of the model's own modules, by dotted name: `{"att.heads": 8}`. Those of torch's layers
            are set automatically.
        tolerance: The largest difference of the outputs, relative to the largest one (at least 1). Models of half precision are
            compared in single precision; their divided weights are rounded, so it is at least half of their epsilon.

    Returns:
        The model.

    Raises:
        KeyError: If the model has no such axis.
        ValueError: If a size is smaller than the present one, or the size of an axis is fixed.
        GrowthError: If the grown model would fail or compute something else; nothing is changed.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> x = torch.randn(5, 4)
        >>> before = net(x)
        >>> mo.particles.grow(net, {"0.out": 24}, example=x)
        Sequential(
          (0): Linear(in_features=4, out_features=24, bias=True)
          (1): ReLU()
          (2): Linear(in_features=24, out_features=3, bias=True)
        )
        >>> torch.allclose(net(x), before, atol=1e-6)
        True
    """
    if how not in ("split", "zero"):
        raise ValueError(f"how={how!r}; it is 'split' (copies with divided outgoing weights) or 'zero' (fresh ones)")
    if noise < 0:
        raise ValueError(f"noise={noise}; it is a part of the outgoing weights, at least 0")

    def plan(axes: ModelAxes, labels: Mapping[str, tuple[Any, ...]]) -> list[AxisResize]:
        return [plan_growth(axes, name, size, labels.get(name), how) for name, size in expand_names(axes, sizes)]

    result: T = _resize(net, "grow", plan, axes, example, kwargs, attributes, noise, seed, tolerance)
    return result


def shrink(
    net: T,
    keep: Mapping[str, int | Sequence[Any] | Tensor],
    axes: ModelAxes | None = None,
    example: Any = None,
    *,
    score: Mapping[str, Score] | Score | None = None,
    kwargs: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> T:
    """Keep some units of axes of a model, in every tensor that has them; in place, all or nothing.

    For a particle it is one edit of the species: relatives keep the same units, with their own values. An `Optimizer` of the model
    keeps the state of the entries that stay.

    Args:
        net: A module, which is changed; or a `Population`, whose members all are.
        keep: For axes of the model by name or pattern: the units that stay, by position or (for axes with labels) by label, in
            order; or their number, to keep those with the largest `score`.
        axes: The axes of the model; by default those of `trace` with the example, or those of its labels.
        example: The arguments of a forward: a tensor, or a tuple of arguments. With one, the model is run once after the change.
        score: A number for each unit: a tensor, or a function of the axes and the tensors by name
            that returns one; a mapping from axes to these for several axes. By default the norm of all entries of a unit.
        kwargs: Keyword arguments of the forward.
        attributes: Sizes in attributes of the model's own modules, by dotted name: `{"att.heads": 2}`.

    Returns:
        The model.

    Raises:
        KeyError: If the model has no such axis, or an axis no such label.
        ValueError: If there are no such units, none would stay, or the size of an axis is fixed.
        GrowthError: If the forward of the smaller model fails; nothing is changed.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> mo.particles.shrink(net, {"0.out": 8}, example=torch.zeros(1, 4))[2]
        Linear(in_features=8, out_features=3, bias=True)
        >>> mo.particles.shrink(net, {"0.out": [5, 1]}, example=torch.zeros(1, 4))[0].weight.shape
        torch.Size([2, 4])
    """

    def plan(axes: ModelAxes, labels: Mapping[str, tuple[Any, ...]]) -> list[AxisResize]:
        resizes = []
        for name, units in expand_names(axes, keep):
            axis = find_axis(axes, name, "shrink")
            own = score.get(name) if isinstance(score, Mapping) else score
            resizes.append(plan_shrinking(net, axes, axis.name, axis.size, units, labels.get(name), own))
        return resizes

    result: T = _resize(net, "shrink", plan, axes, example, kwargs, attributes, 0.0, 0, None)
    return result


Plan = Callable[[ModelAxes, Mapping[str, tuple[Any, ...]]], list[AxisResize]]


def _resize(
    net: Any,
    verb: str,
    plan: Plan,
    axes: ModelAxes | None,
    example: Any,
    kwargs: Mapping[str, Any] | None,
    attributes: Mapping[str, Any] | None,
    noise: float,
    seed: int,
    tolerance: float | None,
) -> Any:
    """Resize axes of a model with the first compensation that preserves its function."""
    model: Any = net.copy_model() if hasattr(net, "resize_members") else net
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb}: {type(net).__name__} is neither a module nor a population")
    arguments = list_arguments(example)
    _refuse_wrappers(model, verb)
    follow_relatives(model)
    if axes is None:
        axes = _trace(model, verb, arguments, kwargs)
    tensors = _list_tensors(model, axes, verb)
    resizes = plan(axes, list_labels(model, axes))
    changes = [each for each in resizes if each.changes_units]
    if not changes:
        return net
    check = FunctionCheck(model, changes, axes, arguments, kwargs or {}, verb, tolerance)
    if verb == "grow" and not check.active:
        check.refuse_normalised()
    values, apart = _list_attributes(model, attributes or {}, verb), _list_group_axes(model, axes)
    for attempt in _list_compensations(model, axes, changes, check.active and verb == "grow"):
        planner = UnitPlanner(changes, noise, torch.Generator().manual_seed(seed), attempt, apart)
        make = partial(_write, model, axes, planner, tensors, values)
        if check.attempt(partial(edit_model, model, make, check)):
            if model is not net:
                net.resize_members(model, planner.maps)
            return net
    raise GrowthError(check.explain(list_held_sizes(model, axes, changes))) from check.find_cause()


def _trace(net: nn.Module, verb: str, arguments: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> ModelAxes:
    if not arguments and not kwargs and not layout_of(net).labelled:
        raise ValueError(
            f"{verb}: axes are found by a forward: pass example=inputs, or axes=mo.axes.trace(net, inputs). With an example the "
            "outputs are compared, too"
        )
    return trace(net, *arguments, kwargs=kwargs)


def _refuse_wrappers(net: nn.Module, verb: str) -> None:
    """Raise GrowthError for models that are sharded, or inside DistributedDataParallel."""
    for path, module in net.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise GrowthError(
                f"{verb}: {path or 'the model'!r} is a DistributedDataParallel, which knows the parameters it was made with; "
                "change the module inside it in every process (with one seed), and wrap it again"
            )
    for name, param in net.named_parameters():
        if is_sharded(param):
            raise GrowthError(
                f"{verb}: {name!r} is sharded over processes; change the model before it is sharded, in every process with one seed"
            )


def _list_tensors(net: nn.Module, axes: ModelAxes, verb: str) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, and check that the axes belong to it."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, tensor in tensors.items():
        try:
            shape = axes.of(name).shape
        except KeyError as error:
            raise ValueError(f"{verb}: the axes are of another model: they have no {name!r}; trace it again") from error
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{verb}: {name!r} has shape {tuple(tensor.shape)}, and the axes are of shape {shape}; trace the model again"
            )
    return tensors


def _list_attributes(net: nn.Module, attributes: Mapping[str, Any], verb: str) -> list[tuple[nn.Module, str, Any]]:
    """Return the modules, names and new values of plain attributes that are given by dotted name."""
    modules, writes = dict(net.named_modules()), []
    for name, value in attributes.items():
        path, _, last = name.rpartition(".")
        if path not in modules or last not in modules[path].__dict__ or isinstance(value, nn.Module | Tensor):
            names = [f"{p}.{key}".lstrip(".") for p, each in modules.items() for key in each.__dict__ if key[0] != "_"]
            raise KeyError(f"{verb}: the model has no plain attribute {name!r}.{suggest_name(name, names)}")
        writes.append((modules[path], last, value))
    return writes


def _list_compensations(
    net: nn.Module, axes: ModelAxes, resizes: Sequence[AxisResize], checked: bool
) -> Iterator[Compensation]:
    """Yield the compensations to try, the likeliest first; only the first without a check.

    Raises:
        GrowthError: If a choice is only possible with a check.
    """
    copied = [each for each in resizes if each.mode == "copy"]
    names = {each.name for each in copied}
    parameters = [axes.of(name) for name, _ in net.named_parameters()]
    tied = any(own.role == "tied" and names & set(own.sizes) for own in parameters)
    # A weight that both makes the axis and reads it can't be divided; the scale of a normalisation before it can.
    norms = _list_scales(net, axes, names) if tied else []
    if tied and not checked:
        raise GrowthError(
            "grow: an embedding is tied to a head, which can't be divided among copies, and only an example shows which "
            f"normalisation can be in its place ({', '.join(map(repr, norms)) or 'there is none'}): pass example=inputs"
        )
    yield from (Compensation(norm=path) for path in reversed(norms))
    yield Compensation()
    # A softmax over the axis divides by the number of copies itself.
    uniform = [each.name for each in copied if each.uniform] if checked else []
    yield from (Compensation(frozenset({name})) for name in uniform)
    if len(uniform) > 1:
        yield Compensation(frozenset(uniform))


def _list_scales(net: nn.Module, axes: ModelAxes, names: Set[str]) -> list[str]:
    """Return the modules all of whose parameters are vectors along some axes, such as normalisations, by path."""
    paths = []
    for path, module in net.named_modules():
        params = [name for name, param in module._parameters.items() if param is not None]
        own = [axes.of(f"{path}.{name}".lstrip(".")) for name in params]
        if own and all(len(each) == 1 and names & set(each.sizes) for each in own):
            paths.append(path)
    return paths


def _list_group_axes(net: nn.Module, axes: ModelAxes) -> set[tuple[str, str]]:
    """Return the pairs of weight and group axis of transposed convolutions, which have groups among their inputs."""
    groups = set()
    for path, module in net.named_modules():
        count = getattr(module, "groups", 1) if getattr(module, "transposed", False) else 1
        name = f"{path}.weight".lstrip(".")
        if count > 1 and "weight" in module._parameters:
            own, product = axes.of(name), 1
            for factor in own.dims[0]:
                if product < count and isinstance(factor, str):
                    groups.add((own.name, factor))
                    product *= own.sizes[factor]
    return groups


def _write(
    net: nn.Module,
    axes: ModelAxes,
    planner: UnitPlanner,
    tensors: Mapping[str, Tensor],
    attributes: Sequence[tuple[nn.Module, str, Any]],
) -> ResizeWrites:
    """Write the resized tensors and sizes into the modules of a model, and return what was written."""
    replaced = {}
    for name, before in tensors.items():
        unit_map = planner.plan(name, axes.of(name), before)
        if unit_map is not None:
            after = unit_map.resize(before)
            if isinstance(before, nn.Parameter):
                after = nn.Parameter(after, requires_grad=before.requires_grad)
            replaced[id(before)] = before, after, unit_map
    write_tensors(net, replaced)
    recompute_weights(net)
    written = list(attributes)
    for path, module in net.named_modules():
        sizes = list_sizes(module, unwrapped_name(path), axes, planner.resizes)
        written += [(module, name, value) for name, value in sizes.items()]
    for module, name, value in written:
        module.__dict__[name] = value
    labels = _relabel(net, axes, planner.resizes)
    for module, name, record in labels:
        module.__dict__["_labelled"][name] = record
    return ResizeWrites(replaced, written, labels, "; ".join(each.describe() for each in planner.resizes.values()))


def _relabel(net: nn.Module, axes: ModelAxes, resizes: Mapping[str, AxisResize]) -> list[tuple[nn.Module, str, Any]]:
    """Return the modules, names and new records of labelled tensors whose labels change."""
    changed = []
    for path, module in net.named_modules():
        for name, (stored, own) in module.__dict__.get("_labelled", {}).items():
            full = f"{path}.{stored}".lstrip(".")
            data = module._parameters.get(stored, module._buffers.get(stored))
            dims = axes.of(full).dims if data is not None else ()
            labelled = [
                (axis, resizes[factors[0]])
                for axis, factors in enumerate(dims)
                if len(factors) == 1 and isinstance(factors[0], str) and factors[0] in resizes
                if resizes[factors[0]].labels is not None
            ]
            if not labelled or data is None:
                continue
            spaces = [
                Space(size if space is None else space, name=word)
                for size, space, word in zip(data.shape, own.spaces, own.names, strict=True)
            ]
            for axis, resize in labelled:
                spaces[axis] = Space(resize.labels or (), name=own.names[axis])
            changed.append((module, name, (stored, LabelledTensor(data.detach(), spaces)._axes)))
    return changed
