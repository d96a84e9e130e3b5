"""Facts about the classes of a model's modules, computed once per structure."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple, cast

from torch import nn

from moduli.layout import Structure

_FSDP = "torch.distributed.fsdp"


class Facts(NamedTuple):
    """Properties that all models of one structure share.

    Attributes:
        restoring: The positions of modules whose copies need the `__setstate__` of their class, as torch's recurrent layers do.
        particles: The positions of particles inside the particle.
        copying: Whether some class defines its own copying.
        wrapped: Whether some module is wrapped by `fully_shard`.
        floating: Whether all parameters hold floating-point numbers.
        plan: The class of every module, and its parameters, buffers, transient buffers and children.
    """

    restoring: frozenset[int]
    particles: tuple[int, ...]
    copying: bool
    wrapped: bool
    floating: bool
    plan: tuple[tuple[type[nn.Module], Any, Any, frozenset[str], Any], ...]


def facts_of(structure: Structure) -> Facts:
    """Return the facts of a structure, computed once."""
    facts: Facts | None = structure.notes.get("particles")
    if facts is None:
        kinds = [entry.kind for entry in structure.modules]
        facts = structure.notes["particles"] = Facts(
            frozenset(place for place, kind in enumerate(kinds) if _overrides(kind, "__setstate__")),
            tuple(place for place, kind in enumerate(kinds) if place and hasattr(kind, "_particle_kernel")),
            any(hasattr(kind, "__deepcopy__") or _overrides(kind, "__getstate__", "__reduce_ex__") for kind in kinds),
            any(unwrap_kind(kind) is not kind for kind in kinds),
            all(group.dtype.is_floating_point for group in structure.layout.groups),
            tuple((e.kind, e.parameters, e.buffers, e.transient, e.children) for e in structure.modules),
        )
    return facts


def _overrides(kind: type, *names: str) -> bool:
    """Whether a class outside of this library, other than `nn.Module`, defines one of some methods among the bases of `kind`."""
    return any(
        name in base.__dict__ and not f"{base.__module__}.".startswith("moduli.")
        for name in names
        for base in kind.__mro__
        if base not in (nn.Module, object)
    )


def unwrap_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module without the wrapping of `fully_shard`, which results of operations do not have."""
    return _find_unwrapped(cast(Any, kind)) if _FSDP in sys.modules else kind


@lru_cache(maxsize=4096)
def _find_unwrapped(kind: Any) -> Any:
    wrapper = getattr(sys.modules[_FSDP], "FSDPModule", None)
    if wrapper is None or not issubclass(kind, wrapper):
        return kind
    adopted = kind.__dict__.get("_adopted")
    if adopted is not None:
        from ._adopt import make_adopted_class

        return make_adopted_class(unwrap_kind(adopted))
    return next(base for base in kind.__mro__ if not issubclass(base, wrapper))
