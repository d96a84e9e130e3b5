"""Trees of plain values and tensors as JSON, exactly and without pickle.

What `state_dict()` of optimizers, schedulers and scalers returns: dicts with any keys, lists, tuples, sets, numbers of any
size, strings, bytes, None, dtypes, devices, generators, NumPy arrays and numbers, and tensors. What JSON has stands for
itself; everything else is an object with one key that starts with "$". Tensors are written beside the tree, once each,
and the tree has their names.
"""

import random
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ._basics import CheckpointError, DamagedFileError
from ._safetensors import dtype_name

_SMALL: Final = 2**63
_PLAIN: Final = frozenset({str, bool, type(None)})
_DTYPES: Final = {dtype_name(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}
_NUMBERS: Final = "biufc"
_MAPPINGS: Final[dict[type, str]] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_LISTS: Final[dict[type, str]] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_KINDS: Final = {tag: kind for kind, tag in (_MAPPINGS | _LISTS).items()}


class Tensors:
    """The tensors of trees, with the names that they get in a file; names in `taken` are kept for others."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.taken: set[str] = set()
        self._names: dict[int, str] = {}

    def add(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """The name of a tensor; the same one if it was there before."""
        name = self._names.get(id(tensor))
        if name is None:
            name = "/".join(map(str, path)).encode("utf-8", "replace").decode()
            while name in self.taken:
                name += "'"
            self.taken.add(name)
            self._names[id(tensor)] = name
            # Kept, so that its id stays its own.
            self.found[name] = tensor
        return name


# -- to JSON -----------------------------------------------------------------------------------------------------------


def encode(value: Any, path: tuple[Any, ...], tensors: Tensors) -> Any:
    """A tree as JSON.

    Args:
        value: The tree.
        path: Where it is, for the names of tensors and for errors.
        tensors: Where tensors go.

    Raises:
        CheckpointError: If something in it cannot be written, or it contains itself.
    """
    try:
        return _encode(value, path, tensors)
    except RecursionError:
        where = "/".join(map(str, path))
        raise CheckpointError(f"{where} is nested too deeply, or contains itself; it cannot be saved") from None


def _encode(value: Any, path: tuple[Any, ...], tensors: Tensors) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -_SMALL <= value < _SMALL else {"$int": hex(value)}
    if kind is float:
        return _float(value)
    if kind is list:
        return _items(value, path, tensors)
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(each, (*path, key), tensors) for key, each in value.items()}
    if kind in _MAPPINGS:
        keys = [_encode(key, (*path, "key"), tensors) for key in value]
        values = [_encode(each, (*path, key), tensors) for key, each in value.items()]
        return {_MAPPINGS[kind]: [list(pair) for pair in zip(keys, values, strict=True)]}
    if kind in _LISTS:
        return {_LISTS[kind]: _items(value, path, tensors)}
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, path, tensors)
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, Tensor):
        return {"$tensor": tensors.add(value, path)}
    if is_stateful(value):
        return {"$object": [class_name(value), _encode(value.state_dict(), path, tensors)]}
    raise CheckpointError(
        f"{'/'.join(map(str, path))} is a {class_name(value)}, which cannot be saved without pickle; use numbers, strings, "
        "tensors, and lists, tuples, sets and dicts of them, module= for modules, or an object with state_dict() in extra="
    )


def is_stateful(value: Any) -> bool:
    """Whether an object is saved by its state dict. Modules are not: there is more to them."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, nn.Module) and all(map(callable, methods))


def class_name(value: object) -> str:
    """The full name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _float(value: float) -> Any:
    # Not a number has many bit patterns, and JSON has no infinity.
    return value if value - value == 0 else {"$float": struct.pack(">d", value).hex()}


def _items(value: Any, path: tuple[Any, ...], tensors: Tensors) -> list[Any]:
    return [_encode(each, (*path, at), tensors) for at, each in enumerate(value)]


def _array(value: Any, path: tuple[Any, ...], tensors: Tensors) -> Any:
    try:
        tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    except TypeError:
        where = "/".join(map(str, path))
        raise CheckpointError(f"{where} is an array of {value.dtype}, which files do not have; convert it") from None
    return {"$array": [value.dtype.str, tensors.add(tensor, path)]}


_ENCODERS: Final[dict[type, Callable[[Any, tuple[Any, ...], Tensors], Any]]] = {
    deque: lambda value, path, tensors: {"$deque": [value.maxlen, _items(value, path, tensors)]},
    complex: lambda value, path, tensors: {"$complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value, path, tensors: {"$bytes": value.hex()},
    torch.Size: lambda value, path, tensors: {"$size": list(value)},
    torch.dtype: lambda value, path, tensors: {"$dtype": dtype_name(value)},
    torch.device: lambda value, path, tensors: {"$device": str(value)},
    torch.Generator: lambda value, path, to: {"$generator": [str(value.device), to.add(value.get_state(), path)]},
    np.ndarray: _array,
}


# -- and back ----------------------------------------------------------------------------------------------------------

Read: TypeAlias = Callable[[str], Tensor]


def decode(node: Any, read: Read) -> Any:
    """The tree that JSON stands for.

    Args:
        node: The JSON.
        read: Gives the tensor of a name.

    Raises:
        DamagedFileError: If it stands for none.
    """
    try:
        return _decode(node, read)
    except RecursionError:
        raise DamagedFileError("a tree in it is nested too deeply") from None
    except Exception as error:  # whatever torch, NumPy and Python say to what is no value
        if isinstance(error, CheckpointError):
            raise
        raise DamagedFileError(f"a tree in it stands for no value: {error}") from error


def _decode(node: Any, read: Read) -> Any:
    kind = type(node)
    if kind is list:
        return [_decode(each, read) for each in node]
    if kind is not dict:
        return node
    if len(node) == 1:
        ((tag, body),) = node.items()
        if tag.startswith("$"):
            if tag in _KINDS:
                kind, items = _KINDS[tag], [_decode(each, read) for each in body]
                return kind(dict(items) if kind in _MAPPINGS else items)
            decoder = _DECODERS.get(tag)
            if decoder is None:
                raise DamagedFileError(f"a tree in it has a value of the unknown kind {tag!r}")
            return decoder(body, read)
    if any(key.startswith("$") for key in node):
        raise DamagedFileError("a tree in it has a value of two kinds")
    return {key: _decode(each, read) for key, each in node.items()}


def _decode_generator(body: Any, read: Read) -> torch.Generator:
    device, name = body
    generator = torch.Generator(device)
    generator.set_state(read(name))
    return generator


def _decode_array(body: Any, read: Read) -> Any:
    code, name = body
    dtype, found = _numpy_dtype(code), read(name).numpy()
    if found.dtype != dtype.newbyteorder("="):
        raise TypeError(f"{name!r} is {found.dtype}, not {dtype}")
    return found.astype(dtype)


def _numpy_dtype(code: Any) -> Any:
    dtype = np.dtype(code)
    if dtype.kind not in _NUMBERS:
        raise TypeError(f"{code!r} is no dtype of numbers")
    return dtype


_DECODERS: Final[dict[str, Callable[[Any, Read], Any]]] = {
    "$int": lambda body, read: int(body, 16),
    "$float": lambda body, read: struct.unpack(">d", bytes.fromhex(body))[0],
    "$deque": lambda body, read: deque(_decode(body[1], read), body[0]),
    "$complex": lambda body, read: complex(*_decode(body, read)),
    "$bytes": lambda body, read: bytes.fromhex(body),
    "$size": lambda body, read: torch.Size(body),
    "$dtype": lambda body, read: _DTYPES[body],
    "$device": lambda body, read: torch.device(body),
    "$generator": _decode_generator,
    "$array": _decode_array,
    "$scalar": lambda body, read: np.frombuffer(bytes.fromhex(body[1]), _numpy_dtype(body[0]))[0],
    "$tensor": lambda body, read: read(body),
    "$object": lambda body, read: _decode(body[1], read),
}


def tensor_names(node: Any, tags: Collection[str] = ("$tensor", "$generator", "$array")) -> list[str]:
    """The names of the tensors in a tree that is still JSON; what is malformed is skipped."""
    found: list[str] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if type(each) is list:
            waiting += each
        elif type(each) is dict:
            if len(each) == 1:
                ((tag, body),) = each.items()
                if tag in tags:
                    last = body[-1:] if type(body) is list else [body]
                    found += [name for name in last if type(name) is str]
            waiting += each.values()
    return found


# -- random states -----------------------------------------------------------------------------------------------------


def collect_random() -> dict[str, Any]:
    """The global random states as a tree."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "state": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def restore_random(tree: Any) -> None:
    """Make the global random states those of a tree."""
    torch.set_rng_state(tree["torch"])
    state = tree["python"]
    random.setstate((state["version"], tuple(state["state"].tolist()), state["gauss"]))
    np.random.set_state(tree["numpy"])
    if "cuda" in tree and torch.cuda.is_available() and len(tree["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(tree["cuda"])
