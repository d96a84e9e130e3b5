"""Settings as methods of a link: its own groups, checks, and settings shared by all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from ._link_type import as_schedule
from ._settings import Schedule, Settings, check_values, refuse_string, same

if TYPE_CHECKING:
    from .module import Module


class LinkSettings:
    """Settings of a link; the attributes are described in `Module`."""

    vector_state: bool = False
    shared_settings: ClassVar[bool | tuple[str, ...]] = ()
    fixed_settings: ClassVar[tuple[str, ...]] = ()
    divides_params: ClassVar[bool] = False
    aliases: ClassVar[dict[str, tuple[str, ...]]] = {}
    defaults: dict[str, Any]
    settings: Settings
    children: dict[str, Module]
    _owner: Callable[[], Any] | None

    def set_param_groups(self, param_groups: Iterable[Mapping[str, Any]]) -> Self:
        """Set settings of this link for some parameters; they have priority over the optimizer's groups.

        Args:
            param_groups: Dictionaries with "params" (a tensor, or tensors) and settings.

        Returns:
            This link.
        """
        name = type(self).__name__
        entries = [param_groups] if isinstance(param_groups, Mapping | Tensor) else list(param_groups)
        for entry in entries:
            if not isinstance(entry, Mapping):
                what = f"got a {type(entry).__name__}; write [{{'params': [...], {next(iter(self.defaults), 'lr')!r}: ...}}]"
                raise TypeError(f"{name}.set_param_groups takes dictionaries with 'params' and settings, {what}")
        groups = [dict(entry) for entry in entries]
        for group in groups:
            self._check_group(group)
        for group in groups:
            tensors = group.pop("params")
            for param in [tensors] if isinstance(tensors, Tensor) else list(tensors):
                tensor = param[1] if isinstance(param, tuple) else param
                self.settings.local[tensor] = {**self.settings.local.get(tensor, {}), **self.resolve_aliases(group)}
        self.settings.forget()
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.relink()
        return self

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for a group without parameters, or with settings that this link does not accept."""
        name = type(self).__name__
        if "params" not in group:
            raise ValueError(f"{name}: a group needs 'params', the parameters it is for")
        own = {key: value for key, value in group.items() if key != "params"}
        for key in own:
            if key not in self.defaults and key not in self.aliases:
                raise ValueError(f"{name} has no setting {key!r}; it has {', '.join(self.defaults) or 'none'}")
        check_values(name, own, self.settings.binding.members)
        for key, value in self.resolve_aliases(own).items():
            self.check_setting(key, value)

    def check_setting(self, key: str, value: Any) -> None:
        """Raise TypeError or ValueError if this link's setting can't have this value."""
        default = self.defaults.get(key)
        if isinstance(default, int | float | Tensor | Schedule) and not isinstance(default, bool):
            refuse_string(type(self).__name__, key, value)

    def check_shared(self, params: Sequence[Tensor], every: bool = False) -> None:
        """Raise ValueError for groups that set two values of a setting that a link has once for all parameters.

        Args:
            params: The parameters of the link.
            every: Whether the link gets them as one tensor, so that every setting has one value.
        """
        if not self.divides_params:
            for child in self.children.values():
                child.check_shared(params, every)
        keys = self._list_shared(every)
        if not params or not (keys or self.fixed_settings):
            return
        name = type(self).__name__
        first, *others = {id(raw): raw for raw in map(self.settings.raw, params)}.values()
        for key in self.fixed_settings:
            for raw in (first, *others):
                if not same({key: raw[key]}, {key: self.defaults[key]}):
                    what = f"{name} was made with {self.defaults[key]!r}, which can't be changed"
                    raise ValueError(f"a group sets {key}={raw[key]!r}, but {what}")
        for key in keys:
            for other in others:
                if key in first and not same({key: first[key]}, {key: other[key]}):
                    what = f"{name} has one value of {key} for all parameters that it sees"
                    raise ValueError(f"{what}, but groups give it {first[key]!r} and {other[key]!r}; use m.Split")

    def _list_shared(self, every: bool) -> tuple[str, ...]:
        """Return the settings that have one value for all parameters."""
        if every or self.vector_state or self.shared_settings is True:
            return tuple(self.defaults)
        return self.shared_settings or ()

    def resolve_aliases(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings under the link's own names (`betas=(0.9, 0.99)` is beta1 and beta2)."""
        out: dict[str, Any] = {}
        for key, value in group.items():
            if key in self.aliases:
                names = self.aliases[key]
                out.update(zip(names, value if len(names) > 1 else (value,), strict=True))
            else:
                out[key] = as_schedule(value, self.defaults.get(key))
        return out

    def get_settings(self, params: Sequence[Tensor], key: Any, *more: str, cls: type = list) -> Any:
        """Return the values of one setting for each parameter; for several keys, one list for each.

        Args:
            params: The parameters.
            key: The name of the setting, or several.
            more: Further names.
            cls: The type of the lists.
        """
        rows = [self.settings[param] for param in params]
        if isinstance(key, str) and not more:
            return cls(row[key] for row in rows)
        keys = ([key] if isinstance(key, str) else list(key)) + list(more)
        return [cls(row[name] for row in rows) for name in keys]
