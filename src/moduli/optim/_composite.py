"""The hooks of links in a row as one function, and what decides its kernel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import kernels

if TYPE_CHECKING:
    from .transform import TensorTransform


class Composite:
    """The hooks of several links as one function of tensors and numbers, to be traced."""

    def __init__(self, links: Sequence[TensorTransform], parts: CompositeParts) -> None:
        self.links = links
        self.parts = parts
        # Where hooks find the state and settings of the symbol that they are shown as their parameter (`Module.shown`). Taken
        # here, because what runs while the hooks are traced is watched for changes, and the links' whole state is large.
        self.tables = [(link._state.shown, link.settings.shown) for link in links]
        self.__name__ = " | ".join(type(link).__name__ for link in links)
        names = ["param", "tensor"]
        names += ["grad"] if parts.grads else []
        names += [] if parts.tail else ["result"]
        #: What links remember is theirs: no graph holds it.
        self.private = parts.name_states()
        names += self.private
        names += [f"number{k}_{i}" for k, (_, numbers, _) in enumerate(parts.links) for i in range(len(numbers))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, *args: Any) -> None:
        values = iter(args)
        param, tensor = next(values), next(values).clone()
        grad = next(values) if self.parts.grads else None
        result = None if self.parts.tail else next(values)
        remembered = [{key: next(values) for key in states} for states, _, _ in self.parts.links]
        for link, tables, given, (_, numbers, constants) in zip(
            self.links, self.tables, remembered, self.parts.links, strict=True
        ):
            setting: dict[str, Any] = {**dict(constants), **{key: next(values) for key in numbers}}
            state = dict(given)
            if link.counts:
                state["step"] = setting.pop("step")
            # The gradient is shared with the other links, so what this one writes to it is dropped.
            tables[0][param], tables[1][param] = state, setting
            try:
                link.single_tensor_update(tensor, param, grad, None, state, setting)
                tensor = link.single_tensor_apply(tensor, param, grad, None, state, setting)
            finally:
                tables[0].clear()
                tables[1].clear()
            extra = set(state) - set(given) - {"step"}
            if extra:
                raise kernels.NotPointwiseError(
                    f"{type(link).__name__} makes the state {sorted(extra)[0]!r} while learning; make it in "
                    "single_tensor_initialize, or set elementwise = False"
                )
            for key, original in given.items():
                if state[key] is not original:
                    original.copy_(state[key])
        if result is None:
            param.sub_(tensor)
        else:
            result.copy_(tensor)


class CompositeParts(NamedTuple):
    """What decides the kernel.

    Whether hooks read the gradient, whether the pass moves the parameters itself, and for each link the names of its states
    and of its numbers, and its constants.
    """

    grads: bool
    tail: bool
    links: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, Any], ...]], ...]

    def name_states(self) -> list[str]:
        """The names of the roles that hold what links remember."""
        return [f"state{k}_{i}" for k, (states, _, _) in enumerate(self.links) for i in range(len(states))]
