"""Trees of plain values and tensors as JSON, exactly and without pickle.

State dicts of optimizers, schedulers and scalers consist of dicts with any keys, lists, tuples, sets, numbers of any
size, strings, bytes, None, dtypes, devices, generators, NumPy arrays and numbers, and tensors. Types that JSON has are written
unmodified; all others get a tag (`moduli._encoding`). Tensors are written beside the tree, once each, and the tree has
their names.
"""

import random
from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from .._encoding import KINDS, TENSOR, Decoder, Medium, Path, encode
from .._texts import cut
from ._basics import CheckpointError, DamagedFileError

_OBJECT: Final = "$object"


class Tensors(Medium):
    """The medium of encoding: JSON, and the tensors of its trees with their names in a file; names in `taken` are reserved."""

    leaves = frozenset({str, bool, type(None)})
    keys = frozenset({str})
    keeps_tuples = False
    kinds = KINDS

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.taken: set[str] = set()
        self._names: dict[int, str] = {}

    def put(self, tensor: Tensor, path: Path) -> str:
        """Return the name of a tensor; the same one if it was added before."""
        name = self._names.get(id(tensor))
        if name is None:
            name = "/".join(map(str, path)).encode("utf-8", "replace").decode()
            while name in self.taken:
                name += "'"
            self.taken.add(name)
            self._names[id(tensor)] = name
            # Stored, so that its id is not reused.
            self.found[name] = tensor
        return name

    def encode_other(self, value: Any, path: Path) -> Any:
        """Encode an object by its state dict."""
        if is_stateful(value):
            return {_OBJECT: [class_name(value), encode(value.state_dict(), path, self)]}
        raise self.make_error(
            path,
            f"is a {class_name(value)}, which cannot be saved without pickle; use numbers, strings, tensors, and lists, tuples, "
            "sets and dicts of them, module= for modules, or an object with state_dict() in extra=",
        )

    def make_error(self, path: Path, text: str) -> Exception:
        """Return a CheckpointError that names the path in the tree."""
        return CheckpointError(f"{'/'.join(map(str, path))} {text}")


def is_stateful(value: Any) -> bool:
    """Whether an object is saved by its state dict. Modules are not, because they have more than their state dict."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, nn.Module) and all(map(callable, methods))


def class_name(value: object) -> str:
    """Return the full name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


Read: TypeAlias = Callable[[str], Tensor]


class _TreeDecoder(Decoder):
    """A decoder that returns the state dicts of objects."""

    def __init__(self, read: Read) -> None:
        super().__init__(read, KINDS)
        self._readers[_OBJECT] = lambda body, to: to.decode(body[1])


def decode(node: Any, read: Read) -> Any:
    """Return the tree that JSON encodes.

    Args:
        node: The JSON.
        read: Returns the tensor of a name.

    Raises:
        DamagedFileError: If the JSON is malformed.
    """
    try:
        return _TreeDecoder(read).decode(node)
    except RecursionError:
        raise DamagedFileError("a tree in it is nested too deeply") from None
    except Exception as error:  # torch, NumPy and Python raise many kinds of errors for malformed values
        if isinstance(error, CheckpointError):
            raise
        raise DamagedFileError(f"a tree in it stands for no value: {cut(str(error), 500)}") from error


def tensor_names(node: Any, tags: Collection[str] = (TENSOR, "$generator", "$array")) -> list[str]:
    """Return the names of the tensors in an encoded tree; malformed parts are skipped."""
    names: list[str] = []
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
                    names += [name for name in last if type(name) is str]
            waiting += each.values()
    return names


# -- random states -----------------------------------------------------------------------------------------------------


def collect_random() -> dict[str, Any]:
    """Return the global random states as a tree."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "state": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random(tree: Any) -> None:
    """Set the global random states to those of a tree."""
    torch.set_rng_state(tree["torch"])
    state = tree["python"]
    random.setstate((state["version"], tuple(state["state"].tolist()), state["gauss"]))
    np.random.set_state(tree["numpy"])
    if "cuda" in tree and torch.cuda.is_available() and len(tree["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(tree["cuda"])
