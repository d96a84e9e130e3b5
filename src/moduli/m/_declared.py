"""Links that declare their arguments, with their checks, as attributes of the class; and what a family of links exports."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, field
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, dataclass_transform, get_args, get_origin

from ..optim import Chainable, Module
from . import _checks as check

Ranges = Mapping[check.Check, tuple[str, ...]]
"""The arguments of a link that a check is for, by check."""

# What is checked under these names where a link says nothing else: memories, and what keeps a divisor from zero.
_USUAL = {
    **dict.fromkeys(("beta1", "beta2", "beta3"), check.allow(check.probability, None)),
    "eps": check.allow(check.non_negative, None),
}


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class DeclaredLink(Module):
    """A link whose arguments are the annotated attributes of its class, as those of a dataclass, after those of its bases.

    They are keywords, but for `name: Any = field(kw_only=False)`; `name: Any = field(default=1, init=False)` is what a base
    has as an argument, and this link not. The constructor is made from them and gives them to `collect`, which a link
    overrides that has to look at several of them. One with a constructor of its own ends it in `self.collect(locals())`.
    Outside of the catalogue only `name: float = field(default=1.0)` is an argument, and other attributes are what they are.

    Attributes:
        ranges: The arguments that a check of `_checks` is for, by check; those of the bases hold, too.
        kept: Arguments that become attributes, not settings; those of the bases do, too.
        base_options: What the constructor of the base in `optim` is given, besides the arguments of that name.
    """

    ranges: ClassVar[Ranges] = {}
    kept: ClassVar[tuple[str, ...]] = ()
    _fixed: ClassVar[Mapping[str, Any]] = {}
    base_options: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        found = {key: str(hint) for key, hint in inspect.get_annotations(cls).items() if key in vars(cls)}
        declared = {k: h for k, h in found.items() if _is_of_catalogue(cls) or isinstance(vars(cls)[k], Field)}
        hints = {key: hint for key, hint in declared.items() if "ClassVar" not in hint}
        if hints and "__init__" not in vars(cls):
            base = getattr(cls.__init__, "__signature__", inspect.signature(DeclaredLink.__init__))
            known, fixed = dict(base.parameters), dict(cls._fixed)
            for key, hint in hints.items():
                given = vars(cls)[key]
                delattr(cls, key)  # it would be taken for the value of the setting
                known[key] = _read_parameter(key, hint, given)
                if isinstance(given, Field) and not given.init:
                    fixed[key] = given.default
            shown = sorted((p for key, p in known.items() if key not in fixed), key=lambda p: p.kind)
            cls.__init__ = make_constructor(inspect.Signature(shown))  # type: ignore[method-assign]
            cls._fixed = fixed

    def __init__(self) -> None:
        self.collect({})

    def collect(self, given: Mapping[str, Any]) -> None:
        """Check the arguments, and make attributes, settings and children of them."""
        cls, arguments = type(self), dict(given)
        for key in ("self", "__class__"):  # of `locals()`
            arguments.pop(key, None)
        places = _find_places(cls)
        for key, check_value in places.checks:
            if key in arguments:
                check_value(cls.__name__, key, arguments[key])
        for key in places.kept:
            if key in arguments:
                setattr(self, key, arguments.pop(key))
        options = {key: arguments.pop(key) for key in places.options if key in arguments}
        links = {key: arguments.pop(key) for key in places.links if key in arguments}
        super().__init__(defaults=arguments, **options, **self.base_options)
        for key, link in links.items():
            self.set_child(key, link)


def _is_of_catalogue(cls: type) -> bool:
    return cls.__module__.startswith(f"{__package__}.")


def _read_parameter(key: str, hint: str, default: Any) -> inspect.Parameter:
    kinds = inspect.Parameter
    keyword = not isinstance(default, Field) or default.kw_only
    if isinstance(default, Field):
        default = kinds.empty if default.default is MISSING else default.default
    kind = kinds.KEYWORD_ONLY if keyword else kinds.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(key, kind, default=default, annotation=hint)


def make_constructor(signature: inspect.Signature) -> Any:
    """A constructor with this signature that gives its arguments to `collect`."""

    def __init__(self: DeclaredLink, *args: Any, **given: Any) -> None:
        bound = signature.bind(self, *args, **given)
        bound.apply_defaults()
        self.collect({**bound.arguments, **self._fixed})

    __init__.__signature__ = signature.replace(return_annotation="None")  # type: ignore[attr-defined]
    return __init__


class _Places(NamedTuple):
    """What is done with the arguments of a class, by name."""

    checks: list[tuple[str, check.Check]]
    kept: list[str]
    options: list[str]
    links: list[str]


@cache
def _find_places(cls: type) -> _Places:
    kinds = [kind for kind in cls.__mro__ if issubclass(kind, DeclaredLink)]
    ours = [
        kind for kind in reversed(kinds) if _is_of_catalogue(kind)
    ]  # hints of others may name what only type checkers see
    hints = {k: hint for kind in ours for k, hint in inspect.get_annotations(kind, eval_str=True).items()}
    checks = [(k, check.one_of(*get_args(hint))) for k, hint in hints.items() if get_origin(hint) is Literal]
    checks += [(k, found) for kind in kinds for found, keys in vars(kind).get("ranges", {}).items() for k in keys]
    checks += [(k, found) for k, found in _USUAL.items() if k in hints and k not in dict(checks)]
    base = next(kind for kind in cls.__mro__ if "__init__" in vars(kind) and kind not in kinds)
    return _Places(
        checks,
        [k for kind in kinds for k in vars(kind).get("kept", ())],
        list(inspect.signature(base.__init__).parameters),  # type: ignore[misc]
        [k for k, hint in hints.items() if hint in (Chainable, Chainable | None)],
    )


def publish_links(namespace: dict[str, Any]) -> None:
    """Set `__all__` in a family's `globals()`: the links that it defines, which are its classes without an underscore."""
    family = namespace["__name__"]
    links = {name: value for name, value in namespace.items() if isinstance(value, type) and issubclass(value, Module)}
    # Type checkers see no `__all__`, and so all that the family's files define.
    namespace["__all__"] = sorted(name for name, link in links.items() if name[0] != "_" and family in link.__module__)
