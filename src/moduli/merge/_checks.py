"""Whether values are as they have to be: asked at once on the host, and of a device in one question when all is merged."""

import cmath

import torch
from torch import Tensor

from .._torch import is_fake
from ..layout import is_sharded


class Checks:
    """What a merge asks about values.

    On the host it is answered at once. To ask a device is to wait for it, name by name, so that there every answer is "as it
    should be" at first, and `fail` says, once, whether that was true.

    Args:
        at_once: Whether to wait for every answer.
    """

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self._noted: list[Tensor] = []

    def defers(self, tensor: Tensor) -> bool:
        """Whether questions about a tensor are put off."""
        return not self.at_once and is_elsewhere(tensor) and not is_sharded(tensor)

    def are_finite(self, tensor: Tensor) -> bool:
        """Whether no entry is NaN or infinite."""
        if self.defers(tensor):
            return self._note(torch.isfinite(tensor).all())
        # A sum is one pass without a second tensor, and finite only if every term is; sums may overflow by themselves.
        return cmath.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())

    def are_equal(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tensors of one shape are equal."""
        return self._note((a == b).all()) if self.defers(b) else torch.equal(a, b)

    def are_nonnegative(self, tensor: Tensor) -> bool:
        """Whether no entry is below 0."""
        right = (tensor >= 0).all()
        return self._note(right) if self.defers(tensor) else bool(right)

    def fail(self) -> bool:
        """Whether an answer that was put off is no: the one number that is read from each device."""
        devices: dict[torch.device, list[Tensor]] = {}
        for right in self._noted:
            if not is_fake(right):
                devices.setdefault(right.device, []).append(right)
        return not all(bool(torch.stack(noted).all()) for noted in devices.values())

    def _note(self, right: Tensor) -> bool:
        self._noted.append(right)
        return True


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether a tensor lies on a device that has to be waited for."""
    return tensor.device.type not in ("cpu", "meta")
