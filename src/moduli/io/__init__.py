"""Checkpoints that lose nothing and run nothing."""

from ._errors import CheckpointError, DamagedFileError
from ._load import Contents, Loaded, load, read
from ._save import save

__all__ = ["save", "load", "read", "Loaded", "Contents", "CheckpointError", "DamagedFileError"]
