"""Dispatch on the type of an argument and on the class of the functional at once, also in calls of modules.

Torch runs hooks around whatever `self.forward` is. So for classes with registered actions `forward` is replaced by a function
that runs the action if it is reached through a call of the module. Called directly, as `super().forward(x)` or from inside an
action, it runs the original method. Classes without actions are not modified.
"""

import functools
import itertools
import threading
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from torch import nn
from torch.compiler import is_dynamo_compiling

Action: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Action)
_NO_ACTION: Final[Action] = lambda obj: None  # noqa: E731 - only its identity counts

_numbers = itertools.count()
# The names of the actions registered on each functional class, by the type of the object.
_registered: Final[weakref.WeakKeyDictionary[type, weakref.WeakKeyDictionary[type, str]]] = weakref.WeakKeyDictionary()


class Functional:
    """A callable whose action on an object is chosen by the type of the object and by its own class.

    Actions are registered per pair of types. Resolution walks the method resolution order of the object's type and,
    for each of its classes, that of the functional's class; the first registration met is used. So the object's own
    type precedes its bases, whichever functional class the registration was made on, and a registration on a
    base functional applies to its subclasses until they register their own. An abstract base class also matches its
    virtual subclasses, as in `functools.singledispatch`.

    Example:
        >>> class Describe(Functional):
        ...     pass
        >>> @Describe.register(int | float)
        ... def _(describe, obj, unit=""):
        ...     return f"the number {obj}{unit}"
        >>> Describe()(3, unit=" m"), Describe().allows("three"), Describe().allows(True)
        ('the number 3 m', False, True)
        >>> Describe.get_applicable_types()
        (<class 'int'>, <class 'float'>)
    """

    @classmethod
    def register(cls, obj_type: Any) -> Callable[[F], F]:
        """Register a function as the action of this class on objects of a type.

        A call of a module whose first argument is of that type runs it instead of `forward`, with hooks and `compile()`
        honoured.

        Args:
            obj_type: A class, an abstract base class, or a union of such (`int | str`), which registers each member.

        Returns:
            A decorator. The function it decorates is called `(functional, obj, **kwargs)` and returned unchanged.

        Raises:
            TypeError: If no object could be recognised as an instance of `obj_type` by its class alone.

        Example:
            >>> class Double(Functional):
            ...     pass
            >>> @Double.register(str)
            ... def _(double, obj):
            ...     return obj + obj
            >>> Double()("ab")
            'abab'
        """
        members = _list_members(obj_type)

        def decorator(function: F) -> F:
            if not callable(function):
                raise TypeError(f"{cls.__name__}.register decorates a function, not {function!r}")
            # The function is stored as an attribute of the functional class and the table holds its name: a compiler that
            # traces a call can treat a name as a constant, but not a function of unknown origin.
            name = f"_action_{next(_numbers)}"
            type.__setattr__(cls, name, function)
            _registered.setdefault(cls, weakref.WeakKeyDictionary()).update(dict.fromkeys(members, name))
            for each in (cls, *list_descendants(cls)):
                type.__setattr__(each, "_dispatcher", None)
            if issubclass(cls, nn.Module):
                install(cls)
            return function

        return decorator

    @classmethod
    def get_applicable_types(cls, functional: "type[Functional] | None" = None) -> tuple[type, ...]:
        """Return the object types registered directly on a functional class, in the order of registration.

        Types registered on its bases apply too (`allows` says so) but are listed by those bases.

        Args:
            functional: The class to inspect; None is the class this is called on.

        Raises:
            TypeError: If `functional` is no class of functionals.

        Example:
            >>> class Base(Functional):
            ...     pass
            >>> _ = Base.register(int)(lambda functional, obj: obj)
            >>> class Derived(Base):
            ...     pass
            >>> Derived.get_applicable_types(), Derived.get_applicable_types(Base), Derived().allows(1)
            ((), (<class 'int'>,), True)
        """
        target = cls if functional is None else functional
        if not (isinstance(target, type) and issubclass(target, Functional)):
            raise TypeError(f"get_applicable_types takes a subclass of Functional, not {target!r}")
        return tuple(_registered.get(target, ()))

    def allows(self, obj: Any) -> bool:
        """Whether `invoke` would find an action for this object.

        Raises:
            TypeError: If two unrelated abstract base classes match the object, so that the choice is ambiguous.

        Example:
            >>> class Length(Functional):
            ...     pass
            >>> _ = Length.register(list)(lambda length, obj: len(obj))
            >>> Length().allows([1]), Length().allows(1)
            (True, False)
        """
        return resolve(type(self), type(obj)) is not None

    def invoke(self, obj: Any, **kwargs: Any) -> Any:
        """Apply the registered action to an object.

        Args:
            obj: The object, on whose type the action is chosen.
            **kwargs: Passed on to the action.

        Returns:
            The result of the action.

        Raises:
            NotImplementedError: If nothing is registered for this pair of types.

        Example:
            >>> class Length(Functional):
            ...     pass
            >>> _ = Length.register(list)(lambda length, obj: len(obj))
            >>> Length().invoke([1, 2, 3])
            3
        """
        action = resolve(type(self), type(obj))
        if action is None:
            raise NotImplementedError(describe_unregistered(type(self), type(obj)))
        return action(self, obj, **kwargs)

    def __call__(self, obj: Any, **kwargs: Any) -> Any:
        return self.invoke(obj, **kwargs)


def resolve(functional: type, obj_type: type) -> Action | None:
    """Return the action of a functional class on a type of object, or None."""
    name = _resolve_name(functional, obj_type)
    return None if name is None else getattr(functional, name)


def _resolve_name(functional: type, obj_type: type) -> str | None:
    dispatcher: Any = functional.__dict__.get("_dispatcher")
    if dispatcher is None:
        dispatcher = functools.singledispatch(_NO_ACTION)
        for each, name in _gather_actions(functional).items():
            dispatcher.register(each, name)
        type.__setattr__(functional, "_dispatcher", dispatcher)
    try:
        name_of_action = dispatcher.dispatch(obj_type)
    except RuntimeError as error:
        raise TypeError(
            f"{functional.__name__} cannot decide how to act on {obj_type.__name__}: {error}. "
            f"Register {obj_type.__name__} itself"
        ) from None
    return None if name_of_action is _NO_ACTION else name_of_action


# In a compiled graph the class and the type of the argument are constants, and so is the action they lead to;
# registrations are not expected to change under code that is compiled already. The mark is what
# torch.compiler.assume_constant_result sets, without importing the compiler for it.
_resolve_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _gather_actions(functional: type) -> dict[type, str]:
    """Return the names of the actions registered on a class and its bases, by object type; its own override theirs."""
    return {each: name for klass in reversed(functional.__mro__) for each, name in _registered.get(klass, {}).items()}


def describe_unregistered(functional: type, obj_type: type) -> str:
    """Return the error text for a pair of types without an action."""
    names = sorted({each.__name__ for each in _gather_actions(functional)})
    listing = f"registered types: {', '.join(names)}" if names else "no type is registered yet"
    return (
        f"{functional.__name__} has no action on {obj_type.__name__}; {listing}. "
        f"Add one with @{functional.__name__}.register({obj_type.__name__})"
    )


def _list_members(obj_type: Any) -> tuple[type, ...]:
    """Return the classes that a registration applies to: the members of a union, or the class itself."""
    union = isinstance(obj_type, types.UnionType) or typing.get_origin(obj_type) is typing.Union
    members = typing.get_args(obj_type) if union else (obj_type,)
    for member in members:
        try:
            if not isinstance(member, type) or member is Any:
                raise TypeError("it is not a class")
            issubclass(object, member)
        except TypeError as error:
            raise TypeError(f"cannot register {obj_type!r}: {error}; register a class or a union of them") from error
    return members


# -- calls of modules -------------------------------------------------------------------------------------------------

_MARK: Final = "_moduli_dispatches"

# The module that is being called and has not reached `forward` yet, by thread.
_pending: Final[dict[int, nn.Module]] = {}


def install(cls: type) -> None:
    """Make calls of a class with actions, and of its subclasses, dispatch before `forward` runs."""
    if not _gather_actions(cls):
        return
    for klass in (cls, *list_descendants(cls)):
        # Set on this class only: the class without actions that `forward` may be inherited from stays unmodified.
        if not hasattr(klass.forward, _MARK):  # type: ignore[attr-defined]
            type.__setattr__(klass, "forward", _make_dispatching(klass.forward))  # type: ignore[attr-defined]
        type.__setattr__(klass, "_call_impl", _call_impl)


def list_descendants(cls: type[Any]) -> list[type[Any]]:
    """Return all direct and indirect subclasses of a class, each once."""
    classes = [each for child in cls.__subclasses__() for each in (child, *list_descendants(child))]
    return list(dict.fromkeys(classes))


def _make_dispatching(forward: Action) -> Action:
    @functools.wraps(forward)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _pending and args and _pending.get(_thread()) is self:
            del _pending[_thread()]
            action = resolve(type(self), type(args[0]))
            if action is not None:
                return action(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    setattr(dispatch, _MARK, True)
    return dispatch


def _thread() -> int:
    # The compiler traces in one thread and cannot trace `get_ident`.
    return 0 if is_dynamo_compiling() else threading.get_ident()


def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
    thread = _thread()
    outer = _pending.get(thread)
    _pending[thread] = self
    try:
        return nn.Module._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        if outer is None:
            _pending.pop(thread, None)
        else:
            _pending[thread] = outer
