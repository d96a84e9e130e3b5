"""Arguments of links as annotated attributes of their classes, as in a dataclass.

`limit: float = 1.0` in the class of a link is a keyword of its constructor and a setting. The rule, in the order in which it is
applied to each annotated attribute of a class:

1. A class with an `__init__` in its own body declares nothing: that constructor has the arguments.
2. `ClassVar[...]` and names with an underscore at the front are attributes of the class.
3. A name that the constructor of a base takes is that argument, with another default or another type.
4. A name that a base has as an attribute (`elementwise`, `needs`, `members`) keeps its meaning there, a property of the
   class. The name of a method, or of an attribute of every link (`settings`, `state`), raises TypeError.
5. Everything else is an argument: a keyword, required where it has no default. Its value is a setting, whatever its type
   (float, bool, str, a function), and parameter groups may change it. Two kinds are no settings: links (`Chainable`), which
   become children, and the arguments that are named in `attributes`, which become attributes of the link.

`dataclasses.field` adds what an annotation can't express: `field(kw_only=False)` for an argument that may be positional,
`field(default_factory=list)`, and `field(default=1, init=False)` for a fixed value of an argument of a base class.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from . import ranges as check
from ._checks import BASE_ATTRIBUTES
from ._link_type import check_defaults

Ranges = Mapping[check.Check, tuple[str, ...]]
"""For each check the names of the arguments that it applies to."""

# Default checks of arguments by name: decay rates of averages, and the summand that keeps a divisor from zero.
_USUAL = {
    **dict.fromkeys(("beta1", "beta2", "beta3"), check.allow(check.fraction, None)),
    "eps": check.allow(check.non_negative, None),
}
_Kind = inspect.Parameter


class DeclaredArguments:
    """The part of a link that generates its constructor from the annotated attributes of its class."""

    #: The names of the declared arguments.
    _declared: ClassVar[frozenset[str]] = frozenset()
    #: The values of arguments that are fixed, and not in the constructor.
    _fixed: ClassVar[Mapping[str, Any]] = {}
    #: The uses of the arguments, computed when they are first needed.
    _uses: ClassVar[Any] = None

    if TYPE_CHECKING:
        defaults: dict[str, Any]

        def set_child(self, key: str, module: Any) -> None:
            """Give this link a child."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__init__" not in vars(cls):
            _declare(cls)

    def collect(self, given: Mapping[str, Any]) -> None:
        """Check the arguments, and store them as attributes, settings and children.

        Override it to check several arguments together. A constructor that is written by hand may end in
        `self.collect(locals())`.

        Args:
            given: The arguments by name.
        """
        settings, links = self._take_attributes(given)
        uses = _find_uses(type(self))
        options = {key: settings.pop(key) for key in uses.options if key in settings}
        uses.template(self, defaults=settings, **options)
        for key, link in links.items():
            self.set_child(key, link)

    def _add(self, given: Mapping[str, Any]) -> None:
        """Add declared arguments to a link after its handwritten constructor has run."""
        settings, links = self._take_attributes(given)
        check_defaults(type(self).__name__, settings)
        self.defaults.update(settings)
        for key, link in links.items():
            self.set_child(key, link)

    def _take_attributes(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check the arguments, set those that become attributes, and return the others: settings, and links."""
        name, uses = type(self).__name__, _find_uses(type(self))
        # A handwritten constructor passes `locals()`, which has these two besides its arguments.
        settings = {key: value for key, value in given.items() if key not in ("self", "__class__")}
        for key, check_value in uses.checks:
            if key in settings:
                check_value(name, key, settings[key])
        for key in uses.attributes:
            if key in settings:
                setattr(self, key, settings.pop(key))
        return settings, {key: settings.pop(key) for key in uses.links if key in settings}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kind = self.__class__  # not type(self), which is a recorder while hooks are traced
            attribute = getattr(kind, name, None)
            if isinstance(attribute, property):
                return attribute.fget(self)  # raises the error again that made Python call __getattr__
            what = f"{kind.__name__!r} object has no attribute {name!r}"
            if name in kind._declared:
                how = f"setting[{name!r}] in hooks, self.settings[param][{name!r}] elsewhere"
                what += f": it is a setting, of which each parameter may have its own; read {how}"
                what += f", or declare `attributes = ({name!r},)` for one value"
            raise AttributeError(what, name=name, obj=self)

    def check_setting(self, key: str, value: Any) -> None:
        """Check a value that a group sets like one that is passed to the constructor."""
        super().check_setting(key, value)  # type: ignore[misc]
        for name, check_value in _find_uses(type(self)).checks:
            if name == key:
                check_value(type(self).__name__, key, value)


# ---------------------------------------------------------------------- the constructor of a class


def _declare(cls: type[DeclaredArguments]) -> None:
    """Generate the constructor of a class that declares arguments, and remove them from the class attributes."""
    base: Any = cls.__init__
    generated = hasattr(base, "__signature__")
    template = not generated and "defaults" in inspect.signature(base).parameters
    this = inspect.Parameter("self", _Kind.POSITIONAL_OR_KEYWORD)
    parameters = {"self": this} if template else dict(inspect.signature(base).parameters)
    options = _list_options(_find_template(cls))
    fixed, own, factories = dict(cls._fixed), {}, {}
    for key, hint in _list_arguments(cls, {*parameters, *fixed, *options}).items():
        value = vars(cls).get(key, MISSING)
        if value is not MISSING:
            delattr(cls, key)  # otherwise the class attribute would hide the setting
        before = parameters.get(key)
        if before is not None and before.default is _Kind.empty:
            del parameters[key]  # the order of arguments is that of the class with the default
        parameters[key] = own[key] = _read_parameter(cls, key, hint, value, before)
        fixed.pop(key, None)
        if isinstance(value, Field):
            if value.default_factory is not MISSING:
                factories[key] = value.default_factory
            if not value.init:
                fixed[key] = value.default
    if not own:
        return
    cls._declared, cls._fixed = cls._declared | own.keys(), fixed
    visible = sorted((p for key, p in parameters.items() if key not in fixed), key=lambda p: p.kind)
    signature = inspect.Signature(visible)
    if template or (generated and not hasattr(base, "by_hand")):
        cls.__init__ = make_constructor(signature, {**getattr(base, "factories", {}), **factories})  # type: ignore[method-assign]
        return
    _check_extensible(cls, base, own, options)
    cls.__init__ = _extend_constructor(base, signature, own, factories)  # type: ignore[method-assign]


def _list_arguments(cls: type, inherited: Collection[str]) -> dict[str, Any]:
    """Return the annotations of a class that declare arguments: those it inherits, or whose name no base has."""
    hints: dict[str, Any] = {}
    for key, hint in inspect.get_annotations(cls).items():
        text = hint if isinstance(hint, str) else str(hint)
        if "ClassVar" not in text and key[0] != "_" and (key in inherited or _is_free(cls, key)):
            hints[key] = hint
    return hints


def _check_extensible(cls: type, base: Any, own: Mapping[str, inspect.Parameter], options: Collection[str]) -> None:
    """Raise TypeError for an argument that can't be added to a constructor written by hand.

    Args:
        cls: The class that declares the arguments.
        base: The constructor.
        own: The declared arguments.
        options: The keywords of every link.
    """
    written = inspect.signature(base).parameters
    for key, parameter in own.items():
        if key not in written and (parameter.kind is not _Kind.KEYWORD_ONLY or (key in options and key != "inner")):
            what = f"{cls.__name__}.{key} can't be added to a constructor that is written by hand"
            raise TypeError(f"{what}; write __init__, or make it a keyword of another name")


def _is_free(cls: type, key: str) -> bool:
    """Return whether no base class has a name; raise TypeError for the name of a method or of an attribute of every link."""
    if key in BASE_ATTRIBUTES or key == "state":
        raise TypeError(f"{cls.__name__}.{key}: every link has {key!r} already; give the argument another name")
    for kind in cls.__mro__[1:]:
        value = vars(kind).get(key)
        if isinstance(value, types.FunctionType):
            what = f"{kind.__name__}.{key} is a method of every {kind.__name__}"
            raise TypeError(f"{cls.__name__}.{key}: {what}; give the argument another name")
        if key in vars(kind) or key in inspect.get_annotations(kind):
            return False
    return True


def _read_parameter(cls: type, key: str, hint: Any, value: Any, before: inspect.Parameter | None) -> inspect.Parameter:
    """Return the parameter of the constructor for an annotated attribute.

    Args:
        cls: The class.
        key: The name of the attribute.
        hint: Its annotation.
        value: Its value: a default, a `field`, or `MISSING`.
        before: The parameter of the base class with this name; None if there is none.
    """
    default, keyword = value, True
    if isinstance(value, Field):
        default, keyword = value.default, bool(value.kw_only)
        if value.default_factory is not MISSING:
            default = None  # replaced by the factory's value
    if isinstance(default, list | dict | set):
        what = f"the default is a {type(default).__name__}, which all links would share"
        raise TypeError(f"{cls.__name__}.{key}: {what}; write field(default_factory={type(default).__name__})")
    if default is MISSING:
        default = _Kind.empty if before is None else before.default
        keyword = keyword if before is None or isinstance(value, Field) else before.kind is _Kind.KEYWORD_ONLY
    kind = _Kind.KEYWORD_ONLY if keyword else _Kind.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(key, kind, default=default, annotation=hint)


def make_constructor(signature: inspect.Signature, factories: Mapping[str, Callable[[], Any]] | None = None) -> Any:
    """Return a constructor that passes its arguments to `collect`.

    Args:
        signature: Its signature, with `self`.
        factories: Functions that compute the defaults of some arguments.
    """
    makers = dict(factories or {})

    def __init__(self: DeclaredArguments, *args: Any, **given: Any) -> None:
        bound = signature.bind(self, *args, **given)
        for key, make in makers.items():
            if key not in bound.arguments:
                bound.arguments[key] = make()
        bound.apply_defaults()
        self.collect({**bound.arguments, **self._fixed})

    __init__.__signature__ = signature.replace(return_annotation="None")  # type: ignore[attr-defined]
    __init__.factories = makers  # type: ignore[attr-defined]
    return __init__


def _extend_constructor(
    base: Any, signature: inspect.Signature, own: Mapping[str, inspect.Parameter], factories: Mapping[str, Any]
) -> Any:
    """Return a constructor that takes the arguments of a handwritten one, and further ones.

    Args:
        base: The handwritten constructor.
        signature: The signature of the new one.
        own: The parameters that the class declares.
        factories: Functions that compute the defaults of some of these.
    """
    accepted = inspect.signature(base).parameters

    def __init__(self: DeclaredArguments, *args: Any, **given: Any) -> None:
        missing = own.keys() - signature.bind(self, *args, **given).arguments.keys()
        defaults = {key: factories[key]() if key in factories else own[key].default for key in missing}
        arguments = {**given, **defaults, **{key: value for key, value in self._fixed.items() if key in own}}
        base(self, *args, **{key: value for key, value in arguments.items() if key not in own or key in accepted})
        self._add({key: value for key, value in arguments.items() if key in own and key not in accepted})

    __init__.__signature__ = signature.replace(return_annotation="None")  # type: ignore[attr-defined]
    __init__.by_hand = True  # type: ignore[attr-defined]
    return __init__


# ---------------------------------------------------------------------- the use of each argument


class _Uses(NamedTuple):
    """The uses of the arguments of a class; an argument that is in none of these lists is a setting.

    Attributes:
        checks: The check of an argument, with its name.
        attributes: The arguments that become attributes of the link.
        options: The arguments that are passed to `template` by name.
        links: The arguments that become children.
        template: The constructor of a base class that takes the settings as `defaults`.
    """

    checks: list[tuple[str, check.Check]]
    attributes: list[str]
    options: list[str]
    links: list[str]
    template: Any


def _find_uses(cls: type[DeclaredArguments]) -> _Uses:
    """Return the uses of the arguments of a class."""
    if "_uses" not in vars(cls):
        kinds = [kind for kind in cls.__mro__ if issubclass(kind, DeclaredArguments)]
        hints = {key: _read_hint(kind, hint) for kind in reversed(kinds) for key, hint in _get_hints(kind).items()}
        checks = [(key, check.one_of(*choices)) for key, hint in hints.items() if (choices := _list_choices(hint))]
        ranges = [vars(kind).get("ranges", {}) for kind in kinds]
        checks += [(key, rule) for each in ranges for rule, keys in each.items() if callable(rule) for key in keys]
        checks += [(key, rule) for key, rule in _USUAL.items() if key in hints and key not in dict(checks)]
        template = _find_template(cls)
        cls._uses = _Uses(
            checks,
            [key for kind in kinds for key in vars(kind).get("attributes", ())],
            _list_options(template),
            [key for key, hint in hints.items() if _is_link(hint)],
            template,
        )
    return cls._uses  # type: ignore[no-any-return]


def _find_template(cls: type) -> Any:
    """Return the first constructor among the bases that takes the settings as `defaults`."""
    constructors = (vars(kind)["__init__"] for kind in cls.__mro__ if "__init__" in vars(kind))
    return next(each for each in constructors if "defaults" in inspect.signature(each).parameters)


def _list_options(template: Any) -> list[str]:
    """Return the arguments of a constructor besides `self` and the settings."""
    return [key for key in inspect.signature(template).parameters if key not in ("self", "defaults")]


def _get_hints(kind: type) -> Mapping[str, Any]:
    return {key: hint for key, hint in inspect.get_annotations(kind).items() if "ClassVar" not in str(hint)}


class _Names(dict[str, Any]):
    """The namespace of annotations. A name that only type checkers import is `Any`, unless it decides what an argument becomes."""

    def __missing__(self, name: str) -> Any:
        from .module import Chainable, Module

        return {"Literal": Literal, "Chainable": Chainable, "Module": Module}.get(name, Any)


def _read_hint(kind: type, hint: Any) -> Any:
    """Return the type of an annotation; `Any` if it can't be evaluated at run time."""
    if not isinstance(hint, str):
        return hint
    spaces = (vars(builtins), vars(sys.modules.get(kind.__module__, builtins)), vars(kind))
    names = _Names({name: value for space in spaces for name, value in space.items()})
    try:
        return eval(hint, {}, names)
    except (SyntaxError, NameError, AttributeError, TypeError):
        return Any


def _list_choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of `Literal[...]` and `Literal[...] | None`; none for other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    if len(parts) != 2 or get_origin(parts[0]) is not Literal or parts[1] is not types.NoneType:
        return ()
    return (*get_args(parts[0]), None)


def _is_link(hint: Any) -> bool:
    """Return whether a type is that of links: `Chainable`, a link, a sequence of links, or one of these or None."""
    from .module import Module

    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    parts = tuple(part for part in parts if part is not types.NoneType)
    items = [get_args(part)[0] if get_origin(part) is Sequence and get_args(part) else part for part in parts]
    return bool(items) and all(isinstance(item, type) and issubclass(item, Module) for item in items)
