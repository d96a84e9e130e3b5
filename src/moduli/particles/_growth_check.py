"""Checks that a resized model runs and computes the same function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._torch import pytree
from ..axes import INDEXED, ModelAxes, measure_difference
from ..layout import call_with_tensors
from ._module_sizes import NORMALISATIONS
from ._unit_plan import AxisResize
from .errors import StructureError


class GrowthError(StructureError):
    """A resized model would not run, or would compute something else. The model was not changed.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
        >>> mo.particles.grow(net, {"0.out": 6}, example=torch.randn(3, 2))
        Traceback (most recent call last):
        ...
        moduli.particles._growth_check.GrowthError: grow: with '0.out' of 6 units ...
    """


_HALF = (torch.float16, torch.bfloat16)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


class FunctionCheck:
    """Compares the outputs of a resized model with those before.

    Args:
        net: The model before it is resized.
        resizes: The axes that change.
        axes: The axes of the model.
        arguments: Example arguments of `forward`; without any, the model is not run.
        kwargs: Example keyword arguments of `forward`.
        verb: The operation, for errors.
        tolerance: The largest accepted difference, relative to the largest output; None to check only that the model runs.
            It is at least half of the epsilon of parameters of half precision.

    Attributes:
        active: Whether outputs are compared.
    """

    def __init__(
        self,
        net: nn.Module,
        resizes: Sequence[AxisResize],
        axes: ModelAxes,
        arguments: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        verb: str,
        tolerance: float | None,
    ) -> None:
        self.net, self.resizes, self.verb, self.tolerance = net, resizes, verb, tolerance
        half = [torch.finfo(each.dtype).eps for _, each in self._list_tensors() if each.dtype in _HALF]
        if half and tolerance is not None:
            self.tolerance = max(tolerance, max(half) / 2)  # weights that are divided among copies are rounded
        self._axes, self._arguments, self._kwargs = axes, arguments, kwargs
        self._runs = bool(arguments or kwargs) and all(self._fits_example(each) for each in resizes)
        self.active = self._runs and tolerance is not None
        self._widens = True
        self._expected = self._run() if self.active else []
        self._failures: list[_Difference] = []

    def _fits_example(self, resize: AxisResize) -> bool:
        """Whether the example arguments stay valid with the same meaning: not if inputs or indices change."""
        reasons, count = self._axes[resize.name].reasons, min(resize.before, resize.after)
        same = bool((resize.source[:count] == torch.arange(count)).all()) and resize.after >= resize.before
        return self._axes[resize.name].growth != "input" and (same or INDEXED not in reasons)

    def __call__(self) -> None:
        """Raise if the model does not run, or computes something else."""
        if not self._runs:
            return
        try:
            outputs = self._run()
        except Exception as error:
            raise _Difference(f"the forward fails then, with {type(error).__name__}: {error}", float("inf")) from error
        difference = self._compare(outputs) if self.tolerance is not None else 0.0
        if self.tolerance is not None and not difference <= self.tolerance:
            raise _Difference(f"the output differs by {difference:.1e}, relative to its size", difference)

    def attempt(self, apply: Callable[[], None]) -> bool:
        """Return whether a change passes this check; store the reason if not."""
        try:
            apply()
        except _Difference as failure:
            self._failures.append(failure)
            return False
        return True

    def refuse_normalised(self) -> None:
        """Raise if a normalisation takes statistics over units that are not all copied equally often, without running the model.

        Raises:
            GrowthError: If one does.
        """
        norms = self._list_norms()
        if norms:
            what = ", ".join(f"{each.name!r} of {each.after} units" for each in self.resizes)
            raise GrowthError(
                f"{self.verb}: with {what} the function changes. Nothing was changed.{_explain_norm(norms[0])}"
            )

    def find_cause(self) -> BaseException | None:
        """Return the exception of `forward` in the attempt with the smallest difference, if there was one."""
        return min(self._failures, key=lambda each: each.size).__cause__

    def explain(self, sizes: Mapping[str, Any]) -> str:
        """Return the error text for a resize of which no attempt has passed.

        Args:
            sizes: Plain attributes of the model that equal the size of an axis, by name.
        """
        failure = min(self._failures, key=lambda each: each.size)
        what = ", ".join(f"{each.name!r} of {each.after} units" for each in self.resizes)
        text = f"{self.verb}: with {what} {failure}. Nothing was changed."
        norms = self._list_norms()
        hint = ""
        if sizes:
            listed = ", ".join(f"{name!r} is {value}" for name, value in list(sizes.items())[:4])
            hint = f" These have the old size: {listed}; pass attributes={{name: new size}} where they have to change"
        if failure.size == float("inf"):
            text += (
                " Sizes that the model's own code holds, and axes that have to stay equal, must change with it." + hint
            )
        elif norms:
            text += _explain_norm(norms[0])
        else:
            text += (
                " An operation combines these units in another way than by a product with weights: a softmax, a top-k, a sum, or "
                f"the scale of attention.{hint}"
            )
        return text

    def _list_norms(self) -> list[str]:
        names = {each.name for each in self.resizes if not (each.uniform and each.mode == "copy")}
        return [
            path
            for path, module in self.net.named_modules()
            if isinstance(module, NORMALISATIONS) and module.weight is not None
            if names & set(self._axes.of(f"{path}.weight".lstrip(".")).sizes)
        ]

    def _run(self) -> list[Tensor]:
        """Return the outputs for the example; of a model of half precision in single precision, where rounding hides no change."""
        half = {name: each.float() for name, each in self._list_tensors() if each.dtype in _HALF}
        if half and self._widens:
            arguments, kwargs = pytree.tree_map_only(Tensor, _widen, (self._arguments, dict(self._kwargs)))
            try:
                return run_example(partial(call_with_tensors, self.net, half), (arguments, kwargs), {}, self.net)
            except RuntimeError:  # the model's own code converts to half precision, which does not mix with single
                self._widens = False
        return run_example(self.net, self._arguments, self._kwargs)

    def _list_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.net.named_parameters()
        yield from self.net.named_buffers()

    def _compare(self, outputs: Sequence[Tensor]) -> float:
        """Return the largest difference of the outputs, without the entries of new units."""
        worst = 0.0 if len(outputs) == len(self._expected) else float("inf")
        for before, after in zip(self._expected, outputs, strict=False):
            for axis, (old, new) in enumerate(zip(before.shape, after.shape, strict=False)):
                resize = next((r for r in self.resizes if (r.before, r.after) == (old, new) and r.mode != "copy"), None)
                if old != new and resize is not None:
                    is_old = torch.ones(new, dtype=torch.bool)
                    is_old[resize.fresh] = False
                    places = is_old.nonzero().flatten().to(after.device)
                    after = after.index_select(axis, places)
                    before = before.index_select(axis, resize.source.to(before.device)[places])
            if before.shape != after.shape:
                return float("inf")
            worst = max(worst, measure_difference([before], [after]))
        return worst


def _explain_norm(path: str) -> str:
    return (
        f" {path!r} takes statistics over these units, which stay the same only if every unit is copied equally often: use "
        "how='split' and a multiple of the size"
    )


class _Difference(Exception):
    """A failed check: the reason, and the difference of the outputs (inf if the model does not run)."""

    def __init__(self, reason: str, size: float) -> None:
        super().__init__(reason)
        self.size = size


def list_arguments(example: Any) -> tuple[Any, ...]:
    """Return an example, which is a tensor, a tuple of arguments or None, as a tuple of arguments."""
    if example is None:
        return ()
    return example if isinstance(example, tuple) else (example,)


def run_example(
    function: Callable[..., Any], arguments: tuple[Any, ...], kwargs: Mapping[str, Any], net: nn.Module | None = None
) -> list[Tensor]:
    """Run a model in evaluation mode, and return copies of the tensors among its outputs.

    Args:
        function: The model, or a function that runs it.
        arguments: The arguments of the function.
        kwargs: Its keyword arguments.
        net: The model, if `function` is another one.
    """
    model = cast(nn.Module, function) if net is None else net
    with evaluate(model), torch.no_grad():
        result = function(*arguments, **kwargs)
    return [leaf.clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def evaluate(net: nn.Module) -> Iterator[None]:
    """Run a block with a model in evaluation mode and torch's random numbers seeded with 0, then restore both."""
    flags = [(module, module.training) for module in net.modules()]
    try:
        for module, _ in flags:
            module.__dict__["training"] = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        for module, flag in flags:
            module.__dict__["training"] = flag


def list_held_sizes(net: nn.Module, axes: ModelAxes, resizes: Sequence[AxisResize]) -> dict[str, Any]:
    """Return the integer attributes of modules that equal the size of a resized axis, or of an axis that contains it.

    Attributes of torch's own modules, whose meaning is known, are left out.

    Args:
        net: The model.
        axes: Its axes.
        resizes: The axes that change.
    """
    sizes: set[int] = set()
    for resize in resizes:
        sizes.add(resize.before)
        sizes |= {axes.of(place).shape[axis] for place, axis in axes[resize.name].places}
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in net.named_modules()
        for name, value in module.__dict__.items()
        if type(value) is int and value in sizes and value > 1 and not name.startswith("_")
        if type(module).__module__.partition(".")[0] != "torch"
    }
