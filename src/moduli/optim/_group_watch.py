"""What users and schedulers write into the parameter groups, noticed at each step and told to the links."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _groups
from ._settings import Binding, check_members, same

if TYPE_CHECKING:
    from .module import Module


_requires_grad = operator.attrgetter("requires_grad")


class GroupWatch:
    """The groups as the links know them: their options, the names of their parameters, and which of these are trained.

    Args:
        links: All links of the chain.
        binding: What they share.
    """

    def __init__(self, links: Sequence[Module], binding: Binding) -> None:
        self.binding = binding
        #: Settings that every group shows to schedulers.
        self.shown = _groups.export_settings(links)
        #: Positions of the trained parameters that are no vectors.
        self.matrices: list[int] = []
        self._options: list[dict[str, Any]] = []
        self._active: list[Tensor] = []
        self._every: tuple[list[Tensor], list[bool]] = ([], [])

    def find_active(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Parameters that require a gradient now; the same list object while nothing changes."""
        every: list[Tensor] = (
            groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        )
        wanted = list(map(_requires_grad, every))
        known, flags = self._every
        # Every step looks at every parameter, so this is written to run in C.
        if wanted == flags and len(every) == len(known) and all(map(operator.is_, every, known)):
            return self._active
        self._every = (list(every), wanted)
        self._active = [param for param, want in zip(every, wanted, strict=True) if want]
        self.matrices = [i for i, param in enumerate(self._active) if param.dim() > 1]
        return self._active

    def name_params(self, groups: Sequence[Mapping[str, Any]], links: Sequence[Module]) -> None:
        """Know the parameters anew: which group each is in, and its name, or its position where it has none."""
        binding = self.binding
        binding.group_of.clear()
        position = 0
        for i, group in enumerate(groups):
            given = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], given, strict=True):
                binding.group_of[param] = i
                binding.names[param] = str(position) if name is None else name
                position += 1
        self._active, self._every = [], ([], [])
        self.forget(links)

    def forget(self, links: Sequence[Module]) -> None:
        """Have the next `sync` read everything."""
        for link in links:
            link.settings.forget()
        self._options = []

    def sync(self, groups: Sequence[Mapping[str, Any]], tops: Sequence[Module]) -> None:
        """Tell the links what has changed in the groups since the last time, if anything has."""
        options = [_groups.options(group) for group in groups]
        if len(options) == len(self._options) and all(map(same, options, self._options)):
            return
        self._options = []  # to be looked at again, where something is refused
        links = [link for top in tops for _, link in top.links()]
        for own in options:
            _groups.check_keys(own, links)
            check_members("a parameter group", own, self.binding.members)
        for link in links:
            link.settings.overrides = [_groups.overrides(link, own, self.shown) for own in options]
            link.settings.refresh()
        params = [param for group in groups for param in group["params"]]
        for top in tops:
            top.check_shared(params)
        self._options = options


def prepare_group(
    given: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    links: Sequence[Module],
    shown: Mapping[str, Any],
    model: torch.nn.Module | None,
) -> _groups.ParamGroup:
    """A group as torch takes it, checked against the links and the groups that are there already."""
    group = _groups.ParamGroup(given)
    group.missing = _groups.explain_missing(links)
    _groups.check_keys(group, links)
    if isinstance(group.get("params"), str):
        group["params"] = _find_new(group["params"], others, model)
    given_params = _groups.list_params(group.get("params", ()))
    group["params"] = [param if name is None else (name, param) for name, param in given_params]
    tensors = [param for _, param in given_params]
    if len({id(tensor) for tensor in tensors}) != len(tensors):
        raise ValueError("a parameter appears twice in a group; it would be moved twice. Give each once")
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            "parameters are on the meta device, where they have no values; give them memory first, "
            "net.to_empty(device='cpu'), and make the optimizer then"
        )
    taken = {name for other in others for name in other.get("param_names", ())}
    for name in (name for name, _ in given_params if name is not None):
        if name in taken:
            raise ValueError(f"two parameters are named {name!r}; names address the saved state, so give each its own")
        taken.add(name)
    for key, names in ((key, names) for link in links for key, names in link.aliases.items()):
        if key not in group and any(name in group for name in names) and key in shown:
            group[key] = tuple(group.get(name, old) for name, old in zip(names, shown[key], strict=True))
    return group


def _find_new(
    pattern: str, others: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> list[tuple[str, Tensor]]:
    if model is None:
        raise ValueError(
            f"parameters are called for by name ({pattern!r}), so the optimizer has to be given the module"
        )
    found = _groups.select(_groups.named_parameters(model), pattern)
    held = {id(param) for other in others for param in other["params"]}
    new = [(name, param) for name, param in found if id(param) not in held]
    if not new:
        raise ValueError(f"all parameters called {pattern!r} are in a group already; change its settings there")
    return new
