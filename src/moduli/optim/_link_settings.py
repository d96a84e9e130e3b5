"""The part of a link that has settings: for each parameter, shared by all, and under other names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from ._arguments import as_schedule
from ._groups import same
from ._settings import Settings, check_members, check_number

if TYPE_CHECKING:
    from .module import Module


class LinkSettings:
    """Settings of a link; the attributes are described in `Module`."""

    vector_state: bool
    shared_settings: ClassVar[bool | tuple[str, ...]]
    fixed_settings: ClassVar[tuple[str, ...]]
    divides_params: ClassVar[bool]
    aliases: ClassVar[dict[str, tuple[str, ...]]]
    defaults: dict[str, Any]
    settings: Settings
    children: dict[str, Module]
    _owner: Callable[[], Any] | None

    def set_param_groups(self, param_groups: Iterable[Mapping[str, Any]]) -> Self:
        """Settings of this link for some parameters; they come before the optimizer's groups.

        Args:
            param_groups: Dictionaries with "params" (a tensor, or tensors) and settings.

        Returns:
            This link.
        """
        groups = [dict(param_groups)] if isinstance(param_groups, Mapping) else [dict(group) for group in param_groups]
        known = {**self.defaults, **dict.fromkeys(self.aliases)}
        for group in groups:
            if "params" not in group:
                raise ValueError(f"{type(self).__name__}: a group needs 'params', the parameters it is for")
            for key, value in group.items():
                if key == "params":
                    continue
                if key not in known:
                    raise ValueError(
                        f"{type(self).__name__} has no setting {key!r}; it has {', '.join(self.defaults) or 'none'}"
                    )
                check_number(type(self).__name__, key, value)
            binding = self.settings.binding
            check_members(type(self).__name__, group, None if binding is None else binding.members)
        for group in groups:
            tensors = group.pop("params")
            for param in [tensors] if isinstance(tensors, Tensor) else list(tensors):
                found = param[1] if isinstance(param, tuple) else param
                self.settings.local[found] = {**self.settings.local.get(found, {}), **self.resolve_aliases(group)}
        self.settings.forget()
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.relink()
        return self

    def check_shared(self, params: Sequence[Tensor], every: bool = False) -> None:
        """Refuse groups that give this link or one inside it two values of a setting that has one for all parameters.

        Args:
            params: The parameters that it sees.
            every: Whether it sees them as one tensor, so that there is one value of every setting.
        """
        if not self.divides_params:
            for child in self.children.values():
                child.check_shared(params, every)
        if not (every or self.shared_settings or self.vector_state or self.fixed_settings) or not params:
            return
        raws = list({id(raw): raw for raw in self.settings.raw_of_all(params)}.values())
        for raw in raws if self.fixed_settings else ():
            for key in self.fixed_settings:
                if not same({key: raw[key]}, {key: self.defaults[key]}):
                    raise ValueError(
                        f"a group sets {key}={raw[key]!r}, but {type(self).__name__} was made with {self.defaults[key]!r}, "
                        f"which can't be changed; say {type(self).__name__}({key}={raw[key]!r})"
                    )
        whole = every or self.vector_state or self.shared_settings is True
        keys = tuple(self.defaults) if whole else self.shared_settings
        for key in keys or ():  # type: ignore[union-attr]
            for other in raws[1:]:
                first = raws[0]
                if key in first and not same({key: first[key]}, {key: other[key]}):
                    raise ValueError(
                        f"{type(self).__name__} has one value of {key} for all parameters that it sees, but groups give it "
                        f"{first[key]!r} and {other[key]!r}; give one, or use m.Split to let it see some of them"
                    )

    def resolve_aliases(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under their own names (`betas=(0.9, 0.99)` is beta1 and beta2)."""
        out: dict[str, Any] = {}
        for key, value in group.items():
            if key in self.aliases:
                names = self.aliases[key]
                out.update(zip(names, value if len(names) > 1 else (value,), strict=True))
            else:
                out[key] = as_schedule(value, self.defaults.get(key))
        return out

    def get_settings(self, params: Sequence[Tensor], key: Any, *more: str, cls: type = list) -> Any:
        """Values of one setting for each parameter; for several keys, one list for each."""
        rows = [self.settings[param] for param in params]
        if isinstance(key, str) and not more:
            return cls(row[key] for row in rows)
        keys = ([key] if isinstance(key, str) else list(key)) + list(more)
        return [cls(row[name] for row in rows) for name in keys]
