"""The directory of files that are stored between programs and can be recomputed."""

import os
from pathlib import Path


def find_cache() -> Path:
    """Return moduli's folder in the user's cache directory: `XDG_CACHE_HOME` if it is absolute, otherwise `~/.cache`.

    The folder is not created. Its path is relative if the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "moduli"
