"""`ModelAxes`: the axes of a model, as an immutable value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import public_name, suggest_name, unwrapped_name
from ._atoms import find_growth, is_width
from ._factors import Factors, decode, encode, index_factors, list_names, measure, show_factors
from ._mup import check_base, initialise_mup

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ModelAxis:
    """One axis of a model: a set of units that occurs in one or more parameters.

    Attributes:
        name: Its name: that of the layer that makes it, or one chosen by the caller of `trace`.
        size: The number of units.
        reasons: The reasons why it is fixed; empty for a free one.
        places: The parameters and buffers that have it, each with the position of the axis.
    """

    name: str
    size: int
    reasons: tuple[str, ...]
    places: tuple[tuple[str, int], ...]

    @property
    def free(self) -> bool:
        """Whether permuting the units everywhere leaves the function unchanged."""
        return not self.reasons

    @property
    def growth(self) -> str | None:
        """The way in which the axis can get units that do not affect the others; None if it can't.

        "copy": new units are copies of others. "fresh": an axis of outputs, or one that is indexed by values
        (classes, tokens), whose new entries nothing reads yet. "input": an axis of inputs, whose new entries are
        multiplied by zero. "zero": an axis of which only labels are known.
        """
        return find_growth(self.reasons)


@dataclasses.dataclass(frozen=True)
class ParameterAxes:
    """The axes of one parameter or buffer; iterating gives one product of factors for each axis.

    Attributes:
        name: The name of the parameter.
        shape: Its shape.
        dims: For each axis, the factors whose product it is.
        uses: The use of each axis in its layer: "out", "in", "index" (of an embedding), "batch" (of experts) or "kernel".
        role: The role of the parameter in the model: "input" (from data to units), "hidden" (from units to units), "output" (from
            units to results), "tied" (input and output), "fixed" (no units), "vector" (a bias, a scale), or "buffer".
        sizes: The sizes of the model's axes that occur here.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[Factors, ...]
    uses: tuple[str, ...]
    role: str
    sizes: Mapping[str, int] = dataclasses.field(compare=False, repr=False)

    def __iter__(self) -> Iterator[Factors]:
        return iter(self.dims)

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, axis: int) -> Factors:
        return self.dims[axis]

    def __repr__(self) -> str:
        return f"({', '.join(self.show(axis) for axis in range(len(self.dims)))})"

    def show(self, axis: int, owner: str | None = None) -> str:
        """Return one axis as text, in the notation of einops; names of axes of a layer without the layer.

        Args:
            axis: The axis.
            owner: The layer.
        """
        return show_factors(self.dims[axis], self.sizes, owner, outer=True)

    def index(self, axis: int, units: Mapping[str, Tensor]) -> Tensor | None:
        """Return the positions along an axis of chosen units of the model's axes; None if none of these occurs in it.

        Args:
            axis: The axis of the parameter.
            units: For axes of the model, the chosen units, in order.

        Returns:
            The positions, for indexing the parameter along this axis.

        Example:
            >>> import torch, moduli as mo
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
            >>> ax = mo.axes.trace(net, torch.zeros(1, 2))
            >>> ax.of("2.weight").index(1, {"0.out": torch.tensor([2, 0])})
            tensor([2, 0])
        """
        if not any(name in units for name in list_names(self.dims[axis])):
            return None
        return index_factors(self.dims[axis], self.sizes, units)


class ModelAxes:
    """The axes of a whole model, the result of `trace`; immutable, and equal for equal structures.

    `ax["0.out"]` is a `ModelAxis`, `ax.of("0.weight")` the axes of a parameter. Iterating gives the names of all axes.

    Attributes:
        axes: Every axis of the model by name.
        parameters: The axes of every parameter and buffer by name.
        ties: For each other name of a tied parameter, its name in `parameters`.
        unknown: Operations without a rule, which fix the axes that reach them.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> ax = mo.axes.trace(net, torch.zeros(1, 4))
        >>> ax["0.out"].size, ax["0.out"].free, ax["0.out"].places
        (16, True, (('0.weight', 0), ('0.bias', 0), ('2.weight', 1)))
        >>> ax.of("2.weight")
        (2.out=3, 0.out=16)
    """

    __slots__ = ("axes", "parameters", "ties", "unknown")

    axes: dict[str, ModelAxis]
    parameters: dict[str, ParameterAxes]
    ties: dict[str, str]
    unknown: tuple[str, ...]

    def __init__(
        self,
        axes: Mapping[str, ModelAxis],
        parameters: Mapping[str, ParameterAxes],
        ties: Mapping[str, str],
        unknown: Sequence[str],
    ) -> None:
        set_attribute = object.__setattr__
        set_attribute(self, "axes", dict(axes))
        set_attribute(self, "parameters", dict(parameters))
        set_attribute(self, "ties", dict(ties))
        set_attribute(self, "unknown", tuple(unknown))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"ModelAxes is immutable; trace the model again instead of setting {name!r}")

    @property
    def free(self) -> tuple[ModelAxis, ...]:
        """The free axes."""
        return tuple(axis for axis in self.axes.values() if axis.free)

    def __getitem__(self, name: str) -> ModelAxis:
        if name not in self.axes:
            raise KeyError(f"the model has no axis {name!r}.{suggest_name(name, list(self.axes))}")
        return self.axes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __contains__(self, name: object) -> bool:
        return name in self.axes

    def of(self, name: str) -> ParameterAxes:
        """Return the axes of a parameter or buffer.

        Raises:
            KeyError: If the model has none of this name.
        """
        plain = unwrapped_name(name)
        plain = self.ties.get(plain, plain)
        if plain in self.parameters:
            return self.parameters[plain]
        names = [*self.parameters, *self.ties]
        public = {public_name(each): each for each in names}
        if plain not in public:
            raise KeyError(f"the model has no parameter or buffer {name!r}.{suggest_name(name, names)}")
        return self.parameters[self.ties.get(public[plain], public[plain])]

    def has_parameter(self, name: str) -> bool:
        """Whether the model has a parameter or buffer of this name, so that `of` returns its axes."""
        try:
            self.of(name)
        except KeyError:
            return False
        return True

    def take(self, tensors: Mapping[str, Tensor], units: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with chosen units of some axes, in every tensor that has them: permuted, selected or repeated.

        Args:
            tensors: Parameters and buffers by name; names that the model does not have raise.
            units: For axes of the model by name, the positions of the units, in order.

        Returns:
            The tensors by name; those without the axes are returned unmodified.

        Example:
            >>> import torch, moduli as mo
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
            >>> ax, x = mo.axes.trace(net, torch.zeros(1, 4)), torch.randn(1, 4)
            >>> permuted = ax.take(dict(net.named_parameters()), {"0.out": torch.randperm(16)})
            >>> torch.allclose(torch.func.functional_call(net, permuted, x), net(x), atol=1e-6)
            True
        """
        for name in units:
            self[name]
        results = {}
        for name, tensor in tensors.items():
            axes = self.of(name)
            for axis in range(len(axes)):
                index = axes.index(axis, units)
                if index is not None:
                    tensor = tensor.index_select(axis, index.to(tensor.device))
            results[name] = tensor
        return results

    def resize(self, sizes: Mapping[str, int]) -> ModelAxes:
        """Return the axes of the model with other numbers of units, as after `particles.grow` and `particles.shrink`.

        Args:
            sizes: For axes of the model by name, the number of units.

        Example:
            >>> import torch, moduli as mo
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
            >>> mo.axes.trace(net, torch.zeros(1, 4)).resize({"0.out": 20}).of("2.weight")
            (2.out=3, 0.out=20)
        """
        for name in sizes:
            self[name]
        after = {name: sizes.get(name, axis.size) for name, axis in self.axes.items()}
        return build(
            {name: (after[name], axis.reasons) for name, axis in self.axes.items()},
            {
                name: (tuple(measure(dim, after) for dim in own.dims), own.dims, own.uses, own.role)
                for name, own in self.parameters.items()
            },
            self.ties,
            self.unknown,
        )

    def list_units(self, name: str, use: str) -> list[str]:
        """Return the axes of units, which are larger in a wider model, in those axes of a parameter that have a use.

        Args:
            name: The parameter.
            use: "in", "out", "batch".
        """
        own = self.of(name)
        names = [each for dim, its in zip(own.dims, own.uses, strict=True) if its == use for each in list_names(dim)]
        return [each for each in names if is_width(self.axes[each].reasons)]

    def initialise_mup(
        self, net: nn.Module, base: int | ModelAxes = 64, generator: torch.Generator | None = None
    ) -> None:
        r"""Initialise the parameters of a model according to the maximal update parametrization.

        Matrices are normal with variance $1/\text{fan-in}$; those from units to results $n_0/\text{fan-in}^2$, with the base width
        $n_0$; rows of embeddings have variance 1. Parameters whose names end in "bias" become zero; other vectors (scales of
        normalisations) stay. `m.MuP` scales the steps.

        Args:
            net: The model.
            base: The width at which this is the standard parametrization, or the axes of the model of that width.
            generator: The random number generator; torch's default one if None.

        Raises:
            ValueError: If the axes belong to another model, or a parameter is both an embedding and a head. Nothing is changed.

        Example:
            >>> import torch, moduli as mo
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))
            >>> ax = mo.axes.trace(net, torch.zeros(1, 4))
            >>> ax.initialise_mup(net, base=64, generator=torch.Generator().manual_seed(0))
            >>> round(net[0].weight.std().item(), 2), round(net[2].weight.std().item() * 1024 / 8, 2)
            (0.5, 1.02)
        """
        check_base(base)
        initialise_mup(self, net, base, generator)

    # ------------------------------------------------------------------ plain data

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain data (dictionaries, lists, strings, numbers), for JSON or a checkpoint.

        Example:
            >>> import json, torch, moduli as mo
            >>> ax = mo.axes.trace(torch.nn.Linear(2, 3), torch.zeros(1, 2))
            >>> mo.axes.ModelAxes.from_data(json.loads(json.dumps(ax.to_data()))) == ax
            True
        """
        return {
            "format": FORMAT,
            "axes": [
                {"name": axis.name, "size": axis.size, "reasons": list(axis.reasons)} for axis in self.axes.values()
            ],
            "parameters": {
                name: {
                    "shape": list(axes.shape),
                    "dims": [encode(dim) for dim in axes.dims],
                    "uses": list(axes.uses),
                    "role": axes.role,
                }
                for name, axes in self.parameters.items()
            },
            "ties": dict(self.ties),
            "unknown": list(self.unknown),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ModelAxes:
        """Return axes from the data of `to_data`.

        Raises:
            ValueError: If the data has another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"axes in format {data.get('format')!r} can't be read; this version reads {FORMAT}")
        return build(
            {each["name"]: (each["size"], tuple(each["reasons"])) for each in data["axes"]},
            {
                name: (
                    tuple(each["shape"]),
                    tuple(decode(dim) for dim in each["dims"]),
                    tuple(each["uses"]),
                    each["role"],
                )
                for name, each in data["parameters"].items()
            },
            data["ties"],
            data["unknown"],
        )

    def __eq__(self, other: object) -> bool:
        return self.to_data() == other.to_data() if isinstance(other, ModelAxes) else NotImplemented

    def __hash__(self) -> int:
        return hash((tuple(self.axes), tuple(self.parameters)))

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelAxes.from_data, (self.to_data(),)

    def __repr__(self) -> str:
        from ._table import write_table

        return write_table(self)

    def _repr_html_(self) -> str:
        from ._table import write_html

        return write_html(self)


def build(
    axes: Mapping[str, tuple[int, tuple[str, ...]]],
    parameters: Mapping[str, tuple[tuple[int, ...], tuple[Factors, ...], tuple[str, ...], str]],
    ties: Mapping[str, str],
    unknown: Sequence[str],
) -> ModelAxes:
    """Return `ModelAxes` from its parts.

    Args:
        axes: The size and the reasons of each axis.
        parameters: The shape, factors, uses and role of each parameter.
        ties: The name in `parameters` of each other name of a tied parameter.
        unknown: The operations without a rule.
    """
    places: dict[str, list[tuple[str, int]]] = {name: [] for name in axes}
    values = {}
    for name, (shape, dims, uses, role) in parameters.items():
        names = [list_names(factors) for factors in dims]
        for axis, each in enumerate(names):
            for occurring in dict.fromkeys(each):
                places[occurring].append((name, axis))
        sizes = {occurring: axes[occurring][0] for each in names for occurring in each}
        values[name] = ParameterAxes(name, shape, dims, uses, role, sizes)
    models = {
        name: ModelAxis(name, size, reasons, tuple(places[name]))
        for name, (size, reasons) in axes.items()
        if places[name]
    }
    return ModelAxes(models, values, ties, unknown)
