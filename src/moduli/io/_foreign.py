"""Files that others wrote with `torch.save`: state dicts, read by torch's reader that builds nothing but tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loading import allow_labels
from ._errors import DamagedFileError
from ._replace import PathLike

# Neither can be the length of a header: they would stand for more than 2**40 bytes.
_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF"


def is_torch_file(path: PathLike) -> bool:
    """Whether a file was written by `torch.save`, by its first bytes."""
    with open(path, "rb") as file:
        start = file.read(8)
    return (start[:4] == _ZIP and start[5:] != b"\0\0\0") or start == _OLD


def read_torch_file(path: PathLike) -> Mapping[str, Any]:
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
    if (
        "state_dict" in found
        and not isinstance(found["state_dict"], Tensor)
        and isinstance(found["state_dict"], Mapping)
    ):
        found = found["state_dict"]
    for name, value in found.items():
        if not isinstance(value, Tensor) and name.rpartition(".")[2] != "_extra_state":
            raise DamagedFileError(f"{str(path)!r} is no state dict: {name!r} is a {type(value).__name__}")
    return found
