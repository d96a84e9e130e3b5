"""Links that are written as functions of the update, what is remembered of it, and settings.

What they remember can pass through links of its own: the `*_tfm` arguments.

* A link's settings when it is made: collected from its arguments, and their ranges checked.

  A schedule (a function of the step) is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..optim import Across, Module, Objective, TensorTransform, as_real, restore_complex
from ..optim.module import ProjectedBuffer

Tensors = list[Tensor]
States = list[dict[str, Any]]
Settings = Sequence[Mapping[str, Any]]

_OPTIONS = ("inner", "concat_params", "update_freq")


class UpdateTransform(TensorTransform):
    """A tensor transform that needs neither the parameter nor the gradient nor the loss: `transform` is its hook.

    Args:
        given: The settings; usually the arguments of the link as they are, `locals()`.
        **options: Those of `TensorTransform`; "inner", "concat_params" and "update_freq" are found in `given`, too.

    Attributes:
        ranges: The arguments that a check of `_checks` is for, by check.
    """

    ranges: ClassVar[Ranges] = {}

    def __init__(self, given: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = check_settings(self, given or {})
        options |= {key: settings.pop(key) for key in _OPTIONS if key in settings}
        super().__init__(settings, **options)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        """Transform one tensor (in place or not) and return it."""
        raise TypeError(f"{type(self).__name__} does not say how to transform the update")

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        """`transform`."""
        return self.transform(tensor, state, setting)


class BufferTransform(UpdateTransform):
    """An `UpdateTransform` that remembers: `begin` fills the state of a parameter, `learn` changes it.

    Its buffers can pass through links of their own before they are used. Such arguments are named in `tfms`, each with the
    state it is for (the first of these that there is). The links see a copy of the buffer in place of the update, so what is
    remembered is not changed. They learn where this link is applied, as `inner` does.

    Args:
        given: The settings, and the links that are named in `tfms`; usually `locals()`.
        **options: Those of `UpdateTransform`.

    Attributes:
        buffers: States that are tensors like the update and start at zero, each with how it follows a change of the basis
            (see `add_projected_keys`; None for not at all).
        tfms: Arguments that are links, each with the states that it is for.
    """

    buffers: ClassVar[Mapping[str, ProjectedBuffer | None]] = {}
    tfms: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, given: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = dict(given or {})
        children = {key: settings.pop(key) for key in self.tfms}
        super().__init__(settings, **options)
        for key, links in children.items():
            self.set_child(key, links)
        for name, kind in self.buffers.items():
            if kind is not None:
                self.add_projected_keys(kind, name)

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        """Fill the state of one parameter, besides the buffers."""

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        """Learn from one tensor; change `state`, not `tensor`."""

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Zeros for the buffers, then `begin`."""
        for name in self.buffers:
            state[name] = torch.zeros_like(tensor)
        self.begin(tensor, state, setting)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """`learn`."""
        self.learn(tensor, state, setting)

    def get_applied_states(self, objective: Objective, kept: list[int], states: States) -> States:
        """Copies of the states, with what the links make of the buffers."""
        if not any(key in self.children for key in self.tfms):
            return states
        rows = [dict(row) for row in states]
        own = [objective.params[i] for i in kept]
        for key, names in self.tfms.items():
            name = next((name for name in names if name in rows[0]), None)
            if key in self.children and name is not None:
                found = transform_buffers(self, key, [row[name] for row in rows], own, objective)
                for row, buffer in zip(rows, found, strict=True):
                    row[name] = buffer
        return rows


class MatrixTransform(BufferTransform):
    """A `BufferTransform` that treats each tensor as a matrix, whole."""

    members = "batched"
    across = Across.MATRICES
    uses_params = False


class ListTransform(BufferTransform):
    """A `BufferTransform` that learns from all tensors together (`learn_all`), or transforms them so (`transform_all`)."""

    def learn_all(self, tensors: Tensors, states: States, settings: Settings) -> None:
        """Learn from all tensors; change `states`, not `tensors`."""
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            self.learn(tensor, state, setting)

    def transform_all(self, tensors: Tensors, states: States, settings: Settings) -> Sequence[Tensor]:
        """Transform all tensors and return them."""
        return [self.transform(*row) for row in zip(tensors, states, settings, strict=True)]

    def multi_tensor_update(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: Settings,
    ) -> None:
        """`learn_all`."""
        self.learn_all(tensors, states, settings)

    def multi_tensor_apply(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: Settings,
    ) -> Sequence[Tensor]:
        """`transform_all`."""
        return self.transform_all(tensors, states, settings)


def transform_buffers(
    link: Module, key: str, buffers: Sequence[Tensor], params: Sequence[Tensor], objective: Objective
) -> list[Tensor]:
    """What the child makes of copies of these buffers, which stay as they are; without the child, the buffers."""
    if key not in link.children:
        return list(buffers)
    # Pointwise links keep complex numbers as pairs, but a child sees tensors like the parameters.
    given = [
        restore_complex(buffer.clone(), param) if buffer.shape == as_real(param.detach()).shape else buffer.clone()
        for buffer, param in zip(buffers, params, strict=True)
    ]
    shaped = all(tensor.shape == param.shape for tensor, param in zip(given, params, strict=True))
    out = link.inner_step_tensors(key, given, clone=False, params=params if shaped else None, objective=objective)
    return [
        as_real(tensor) if tensor.is_complex() and not buffer.is_complex() else tensor
        for tensor, buffer in zip(out, buffers, strict=True)
    ]


Ranges = Mapping[Callable[..., None], tuple[str, ...]]
"""The arguments of a link that a check is for, by check."""


def collect_settings(arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The arguments of a constructor by name, but for `others`, which are no settings.

    Args:
        arguments: The constructor's `locals()`, before it has variables of its own.
        *others: Names to leave out.
    """
    return {key: value for key, value in arguments.items() if key not in ("self", "__class__", *others)}


def check_settings(link: Any, arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """`collect_settings`, after the checks in the link's table `ranges`."""
    for check, keys in link.ranges.items():
        check(type(link).__name__, **{key: arguments[key] for key in keys})
    return collect_settings(arguments, *others)


def _read_numbers(value: Any) -> list[float] | None:
    """The numbers in a setting, or None where it is a function of the step."""
    if isinstance(value, Tensor):
        found: list[float] = value.detach().double().reshape(-1).tolist()
        return found
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return [float(value)]


def _check(link: str, key: str, value: Any, ok: Any, wanted: str) -> None:
    numbers = _read_numbers(value)
    if numbers is None:
        if callable(value):
            return
        raise TypeError(f"{link}: {key} is {value!r}; give {wanted}")
    # A NaN is refused by the link itself, for every setting.
    if any(number == number and not ok(number) for number in numbers):
        raise ValueError(f"{link}: {key} is {value!r}; give {wanted}")


def fraction(link: str, **settings: Any) -> None:
    """Numbers in [0, 1): memories of running means."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: 0 <= x < 1, "a number from 0 (included) to 1 (excluded)")


def probability(link: str, **settings: Any) -> None:
    """Numbers in [0, 1]."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: 0 <= x <= 1, "a number from 0 to 1")


def non_negative(link: str, **settings: Any) -> None:
    """Numbers that are not negative."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: x >= 0, "a number that is not negative")


def positive(link: str, **settings: Any) -> None:
    """Numbers above zero."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: x > 0, "a number above zero")


def above_one(link: str, **settings: Any) -> None:
    """Numbers above one, of which there is one for all steps."""
    for key, value in settings.items():
        if not value > 1:
            raise ValueError(f"{link}: {key} is {value!r}; give a number above 1")


def check_at_least_one(link: str, **settings: Any) -> None:
    """Whole numbers from one."""
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{link}: {key} is {value!r}; give a whole number, at least 1")


def allow_none(check: Callable[..., None]) -> Callable[..., None]:
    """A check that lets None pass."""

    def check_given(link: str, **settings: Any) -> None:
        check(link, **{key: value for key, value in settings.items() if value is not None})

    return check_given


def choice(link: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """One of a few values."""
    if value not in allowed:
        names = ", ".join(map(repr, allowed[:-1]))
        raise ValueError(f"{link}: {key} is {value!r}; it can be {names} or {allowed[-1]!r}")
