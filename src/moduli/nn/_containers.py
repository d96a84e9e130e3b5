"""TensorList and TensorDict: labelled tensors by position and by key, owned by a module."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, overload

from moduli.labels import Tensor

from ._module import Module
from ._ownership import check_name, drop, keep


class _Container(Module):
    """A module that holds nothing but labelled tensors, all parameters or all buffers."""

    def __init__(self, nograd: bool) -> None:
        super().__init__()
        self._nograd = nograd

    # Modules compare by identity, unlike sequences and mappings.
    __hash__ = Module.__hash__
    __eq__ = object.__eq__

    def _put(self, key: str, value: Any) -> None:
        # Not by `setattr`: a key may be the name of a method.
        keep(self, key, _check_value(self, value), self._nograd, fresh=True)

    def _get(self, key: str) -> Tensor:
        return self.__getattr__(key)  # type: ignore[no-any-return]


class TensorList(_Container, MutableSequence[Tensor]):
    """A list of labelled tensors that a module owns, each a parameter of its own.

    It behaves as a Python list does; tensors are copied when they are put in, and reading one gives a view of the live
    storage. A plain list of tensors assigned to a module stays a plain list, and nothing in it is trained.

    Args:
        tensors: The labelled tensors.
        nograd: Whether to keep them as buffers instead.

    Raises:
        TypeError: If something else than a labelled tensor is put in.

    Example:
        >>> import torch
        >>> from moduli.labels import Space, Tensor
        >>> from moduli.nn import Module, TensorList
        >>> m = Module()
        >>> m.layers = TensorList(Tensor(torch.full((2,), float(i)), (Space(2),)) for i in range(3))
        >>> [name for name, _ in m.named_parameters()]
        ['layers.tensor:0', 'layers.tensor:1', 'layers.tensor:2']
        >>> m.layers.pop(0).data.tolist(), [t.data.tolist() for t in m.layers]
        ([0.0, 0.0], [[1.0, 1.0], [2.0, 2.0]])
    """

    def __init__(self, tensors: Iterable[Tensor] = (), nograd: bool = False) -> None:
        super().__init__(nograd)
        self.extend(tensors)

    def __len__(self) -> int:
        return len(self._labelled)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self._get(str(at)) for at in range(*index.indices(len(self)))]
        return self._get(str(self._check_position(index)))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            tensors = list(self)
            tensors[index] = [_check_value(self, tensor) for tensor in value]
            self._fill(tensors)
        else:
            self._put(str(self._check_position(index)), value)

    def __delitem__(self, index: int | slice) -> None:
        tensors = list(self)
        del tensors[index]
        self._fill(tensors)

    def extend(self, values: Iterable[Tensor]) -> None:
        """Append copies of several tensors; all of them or none."""
        for value in [_check_value(self, value) for value in values]:
            self.append(value)

    def insert(self, index: int, value: Tensor) -> None:
        """Insert a copy of a tensor before a position."""
        if index >= len(self):
            self._put(str(len(self)), value)
        else:
            tensors = list(self)
            tensors.insert(index, _check_value(self, value))
            self._fill(tensors)

    def _check_position(self, index: int) -> int:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"there is no tensor {index} in a list of {size}")
        return index % size

    def _fill(self, tensors: list[Tensor]) -> None:
        registry: dict[str, Any] = self._buffers if self._nograd else self._parameters
        former = {id(tensor) for tensor in registry.values()}
        for key in list(self._labelled):
            drop(self, key)
        for at, tensor in enumerate(tensors):
            self._put(str(at), tensor)
            if id(tensor.data) in former:
                # A tensor that was in the list already keeps its parameter, so that an optimizer's state stays valid.
                registry[self._labelled[str(at)][0]] = tensor.data


class TensorDict(_Container, MutableMapping[str, Tensor]):
    """A dictionary of labelled tensors that a module owns, each a parameter of its own.

    It behaves as a Python dict does, with text as keys; tensors are copied when they are put in, and reading one gives a view
    of the live storage. A plain dict of tensors assigned to a module stays a plain dict, and nothing in it is trained.

    Args:
        tensors: The labelled tensors by key.
        nograd: Whether to keep them as buffers instead.

    Raises:
        TypeError: If something else than a labelled tensor is put in, or a key is not text.
        KeyError: If a key is empty or has a '.' in it, which torch uses to separate names.

    Example:
        >>> import torch
        >>> from moduli.labels import Space, Tensor
        >>> from moduli.nn import Module, TensorDict
        >>> m = Module()
        >>> m.tables = TensorDict({"red": Tensor(torch.zeros(2), (Space(2),))})
        >>> m.tables["blue"] = Tensor(torch.ones(2), (Space(2),))
        >>> list(m.tables), list(m.export_all())
        (['red', 'blue'], ['tables.red', 'tables.blue'])
    """

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = (), nograd: bool = False) -> None:
        super().__init__(nograd)
        self.update(tensors)

    def __len__(self) -> int:
        return len(self._labelled)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._labelled))

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._labelled:
            raise KeyError(f"there is no tensor {key!r}; the keys are {list(self._labelled)}")
        return self._get(key)

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._put(_check_key(key), value)

    def __delitem__(self, key: str) -> None:
        _ = self[key]  # raises KeyError for an unknown key
        drop(self, key)

    def update(self, other: Any = (), /, **named: Tensor) -> None:
        """Store copies of several tensors by key; all of them or none."""
        entries = dict(other, **named)
        for key, value in entries.items():
            _check_key(key)
            _check_value(self, value)
        for key, value in entries.items():
            self[key] = value


def _check_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the keys of a TensorDict are text, not {key!r}")
    check_name(key)
    return key


def _check_value(container: Module, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"a {type(container).__name__} holds labelled tensors, not a {type(value).__name__}; label it first, as in "
            "Tensor(data, dims)"
        )
    return value
