"""The hooks of several pointwise links as one function of tensors and numbers, to be traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import kernels
from ._hooks import widen

if TYPE_CHECKING:
    from .transform import TensorTransform


# The key of a kernel: whether hooks read the gradient, whether the pass moves the parameters itself, for each link the
# names of its states and of its scalars and its constants, and whether norms of intermediate results are computed.
Part = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, Any], ...]]
Parts = tuple[bool, bool, tuple[Part, ...], bool]


class Composite:
    """The hooks of several links as one function of tensors and numbers, to be traced."""

    def __init__(self, links: Sequence[TensorTransform], key: Parts) -> None:
        self.links = links
        self.grads, self.tail, self.parts, self.watched = key
        #: For each link why its hooks are not pure, or None; set by the first trace.
        self.problems: list[str | None] = [None] * len(links)
        self.is_known = False
        self.__name__ = " | ".join(type(link).__name__ for link in links)
        names = ["param", "tensor"]
        names += ["grad"] if self.grads else []
        names += [] if self.tail else ["result"]
        #: The states of links, which no autograd graph refers to.
        self.private = [f"state{k}_{i}" for k, (states, _, _) in enumerate(self.parts) for i in range(len(states))]
        names += self.private
        names += [f"number{k}_{i}" for k, (_, numbers, _) in enumerate(self.parts) for i in range(len(numbers))]
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
            for key, value in self.parts[k][2]:
                purity.check(value, f"the setting {key}", frozenset())
            self.problems[k], purity.problem = self.problems[k] or purity.problem, None

        def run(*args: Any) -> None:
            purity.problem = None  # of the previous trace
            self._run(args, find_link, note)
            purity.problem = next((problem for problem in self.problems if problem is not None), None)

        return run

    def _run(self, args: Sequence[Any], find_link: Callable[..., Any], note: Callable[[int], None]) -> None:
        values = iter(args)
        param, tensor = next(values), next(values).clone()
        grad = next(values) if self.grads else None
        result = None if self.tail else next(values)
        states_of_links = [{key: next(values) for key in states} for states, _, _ in self.parts]
        # Hooks compute in single precision at least.
        wide_param, tensor, grad = widen(param), widen(tensor), widen(grad)
        self._record(tensor, 0)
        for k, (link, stored, (_, numbers, constants)) in enumerate(
            zip(self.links, states_of_links, self.parts, strict=True)
        ):
            setting: dict[str, Any] = {**dict(constants), **{key: next(values) for key in numbers}}
            state = {key: widen(value) for key, value in stored.items()}
            state.update((name, setting.pop(name)) for name in link.list_numbers())
            # The gradient is shared with the other links, so what this one writes to it is dropped.
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
        """Have the pass sum the squares of a value, where there is a watch."""
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
