"""Dispatch on the type of an argument and on the class of the functional at once, also in calls of modules.

Torch runs hooks around whatever `self.forward` is, so for classes with registered actions `forward` asks whether it is
running on behalf of a call, and if so runs the action. Called directly, as `super().forward(x)` or from inside an
action, it is the method that was written. Classes without actions are left exactly as they are.
"""

import functools
import inspect
import itertools
import threading
import types
import typing
import weakref
from abc import get_cache_token
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, TypeVar

from torch import nn
from torch.compiler import is_dynamo_compiling

from moduli._torch import has_global_module_hooks

Action: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Action)
_Resolved: TypeAlias = tuple[weakref.ref[type], str | None, Action | None]

# A registration on any class may change what its subclasses resolve, so resolved answers are valid for one generation.
_generation = 0
_numbers = itertools.count()


class _Actions:
    """The registrations of one functional class, and what was resolved for it.

    It lives in that class's own `__dict__` and holds the types of objects weakly: a class made for one test or one
    request can be collected together with everything registered on it.
    """

    __slots__ = ("__weakref__", "generation", "registered", "resolved", "token")

    def __init__(self) -> None:
        # The functions are attributes of the functional class, and this holds their names: a compiler that traces a
        # call can treat a name as a constant, but not a function that it did not see coming from somewhere.
        self.registered: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
        # By id, because looking a class up in a weak dictionary costs more than the rest of a dispatched call. The
        # reference tells whether the id still belongs to the class it was stored for.
        self.resolved: dict[int, _Resolved] = {}
        self.generation = -1
        self.token: object = None


class Functional:
    """Something that acts on objects, in a way chosen by the type of the object and by its own class.

    Actions are registered per pair of types. Resolution walks the method resolution order of the object's type and,
    for each of its classes, that of the functional's class; the first registration met is used. So the object's own
    type counts before its bases, whichever functional class the registration was made on, and what is registered on a
    base functional holds for its subclasses until they register their own. An abstract base class matches what is
    registered as its virtual subclass, right after the last class of the object's order that it covers.

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
        members = tuple(_members(obj_type))

        def decorator(function: F) -> F:
            global _generation
            if not callable(function):
                raise TypeError(f"{cls.__name__}.register decorates a function, not {function!r}")
            registered = _actions(cls).registered
            name = f"_action_{next(_numbers)}"
            type.__setattr__(cls, name, function)
            for member in members:
                registered[member] = name
            _generation += 1
            return function

        return decorator

    @classmethod
    def get_applicable_types(cls, functional: "type[Functional] | None" = None) -> tuple[type, ...]:
        """The object types registered directly on a functional class, in the order of registration.

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
        actions = target.__dict__.get("_functional_actions")
        return () if actions is None else tuple(actions.registered)

    def allows(self, obj: Any) -> bool:
        """Whether `invoke` would find an action for this object.

        Raises:
            TypeError: If two unrelated abstract base classes cover the object and nothing decides between them.

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
            What the action returns.

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
    """The action of a functional class on a type of objects, or None."""
    if is_dynamo_compiling():
        name = _resolve_name(functional, obj_type)
        return None if name is None else getattr(functional, name)
    return _resolve(functional, obj_type)[2]


def _resolve(functional: type, obj_type: type) -> _Resolved:
    actions: _Actions | None = functional.__dict__.get("_functional_actions")
    if actions is None:
        actions = _actions(functional)
    if actions.generation != _generation or (actions.token is not None and actions.token != get_cache_token()):
        actions.resolved = {}
        actions.generation = _generation
        # Only classes that register abstract bases depend on who else is registered with those.
        actions.token = get_cache_token() if any(map(_is_abstract, _list_registered(functional))) else None
    key, resolved = id(obj_type), actions.resolved
    known = resolved.get(key)
    if known is None or known[0]() is not obj_type:
        name = _search(functional, obj_type)
        home = weakref.ref(obj_type, lambda _: resolved.pop(key, None))
        known = resolved[key] = (home, name, None if name is None else getattr(functional, name))
    return known


def _resolve_name(functional: type, obj_type: type) -> str | None:
    return _resolve(functional, obj_type)[1]


# In a compiled graph the class and the type of the argument are constants, and so is the action they lead to;
# registrations are not expected to change under code that is compiled already. The mark is what
# torch.compiler.assume_constant_result sets, without importing the compiler for it.
_resolve_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def describe_unregistered(functional: type, obj_type: type) -> str:
    """The sentence for a pair of types without an action."""
    known = sorted({klass.__name__ for klass in _list_registered(functional)})
    listing = f"registered types: {', '.join(known)}" if known else "no type is registered yet"
    return (
        f"{functional.__name__} has no action on {obj_type.__name__}; {listing}. "
        f"Add one with @{functional.__name__}.register({obj_type.__name__})"
    )


def _actions(functional: type) -> _Actions:
    actions = functional.__dict__.get("_functional_actions")
    if actions is None:
        actions = _Actions()
        type.__setattr__(functional, "_functional_actions", actions)
    return actions


def _list_registered(functional: type) -> Iterator[type]:
    for klass in functional.__mro__:
        actions = klass.__dict__.get("_functional_actions")
        if actions is not None:
            yield from list(actions.registered)


def _search(functional: type, obj_type: type) -> str | None:
    for candidates in _order(functional, obj_type):
        for klass in functional.__mro__:
            actions = klass.__dict__.get("_functional_actions")
            if actions is None:
                continue
            found = [candidate for candidate in candidates if candidate in actions.registered]
            if len(found) > 1:
                names = " and ".join(candidate.__name__ for candidate in found)
                raise TypeError(
                    f"{functional.__name__} cannot decide how to act on {obj_type.__name__}: {names} both cover it and "
                    f"neither derives from the other. Register {obj_type.__name__} itself"
                )
            if found:
                return typing.cast(str, actions.registered[found[0]])
    return None


def _order(functional: type, obj_type: type) -> Iterator[list[type]]:
    """Groups of object classes, most specific first; within a group nothing tells which is more specific."""
    lineage = obj_type.__mro__
    virtual = dict.fromkeys(
        klass
        for klass in _list_registered(functional)
        if _is_abstract(klass) and klass not in lineage and issubclass(obj_type, klass)
    )
    after: dict[type, list[type]] = {}
    for abstract in virtual:
        last = next(klass for klass in reversed(lineage) if issubclass(klass, abstract))
        after.setdefault(last, []).append(abstract)
    for klass in lineage:
        yield [klass]
        rest = after.get(klass, [])
        while rest:
            most = [one for one in rest if not any(other is not one and issubclass(other, one) for other in rest)]
            yield most
            rest = [one for one in rest if one not in most]


def _is_abstract(klass: type) -> bool:
    # A metaclass that answers issubclass itself can cover types outside the inheritance tree.
    return type(klass).__subclasscheck__ is not type.__subclasscheck__


def _members(obj_type: Any) -> Iterator[type]:
    if isinstance(obj_type, types.UnionType) or typing.get_origin(obj_type) is typing.Union:
        for member in typing.get_args(obj_type):
            yield from _members(member)
        return
    # A parametrised generic passes for a class in some Python versions, hence the first test.
    if typing.get_origin(obj_type) is not None or not inspect.isclass(obj_type) or obj_type is Any:
        raise TypeError(_explain_unusable(obj_type, "it is not a class"))
    try:
        issubclass(object, obj_type)
    except TypeError as error:
        raise TypeError(_explain_unusable(obj_type, f"membership cannot be decided by class ({error})")) from error
    yield obj_type


def _explain_unusable(obj_type: Any, why: str) -> str:
    origin = typing.get_origin(obj_type)
    remedy = f"register {origin.__name__} instead" if inspect.isclass(origin) else "register a class or a union of them"
    return f"cannot register {obj_type!r}: {why}; {remedy}"


# -- calls of modules -------------------------------------------------------------------------------------------------

_MARK: Final = "_moduli_forward"

# The module whose call is under way and has not reached `forward` yet, by thread. Nearly always empty: only calls with
# hooks around them need it.
_pending: Final[dict[int, nn.Module]] = {}


def install(cls: type) -> None:
    """Let calls of a class, and of the classes derived from it, reach their registered actions."""
    if next(_list_registered(cls), None) is None:
        return
    for klass in (cls, *list_descendants(cls)):
        forward = klass.__dict__.get("forward")
        if callable(forward) and not hasattr(forward, _MARK):
            type.__setattr__(klass, "forward", _make_dispatching(forward))
        elif not hasattr(klass.forward, _MARK):  # type: ignore[attr-defined]
            # Inherited from a class that has no actions itself, so its method must stay as it is.
            type.__setattr__(klass, "forward", _make_dispatching(_make_inherited(klass)))
        if klass._call_impl is not _call_impl:  # type: ignore[attr-defined]
            type.__setattr__(klass, "_call_impl", _call_impl)


def list_descendants(cls: type[Any]) -> list[type[Any]]:
    """The classes derived from a class, each once."""
    found = [each for child in cls.__subclasses__() for each in (child, *list_descendants(child))]
    return list(dict.fromkeys(found))


def _make_inherited(cls: Any) -> Action:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(cls, self).forward(*args, **kwargs)

    return forward


def _make_dispatching(forward: Action) -> Action:
    @functools.wraps(forward)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _pending and args and _pending.get(_thread()) is self:
            del _pending[_thread()]
            action = resolve(type(self), type(args[0]))
            if action is not None:
                return action(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    setattr(dispatch, _MARK, forward)
    return dispatch


def _thread() -> int:
    # A compiler traces in one thread and cannot look which one it is.
    return 0 if is_dynamo_compiling() else threading.get_ident()


def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
    if args and not (
        self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
        or has_global_module_hooks()
    ):
        # Nothing to run around it, so the way through torch and back is not needed.
        action = resolve(type(self), type(args[0]))
        if action is not None:
            return action(self, *args, **kwargs)
        forward = self.forward
        written = getattr(forward, _MARK, None)
        return forward(*args, **kwargs) if written is None else written(self, *args, **kwargs)
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
