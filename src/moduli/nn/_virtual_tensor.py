"""VirtualTensor: a derived tensor made at run time, with its own dtype and device; above 400 lines because it is one class."""

import copy
import copyreg
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn

from moduli.labels import Tensor

from ._scope import compute, reuse, scopes

Materializer = str | Callable[[Any, torch.dtype, torch.device], Any]


class VirtualTensorAttributes(NamedTuple):
    """Names of the attributes that a `VirtualTensor` adds to its owner.

    Attributes:
        ref: The reference tensor, an empty buffer that carries dtype and device.

    Example:
        >>> VirtualTensorAttributes(ref="_w_ref").ref
        '_w_ref'
    """

    ref: str


class VirtualTensor:
    """A tensor attribute derived from other attributes of a module, cast to a dtype and device that follow the module.

    It adds one empty buffer, `_{name}_ref`, to its owner: `owner.to(...)`, `owner.half()` and the like convert it, and
    with it the value. The value is computed when it is read, as with the `virtual` decorator, which new code should use.
    In expressions a VirtualTensor is replaced by its value: it can
    be added, multiplied, indexed and passed to torch functions, and gradients reach the sources.

    Copies and pickles of the owner have a VirtualTensor of their own. When a VirtualTensor is garbage-collected, it
    removes the buffer it added, unless another one has taken over the name.

    Args:
        owner: The module to which the attribute belongs; it is referenced weakly.
        name: The name of the attribute, an identifier.
        materializer: The name of a method of the owner, called `(dtype, device)`, or a function, called
            `(owner, dtype, device)`. A method is looked up at every computation, so no reference to it is stored.
        dtype: The data type of the value; torch's default if None.
        device: The device of the value; torch's default if None.
        persist: Whether the reference buffer is part of the owner's state dict, and the dtype restored from it.

    Raises:
        AttributeError: If `materializer` is a string and the owner has no such attribute.
        TypeError: If that attribute is not a method, or `materializer` is neither a string nor callable.
        ValueError: If the name is not an identifier.

    Example:
        >>> import torch
        >>> from moduli.nn import VirtualTensor
        >>> m = torch.nn.Linear(2, 1, bias=False)
        >>> VirtualTensor.create(m, "doubled", lambda module, dtype, device: 2 * module.weight)
        >>> torch.equal(m.doubled.value, 2 * m.weight), torch.equal(torch.sin(m.doubled), torch.sin(2 * m.weight))
        (True, True)
        >>> _ = m.double()
        >>> m.doubled.dtype, m.doubled.value.dtype
        (torch.float64, torch.float64)
    """

    LinkedAttributes: Final = VirtualTensorAttributes

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        materializer: Materializer,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        persist: bool = False,
    ) -> None:
        arguments: tuple[Any, ...] = owner, name
        if not isinstance(arguments[0], nn.Module) or not isinstance(arguments[1], str):
            kinds = " and ".join(type(each).__name__ for each in arguments)
            raise TypeError(f"a virtual tensor has a module as owner and a string as name, not {kinds}")
        if not name.isidentifier() or iskeyword(name):
            raise ValueError(f"the name of a virtual tensor must be an identifier, not {name!r}")
        if not isinstance(materializer, str) and not callable(materializer):
            raise TypeError(
                f"the materializer of {name!r} must be the name of a method, or a function, not {materializer!r}"
            )
        if isinstance(materializer, str):
            if not hasattr(owner, materializer):
                raise AttributeError(
                    f"{type(owner).__name__} has no attribute {materializer!r} to compute {name!r} with"
                )
            if not isinstance(getattr(owner, materializer), types.MethodType):
                raise TypeError(
                    f"{type(owner).__name__}.{materializer} must be a method to compute the virtual tensor {name!r}; for "
                    "another kind of function pass the function itself, called (owner, dtype, device)"
                )
        reference = torch.empty(0, dtype=dtype, device=device)
        if hasattr(owner, f"_{name}_ref") and f"_{name}_ref" not in _registry.get(owner, {}):
            raise AttributeError(
                f"{type(owner).__name__} already has an attribute '_{name}_ref', which a VirtualTensor named {name!r} needs "
                "for its reference; choose another name"
            )
        owner.register_buffer(f"_{name}_ref", reference, persistent=persist)
        self._bind(owner, name, materializer, persist)

    def _bind(self, owner: nn.Module, name: str, materializer: Materializer, persist: bool) -> None:
        self._owner = weakref.ref(owner)
        self._name, self._ref, self._materializer, self._persist = name, f"_{name}_ref", materializer, persist
        # A copy under construction gets its hooks together with its other attributes.
        if persist and "_load_state_dict_pre_hooks" in owner.__dict__:
            _restore_dtypes_on_load(owner)
        self._token = object()
        _registry.setdefault(owner, {})[self._ref] = self._token
        if type(owner)._replicate_for_data_parallel is nn.Module._replicate_for_data_parallel:
            owner.__dict__["_replicate_for_data_parallel"] = _Replicator(owner)
        weakref.finalize(self, _release, self._owner, self._ref, self._token).atexit = False

    @classmethod
    def create(
        cls,
        owner: nn.Module,
        name: str,
        materializer: Materializer,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        persist: bool = False,
    ) -> None:
        """Create a virtual tensor and assign it: `owner.name = VirtualTensor(owner, name, materializer)`.

        Args:
            owner: The module to which the attribute belongs.
            name: The name of the attribute.
            materializer: The name of a method, or a function, that computes the value.
            dtype: The data type of the value; torch's default if None.
            device: The device of the value; torch's default if None.
            persist: Whether the reference buffer is part of the owner's state dict.

        Example:
            >>> import torch
            >>> from moduli.nn import VirtualTensor
            >>> m = torch.nn.Linear(2, 1)
            >>> VirtualTensor.create(m, "row", lambda module, dtype, device: module.weight[0])
            >>> m.row.shape
            torch.Size([2])
        """

        def add() -> None:
            setattr(owner, name, cls(owner, name, materializer, dtype, device, persist))

        # In a module with versions of its structure, the attribute and its reference buffer are one edit.
        edit = getattr(owner, "_edit_together", None)
        if isinstance(owner, nn.Module) and edit is not None and name.isidentifier():
            edit(f"_{name}_ref", add)
        else:
            add()

    # -- attributes and value ----------------------------------------------------------------------------------------

    @property
    def attributes(self) -> VirtualTensorAttributes:
        """Names of the attributes added to the owner."""
        return VirtualTensorAttributes(self._ref)

    @property
    def name(self) -> str:
        """Name of the attribute."""
        return self._name

    @property
    def materializer(self) -> Materializer:
        """The name of the owner's method, or the function, that computes the value."""
        return self._materializer

    @property
    def owner(self) -> nn.Module | None:
        """The module that owns this attribute, or None if it no longer exists."""
        return self._owner()

    @property
    def persist(self) -> bool:
        """Whether the reference buffer is part of the owner's state dict."""
        return self._persist

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the reference tensor; set it to convert the value."""
        return self._reference().dtype

    @dtype.setter
    def dtype(self, value: torch.dtype) -> None:
        self.to(dtype=value)

    @property
    def device(self) -> torch.device:
        """Device of the reference tensor; set it to move the value."""
        return self._reference().device

    @device.setter
    def device(self, value: torch.device) -> None:
        self.to(device=value)

    def to(self, *args: Any, **kwargs: Any) -> None:
        """Convert the reference tensor, and so the value, with the arguments of `torch.Tensor.to`."""
        reference = self._reference()
        try:
            converted = reference.to(*args, **kwargs)
        except NotImplementedError:
            # Torch cannot copy off the meta device; the reference is empty, so a new one replaces it.
            converted = torch.empty(0, dtype=reference.dtype, device="cpu").to(*args, **kwargs)
        setattr(self._alive(), self._ref, converted)

    @property
    def value(self) -> Any:
        """The value, computed from the current sources and cast to the dtype and device of the reference.

        Raises:
            RuntimeError: If the owner no longer exists or the computation fails for a missing attribute.
            RecursionError: If the value depends on itself.
            TypeError: If the materializer returns something else than a tensor.
        """
        owner = self._alive()
        if torch.compiler.is_compiling():
            return self._materialize(owner)
        if not scopes:
            return compute(owner, self._token, self._name, self._materialize)
        return reuse(owner, self._token, self._name, self._materialize)

    def _materialize(self, owner: nn.Module) -> Any:
        reference = self._reference()
        materializer = self._materializer
        if isinstance(materializer, str):
            value = getattr(owner, materializer)(reference.dtype, reference.device)
        else:
            value = materializer(owner, reference.dtype, reference.device)
        if not isinstance(value, (torch.Tensor, Tensor)):
            return value  # `compute` raises TypeError for it
        return value.to(dtype=reference.dtype, device=reference.device)

    def _reference(self) -> torch.Tensor:
        owner = self._alive()
        reference = getattr(owner, self._ref, None)
        if reference is None:
            raise RuntimeError(f"{type(owner).__name__} has lost {self._ref!r}; create {self._name!r} again")
        return reference  # type: ignore[no-any-return]

    def _alive(self) -> nn.Module:
        owner = self._owner()
        if owner is None:
            raise RuntimeError(f"the module that owned the virtual tensor {self._name!r} no longer exists")
        return owner

    # -- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "VirtualTensor":
        owner = self._owner()
        heir = None if owner is None else memo.get(id(owner))
        if heir is None:
            # Copied without its owner, it stays an attribute of that owner.
            return self
        twin = memo[id(self)] = self.rebind(heir)
        twin._materializer = copy.deepcopy(self._materializer, memo)
        return twin

    def rebind(self, owner: nn.Module, materializer: Materializer | None = None) -> "VirtualTensor":
        """Return the virtual tensor of a copy of the owner that has its reference buffer already.

        Args:
            owner: The copy.
            materializer: Computes its value; None for this one's materializer.

        Example:
            >>> import copy
            >>> import torch
            >>> from moduli.nn import VirtualTensor
            >>> m = torch.nn.Linear(2, 1)
            >>> VirtualTensor.create(m, "row", lambda module, dtype, device: module.weight[0])
            >>> twin = copy.copy(m)
            >>> twin.row = m.row.rebind(twin)
            >>> m.row.owner is m, twin.row.owner is twin
            (True, True)
        """
        twin = object.__new__(type(self))
        twin._bind(owner, self._name, self._materializer if materializer is None else materializer, self._persist)
        return twin

    def __copy__(self) -> "VirtualTensor":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self._alive(), self._name, self._materializer, self._persist)
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[nn.Module, str, Materializer, bool]) -> None:
        self._bind(*state)

    # -- use in expressions ----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_values(args), **_values(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        # An AttributeError raised inside a property of this class also ends here; reading `value` would recurse.
        if name.startswith("_") or hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value, name)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value.__array__(*args, **kwargs)

    def __repr__(self) -> str:
        owner = self._owner()
        if owner is None:
            return f"VirtualTensor({self._name!r}, owner gone)"
        reference = self._reference()
        return f"VirtualTensor({self._name!r} of {type(owner).__name__}, {reference.dtype}, {reference.device})"

    def __hash__(self) -> int:
        return id(self)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: VirtualTensor, *args: Any) -> Any:
        return getattr(self.value, name)(*_values(args))

    operate.__name__ = name
    return operate


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert", "float", "int", "complex", "index", "bool")
_CONTAINER = ("getitem", "contains", "len", "iter")
for _name in (*_BINARY, *(f"r{_binary}" for _binary in _BINARY), *_COMPARISONS, *_UNARY, *_CONTAINER):
    setattr(VirtualTensor, f"__{_name}__", _operator(f"__{_name}__"))


def _values(tree: Any) -> Any:
    """Return the arguments of a function with virtual tensors, at any depth, replaced by their values."""
    if isinstance(tree, VirtualTensor):
        return tree.value
    if type(tree) in (list, tuple):
        return type(tree)([_values(item) for item in tree])
    if type(tree) is dict:
        return {key: _values(item) for key, item in tree.items()}
    return tree


def replicate(owner: nn.Module) -> Any:
    """Return a replica for `DataParallel` whose virtual tensors read the replica."""
    replica: nn.Module = nn.Module._replicate_for_data_parallel(owner)  # type: ignore[no-untyped-call]
    for name, attribute in list(vars(replica).items()):
        if isinstance(attribute, VirtualTensor):
            replica.__dict__[name] = attribute.rebind(replica)
    return replica


class _Replicator:
    """The `_replicate_for_data_parallel` of a plain module with virtual tensors; torch has no other hook for replicas."""

    __slots__ = ("_owner",)

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self) -> Any:
        return replicate(cast(nn.Module, self._owner()))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Replicator":
        owner = self._owner()
        return _Replicator(cast(nn.Module, memo.get(id(owner), owner)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Replicator, (self._owner(),)


# The token of the virtual tensor that registered each reference buffer, by module and buffer name. A converted buffer is
# another tensor object, so the buffer itself cannot carry the token.
_registry: Final[weakref.WeakKeyDictionary[nn.Module, dict[str, object]]] = weakref.WeakKeyDictionary()


def _release(owner_ref: weakref.ref[nn.Module], ref: str, token: object) -> None:
    owner = owner_ref()
    if owner is None or _registry.get(owner, {}).get(ref) is not token:
        return
    del _registry[owner][ref]
    if ref in owner._buffers:
        delattr(owner, ref)


def _restore_dtypes_on_load(owner: nn.Module) -> None:
    hooks = owner._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _restore_dtypes for hook in hooks):
        owner.register_load_state_dict_pre_hook(_restore_dtypes)  # type: ignore[no-untyped-call]


def _restore_dtypes(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Convert reference buffers to the saved dtypes: copying values into an empty buffer would not change its dtype."""
    for ref in _registry.get(module, {}):
        saved, reference = state_dict.get(prefix + ref), module._buffers.get(ref)
        if saved is not None and reference is not None and saved.dtype != reference.dtype:
            module._buffers[ref] = reference.to(saved.dtype)
