"""What goes wrong with checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or loaded; nothing has changed.

    The file that was there is still there, and no module, optimizer, population or random state was touched.

    Example:
        >>> import os, tempfile
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> with open(path, "wb") as file:
        ...     _ = file.write(b"not a checkpoint")
        >>> try:
        ...     io.read(path)
        ... except io.CheckpointError as error:
        ...     print(str(error).rpartition(": ")[2])
        its header would be 7521891404167278446 bytes long, and the file has 8 more
    """


class DamagedFileError(CheckpointError):
    """A file is truncated, corrupted, or no checkpoint at all, whatever it was to be loaded into.

    Example:
        >>> import moduli.io as io
        >>> issubclass(io.DamagedFileError, io.CheckpointError)
        True
    """


@contextmanager
def name_file(path: str) -> Iterator[None]:
    """A block in which every `DamagedFileError` that does not name the file says which it is."""
    try:
        yield
    except DamagedFileError as error:
        if path in str(error):
            raise
        raise DamagedFileError(f"{path!r} is not a checkpoint, or was damaged: {error}") from None
