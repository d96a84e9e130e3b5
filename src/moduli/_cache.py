"""Where files that can be made again are stored between programs."""

import os
from pathlib import Path


def find_cache() -> Path:
    """Return moduli's folder in the user's cache directory: `XDG_CACHE_HOME` if it is absolute, otherwise `~/.cache`.

    It is not made here, and relative if the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "moduli"
