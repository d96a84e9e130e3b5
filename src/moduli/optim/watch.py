"""The numbers of an optimizer's last step as one flat dictionary, for logs and dashboards.

Norms of the results of pointwise links are computed inside their pass (`kernels.record_square`); those of other links by
one foreach norm of their update. Nothing is computed without a watch, and values stay on their device until they are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..kernels import PartialSquares
from ..layout import public_name, select
from ._vectors import as_real

if TYPE_CHECKING:
    from . import Module, Objective, Optimizer
    from .slots import Slots

__all__ = ["Watch"]

By = Literal["group", "parameter"] | str | Mapping[str, str] | Sequence[str] | None
# Sums of squares: lists of tensors, each with one vector that has a number for each tensor.
_Squares = list[tuple[Sequence[Tensor], Tensor]]


class Watch:
    """The numbers of an optimizer's last step; created by `Optimizer.watch`, called to read them.

    Args:
        optimizer: The optimizer.
        by: The parts with separate norms, besides all parameters; see `Optimizer.watch`.
        history: Whether the numbers of every step are stored.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = mo.Optimizer([w], m.ClipNorm(1.0), m.LR(0.5))
        >>> log = opt.watch()
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum() / 2))
        >>> {name: round(value, 2) for name, value in log().items()}
        {'step': 1, 'loss': 12.5, 'evaluations': 1, 'lr': 0.5, 'grad_norm': 5.0, 'update_norm': 0.5, 'param_norm': 5.0, \
'update_ratio': 0.1, 'norm/0.ClipNorm': 1.0, 'gain/0.ClipNorm': 0.2, 'clipped/0.ClipNorm': 1.0, 'norm/1.LR': 0.5, 'gain/1.LR': 0.5}
    """

    def __init__(self, optimizer: Optimizer, by: By, history: bool = False) -> None:
        #: The numbers of every step, or None if only those of the last one are stored.
        self.history: list[dict[str, float]] | None = [] if history else None
        self._optimizer = weakref.ref(optimizer)
        self._parts = find_parts(optimizer, by)
        self._begin()

    # ------------------------------------------------------------------ during a step

    def _begin(self) -> None:
        """Clear the numbers of the last step."""
        #: For each link, by its identity, the squares of its input and of its result.
        self._links: dict[int, tuple[Module, _Squares, _Squares]] = {}
        #: The squares of gradient, update and parameters that belong to no link.
        self._named: dict[str, _Squares] = {}
        #: For each fused run its links, parameters and squares, and whether it moved the parameters.
        self._runs: list[tuple[Sequence[Module], Sequence[Tensor], Tensor | PartialSquares, bool]] = []
        self._numbers: dict[str, Any] = {}

    def start(self, optimizer: Optimizer) -> None:
        """Begin a step: clear the numbers of the last one."""
        self._begin()
        self._evaluations = optimizer.num_evaluations

    def add_run(
        self, links: Sequence[Module], params: Sequence[Tensor], squares: Tensor | PartialSquares | None, moves: bool
    ) -> None:
        """Store the sums of a fused run: of its input, after each link, and of the parameters if it moves them.

        Args:
            links: The links of the run.
            params: The parameters that it ran over.
            squares: The sums by parameter; None if the pass computed none, as on the meta device.
            moves: Whether it moved the parameters.
        """
        if squares is not None:
            self._runs.append((links, params, squares, moves))

    def _read_runs(self) -> None:
        """Sort the sums of fused runs by link; called when the numbers are read, not in the step."""
        for links, params, squares, moves in self._runs:
            columns = (squares.read() if isinstance(squares, PartialSquares) else squares).unbind(1)
            for k, link in enumerate(links):
                self.add_link(link, [(params, columns[k])], [(params, columns[k + 1])])
            if moves:
                self._named.setdefault("param", []).append((params, columns[-1]))
        self._runs = []

    def add_link(self, link: Module, before: _Squares, after: _Squares) -> None:
        """Store the sums of squares of the update before and after a link.

        Args:
            link: The link.
            before: The sums of its input; empty if there was no update before.
            after: The sums of its result.
        """
        _, first, last = self._links.setdefault(id(link), (link, [], []))
        first += before
        last += after

    def finish(self, optimizer: Optimizer, objective: Objective, loss: Tensor | None) -> None:
        """Store the loss, the settings and the norms that no pass has computed.

        Args:
            optimizer: The optimizer.
            objective: The objective at the end of the step.
            loss: The loss.
        """
        params, runs = objective.params, self._runs
        if not objective.skip_update and objective.updates is not None:
            self._named["update"] = [(params, sum_squares(objective.updates))]
        first = optimizer.modules[0]
        has_grad_norm = (runs and runs[0][0][0] is first) or (id(first) in self._links and self._links[id(first)][1])
        if objective.grads is not None and not has_grad_norm:
            self._named["grad"] = [(params, sum_squares(objective.grads))]
        if not any(moves for *_, moves in runs):
            self._named["param"] = [(params, sum_squares([param.detach() for param in params]))]
        self._rates = [group.get("lr") for group in optimizer._group_list]
        self._numbers = {"step": optimizer.current_step, "loss": loss}
        self._numbers["evaluations"] = optimizer.num_evaluations - self._evaluations
        if self.history is not None:
            self.history.append(self())

    # ------------------------------------------------------------------ reading

    def __call__(self) -> dict[str, float]:
        """Return the numbers of the last step; none before the first.

        "step", "loss", "lr", "evaluations", "grad_norm", "update_norm" (by how much the parameters moved), "param_norm",
        "update_ratio" (of these two). For each link "norm/PATH" (of the update after it), "gain/PATH" (that norm over the norm
        before it: the trust ratio of LAMB, the factor of a clip) and, for links that clip, "clipped/PATH" (the fraction of
        parameters whose update it reduced). "state/PATH/KEY" for numbers in the global state of links (step sizes,
        radii, Prodigy's d). With `by`, norms have a further part, "grad_norm/decoder.*".
        """
        optimizer = self._optimizer()
        if optimizer is None or not self._numbers:
            return {}
        self._read_runs()
        numbers = {name: value for name, value in self._numbers.items() if value is not None}
        numbers |= self._read_rates()
        paths = {id(link): path for path, link in optimizer._links}
        numbers |= self._read_norms(optimizer, None, "", paths)
        for label, names in self._parts(optimizer).items():
            numbers |= self._read_norms(optimizer, names, f"/{label}", paths)
        for path, link in optimizer._links:
            for key, value in link.global_state.items():
                if _is_number(value):
                    numbers[f"state/{path}/{key}"] = value
        return {name: _read(value) for name, value in numbers.items()}

    def _read_rates(self) -> dict[str, Any]:
        """Return the learning rates of the step: "lr" where all groups have one, otherwise "lr/0", "lr/1", ..."""
        step = self._numbers["step"] - 1
        rates = [rate(step) if callable(rate) else rate for rate in self._rates]
        read = {i: _read(rate) for i, rate in enumerate(rates) if _is_number(rate)}
        if len(set(read.values())) == 1 and len(read) == len(rates):
            return {"lr": read[0]}
        return {f"lr/{i}": rate for i, rate in read.items()}

    def _read_norms(
        self, optimizer: Optimizer, names: frozenset[str] | None, ending: str, paths: Mapping[int, str]
    ) -> dict[str, float]:
        """Return the norms over some of the parameters, or all of them.

        Args:
            optimizer: The optimizer.
            names: The names of the parameters; None for all.
            ending: The end of the names of the numbers.
            paths: The paths of the links, by their identity.
        """
        find_norm = partial(_find_norm, names=names, slots=optimizer.binding.slots)
        last = self._links.get(id(optimizer.modules[-1]))
        update = self._named.get("update", [] if last is None else last[2])
        first = self._links.get(id(optimizer.modules[0]))
        grads = self._named.get("grad", [] if first is None else first[1])
        norms = {"grad": find_norm(grads), "update": find_norm(update), "param": find_norm(self._named["param"])}
        out = {f"{name}_norm{ending}": norm for name, norm in norms.items()}
        if not grads:
            del out[f"grad_norm{ending}"]
        out[f"update_ratio{ending}"] = norms["update"] / norms["param"] if norms["param"] else float("nan")
        for key, (link, before, after) in self._links.items():
            path = paths.get(key)
            if path is None:
                continue
            norm_before, norm_after = find_norm(before), find_norm(after)
            out[f"norm/{path}{ending}"] = norm_after
            if not before:
                continue
            out[f"gain/{path}{ending}"] = norm_after / norm_before if norm_before else float("nan")
            if link.clips and names is None:
                out[f"clipped/{path}"] = _count_smaller(before, after)
        return out

    def close(self) -> None:
        """Stop recording."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.binding.watch is self:
            optimizer.binding.watch = None
            optimizer.binding.writes.add()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_watched(link: Module, objective: Objective, run: Callable[[Objective], Objective]) -> Objective:
    """Run a link unfused and return the objective; a watch, if there is one, stores the norms before and after it.

    Args:
        link: The link.
        objective: The objective.
        run: Runs the link.
    """
    watch = link.settings.binding.watch
    if watch is None:
        return run(objective)
    has_update = objective.updates is not None or objective.grads is not None
    before = [sum_squares(objective.peek_updates())] if has_update else []
    result: Any = run(objective)
    updates = getattr(result, "updates", None)
    if updates is not None:
        params = result.params
        watch.add_link(link, [(params, squares) for squares in before], [(params, sum_squares(updates))])
    return result  # type: ignore[no-any-return]


def find_parts(optimizer: Optimizer, by: By) -> Callable[[Optimizer], dict[str, frozenset[str]]]:
    """Return a function that maps each part to the current names of its parameters.

    Raises:
        ValueError: A pattern matches no parameter.
    """
    if by is None:
        return lambda optimizer: {}
    if optimizer.population is not None:
        raise ValueError("watch: a population is one matrix for its links, so that by= can't tell parameters apart")
    if by == "group":
        return lambda optimizer: {
            f"group{i}": frozenset(filter(None, map(optimizer.binding.slots.find_name, group["params"])))
            for i, group in enumerate(optimizer.param_groups)
        }
    if by == "parameter":
        return lambda optimizer: {public_name(name): frozenset([name]) for name in _list_names(optimizer)}
    entries = [by] if isinstance(by, str) else by
    patterns = dict(entries) if isinstance(entries, Mapping) else {pattern: pattern for pattern in entries}

    def find(optimizer: Optimizer) -> dict[str, frozenset[str]]:
        names = _list_names(optimizer)
        return {label: frozenset(names[i] for i in select(pattern, names)) for label, pattern in patterns.items()}

    find(optimizer)  # raises for a pattern that matches nothing
    return find


def _find_norm(squares: _Squares, names: frozenset[str] | None, slots: Slots) -> float:
    """Return the norm of tensors from the sums of their squares.

    Args:
        squares: Parameters, and the sum of squares of the tensor of each.
        names: The names of the parameters to include; None for all.
        slots: The slots, which have the names of the parameters.
    """
    total = 0.0
    for params, values in squares:
        if names is None:
            total += values.sum().item()
        else:
            chosen = [i for i, param in enumerate(params) if slots.find_name(param) in names]
            total += values[chosen].sum().item() if chosen else 0.0
    return float(total**0.5)


def _list_names(optimizer: Optimizer) -> list[str]:
    names = (optimizer.binding.slots.find_name(param) for param in optimizer.list_params())
    return [name for name in names if name is not None]


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each tensor, in double precision where the device has it, by one foreach norm."""
    real = [as_real(tensor.detach()) for tensor in tensors]
    wide = torch.float32 if real and real[0].device.type == "mps" else torch.float64
    norms = torch._foreach_norm([each.float() if each.dtype.itemsize < 4 else each for each in real])
    return torch.stack([norm.to(wide) for norm in norms]).square()


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _read(value: Any) -> float:
    number = value.mean().item() if isinstance(value, Tensor) else value
    return number if isinstance(number, int) else float(number)


def _count_smaller(before: _Squares, after: _Squares) -> float:
    """Return the fraction of tensors whose norm a link made smaller."""
    smaller = [(last < first * (1 - 1e-5)).double() for (_, first), (_, last) in zip(before, after, strict=True)]
    every = torch.cat(smaller) if smaller else torch.zeros(0)
    return float(every.mean().item()) if every.numel() else 0.0
