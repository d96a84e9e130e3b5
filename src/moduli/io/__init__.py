"""Checkpoints: complete, without pickle, and written all or nothing.

The nouns, and what is built from them:

* A **checkpoint** is one safetensors file: the tensors of a module under their names, which any program can read, and
  everything else that an exact continuation of training needs: labels, ties, configurations, the version
  of the structure with its edits, the state of optimizer, population and scheduler, random states, and user data.
  `save` writes one, `load` loads it into existing objects, `read` returns it as state dicts, `inspect` describes
  its contents, and `diff` compares two.
* A `Checkpointer` writes them in a training loop, deletes all but the newest, and resumes.
* A `TensorFile` is a file as a mapping of tensors that are read when they are indexed, `TensorFiles` are the shards of a
  directory, and `merge_files` merges checkpoints with the recipes of `moduli.merge`, one tensor at a time. `merge_slices` and
  `merge_experts` combine layers, and `merge_recipe` executes a recipe of mergekit.

What holds for all of them:

* **All or nothing.** A file is written beside the old one, synced and renamed. A whole file is checked, each tensor by its
  checksum, before anything is changed; if an object raises, the others are restored.
* **No code.** Everything except tensors is JSON (`_tree`); nothing is unpickled, imported or called by name.
* **By name.** Parameters and their optimizer state are matched by name, through a `mapping` or the edits of the species
  if names have changed; unmatched names are listed in an error.
* **In place.** Saving reads tensors from their memory without a copy of the model, and loading writes into their memory.

A file that does not fit or is damaged raises `CheckpointError`; `DamagedFileError` is the kind that no object would fit.
"""

import typing as _typing

from ..layout import NameMap as NameMap
from ._basics import CheckpointError as CheckpointError
from ._basics import DamagedFileError as DamagedFileError
from ._checkpointer import Checkpointer as Checkpointer
from ._diff import diff as diff
from ._experts import merge_experts as merge_experts
from ._files import TensorFiles as TensorFiles
from ._files import parse_size as parse_size
from ._inspect import Description as Description
from ._inspect import TensorInfo as TensorInfo
from ._inspect import escape as escape
from ._inspect import inspect as inspect
from ._load import Contents as Contents
from ._load import Loaded as Loaded
from ._load import load as load
from ._load import read as read
from ._merge import RECIPES as RECIPES
from ._merge import merge_files as merge_files
from ._mergekit import MergeRecipe as MergeRecipe
from ._mergekit import merge_recipe as merge_recipe
from ._mergekit import read_recipe as read_recipe
from ._open import read_bytes as read_bytes
from ._read import TensorFile as TensorFile
from ._replace import make_directory as make_directory
from ._replace import write_bytes as write_bytes
from ._save import save as save
from ._slices import MergeSlice as MergeSlice
from ._slices import merge_slices as merge_slices

if not _typing.TYPE_CHECKING:  # type checkers take `import X as X` as public and reject a computed `__all__`
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
