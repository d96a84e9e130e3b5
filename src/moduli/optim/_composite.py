"""The hooks of several pointwise links as one function of tensors and numbers, to be traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .. import kernels
from ._hooks import widen

if TYPE_CHECKING:
    from .transform import TensorTransform


class KernelPart(NamedTuple):
    """The properties of one link on which the kernel of a run depends.

    Attributes:
        states: The names of its states that are tensors.
        scalars: The names of its scalars: settings, measures, and states that are numbers.
        constants: The settings that are constants of the kernel, by name.
    """

    states: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]


class KernelKey(NamedTuple):
    """The properties of a run on which its kernel depends.

    Attributes:
        grads: Whether hooks read the gradient.
        tail: Whether the pass moves the parameters itself.
        parts: The properties of each link.
        watched: Whether the norms of intermediate results are computed.
    """

    grads: bool
    tail: bool
    parts: tuple[KernelPart, ...]
    watched: bool


class Composite:
    """The hooks of several links as one function of tensors and numbers, to be traced."""

    def __init__(self, links: Sequence[TensorTransform], key: KernelKey) -> None:
        self.links = links
        self.grads, self.tail, self.parts, self.watched = key
        #: For each link why its hooks are not pure, or None; set by the first trace.
        self.problems: list[str | None] = [None] * len(links)
        #: Whether the problems were passed on to the links.
        self.is_reported = False
        self.__name__ = " | ".join(type(link).__name__ for link in links)
        names = ["param", "tensor"]
        names += ["grad"] if self.grads else []
        names += [] if self.tail else ["result"]
        #: The states of links, which no autograd graph refers to.
        self.private = [f"state{k}_{i}" for k, part in enumerate(self.parts) for i in range(len(part.states))]
        names += self.private
        names += [f"number{k}_{i}" for k, part in enumerate(self.parts) for i in range(len(part.scalars))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, *args: Any) -> None:
        self._run(args, lambda k, param, state, setting: self.links[k], lambda k: None)

    def record_with(self, purity: Any) -> Callable[..., None]:
        """Return the function to trace: links are replaced by recorders, which note what hooks read from them."""

        def find_link(k: int, param: Tensor, state: dict[str, Any], setting: dict[str, Any]) -> Any:
            return kernels.SelfRecorder(self.links[k], purity, {"state": {param: state}, "settings": {param: setting}})

        def note(k: int) -> None:
            # Problems are noted per link: an impure link does not make the next one impure.
            for key, value in self.parts[k].constants:
                purity.check(value, f"the setting {key}", frozenset())
            self.problems[k], purity.problem = self.problems[k] or purity.problem, None

        def run(*args: Any) -> None:
            purity.problem = None  # of the previous trace
            self._run(args, find_link, note)
            purity.problem = next((problem for problem in self.problems if problem is not None), None)

        return run

    def _run(self, args: Sequence[Any], find_link: Callable[..., Any], note: Callable[[int], None]) -> None:
        """Run the hooks of all links on the arguments of the kernel.

        Args:
            args: The arguments, in the order of `__signature__`.
            find_link: Returns the object whose hooks are called, for the position, parameter, state and settings of a link.
            note: Called with the position of a link after its hooks.
        """
        values = iter(args)
        param, tensor = next(values), next(values).clone()
        grad = next(values) if self.grads else None
        result = None if self.tail else next(values)
        states_by_link = [{key: next(values) for key in part.states} for part in self.parts]
        # Hooks compute in single precision at least.
        wide_param, tensor, grad = widen(param), widen(tensor), widen(grad)
        self._record(tensor, 0)
        for k, (link, stored, part) in enumerate(zip(self.links, states_by_link, self.parts, strict=True)):
            setting: dict[str, Any] = {**dict(part.constants), **{key: next(values) for key in part.scalars}}
            state = {key: widen(value) for key, value in stored.items()}
            state.update((name, setting.pop(name)) for name in link.list_numbers())
            with link.shown([wide_param], [state], [setting]):
                hooks = find_link(k, wide_param, state, setting)
                hooks.single_tensor_update(tensor, wide_param, grad, None, state, setting)
                tensor = hooks.single_tensor_apply(tensor, wide_param, grad, None, state, setting)
                note(k)
            self._record(tensor, k + 1)
            extra = set(state) - set(stored) - set(link.list_numbers())
            if extra:
                name = f"{type(link).__name__} makes the state {sorted(extra)[0]!r} while learning"
                raise kernels.NotPointwiseError(
                    f"{name}; make it in single_tensor_initialize, or set elementwise = False"
                )
            for key, original in stored.items():
                if state[key] is not original:
                    original.copy_(state[key])
        if result is None:
            self._record(wide_param, len(self.links) + 1)
            param.sub_(tensor)
        else:
            result.copy_(tensor)

    def _record(self, tensor: Tensor, slot: int) -> None:
        """Have the pass sum the squares of a value, if there is a watch."""
        if self.watched:
            kernels.record_square(tensor, slot)


def split_settings(
    link: TensorTransform, setting: Mapping[str, Any]
) -> tuple[list[str], list[Any], list[tuple[str, Any]]]:
    """Return the settings of a link that are scalars (names, values), and those that are constants of a kernel."""
    names: list[str] = []
    values: list[Any] = []
    constants: list[tuple[str, Any]] = []
    for key, value in setting.items():
        kind = type(value)
        number = kind is float or kind is int
        if isinstance(value, Tensor):
            number = value.dim() == 0 and value.dtype.is_floating_point
        elif not number and kind is not bool and isinstance(value, float | int):  # NumPy's
            number, value = True, float(value)
        if number and key not in link.static:
            names.append(key)
            values.append(value)
        else:
            constants.append((key, value))
    return names, values, constants


def are_scalars(link: TensorTransform, setting: Mapping[str, Any], measured: Mapping[str, Any]) -> bool:
    """Return whether the measures of a link can be scalars of a kernel, apart from its settings.

    Args:
        link: The link.
        setting: Its settings.
        measured: The results of its `measure`, by name.
    """
    free = measured.keys().isdisjoint({*setting, *link.static})
    return free and all(
        type(value) in (float, int)
        or (isinstance(value, Tensor) and value.dim() == 0 and value.dtype.is_floating_point)
        for value in measured.values()
    )
