"""Writing tensors to a file, all or nothing.

They are written one after the other in pieces, each of which is copied first: the checksum is of the bytes that are in the
file, also if another thread goes on training meanwhile. Checksums are put into the header at the end.
"""

from collections.abc import Iterable
from typing import Final

from torch import Tensor

from ._checksum import BLOCK, Checksum
from ._dtypes import view_bytes
from ._errors import CheckpointError
from ._header import arrange, compose, seal
from ._replace import PathLike, replace_file

# In pieces as large as this, the system keeps files in large pages, which are mapped several times faster.
_CHUNK: Final = 4 * BLOCK
# Tensors smaller than this wait for each other.
_WAITING: Final = 1 << 18


def write_tensors(
    path: PathLike,
    tensors: Iterable[tuple[str, Tensor]],
    like: list[tuple[str, str, list[int]]],
    metadata: dict[str, str],
    *,
    checksums: bool = True,
    fsync: bool = True,
) -> None:
    """Write a safetensors file, all of it or nothing.

    Args:
        path: Where to. What is there already is replaced at the end, in one instant.
        tensors: Every name with its tensor, in any order. They are taken one at a time and not kept.
        like: Every name with the code and shape under which its tensor is stored, in the order of the header.
        metadata: Strings for the header.
        checksums: Whether each tensor gets a checksum.
        fsync: Whether to wait until the disk has everything before the old file is replaced.

    Raises:
        CheckpointError: If it cannot be written, or the tensors are not those that were announced. The old file is still
            there then.
    """
    slots = arrange(like)
    order = [name for name, _, _ in like]
    head, place = compose(slots, order, metadata, checksums)
    left = {slot.name: slot for slot in slots}
    sums = dict.fromkeys(left, 0)
    most = max((slot.end - slot.begin for slot in slots), default=0)
    copied = memoryview(bytearray(min(_CHUNK, most)))
    with replace_file(path, fsync) as descriptor, open(descriptor, "wb", _WAITING, closefd=False) as file:
        file.write(head)
        at = 0
        for name, tensor in tensors:
            slot = left.pop(name, None)
            if slot is None:
                raise CheckpointError(f"{name!r} was not announced, or comes twice; this is not a complete model")
            raw = view_bytes(tensor)
            if len(raw) != slot.end - slot.begin:
                raise CheckpointError(f"{name!r} has {len(raw)} bytes where {slot.end - slot.begin} are expected")
            if slot.begin != at:  # to seek is to write what is waiting
                file.seek(len(head) + slot.begin)
            at = slot.end
            checksum = Checksum(len(raw))
            for begin in range(0, len(raw), _CHUNK):
                piece = raw[begin : begin + _CHUNK]
                if checksums:
                    copied[: len(piece)] = piece
                    piece = copied[: len(piece)]
                    checksum.update(piece)
                file.write(piece)
            sums[name] = checksum.value
        if left:
            raise CheckpointError(f"{sorted(left)[0]!r} is missing")
        seal(head, place, [sums[name] for name in order] if checksums else None)
        file.seek(0)
        file.write(head)
