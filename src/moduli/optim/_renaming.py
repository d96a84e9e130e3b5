"""Names of parameters in a saved state that are others here: those of wrappers, and of parameters without names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._groups import clean_name
from ._vector_state import VECTOR

_WRAPPER = "module."


def rename(saved: Mapping[str, Any], here: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
    """The saved state with the names that the parameters have here.

    What `torch.compile`, FSDP and checkpointing put into names is left out; `module.` before all names (that of
    DistributedDataParallel) is added or left out; where only one side has names, the order decides.

    Args:
        saved: A saved state.
        here: The shapes of the parameters here by name, in order.
    """
    names = list(saved["shapes"])
    found = _mapping(names, saved["shapes"], here)
    if all(old == new for old, new in found.items()):
        return saved

    def new(name: str) -> str:
        member, bracket, rest = name.rpartition("[")
        return f"{found[member]}{bracket}{rest}" if name not in found and member in found else found.get(name, name)

    def parts(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        held = shared.get(VECTOR)
        if held is None:
            return shared
        return {**shared, VECTOR: [f"{new(part.rpartition(':')[0])}:{part.rpartition(':')[2]}" for part in held]}

    return {
        **saved,
        "state": _keys(saved["state"], new),
        "shapes": _keys(saved["shapes"], new),
        "dtypes": _keys(saved.get("dtypes", {}), new),
        "user": _keys(saved.get("user", {}), new),
        "order": [new(name) for name in saved["order"]],
        "param_groups": [
            {**group, "params": [new(name) for name in group["params"]]} for group in saved["param_groups"]
        ],
        "links": {path: {**entry, "global": parts(entry["global"])} for path, entry in saved["links"].items()},
    }


def _keys(table: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    return {new(name): value for name, value in table.items()}


def _mapping(
    names: Sequence[str], shapes: Mapping[str, Sequence[int]], here: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    if names and _are_positions(names) != _are_positions(list(here)):  # no names are those of no parameters
        if [shapes[name] and tuple(shapes[name]) for name in names] != list(here.values()):
            raise ValueError(
                "the saved parameters and those here can't be told apart by name (one side has none), and their shapes differ "
                f"in order: saved {[tuple(shapes[name]) for name in names]}, here {list(here.values())}. Give the module itself, "
                "or net.named_parameters(), on both sides"
            )
        return dict(zip(names, here, strict=True))
    clean = {name: clean_name(name) for name in names}
    if not any(name in here for name in clean.values()):
        if all(name.startswith(_WRAPPER) for name in clean.values()):
            return {old: name.removeprefix(_WRAPPER) for old, name in clean.items()}
        if here and all(name.startswith(_WRAPPER) for name in here):
            return {old: _WRAPPER + name for old, name in clean.items()}
    return clean


def _are_positions(names: Sequence[str]) -> bool:
    return list(names) == [str(i) for i in range(len(names))]
