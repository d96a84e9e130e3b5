"""`trace`: the axes of a model, from one forward on tensors without values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import open_fake_mode, pytree
from ..layout import call_with_tensors, layout_of, unwrapped_name
from . import _rules_index, _rules_layers, _rules_views  # noqa: F401 - registers the rules
from ._atoms import LABELLED, OUTPUT
from ._labelled import list_labelled
from ._model_axes import ModelAxes
from ._result import collect_axes
from ._tracer import Traced, Tracer


def trace(
    net: nn.Module,
    *example: Any,
    names: Mapping[str, str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    fake: bool = True,
) -> ModelAxes:
    """Return the axes of a model: which axis of which parameter is the same set of units.

    One forward runs on tensors without values, and every operation pairs the axes of its tensors. Axes of inputs and outputs,
    and those that reach an operation without a rule, are fixed; permuting the units of the others leaves the function unchanged.
    Control flow is traced as it runs with this example, in the present mode (training or evaluation) of the model.

    Args:
        net: The model; it is not changed.
        *example: The arguments of a forward; only their shapes and dtypes matter. Without any, the axes of a module with
            labelled tensors come from their labels: axes with one name and equal labels are one axis, and so are axes with one
            name in one module. All are then fixed, because only a forward shows which are free.
        names: Names of axes by pattern of parameter names, in the notation of einops: `{"*.qkv.weight": "(qkv=3 head=4 size)
            model"}`. They replace the traced names, and split an axis that is traced as one.
        kwargs: Keyword arguments of the forward.
        output: A function from the result of the forward to the tensors that count as output; by default every tensor.
        fake: Whether to run without values. False runs the forward with them, for models that branch on values.

    Returns:
        The axes.

    Raises:
        ValueError: If a name matches no parameter, or has other sizes than the parameter.
        RuntimeError: If the forward needs the values of tensors; pass `fake=False`.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> print(mo.axes.trace(net, torch.zeros(1, 4)))
        parameter  axes            role
        0.weight   out=16 in=4     input
        0.bias     out=16          vector
        2.weight   out=3 0.out=16  output
        2.bias     out=3           vector
        <BLANKLINE>
        axis       size  where
        0.out        16  free: 0.weight 0, 0.bias 0, 2.weight 1
        2.out         3  fixed, an output: 2.weight 0, 2.bias 0
        0.in          4  fixed, an input: 0.weight 1
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"axes.trace: {type(net).__name__} is no nn.Module; wrap a function in one")
    labels = None if example or kwargs else from_labels(net, names)
    if labels is not None:
        return labels
    tracer = Tracer()
    parameters = run_forward(tracer, net, example, kwargs or {}, output, fake)
    return collect_axes(tracer, parameters, _list_buffers(net), layout_of(net), names or {})


def from_labels(net: nn.Module, names: Mapping[str, str] | None = None) -> ModelAxes | None:
    """Return the axes of a module according to the labels of its tensors; None for a module without labelled tensors.

    Args:
        net: The module.
        names: Names of axes by pattern, as in `trace`.

    Example:
        >>> import torch, moduli as mo
        >>> class Gain(mo.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gain = mo.tensor(torch.ones(2), channel=["left", "right"])
        >>> mo.axes.from_labels(Gain()).of("gain"), mo.axes.from_labels(torch.nn.Linear(2, 2))
        ((channel=2), None)
    """
    layout = layout_of(net)
    if not list_labelled(layout):
        return None
    tracer = Tracer()
    parameters = enter_parameters(tracer, dict(_list_stored(net)))
    for traced in parameters.values():
        for dim in traced.dims:
            tracer.atoms.fix(dim, LABELLED)
    return collect_axes(tracer, parameters, _list_buffers(net), layout, names or {})


def _list_buffers(net: nn.Module) -> set[str]:
    return {unwrapped_name(name) for name, _ in net.named_buffers()}


def _list_stored(net: nn.Module) -> list[tuple[str, Tensor]]:
    return [*net.named_parameters(), *net.named_buffers()]


def enter_parameters(tracer: Tracer, tensors: Mapping[str, Tensor]) -> dict[str, Traced]:
    """Give parameters and buffers new axes, and return these by names without the parts of wrappers."""
    return {unwrapped_name(name): tracer.enter_parameter(unwrapped_name(name), each) for name, each in tensors.items()}


def run_forward(
    tracer: Tracer,
    net: nn.Module,
    example: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Callable[[Any], Any] | None,
    fake: bool,
) -> dict[str, Traced]:
    """Run a forward under the tracer, and return the axes of the parameters and buffers by name.

    Args:
        tracer: The tracer.
        net: The model.
        example: The arguments of the forward.
        kwargs: Its keyword arguments.
        output: Selects the outputs from its result; None for every tensor.
        fake: Whether to run without values.
    """
    mode = open_fake_mode() if fake else None
    with _restore_attributes(net), _avoid_fused_layers(net), torch.no_grad(), mode or contextlib.nullcontext():
        convert = _copy if mode is None else _drop_numbers
        tensors = {name: convert(tensor) for name, tensor in _list_stored(net)}
        arguments, keywords = pytree.tree_map_only(Tensor, convert, (tuple(example), dict(kwargs)))
        parameters = enter_parameters(tracer, tensors)
        for leaf in pytree.tree_leaves((arguments, keywords)):
            if isinstance(leaf, Tensor):
                tracer.enter_input(leaf)
        with tracer, _explain_data_dependence(fake):
            result = call_with_tensors(net, tensors, arguments, keywords)
            result = result if output is None else output(result)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs:
            raise ValueError("axes.trace: the forward returns no tensor; choose one with output=lambda result: ...")
        tracer.replay(outputs)
        for leaf in outputs:
            tracer.fix_output(leaf, OUTPUT)
    tracer.finish(parameters)
    return parameters


def _drop_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor without values of the same shape and dtype; called in a fake mode."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@contextlib.contextmanager
def _restore_attributes(net: nn.Module) -> Iterator[None]:
    """Restore plain attributes of modules, such as tables that a forward stores, which would be without values."""
    modules = list(net.modules())
    before = [(module.__dict__, dict(module.__dict__)) for module in modules]
    try:
        yield
    finally:
        for attributes, values in before:
            for name in [name for name in attributes if name not in values]:
                del attributes[name]
            attributes.update({name: value for name, value in values.items() if attributes.get(name) is not value})


@contextlib.contextmanager
def _avoid_fused_layers(net: nn.Module) -> Iterator[None]:
    """Make attention layers and recurrent ones run as products and pointwise operations, which have rules."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.ExitStack() as stack:
            if any(isinstance(module, nn.RNNBase) for module in net.modules()):
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # setting the flags warns about TF32 on absent devices
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _explain_data_dependence(fake: bool) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if fake and type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            raise RuntimeError(
                f"axes.trace: the forward needs the values of tensors ({error}); trace with fake=False, which runs it with numbers"
            ) from error
        raise
