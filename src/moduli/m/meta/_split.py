"""Different links for different parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...layout import Guard, check_pattern, match_name
from ...optim import Across, Chain, Chainable, Module, Objective, Optimizer
from ...optim import step as run

Value = TypeVar("Value")
Filter = Callable[..., bool] | Iterable[Tensor] | torch.nn.Module | str


class Split(Module):
    """Runs one chain on the parameters that pass a filter and another on the rest.

    Args:
        filter: Which parameters: a function of a tensor, or of a tensor, its name and the module that owns it (each None
            where the optimizer was not given a module); tensors; an `nn.Module` (its parameters); or a pattern of names
            ("*.bias", several separated by spaces) for an optimizer that knows names.
        true: Links for those that pass; None leaves their update as it is.
        false: Links for the rest; None leaves their update as it is.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 2)
        >>> opt = mo.Optimizer(net, m.Split(lambda p: p.dim() == 2, m.LR(0.1), m.LR(0.0)))
        >>> before = net.bias.detach().clone()
        >>> _ = opt.step(mo.closure(lambda: net(torch.ones(1, 2)).sum()))
        >>> torch.equal(net.bias, before)
        True
    """

    divides_params = True
    across = Across.NOTHING
    differentiable = True
    capturable = True
    needs = frozenset()
    members = True

    def __init__(self, filter: Filter, true: Chainable | None = None, false: Chainable | None = None) -> None:
        super().__init__()
        if true is None and false is None:
            raise ValueError("Split: give links for the parameters that pass (true), for the rest (false), or both")
        self.set_child("true", true)
        self.set_child("false", false)
        if isinstance(filter, torch.nn.Module):
            filter = list(filter.parameters())
        elif isinstance(filter, Tensor):
            filter = [filter]
        elif not isinstance(filter, str) and not callable(filter):
            filter = list(filter)
        self.filter = filter
        self._arguments = _count_arguments(filter) if callable(filter) else 0
        self._owners: dict[Tensor, torch.nn.Module] | None = None

    def attached(self, optimizer: Optimizer) -> None:
        """Raise UnknownNameError if a pattern matches no parameter of the optimizer."""
        slots = optimizer.binding.slots
        names = [name for name in map(slots.find_name, optimizer.list_params()) if name is not None]
        for pattern in self.filter.split() if isinstance(self.filter, str) else ():
            check_pattern(pattern, names, owner="Split: the optimizer")
        if hasattr(self.filter, "check_names"):
            self.filter.check_names(names)

    def replace_params(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Also put the new parameters into the branch of the old ones."""
        super().replace_params(replaced)
        if isinstance(self.filter, list):
            self.filter = [replaced.get(tensor, tensor) for tensor in self.filter]

    def _find_owner(self, param: Tensor, name: str | None, model: Any) -> torch.nn.Module | None:
        """Return the module that has a parameter; for the stacked parameter of a population that of its template."""
        if isinstance(model, torch.nn.Module):
            if self._owners is None or param not in self._owners:
                self._owners = {own: module for module in model.modules() for own in module.parameters(recurse=False)}
            return self._owners.get(param)
        template = getattr(model, "template", None)
        if name is None or not isinstance(template, torch.nn.Module):
            return None
        return template.get_submodule(name.rpartition(".")[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_owners": None}

    def _passes(self, param: Tensor, objective: Objective) -> bool:
        members = objective.members
        slots = self.settings.binding.slots
        source = slots.find_param(param)
        if isinstance(self.filter, str):
            name = slots.find_name(source)
            if name is None:
                raise ValueError(
                    f"Split: the pattern {self.filter!r} needs named parameters; give the optimizer a module"
                )
            return match_name(name, self.filter.split())
        if isinstance(self.filter, list):
            return any(source is tensor for tensor in self.filter)
        # A filter takes a model's parameters: in a population those of one member.
        seen = source if members is None else source.detach()[0]
        if self._arguments == 1:
            return bool(self.filter(seen))
        name = slots.find_name(source)
        return bool(self.filter(seen, name, self._find_owner(source, name, objective.model)))

    def _run_branches(self, objective: Objective, how: Callable[[Module, Objective], Any]) -> Objective:
        passed = [self._passes(param, objective) for param in objective.params]
        changed: dict[int, Tensor] = {}
        for key, wanted in (("true", True), ("false", False)):
            indices = [i for i, passes in enumerate(passed) if passes is wanted]
            if key in self.children and indices:
                part = _part(objective, indices)
                self.children[key].check_shared(part.params)
                others = [p for i, p in enumerate(objective.params) if passed[i] is not wanted]
                # A differentiated step writes no gradients.
                with _keep_gradients([] if objective.differentiable else others):
                    out = how(self.children[key], part)
                if isinstance(out, Objective):
                    changed |= _take_part(objective, out, indices)
        if changed:
            # Tensors that no branch changed are the gradient itself, which following links must not write into.
            before = objective.peek_updates()
            copies = objective.updates is None
            objective.updates = [
                changed[i] if i in changed else tensor.clone() if copies else tensor for i, tensor in enumerate(before)
            ]
        return objective

    def update(self, objective: Objective) -> None:
        """Let each chain learn from its parameters."""
        self._run_branches(objective, lambda child, part: child.update(part))

    def apply(self, objective: Objective) -> Objective:
        """Transform each part of the update by its chain."""
        return self._run_branches(objective, lambda child, part: child.apply(part))

    def step(self, objective: Objective) -> Objective:
        """Make a step of each chain on its parameters."""
        # A chain fuses its own links; a single link is fused here.
        return self._run_branches(
            objective, lambda child, part: run(part, [child], owner=None if isinstance(child, Chain) else child)
        )


def _count_arguments(function: Callable[..., bool]) -> int:
    """Return whether a filter takes a tensor (1), or a tensor, its name and its owner (3)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin has no signature
        return 1
    plain = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) not in (0, 1, 3):
        raise TypeError(
            f"Split: the filter takes {len(plain)} arguments; write a function of a tensor, or of (tensor, name, owner)"
        )
    return 3 if len(plain) == 3 else 1


@contextmanager
def _keep_gradients(others: list[Tensor]) -> Iterator[None]:
    """Restore the gradients of the other parameters, which evaluations of one part overwrite."""
    with Guard() as guard:
        guard.gradients(others)
        for param in others:
            param.grad = None
        yield
        guard.restore()


def _select(values: Sequence[Value] | None, indices: list[int]) -> list[Value] | None:
    """Return the values at some positions; None for None."""
    return None if values is None else [values[i] for i in indices]


def _part(objective: Objective, indices: list[int]) -> Objective:
    """Return the objective over some of the parameters; the closure is the whole one."""
    part = objective.clone(clone_updates=False, parent=objective)
    part.params = [objective.params[i] for i in indices]
    if objective.updates is None and objective.grads is None and objective.evaluator is not None:
        objective.get_loss(backward=True)
    part.updates = _select(objective.updates, indices)
    part.grads = _select(objective.grads, indices)
    part.loss = objective.loss
    part.present = _select(objective.present, indices)
    if part.present is not None and all(part.present):
        part.present = None
    part.matrices = None
    graph = objective._graph
    part._graph = None if graph is None else (graph[0], [graph[1][i] for i in indices])
    part.accepted = None
    return part


def _take_part(objective: Objective, part: Objective, indices: list[int]) -> dict[int, Tensor]:
    """Store the loss and the decisions of a part, and return its updates by their positions in the whole."""
    if objective.loss is None:
        objective.loss = part.loss
    if part.should_terminate is not None:
        objective.should_terminate = bool(objective.should_terminate) or part.should_terminate
    updates = part.get_updates()
    if part.skip_update:
        # The part's chain moved its parameters itself, so their update is zero.
        updates = list(map(torch.zeros_like, updates))
    return dict(zip(indices, updates, strict=True))
