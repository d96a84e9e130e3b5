"""Files that others wrote with `torch.save`: state dicts, read by torch's reader that builds nothing but tensors."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loading import allow_labels
from ._errors import DamagedFileError
from ._module import collect
from ._read import Reader
from ._replace import PathLike
from ._tree import Tensors

# Neither can be the length of a header: they would stand for more than 2**40 bytes.
_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF"


def is_torch_file(path: PathLike) -> bool:
    """Whether a file was written by `torch.save`, by its first bytes."""
    with open(path, "rb") as file:
        start = file.read(8)
    return (start[:4] == _ZIP and start[5:] != b"\0\0\0") or start == _OLD


class TorchFile(Reader):
    """A file that `torch.save` wrote, seen as a checkpoint with a module."""

    def __init__(self, path: PathLike) -> None:
        self.path, self.size = os.fspath(path), os.path.getsize(path)
        tensors = Tensors()
        found, content = collect(_read_state(path), tensors)
        self.content, self.slots = {"module": content}, {**found, **tensors.found}

    def checksums(self) -> None:
        """There are none."""
        return

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self.tensor(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.tensor(name).shape)

    def tensor(self, name: str) -> Tensor:
        """A tensor, in memory."""
        found: Tensor = self.slot(name)
        return found

    copy = tensor


def _read_state(path: PathLike) -> Mapping[str, Any]:
    """The state dict in a file that `torch.save` wrote.

    Raises:
        DamagedFileError: If there is anything in it but tensors and plain values, or it is no state dict.
    """
    allow_labels()
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader fails in many ways on files that are damaged
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DamagedFileError(f"{str(path)!r} cannot be read with weights_only=True: {first}") from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise DamagedFileError(f"{str(path)!r} holds a {type(found).__name__}, not a state dict")
    inner = found.get("state_dict")
    state: Mapping[str, Any] = inner if isinstance(inner, Mapping) else found
    for name, value in state.items():
        if not isinstance(value, Tensor) and name.rpartition(".")[2] != "_extra_state":
            raise DamagedFileError(f"{str(path)!r} is no state dict: {name!r} is a {type(value).__name__}")
    return state
