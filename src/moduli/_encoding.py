"""The one encoding of nested values as plain data, exactly and without pickle.

Types that a medium supports are unmodified; any other value becomes a dictionary with one key that starts with "$", its tag.
There are two media: checkpoints (`io`: JSON, with the tensors stored separately under names) and state dicts (`optim`: what
`torch.load(weights_only=True)` reads, with the tensors in place). They share the tags and the format of the values under them.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Path: TypeAlias = tuple[Any, ...]
Take: TypeAlias = Callable[[Any], Tensor]

TENSOR: Final = "$tensor"
_INT64: Final = 2**63
_NUMBERS: Final = "biufc"
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


class Medium(ABC):
    """A target of the encoding: which types it holds, and how it stores a tensor.

    Attributes:
        leaves: Types of values that it holds unmodified.
        keys: Types that keys of its dictionaries may have.
        keeps_tuples: Whether it distinguishes tuples from lists.
        kinds: Its tagged kinds, by type.
    """

    leaves: ClassVar[frozenset[type]]
    keys: ClassVar[frozenset[type]]
    keeps_tuples: ClassVar[bool]
    kinds: ClassVar[Mapping[type, TaggedKind]]

    @abstractmethod
    def put(self, tensor: Tensor, path: Path) -> Any:
        """Store a tensor, and return the tensor or the name under which it is stored."""

    @abstractmethod
    def encode_other(self, value: Any, path: Path) -> Any:
        """Encode a value of an unknown type, or raise."""

    @abstractmethod
    def make_error(self, path: Path, text: str) -> Exception:
        """Return the error that says that the value at a path can't be encoded."""


class TaggedKind(NamedTuple):
    """The tag of one type of values, with the functions that encode and decode them.

    Attributes:
        tag: The key under which an encoded value is stored.
        write: Encodes a value, from the value, its path and the medium.
        read: Decodes a value, from what `write` returned and the decoder.
    """

    tag: str
    write: Callable[[Any, Path, Medium], Any]
    read: Callable[[Any, Decoder], Any]


def encode(value: Any, path: Path, medium: Medium) -> Any:
    """Return a value as plain data.

    Args:
        value: The value.
        path: The keys and indices that lead to it, for the names of tensors and for errors.
        medium: The target of the encoding.

    Raises:
        Exception: The medium's error, if something in it can't be encoded, or if it contains itself.
    """
    try:
        return _encode(value, path, medium)
    except RecursionError:
        raise medium.make_error(path, "is nested too deeply, or contains itself; it cannot be saved") from None


def _encode(value: Any, path: Path, medium: Medium) -> Any:
    cls = type(value)
    if cls in medium.leaves:
        return value
    if cls is list:
        return _encode_items(value, path, medium)
    if cls is tuple and medium.keeps_tuples:
        return tuple(_encode_items(value, path, medium))
    if cls is dict and all(type(key) in medium.keys and not _is_tag(key) for key in value):
        return {key: _encode(item, (*path, key), medium) for key, item in value.items()}
    if cls is int:
        return value if -_INT64 <= value < _INT64 else {"$int": hex(value)}
    if cls is float:
        return _encode_float(value)
    return _encode_object(value, path, medium)


def _encode_object(value: Any, path: Path, medium: Medium) -> Any:
    if isinstance(value, Tensor):
        stored = medium.put(value, path)
        return stored if isinstance(stored, Tensor) else {TENSOR: stored}
    kind = medium.kinds.get(type(value))
    if kind is not None:
        return {kind.tag: kind.write(value, path, medium)}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
    return medium.encode_other(value, path)


def _is_tag(key: Any) -> bool:
    return type(key) is str and key.startswith("$")


def _encode_items(value: Any, path: Path, medium: Medium) -> list[Any]:
    return [_encode(item, (*path, i), medium) for i, item in enumerate(value)]


def _encode_pairs(value: Any, path: Path, medium: Medium) -> list[Any]:
    pairs = []
    for key, item in value.items():
        if isinstance(key, Tensor):
            raise medium.make_error(
                path, "has a tensor as a key, which would be another one when it is read; use names"
            )
        pairs.append([_encode(key, (*path, "key"), medium), _encode(item, (*path, key), medium)])
    return pairs


def _encode_float(value: float) -> Any:
    # NaN has many bit patterns, and JSON has no infinity.
    return value if value - value == 0 else {"$float": struct.pack(">d", value).hex()}


def _encode_complex(value: complex, path: Path, medium: Medium) -> list[Any]:
    return [_encode_float(value.real), _encode_float(value.imag)]


def _encode_deque(value: deque[Any], path: Path, medium: Medium) -> list[Any]:
    return [value.maxlen, _encode_items(value, path, medium)]


def _encode_generator(value: torch.Generator, path: Path, medium: Medium) -> list[Any]:
    return [str(value.device), medium.put(value.get_state(), path)]


def _encode_array(value: Any, path: Path, medium: Medium) -> Any:
    try:
        tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise medium.make_error(path, f"is an array of {value.dtype}, which files do not have; convert it") from None
    return [value.dtype.str, medium.put(tensor, path)]


class Decoder:
    """Decodes what `encode` returned.

    Args:
        take: Returns a tensor for what `Medium.put` returned, the tensor itself or its name in a file.
        kinds: The tagged kinds to decode, by type.
    """

    def __init__(self, take: Take, kinds: Mapping[type, TaggedKind]) -> None:
        self.take = take
        self._readers = {kind.tag: kind.read for kind in kinds.values()} | _READERS

    def decode(self, node: Any) -> Any:
        """Return the value that plain data encodes; raise ValueError if a tag is unknown or there are two."""
        if isinstance(node, Tensor):
            return self.take(node)
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if isinstance(node, tuple):
            return tuple(self.decode(item) for item in node)
        if not isinstance(node, dict):
            return node
        tag = next(filter(_is_tag, node), None)
        if tag is None:
            return {key: self.decode(item) for key, item in node.items()}
        if len(node) > 1:
            raise ValueError("there is a value of two kinds")
        if tag not in self._readers:
            raise ValueError(f"there is a value of the unknown kind {tag[:80]!r}")
        return self._readers[tag](node[tag], self)


def _decode_pairs(body: Any, decoder: Decoder) -> dict[Any, Any]:
    return dict(decoder.decode(pair) for pair in body)


def _decode_generator(body: Any, decoder: Decoder) -> torch.Generator:
    device, state = body
    generator = torch.Generator(device)
    generator.set_state(decoder.take(state).cpu())
    return generator


def _decode_array(body: Any, decoder: Decoder) -> Any:
    code, stored = body
    dtype, array = _find_numpy_dtype(code), decoder.take(stored).cpu().numpy()
    if array.dtype != dtype.newbyteorder("="):
        raise TypeError(f"an array is {array.dtype}, not {dtype}")
    return array.astype(dtype)


def _find_numpy_dtype(code: Any) -> Any:
    dtype = np.dtype(code)
    if dtype.kind not in _NUMBERS:
        raise TypeError(f"{str(code)[:80]!r} is no dtype of numbers")
    return dtype


def _encode_text(value: Any, path: Path, medium: Medium) -> str:
    return str(value).removeprefix("torch.")


KINDS: Final[Mapping[type, TaggedKind]] = {
    dict: TaggedKind("$dict", _encode_pairs, _decode_pairs),
    OrderedDict: TaggedKind("$ordered", _encode_pairs, lambda body, to: OrderedDict(_decode_pairs(body, to))),
    Counter: TaggedKind("$counter", _encode_pairs, lambda body, to: Counter(_decode_pairs(body, to))),
    tuple: TaggedKind("$tuple", _encode_items, lambda body, to: tuple(to.decode(body))),
    set: TaggedKind("$set", _encode_items, lambda body, to: set(to.decode(body))),
    frozenset: TaggedKind("$frozenset", _encode_items, lambda body, to: frozenset(to.decode(body))),
    deque: TaggedKind("$deque", _encode_deque, lambda body, to: deque(to.decode(body[1]), body[0])),
    complex: TaggedKind("$complex", _encode_complex, lambda body, to: complex(*to.decode(body))),
    bytes: TaggedKind("$bytes", lambda value, path, medium: value.hex(), lambda body, to: bytes.fromhex(body)),
    torch.Size: TaggedKind("$size", lambda value, path, medium: list(value), lambda body, to: torch.Size(body)),
    torch.dtype: TaggedKind("$dtype", _encode_text, lambda body, to: _DTYPES[body]),
    torch.device: TaggedKind("$device", _encode_text, lambda body, to: torch.device(body)),
    torch.Generator: TaggedKind("$generator", _encode_generator, _decode_generator),
    np.ndarray: TaggedKind("$array", _encode_array, _decode_array),
}
"""The kinds that every medium has."""

_READERS: Final[dict[str, Callable[[Any, Decoder], Any]]] = {
    "$int": lambda body, to: int(body, 16),
    "$float": lambda body, to: struct.unpack(">d", bytes.fromhex(body))[0],
    "$scalar": lambda body, to: np.frombuffer(bytes.fromhex(body[1]), _find_numpy_dtype(body[0]))[0],
    TENSOR: lambda body, to: to.take(body),
}
