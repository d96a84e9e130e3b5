"""The attribute edits of particles: assigning, deleting and registering parameters, children and buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moduli.labels import Tensor as LabelledTensor
from moduli.layout import REMOVED, list_registered
from moduli.nn import VirtualTensor, updates_value

from ._editing import edit
from ._record import build, record_of
from ._skeleton import PENDING
from ._species import adopt_children
from .base import NytoModuleBase

_MISSING = object()


class EditingMethods(NytoModuleBase):
    """The methods of a particle by which assignments and registrations become edits of its species."""

    def __setattr__(self, name: str, value: Any) -> None:
        if PENDING in self.__dict__:
            build(self)
        state = self.__dict__
        if "_parameters" not in state or not self._structural(name, value):
            super().__setattr__(name, value)
            return
        act = partial(super().__setattr__, name, value)
        if isinstance(state.get(name), VirtualTensor):
            self._replace_virtual(name, act, value)
        else:
            self._edit(name, act, value)

    def __delattr__(self, name: str) -> None:
        if PENDING in self.__dict__:
            build(self)
        state = self.__dict__
        registered = any(name in state.get(key, ()) for key in ("_parameters", "_modules", "_buffers", "_labelled"))
        if not registered:
            remove = partial(super().__delattr__, name)
            if isinstance(state.get(name), VirtualTensor):
                self._replace_virtual(name, remove)
            else:
                remove()
            return
        self._edit(name, lambda: super(EditingMethods, self).__delattr__(name))
        record_of(self).order.pop(name, None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, or None for one to come; relatives get a copy when they are touched.

        Args:
            name: The name.
            param: The parameter, or None.
        """
        self._edit(name, lambda: super(EditingMethods, self).register_parameter(name, param), param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register a child, or None for one to come; relatives get a copy when they are touched.

        Args:
            name: The name.
            module: The child, or None.
        """
        self._edit(name, lambda: super(EditingMethods, self).add_module(name, module), module)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer; relatives get a copy when they are touched.

        Args:
            name: The name.
            tensor: The buffer, or None.
            persistent: Whether `state_dict()` holds it.
        """
        self._edit(name, lambda: super(EditingMethods, self).register_buffer(name, tensor, persistent))

    def _edit_together(self, name: str, act: Callable[[], None]) -> None:
        """Make all changes of a function to this module one edit."""
        self._edit(name, act)

    def _replace_virtual(self, name: str, act: Callable[[], None], value: Any = None) -> None:
        """Replace or delete a virtual tensor together with its reference buffer, as one edit."""
        reference = self.__dict__[name].attributes.ref
        stays = isinstance(value, VirtualTensor) and value.attributes.ref == reference

        def replace() -> None:
            act()
            if reference in self._buffers and not stays:
                nn.Module.__delattr__(self, reference)

        self._edit(name, replace)

    def _structural(self, name: str, value: Any) -> bool:
        """Whether assigning a value to a name edits the structure, rather than values of tensors or plain attributes."""
        if isinstance(value, LabelledTensor):
            return not updates_value(self, name, value)
        if isinstance(value, nn.Parameter | nn.Module | nn.Buffer | VirtualTensor):
            return True
        state = self.__dict__
        if name in state["_parameters"] or name in state["_modules"] or name in state.get("_labelled", ()):
            return True
        buffer = state["_buffers"].get(name, _MISSING)
        if buffer is _MISSING:
            return isinstance(state.get(name), VirtualTensor)
        return (buffer is None) != (value is None)

    def _edit(self, name: str, act: Callable[[], None], value: Any = None) -> None:
        build(self)
        if "_parameters" not in self.__dict__ or record_of(self).busy:
            act()
            return
        record = record_of(self)
        # A module without a root and a version has no relatives that could follow its edits.
        root = self if record.root is None else self._particle_root
        before = _list_held(self, name)
        record.busy = True
        try:
            if record_of(root).version is None:
                act()
                record.order.setdefault(name)
                child = self._modules.get(name)
                if child is not None:
                    adopt_children(root, child)
            else:
                edit(self, root, name, act, value)
        finally:
            record.busy = False
        if before:
            REMOVED.mark(before, root)  # for optimizers of parameter lists, which do not follow modules
        elif REMOVED:  # a parameter that comes back is no longer marked as removed
            REMOVED.discard(param for _, param in _list_held(self, name))


def _list_held(module: nn.Module, name: str) -> list[tuple[str, Tensor]]:
    """Return the parameters in an attribute of a module, by name."""
    labelled = module.__dict__.get("_labelled", {})
    param, child = module._parameters.get(labelled[name][0] if name in labelled else name), module._modules.get(name)
    inner = () if child is None else list_registered(child)
    return [(f"{name}.{each}", tensor) for each, tensor in inner] if param is None else [(name, param)]
