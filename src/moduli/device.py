"""`Device`, a logical device, and `DeviceBounded`, the base class of objects on one.

"gpu" names the accelerator of the machine, CUDA or MPS, so that a program or a checkpoint that says "gpu" works on both. A
device is resolved to a `torch.device` only when it is used, hence a
`Device("gpu")` can be named, compared, printed and stored on a machine without a gpu.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch

__all__ = ["Device", "DeviceBounded", "DeviceLike"]

_SPELLING = re.compile(r"([a-z]+)(?::(0|[1-9][0-9]*))?")

# Torch's names of the accelerators that are called "gpu" here.
_GPU_TYPES = ("cuda", "mps")

# Equality and hash must not change while a process runs, nor initialise CUDA (a later fork could not use it): so
# they depend on what this torch was built for, and only `torch_device()` queries the machine.
_FOR_APPLE = torch.backends.mps.is_built() and not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_GPU_TYPE = "mps" if _FOR_APPLE else "cuda"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Device:
    """A logical device for tensors: `"cpu"`, `"gpu"`, `"meta"`, or any other device type of torch.

    Two devices are equal if they name the same device: there is only one CPU, and a gpu without an index is `gpu:0`. A
    device also equals the `torch.device` that tensors on it report, in either order, and has the same hash, so
    both can be keys of one set or dict.

    Args:
        name: `"cpu"`, `"gpu"` (also spelled `"cuda"` or `"mps"`), `"meta"`, or another torch device type.
        index: Which one, where there are several. Ignored for `"cpu"` and `"meta"`, of which there is one.

    Raises:
        ValueError: If the name is no device, or the index is negative.
        TypeError: If the name is not a string, or the index not an integer.

    Example:
        >>> Device("gpu") == Device("gpu", 0), Device("cpu", 3) == Device("cpu")
        (True, True)
        >>> Device("cpu") == torch.device("cpu"), torch.device("cpu") == Device("cpu")
        (True, True)
        >>> print(Device("gpu", 1))
        gpu:1
    """

    name: str
    index: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _check_name(self.name))
        index = self.index
        if index is not None:
            if isinstance(index, bool) or not isinstance(index, int):
                raise TypeError(f"a device index is an integer or None, not {index!r}")
            if index < 0:
                raise ValueError(f"a device index counts from 0; Device({self.name!r}, {index}) has a negative one")
            if self.name in ("cpu", "meta"):
                object.__setattr__(self, "index", None)

    @classmethod
    def new(cls, device: "DeviceLike") -> "Device":
        """Return the device for a text, a `torch.device`, or a `Device` (returned unmodified).

        Args:
            device: `"cpu"`, `"gpu"`, `"gpu:1"`, `"cuda:0"`, `"mps"`, `"meta"`, a `torch.device` or a `Device`.

        Returns:
            The device.

        Raises:
            ValueError: If the text names no device.
            TypeError: If the argument is neither text nor a device.

        Example:
            >>> Device.new("gpu:1")
            Device('gpu', 1)
            >>> Device.new(torch.zeros(3).device)
            Device('cpu')
        """
        if isinstance(device, Device):
            return device
        if isinstance(device, torch.device):
            return cls(device.type, device.index)
        if not isinstance(device, str):
            raise TypeError(
                f"a device is written as text such as 'cpu' or 'gpu:1', or is a torch.device or a Device; "
                f"got {device!r} of type {type(device).__name__}"
            )
        spelling = _SPELLING.fullmatch(device)
        if spelling is None:
            raise ValueError(
                f"{device!r} does not spell a device; write 'cpu', 'gpu', 'gpu:1', 'cuda:0', 'mps' or 'meta'"
            )
        name, index = spelling.groups()
        return cls(name, None if index is None else int(index))

    def torch_device(self) -> torch.device:
        """Resolve to the `torch.device` of this machine: for `"gpu"`, CUDA if there is one, otherwise MPS.

        Raises:
            RuntimeError: If this machine has no gpu, or no gpu of that index.

        Example:
            >>> Device("cpu").torch_device()
            device(type='cpu')
        """
        if self.name != "gpu":
            return self._canonical()
        if torch.cuda.is_available():
            kind, count = "cuda", torch.cuda.device_count()
        elif torch.backends.mps.is_available():
            kind, count = "mps", 1
        else:
            raise RuntimeError(
                f"{self} was asked for, but torch {torch.__version__} finds neither CUDA nor MPS on this machine; "
                "use Device('cpu'), or install a torch build for your accelerator and check its driver"
            )
        index = self.index or 0
        if index >= count:
            raise RuntimeError(
                f"{self} was asked for, but this machine has {count} {kind} device{'s' if count > 1 else ''}; "
                f"the highest index is {count - 1}"
            )
        return torch.device(kind, index)

    def _canonical(self) -> torch.device:
        """Return the one `torch.device` that this device equals, which tensors on it report."""
        if self.name == "gpu":
            return torch.device(_GPU_TYPE, self.index or 0)
        if self.name in ("cpu", "meta"):
            return torch.device(self.name)
        return torch.device(self.name, self.index or 0)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Device):
            return self.name == other.name and (self.index or 0) == (other.index or 0)
        if isinstance(other, torch.device):
            return self._canonical() == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._canonical())

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}:{self.index}"

    def __repr__(self) -> str:
        return f"Device({self.name!r})" if self.index is None else f"Device({self.name!r}, {self.index})"


DeviceLike: TypeAlias = Device | torch.device | str
"""Whatever `Device.new` accepts: a `Device`, a `torch.device`, or text such as `"gpu:1"`."""


def _check_name(name: object) -> str:
    """Return the normalised name of a device, or raise."""
    if not isinstance(name, str):
        raise TypeError(f"a device name is text such as 'cpu' or 'gpu', not {name!r}; Device.new() takes other forms")
    if name in ("cpu", "gpu", "meta"):
        return name
    if name in _GPU_TYPES:
        return "gpu"
    if ":" in name:
        raise ValueError(f"a device name has no index in it; write Device.new({name!r}) instead of Device({name!r})")
    try:
        return torch.device(name).type
    except RuntimeError as error:
        raise ValueError(
            f"{name!r} is not a device; use 'cpu', 'gpu' (CUDA or MPS), 'meta', or a device type that torch knows"
        ) from error


class DeviceBounded(ABC):
    """The base class of objects that are on one device and can be moved to another.

    A subclass defines `device` and `to_device`; `cpu` and `gpu` call the latter. Values return the moved copy; containers
    that torch moves in place, such as modules, return themselves.
    List it before `torch.nn.Module` among the bases, otherwise torch's own `cpu` is used.

    Example:
        >>> class Reading(DeviceBounded):
        ...     def __init__(self, data):
        ...         self.data = data
        ...     @property
        ...     def device(self):
        ...         return Device.new(self.data.device)
        ...     def to_device(self, device):
        ...         return Reading(self.data.to(Device.new(device).torch_device()))
        >>> Reading(torch.zeros(2, device="meta")).device
        Device('meta')
        >>> Reading(torch.zeros(2)).cpu().device
        Device('cpu')
    """

    __slots__ = ()

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device on which this object is."""

    @abstractmethod
    def to_device(self, device: DeviceLike) -> Self:
        """Move to a device and return the moved object.

        Args:
            device: Where to: a `Device`, a `torch.device`, or text such as `"gpu:1"`.
        """

    def cpu(self) -> Self:
        """Move to the CPU."""
        return self.to_device(Device("cpu"))

    def gpu(self, index: int | None = None) -> Self:
        """Move to a gpu.

        Args:
            index: Which gpu; None is the one torch currently uses by default.

        Raises:
            RuntimeError: If this machine has no such gpu.
        """
        if index is None and torch.cuda.is_available():
            index = torch.cuda.current_device()
        return self.to_device(Device("gpu", index))
