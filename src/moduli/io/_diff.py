"""`diff`: the differences of two checkpoints."""

from pathlib import Path

from ..particles import ModelDiff
from ..particles import diff as diff_models
from ._basics import PathLike
from ._files import TensorFiles
from ._load import open_file
from ._read import TensorMapping


def diff(left: PathLike, right: PathLike) -> ModelDiff:
    """Compare the models in two checkpoints, tensor by tensor: names, shapes, dtypes, labels, and how far values are apart.

    Args:
        left: A checkpoint, a file written by `safetensors` or `torch.save`, a directory of shards, or its index.
        right: The same.

    Returns:
        The differences, as of `moduli.particles.diff`.

    Raises:
        OSError: If a file cannot be opened.
        CheckpointError: If it is damaged.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> folder = tempfile.mkdtemp()
        >>> paths = [os.path.join(folder, name) for name in ("a.safetensors", "b.safetensors")]
        >>> io.save(paths[0], {"w": torch.ones(2)})
        >>> io.save(paths[1], {"w": torch.ones(3)})
        >>> print(io.diff(*paths))
        name  change  left         right        distance  largest
        w     shape   (2) float32  (3) float32         0        0
        0 tensors equal
    """
    return diff_models(_open(left), _open(right))


def _open(path: PathLike) -> TensorMapping:
    place = Path(path)
    return TensorFiles(place) if place.is_dir() or place.suffix == ".json" else open_file(path)
