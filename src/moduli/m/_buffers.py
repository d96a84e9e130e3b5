"""Links run on what another link remembers: the `*_tfm` arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..optim import Chainable, Module, TensorTransform, as_real, restore_complex

if TYPE_CHECKING:
    from ..optim import Objective


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


class BufferTransform(TensorTransform):
    """A tensor transform whose buffers can pass through links of their own before they are used.

    A subclass names them in `tfms`: the argument, and the state it is for (the first of these that there is). The links see
    a copy of the buffer in place of the update, so what is remembered is not changed. They learn where this link is applied,
    as `inner` does.

    Args:
        defaults: The settings.
        inner: Links between this link's learning and its transformation.
        tfms: Links by argument; None for none.
        **options: Those of `TensorTransform`.
    """

    tfms: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(
        self,
        defaults: dict[str, Any] | None = None,
        *,
        inner: Chainable | None = None,
        tfms: Mapping[str, Chainable | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(defaults, inner=inner, **options)
        for key, links in (tfms or {}).items():
            self.set_child(key, links)

    def get_applied_states(
        self, objective: Objective, kept: list[int], states: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
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
