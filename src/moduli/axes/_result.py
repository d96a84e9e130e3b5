"""From atoms to `ModelAxes`: names of axes, roles of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layout import Layout, unwrapped_name
from ._atoms import Atoms, is_width
from ._factors import Factors, Segments, find_owner
from ._labelled import apply_labels
from ._model_axes import ModelAxes, build
from ._notation import apply_names
from ._tracer import Traced, Tracer


def collect_axes(
    tracer: Tracer,
    parameters: Mapping[str, Traced],
    buffers: set[str],
    layout: Layout,
    names: Mapping[str, str],
) -> ModelAxes:
    """Name the axes of a finished trace, and return them as a value.

    Args:
        tracer: The trace.
        parameters: The axes of parameters and buffers by name.
        buffers: The names of the buffers.
        layout: The layout of the model, which has ties and labels.
        names: User-defined names of axes by pattern.

    Returns:
        The axes.
    """
    atoms = tracer.atoms
    ties = {unwrapped_name(tie): unwrapped_name(entry.name) for entry in layout.entries for tie in entry.ties}
    ties |= {unwrapped_name(tie): unwrapped_name(entry.name) for entry in layout.buffers for tie in entry.ties}
    labels = apply_names(atoms, parameters, ties, names, apply_labels(atoms, parameters, layout))
    for traced in parameters.values():
        for dim in traced.dims:
            _simplify(atoms, dim)
    uses = {name: _find_uses(tracer, name, traced) for name, traced in parameters.items()}
    namer = _Namer(atoms, labels)
    for name, axis in _order_places(tracer, parameters, uses):
        namer.name(name, _describe_axis(uses[name], axis), parameters[name].dims[axis])
    described = {}
    for name, traced in parameters.items():
        dims = tuple(namer.express(dim) for dim in traced.dims)
        role = "buffer" if name in buffers else find_role(tracer, name, traced, uses[name])
        described[name] = (traced.shape, dims, uses[name], role)
    return build(namer.axes, described, ties, sorted(tracer.unknown))


def _simplify(atoms: Atoms, dim: Any) -> None:
    """Write nested concatenations as one, and concatenations of one axis with itself as products."""
    for atom in atoms.resolve(dim):
        parts = atoms.flatten(atom)
        for part in parts:
            _simplify(atoms, part)
        if parts and all(atoms.resolve(part) == atoms.resolve(parts[0]) for part in parts):
            atoms.collapse(atom)


def _find_uses(tracer: Tracer, name: str, traced: Traced) -> tuple[str, ...]:
    """Return the use of each axis of a parameter in its layer; guessed from widths if no product has determined it."""
    uses = [tracer.uses.get((name, axis)) for axis in range(len(traced.dims))]
    if set(uses) & {"in", "out", "index"}:
        return tuple(use or ("in" if "out" in uses else "out") for use in uses)
    wide = [is_wide(tracer.atoms, dim) for dim in traced.dims]
    if all(wide) or not any(wide):
        return tuple(use or ("in" if axis else "out") for axis, use in enumerate(uses))
    return tuple(use or ("out" if each else "in") for use, each in zip(uses, wide, strict=True))


def is_wide(atoms: Atoms, dim: Any) -> bool:
    """Whether an axis has units of a width of the model: not data, positions or indices."""
    return any(is_width(atoms.reasons[leaf]) for leaf in atoms.list_leaves(dim))


def find_role(tracer: Tracer, name: str, traced: Traced, uses: tuple[str, ...]) -> str:
    """Return the role of a parameter, which depends on whether its inputs and outputs are widths of the model.

    A parameter that no product has used is a vector, whatever its shape: biases of experts, scales, positions.

    Args:
        tracer: The trace.
        name: The parameter.
        traced: Its axes.
        uses: Their uses.
    """
    multiplied = any((name, axis) in tracer.uses for axis in range(len(uses))) or name not in tracer.touched
    if sum(size != 1 for size in traced.shape) < 2 or not multiplied:
        return "vector"
    wide = {
        use: any(is_wide(tracer.atoms, dim) for dim, its in zip(traced.dims, uses, strict=True) if its == use)
        for use in ("in", "out")
    }
    if wide["in"] and wide["out"]:
        return "hidden"
    if name in tracer.reused:
        return "tied"
    return "input" if wide["out"] else "output" if wide["in"] else "fixed"


def _order_places(
    tracer: Tracer, parameters: Mapping[str, Traced], uses: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, int]]:
    """Return all axes of parameters in the order in which axes get names: first outputs of layers, in order of the forward."""
    places = [(name, axis) for name, traced in parameters.items() for axis in range(len(traced.dims))]
    first = [place for place, use in tracer.uses.items() if use == "out"]
    second = [place for place in places if uses[place[0]][place[1]] == "out"]
    return list(dict.fromkeys((*first, *second, *places)))


def _describe_axis(uses: tuple[str, ...], axis: int) -> str:
    """Return the use of an axis, with a number where several axes have it: "kernel.0"."""
    use = uses[axis]
    return use if uses.count(use) == 1 else f"{use}.{uses[:axis].count(use)}"


class _Namer:
    """Gives every leaf a name, in the order in which parameters are visited."""

    def __init__(self, atoms: Atoms, labels: Mapping[int, str]) -> None:
        self.atoms = atoms
        self.axes: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._labels = labels
        self._names: dict[int, str] = {}
        counts: dict[str, int] = {}
        for _leaf, label in labels.items():
            counts[label] = counts.get(label, 0) + 1
        self._unique = {label for label, count in counts.items() if count == 1}

    def name(self, parameter: str, use: str, dim: Any) -> None:
        """Name the leaves of an axis of a parameter that have no name yet.

        Args:
            parameter: The parameter.
            use: The use of the axis.
            dim: The axis.
        """
        leaves = list(dict.fromkeys(self._list_units(dim)))
        owner = find_owner(parameter)
        hints = [self.atoms.hints[leaf] for leaf in leaves]
        for position, leaf in enumerate(leaves):
            if leaf in self._names:
                continue
            label, hint = self._labels.get(leaf), hints[position]
            if hint is not None and hints.count(hint) > 1:
                hint = f"{hint}.{hints[:position].count(hint)}"
            word = label or hint or (use if len(leaves) == 1 else f"{use}.{position}")
            layer = owner if label is None else parameter.rpartition(".")[0]
            name = word if label in self._unique else f"{layer}.{word}".lstrip(".")
            while name in self.axes:
                name = f"{name}'"
            self._names[leaf] = name
            self.axes[name] = (self.atoms.sizes[leaf], self.atoms.reasons_of(leaf))

    def express(self, dim: Any) -> Factors:
        """Return an axis as a product of names."""
        factors: list[str | Segments] = []
        for atom in self.atoms.resolve(dim):
            parts = None if atom in self._names else self.atoms.segments(atom)
            factors.append(self._names[atom] if parts is None else Segments(tuple(map(self.express, parts))))
        return tuple(factors)

    def _list_units(self, dim: Any) -> list[int]:
        """Return the leaves of an axis; a concatenation whose leaves are all fixed counts as one."""
        units = []
        for atom in self.atoms.resolve(dim):
            parts = self.atoms.segments(atom)
            if parts is None or all(self.atoms.reasons[leaf] for leaf in self.atoms.list_leaves((atom,))):
                units.append(atom)
            else:
                units += [unit for part in parts for unit in self._list_units(part)]
        return units
