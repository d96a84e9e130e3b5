"""Checkpoints that lose nothing and run nothing.

The nouns, and what is built from them:

* A **checkpoint** is one safetensors file: the tensors of a module under their names, so that any program finds them, and
  beside them everything else that is needed to go on as if nothing had happened: labels, ties, configurations, the version
  of the structure with its edits, the state of optimizer, population and scheduler, random states, and what the user
  adds. `save` writes one, `load` brings it into objects that are there, `read` gives it as state dicts, and `inspect` tells
  what is in it.
* A `Checkpointer` writes them in a training loop, keeps the newest, and resumes.
* A `TensorFile` is a file as a mapping of tensors that are read when they are asked for, `TensorFiles` are the shards of a
  directory, and `merge_files` merges checkpoints with the recipes of `moduli.merge`, one tensor at a time.

What holds for all of them:

* **All or nothing.** A file is written beside the old one, synced and renamed. A file is checked whole, each tensor by its
  checksum, before anything is changed; if an object refuses its part, the others are put back.
* **No code.** What is not a tensor is JSON (`_tree`); nothing is unpickled, imported or called by name.
* **By name.** Parameters and their optimizer state find each other by name, through a `mapping` or the edits of the species
  if names have changed; what finds nothing is listed and refused.
* **In place.** Saving writes tensors from where they are, and loading writes them to where they are.

A file that does not fit or is damaged raises `CheckpointError`; `DamagedFileError` is the kind that no object would fit.
"""

from ._checkpointer import Checkpointer
from ._errors import CheckpointError, DamagedFileError
from ._files import TensorFile, TensorFiles, parse_size
from ._inspect import Description, TensorInfo, escape, inspect
from ._load import Contents, Loaded, load, read
from ._match import NameMap
from ._merge import RECIPES, merge_files
from ._mergekit import MergeRecipe, merge_recipe, read_recipe
from ._replace import make_directory, write_bytes
from ._save import save

__all__ = [
    "save",
    "load",
    "read",
    "inspect",
    "Checkpointer",
    "TensorFile",
    "TensorFiles",
    "parse_size",
    "merge_files",
    "RECIPES",
    "merge_recipe",
    "read_recipe",
    "MergeRecipe",
    "escape",
    "write_bytes",
    "make_directory",
    "Loaded",
    "Contents",
    "Description",
    "TensorInfo",
    "NameMap",
    "CheckpointError",
    "DamagedFileError",
]
